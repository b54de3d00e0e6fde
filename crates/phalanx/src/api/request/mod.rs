//! Operations that go on while the rank does something else: [`Request`].
//!
//! A request owns its buffers and returns them from [`wait`](Request::wait), so nothing can touch them in between. A
//! request that is forgotten leaks them.
//!
//! - Collectives run in the order in which they were started, and before any collective that is called later. The backend
//!   carries them out if it can, else a thread of the communicator (`worker.rs`).
//! - Messages are posted at once.
//! - What the backend carries out advances in every wait, and in a thread (`mover.rs`).

mod collectives;
mod maybe_dangling;
mod messages;
mod mover;
mod queue;
#[cfg(test)]
mod tests;
mod worker;

pub(crate) use queue::Requests;

use crate::os::sync::lock;
use crate::types::error::{Error, Result};
use crate::watch::Posted;
use crate::watch::deadline::Limited;
use maybe_dangling::MaybeDangling;
use queue::Outcome;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

/// An operation under way, and the buffers it uses.
#[must_use = "a request that is dropped before it is complete leaks its buffers"]
pub struct Request<B> {
    buffers: ManuallyDrop<MaybeDangling<B>>,
    /// Counts of a v-variant, which live as long as the buffers.
    counts: ManuallyDrop<Counts>,
    work: Work,
    deadline: Option<Duration>,
    requests: Arc<Requests>,
}

/// Lists of counts that a started operation reads: of the sent blocks and, where they differ, of the received ones.
type Counts = [Vec<usize>; 2];

enum Work {
    Collective(Arc<Outcome>),
    Messages(MessagePair),
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

impl<B> Request<B> {
    /// Waits until the operation is complete, and gives the buffers back. The wait has the deadline of the communicator, or
    /// view, that it was started with. On an error the buffers are dropped.
    pub fn wait(mut self) -> Result<B> {
        let result = match std::mem::replace(&mut self.work, Work::Over) {
            // After fork no thread carries it out in this process, and a lock may stay held.
            _ if self.requests.is_copy() => Err(Error::forked()),
            Work::Collective(outcome) => {
                self.requests.finish(&outcome);
                outcome.take()
            }
            Work::Messages(messages) => {
                let _limited = Limited::to(self.deadline);
                self.requests.wait_for_messages(messages)
            }
            Work::Over => unreachable!("wait takes the request"),
        };
        // SAFETY: taken once; `work` is over, so that drop leaves the buffers alone. The operation is
        // complete, or has failed and touches them no more.
        let buffers = unsafe {
            ManuallyDrop::drop(&mut self.counts);
            ManuallyDrop::take(&mut self.buffers)
        };
        result.map(|()| buffers.into_inner())
    }

    /// Whether [`wait`](Request::wait) would answer at once.
    pub fn is_done(&mut self) -> bool {
        match &mut self.work {
            _ if self.requests.is_copy() => true,
            Work::Collective(outcome) => {
                self.requests.moving.settle(&*self.requests.backend);
                outcome.is_there()
            }
            Work::Messages(messages) => {
                for message in &mut messages.under_way {
                    let Some(posted) = *message else { continue };
                    match self.requests.backend.test(posted.id) {
                        Ok(false) => {}
                        result => {
                            *message = None;
                            let ended = self.requests.moving.request_ended(posted.record, result.map(drop));
                            if messages.outcome.is_ok() {
                                messages.outcome = ended;
                            }
                        }
                    }
                }
                messages.under_way.iter().all(Option::is_none)
            }
            Work::Over => true,
        }
    }
}

impl<B> Drop for Request<B> {
    fn drop(&mut self) {
        if matches!(self.work, Work::Over) {
            return;
        }
        if self.is_done() {
            // SAFETY: not taken, since `work` was not over; the operation touches them no more.
            unsafe {
                ManuallyDrop::drop(&mut self.counts);
                ManuallyDrop::drop(&mut self.buffers);
            }
        } else {
            crate::os::log::warn!("a request was dropped before it was complete: its buffers are leaked");
            if let Work::Messages(MessagePair { under_way, .. }) = &self.work {
                lock(&self.requests.moving.dropped).extend(under_way.iter().flatten());
            }
        }
    }
}

impl<B> std::fmt::Debug for Request<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Request").finish_non_exhaustive()
    }
}
