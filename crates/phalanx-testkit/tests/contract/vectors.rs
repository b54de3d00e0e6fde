//! The v-variants: blocks of different lengths, some or all of them empty.

use crate::buffers::{Memory, poison, still_poisoned};
use crate::world::both;
use libtest_mimic::Trial;
use phalanx::{Comm, DType};
use phalanx_testkit::reference::{self, Combine};
use phalanx_testkit::ring::same_values;
use phalanx_testkit::scenario::{Context, Outcome};
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
    SCENARIOS.iter().flat_map(|scenario| both(*scenario, &[1, 2, 3, 5, 8])).collect()
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
    let mut cell = 0;
    for dtype in DType::ALL {
        for (p, pattern) in PATTERNS.into_iter().enumerate() {
            for memory in Memory::ALL {
                // The large pattern with every second type is enough.
                if p == 4 && dtype as usize % 2 == 1 {
                    continue;
                }
                cell += 1;
                let root = cell % ranks;
                with_number!(dtype, T => one::<T>(comm, operation, pattern, memory, root, cell)).context(
                    || {
                        let rank = comm.rank();
                        format!("{operation:?} of {dtype}, pattern {p}, {memory:?}, root {root}, rank {rank}")
                    },
                )?;
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
    }
    Ok(String::new())
}

fn one<T: Number>(
    comm: &Comm,
    operation: Operation,
    pattern: fn(usize, usize, usize) -> usize,
    memory: Memory,
    root: usize,
    cell: usize,
) -> Result<(), String> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    // Only all_to_all_v has different counts for each sender.
    let counts: Vec<usize> = (0..ranks).map(|to| pattern(1, to, ranks)).collect();
    let matrix: Vec<Vec<usize>> =
        (0..ranks).map(|from| (0..ranks).map(|to| pattern(from, to, ranks)).collect()).collect();
    let whole: usize = counts.iter().sum();
    let input_len = |from: usize| match operation {
        Operation::AllGather | Operation::Gather => counts[from],
        Operation::ReduceScatter => whole,
        Operation::Scatter => {
            if from == root {
                whole
            } else {
                0
            }
        }
        Operation::AllToAll => matrix[from].iter().sum(),
    };
    let inputs: Vec<Vec<T>> =
        (0..ranks).map(|from| random::values((cell * 64 + from) as u64, input_len(from))).collect();
    let combines = Combine::<T>::all(ranks);
    let combine = &combines[cell % combines.len()];
    if operation == Operation::ReduceScatter && !combine.is_promised_by(comm.backend()) {
        return Ok(());
    }
    let expected = match operation {
        Operation::AllGather => reference::all_gather(&inputs),
        Operation::ReduceScatter => reference::reduce_scatter(&inputs, &counts, combine),
        Operation::Gather => reference::gather(&inputs, root),
        Operation::Scatter => reference::scatter(&inputs, &counts, root),
        Operation::AllToAll => reference::all_to_all(&inputs, &matrix),
    };

    let mut send = memory.send(comm, inputs[rank].len()).map_err(|e| e.to_string())?;
    send.all().copy_from_slice(&inputs[rank]);
    let mut recv = memory.recv(comm, expected[rank].len()).map_err(|e| e.to_string())?;
    poison(recv.all(), cell);
    let (send, recv) = (&send.all()[..], recv.all());
    let recv_counts: Vec<usize> = matrix.iter().map(|row| row[rank]).collect();
    match operation {
        Operation::AllGather => comm.all_gather_v(send, recv, &counts),
        Operation::ReduceScatter => comm.reduce_scatter_v(send, recv, &counts, combine.reduction(rank)),
        Operation::Gather => comm.gather_v(send, recv, &counts, root),
        Operation::Scatter => comm.scatter_v(send, &counts, recv, root),
        Operation::AllToAll => comm.all_to_all_v(send, &matrix[rank], recv, &recv_counts),
    }
    .map_err(|error| error.to_string())?;
    if expected[rank].is_empty() {
        still_poisoned(recv, cell)?;
    }
    same_values(recv, &expected[rank])
}
