//! One thread at a time may be inside the communicators of a device, even different ones.

use crate::lock;
use crate::random;
use crate::violation::violation;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::thread::ThreadId;

/// The thread that is inside a communicator of each device, how deep, and where.
static INSIDE: Mutex<BTreeMap<usize, Visit>> = Mutex::new(BTreeMap::new());

struct Visit {
    thread: ThreadId,
    depth: usize,
    function: &'static str,
}

/// That this thread is inside a device's communicators.
pub struct Inside(usize);

impl Inside {
    /// Goes in; another thread in there is a violation.
    pub fn enter(function: &'static str, device: usize) -> Inside {
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
        // Some calls take their time, so that others meet them.
        if random::shared().chance(0.03) {
            random::shared().dawdle();
        }
        Inside(device)
    }
}

impl Drop for Inside {
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
