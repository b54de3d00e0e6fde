//! [`Outcome`]: the result of an operation that another thread completes. The test kit's models compile it on loom's locks.

use crate::os::RunInstant;
use crate::os::sync::{Condvar, Mutex, lock, wait};
use crate::types::error::Result;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

/// The result of a request's operations, each of which puts its own.
pub(crate) struct Outcome {
    state: Mutex<OutcomeState>,
    there: Condvar,
}

struct OutcomeState {
    /// Operations that are not over.
    left: usize,
    /// The first error of those that are.
    result: Result<()>,
    /// Of the task that polls the request, and since when it does.
    waker: Option<Waker>,
    polled_since: Option<RunInstant>,
}

impl Outcome {
    /// Of so many operations.
    pub fn of(operations: usize) -> Arc<Outcome> {
        let state = OutcomeState { left: operations, result: Ok(()), waker: None, polled_since: None };
        Arc::new(Outcome { state: Mutex::new(state), there: Condvar::new() })
    }

    /// Puts the result of one of them.
    pub fn put(&self, result: Result<()>) {
        let mut state = lock(&self.state);
        state.left -= 1;
        if state.result.is_ok() {
            state.result = result;
        }
        if state.left > 0 {
            return;
        }
        drop(state);
        self.there.notify_all();
        self.wake();
    }

    /// Wakes the task that polls, without the lock: it may poll at once.
    pub fn wake(&self) {
        let waker = lock(&self.state).waker.take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Waits until all are over.
    pub fn take(&self) -> Result<()> {
        let mut state = lock(&self.state);
        while state.left > 0 {
            state = wait(&self.there, state);
        }
        std::mem::replace(&mut state.result, Ok(()))
    }

    pub fn is_there(&self) -> bool {
        lock(&self.state).left == 0
    }

    /// Whether it is there; if not, `waker` is woken when it is.
    pub fn is_there_or_wakes(&self, waker: &Waker) -> bool {
        let mut state = lock(&self.state);
        if state.left == 0 {
            return true;
        }
        state.polled_since.get_or_insert_with(RunInstant::now);
        state.waker = Some(waker.clone());
        false
    }

    /// Whether a task has polled for longer than this.
    pub fn is_polled_longer_than(&self, deadline: Duration) -> bool {
        lock(&self.state).polled_since.is_some_and(|since| since.elapsed() >= deadline)
    }
}
