//! One operation on given buffers: the call that is timed and checked.
//!
//! Nothing else happens here, because everything here is inside the measured time.

use super::data::Value;
use super::layout::{Layout, weighted_counts, weighted_counts_to};
use super::operation::{Operation, Place};
use super::view::{View, ViewMut};
use phalanx::{Comm, Reduction, Result};

/// An operation with everything but its buffers.
pub struct Case<'a, T> {
    pub comm: &'a Comm,
    pub operation: Operation,
    pub layout: Layout,
    pub reduction: Reduction<T>,
    pub root: usize,
    send_counts: Vec<usize>,
    recv_counts: Vec<usize>,
}

impl<'a, T: Value> Case<'a, T> {
    pub fn new(
        comm: &'a Comm,
        operation: Operation,
        layout: Layout,
        reduction: Reduction<T>,
        root: usize,
    ) -> Self {
        let (total, ranks, rank) = (layout.count * comm.world_size(), comm.world_size(), comm.rank());
        Case {
            comm,
            operation,
            layout,
            reduction,
            root,
            send_counts: weighted_counts(total, ranks, rank),
            recv_counts: weighted_counts_to(total, ranks, rank),
        }
    }

    /// Whether its calls only enqueue work on the GPU.
    pub fn is_enqueued(&self) -> bool {
        self.comm.cuda_stream().is_some() && self.operation.has_data()
    }

    /// Performs the operation once, or enqueues it. In place, `recv` is the one buffer and `send` is not looked at.
    pub fn perform(&self, place: Place, send: &View<'_, T>, recv: &mut ViewMut<'_, T>) -> Result<()> {
        match place {
            Place::OutOfPlace => self.out_of_place(send, recv),
            Place::InPlace => self.in_place(recv),
        }
    }

    fn out_of_place(&self, send: &View<'_, T>, recv: &mut ViewMut<'_, T>) -> Result<()> {
        let (comm, rank, ranks) = (self.comm, self.comm.rank(), self.comm.world_size());
        match self.operation {
            Operation::AllReduce => comm.all_reduce(send, recv, self.reduction),
            Operation::AllGather => comm.all_gather(send, recv),
            Operation::ReduceScatter => comm.reduce_scatter(send, recv, self.reduction),
            Operation::Broadcast => comm.broadcast(send, recv, self.root),
            Operation::Reduce => comm.reduce(send, recv, self.reduction, self.root),
            Operation::AllToAll => comm.all_to_all(send, recv),
            Operation::AllToAllV => comm.all_to_all_v(send, &self.send_counts, recv, &self.recv_counts),
            Operation::Gather => comm.gather(send, recv, self.root),
            Operation::Scatter => comm.scatter(send, recv, self.root),
            Operation::SendRecv => comm.send_recv(send, (rank + 1) % ranks, recv, (rank + ranks - 1) % ranks),
            Operation::PingPong => match rank {
                0 => comm.send(send, 1).and_then(|()| comm.recv(recv, 1)),
                1 => comm.recv(recv, 0).and_then(|()| comm.send(send, 0)),
                _ => Ok(()),
            },
            Operation::Barrier => comm.barrier(),
            Operation::Hypercube => {
                let block = self.layout.count;
                recv.part(rank * block..(rank + 1) * block).copy_from(comm, send)?;
                self.hypercube(recv)
            }
            Operation::Put | Operation::Get | Operation::PutSignal => {
                unreachable!("{} is no operation of a communicator", self.operation.name())
            }
        }
    }

    fn in_place(&self, buffer: &mut ViewMut<'_, T>) -> Result<()> {
        let comm = self.comm;
        match self.operation {
            Operation::AllReduce => comm.all_reduce_in_place(buffer, self.reduction),
            Operation::AllGather => comm.all_gather_in_place(buffer),
            Operation::ReduceScatter => comm.reduce_scatter_in_place(buffer, self.reduction),
            Operation::Broadcast => comm.broadcast_in_place(buffer, self.root),
            Operation::Reduce => comm.reduce_in_place(buffer, self.reduction, self.root),
            Operation::AllToAll => comm.all_to_all_in_place(buffer),
            Operation::Gather => comm.gather_in_place(buffer, self.root),
            Operation::Scatter => comm.scatter_in_place(buffer, self.root),
            Operation::Hypercube => self.hypercube(buffer),
            Operation::AllToAllV
            | Operation::SendRecv
            | Operation::PingPong
            | Operation::Barrier
            | Operation::Put
            | Operation::Get
            | Operation::PutSignal => {
                unreachable!("{} has no form in place", self.operation.name())
            }
        }
    }

    /// all_gather in log2(ranks) exchanges: in each, a rank doubles what it has.
    fn hypercube(&self, buffer: &mut ViewMut<'_, T>) -> Result<()> {
        let (rank, block) = (self.comm.rank(), self.layout.count);
        let mut have = 1;
        while have < self.comm.world_size() {
            let partner = rank ^ have;
            let first = (rank & !(have - 1)).min(partner & !(have - 1));
            let (mut below, mut above) = buffer.split_at_mut((first + have) * block);
            let (lower, upper) =
                (below.part(first * block..(first + have) * block), above.part(0..have * block));
            let (mine, mut theirs) = if rank < partner { (lower, upper) } else { (upper, lower) };
            self.comm.send_recv(&mine, partner, &mut theirs, partner)?;
            have *= 2;
        }
        Ok(())
    }
}
