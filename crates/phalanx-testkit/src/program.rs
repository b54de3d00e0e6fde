//! Programs of collectives that are the same for all ranks: random ones meet each other in every order.

use crate::number::Number;
use crate::random::{self, Random};
use crate::reference::{self, Combine};
use crate::ring::same_values;
use crate::with_number;
use phalanx::{Comm, DType, Loan, Owned, Source, Stream, Target};

/// The most ranks of a program.
pub const RANKS: usize = 8;

/// A collective, in the form with equal blocks or in the v-form.
#[allow(missing_docs, reason = "the names are the methods'")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
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
    Scan,
    ExclusiveScan,
}

use Operation::*;

impl Operation {
    /// Every one of them.
    pub const ALL: [Operation; 15] = [
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
        Scan,
        ExclusiveScan,
    ];
}

/// How a collective is called.
#[allow(missing_docs, reason = "the names are the methods' endings and beginnings")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    OutOfPlace,
    InPlace,
    Started,
    Prepared,
}

impl Form {
    /// Every one of them.
    pub const ALL: [Form; 4] = [Form::OutOfPlace, Form::InPlace, Form::Started, Form::Prepared];
}

/// What can go wrong with a call.
#[derive(Debug)]
pub enum Problem {
    /// The library answers an error.
    Error(phalanx::Error),
    /// It says that all went well, and the result is wrong.
    Wrong(String),
}

impl From<phalanx::Error> for Problem {
    fn from(error: phalanx::Error) -> Problem {
        Problem::Error(error)
    }
}

impl From<String> for Problem {
    fn from(difference: String) -> Problem {
        Problem::Wrong(difference)
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Problem::Error(error) => error.fmt(f),
            Problem::Wrong(difference) => f.write_str(difference),
        }
    }
}

/// One call of a program, the same for all ranks.
#[derive(Debug, Clone)]
pub struct Step {
    /// What is called.
    pub operation: Operation,
    /// The buffers' type.
    pub dtype: DType,
    /// Which reduction, of [`Combine::all`].
    pub combine: usize,
    /// The root, reduced modulo the number of ranks.
    pub root: usize,
    /// The form that is used.
    pub form: Form,
    /// Elements for each pair of ranks; operations with equal blocks use the first.
    pub lengths: Vec<usize>,
    /// Ranks with their bit set use memory from `Comm::alloc`.
    pub shared: u8,
    /// Of the inputs.
    pub seed: u64,
}

impl Step {
    /// Any step, with blocks of up to `longest` elements, most of them much shorter.
    pub fn random(random: &mut Random, longest: usize) -> Step {
        let length = |random: &mut Random| match random.below(4) {
            0 => random.below(longest / 1000 + 2),
            1 | 2 => random.below(longest / 30 + 2),
            _ => random.below(longest + 1),
        };
        Step {
            operation: Operation::ALL[random.below(Operation::ALL.len())],
            dtype: DType::ALL[random.below(DType::ALL.len())],
            combine: random.below(6),
            root: random.below(RANKS),
            form: Form::ALL[random.below(Form::ALL.len())],
            lengths: (0..RANKS * RANKS).map(|_| length(random)).collect(),
            shared: [0, 0xff, random.next_u64() as u8][random.below(3)],
            seed: random.next_u64(),
        }
    }

    /// The same by a plain call.
    pub fn at_once(self) -> Step {
        let form = match self.form {
            Form::Started => Form::OutOfPlace,
            Form::Prepared => Form::InPlace,
            form => form,
        };
        Step { form, ..self }
    }

    /// One that GPU memory has, too: no scans, and plain calls.
    pub fn on_gpus(self) -> Step {
        let operation = match self.operation {
            Scan => AllReduce,
            ExclusiveScan => Reduce,
            operation => operation,
        };
        Step { operation, ..self.at_once() }
    }

