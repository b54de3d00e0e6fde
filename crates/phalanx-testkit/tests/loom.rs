//! The host backend's flag protocols, and the waiting for requests, under loom: every interleaving, with the memory model's reorderings.
//!
//! `flags.rs` and `outcome.rs` are compiled here a second time, on loom's atomics and locks.

// The types are as they are in the library; not everything they offer is explored.
#![allow(dead_code)]

mod os {
    /// Bytes of a cache line.
    pub const LINE: usize = 64;

    pub mod sync {
        pub use loom::cell::UnsafeCell;
        use loom::sync::MutexGuard;
        pub use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
        pub use loom::sync::{Condvar, Mutex};

        pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
            mutex.lock().unwrap()
        }

        pub fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
            condvar.wait(guard).unwrap()
        }

        /// loom has no compiler fences; the symmetric protocol is what it explores.
        pub fn compiler_fence(_: Ordering) {}
    }

    use crate::os::sync::AtomicU32;

    pub fn futex_wait(_: &AtomicU32, _: u32, _: std::time::Duration) {}
    pub fn futex_wake(_: &AtomicU32) {}
    pub fn heavy_barrier() {}

    /// A clock that stands still.
    #[derive(Clone, Copy)]
    pub struct RunInstant;

    impl RunInstant {
        pub fn now() -> RunInstant {
            RunInstant
        }

        pub fn elapsed(self) -> std::time::Duration {
            std::time::Duration::ZERO
        }
    }
}

mod types {
    pub mod error {
        pub type Result<T> = std::result::Result<T, &'static str>;
    }
}

#[path = "../../phalanx/src/control/flags.rs"]
mod flags;
#[path = "../../phalanx/src/api/request/outcome.rs"]
mod outcome;

use flags::{Counter, Fences, Gate, LINE_PAYLOAD, NumberedWords, Park, Signals, StampedLine, StampedWord};
use loom::sync::Arc;
use loom::thread;
use os::sync::{AtomicU32, Ordering, UnsafeCell};
use outcome::Outcome;
use std::task::{Wake, Waker};

/// A reader that sees the stamp sees the payload, also when the writer writes the line again after the reader
/// said that it is done.
#[test]
fn a_stamp_covers_its_payload() {
    loom::model(|| {
        let line = Arc::new(StampedLine::new());
        let done = Arc::new(Counter::new());
        let writer = {
            let (line, done) = (line.clone(), done.clone());
            thread::spawn(move || {
                // SAFETY: nobody has read the line yet.
                unsafe { line.write(1, [1u8; LINE_PAYLOAD].as_ptr(), LINE_PAYLOAD) };
                while done.get() < 1 {
                    thread::yield_now();
                }
                // SAFETY: its reader is done.
                unsafe { line.write(2, [2u8; LINE_PAYLOAD].as_ptr(), LINE_PAYLOAD) };
            })
        };
        for stamp in 1..=2u64 {
            while !line.is(stamp) {
                thread::yield_now();
            }
            let mut read = [0u8; LINE_PAYLOAD];
            // SAFETY: stamped, and the writer waits for `done`.
            unsafe { line.read(read.as_mut_ptr(), LINE_PAYLOAD) };
            assert!(read.iter().all(|byte| u64::from(*byte) == stamp));
            done.set(stamp);
        }
        writer.join().unwrap();
    });
}

/// Memory changes hands with the number that names it: who gets it reads it, and writes it again for the one
/// who gave it, or gives it back empty.
#[test]
fn a_chunk_is_whose_number_says_so() {
    loom::model(|| {
        let chunk = Arc::new(UnsafeCell::new(0));
        let [there, back, empty] = std::array::from_fn(|_| Arc::new(StampedWord::new()));
        let wait = |word: &StampedWord, number| {
            while word.get(number).is_none() {
                thread::yield_now();
            }
            assert_eq!(word.get(number), Some(7));
        };
        // SAFETY: who has the number has the chunk; loom looks whether that is so.
        let read = |chunk: &UnsafeCell<u32>| chunk.with(|value| unsafe { *value });
        // SAFETY: as above.
        let write = |chunk: &UnsafeCell<u32>, new| chunk.with_mut(|value| unsafe { *value = new });
        let peer = {
            let (chunk, there, back, empty) = (chunk.clone(), there.clone(), back.clone(), empty.clone());
            thread::spawn(move || {
                wait(&there, 1);
                assert_eq!(read(&chunk), 1);
                write(&chunk, 2);
                back.put(1, 7);
                wait(&there, 2);
                assert_eq!(read(&chunk), 3);
                empty.put(1, 7);
            })
        };
        write(&chunk, 1);
        there.put(1, 7);
        wait(&back, 1);
        assert_eq!(read(&chunk), 2);
        write(&chunk, 3);
        there.put(2, 7);
        wait(&empty, 1);
        write(&chunk, 4);
        peer.join().unwrap();
    });
}

