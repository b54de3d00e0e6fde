//! Detects that this process was paused, so that the pause does not count as silence of the others.

use std::time::{Duration, Instant};

/// Measures how long its thread did not run. A suspended host sends nothing, and must not find its peers
/// silent when it resumes. On a host with more to do than it has cores, the peers wait for a core as long as this thread.
pub struct StallDetector {
    expected: Duration,
    last: Instant,
    /// How long the thread has waited for a core, in all.
    waited: Duration,
}

/// Shorter gaps are no stall.
const SHORT: Duration = Duration::from_millis(20);

impl StallDetector {
    /// For a thread that polls eight times in `silence`.
    pub fn new(silence: Duration) -> StallDetector {
        StallDetector { expected: silence / 4, last: Instant::now(), waited: crate::os::waited_for_core() }
    }

    /// How long the thread was held up since the last call.
    pub fn held_up(&mut self, now: Instant) -> Duration {
        self.held_up_by(now, crate::os::waited_for_core)
    }

    fn held_up_by(&mut self, now: Instant, waited_for_core: impl FnOnce() -> Duration) -> Duration {
        let gap = now.saturating_duration_since(self.last);
        self.last = now;
        if gap < SHORT {
            return Duration::ZERO;
        }
        let waited = waited_for_core();
        let waited = waited.saturating_sub(std::mem::replace(&mut self.waited, waited));
        gap.saturating_sub(self.expected).max(waited.min(gap))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_beyond_the_usual_counts() {
        let mut stalls = StallDetector::new(Duration::from_millis(800));
        let start = stalls.last;
        let at = |ms| start + Duration::from_millis(ms);
        stalls.waited = Duration::ZERO;
        let mut held_up =
            |ms, waited| stalls.held_up_by(at(ms), || Duration::from_millis(waited)).as_millis();
        assert_eq!(held_up(100, 0), 0);
        assert_eq!(held_up(300, 0), 0);
        assert_eq!(held_up(5300, 0), 4800);
        assert_eq!(held_up(5400, 0), 0);
        // Waits for a core count, also where the gap is as usual.
        assert_eq!(held_up(5500, 60), 60);
        assert_eq!(held_up(5600, 70), 10);
        assert_eq!(held_up(5605, 75), 0);
        assert_eq!(held_up(5700, 80), 10);
    }
}
