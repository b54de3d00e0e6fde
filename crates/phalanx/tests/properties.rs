//! Random programs of collectives, on random numbers of thread ranks, compared with the plain reference.
//!
//! The programs are the same in every run: the generator starts from a fixed seed.

use phalanx::{Comm, DType};
use phalanx_testkit::reference::{self, Combine};
use phalanx_testkit::ring::same_values;
use phalanx_testkit::{Number, random, with_number};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestCaseError, TestRng, TestRunner};

/// The most ranks of a program.
const RANKS: usize = 6;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    AllReduce,
    Broadcast,
    Reduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Gather,
    Scatter,
    AllGatherV,
    ReduceScatterV,
    GatherV,
    ScatterV,
    AllToAllV,
}

use Operation::*;

const OPERATIONS: [Operation; 13] = [
    AllReduce,
    Broadcast,
    Reduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Gather,
    Scatter,
    AllGatherV,
    ReduceScatterV,
    GatherV,
    ScatterV,
    AllToAllV,
];

/// One call of a program, the same for all ranks.
#[derive(Debug, Clone)]
struct Step {
    operation: Operation,
    dtype: DType,
    /// Which reduction, of [`Combine::all`].
    combine: usize,
    /// Reduced modulo the number of ranks.
    root: usize,
    in_place: bool,
    /// For each pair of ranks; operations with equal blocks use the first.
    lengths: Vec<usize>,
    /// Ranks with their bit set use memory from `Comm::alloc`.
    shared: u8,
    seed: u64,
}

fn length() -> impl Strategy<Value = usize> {
    prop_oneof![3 => 0..8usize, 3 => 8..600usize, 1 => 600..20_000usize]
}

fn step() -> impl Strategy<Value = Step> {
    let what = (0..OPERATIONS.len(), 0..DType::ALL.len(), 0..6usize, 0..RANKS, any::<bool>());
    (what, vec(length(), RANKS * RANKS), any::<u8>(), any::<u64>()).prop_map(
        |((operation, dtype, combine, root, in_place), lengths, shared, seed)| Step {
            operation: OPERATIONS[operation],
            dtype: DType::ALL[dtype],
            combine,
            root,
            in_place,
            lengths,
            shared,
            seed,
        },
    )
}

/// Runs a property on the same cases in every run.
fn check<S: Strategy>(cases: u32, strategy: &S, property: impl Fn(S::Value) -> Result<(), String>)
where
    S::Value: std::fmt::Debug,
{
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let outcome = TestRunner::new_with_rng(config, rng)
        .run(strategy, |value| property(value).map_err(TestCaseError::fail));
    if let Err(error) = outcome {
        panic!("{error}");
    }
}

/// All ranks' results, or every rank's problem: the one that failed first is not the lowest.
fn on_all_ranks(ranks: usize, f: impl Fn(&Comm) -> Result<(), String> + Sync) -> Result<(), String> {
    let outcomes = phalanx::run(ranks, |comm| f(&comm)).map_err(|error| error.to_string())?;
    if outcomes.iter().all(Result::is_ok) { Ok(()) } else { Err(format!("{ranks} ranks: {outcomes:#?}")) }
}

#[test]
fn programs_deliver_what_the_reference_says() {
    check(200, &(1..=RANKS, vec(step(), 1..8)), |(ranks, steps)| {
        on_all_ranks(ranks, |comm| {
            steps.iter().enumerate().try_for_each(|(i, step)| {
                with_number!(step.dtype, T => perform::<T>(comm, step))
                    .map_err(|problem| format!("step {i} on rank {}: {problem}", comm.rank()))
            })
        })
    });
}

#[test]
fn splits_bring_the_right_ranks_together() {
    let place = (proptest::option::weighted(0.85, 0..3u32), -2..2i64);
    let splits = vec(vec(place, RANKS), 1..4);
    check(150, &(1..=RANKS, splits, step()), |(ranks, splits, step)| {
        on_all_ranks(ranks, |comm| {
            let mut nested: Option<Comm> = None;
            let mut members: Vec<usize> = (0..ranks).collect();
            for places in &splits {
                let from = nested.as_ref().unwrap_or(comm);
                let own = places[members[from.rank()]];
                let part = from.split(own.0, own.1).map_err(|error| error.to_string())?;
                // By key, then by the order in the communicator that is split: a stable sort does just that.
                let mut expected: Vec<usize> =
                    members.iter().copied().filter(|m| places[*m].0 == own.0).collect();
                expected.sort_by_key(|member| places[*member].1);
                match part {
                    None if own.0.is_none() => return Ok(()),
                    None => return Err("a rank with a colour got no communicator".into()),
                    Some(_) if own.0.is_none() => {
                        return Err("a rank without a colour got one".into());
                    }
                    Some(part) => {
                        members = expected;
                        if members.get(part.rank()) != Some(&comm.rank())
                            || part.world_size() != members.len()
                        {
                            return Err(format!("rank {} is {part:?}, members {members:?}", comm.rank()));
                        }
                        with_number!(step.dtype, T => perform::<T>(&part, &step))?;
                        nested = Some(part);
                    }
                }
            }
            Ok(())
        })
    });
}

