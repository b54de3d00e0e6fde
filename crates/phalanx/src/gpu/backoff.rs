//! The rhythm of a wait for what can only be asked whether it is over: work on a GPU, and libraries that do not block.

use std::time::{Duration, Instant};

/// A wait asks without a pause for so long: most operations of a few bytes are over by then.
const SPINNING: Duration = Duration::from_micros(200);
/// Then it gives its core to who else wants it, for so long: a sleep takes a tenth of a millisecond, which would be noticed.
const YIELDING: Duration = Duration::from_millis(10);
/// Then it sleeps for so long between two questions.
const NAP: Duration = Duration::from_micros(50);
/// How often a wait looks around, for errors and at the peers.
pub(crate) const LOOK: Duration = Duration::from_millis(2);

/// A wait, between two questions.
pub(crate) struct Backoff {
    /// When it began.
    pub since: Instant,
    looked: Instant,
}

impl Backoff {
    /// Of what is waited for from now on.
    pub fn new() -> Backoff {
        Backoff::since(Instant::now())
    }

    /// Of what has been waited for since then.
    pub fn since(since: Instant) -> Backoff {
        Backoff { since, looked: Instant::now() }
    }

    /// Lets some time pass; whether it is time to look around.
    pub fn pause(&mut self) -> bool {
        let now = Instant::now();
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
