//! Symmetric memory and its epochs, and memory that a host shares.

use crate::world::{Done, both, outcome, same};
use bytemuck::{Pod, Zeroable};
use libtest_mimic::Trial;
use phalanx::{AtomicElement, Bitwise, Comm, Error, Plain, ReduceOp, UsageError};
use phalanx_testkit::Scenario;
use phalanx_testkit::accesses::{self, Access};
use phalanx_testkit::random::Random;
use std::fmt::Debug;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("one_sided/puts_and_gets", |comm, _| outcome(puts_and_gets(&comm))),
    Scenario::rank("one_sided/strided", |comm, _| outcome(strided(&comm))),
    Scenario::rank("one_sided/atomics", |comm, _| outcome(atomics(&comm))),
    Scenario::rank("one_sided/tickets_and_locks", |comm, _| outcome(tickets_and_locks(&comm))),
    Scenario::rank("one_sided/signals", |comm, _| outcome(signals(&comm))),
    Scenario::rank("one_sided/epochs", |comm, _| outcome(epochs(&comm))),
    Scenario::rank("one_sided/programs", |comm, _| outcome(programs(&comm))),
    Scenario::rank("one_sided/arguments", |comm, _| outcome(arguments(&comm))),
];

/// What UCX lacks for a job on one host.
pub const SHARED: &[Scenario] =
    &[Scenario::rank("one_sided/shared_by_host", |comm, _| outcome(shared_by_host(&comm)))];

/// What MPI does not compare, or cannot survive.
pub const COMPARED: &[Scenario] = &[
    Scenario::rank("one_sided/mismatches", |comm, _| outcome(mismatches(&comm))),
    Scenario::rank("one_sided/unfinished", |comm, _| outcome(unfinished(&comm))),
];

pub fn trials() -> Vec<Trial> {
    let all = SCENARIOS.iter().chain(SHARED).flat_map(|scenario| both(*scenario, &[1, 2, 3, 8]));
    all.chain(COMPARED.iter().flat_map(|scenario| both(*scenario, &[2, 5]))).collect()
}

/// A struct without padding, of no size that a word has.
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
struct Particle {
    place: [f64; 2],
    kind: u32,
    id: u32,
}

/// Short and long, of each type: to the next rank, and back.
fn puts_and_gets(comm: &Comm) -> Done {
    moves(comm, |i| i as u8)?;
    moves(comm, |i| [i as u8, 1, 2])?;
    moves(comm, |i| i as u16)?;
    moves(comm, |i| i as f32)?;
    moves(comm, |i| i as u64)?;
    moves(comm, |i| Particle { place: [i as f64, -1.0], kind: 7, id: i as u32 })
}

fn moves<T: Plain + Zeroable + PartialEq + Debug>(comm: &Comm, value: impl Fn(usize) -> T) -> Done {
    const LEN: usize = 5000;
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let mut memory = comm.symmetric::<T>(LEN)?;
    same("a new part", memory.local(), vec![T::zeroed(); LEN])?;
    let pieces = [(0, 1), (3, 2), (10, 0), (10, 17), (100, 300), (1000, 4000)];
    let of = |rank: usize, (at, len): (usize, usize)| -> Vec<T> {
        (at..at + len).map(|i| value(i + 7 * rank)).collect()
    };
    let epoch = memory.epoch()?;
    for piece in pieces {
        epoch.put(&of(rank, piece), next, piece.0)?;
    }
    epoch.fence()?;
    // What this rank wrote is there for it.
    for piece in pieces {
        let mut back = vec![T::zeroed(); piece.1];
        epoch.get(&mut back, next, piece.0)?;
        same(&format!("{piece:?} of the next rank"), back, of(rank, piece))?;
    }
    epoch.end()?;
    let mut expected = vec![T::zeroed(); LEN];
    for (at, len) in pieces {
        expected[at..at + len].copy_from_slice(&of(before, (at, len)));
    }
    same("the part after the epoch", memory.local(), expected)?;
    Ok(memory.free()?)
}