/// One call on this rank, with inputs and results of all ranks at hand.
fn perform<T: Number>(comm: &Comm, step: &Step) -> Result<(), String> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let root = step.root % ranks;
    let count = step.lengths[0];
    let matrix: Vec<Vec<usize>> = match step.operation {
        AllToAllV => step.lengths.chunks(RANKS).map(|row| row[..ranks].to_vec()).take(ranks).collect(),
        _ => vec![vec![count; ranks]; ranks],
    };
    let counts = match step.operation {
        AllGatherV | ReduceScatterV | GatherV | ScatterV => step.lengths[..ranks].to_vec(),
        _ => vec![count; ranks],
    };
    let whole = counts.iter().sum::<usize>();
    let input_len = |from: usize| match step.operation {
        AllReduce | Broadcast | Reduce => count,
        AllGather | Gather | AllGatherV | GatherV => counts[from],
        ReduceScatter | Scatter | ReduceScatterV | ScatterV => whole,
        AllToAll | AllToAllV => matrix[from].iter().sum(),
    };
    let inputs: Vec<Vec<T>> =
        (0..ranks).map(|r| random::values(step.seed.wrapping_add(r as u64), input_len(r))).collect();
    let combine = &Combine::<T>::all(ranks)[step.combine];
    let expected = match step.operation {
        AllReduce => reference::all_reduce(&inputs, combine),
        Broadcast => reference::broadcast(&inputs, root),
        Reduce => reference::reduce(&inputs, combine, root),
        AllGather | AllGatherV => reference::all_gather(&inputs),
        ReduceScatter | ReduceScatterV => reference::reduce_scatter(&inputs, &counts, combine),
        AllToAll | AllToAllV => reference::all_to_all(&inputs, &matrix),
        Gather | GatherV => reference::gather(&inputs, root),
        Scatter | ScatterV => reference::scatter(&inputs, &counts, root),
    };

    let op = combine.reduction(rank);
    let shared = step.shared & (1 << rank) != 0;
    if step.in_place
        && let Some(result) = perform_in_place(comm, step, &inputs[rank], (op, root, count, shared))
    {
        let result = result?;
        return if expected[rank].is_empty() { Ok(()) } else { same_values(&result, &expected[rank]) };
    }
    let send = Memory::new(comm, shared, &inputs[rank])?;
    let mut recv = Memory::new(comm, shared, &vec![T::from_small(0); expected[rank].len()])?;
    let (send, recv) = (send.slice(), recv.slice_mut());
    let recv_counts: Vec<usize> = matrix.iter().map(|row| row[rank]).collect();
    match step.operation {
        AllReduce => comm.all_reduce(send, recv, op),
        Broadcast => comm.broadcast(send, recv, root),
        Reduce => comm.reduce(send, recv, op, root),
        AllGather => comm.all_gather(send, recv),
        ReduceScatter => comm.reduce_scatter(send, recv, op),
        AllToAll => comm.all_to_all(send, recv),
        Gather => comm.gather(send, recv, root),
        Scatter => comm.scatter(send, recv, root),
        AllGatherV => comm.all_gather_v(send, recv, &counts),
        ReduceScatterV => comm.reduce_scatter_v(send, recv, &counts, op),
        GatherV => comm.gather_v(send, recv, &counts, root),
        ScatterV => comm.scatter_v(send, &counts, recv, root),
        AllToAllV => comm.all_to_all_v(send, &matrix[rank], recv, &recv_counts),
    }
    .map_err(|error| error.to_string())?;
    same_values(recv, &expected[rank])
}

/// The same in place; `None` if the operation has no such form.
fn perform_in_place<T: Number>(
    comm: &Comm,
    step: &Step,
    input: &[T],
    (op, root, count, shared): (phalanx::Reduction<T>, usize, usize, bool),
) -> Option<Result<Vec<T>, String>> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let own = rank * count..(rank + 1) * count;
    let mut start = vec![T::from_small(1); count * ranks];
    match step.operation {
        AllGather | Gather => start[own.clone()].copy_from_slice(input),
        AllReduce | Broadcast | Reduce | ReduceScatter | AllToAll | Scatter => start = input.to_vec(),
        _ => return None,
    }
    let mut memory = match Memory::new(comm, shared, &start) {
        Ok(memory) => memory,
        Err(problem) => return Some(Err(problem)),
    };
    let buffer = memory.slice_mut();
    let outcome = match step.operation {
        AllReduce => comm.all_reduce_in_place(buffer, op),
        Broadcast => comm.broadcast_in_place(buffer, root),
        Reduce => comm.reduce_in_place(buffer, op, root),
        AllGather => comm.all_gather_in_place(buffer),
        ReduceScatter => comm.reduce_scatter_in_place(buffer, op),
        AllToAll => comm.all_to_all_in_place(buffer),
        Gather => comm.gather_in_place(buffer, root),
        _ => comm.scatter_in_place(buffer, root),
    };
    let result = match step.operation {
        ReduceScatter | Scatter => buffer[own].to_vec(),
        _ => buffer.to_vec(),
    };
    Some(outcome.map(|()| result).map_err(|error| error.to_string()))
}

enum Memory<T: Number> {
    Private(Vec<T>),
    Shared(phalanx::HostBuffer<T>),
}

impl<T: Number> Memory<T> {
    fn new(comm: &Comm, shared: bool, content: &[T]) -> Result<Memory<T>, String> {
        if !shared {
            return Ok(Memory::Private(content.to_vec()));
        }
        let mut buffer = comm.alloc(content.len()).map_err(|error| error.to_string())?;
        buffer.copy_from_slice(content);
        Ok(Memory::Shared(buffer))
    }

    fn slice(&self) -> &[T] {
        match self {
            Memory::Private(vec) => vec,
            Memory::Shared(buffer) => buffer,
        }
    }

    fn slice_mut(&mut self) -> &mut [T] {
        match self {
            Memory::Private(vec) => vec,
            Memory::Shared(buffer) => buffer,
        }
    }
}