/// Two ranks exchange chunks through rings, of one chunk each, that swap owners: each writes where the other
/// wrote the time before, when it has read that and the other says that it is done.
#[test]
fn rings_that_change_hands_keep_what_is_to_be_read() {
    struct Rank {
        chunk: UnsafeCell<u64>,
        published: Counter,
        done: Counter,
    }
    let mut explorer = loom::model::Builder::new();
    // All interleavings take hours.
    explorer.preemption_bound = Some(3);
    explorer.check(|| {
        let rank = || Rank { chunk: UnsafeCell::new(0), published: Counter::new(), done: Counter::new() };
        let ranks = Arc::new([rank(), rank()]);
        let run = |own: usize, ranks: &[Rank; 2]| {
            let wait = |counter: &Counter, value| {
                while counter.get() < value {
                    thread::yield_now();
                }
            };
            let (rank, peer) = (&ranks[own], &ranks[1 - own]);
            let chunk = |writer: usize, number: u64| &ranks[writer ^ (number % 2) as usize].chunk;
            for number in 0..3 {
                wait(&peer.done, number);
                // SAFETY: nobody reads it any more; loom looks whether that is so.
                chunk(own, number).with_mut(|value| unsafe { *value = number * 2 + own as u64 });
                rank.published.set(number + 1);
                wait(&peer.published, number + 1);
                // SAFETY: published.
                let read = chunk(1 - own, number).with(|value| unsafe { *value });
                assert_eq!(read, number * 2 + 1 - own as u64);
                rank.done.set(number + 1);
            }
        };
        let peer = {
            let ranks = ranks.clone();
            thread::spawn(move || run(1, &ranks))
        };
        run(0, &ranks);
        peer.join().unwrap();
    });
}

/// A line is written again by a rank that has only heard from somebody else that its reader is done with it:
/// what ranks do that go in rounds.
#[test]
fn that_a_reader_is_done_may_be_heard_from_another() {
    loom::model(|| {
        let lines: Arc<[StampedLine; 3]> = Arc::new(std::array::from_fn(|_| StampedLine::new()));
        let wait = |line: &StampedLine, stamp| {
            while !line.is(stamp) {
                thread::yield_now();
            }
        };
        let reader = {
            let lines = lines.clone();
            thread::spawn(move || {
                wait(&lines[0], 1);
                let mut read = [0u8; LINE_PAYLOAD];
                // SAFETY: stamped, and not written again before what this rank does next was heard of.
                unsafe { lines[0].read(read.as_mut_ptr(), LINE_PAYLOAD) };
                assert_eq!(read, [1; LINE_PAYLOAD]);
                // SAFETY: this rank's line, which has no reader but the one that waits for it.
                unsafe { lines[1].write(2, [2; LINE_PAYLOAD].as_ptr(), LINE_PAYLOAD) };
            })
        };
        let between = {
            let lines = lines.clone();
            thread::spawn(move || {
                wait(&lines[1], 2);
                // SAFETY: as above.
                unsafe { lines[2].write(2, [2; LINE_PAYLOAD].as_ptr(), LINE_PAYLOAD) };
            })
        };
        // SAFETY: nobody has read the line yet.
        unsafe { lines[0].write(1, [1; LINE_PAYLOAD].as_ptr(), LINE_PAYLOAD) };
        wait(&lines[2], 2);
        // SAFETY: its reader is done; loom reports it if it is not.
        unsafe { lines[0].write(3, [3; LINE_PAYLOAD].as_ptr(), LINE_PAYLOAD) };
        reader.join().unwrap();
        between.join().unwrap();
    });
}

/// A reader that comes while words are written again never gets new ones for those of the old number, nor a
/// mixture.
#[test]
fn words_belong_to_their_number() {
    loom::model(|| {
        let words = Arc::new(NumberedWords::new());
        words.write(1, [1; 3]);
        let writer = {
            let words = words.clone();
            thread::spawn(move || words.write(2, [2; 3]))
        };
        for number in 1..=2 {
            if let Some(read) = words.read(number) {
                assert_eq!(read, [number; 3]);
            }
        }
        writer.join().unwrap();
        assert_eq!((words.read(1), words.read(2)), (None, Some([2; 3])));
    });
}

