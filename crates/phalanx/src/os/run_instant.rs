//! [`RunInstant`]: time in which this process runs.

use super::monotonic_nanos;
use super::sync::lock;
use std::ops::{Add, Sub};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Nobody has asked for the time for so long: the process was stopped. Every wait asks more often.
const STOPPED: u64 = 1_000_000_000;
/// How often the time of the last question is noted.
const GRAIN: u64 = 10_000_000;

/// A clock that stands still while its process is stopped. In nanoseconds.
struct RunClock {
    /// When somebody last asked, of the monotonic clock.
    last: AtomicU64,
    /// For how long the process was stopped so far.
    lost: AtomicU64,
    noting: Mutex<()>,
}

static CLOCK: RunClock = RunClock::new();

impl RunClock {
    const fn new() -> RunClock {
        RunClock { last: AtomicU64::new(0), lost: AtomicU64::new(0), noting: Mutex::new(()) }
    }

    fn at(&self, now: u64) -> RunInstant {
        if now.saturating_sub(self.last.load(Ordering::Acquire)) >= GRAIN {
            self.note(now);
        }
        RunInstant(now.saturating_sub(self.lost.load(Ordering::Relaxed)))
    }

    #[cold]
    fn note(&self, now: u64) {
        let _noting = lock(&self.noting);
        let last = self.last.load(Ordering::Relaxed);
        let gap = now.saturating_sub(last);
        if last != 0 && gap >= STOPPED {
            self.lost.fetch_add(gap, Ordering::Relaxed);
        }
        // Whoever sees this sees what was lost before.
        self.last.store(now.max(last).max(1), Ordering::Release);
    }
}

/// An instant on a clock that stands still while this process does not run.
///
/// A deadline is about peers that do not come. When a whole job is stopped and goes on (SIGSTOP, Ctrl-Z, a debugger, the cgroup
/// freezer), the time between is nobody's fault, so every wait for a peer measures with this clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RunInstant(u64);

impl RunInstant {
    pub fn now() -> RunInstant {
        CLOCK.at(monotonic_nanos())
    }

    pub fn elapsed(self) -> Duration {
        RunInstant::now() - self
    }

    pub fn saturating_duration_since(self, earlier: RunInstant) -> Duration {
        self - earlier
    }
}

impl Sub for RunInstant {
    type Output = Duration;

    fn sub(self, earlier: RunInstant) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for RunInstant {
    type Output = RunInstant;

    fn add(self, time: Duration) -> RunInstant {
        RunInstant(self.0.saturating_add(time.as_nanos().try_into().unwrap_or(u64::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_in_which_the_process_was_stopped_does_not_count() {
        let (clock, second) = (RunClock::new(), 1_000_000_000);
        clock.at(100 * second);
        let since = clock.at(100 * second + second / 2);
        assert_eq!(clock.at(101 * second) - since, Duration::from_millis(500));
        assert_eq!(clock.at(160 * second) - since, Duration::from_millis(500));
        assert_eq!(clock.at(160 * second + second / 2) - since, Duration::from_secs(1));
    }
}
