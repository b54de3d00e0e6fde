//! [`Backoff`]: polling of GPU work and of libraries that do not block. Neither can notify us.

use crate::os::RunInstant;
use std::time::Duration;

/// Spin this long before yielding. Most operations of a few bytes finish within it.
const SPINNING: Duration = Duration::from_micros(200);
/// Then yield the core this long before sleeping. A sleep takes about 100 µs, which short operations would
/// notice.
const YIELDING: Duration = Duration::from_millis(10);
/// Then sleep this long between two polls.
const NAP: Duration = Duration::from_micros(50);
/// Interval at which a wait looks for errors and checks the peers.
pub(crate) const LOOK: Duration = Duration::from_millis(2);

/// Polls something that cannot notify us: spins for 200 µs, yields for 10 ms, then sleeps 50 µs between
/// polls.
pub(crate) struct Backoff {
    /// When the wait began.
    pub since: RunInstant,
    looked: RunInstant,
}

impl Backoff {
    /// A wait that begins now.
    pub fn new() -> Backoff {
        Backoff::since(RunInstant::now())
    }

    /// A wait that began earlier.
    pub fn since(since: RunInstant) -> Backoff {
        Backoff { since, looked: RunInstant::now() }
    }

    /// Pauses between two polls. True every [`LOOK`]: time to look for errors and at the peers.
    pub fn pause(&mut self) -> bool {
        let now = RunInstant::now();
        match now - self.since {
            waited if waited < SPINNING => std::hint::spin_loop(),
            waited if waited < YIELDING => std::thread::yield_now(),
            _ => std::thread::sleep(NAP),
        }
        let due = now - self.looked > LOOK;
        if due {
            self.looked = now;
        }
        due
    }
}
