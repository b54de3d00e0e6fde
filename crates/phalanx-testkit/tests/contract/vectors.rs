//! The v-variants: blocks of different lengths, some or all of them empty, in two buffers and in one.

use crate::buffers::{Memory, poison, still_poisoned};
use crate::world::each;
use libtest_mimic::Trial;
use phalanx::{Comm, DType};
use phalanx_testkit::reference::{self, Combine};
use phalanx_testkit::ring::{bytes, same_values};
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use phalanx_testkit::{Number, Scenario, random, with_number};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("all_gather_v", |comm, _| all_types(&comm, Operation::AllGather)),
    Scenario::rank("reduce_scatter_v", |comm, _| all_types(&comm, Operation::ReduceScatter)),
    Scenario::rank("gather_v", |comm, _| all_types(&comm, Operation::Gather)),
    Scenario::rank("scatter_v", |comm, _| all_types(&comm, Operation::Scatter)),
    Scenario::rank("all_to_all_v", |comm, _| all_types(&comm, Operation::AllToAll)),
    Scenario::rank("vectors/empty_at_the_end", |comm, _| empty_at_the_end(&comm)),
];

pub fn trials() -> Vec<Trial> {
    let worlds: [&[usize]; 2] = [&[1, 2, 3, 4, 5, 6, 7, 8], &[1, 2, 3, 5, 8]];
    SCENARIOS.iter().flat_map(|scenario| each(*scenario, worlds, &[""])).collect()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    AllGather,
    ReduceScatter,
    Gather,
    Scatter,
    AllToAll,
}

/// Elements from one rank to another, by pattern: nothing at all; one pair only; small with zeros between;
/// medium; one block that is larger than any buffer among empty ones.
const PATTERNS: [fn(usize, usize, usize) -> usize; 5] = [
    |_, _, _| 0,
    |_, to, ranks| if to == ranks - 1 { 5 } else { 0 },
    |from, to, _| (from * 7 + to * 3 + 1) % 4,
    |from, to, _| (from + 2 * to) * 113 % 1500,
    |from, to, ranks| {
        if to == ranks / 2 { 70_001 + from } else { from % 2 }
    },
];

fn all_types(comm: &Comm, operation: Operation) -> Outcome {
    let ranks = comm.world_size();
    let mut number = 0;
    for dtype in DType::ALL {
        for (p, pattern) in PATTERNS.into_iter().enumerate() {
            for (m, memory) in Memory::ALL.into_iter().enumerate() {
                for in_place in [false, true] {
                    // Of longer blocks every second combination; the other half at the next number of ranks.
                    let is_other_half =
                        (usize::from(dtype.code()) + m + usize::from(in_place) + ranks) % 2 == 1;
                    // The large pattern with every second type is enough.
                    if p >= 3 && is_other_half || p == 4 && dtype.code() % 2 == 1 {
                        continue;
                    }
                    number += 1;
                    let cell = Cell { operation, pattern, memory, root: number % ranks, number };
                    with_number!(dtype, T => cell.run::<T>(comm, in_place)).context(|| {
                        format!(
                            "{operation:?} of {dtype}, pattern {p}, {memory:?}, in place: {in_place}, root {}, rank {}",
                            cell.root,
                            comm.rank(),
                        )
                    })?;
                }
            }
        }
    }
    Ok(String::new())
}

/// A block without elements may begin where the memory ends that ranks share.
fn empty_at_the_end(comm: &Comm) -> Outcome {
    let text = |error: phalanx::Error| error.to_string();
    let (rank, ranks) = (comm.rank(), comm.world_size());
    // As much as the ranks of a host take from their region at first.
    let whole = comm.alloc::<u8>(1 << 20).map_err(text)?;
    let own = vec![rank as u8; 40_000];
    for empty in 0..ranks {
        let counts: Vec<usize> = (0..ranks).map(|from| if from == empty { 0 } else { 40_000 }).collect();
        let send = if rank == empty { &whole[whole.len()..] } else { &own[..] };
        let expected: Vec<u8> = (0..ranks).flat_map(|from| vec![from as u8; counts[from]]).collect();
        let mut all = vec![0xee; expected.len()];
        comm.all_gather_v(send, &mut all, &counts).context(|| format!("all_gather_v, rank {rank}"))?;
        if all != expected {
            return Err(format!("all_gather_v, rank {rank}, nothing from rank {empty}"));
        }
        let mut all = vec![0xee; if rank == 0 { expected.len() } else { 0 }];
        comm.gather_v(send, &mut all, &counts, 0).context(|| format!("gather_v, rank {rank}"))?;
        if rank == 0 && all != expected {
            return Err(format!("gather_v, nothing from rank {empty}"));
        }
        let start = counts[..rank].iter().sum::<usize>();
        let mut all = vec![0xee; expected.len()];
        all[start..start + counts[rank]].fill(rank as u8);
        comm.all_gather_v_in_place(&mut all, &counts).context(|| format!("in place, rank {rank}"))?;
        if all != expected {
            return Err(format!("all_gather_v in place, rank {rank}, nothing from rank {empty}"));
        }
    }
    Ok(String::new())
}

/// What one call is about.
struct Cell {
    operation: Operation,
    pattern: fn(usize, usize, usize) -> usize,
    memory: Memory,
    root: usize,
    number: usize,
}

/// What a call gets, and what is right.
struct Data<T> {
    counts: Vec<usize>,
    /// Of all_to_all_v.
    matrix: Vec<Vec<usize>>,
    combine: Combine<T>,
    inputs: Vec<Vec<T>>,
    expected: Vec<Vec<T>>,
}

