//! One operation with its arguments: the call that is timed and checked.
//!
//! Nothing else happens here, because everything here is inside the measured time.

use super::data::{Value, elements, elements_mut, with_value};
use super::layout::{BufferLengths, weighted_counts, weighted_counts_to};
use super::operation::{Operation, Place};
use super::reduction::RedOp;
use super::view::{Memory, MemoryMut, View, ViewMut};
use phalanx::{Comm, DType, Grid, Neighbors, PreMulSum, ReduceOp, Reduction, Result};
use serde_bytes::ByteBuf;

/// An operation with everything but its buffers.
pub struct Case<'a> {
    pub operation: Operation,
    pub layout: BufferLengths,
    pub dtype: DType,
    pub root: usize,
    arguments: Arguments<'a>,
    calls: Box<dyn Calls>,
}

/// What the calls need beside the buffers and the reduction.
struct Arguments<'a> {
    comm: &'a Comm,
    operation: Operation,
    /// Elements of a rank's block.
    block: usize,
    root: usize,
    send_counts: Vec<usize>,
    recv_counts: Vec<usize>,
    /// In a ring.
    neighbors: Neighbors,
}

/// The calls for one element type.
trait Calls {
    fn out_of_place(&self, arguments: &Arguments<'_>, send: &View<'_>, recv: &mut ViewMut<'_>) -> Result<()>;
    fn in_place(&self, arguments: &Arguments<'_>, buffer: &mut ViewMut<'_>) -> Result<()>;
}

impl<'a> Case<'a> {
    pub fn new(
        comm: &'a Comm,
        operation: Operation,
        layout: BufferLengths,
        dtype: DType,
        redop: RedOp,
        root: usize,
    ) -> Self {
        let (block, ranks, rank) = (layout.count, comm.world_size(), comm.rank());
        let send_counts = weighted_counts(block * ranks, ranks, rank);
        let recv_counts = weighted_counts_to(block * ranks, ranks, rank);
        let ring = Grid::new(&[ranks], &[true]).expect("one dimension of at least a rank");
        let neighbors = ring.neighbors(rank);
        let arguments = Arguments { comm, operation, block, root, send_counts, recv_counts, neighbors };
        let calls: Box<dyn Calls> = with_value!(dtype, T => Box::new(reduction::<T>(redop, rank)));
        Case { operation, layout, dtype, root, arguments, calls }
    }

    pub fn comm(&self) -> &'a Comm {
        self.arguments.comm
    }

    /// Whether a call returns before its work on the GPU is complete.
    pub fn is_enqueued(&self) -> bool {
        self.comm().cuda_stream().is_ok() && self.operation.has_data()
    }

    /// Performs the operation once, or enqueues it. In place, `recv` is the only buffer and `send` is
    /// ignored.
    pub fn perform(&self, place: Place, send: &View<'_>, recv: &mut ViewMut<'_>) -> Result<()> {
        match place {
            Place::OutOfPlace => self.calls.out_of_place(&self.arguments, send, recv),
            Place::InPlace => self.calls.in_place(&self.arguments, recv),
        }
    }
}

/// The library's reduction, with this rank's factor where there is one.
fn reduction<T: Value>(op: RedOp, rank: usize) -> Reduction<T> {
    match op {
        RedOp::Sum => ReduceOp::Sum.into(),
        RedOp::Prod => ReduceOp::Prod.into(),
        RedOp::Min => ReduceOp::Min.into(),
        RedOp::Max => ReduceOp::Max.into(),
        RedOp::Avg => ReduceOp::Avg.into(),
        RedOp::MulSum => PreMulSum(T::from_i64(RedOp::factor(rank))).into(),
    }
}

impl<T: Value> Calls for Reduction<T> {
    fn out_of_place(&self, arguments: &Arguments<'_>, send: &View<'_>, recv: &mut ViewMut<'_>) -> Result<()> {
        let Arguments { comm, operation, block, root, send_counts, recv_counts, neighbors } = arguments;
        let (rank, ranks) = (comm.rank(), comm.world_size());
        if operation.is_on_host() {
            let (Memory::Host(send), MemoryMut::Host(recv)) = (&send.memory, &mut recv.memory) else {
                unreachable!("the plan refuses GPU memory");
            };
            return match operation {
                Operation::AllGatherObject => all_gather_object(comm, send, recv),
                Operation::AllReduceWith => {
                    comm.all_reduce_with(elements::<T>(send), elements_mut::<T>(recv), |a, b| a.add(*b))
                }
                _ => comm.neighbor_all_to_all(neighbors, elements::<T>(send), elements_mut::<T>(recv)),
            };
        }
        let (send, recv) = (&send.elements::<T>(), &mut recv.elements::<T>());
        match operation {
            Operation::AllReduce => comm.all_reduce(send, recv, *self),
            Operation::AllGather => comm.all_gather(send, recv),
            Operation::ReduceScatter => comm.reduce_scatter(send, recv, *self),
            Operation::Broadcast => comm.broadcast(send, recv, *root),
            Operation::Reduce => comm.reduce(send, recv, *self, *root),
            Operation::Scan => comm.scan(send, recv, *self),
            Operation::ExclusiveScan => comm.exclusive_scan(send, recv, *self),
            Operation::AllToAll => comm.all_to_all(send, recv),
            Operation::AllToAllV => comm.all_to_all_v(send, send_counts, recv, recv_counts),
            Operation::Gather => comm.gather(send, recv, *root),
            Operation::Scatter => comm.scatter(send, recv, *root),
            Operation::SendRecv => comm.send_recv(send, (rank + 1) % ranks, recv, (rank + ranks - 1) % ranks),
            Operation::RecvAny => {
                let mut from = None;
                comm.group(|group| {
                    group.send(send, (rank + 1) % ranks)?;
                    group.recv_any_tagged(recv, 0, &mut from)
                })
            }
            Operation::PingPong => match rank {
                0 => comm.send(send, 1).and_then(|()| comm.recv(recv, 1)),
                1 => comm.recv(recv, 0).and_then(|()| comm.send(send, 0)),
                _ => Ok(()),
            },
            Operation::Barrier => comm.barrier(),
            Operation::Agree => comm.agree(true).map(drop),
            Operation::Hypercube => {
                recv.view.part(rank * block..(rank + 1) * block).copy_from(comm, send.view)?;
                hypercube::<T>(comm, *block, recv.view)
            }
            Operation::AllReduceWith
            | Operation::AllReduceCoalesced
            | Operation::AllGatherObject
            | Operation::NeighborAllToAll
            | Operation::Put
            | Operation::Get
            | Operation::PutSignal => unreachable!("{} is carried out elsewhere", operation.name()),
        }
    }

