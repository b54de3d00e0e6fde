//! Operations that go on while the rank does something else: [`Request`].
//!
//! A request owns its buffers and returns them from [`wait`](Request::wait), so nothing can touch them in between. A
//! request that is forgotten leaks them.
//!
//! - Collectives run in the order in which they were started, and before any collective that is called later. The backend
//!   carries them out if it can, else a thread of the communicator (`worker.rs`).
//! - Messages are posted at once.
//! - What the backend carries out advances in every wait, and in a thread (`mover.rs`).
//! - A request is a future. Its first poll gives its messages to that thread, which wakes the task.

mod coalesced;
mod collectives;
mod maybe_dangling;
mod messages;
mod mover;
mod outcome;
mod plan;
mod prepared;
mod prepared_message;
mod queue;
mod sets;
#[cfg(test)]
mod tests;
mod worker;

pub(super) use outcome::Outcome;
pub use prepared::Prepared;
pub use prepared_message::PreparedMessage;
pub(crate) use queue::Requests;

use crate::os::RunInstant;
use crate::os::sync::lock;
use crate::types::error::{Error, Result};
use crate::types::op::CombineInOrder;
use crate::watch::Posted;
use crate::watch::deadline::Limited;
use maybe_dangling::MaybeDangling;
use mover::{Moving, PolledMessages};
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// An operation under way, and the buffers it uses.
#[doc(alias = "MPI_Request")]
#[must_use = "a request that is dropped before it is complete leaks its buffers"]
pub struct Request<B> {
    buffers: ManuallyDrop<MaybeDangling<B>>,
    /// Lives as long as the buffers.
    kept: ManuallyDrop<MaybeDangling<Kept>>,
    /// Puts results that are in `kept` into the buffers.
    unpack: Option<Unpack<B>>,
    work: Work,
    deadline: Option<Duration>,
    requests: Arc<Requests>,
}

/// What a started operation uses beside its buffers.
#[derive(Default)]
struct Kept {
    /// Lists of counts: of the sent blocks and, where they differ, of the received ones.
    #[expect(dead_code, reason = "the call points to them")]
    counts: [Vec<usize>; 2],
    /// The closure by which it reduces.
    closure: Option<Box<dyn CombineInOrder + Send>>,
    /// Buffers that travel together, and what they are packed into.
    packed: Vec<(Range<usize>, Vec<u8>)>,
}

type Unpack<B> = fn(&mut B, &Kept) -> Result<()>;

enum Work {
    Collective(Arc<Outcome>),
    Messages(MessagePair),
    /// Messages that a thread tests, since a task polls the request.
    PolledMessages(Arc<Outcome>),
    /// The result has been taken.
    Over,
}

/// A message, or two that began together.
struct MessagePair {
    /// Messages not yet seen complete.
    under_way: [Option<Posted>; 2],
    /// The result of the others.
    outcome: Result<()>,
}

impl MessagePair {
    /// Tests those under way; answers whether both are over.
    fn settle(&mut self, moving: &Moving, test: impl Fn(Posted) -> Result<bool>) -> bool {
        for message in &mut self.under_way {
            let Some(posted) = *message else { continue };
            match test(posted) {
                Ok(false) => {}
                result => {
                    *message = None;
                    let ended = moving.request_ended(posted.record, result.map(drop));
                    if self.outcome.is_ok() {
                        self.outcome = ended;
                    }
                }
            }
        }
        self.under_way.iter().all(Option::is_none)
    }
}

impl<B> Request<B> {
    /// Waits until the operation is complete, and gives the buffers back. The wait has the deadline of the communicator, or
    /// view, that it was started with. On an error the buffers are dropped.
    #[doc(alias = "MPI_Wait")]
    pub fn wait(mut self) -> Result<B> {
        self.complete()
    }

    /// [`wait`](Self::wait), once.
    fn complete(&mut self) -> Result<B> {
        let result = match std::mem::replace(&mut self.work, Work::Over) {
            Work::Over => panic!("a request was polled after it had answered"),
            // After fork no thread carries it out in this process, and a lock may stay held.
            _ if self.requests.is_copy() => Err(Error::forked()),
            Work::Collective(outcome) => {
                self.requests.finish(&outcome);
                outcome.take()
            }
            Work::Messages(messages) => self.wait_for(messages),
            Work::PolledMessages(outcome) => match self.requests.moving.take_polled(&outcome) {
                Some(messages) => self.wait_for(messages),
                None => outcome.take(),
            },
        };
        // SAFETY: taken once; `work` is over, so that drop leaves the buffers alone. The operation is
        // complete, or has failed and touches them no more.
        let (mut buffers, mut kept) =
            unsafe { (ManuallyDrop::take(&mut self.buffers), ManuallyDrop::take(&mut self.kept)) };
        result?;
        if let Some(unpack) = self.unpack {
            unpack(buffers.get_mut(), kept.get_mut())?;
        }
        Ok(buffers.into_inner())
    }

