//! Detects that this process was paused, so that the pause does not count as silence of the others.

use std::time::{Duration, Instant};

/// Measures how long its thread did not run. A suspended host sends nothing, and must not find its peers
/// silent when it resumes.
pub struct StallDetector {
    expected: Duration,
    last: Instant,
}

impl StallDetector {
    /// For a thread that polls eight times in `silence`.
    pub fn new(silence: Duration) -> StallDetector {
        StallDetector { expected: silence / 4, last: Instant::now() }
    }

    /// How long the thread was held up since the last call.
    pub fn held_up(&mut self, now: Instant) -> Duration {
        let gap = now.saturating_duration_since(self.last);
        self.last = now;
        gap.saturating_sub(self.expected)
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
        assert_eq!(stalls.held_up(at(100)), Duration::ZERO);
        assert_eq!(stalls.held_up(at(300)), Duration::ZERO);
        assert_eq!(stalls.held_up(at(5300)), Duration::from_millis(4800));
        assert_eq!(stalls.held_up(at(5400)), Duration::ZERO);
    }
}
