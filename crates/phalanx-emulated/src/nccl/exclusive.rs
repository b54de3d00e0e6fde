//! The check that one thread at a time calls communicators of a device, even different communicators.

use crate::base::lock::lock;
use crate::base::random;
use crate::base::violation::violation;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::thread::ThreadId;

/// The thread that is in calls on communicators of each device.
static INSIDE: Mutex<BTreeMap<usize, Visit>> = Mutex::new(BTreeMap::new());

struct Visit {
    thread: ThreadId,
    /// How many nested calls the thread is in.
    depth: usize,
    function: &'static str,
}

/// A call of this thread on a communicator of a device, until dropped.
pub struct Exclusive(usize);

impl Exclusive {
    /// Enters a call. Another thread in a call on the device is a violation.
    pub fn enter(function: &'static str, device: usize) -> Exclusive {
        let me = std::thread::current().id();
        let mut inside = lock(&INSIDE);
        let visit = inside.entry(device).or_insert(Visit { thread: me, depth: 0, function });
        if visit.thread != me {
            let (other, where_) = (visit.thread, visit.function);
            violation(
                function,
                format!(
                    "{other:?} is inside {where_} on a communicator of the same device; one thread at a time"
                ),
            );
        }
        visit.depth += 1;
        drop(inside);
        // Some calls are slow, so that calls of other threads overlap with them.
        if random::shared().chance(0.03) {
            random::shared().delay();
        }
        Exclusive(device)
    }
}

impl Drop for Exclusive {
    fn drop(&mut self) {
        let mut inside = lock(&INSIDE);
        if let Some(visit) = inside.get_mut(&self.0) {
            visit.depth -= 1;
            if visit.depth == 0 {
                inside.remove(&self.0);
            }
        }
    }
}