/// Either the sleeper sees the progress before it sleeps, or whoever makes progress sees the sleeper.
#[test]
fn no_wake_up_is_lost() {
    loom::model(|| {
        let state = Arc::new((Park::new(), Park::new(), Counter::new()));
        let publisher = {
            let state = state.clone();
            thread::spawn(move || {
                let (own, sleeper, progress) = &*state;
                progress.set(1);
                if own.has_sleepers(Fences::Symmetric) {
                    sleeper.wake();
                }
            })
        };
        let (awaited, own, progress) = &*state;
        let turn = own.prepare(std::iter::once(awaited), Fences::Symmetric);
        let ready = progress.get() == 1;
        publisher.join().unwrap();
        // The publisher is through: a sleeper that did not see its progress must have been woken.
        assert!(ready || !own.is_asleep(turn), "asleep for ever");
        Park::finish(std::iter::once(awaited));
    });
}

/// A rank waits for a signal, reads what was put before it, and signals that its part may be written again.
#[test]
fn a_signal_covers_what_was_put_before() {
    loom::model(|| {
        let window = Arc::new((UnsafeCell::new(0u32), Signals::new(), Signals::new()));
        let wait = |signals: &Signals, count| {
            while signals.given() < count {
                thread::yield_now();
            }
        };
        let reader = {
            let window = window.clone();
            thread::spawn(move || {
                let (part, there, back) = &*window;
                for count in 1..=2 {
                    wait(there, count);
                    // SAFETY: signaled, and its writer waits for the signal back; loom looks whether that is so.
                    part.with(|value| assert_eq!(u64::from(unsafe { *value }), count));
                    back.give();
                }
            })
        };
        let (part, there, back) = &*window;
        for count in 1..=2 {
            // SAFETY: its reader waits for the signal, or has given one back.
            part.with_mut(|value| unsafe { *value = count });
            there.give();
            wait(back, count.into());
        }
        reader.join().unwrap();
    });
}

/// Either a rank that waits for a signal sees it before it sleeps, or the one who gives it sees the sleeper.
#[test]
fn no_signal_leaves_its_rank_asleep() {
    loom::model(|| {
        let state = Arc::new((Park::new(), Park::new(), Signals::new()));
        let giver = {
            let state = state.clone();
            thread::spawn(move || {
                let (own, sleeper, signals) = &*state;
                signals.give();
                if own.has_sleepers(Fences::Symmetric) {
                    sleeper.wake();
                }
            })
        };
        let (awaited, own, signals) = &*state;
        let turn = own.prepare(std::iter::once(awaited), Fences::Symmetric);
        let has_come = signals.given() == 1;
        giver.join().unwrap();
        assert!(has_come || !own.is_asleep(turn), "asleep for ever");
        Park::finish(std::iter::once(awaited));
    });
}

/// Two ranks have their parts to themselves before and after an epoch; in it each reads an element of the other's part and writes one. An
/// epoch begins and ends when both have stamped a line, as in a barrier.
#[test]
fn a_part_is_its_ranks_own_between_epochs() {
    struct Rank {
        /// They alternate: a rank is at most one meeting ahead.
        lines: [StampedLine; 2],
        /// What its rank writes and the other reads, and the other way round.
        part: [UnsafeCell<u64>; 2],
    }
    let mut explorer = loom::model::Builder::new();
    explorer.preemption_bound = Some(3);
    explorer.check(|| {
        let rank = || Rank {
            lines: [StampedLine::new(), StampedLine::new()],
            part: [UnsafeCell::new(0), UnsafeCell::new(0)],
        };
        let ranks = Arc::new([rank(), rank()]);
        let run = |own: usize, ranks: &[Rank; 2]| {
            let (rank, peer) = (&ranks[own], &ranks[1 - own]);
            let meet = |stamp: u64| {
                let line = stamp as usize % 2;
                // SAFETY: no bytes.
                unsafe { rank.lines[line].write(stamp, [].as_ptr(), 0) };
                while !peer.lines[line].is(stamp) {
                    thread::yield_now();
                }
            };
            for epoch in 0..2u64 {
                let value = |of: usize| 10 * epoch + of as u64;
                // SAFETY: outside of epochs a part is its rank's own; loom looks whether that is so.
                rank.part[0].with_mut(|element| unsafe { *element = value(own) });
                meet(2 * epoch + 1);
                // SAFETY: in the epoch its rank leaves the part alone, and the two elements are not the same.
                peer.part[0].with(|element| assert_eq!(unsafe { *element }, value(1 - own)));
                // SAFETY: as above.
                peer.part[1].with_mut(|element| unsafe { *element = value(own) + 5 });
                meet(2 * epoch + 2);
                // SAFETY: as before the epoch.
                rank.part[1].with(|element| assert_eq!(unsafe { *element }, value(1 - own) + 5));
            }
        };
        let peer = {
            let ranks = ranks.clone();
            thread::spawn(move || run(1, &ranks))
        };
        run(0, &ranks);
        peer.join().unwrap();
    });
}

