//! The eight collectives with equal blocks: types × reductions × sizes × memory × place.
//!
//! One world runs all cells of a trial one behind the other, so that an operation also meets whatever the
//! one before left in the library's buffers. Each cell has data of its own ([`ring`](phalanx_testkit::ring)).

use crate::buffers::{Buffer, Memory, OnGpu, poison, still_poisoned};
use crate::world::{DEADLINE, all_equal, all_ok, on_processes};
use libtest_mimic::{Failed, Trial};
use phalanx::{Comm, DType, Source, Target};
use phalanx_testkit::reference::Combine;
use phalanx_testkit::ring::{PERIOD, Ring, STRIDE, bytes};
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use phalanx_testkit::{Number, Scenario, threads, with_number};
use std::sync::Arc;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("matrix", |comm, args| whole_operation(&comm, args, &Memory::ALL)),
    // Memory of the communicator's GPU.
    Scenario::rank("matrix/gpu", |comm, args| whole_operation(&comm, args, &[Memory::Gpu])),
];

/// Elements of a block; sizes around cache lines, small messages, and chunks.
const SIZES: [usize; 6] = [0, 1, 3, 17, 1000, 4099];

/// Elements of a whole buffer: many chunks.
const LARGE: usize = 70_001;

/// Bytes of a whole buffer: more than any buffer of the library.
const LARGEST: usize = (1 << 20) + 40_000;

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
}

use Operation::*;

impl Operation {
    const ALL: [(Operation, &'static str); 8] = [
        (AllReduce, "all_reduce"),
        (Broadcast, "broadcast"),
        (Reduce, "reduce"),
        (AllGather, "all_gather"),
        (ReduceScatter, "reduce_scatter"),
        (AllToAll, "all_to_all"),
        (Gather, "gather"),
        (Scatter, "scatter"),
    ];

    fn reduces(self) -> bool {
        matches!(self, AllReduce | Reduce | ReduceScatter)
    }

    /// Blocks of the send and of the receive buffer.
    fn blocks(self, ranks: usize) -> (usize, usize) {
        match self {
            AllReduce | Broadcast | Reduce => (1, 1),
            AllGather | Gather => (1, ranks),
            ReduceScatter | Scatter => (ranks, 1),
            AllToAll => (ranks, ranks),
        }
    }
}

pub fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for (operation, name) in Operation::ALL {
        for dtype in DType::ALL {
            trials.push(Trial::test(format!("threads/{name}/{dtype}"), move || {
                (1..=8).try_for_each(
                    |ranks| with_number!(dtype, T => one_type_on_threads::<T>(operation, ranks)),
                )
            }));
        }
    }
    if cfg!(target_os = "linux") {
        for (_, name) in Operation::ALL {
            for ranks in 1..=8 {
                trials.push(Trial::test(format!("processes/{name}/{ranks}"), move || {
                    all_equal(&on_processes(SCENARIOS[0], ranks, &[name])?)
                }));
            }
        }
    }
    trials
}

fn one_type_on_threads<T: Number>(operation: Operation, ranks: usize) -> Result<(), Failed> {
    let tables = Arc::new(Tables::<T>::new(operation, ranks));
    let outcomes = threads::run(ranks, DEADLINE, move |comm| all_cells(&comm, &tables, &Memory::ALL))?;
    let reports = all_ok(outcomes.into_iter());
    all_equal(&reports.map_err(|problems| format!("{ranks} thread ranks:{problems}"))?)
}

/// A process rank's part: all types.
fn whole_operation(comm: &Comm, args: &[String], memories: &[Memory]) -> Outcome {
    let operation = Operation::ALL.into_iter().find(|(_, name)| args.iter().any(|arg| arg == name));
    let (operation, _) = operation.ok_or("no operation was named")?;
    let mut report = String::new();
    for dtype in DType::ALL {
        report += &with_number!(dtype, T => {
            all_cells(comm, &Tables::<T>::new(operation, comm.world_size()), memories)
        })?;
    }
    Ok(report)
}

/// Inputs and expected outputs of an operation, for any size.
struct Tables<T> {
    operation: Operation,
    ring: Ring<T>,
    combined: Vec<(Combine<T>, Ring<T>)>,
}

impl<T: Number> Tables<T> {
    fn new(operation: Operation, ranks: usize) -> Tables<T> {
        let ring = Ring::new(ranks as u64);
        let combines = if operation.reduces() { Combine::all(ranks) } else { Vec::new() };
        let combined = combines.into_iter().map(|combine| {
            let combined = ring.combined(ranks, &combine);
            (combine, combined)
        });
        Tables { operation, combined: combined.collect(), ring }
    }
}

