//! Says now and then that a wait goes on.

use std::time::{Duration, Instant};

/// Before the first reminder. Most jobs have all their ranks by then.
const FIRST: Duration = Duration::from_secs(3);
/// The longest pause between two reminders.
const LONGEST: Duration = Duration::from_secs(60);

/// When to say that a wait goes on: after 3 s, then each time it has taken twice as long, at least every minute.
pub(crate) struct Reminder {
    since: Instant,
    next: Duration,
}

impl Reminder {
    /// A wait begins.
    pub fn start(now: Instant) -> Reminder {
        Reminder { since: now, next: FIRST }
    }

    /// How long the wait has taken, if that is to be said now.
    pub fn due(&mut self, now: Instant) -> Option<Duration> {
        let waited = now.saturating_duration_since(self.since);
        let is_due = waited >= self.next;
        if is_due {
            self.next = waited + waited.min(LONGEST);
        }
        is_due.then_some(waited)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reminders_become_rarer_but_do_not_end() {
        let start = Instant::now();
        let mut reminder = Reminder::start(start);
        let mut said = Vec::new();
        for second in 0..300 {
            let due = reminder.due(start + Duration::from_secs(second));
            said.extend(due.map(|waited| waited.as_secs()));
        }
        assert_eq!(said, [3, 6, 12, 24, 48, 96, 156, 216, 276]);
    }
}