/// The same with another thread of the sleeper's rank, which goes to sleep, or thinks better of it, at the
/// same time.
#[test]
fn threads_of_a_rank_take_no_wake_up_from_each_other() {
    loom::model(|| {
        let state = Arc::new((Park::new(), Park::new(), Counter::new()));
        let publisher = {
            let state = state.clone();
            thread::spawn(move || {
                let (own, sleeper, progress) = &*state;
                progress.set(1);
                if own.has_sleepers(Fences::Symmetric) {
                    sleeper.wake();
                }
            })
        };
        let other = {
            let state = state.clone();
            thread::spawn(move || {
                let _ = state.1.prepare(std::iter::empty(), Fences::Symmetric);
                Park::finish(std::iter::empty());
            })
        };
        let (awaited, own, progress) = &*state;
        let turn = own.prepare(std::iter::once(awaited), Fences::Symmetric);
        let ready = progress.get() == 1;
        publisher.join().unwrap();
        other.join().unwrap();
        assert!(ready || !own.is_asleep(turn), "asleep for ever");
        Park::finish(std::iter::once(awaited));
    });
}

/// Once the closer has found the gate empty, its memory is not read any more.
#[test]
fn a_closed_gate_keeps_readers_out() {
    loom::model(|| {
        let state = Arc::new((Gate::new(), AtomicU32::new(0), UnsafeCell::new(0u32)));
        let reader = {
            let state = state.clone();
            thread::spawn(move || {
                let (gate, closed, memory) = &*state;
                if gate.enter(Fences::Symmetric, || closed.load(Ordering::Acquire) != 0) {
                    // SAFETY: inside the gate the owner leaves the memory alone.
                    memory.with(|value| assert_eq!(unsafe { *value }, 0));
                    gate.leave();
                }
            })
        };
        let (gate, closed, memory) = &*state;
        closed.store(1, Ordering::Release);
        Fences::Symmetric.slow_side();
        while gate.is_inside() {
            thread::yield_now();
        }
        // SAFETY: the gate is closed and nobody is inside; loom reports it if somebody is.
        memory.with_mut(|value| unsafe { *value = 1 });
        reader.join().unwrap();
    });
}

/// What a thread sleeps on, as `Request::wait_any` does on its own. Not loom's, which takes a thread that waits for another one's end for
/// one that is parked.
struct Parker {
    is_woken: os::sync::Mutex<bool>,
    changed: os::sync::Condvar,
}

impl Parker {
    fn new() -> std::sync::Arc<Parker> {
        let (is_woken, changed) = (os::sync::Mutex::new(false), os::sync::Condvar::new());
        std::sync::Arc::new(Parker { is_woken, changed })
    }

    fn park(&self) {
        let mut is_woken = os::sync::lock(&self.is_woken);
        while !*is_woken {
            is_woken = os::sync::wait(&self.changed, is_woken);
        }
        *is_woken = false;
    }
}

impl Wake for Parker {
    fn wake(self: std::sync::Arc<Self>) {
        *os::sync::lock(&self.is_woken) = true;
        self.changed.notify_one();
    }
}

/// Puts each result in a thread of its own.
fn put_all(
    outcome: &std::sync::Arc<Outcome>,
    results: &[Result<(), &'static str>],
) -> Vec<thread::JoinHandle<()>> {
    let put = |result: &Result<(), &'static str>| {
        let (outcome, result) = (outcome.clone(), *result);
        thread::spawn(move || outcome.put(result))
    };
    results.iter().map(put).collect()
}

/// A task that polls is woken when the last operation of its request is over, whichever that is.
#[test]
fn a_request_that_is_polled_wakes_its_task() {
    loom::model(|| {
        let outcome = Outcome::of(2);
        let threads = put_all(&outcome, &[Ok(()), Err("lost")]);
        let parker = Parker::new();
        while !outcome.is_there_or_wakes(&Waker::from(parker.clone())) {
            parker.park();
        }
        assert_eq!(outcome.take(), Err("lost"));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// A wait begins before, while, or after the operations end.
#[test]
fn a_request_that_is_waited_for_answers_its_first_error() {
    loom::model(|| {
        let outcome = Outcome::of(2);
        let threads = put_all(&outcome, &[Err("lost"), Ok(())]);
        assert_eq!(outcome.take(), Err("lost"));
        assert!(outcome.is_there());
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// Of two requests the first that is complete ends the wait, and then the other.
#[test]
fn a_wait_for_any_request_misses_none() {
    loom::model(|| {
        let mut waiting = vec![Outcome::of(1), Outcome::of(1)];
        let threads: Vec<_> = waiting.iter().flat_map(|outcome| put_all(outcome, &[Ok(())])).collect();
        let parker = Parker::new();
        let waker = Waker::from(parker.clone());
        while !waiting.is_empty() {
            match waiting.iter().position(|outcome| outcome.is_there_or_wakes(&waker)) {
                Some(place) => drop(waiting.swap_remove(place)),
                None => parker.park(),
            }
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}