/// All cells of one operation and type. The report is a digest of those results that must have the same
/// bits, whatever NaN they hold, on every rank.
fn all_cells<T: Number>(comm: &Comm, tables: &Tables<T>, memories: &[Memory]) -> Outcome {
    let (send_blocks, recv_blocks) = tables.operation.blocks(comm.world_size());
    let blocks = send_blocks.max(recv_blocks);
    let mut walk = Walk { comm, tables, memories, cell: 0, digest: 0 };
    for size in SIZES {
        walk.size(size, |_, _| true)?;
    }
    // Every second combination of memory, place and reduction; the other half at the next number of ranks.
    let parity = comm.world_size();
    walk.size(LARGE.div_ceil(blocks), |variant, combine| (variant + combine + parity).is_multiple_of(2))?;
    // A quarter of the types, one reduction for each combination of memory and place.
    if (usize::from(T::DTYPE.code()) + comm.world_size()).is_multiple_of(4) {
        let count = (LARGEST / size_of::<T>()).div_ceil(blocks);
        walk.size(count, |variant, combine| variant % 6 == combine)?;
    }
    Ok(format!("{}={:x} ", T::DTYPE, walk.digest))
}

struct Walk<'a, T> {
    comm: &'a Comm,
    tables: &'a Tables<T>,
    memories: &'a [Memory],
    cell: usize,
    digest: u64,
}

/// What one call is about.
struct Cell<'a, T> {
    number: usize,
    /// Elements of a block.
    count: usize,
    combine: Option<&'a (Combine<T>, Ring<T>)>,
    root: usize,
    /// Where rank 0's input starts in the ring.
    start: usize,
}

impl<T> Cell<'_, T> {
    fn start_of(&self, rank: usize) -> usize {
        self.start + rank * STRIDE
    }
}

impl<T: Number> Walk<'_, T> {
    /// The cells of one size for which `chosen` answers true, given the numbers of the combination of
    /// memory and place, and of the reduction.
    fn size(&mut self, count: usize, chosen: impl Fn(usize, usize) -> bool) -> Result<(), String> {
        let Walk { comm, tables, memories, .. } = *self;
        let ranks = comm.world_size();
        let (send_blocks, recv_blocks) = tables.operation.blocks(ranks);
        let longest = send_blocks.max(recv_blocks) * count;
        for (m, memory) in memories.iter().copied().enumerate() {
            let context = || format!("rank {}: alloc of {longest} {}", comm.rank(), T::DTYPE);
            let mut send = memory.send(comm, send_blocks * count).context(context)?;
            let mut recv = memory.recv(comm, longest).context(context)?;
            for combine in 0..tables.combined.len().max(1) {
                for in_place in [false, true] {
                    let promised =
                        tables.combined.get(combine).is_none_or(|(c, _)| c.is_promised_by(comm.backend()));
                    if !promised || !chosen(m * 2 + usize::from(in_place), combine) {
                        continue;
                    }
                    self.cell += 1;
                    let cell = Cell {
                        number: self.cell,
                        count,
                        combine: tables.combined.get(combine),
                        root: self.cell % ranks,
                        start: self.cell * 31_337 % PERIOD,
                    };
                    let result = if in_place {
                        self.in_place(&cell, memory, recv.all())
                    } else {
                        self.out_of_place(&cell, memory, &mut send, &mut recv.all()[..recv_blocks * count])
                    };
                    result.context(|| {
                        format!(
                            "{:?} of {count} {} a block, {}, {memory:?} memory, in place: {in_place}, \
                             root {}, cell {}, on rank {} of {ranks}",
                            tables.operation,
                            T::DTYPE,
                            cell.combine.map_or("no reduction", |(combine, _)| combine.name()),
                            cell.root,
                            cell.number,
                            comm.rank(),
                        )
                    })?;
                }
            }
        }
        Ok(())
    }

    fn out_of_place(
        &mut self,
        cell: &Cell<'_, T>,
        memory: Memory,
        send: &mut Buffer<T>,
        recv: &mut [T],
    ) -> Result<(), String> {
        let Walk { comm, tables, .. } = *self;
        let rank = comm.rank();
        let own_start = cell.start_of(rank);
        let send = send.all();
        tables.ring.fill(send, own_start);
        poison(recv, cell.number);
        let is_root = rank == cell.root;
        let call = Call { comm, operation: tables.operation, cell };
        match memory {
            Memory::Gpu => {
                let on_gpu = OnGpu::copy(comm, send, cell.number)?;
                let mut target = OnGpu::copy(comm, recv, cell.number + 1)?;
                call.out_of_place(&on_gpu.view(), &mut target.view_mut())?;
                on_gpu.read(send)?;
                target.read(recv)?;
            }
            _ => call.out_of_place(&send[..], recv)?,
        }
        tables.ring.expect_bits(send, own_start).context(|| "the send buffer changed".into())?;
        match tables.operation {
            Reduce | Gather if !is_root => still_poisoned(recv, cell.number),
            _ => self.check(cell, recv),
        }
    }

    fn in_place(&mut self, cell: &Cell<'_, T>, memory: Memory, buffer: &mut [T]) -> Result<(), String> {
        let Walk { comm, tables, .. } = *self;
        let rank = comm.rank();
        let own_block = rank * cell.count..(rank + 1) * cell.count;
        poison(buffer, cell.number);
        match tables.operation {
            AllReduce | Reduce | ReduceScatter | AllToAll => {
                tables.ring.fill(buffer, cell.start_of(rank));
            }
            AllGather | Gather => {
                tables.ring.fill(&mut buffer[own_block.clone()], cell.start_of(rank));
            }
            Broadcast | Scatter if rank == cell.root => {
                tables.ring.fill(buffer, cell.start_of(rank));
            }
            Broadcast | Scatter => {}
        }
        let call = Call { comm, operation: tables.operation, cell };
        match memory {
            Memory::Gpu => {
                let mut on_gpu = OnGpu::copy(comm, buffer, cell.number)?;
                call.in_place(&mut on_gpu.view_mut())?;
                on_gpu.read(buffer)?;
            }
            _ => call.in_place(buffer)?,
        }
        match tables.operation {
            // What the others' buffers hold afterwards is not promised.
            Reduce | Gather if rank != cell.root => Ok(()),
            ReduceScatter | Scatter => self.check(cell, &buffer[own_block]),
            _ => self.check(cell, buffer),
        }
    }

    /// Compares a rank's result with what is right.
    fn check(&mut self, cell: &Cell<'_, T>, result: &[T]) -> Result<(), String> {
        let Tables { operation, ring, .. } = self.tables;
        let rank = self.comm.rank();
        let (_, blocks) = operation.blocks(self.comm.world_size());
        let block = |from: usize| &result[from * cell.count..(from + 1) * cell.count];
        let reduced = || &cell.combine.expect("a reducing operation").1;
        if *operation == AllReduce {
            self.digest = digest(self.digest, bytes(result));
        }
        match operation {
            AllReduce | Reduce => reduced().expect_values(result, cell.start),
            ReduceScatter => reduced().expect_values(result, cell.start + rank * cell.count),
            Broadcast => ring.expect_bits(result, cell.start_of(cell.root)),
            Scatter => ring.expect_bits(result, cell.start_of(cell.root) + rank * cell.count),
            AllGather | Gather => {
                (0..blocks).try_for_each(|from| ring.expect_bits(block(from), cell.start_of(from)))
            }
            AllToAll => (0..blocks)
                .try_for_each(|from| ring.expect_bits(block(from), cell.start_of(from) + rank * cell.count)),
        }
        .map_err(|difference| difference.to_string())
    }
}

