//! Detects that this process was paused, or that the store has no core, so that this does not count as silence.

use crate::os::ThreadMark;
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

/// How many times the silence a store of this host may take that has work and no core.
const MOST_EXCUSED: u32 = 30;

/// Excuses a silent store of this host that waits for a core.
pub struct StarvedStore {
    thread: Option<ThreadMark>,
    most: Duration,
    /// How long it was excused since its last message.
    excused: Duration,
}

impl StarvedStore {
    /// The store's thread, if it could say which one it is, and the silence after which it counts as lost.
    pub fn new(thread: Option<ThreadMark>, silence: Duration) -> StarvedStore {
        StarvedStore { thread, most: silence * MOST_EXCUSED, excused: Duration::ZERO }
    }

    /// A message has come.
    pub fn heard(&mut self) {
        self.excused = Duration::ZERO;
    }

    /// Whether the store is waited for so much longer.
    pub fn is_excused(&mut self, longer: Duration) -> bool {
        let has_work = || self.thread.as_ref().is_some_and(ThreadMark::is_ready);
        let is_excused = self.excused < self.most && has_work();
        self.excused += if is_excused { longer } else { Duration::ZERO };
        is_excused
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, mpsc};

    #[cfg(target_os = "linux")]
    #[test]
    fn a_store_with_work_is_excused_for_a_while() {
        let (say, hear) = mpsc::channel();
        let works = Arc::new(());
        std::thread::scope(|scope| {
            // Works until this test has ended, or failed.
            let (watched, _works) = (Arc::downgrade(&works), works);
            scope.spawn(move || {
                say.send(ThreadMark::own()).unwrap();
                while watched.strong_count() > 0 {}
            });
            let silence = Duration::from_secs(1);
            let mut store = StarvedStore::new(hear.recv().unwrap(), silence);
            let excused = (0..2 * MOST_EXCUSED).filter(|_| store.is_excused(silence)).count();
            assert_eq!(excused, MOST_EXCUSED as usize);
            store.heard();
            assert!(store.is_excused(silence));
        });
        // One that has nothing to do, or whose thread nobody knows.
        assert!(!StarvedStore::new(None, Duration::from_secs(1)).is_excused(Duration::from_secs(1)));
        let (say, hear) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                say.send(ThreadMark::own()).unwrap();
                let _ = ended.recv();
            });
            let mut store = StarvedStore::new(hear.recv().unwrap(), Duration::from_secs(1));
            let _end = end;
            let since = Instant::now();
            while store.is_excused(Duration::ZERO) {
                assert!(since.elapsed() < Duration::from_secs(60), "a thread that sleeps is excused");
            }
        });
    }

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
