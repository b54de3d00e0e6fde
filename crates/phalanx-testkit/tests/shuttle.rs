//! The host backend's flag protocols under shuttle: several ranks over several operations, which are too many interleavings
//! for loom. Random schedules, and ones with few preemptions (PCT), where a rank that sleeps sleeps until it is woken.
//!
//! `protocol.rs` is compiled here once more, on shuttle's atomics, which are sequentially consistent: what the memory model
//! reorders is loom's.

// The types are as they are in the library; not everything they offer is tried.
#![allow(dead_code)]

mod sync {
    pub use shuttle::sync::atomic::{AtomicU32, AtomicU64, Ordering, compiler_fence, fence};

    /// [`std::cell::UnsafeCell`] with loom's interface.
    pub struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    // SAFETY: who may touch it when is what is tried.
    unsafe impl<T> Sync for UnsafeCell<T> {}

    impl<T> UnsafeCell<T> {
        pub fn new(value: T) -> UnsafeCell<T> {
            UnsafeCell(std::cell::UnsafeCell::new(value))
        }

        pub fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
            f(self.0.get())
        }

        pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0.get())
        }
    }
}

mod os {
    use crate::sync::{AtomicU32, Ordering};
    use shuttle::sync::{Condvar, Mutex};

    shuttle::lazy_static! {
        /// All who sleep, on whatever word: a futex may wake too many.
        static ref SLEEPERS: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());
    }

    /// Without a timeout: shuttle reports it if nobody is left to wake a sleeper.
    pub fn futex_wait(word: &AtomicU32, expected: u32, _: std::time::Duration) {
        let (sleepers, woken) = &*SLEEPERS;
        let sleeping = sleepers.lock().unwrap();
        if word.load(Ordering::SeqCst) == expected {
            drop(woken.wait(sleeping).unwrap());
        }
    }

    pub fn futex_wake(_: &AtomicU32) {
        let (sleepers, woken) = &*SLEEPERS;
        let _sleeping = sleepers.lock().unwrap();
        woken.notify_all();
    }

    /// What it orders is in order here.
    pub fn heavy_barrier() {}
}

#[path = "../../phalanx/src/backend/host/protocol.rs"]
mod protocol;

use protocol::{Counter, Fences, Gate, NumberedWords, Park, StampedLine};
use shuttle::sync::Arc;
use shuttle::thread;
use std::time::Duration;
use sync::{AtomicU32, Ordering, UnsafeCell};

const SCHEDULES: usize = 2000;

/// Preemptions of a PCT schedule.
const DEPTH: usize = 4;

fn explore(model: impl Fn() + Send + Sync + Clone + 'static) {
    shuttle::check_random(model.clone(), SCHEDULES);
    shuttle::check_pct(model, SCHEDULES, DEPTH);
}

/// Runs `rank` for every rank, with what they share.
fn ranks<S: Send + Sync + 'static>(
    count: usize,
    shared: S,
    rank: impl Fn(usize, &S) + Send + Copy + 'static,
) {
    let shared = Arc::new(shared);
    let others: Vec<_> = (1..count)
        .map(|number| {
            let shared = shared.clone();
            thread::spawn(move || rank(number, &shared))
        })
        .collect();
    rank(0, &shared);
    for other in others {
        other.join().unwrap();
    }
}

/// What one rank shows the others.
struct Rank {
    park: Park,
    line: StampedLine,
    /// Operations whose lines it has read.
    done: Counter,
}

impl Rank {
    fn new() -> Rank {
        Rank { park: Park::new(), line: StampedLine::new(), done: Counter::new() }
    }
}

/// After progress of `own`: wakes who waits for it.
fn tell(all: &[Rank], own: usize, fences: Fences) {
    if all[own].park.has_sleepers(fences) {
        for peer in (0..all.len()).filter(|peer| *peer != own) {
            all[peer].park.wake();
        }
    }
}

/// Sleeps until it is so.
fn wait(all: &[Rank], own: usize, fences: Fences, is: impl Fn() -> bool) {
    let awaited = || (0..all.len()).filter(move |peer| *peer != own).map(|peer| &all[peer].park);
    while !is() {
        all[own].park.prepare(awaited(), fences);
        if !is() {
            all[own].park.sleep(Duration::MAX);
        }
        all[own].park.finish(awaited());
    }
}

/// Operations in which every rank tells every other a number, in lines that are used again as soon as their readers
/// are done, with ranks that sleep at every wait.
fn exchange(count: usize, operations: u64, fences: Fences) {
    let all: Vec<Rank> = (0..count).map(|_| Rank::new()).collect();
    ranks(count, all, move |own, all: &Vec<Rank>| {
        for operation in 1..=operations {
            // Who still reads the line of the operation before?
            wait(all, own, fences, || all.iter().all(|rank| rank.done.get() + 1 >= operation));
            let number = operation * 100 + own as u64;
            // SAFETY: this rank's line, which nobody reads any more; 8 bytes.
            unsafe { all[own].line.write(operation, number.to_ne_bytes().as_ptr(), 8) };
            tell(all, own, fences);
            for (peer, rank) in all.iter().enumerate() {
                wait(all, own, fences, || rank.line.is(operation));
                let mut number = [0u8; 8];
                // SAFETY: stamped, and its writer waits for this rank's `done`; 8 bytes.
                unsafe { rank.line.read(number.as_mut_ptr(), 8) };
                assert_eq!(u64::from_ne_bytes(number), operation * 100 + peer as u64);
            }
            all[own].done.set(operation);
            tell(all, own, fences);
        }
    });
}

#[test]
fn ranks_that_sleep_are_woken_and_read_what_was_meant_for_them() {
    for fences in [Fences::Symmetric, Fences::Asymmetric] {
        explore(move || exchange(2, 4, fences));
        explore(move || exchange(4, 3, fences));
    }
}

/// Readers that come and go while a rank gives up: its memory is its own once it has found all gates empty.
#[test]
fn a_closed_gate_keeps_all_readers_out() {
    const READERS: usize = 3;
    explore(|| {
        let gates: [Gate; READERS] = std::array::from_fn(|_| Gate::new());
        let shared = (gates, AtomicU32::new(0), UnsafeCell::new(0u32));
        ranks(READERS + 1, shared, |own, (gates, closed, memory)| {
            let Some(gate) = own.checked_sub(1).map(|reader| &gates[reader]) else {
                closed.store(1, Ordering::SeqCst);
                Fences::Symmetric.slow_side();
                while gates.iter().any(Gate::is_inside) {
                    thread::yield_now();
                }
                // SAFETY: the gates are closed and nobody is inside.
                return memory.with_mut(|value| unsafe { *value = 1 });
            };
            while gate.enter(Fences::Symmetric, || closed.load(Ordering::SeqCst) != 0) {
                thread::yield_now();
                // SAFETY: inside the gate the owner leaves the memory alone.
                memory.with(|value| assert_eq!(unsafe { *value }, 0));
                gate.leave();
                thread::yield_now();
            }
        });
    });
}

/// Readers of words that change all the time.
#[test]
fn words_belong_to_their_number() {
    explore(|| {
        ranks(4, NumberedWords::new(), |own, words: &NumberedWords| {
            for number in 1..=6 {
                if own == 0 {
                    words.write(number, [number; 3]);
                } else if let Some(read) = words.read(number) {
                    assert_eq!(read, [number; 3]);
                }
            }
        });
    });
}
