//! The thread that advances requests while their rank does something else.

use super::queue::Started;
use crate::contract::Backend;
use crate::os::sync::lock;
use crate::types::error::Result;
use crate::watch::deadline::Limited;
use crate::watch::{Posted, RecordId, Recorder};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// What the communicator's threads look at, too.
pub(super) struct Moving {
    pub state: Mutex<MovingState>,
    pub changed: Condvar,
    /// In the order of their start. A collective whose request was dropped is settled as all others are.
    pub started: Mutex<Vec<Started>>,
    /// Messages whose request was dropped: they move on, and nobody else asks for their end.
    pub dropped: Mutex<Vec<Posted>>,
    pub recorder: Arc<Recorder>,
    /// Collectives started and not complete.
    pub under_way: AtomicUsize,
}

#[derive(Default)]
pub(super) struct MovingState {
    /// Messages and collectives.
    pub requests: usize,
    pub stop: bool,
}

impl Moving {
    pub fn request_started(&self) {
        lock(&self.state).requests += 1;
        self.changed.notify_all();
    }

    pub fn request_ended(&self, record: RecordId, result: Result<()>) -> Result<()> {
        self.forget();
        self.recorder.end(record, result)
    }

    pub fn forget(&self) {
        lock(&self.state).requests -= 1;
    }

    pub fn collective_ended(&self, started: &Started, result: Result<()>) {
        started.outcome.put(self.request_ended(started.record, result));
        self.under_way.fetch_sub(1, Ordering::AcqRel);
    }

    /// Sees which collectives of the backend are complete.
    pub fn settle(&self, backend: &dyn Backend) {
        let Some(collectives) = backend.start_collectives() else { return };
        lock(&self.started).retain(|started| match collectives.test(started.operation) {
            Ok(false) => true,
            result => {
                self.collective_ended(started, result.map(drop));
                false
            }
        });
    }

    /// Sees which messages without a request are complete.
    pub fn settle_dropped(&self, backend: &dyn Backend) {
        lock(&self.dropped).retain(|posted| match backend.test(posted.ticket) {
            Ok(false) => true,
            result => {
                // Nobody asks for it.
                let _ = self.request_ended(posted.record, result.map(drop));
                false
            }
        });
    }

    /// Waits for a collective of the backend that was taken out of the list.
    pub fn complete(&self, backend: &dyn Backend, started: &Started) {
        let collectives = backend.start_collectives().expect("it was started there");
        let _limited = Limited::to(started.deadline);
        self.collective_ended(started, collectives.wait(started.operation));
    }
}

/// Pauses of the thread that moves requests along.
const SHORTEST_PAUSE: Duration = Duration::from_micros(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// Moves requests along while their rank does something else: often while they move, else ever more rarely, so that it
/// does not take a core from the rank.
pub(super) fn move_requests(backend: &dyn Backend, moving: &Moving) {
    let mut pause = SHORTEST_PAUSE;
    let mut last = (0, None);
    let mut state = lock(&moving.state);
    loop {
        if state.stop {
            return;
        }
        if state.requests == 0 {
            state = moving.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        }
        let requests = state.requests;
        drop(state);
        pause = match backend.progress() {
            Ok(true) => {
                let seen = (requests, backend.moved());
                let is_still = seen == last && seen.1.is_some();
                last = seen;
                if is_still { (2 * pause).min(LONGEST_PAUSE) } else { SHORTEST_PAUSE }
            }
            // Nothing under way, or failed: the requests' waits will tell.
            Ok(false) | Err(_) => LONGEST_PAUSE,
        };
        moving.settle(backend);
        moving.settle_dropped(backend);
        std::thread::sleep(pause);
        state = lock(&moving.state);
    }
}