    fn in_place(&self, arguments: &Arguments<'_>, buffer: &mut ViewMut<'_>) -> Result<()> {
        let Arguments { comm, operation, block, root, .. } = arguments;
        if operation.is_on_host() {
            let MemoryMut::Host(buffer) = &mut buffer.memory else {
                unreachable!("the plan refuses GPU memory");
            };
            let buffer = elements_mut::<T>(buffer);
            return match operation {
                Operation::AllReduceWith => comm.all_reduce_in_place_with(buffer, |a, b| a.add(*b)),
                _ => comm.all_reduce_coalesced(&mut eighths(buffer), *self),
            };
        }
        let buffer = &mut buffer.elements::<T>();
        match operation {
            Operation::AllReduce => comm.all_reduce_in_place(buffer, *self),
            Operation::AllGather => comm.all_gather_in_place(buffer),
            Operation::ReduceScatter => comm.reduce_scatter_in_place(buffer, *self),
            Operation::Broadcast => comm.broadcast_in_place(buffer, *root),
            Operation::Reduce => comm.reduce_in_place(buffer, *self, *root),
            Operation::Scan => comm.scan_in_place(buffer, *self),
            Operation::ExclusiveScan => comm.exclusive_scan_in_place(buffer, *self),
            Operation::AllToAll => comm.all_to_all_in_place(buffer),
            Operation::Gather => comm.gather_in_place(buffer, *root),
            Operation::Scatter => comm.scatter_in_place(buffer, *root),
            Operation::Hypercube => hypercube::<T>(comm, *block, buffer.view),
            Operation::AllReduceWith
            | Operation::AllReduceCoalesced
            | Operation::AllGatherObject
            | Operation::AllToAllV
            | Operation::SendRecv
            | Operation::RecvAny
            | Operation::NeighborAllToAll
            | Operation::PingPong
            | Operation::Barrier
            | Operation::Agree
            | Operation::Put
            | Operation::Get
            | Operation::PutSignal => {
                unreachable!("{} has no form in place, or is carried out elsewhere", operation.name())
            }
        }
    }
}

/// Eight buffers of about one length.
fn eighths<T>(buffer: &mut [T]) -> [&mut [T]; 8] {
    let (len, mut rest) = (buffer.len(), buffer);
    std::array::from_fn(|part| {
        rest.split_off_mut(..len * (part + 1) / 8 - len * part / 8).expect("the parts are the buffer")
    })
}

/// An object of these bytes, and what all ranks' objects hold.
fn all_gather_object(comm: &Comm, send: &[u8], recv: &mut [u8]) -> Result<()> {
    let objects = comm.all_gather_object(&ByteBuf::from(send))?;
    for (block, object) in recv.chunks_exact_mut(send.len()).zip(objects) {
        block.copy_from_slice(&object);
    }
    Ok(())
}

/// all_gather in log2(ranks) exchanges; each doubles the blocks that a rank has.
fn hypercube<T: Value>(comm: &Comm, block: usize, buffer: &mut ViewMut<'_>) -> Result<()> {
    let rank = comm.rank();
    let mut have = 1;
    while have < comm.world_size() {
        let partner = rank ^ have;
        let first = (rank & !(have - 1)).min(partner & !(have - 1));
        let (mut below, mut above) = buffer.split_at_mut((first + have) * block);
        let (lower, upper) = (below.part(first * block..(first + have) * block), above.part(0..have * block));
        let (own, mut others) = if rank < partner { (lower, upper) } else { (upper, lower) };
        let own = own.as_view();
        comm.send_recv(&own.elements::<T>(), partner, &mut others.elements::<T>(), partner)?;
        have *= 2;
    }
    Ok(())
}