impl Cell {
    fn run<T: Number>(&self, comm: &Comm, in_place: bool) -> Result<(), String> {
        let ranks = comm.world_size();
        let mut combines = Combine::<T>::all(ranks);
        let combine = combines.swap_remove(self.number % combines.len());
        if self.operation == Operation::ReduceScatter && !combine.is_promised_by(comm.backend()) {
            return Ok(());
        }
        let data = self.data(ranks, combine, in_place);
        if in_place { self.in_place(comm, &data) } else { self.apart(comm, &data) }
    }

    /// In place, what goes to a rank is as long as what comes from it.
    fn data<T: Number>(&self, ranks: usize, combine: Combine<T>, in_place: bool) -> Data<T> {
        let Cell { operation, pattern, root, number, .. } = *self;
        // Only all_to_all_v has different counts for each sender.
        let counts: Vec<usize> = (0..ranks).map(|to| pattern(1, to, ranks)).collect();
        let count = |from: usize, to: usize| match in_place {
            true => pattern(from.min(to), from.max(to), ranks),
            false => pattern(from, to, ranks),
        };
        let matrix: Vec<Vec<usize>> =
            (0..ranks).map(|from| (0..ranks).map(|to| count(from, to)).collect()).collect();
        let whole: usize = counts.iter().sum();
        let input_len = |from: usize| match operation {
            Operation::AllGather | Operation::Gather => counts[from],
            Operation::ReduceScatter => whole,
            Operation::Scatter if from == root => whole,
            Operation::Scatter => 0,
            Operation::AllToAll => matrix[from].iter().sum(),
        };
        let inputs: Vec<Vec<T>> =
            (0..ranks).map(|from| random::values((number * 64 + from) as u64, input_len(from))).collect();
        let expected = match operation {
            Operation::AllGather => reference::all_gather(&inputs),
            Operation::ReduceScatter => reference::reduce_scatter(&inputs, &counts, &combine),
            Operation::Gather => reference::gather(&inputs, root),
            Operation::Scatter => reference::scatter(&inputs, &counts, root),
            Operation::AllToAll => reference::all_to_all(&inputs, &matrix),
        };
        Data { counts, matrix, combine, inputs, expected }
    }

    fn apart<T: Number>(&self, comm: &Comm, data: &Data<T>) -> Result<(), String> {
        let Cell { operation, memory, root, number, .. } = *self;
        let (rank, counts, matrix) = (comm.rank(), &data.counts, &data.matrix);
        let (input, expected) = (&data.inputs[rank], &data.expected[rank]);
        let mut send = memory.send(comm, input.len()).map_err(|e| e.to_string())?;
        send.all().copy_from_slice(input);
        let mut recv = memory.recv(comm, expected.len()).map_err(|e| e.to_string())?;
        poison(recv.all(), number);
        let (send, recv) = (&send.all()[..], recv.all());
        let recv_counts: Vec<usize> = matrix.iter().map(|row| row[rank]).collect();
        match operation {
            Operation::AllGather => comm.all_gather_v(send, recv, counts),
            Operation::ReduceScatter => {
                comm.reduce_scatter_v(send, recv, counts, data.combine.reduction(rank))
            }
            Operation::Gather => comm.gather_v(send, recv, counts, root),
            Operation::Scatter => comm.scatter_v(send, counts, recv, root),
            Operation::AllToAll => comm.all_to_all_v(send, &matrix[rank], recv, &recv_counts),
        }
        .map_err(|error| error.to_string())?;
        if expected.is_empty() {
            still_poisoned(recv, number)?;
        }
        same_values(recv, expected)
    }

    fn in_place<T: Number>(&self, comm: &Comm, data: &Data<T>) -> Result<(), String> {
        let Cell { operation, memory, root, number, .. } = *self;
        let (rank, counts) = (comm.rank(), &data.counts);
        let (input, expected) = (&data.inputs[rank], &data.expected[rank]);
        let is_all_to_all = operation == Operation::AllToAll;
        let len = if is_all_to_all { input.len() } else { counts.iter().sum() };
        let start = counts[..rank].iter().sum::<usize>();
        let own = start..start + counts[rank];
        let mut buffer = memory.recv(comm, len).map_err(|e| e.to_string())?;
        let buffer = buffer.all();
        poison(buffer, number);
        match operation {
            Operation::AllGather | Operation::Gather => buffer[own.clone()].copy_from_slice(input),
            Operation::Scatter if rank != root => {}
            _ => buffer.copy_from_slice(input),
        }
        let before = buffer.to_vec();
        match operation {
            Operation::AllGather => comm.all_gather_v_in_place(buffer, counts),
            Operation::ReduceScatter => {
                comm.reduce_scatter_v_in_place(buffer, counts, data.combine.reduction(rank))
            }
            Operation::Gather => comm.gather_v_in_place(buffer, counts, root),
            Operation::Scatter => comm.scatter_v_in_place(buffer, counts, root),
            Operation::AllToAll => comm.all_to_all_v_in_place(buffer, &data.matrix[rank]),
        }
        .map_err(|error| error.to_string())?;
        // Where the result is, and behind it and before it what was there.
        let result = match operation {
            Operation::Gather if rank != root => 0..0,
            Operation::ReduceScatter | Operation::Scatter => own,
            _ => 0..len,
        };
        same_values(&buffer[result.clone()], expected)?;
        let untouched = |part: std::ops::Range<usize>| {
            let is_same = bytes(&buffer[part.clone()]) == bytes(&before[part]);
            if is_same { Ok(()) } else { Err("another block was overwritten".to_owned()) }
        };
        untouched(0..result.start).and_then(|()| untouched(result.end..len))
    }
}
