//! Deadlines of single operations: see [`Comm::within`](crate::Comm::within).
//!
//! The calling thread does the waiting, so the deadline is a thread-local for the length of the call. Every
//! wait reads it with [`of`].

use std::cell::Cell;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

thread_local! {
    static LIMIT: Cell<Option<Duration>> = const { Cell::new(None) };
}

/// The deadline of this thread's current call, if the call has its own.
#[inline]
pub(crate) fn limit() -> Option<Duration> {
    LIMIT.get()
}

/// The deadline of this thread's wait: the call's own, else the communicator's `timeout`.
pub(crate) fn of(timeout: Duration) -> Duration {
    limit().unwrap_or(timeout)
}

/// `since` plus `timeout`; a hundred years from `since` if that overflows.
pub(crate) fn after(since: Instant, timeout: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    since.checked_add(timeout).unwrap_or_else(|| since + CENTURY)
}

/// Guard: sets the deadline of this thread's waits until it is dropped.
pub(crate) struct Limited {
    before: Option<Duration>,
    of_this_thread: PhantomData<*const ()>,
}

impl Limited {
    /// `None` changes nothing.
    #[inline]
    pub fn to(limit: Option<Duration>) -> Option<Limited> {
        limit.map(|limit| Limited { before: LIMIT.replace(Some(limit)), of_this_thread: PhantomData })
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        LIMIT.set(self.before);
    }
}