    /// Does it, as one of the ranks, and compares this rank's result with the reference.
    pub fn perform(&self, comm: &Comm) -> Result<(), Problem> {
        self.perform_in(comm, &Host { shared: self.shared & (1 << comm.rank()) != 0 })
    }

    /// The same with buffers elsewhere.
    pub fn perform_in(&self, comm: &Comm, place: &impl Place) -> Result<(), Problem> {
        with_number!(self.dtype, T => perform::<T>(comm, self, place))
    }
}

/// Where a program's buffers are.
pub trait Place {
    /// A buffer.
    type Buffer<T: Number>: Target<Elem = T>;

    /// A buffer with this content.
    fn put<T: Number>(&self, comm: &Comm, content: &[T]) -> phalanx::Result<Self::Buffer<T>>;

    /// What is in it.
    fn get<T: Number>(&self, buffer: &Self::Buffer<T>) -> Vec<T>;
}

/// One call on this rank, with inputs and results of all ranks at hand.
fn perform<T: Number>(comm: &Comm, step: &Step, place: &impl Place) -> Result<(), Problem> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let root = step.root % ranks;
    let count = step.lengths[0];
    // In place, what goes to a rank is as long as what comes from it.
    let pair = |from: usize, to: usize| match step.form == Form::InPlace {
        true => step.lengths[from.min(to) * RANKS + from.max(to)],
        false => step.lengths[from * RANKS + to],
    };
    let matrix: Vec<Vec<usize>> = match step.operation {
        AllToAllV => (0..ranks).map(|from| (0..ranks).map(|to| pair(from, to)).collect()).collect(),
        _ => vec![vec![count; ranks]; ranks],
    };
    let counts = match step.operation {
        AllGatherV | ReduceScatterV | GatherV | ScatterV => step.lengths[..ranks].to_vec(),
        _ => vec![count; ranks],
    };
    let whole = counts.iter().sum::<usize>();
    let input_len = |from: usize| match step.operation {
        AllReduce | Broadcast | Reduce | Scan | ExclusiveScan => count,
        AllGather | Gather | AllGatherV | GatherV => counts[from],
        ReduceScatter | Scatter | ReduceScatterV | ScatterV => whole,
        AllToAll | AllToAllV => matrix[from].iter().sum(),
    };
    let inputs: Vec<Vec<T>> =
        (0..ranks).map(|r| random::values(step.seed.wrapping_add(r as u64), input_len(r))).collect();
    let combine = &Combine::<T>::all(ranks)[step.combine];
    let reduces =
        matches!(step.operation, AllReduce | Reduce | ReduceScatter | ReduceScatterV | Scan | ExclusiveScan);
    if reduces && !combine.is_promised_by(comm.backend()) {
        return Ok(());
    }
    let expected = match step.operation {
        AllReduce => reference::all_reduce(&inputs, combine),
        Broadcast => reference::broadcast(&inputs, root),
        Reduce => reference::reduce(&inputs, combine, root),
        AllGather | AllGatherV => reference::all_gather(&inputs),
        ReduceScatter | ReduceScatterV => reference::reduce_scatter(&inputs, &counts, combine),
        AllToAll | AllToAllV => reference::all_to_all(&inputs, &matrix),
        Gather | GatherV => reference::gather(&inputs, root),
        Scatter | ScatterV => reference::scatter(&inputs, &counts, root),
        Scan => reference::scan(&inputs, combine),
        // Rank 0 keeps what it holds.
        ExclusiveScan if step.form == Form::OutOfPlace => {
            reference::exclusive_scan(&inputs, combine, vec![T::from_small(0); count])
        }
        ExclusiveScan => reference::exclusive_scan(&inputs, combine, inputs[0].clone()),
    };

    let op = combine.reduction(rank);
    let recv_counts: Vec<usize> = matrix.iter().map(|row| row[rank]).collect();
    if matches!(step.form, Form::Started | Form::Prepared) {
        let lists = if step.operation == AllToAllV { [&matrix[rank], &recv_counts] } else { [&counts; 2] };
        let result = perform_later(comm, step, &inputs[rank], expected[rank].len(), (op, root, lists))?;
        return if expected[rank].is_empty() { Ok(()) } else { Ok(same_values(&result, &expected[rank])?) };
    }
    if step.form == Form::InPlace {
        let list = if step.operation == AllToAllV { &matrix[rank] } else { &counts };
        let result = perform_in_place(comm, step, place, &inputs[rank], (op, root, list))?;
        return if expected[rank].is_empty() { Ok(()) } else { Ok(same_values(&result, &expected[rank])?) };
    }
    let send = &place.put(comm, &inputs[rank])?;
    let recv = &mut place.put(comm, &vec![T::from_small(0); expected[rank].len()])?;
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
        Scan => comm.scan(send, recv, op),
        ExclusiveScan => comm.exclusive_scan(send, recv, op),
    }?;
    Ok(same_values(&place.get(recv), &expected[rank])?)
}

