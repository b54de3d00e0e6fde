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

/// Says which ranks (or other members, by their `name`) have been waited for so long.
pub(crate) fn say_missing(name: &str, missing: &[impl ToString], waited: Duration) {
    let missing = listed(name, missing);
    crate::os::log::say(format_args!("waiting for {missing}, for {waited:.0?} so far"));
}

/// Members as text: `ranks 1, 2 and 4`. Of many, the last are only counted.
fn listed(name: &str, members: &[impl ToString]) -> String {
    const MOST: usize = 8;
    let first: Vec<String> = members.iter().take(MOST).map(ToString::to_string).collect();
    match (first.as_slice(), members.len().saturating_sub(MOST)) {
        ([one], _) => format!("{name} {one}"),
        ([before @ .., last], 0) => format!("{name}s {} and {last}", before.join(", ")),
        (_, more) => format!("{name}s {} and {more} more", first.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_listed_and_many_are_counted() {
        assert_eq!(listed("rank", &[3]), "rank 3");
        assert_eq!(listed("node", &[1, 2, 4]), "nodes 1, 2 and 4");
        let many: Vec<u32> = (0..20).collect();
        assert_eq!(listed("rank", &many), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more");
    }

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
