//! How a rank waits: it polls while its peers run, and yields its core at once while other programs keep them from running.
//!
//! An example: two ranks on two cores, each with a busy program beside it. The one that polls uses up its share of the core, and has none
//! left when its answer comes; an operation of 1 µs takes 30. If it yields, its peer or the other program runs, and it takes 1 to 3.

use crate::os::monotonic_nanos;
use crate::os::sync::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Polls of a wait at first: about a microsecond.
const POLLS: u32 = 400;
/// Polls at first if cores are shared: enough for a peer on another core that is about to finish.
const POLLS_CROWDED: u32 = 24;

/// An answer that takes longer is late: a hundred times what a peer takes that runs.
const LATE: Duration = Duration::from_micros(100);
/// Peers are kept from running if in this time so many answers were late, and waiting for them took at least a quarter of it.
const WINDOW: Duration = Duration::from_millis(50);
const LATE_ANSWERS: u32 = 6;
/// After this time a rank polls again, to see whether they still are.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// How one rank waits for the peers of a channel.
pub(super) struct Pace {
    /// There are more ranks than cores: it always yields.
    crowded: bool,
    polls: AtomicU32,
    /// When the window began, of the monotonic clock; late answers in it, and the time they took.
    began: AtomicU64,
    late_answers: AtomicU32,
    late: AtomicU64,
    /// When to poll again; 0 while it polls.
    polls_again: AtomicU64,
}

impl Pace {
    pub fn new(crowded: bool) -> Pace {
        Pace {
            crowded,
            polls: AtomicU32::new(if crowded { POLLS_CROWDED } else { POLLS }),
            began: AtomicU64::new(0),
            late_answers: AtomicU32::new(0),
            late: AtomicU64::new(0),
            polls_again: AtomicU64::new(0),
        }
    }

    /// Polls of a wait before it pauses or yields.
    #[inline(always)]
    pub fn polls(&self) -> u32 {
        self.polls.load(Ordering::Relaxed)
    }

    /// Whether a rank that waits lets others run at once.
    #[inline(always)]
    pub fn yields_at_once(&self) -> bool {
        self.polls() == POLLS_CROWDED
    }

    /// Notes how long an answer took that did not come while the rank polled.
    pub fn answered(&self, waited: Duration) {
        if !self.crowded {
            self.answered_at(monotonic_nanos(), waited);
        }
    }

    fn answered_at(&self, now: u64, waited: Duration) {
        let again = self.polls_again.load(Ordering::Relaxed);
        if again != 0 {
            if now >= again {
                self.polls_again.store(0, Ordering::Relaxed);
                self.polls.store(POLLS, Ordering::Relaxed);
                self.start_window(now);
            }
            return;
        }
        if waited < LATE {
            return;
        }
        let window = Duration::from_nanos(now - self.began.load(Ordering::Relaxed).min(now));
        if window > WINDOW {
            self.start_window(now);
        }
        let late =
            self.late.fetch_add(waited.as_nanos() as u64, Ordering::Relaxed) + waited.as_nanos() as u64;
        let answers = self.late_answers.fetch_add(1, Ordering::Relaxed) + 1;
        if answers >= LATE_ANSWERS && Duration::from_nanos(late) >= WINDOW / 4 {
            self.polls.store(POLLS_CROWDED, Ordering::Relaxed);
            self.polls_again.store(now + LOOK_AGAIN.as_nanos() as u64, Ordering::Relaxed);
        }
    }

    fn start_window(&self, now: u64) {
        self.began.store(now, Ordering::Relaxed);
        self.late_answers.store(0, Ordering::Relaxed);
        self.late.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLISECOND: u64 = 1_000_000;

    #[test]
    fn a_rank_whose_peers_keep_answering_late_yields_at_once_and_looks_again() {
        let pace = Pace::new(false);
        let late = |at: u64| pace.answered_at(at * MILLISECOND, Duration::from_millis(3));
        (1..6).for_each(|i| late(1000 + 5 * i));
        assert!(!pace.yields_at_once(), "five late answers may be chance");
        late(1030);
        assert!(pace.yields_at_once());
        pace.answered_at(1100 * MILLISECOND, Duration::from_micros(2));
        assert!(pace.yields_at_once(), "answers are prompt because it yields");
        pace.answered_at(1531 * MILLISECOND, Duration::from_micros(2));
        assert!(!pace.yields_at_once());
        (1..7).for_each(|i| late(1531 + 5 * i));
        assert!(pace.yields_at_once());
    }

    #[test]
    fn one_long_wait_or_late_answers_now_and_then_change_nothing() {
        let pace = Pace::new(false);
        pace.answered_at(1000 * MILLISECOND, Duration::from_secs(1));
        (0..100).for_each(|i| pace.answered_at((1000 + 20 * i) * MILLISECOND, Duration::from_millis(1)));
        (0..10_000).for_each(|i| pace.answered_at(5000 * MILLISECOND + i, Duration::from_micros(99)));
        assert!(!pace.yields_at_once());
    }

    #[test]
    fn ranks_that_share_cores_always_yield() {
        let pace = Pace::new(true);
        pace.answered(Duration::from_micros(1));
        assert!(pace.yields_at_once());
    }
}