/// The same in place; `counts` are the lengths of the blocks that the buffer has.
fn perform_in_place<T: Number>(
    comm: &Comm,
    step: &Step,
    place: &impl Place,
    input: &[T],
    (op, root, counts): (phalanx::Reduction<T>, usize, &[usize]),
) -> phalanx::Result<Vec<T>> {
    let rank = comm.rank();
    let start = counts[..rank].iter().sum::<usize>();
    let own = start..start + counts[rank];
    let content = match step.operation {
        AllGather | Gather | AllGatherV | GatherV => {
            let mut content = vec![T::from_small(1); counts.iter().sum()];
            content[own.clone()].copy_from_slice(input);
            content
        }
        _ => input.to_vec(),
    };
    let buffer = &mut place.put(comm, &content)?;
    match step.operation {
        AllReduce => comm.all_reduce_in_place(buffer, op),
        Broadcast => comm.broadcast_in_place(buffer, root),
        Reduce => comm.reduce_in_place(buffer, op, root),
        AllGather => comm.all_gather_in_place(buffer),
        ReduceScatter => comm.reduce_scatter_in_place(buffer, op),
        AllToAll => comm.all_to_all_in_place(buffer),
        Gather => comm.gather_in_place(buffer, root),
        Scatter => comm.scatter_in_place(buffer, root),
        AllGatherV => comm.all_gather_v_in_place(buffer, counts),
        ReduceScatterV => comm.reduce_scatter_v_in_place(buffer, counts, op),
        AllToAllV => comm.all_to_all_v_in_place(buffer, counts),
        GatherV => comm.gather_v_in_place(buffer, counts, root),
        ScatterV => comm.scatter_v_in_place(buffer, counts, root),
        Scan => comm.scan_in_place(buffer, op),
        ExclusiveScan => comm.exclusive_scan_in_place(buffer, op),
    }?;
    let whole = place.get(buffer);
    Ok(match step.operation {
        ReduceScatter | Scatter | ReduceScatterV | ScatterV => whole[own].to_vec(),
        _ => whole,
    })
}