fn strided(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    // Every rank writes a column of every rank's matrix, from every second element of its own.
    let mut matrix = comm.symmetric::<u32>(10 * ranks)?;
    let own: Vec<u32> = (0..20).map(|i| (100 * rank + i) as u32).collect();
    let epoch = matrix.epoch()?;
    for other in 0..ranks {
        epoch.put_strided(&own, 2, other, rank, ranks)?;
    }
    epoch.end()?;
    let expected: Vec<u32> =
        (0..10).flat_map(|row| (0..ranks).map(move |column| (100 * column + 2 * row) as u32)).collect();
    same("the matrix", matrix.local(), &expected)?;
    let epoch = matrix.epoch()?;
    let mut column = [u32::MAX; 28];
    epoch.get_strided(&mut column, 3, (rank + 1) % ranks, rank, ranks)?;
    epoch.end()?;
    for (index, element) in column.iter().enumerate() {
        let written = (100 * rank + 2 * index / 3) as u32;
        same("the column", *element, if index % 3 == 0 { written } else { u32::MAX })?;
    }
    Ok(matrix.free()?)
}

fn atomics(comm: &Comm) -> Done {
    fn sums<T: AtomicElement>(comm: &Comm, value: impl Fn(usize) -> T) -> Done {
        let ranks = comm.world_size();
        let mut memory = comm.symmetric::<T>(40)?;
        let ones = [value(1); 37];
        let epoch = memory.epoch()?;
        for other in 0..ranks {
            for _ in 0..3 {
                epoch.accumulate(&ones, other, 2, ReduceOp::Sum)?;
            }
            epoch.accumulate(&[value(comm.rank() + 1)], other, 0, ReduceOp::Max)?;
            epoch.fetch_and_op(value(1), other, 39, ReduceOp::Sum)?;
        }
        epoch.end()?;
        let mut expected = [value(3 * ranks); 40];
        (expected[0], expected[1], expected[39]) = (value(ranks), value(0), value(ranks));
        same(T::DTYPE.name(), memory.local(), expected)?;
        Ok(memory.free()?)
    }
    sums(comm, |x| x as i32)?;
    sums(comm, |x| x as u32)?;
    sums(comm, |x| x as i64)?;
    sums(comm, |x| x as u64)?;
    sums(comm, |x| x as f32)?;
    sums(comm, |x| x as f64)?;

    let mut bits = comm.symmetric::<u64>(4)?;
    bits.local_mut().copy_from_slice(&[0, u64::MAX, 0, 5]);
    let own = 1u64 << comm.rank();
    let epoch = bits.epoch()?;
    epoch.accumulate(&[own], 0, 0, Bitwise::Or)?;
    epoch.accumulate(&[!own], 0, 1, Bitwise::And)?;
    epoch.accumulate(&[own | 1 << 20], 0, 2, Bitwise::Xor)?;
    epoch.fetch_and_op(3, 0, 3, ReduceOp::Min)?;
    epoch.end()?;
    let all = (1u64 << comm.world_size()) - 1;
    let odd = (comm.world_size() as u64 % 2) << 20;
    let expected = if comm.rank() == 0 { [all, !all, all | odd, 3] } else { [0, u64::MAX, 0, 5] };
    same("bits", bits.local(), expected)?;
    bits.free()?;

    let mut values = comm.symmetric::<f64>(1)?;
    let epoch = values.epoch()?;
    same("a fetched zero", epoch.fetch(comm.rank(), 0)?, 0.0)?;
    same("what was there", epoch.swap(2.5, comm.rank(), 0)?, 0.0)?;
    same("what it was set to", epoch.fetch(comm.rank(), 0)?, 2.5)?;
    let refused = epoch.accumulate(&[1.0], 0, 0, ReduceOp::Avg);
    same("an average", matches!(refused, Err(Error::Unsupported(_))), true)?;
    epoch.end()?;
    Ok(values.free()?)
}

