//! The host backend's flag protocols under shuttle: several ranks over several operations, which are too many
//! interleavings for loom. Random schedules, and ones with few preemptions (PCT), where a rank that sleeps
//! sleeps until it is woken.
//!
//! `flags.rs` is compiled here once more, on shuttle's atomics, which are sequentially consistent: what the
//! memory model reorders is loom's.

// The types are as they are in the library; not everything they offer is tried.
#![allow(dead_code)]

mod os {
    /// Bytes of a cache line.
    pub const LINE: usize = 64;

    pub mod sync {
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

    use crate::os::sync::{AtomicU32, Ordering};
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

#[path = "../../phalanx/src/control/flags.rs"]
mod flags;
#[path = "../../phalanx/src/backend/host/grid.rs"]
mod grid;

use flags::{Counter, Fences, Gate, NumberedWords, Park, Signals, StampedLine};
use grid::Grid;
use os::sync::{AtomicU32, Ordering, UnsafeCell};
use phalanx_testkit::suite::cases;
use shuttle::sync::Arc;
use shuttle::thread;
use std::time::Duration;

/// Schedules of a model, as in CI.
const SCHEDULES: usize = 2000;

/// Preemptions of a PCT schedule.
const DEPTH: usize = 4;

fn explore(model: impl Fn() + Send + Sync + Clone + 'static) {
    shuttle::check_random(model.clone(), cases(SCHEDULES));
    shuttle::check_pct(model, cases(SCHEDULES), DEPTH);
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
    let others = || (0..all.len()).filter(move |peer| *peer != own).map(|peer| &all[peer].park);
    sleep_until(&all[own].park, others, fences, is);
}

fn sleep_until<'a, I: Iterator<Item = &'a Park>>(
    own: &Park,
    awaited: impl Fn() -> I,
    fences: Fences,
    is: impl Fn() -> bool,
) {
    while !is() {
        let turn = own.prepare(awaited(), fences);
        if !is() {
            own.sleep(turn, Duration::MAX);
        }
        Park::finish(awaited());
    }
}

/// Operations in which every rank tells every other a number, in lines that are used again as soon as their
/// readers are done, with ranks that sleep at every wait.
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

/// Rank 0 receives from whichever rank has sent, in turn; the others send messages in lines that are used again.
fn receive_any(count: usize, messages: u64) {
    let all: Vec<Rank> = (0..count).map(|_| Rank::new()).collect();
    let taken: Vec<Counter> = (0..count).map(|_| Counter::new()).collect();
    ranks(count, (all, taken), move |own, (all, taken): &(Vec<Rank>, Vec<Counter>)| {
        if own > 0 {
            for message in 1..=messages {
                wait(all, own, Fences::Symmetric, || taken[own].get() + 1 >= message);
                let number = message * 100 + own as u64;
                // SAFETY: this rank's line, which rank 0 has read; 8 bytes.
                unsafe { all[own].line.write(message, number.to_ne_bytes().as_ptr(), 8) };
                tell(all, own, Fences::Symmetric);
            }
            return;
        }
        let mut last = 0;
        for _ in 0..messages * (count as u64 - 1) {
            let has_sent = |sender: &usize| all[*sender].line.is(taken[*sender].get() + 1);
            // The one after the last comes first.
            let in_turn = || (last + 1..count).chain(1..=last);
            wait(all, 0, Fences::Symmetric, || in_turn().any(|sender| has_sent(&sender)));
            let sender = in_turn().find(has_sent).unwrap();
            let message = taken[sender].get() + 1;
            let mut number = [0u8; 8];
            // SAFETY: stamped, and its writer waits until it is taken; 8 bytes.
            unsafe { all[sender].line.read(number.as_mut_ptr(), 8) };
            assert_eq!(u64::from_ne_bytes(number), message * 100 + sender as u64);
            taken[sender].set(message);
            tell(all, 0, Fences::Symmetric);
            last = sender;
        }
    });
}

#[test]
fn a_rank_that_receives_from_any_other_misses_no_message() {
    explore(|| receive_any(2, 3));
    explore(|| receive_any(4, 2));
}

/// One rank's part of a window in a ring, and the signals that it gets from both sides.
struct Windowed {
    park: Park,
    part: UnsafeCell<u64>,
    put: Signals,
    taken: Signals,
}

/// Each rank puts a number into the next one's part and signals; who has read it signals back. Ranks sleep at every wait.
fn ring_of_signals(count: usize, rounds: u64, fences: Fences) {
    let rank = || Windowed {
        park: Park::new(),
        part: UnsafeCell::new(0),
        put: Signals::new(),
        taken: Signals::new(),
    };
    let all: Vec<Windowed> = (0..count).map(|_| rank()).collect();
    ranks(count, all, move |own, all: &Vec<Windowed>| {
        let (next, before) = (&all[(own + 1) % count], (own + count - 1) % count);
        let signal = |signals: &Signals| {
            signals.give();
            if all[own].park.has_sleepers(fences) {
                all.iter().for_each(|rank| rank.park.wake());
            }
        };
        let wait = |from: usize, signals: &Signals, wanted| {
            let awaited = || std::iter::once(&all[from].park);
            sleep_until(&all[own].park, awaited, fences, || signals.given() >= wanted);
        };
        for round in 1..=rounds {
            // SAFETY: its rank has signaled that it has read what was there, and reads it again after the signal.
            next.part.with_mut(|part| unsafe { *part = 100 * round + own as u64 });
            signal(&next.put);
            wait(before, &all[own].put, round);
            // SAFETY: signaled, and the rank before this one waits for the signal back.
            all[own].part.with(|part| assert_eq!(unsafe { *part }, 100 * round + before as u64));
            signal(&all[before].taken);
            wait((own + 1) % count, &all[own].taken, round);
        }
    });
}

#[test]
fn ranks_that_sleep_for_signals_are_woken_and_read_what_was_put() {
    for fences in [Fences::Symmetric, Fences::Asymmetric] {
        explore(move || ring_of_signals(2, 3, fences));
        explore(move || ring_of_signals(4, 2, fences));
    }
}

/// What one rank of a grid shows the others, in the slot of an operation.
struct Slot {
    /// Its contribution to the slice of each column, what its row contributes to its own slice, and the
    /// result of that.
    contributions: Vec<StampedLine>,
    row: StampedLine,
    result: StampedLine,
}

struct Member {
    park: Park,
    /// They alternate, and nothing is asked before one is written again.
    slots: [Slot; 2],
}

/// All_reduces in rounds: see `collective/rounds.rs`. A number for each column takes a slice's place.
fn rounds(count: usize, operations: u64) {
    let slot = || Slot {
        contributions: (0..count).map(|_| StampedLine::new()).collect(),
        row: StampedLine::new(),
        result: StampedLine::new(),
    };
    let all: Vec<Member> =
        (0..count).map(|_| Member { park: Park::new(), slots: [slot(), slot()] }).collect();
    ranks(count, all, move |own, all: &Vec<Member>| {
        let grid = Grid::new(own, count);
        let number = |operation, rank: usize, column: usize| operation * 1000 + (rank * 10 + column) as u64;
        for operation in 1..=operations {
            let slot = |rank: usize| &all[rank].slots[operation as usize % 2];
            let show = |line: &StampedLine, numbers: &[u64]| {
                // SAFETY: this rank's line, which is tried to have no readers any more; up to 7 numbers.
                unsafe { line.write(operation, numbers.as_ptr().cast(), size_of_val(numbers)) };
                if all[own].park.has_sleepers(Fences::Symmetric) {
                    all.iter().for_each(|member| member.park.wake());
                }
            };
            let take = |rank: usize, line: &StampedLine, count: usize| {
                let awaited = || std::iter::once(&all[rank].park);
                sleep_until(&all[own].park, awaited, Fences::Symmetric, || line.is(operation));
                let mut numbers = vec![0u64; count];
                // SAFETY: stamped; up to 7 numbers.
                unsafe { line.read(numbers.as_mut_ptr().cast(), size_of_val(&numbers[..])) };
                numbers
            };
            let row = grid.ranks_of(grid.row);
            let total = |column| (0..count).map(|rank| number(operation, rank, column)).sum::<u64>();
            for column in 0..grid.columns {
                show(&slot(own).contributions[column], &[number(operation, own, column)]);
            }
            if grid.column < grid.columns {
                let mut all_rows = vec![0; count];
                all_rows[own] = number(operation, own, grid.column);
                for peer in grid.row_peers() {
                    all_rows[peer] = take(peer, &slot(peer).contributions[grid.column], 1)[0];
                }
                show(&slot(own).row, &all_rows[row.clone()]);
                for other in grid.other_rows() {
                    let members = grid.ranks_of(other);
                    let writer = members.start + grid.column;
                    all_rows[members.clone()].copy_from_slice(&take(
                        writer,
                        &slot(writer).row,
                        members.len(),
                    ));
                }
                assert_eq!(all_rows.iter().sum::<u64>(), total(grid.column));
                show(&slot(own).result, &[all_rows.iter().sum()]);
            }
            for peer in grid.row_peers().filter(|peer| peer - row.start < grid.columns) {
                assert_eq!(take(peer, &slot(peer).result, 1), [total(peer - row.start)]);
            }
        }
    });
}

/// Two rows of two; and longer ones with a rank that has no slice, which knows of the other row only by the
/// results.
#[test]
fn ranks_in_rounds_read_what_was_meant_for_them() {
    for (count, operations) in [(4, 4), (5, 4)] {
        explore(move || rounds(count, operations));
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
