//! Queue of posted messages. Messages posted up to the next operation or wait are carried out together.
//!
//! One thread at a time carries them out: the rank's own, the thread of its started collectives, or one that
//! waits for a request. It takes all queued messages, so that messages and collectives keep the order of
//! calls; other threads wait. A group carries messages out at its end, and no other thread does until then.

use crate::contract::{OperationId, Transfer};
use crate::os::sync::lock;
use crate::types::error::{Error, Result};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::ThreadId;

/// The messages of one rank's communicator.
#[derive(Default)]
pub(crate) struct PostedMessages {
    state: Mutex<State>,
    /// Signalled when no thread carries messages out any more.
    carried_out: Condvar,
    /// Whether some are not complete.
    are_pending: AtomicBool,
    /// Whether a `test` asked for messages to be carried out.
    are_wanted: AtomicBool,
}

#[derive(Default)]
struct State {
    queued: Vec<Transfer>,
    /// Number of the next id; of the first that nobody has taken; of the first that is not complete.
    next: usize,
    first_queued: usize,
    first_pending: usize,
    /// The thread that carries messages out, or has a group open in which it will.
    sender: Option<ThreadId>,
    /// Messages that wait for the end of the sender's group.
    grouped: Vec<Range<usize>>,
    failed: Vec<Failed>,
}

/// Messages that went together and failed.
struct Failed {
    ids: Range<usize>,
    /// How many of them have not been waited for yet.
    unsettled: usize,
    error: Error,
}

impl State {
    fn fail(&mut self, ids: Range<usize>, error: &Error) {
        self.failed.push(Failed { unsettled: ids.len(), ids, error: error.clone() });
    }
}

impl PostedMessages {
    /// Adds messages that are carried out together.
    pub fn post<const N: usize>(&self, transfers: [Transfer; N]) -> [OperationId; N] {
        let mut state = lock(&self.state);
        state.queued.extend(transfers);
        self.are_pending.store(true, Ordering::Release);
        let first = state.next;
        state.next += N;
        std::array::from_fn(|index| OperationId(first + index))
    }

    #[inline(always)]
    pub fn are_pending(&self) -> bool {
        self.are_pending.load(Ordering::Acquire)
    }

    /// Has a message carried out by the thread that moves requests along, unless somebody has taken it.
    pub fn want(&self, id: OperationId) {
        let state = lock(&self.state);
        if id.0 >= state.first_queued {
            self.are_wanted.store(true, Ordering::Release);
        }
    }

    pub fn are_wanted(&self) -> bool {
        self.are_wanted.load(Ordering::Acquire)
    }

    pub fn is_complete(&self, id: OperationId) -> bool {
        id.0 < lock(&self.state).first_pending
    }

    /// The right to carry messages out, when no other thread has it. `None` if this one has it already, for
    /// its group.
    pub fn carry(self: &Arc<Self>) -> Option<Carrying> {
        let me = std::thread::current().id();
        let mut state = lock(&self.state);
        while state.sender.is_some_and(|sender| sender != me) {
            state = self.carried_out.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let is_new = state.sender.replace(me).is_none();
        is_new.then(|| Carrying(self.clone()))
    }

    /// Takes the queued messages. The caller holds the right to carry them out.
    pub fn take(&self) -> (Vec<Transfer>, Range<usize>) {
        let mut state = lock(&self.state);
        self.are_wanted.store(false, Ordering::Release);
        let ids = state.first_queued..state.next;
        state.first_queued = state.next;
        (std::mem::take(&mut state.queued), ids)
    }

    /// Records that messages failed.
    pub fn fail(&self, ids: Range<usize>, error: &Error) {
        lock(&self.state).fail(ids, error);
    }

    /// Makes messages wait for the sender's group, and share its result.
    pub fn leave_to_group(&self, ids: Range<usize>) {
        lock(&self.state).grouped.push(ids);
    }

    /// The outcome of a complete message; asked once.
    pub fn settle(&self, id: OperationId) -> Result<()> {
        let mut state = lock(&self.state);
        let Some(index) = state.failed.iter().position(|failed| failed.ids.contains(&id.0)) else {
            return Ok(());
        };
        let failed = &mut state.failed[index];
        failed.unsettled -= 1;
        let error = failed.error.clone();
        if failed.unsettled == 0 {
            state.failed.swap_remove(index);
        }
        Err(error)
    }
}

/// The right to carry messages out. When it is dropped all that were taken are complete.
pub(crate) struct Carrying(Arc<PostedMessages>);

impl Carrying {
    /// The group has ended, and with it the messages in it.
    pub fn end_group(self, outcome: &Result<()>) {
        let mut state = lock(&self.0.state);
        for ids in std::mem::take(&mut state.grouped) {
            if let Err(error) = outcome {
                state.fail(ids, error);
            }
        }
    }
}

impl Drop for Carrying {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.first_pending = state.first_queued;
        state.sender = None;
        self.0.are_pending.store(!state.queued.is_empty(), Ordering::Release);
        drop(state);
        self.0.carried_out.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::Direction;
    use crate::types::dtype::DType;

    fn posted() -> (Arc<PostedMessages>, OperationId) {
        let messages = Arc::new(PostedMessages::default());
        let transfer = Transfer::host(Direction::Send(std::ptr::null()), 1, 0, DType::U8, 0);
        let [id] = messages.post([transfer]);
        (messages, id)
    }

    #[test]
    fn a_message_is_complete_when_whoever_took_it_says_so() {
        let (messages, id) = posted();
        let carrying = messages.carry().expect("nobody else has it");
        assert_eq!(messages.take().1, 0..1);
        assert!(messages.are_pending() && !messages.is_complete(id));
        messages.want(id);
        assert!(!messages.are_wanted(), "what is posted later is not meant");
        drop(carrying);
        assert!(!messages.are_pending() && messages.is_complete(id));
        messages.settle(id).unwrap();
    }

    #[test]
    fn messages_of_a_group_fare_as_it_does() {
        let (messages, id) = posted();
        let carrying = messages.carry().expect("nobody else has it");
        assert!(messages.carry().is_none(), "the group's own thread");
        let (_, ids) = messages.take();
        messages.leave_to_group(ids);
        assert!(!messages.is_complete(id));
        carrying.end_group(&Err(Error::Aborted { rank: 3 }));
        assert!(messages.is_complete(id));
        assert!(matches!(messages.settle(id), Err(Error::Aborted { rank: 3 })));
    }
}