    fn wait_for(&self, messages: MessagePair) -> Result<()> {
        let _limited = Limited::to(self.deadline);
        self.requests.wait_for_messages(messages)
    }

    /// Whether [`wait`](Request::wait) would answer at once. `MPI_Request_get_status`.
    #[doc(alias("MPI_Test", "MPI_Request_get_status"))]
    pub fn is_done(&mut self) -> bool {
        let (backend, moving) = (&*self.requests.backend, &*self.requests.moving);
        match &mut self.work {
            _ if self.requests.is_copy() => true,
            Work::Collective(outcome) => {
                moving.settle(backend);
                outcome.is_there()
            }
            Work::Messages(messages) => messages.settle(moving, |posted| backend.test(posted.id)),
            Work::PolledMessages(outcome) => {
                moving.settle_polled(backend);
                outcome.is_there()
            }
            Work::Over => true,
        }
    }

    /// Whether it is done; if not, `waker` is woken when it is.
    fn is_done_or_wakes(&mut self, waker: &Waker) -> bool {
        if self.is_done() {
            return true;
        }
        if let Work::Messages(_) = &self.work {
            let outcome = Outcome::of(1);
            let polled = Work::PolledMessages(outcome.clone());
            let Work::Messages(messages) = std::mem::replace(&mut self.work, polled) else { unreachable!() };
            let (since, deadline) = (RunInstant::now(), self.deadline);
            let polled = PolledMessages { messages, outcome, deadline, since, looked: since };
            lock(&self.requests.moving.polled).push(polled);
        }
        match &self.work {
            // Without its communicator no thread would wake the task: it waits.
            Work::Collective(outcome) | Work::PolledMessages(outcome) => {
                outcome.is_there_or_wakes(waker) || self.requests.moving.is_stopped()
            }
            Work::Messages(_) | Work::Over => true,
        }
    }
}

/// Answers what [`wait`](Request::wait) would, and wakes the task when it is there: a collective at once, a message within a
/// millisecond. Works in every executor. The deadline counts from the first poll. Dropping a request that is not complete leaks its buffers.
/// After its communicator is dropped, polling waits, as `wait` does.
///
/// ```
/// # async fn answer(comm: phalanx::Comm) -> phalanx::Result<()> {
/// let numbers = comm.start_recv(vec![0u32; 10], 1)?.await?;
/// # Ok(())
/// # }
/// ```
///
/// # Panics
/// If it is polled after it has answered.
impl<B> Future for Request<B> {
    type Output = Result<B>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<B>> {
        if self.is_done_or_wakes(context.waker()) { Poll::Ready(self.complete()) } else { Poll::Pending }
    }
}

/// Nothing in it is pinned: the buffers' memory stays where it is when the request is moved.
impl<B> Unpin for Request<B> {}

impl<B> Drop for Request<B> {
    fn drop(&mut self) {
        if matches!(self.work, Work::Over) {
            return;
        }
        if self.is_done() {
            // SAFETY: not taken, since `work` was not over; the operation touches them no more.
            unsafe {
                ManuallyDrop::drop(&mut self.kept);
                ManuallyDrop::drop(&mut self.buffers);
            }
        } else {
            crate::os::log::warn!("a request was dropped before it was complete: its buffers are leaked");
            let moving = &self.requests.moving;
            let messages = match std::mem::replace(&mut self.work, Work::Over) {
                Work::Messages(messages) => Some(messages),
                Work::PolledMessages(outcome) => moving.take_polled(&outcome),
                Work::Collective(_) | Work::Over => None,
            };
            let under_way = messages.into_iter().flat_map(|messages| messages.under_way);
            lock(&moving.dropped).extend(under_way.flatten());
        }
    }
}

impl<B> std::fmt::Debug for Request<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Request").finish_non_exhaustive()
    }
}