/// One call of the library.
struct Call<'a, T> {
    comm: &'a Comm,
    operation: Operation,
    cell: &'a Cell<'a, T>,
}

impl<T: Number> Call<'_, T> {
    fn reduction(&self) -> phalanx::Reduction<T> {
        self.cell.combine.expect("a reducing operation").0.reduction(self.comm.rank())
    }

    fn out_of_place<S, R>(&self, send: &S, recv: &mut R) -> Result<(), String>
    where
        S: Source<Elem = T> + ?Sized,
        R: Target<Elem = T> + ?Sized,
    {
        let Call { comm, cell, .. } = *self;
        // A buffer that a rank does not need may be there or not.
        let absent = comm.rank() != cell.root && cell.number.is_multiple_of(2);
        let mut nothing: [T; 0] = [];
        match self.operation {
            AllReduce => comm.all_reduce(send, recv, self.reduction()),
            Broadcast if absent => comm.broadcast(&[][..], recv, cell.root),
            Broadcast => comm.broadcast(send, recv, cell.root),
            Reduce if absent => comm.reduce(send, &mut nothing[..], self.reduction(), cell.root),
            Reduce => comm.reduce(send, recv, self.reduction(), cell.root),
            AllGather => comm.all_gather(send, recv),
            ReduceScatter => comm.reduce_scatter(send, recv, self.reduction()),
            AllToAll => comm.all_to_all(send, recv),
            Gather if absent => comm.gather(send, &mut nothing[..], cell.root),
            Gather => comm.gather(send, recv, cell.root),
            Scatter if absent => comm.scatter(&[][..], recv, cell.root),
            Scatter => comm.scatter(send, recv, cell.root),
        }
        .map_err(|error| error.to_string())
    }

    fn in_place<R: Target<Elem = T> + ?Sized>(&self, buffer: &mut R) -> Result<(), String> {
        let Call { comm, cell, .. } = *self;
        match self.operation {
            AllReduce => comm.all_reduce_in_place(buffer, self.reduction()),
            Broadcast => comm.broadcast_in_place(buffer, cell.root),
            Reduce => comm.reduce_in_place(buffer, self.reduction(), cell.root),
            AllGather => comm.all_gather_in_place(buffer),
            ReduceScatter => comm.reduce_scatter_in_place(buffer, self.reduction()),
            AllToAll => comm.all_to_all_in_place(buffer),
            Gather => comm.gather_in_place(buffer, cell.root),
            Scatter => comm.scatter_in_place(buffer, cell.root),
        }
        .map_err(|error| error.to_string())
    }
}

/// A digest of the bytes, in which every bit and its place count.
fn digest(seed: u64, bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(seed, |digest, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        (digest.rotate_left(5) ^ u64::from_le_bytes(word)).wrapping_mul(0x517c_c1b7_2722_0a95)
    })
}