/// Each ticket goes to one rank, and one rank at a time has the lock.
fn tickets_and_locks(comm: &Comm) -> Done {
    const EACH: usize = 50;
    let ranks = comm.world_size();
    let mut memory = comm.symmetric::<i64>(3)?;
    let mut tickets = Vec::new();
    let epoch = memory.epoch()?;
    for _ in 0..EACH {
        tickets.push(epoch.fetch_and_op(1, 0, 0, ReduceOp::Sum)?);
    }
    for _ in 0..EACH / 5 {
        let mine = comm.rank() as i64 + 1;
        while epoch.compare_and_swap(0, mine, 0, 1)? != 0 {
            std::thread::yield_now();
        }
        // Only under the lock is this right.
        let count = epoch.fetch(0, 2)?;
        epoch.swap(count + 1, 0, 2)?;
        same("the owner of the lock", epoch.swap(0, 0, 1)?, mine)?;
    }
    epoch.end()?;
    let mut all = comm.all_gather_vec(&tickets)?.elements;
    all.sort_unstable();
    same("the tickets", all, (0..(EACH * ranks) as i64).collect::<Vec<_>>())?;
    if comm.rank() == 0 {
        same("the counts", memory.local(), [(EACH * ranks) as i64, 0, (EACH / 5 * ranks) as i64])?;
    }
    Ok(memory.free()?)
}

/// Data goes around the ring, each time when its signal has come.
fn signals(comm: &Comm) -> Done {
    const ROUNDS: usize = 20;
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let mut memory = comm.symmetric::<u32>(300)?;
    let epoch = memory.epoch()?;
    for round in 0..ROUNDS {
        if rank == 0 {
            epoch.put(&[round as u32 + 1; 300], next, 0)?;
            epoch.signal(next)?;
        }
        epoch.wait_signals(before, 1)?;
        let mut found = [0; 300];
        epoch.get(&mut found, rank, 0)?;
        // Every rank but the first adds one.
        let steps = if rank == 0 { ranks } else { rank };
        same("what came with the signal", found, [(round + steps) as u32; 300])?;
        if rank != 0 {
            epoch.put(&[found[0] + 1; 300], next, 0)?;
            epoch.signal(next)?;
        }
    }
    // Several at once, and some that are waited for in a later epoch.
    for other in 0..ranks {
        for _ in 0..3 {
            epoch.signal(other)?;
        }
    }
    for other in 0..ranks {
        epoch.wait_signals(other, 2)?;
    }
    epoch.end()?;
    let epoch = memory.epoch()?;
    for other in 0..ranks {
        epoch.wait_signals(other, 1)?;
    }
    let own = epoch.wait_signals(rank, 1);
    same("one more of its own", matches!(own, Err(Error::Usage(_))), true)?;
    epoch.end()?;
    Ok(memory.free()?)
}

/// What a rank writes to its own part between epochs, the others read in the next one; two memories at once.
fn epochs(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let mut table = comm.symmetric::<u64>(100)?;
    let mut counts = comm.symmetric::<u32>(ranks)?;
    for round in 0..30u64 {
        table.local_mut().fill(1000 * round + rank as u64);
        let reading = table.epoch()?;
        let counting = counts.epoch()?;
        for other in (0..ranks).map(|step| (rank + step) % ranks) {
            let mut found = [0; 100];
            reading.get(&mut found, other, 0)?;
            same("another rank's part", found, [1000 * round + other as u64; 100])?;
            counting.accumulate(&[1], other, rank, ReduceOp::Sum)?;
        }
        reading.end()?;
        if round % 2 == 0 {
            drop(counting)
        } else {
            counting.end()?
        };
        same("the counts", counts.local(), vec![round as u32 + 1; ranks])?;
    }
    counts.free()?;
    // The other one is dropped.
    Ok(())
}

/// Random accesses, which a model of all parts does as well, in the order of the ranks.
fn programs(comm: &Comm) -> Done {
    let mut random = Random::new(45);
    let mut epoch = || {
        let by = (0..comm.world_size()).flat_map(|by| [by; 8]);
        by.map(|by| Access::random(by, &mut random)).collect::<Vec<_>>()
    };
    let epochs: Vec<_> = (0..40).map(|_| epoch()).collect();
    Ok(accesses::perform(comm, 200, &epochs)?)
}

