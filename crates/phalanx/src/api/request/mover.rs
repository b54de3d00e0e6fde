//! The thread that advances requests while their rank does something else.

use super::MessagePair;
use super::outcome::Outcome;
use super::queue::Started;
use crate::api::lending::Lending;
use crate::contract::Backend;
use crate::os::RunInstant;
use crate::os::sync::lock;
use crate::types::error::Result;
use crate::watch::deadline::Limited;
use crate::watch::{Posted, RecordId, Recorder};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// State shared by the communicator and its threads.
pub(super) struct Moving {
    pub state: Mutex<MovingState>,
    pub changed: Condvar,
    /// In the order of their start; includes collectives whose request was dropped.
    pub started: Mutex<Vec<Started>>,
    /// Messages whose request was dropped: only the mover tests them.
    pub dropped: Mutex<Vec<Posted>>,
    /// Messages whose request is polled: only the mover tests them.
    pub polled: Mutex<Vec<PolledMessages>>,
    pub recorder: Arc<Recorder>,
    /// Collectives started and not complete.
    pub under_way: AtomicUsize,
}

/// The messages of a request that a task polls.
pub(super) struct PolledMessages {
    pub messages: MessagePair,
    pub outcome: Arc<Outcome>,
    pub deadline: Option<Duration>,
    /// When the task has polled first, and when the peers were last looked at.
    pub since: RunInstant,
    pub looked: RunInstant,
}

/// How often the peers of polled messages are looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

impl PolledMessages {
    /// Tests the messages, now and then also whether they can still come; answers whether they are over.
    fn advance(&mut self, backend: &dyn Backend, moving: &Moving) -> bool {
        let is_look = self.looked.elapsed() >= LOOK_INTERVAL;
        if is_look {
            self.looked = RunInstant::now();
        }
        let _limited = Limited::to(self.deadline);
        let since = self.since;
        let is_overdue = is_look && since.elapsed() >= self.deadline.unwrap_or(backend.timeout());
        self.messages.settle(moving, |posted| match is_look {
            true if backend.test_waited(posted.id, since)? => Ok(true),
            // A backend that gives up in waits only.
            true if is_overdue => backend.wait(posted.id, &|| ()).map(|()| true),
            true => Ok(false),
            false => backend.test(posted.id),
        })
    }
}

#[derive(Default)]
pub(super) struct MovingState {
    /// Number of messages and collectives under way.
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

    /// Tests the backend's started collectives, and ends the complete ones.
    pub fn settle(&self, backend: &dyn Backend) {
        let Some(collectives) = backend.start_collectives() else { return };
        let mut results = Vec::new();
        let is_over = |started: &mut Started| match collectives.test(started.operation) {
            Ok(false) if started.is_overdue(backend.timeout()) => {
                let _limited = Limited::to(started.deadline);
                results.push(collectives.wait(started.operation));
                true
            }
            Ok(false) => false,
            result => {
                results.push(result.map(drop));
                true
            }
        };
        // A closure that reduces may panic.
        let lending = Lending::begin(backend);
        let ended: Vec<Started> = lock(&self.started).extract_if(.., is_over).collect();
        lending.end();
        // Without the lock: this wakes tasks.
        for (started, result) in ended.iter().zip(results) {
            self.collective_ended(started, result);
        }
    }

    /// Tests messages whose request is polled, and ends the complete ones.
    pub fn settle_polled(&self, backend: &dyn Backend) {
        let mut polled = lock(&self.polled);
        let ended: Vec<PolledMessages> =
            polled.extract_if(.., |messages| messages.advance(backend, self)).collect();
        drop(polled);
        for PolledMessages { messages, outcome, .. } in ended {
            outcome.put(messages.outcome);
        }
    }

    /// Whether the communicator has been dropped.
    pub fn is_stopped(&self) -> bool {
        lock(&self.state).stop
    }

    /// Wakes the tasks of polled messages: the mover has stopped.
    pub fn wake_polled(&self) {
        let outcomes: Vec<_> = lock(&self.polled).iter().map(|messages| messages.outcome.clone()).collect();
        outcomes.iter().for_each(|outcome| outcome.wake());
    }

    /// Takes the messages of a polled request back, unless they are over.
    pub fn take_polled(&self, outcome: &Arc<Outcome>) -> Option<MessagePair> {
        let mut polled = lock(&self.polled);
        let place = polled.iter().position(|messages| Arc::ptr_eq(&messages.outcome, outcome))?;
        Some(polled.swap_remove(place).messages)
    }

    /// Tests messages whose request was dropped, and ends the complete ones.
    pub fn settle_dropped(&self, backend: &dyn Backend) {
        lock(&self.dropped).retain(|posted| match backend.test(posted.id) {
            Ok(false) => true,
            result => {
                // No request is left to report it.
                let _ = self.request_ended(posted.record, result.map(drop));
                false
            }
        });
    }

    /// Waits for a collective of the backend that was taken out of the list.
    pub fn complete(&self, backend: &dyn Backend, started: &Started) {
        let collectives = backend.start_collectives().expect("it was started there");
        let _limited = Limited::to(started.deadline);
        // A closure that reduces may panic.
        let lending = Lending::begin(backend);
        let result = collectives.wait(started.operation);
        lending.end();
        self.collective_ended(started, result);
    }
}

/// Pauses between two polls: short while requests advance, doubling up to the longest while they do not.
const SHORTEST_PAUSE: Duration = Duration::from_micros(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// Advances requests until told to stop. The pauses grow while nothing moves, so that the thread does not take a core from
/// its rank.
pub(super) fn move_requests(backend: &dyn Backend, moving: &Moving) {
    if catch_unwind(AssertUnwindSafe(|| advance(backend, moving))).is_err() {
        // Waits would not end for requests that nobody advances.
        backend.abandon();
        moving.settle(backend);
        moving.settle_polled(backend);
    }
}

fn advance(backend: &dyn Backend, moving: &Moving) {
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
            // Nothing under way, or failed: the requests' waits report it.
            Ok(false) | Err(_) => LONGEST_PAUSE,
        };
        moving.settle(backend);
        moving.settle_dropped(backend);
        moving.settle_polled(backend);
        std::thread::sleep(pause);
        state = lock(&moving.state);
    }
}