/// The same started, or prepared, in host memory; `counts` are the lengths of the sent and the received blocks.
fn perform_later<T: Number>(
    comm: &Comm,
    step: &Step,
    input: &[T],
    result_len: usize,
    (op, root, [counts, recv_counts]): (phalanx::Reduction<T>, usize, [&Vec<usize>; 2]),
) -> phalanx::Result<Vec<T>> {
    let place = Host { shared: step.shared & (1 << comm.rank()) != 0 };
    let send = place.put(comm, input)?;
    let recv = || place.put(comm, &vec![T::from_small(0); result_len]);
    macro_rules! later {
        ($start:ident $prepare:ident($($arg:expr),+)) => {
            match step.form {
                Form::Prepared => {
                    let mut prepared = comm.$prepare($($arg),+)?;
                    prepared.run()?;
                    prepared.buffers
                }
                _ => comm.$start($($arg),+)?.wait()?,
            }
        };
    }
    let received = match step.operation {
        AllReduce => later!(start_all_reduce prepare_all_reduce(send, op)),
        Broadcast => later!(start_broadcast prepare_broadcast(send, root)),
        Reduce => later!(start_reduce prepare_reduce(send, op, root)),
        Scan => later!(start_scan prepare_scan(send, op)),
        ExclusiveScan => later!(start_exclusive_scan prepare_exclusive_scan(send, op)),
        AllGather => later!(start_all_gather prepare_all_gather(send, recv()?)).1,
        ReduceScatter => later!(start_reduce_scatter prepare_reduce_scatter(send, recv()?, op)).1,
        AllToAll => later!(start_all_to_all prepare_all_to_all(send, recv()?)).1,
        Gather => later!(start_gather prepare_gather(send, recv()?, root)).1,
        Scatter => later!(start_scatter prepare_scatter(send, recv()?, root)).1,
        AllGatherV => later!(start_all_gather_v prepare_all_gather_v(send, recv()?, &counts[..])).1,
        ReduceScatterV => {
            later!(start_reduce_scatter_v prepare_reduce_scatter_v(send, recv()?, &counts[..], op)).1
        }
        GatherV => later!(start_gather_v prepare_gather_v(send, recv()?, &counts[..], root)).1,
        ScatterV => later!(start_scatter_v prepare_scatter_v(send, &counts[..], recv()?, root)).1,
        AllToAllV => {
            later!(start_all_to_all_v prepare_all_to_all_v(send, &counts[..], recv()?, &recv_counts[..])).1
        }
    };
    Ok(place.get(&received))
}

/// Host memory: vectors, or that of `Comm::alloc`.
struct Host {
    shared: bool,
}

/// A buffer in host memory.
pub enum Memory<T: Number> {
    /// A vector.
    Private(Vec<T>),
    /// From `Comm::alloc`.
    Shared(phalanx::HostBuffer<T>),
}

impl Place for Host {
    type Buffer<T: Number> = Memory<T>;

    fn put<T: Number>(&self, comm: &Comm, content: &[T]) -> phalanx::Result<Memory<T>> {
        if !self.shared {
            return Ok(Memory::Private(content.to_vec()));
        }
        let mut buffer = comm.alloc(content.len())?;
        buffer.copy_from_slice(content);
        Ok(Memory::Shared(buffer))
    }

    fn get<T: Number>(&self, buffer: &Memory<T>) -> Vec<T> {
        match buffer {
            Memory::Private(vec) => vec.clone(),
            Memory::Shared(buffer) => buffer.to_vec(),
        }
    }
}

// SAFETY: what holds for either holds for both.
unsafe impl<T: Number> Source for Memory<T> {
    type Elem = T;

    fn dtype(&self) -> DType {
        T::DTYPE
    }

    fn len(&self) -> usize {
        match self {
            Memory::Private(vec) => vec.len(),
            Memory::Shared(buffer) => buffer.len(),
        }
    }

    fn lend<'a>(&'a self, stream: &'a Stream) -> phalanx::Result<Loan<'a>> {
        match self {
            Memory::Private(vec) => vec.lend(stream),
            Memory::Shared(buffer) => buffer.lend(stream),
        }
    }
}

// SAFETY: as above.
unsafe impl<T: Number> Target for Memory<T> {
    fn lend_mut<'a>(&'a mut self, stream: &'a Stream) -> phalanx::Result<Loan<'a>> {
        match self {
            Memory::Private(vec) => vec.lend_mut(stream),
            Memory::Shared(buffer) => buffer.lend_mut(stream),
        }
    }
}

// SAFETY: as above: heap or shared memory.
unsafe impl<T: Number> Owned for Memory<T> {}