/// Wrong ones are errors that name value and limit, and move nothing.
fn arguments(comm: &Comm) -> Done {
    let ranks = comm.world_size();
    let mut memory = comm.symmetric::<u32>(10)?;
    let epoch = memory.epoch()?;
    let refused = [
        (epoch.put(&[1; 3], 0, 8), "put: 3 elements from index 8 on are not in the 10 elements"),
        (epoch.put(&[1; 11], 0, 0), "11 elements from index 0"),
        (epoch.put(&[], 0, 11), "0 elements from index 11"),
        (epoch.put(&[1], 0, usize::MAX), "1 elements from index 18446744073709551615"),
        (epoch.get(&mut [0], 0, 10), "get: 1 elements from index 10"),
        (
            epoch.put(&[1], ranks, 0),
            &format!("put: rank {ranks} does not exist; the ranks are 0 to {}", ranks - 1),
        ),
        (epoch.put_strided(&[1; 4], 1, 0, 1, 3), "put_strided: 10 elements from index 1"),
        (epoch.put_strided(&[1; 2], 1, 0, 1, usize::MAX), "put_strided: "),
        (epoch.put_strided(&[1; 2], 0, 0, 1, 1), "put_strided: stride=\"0\""),
        (epoch.get_strided(&mut [0; 2], 1, 0, 1, 0), "get_strided: stride=\"0\""),
        (epoch.fetch(0, 10).map(drop), "fetch: 1 elements from index 10"),
        (epoch.compare_and_swap(1, 2, ranks, 0).map(drop), "compare_and_swap: rank"),
        (epoch.accumulate(&[1; 2], 0, 9, ReduceOp::Sum), "accumulate: 2 elements from index 9"),
        (epoch.signal(ranks + 3), "signal: rank"),
        (epoch.wait_signals(ranks, 1), "wait_signals: rank"),
        (epoch.flush(ranks), "flush: rank"),
    ];
    for (outcome, says) in refused {
        let error = outcome.err().ok_or_else(|| format!("no error for {says}"))?;
        let text = error.to_string();
        same(&text, text.contains(says) && matches!(error, Error::Usage(_)), true)?;
    }
    // At the limits.
    epoch.put(&[], 0, 10)?;
    epoch.put_strided(&[1; 4], 1, ranks - 1, 0, 3)?;
    epoch.end()?;
    let last = comm.rank() == ranks - 1;
    same("the part", memory.local(), if last { [1, 0, 0, 1, 0, 0, 1, 0, 0, 1] } else { [0; 10] })?;
    memory.free()?;
    let huge = comm.symmetric::<u64>(usize::MAX / 4);
    let is_overflow = huge.is_err_and(
        |error| matches!(error, Error::Usage(usage) if matches!(*usage, UsageError::Overflow { .. })),
    );
    same("a huge part is refused", is_overflow, true)?;
    // None, and of no word's size.
    let mut empty = comm.symmetric::<[u8; 3]>(0)?;
    empty.epoch()?.end()?;
    Ok(empty.free()?)
}

fn shared_by_host(comm: &Comm) -> Done {
    const LEN: usize = 10_007;
    let topology = comm.host_topology();
    let is_first = topology.ranks_of(topology.host_of(comm.rank()))[0] == comm.rank();
    let mut called = false;
    let table = comm.shared_by_host(LEN, |table: &mut [u32]| {
        called = true;
        table.iter_mut().enumerate().for_each(|(i, element)| *element += 3 * i as u32);
        phalanx::Result::Ok(())
    })?;
    same("whether it was called", called, is_first)?;
    same("the table", &table[..], (0..LEN as u32).map(|i| 3 * i).collect::<Vec<_>>())?;
    table.free()?;

    let rank = comm.rank() as u8;
    let parts = comm.shared_by_host_in_parts(LEN, |range, part: &mut [[u8; 3]]| {
        part.iter_mut().zip(range).for_each(|(element, i)| *element = [rank, i as u8, (i >> 8) as u8]);
        phalanx::Result::Ok(())
    })?;
    let is_right = |(i, element): (usize, &[u8; 3])| element[1..] == [i as u8, (i >> 8) as u8];
    same(
        "the parts",
        parts.iter().enumerate().all(is_right) && parts.is_sorted_by_key(|element| element[0]),
        true,
    )?;
    parts.free()?;

    let failing = comm.shared_by_host(9, |_: &mut [u8]| Err("there is no file"));
    let text = failing.err().ok_or("a table that was not filled")?.to_string();
    let says = if is_first { "there is no file" } else { "rank 0 could not fill its part" };
    same(&text, text.contains(says), true)?;
    Ok(comm.barrier()?)
}

