//! Telling silence of others from one's own sleep.

use std::time::{Duration, Instant};

/// Notices when its own thread was held up: on a host that stands still for a while nobody sends anything, and
/// nobody is to blame for it.
pub struct Watch {
    expected: Duration,
    last: Instant,
}

impl Watch {
    /// Of a thread that looks around eight times in `silence`.
    pub fn new(silence: Duration) -> Watch {
        Watch { expected: silence / 4, last: Instant::now() }
    }

    /// How long the thread was held up since it was asked before.
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
        let mut watch = Watch::new(Duration::from_millis(800));
        let start = watch.last;
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(watch.held_up(at(100)), Duration::ZERO);
        assert_eq!(watch.held_up(at(300)), Duration::ZERO);
        assert_eq!(watch.held_up(at(5300)), Duration::from_millis(4800));
        assert_eq!(watch.held_up(at(5400)), Duration::ZERO);
    }
}