fn mismatches(comm: &Comm) -> Done {
    let is_first = comm.rank() == 0;
    let all = |comm: &Comm, says: [&str; 2], outcome: phalanx::Result<()>| -> Done {
        let text = outcome.err().ok_or("no mismatch")?.to_string();
        same(&text, says.iter().all(|part| text.contains(part)), true)?;
        drop(comm.barrier());
        Ok(())
    };
    let part = comm.split(Some(0), 0)?.ok_or("a part")?;
    let lengths = part.symmetric::<f32>(if is_first { 10 } else { 11 }).map(drop);
    all(&part, ["symmetric(f32 × 10)", "symmetric(f32 × 11)"], lengths)?;
    let part = comm.split(Some(0), 0)?.ok_or("a part")?;
    let types =
        if is_first { part.symmetric::<f32>(10).map(drop) } else { part.symmetric::<u32>(10).map(drop) };
    all(&part, ["symmetric(f32 × 10)", "symmetric(u32 × 10)"], types)?;
    let part = comm.split(Some(0), 0)?.ok_or("a part")?;
    let (mut one, mut other) = (part.symmetric::<u8>(10)?, part.symmetric::<u8>(10)?);
    let begun = if is_first { one.epoch().map(drop) } else { other.epoch().map(drop) };
    all(&part, ["epoch(memory 1)", "epoch(memory 2)"], begun)?;
    let part = comm.split(Some(0), 0)?.ok_or("a part")?;
    let mut memory = part.symmetric::<u8>(10)?;
    let epoch = memory.epoch()?;
    let ended = if is_first { epoch.end() } else { part.barrier() };
    all(&part, ["end of an epoch(memory 1)", "barrier"], ended)
}

/// A part is never lent while another rank may write to it.
fn unfinished(comm: &Comm) -> Done {
    let part = comm.split(Some(0), 0)?.ok_or("a part")?;
    let mut memory = part.symmetric::<u64>(100)?;
    memory.local_mut().fill(5);
    std::mem::forget(memory.epoch()?);
    let shared = memory.local().as_ptr();
    same("a copy", memory.local(), [5; 100])?;
    memory.local_mut()[0] = 6;
    same("the same copy", (memory.local().as_ptr(), memory.local()[0]), (shared, 6))?;
    let again = memory.epoch().map(drop).err().ok_or("a second epoch")?.to_string();
    same(&again, again.contains("whose last epoch did not end"), true)?;
    drop(memory);
    part.barrier()?;

    // A panic in an epoch fails the communicator, and nobody waits for the deadline.
    let part = comm.split(Some(0), 0)?.ok_or("a part")?;
    let mut memory = part.symmetric::<u64>(1)?;
    let epoch = memory.epoch()?;
    if part.rank() == 1 {
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _epoch = epoch;
            std::panic::resume_unwind(Box::new("on purpose"));
        }));
        same("a panic", panicked.is_err(), true)?;
    } else {
        let text = epoch.end().err().ok_or("it ended")?.to_string();
        // On GPUs a panic aborts.
        let texts = ["rank 1 is gone: its thread panicked", "rank 1 aborted the communicator"];
        same(&text, texts.iter().any(|known| text.contains(known)), true)?;
    }
    drop(memory);
    drop(part);
    Ok(comm.barrier()?)
}
