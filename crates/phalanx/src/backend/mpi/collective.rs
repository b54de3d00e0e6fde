//! Collectives as MPI calls.

use super::reduction::Plan;
use super::{Failure, MpiComm, check, datatype, total};
use crate::backend::{Blocks, Call, Operation};
use phalanx_sys::mpi::Handle;
use std::ffi::{c_int, c_void};

/// The most that is kept of the memory below, in 16-byte words.
const KEPT: usize = (4 << 20) / 16;

/// Memory that operations need besides their buffers, kept from one to the next.
#[derive(Default)]
pub(super) struct Scratch {
    words: Vec<u128>,
    counts: Vec<c_int>,
    offsets: Vec<c_int>,
}

impl Scratch {
    /// At least so many bytes, of any content.
    pub fn bytes(&mut self, bytes: usize) -> *mut u8 {
        let words = bytes.div_ceil(16);
        if self.words.len() < words {
            self.words.resize(words, 0);
        }
        self.words.as_mut_ptr().cast()
    }

    pub fn shrink(&mut self) {
        if self.words.len() > KEPT {
            self.words = Vec::new();
        }
    }

    /// Lengths and offsets of blocks, as MPI has them.
    fn blocks(&mut self, counts: &[usize]) -> (*const c_int, *const c_int) {
        self.counts.clear();
        self.offsets.clear();
        let mut offset = 0;
        for count in counts {
            self.counts.push(*count as c_int);
            self.offsets.push(offset);
            offset += *count as c_int;
        }
        (self.counts.as_ptr(), self.offsets.as_ptr())
    }
}

/// A reduction by MPI's types and operations.
struct Reduce<'a> {
    operation: Operation,
    send: *const u8,
    recv: *mut u8,
    blocks: Blocks<'a>,
    root: usize,
    datatype: Handle,
    op: Handle,
    /// Bytes of an element.
    size: usize,
}

impl MpiComm {
    /// Does what the call says.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::backend::Backend::collective).
    #[inline]
    pub(super) unsafe fn carry_out(&self, call: &Call<'_>) -> Result<(), Failure> {
        // SAFETY: no other thread is inside `collective`, and the reference ends with it.
        let scratch = unsafe { &mut *self.scratch.get() };
        // SAFETY: the caller's contract.
        unsafe {
            if self.is_large(call) {
                self.carry_out_large(call, scratch)
            } else {
                self.carry_out_at_once(call, scratch)
            }
        }
    }

    /// The same with one MPI call, whose counts fit.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::backend::Backend::collective).
    pub(super) unsafe fn carry_out_at_once(
        &self,
        call: &Call<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), Failure> {
        if call.operation.is_empty_handed() {
            // SAFETY: the communicator is alive.
            return check("MPI_Barrier", unsafe { (self.process.mpi.functions.barrier)(self.comm) });
        }
        if matches!(call.blocks, Blocks::Equal(0)) {
            // For every rank alike; MPI libraries are not of one mind about calls without data.
            return Ok(());
        }
        // SAFETY: the caller's contract.
        unsafe {
            if call.operation.reduces() {
                self.reduce(call, scratch)
            } else {
                self.move_blocks(call, scratch)
            }
        }
    }

    fn in_place(&self) -> *mut c_void {
        std::ptr::without_provenance_mut(self.process.mpi.constants.in_place)
    }

    /// The pointer, unless it means `MPI_IN_PLACE`: that of an empty buffer of bytes may be 1, which does.
    #[inline]
    pub(super) fn no_sentinel(&self, pointer: *const u8) -> *const c_void {
        static NOTHING: u128 = 0;
        let means_in_place = pointer.addr() == self.process.mpi.constants.in_place;
        if means_in_place { (&raw const NOTHING).cast() } else { pointer.cast() }
    }

    /// # Safety
    /// As for [`Backend::collective`](crate::backend::Backend::collective).
    unsafe fn move_blocks(&self, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Failure> {
        let f = &self.process.mpi.functions;
        let (ty, comm, root) =
            (datatype(&self.process.mpi.constants, call.dtype), self.comm, call.root as c_int);
        let size = call.dtype.size();
        let (send, recv) = (self.no_sentinel(call.send), self.no_sentinel(call.recv).cast_mut());
        let is_root = self.rank == call.root;
        let own = call.blocks.len(self.rank);
        let count = own as c_int;
        let own_place = |buffer: *const u8| buffer.wrapping_add(call.blocks.offset(self.rank) * size);
        // A gathering call in place has its block where it belongs.
        let gathered_in_place = call.send == own_place(call.recv);
        let counts = || match call.blocks {
            Blocks::Each(counts) => counts,
            Blocks::Equal(_) => unreachable!("a v-variant has a list of counts"),
        };
        // SAFETY: the pointers and counts are those of the call's table, which is MPI's too; buffers that MPI does not
        // use on this rank are not looked at.
        unsafe {
            match call.operation {
                Operation::Broadcast => {
                    let buffer = if is_root { send.cast_mut() } else { recv };
                    check("MPI_Bcast", (f.bcast)(buffer, count, ty, root, comm))?;
                    if is_root && send != recv.cast_const() {
                        std::ptr::copy_nonoverlapping(call.send, call.recv, own * size);
                    }
                    Ok(())
                }
                Operation::AllGather => {
                    let send = if gathered_in_place { self.in_place() } else { send };
                    check("MPI_Allgather", (f.allgather)(send, count, ty, recv, count, ty, comm))
                }
                Operation::AllGatherV => {
                    let (counts, offsets) = scratch.blocks(counts());
                    let done = (f.allgatherv)(send, count, ty, recv, counts, offsets, ty, comm);
                    check("MPI_Allgatherv", done)
                }
                Operation::Gather => {
                    let send = if is_root && gathered_in_place { self.in_place() } else { send };
                    check("MPI_Gather", (f.gather)(send, count, ty, recv, count, ty, root, comm))
                }
                Operation::GatherV => {
                    let (counts, offsets) = scratch.blocks(counts());
                    let done = (f.gatherv)(send, count, ty, recv, counts, offsets, ty, root, comm);
                    check("MPI_Gatherv", done)
                }
                Operation::Scatter => {
                    let in_place = is_root && call.recv.cast_const() == own_place(call.send);
                    let recv = if in_place { self.in_place() } else { recv };
                    check("MPI_Scatter", (f.scatter)(send, count, ty, recv, count, ty, root, comm))
                }
                Operation::ScatterV => {
                    let (counts, offsets) = scratch.blocks(counts());
                    let done = (f.scatterv)(send, counts, offsets, ty, recv, count, ty, root, comm);
                    check("MPI_Scatterv", done)
                }
                Operation::AllToAll => {
                    let send = if send == recv { self.in_place() } else { send };
                    check("MPI_Alltoall", (f.alltoall)(send, count, ty, recv, count, ty, comm))
                }
                operation => unreachable!("{} moves no blocks", operation.name()),
            }
        }
    }

    /// # Safety
    /// As for [`Backend::collective`](crate::backend::Backend::collective).
    unsafe fn reduce(&self, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Failure> {
        let Call { operation, send, recv, blocks, root, .. } = *call;
        let size = call.dtype.size();
        // SAFETY: the caller's contract.
        unsafe {
            match self.process.plans[call.dtype as usize][call.reduction.code as usize] {
                Plan::Direct { datatype, op } => {
                    let reduce = Reduce { operation, send, recv, blocks, root, datatype, op, size };
                    self.reduce_as(&reduce, scratch)
                }
                Plan::Divided { datatype, op, accumulated } => {
                    let reduce = Reduce { operation, send, recv, blocks, root, datatype, op, size };
                    self.reduce_as(&reduce, scratch)?;
                    if operation != Operation::Reduce || root == self.rank {
                        (accumulated.finish)(recv, recv, self.ranks, blocks.len(self.rank));
                    }
                    Ok(())
                }
                Plan::Accumulated { datatype, op, accumulated } => {
                    // All blocks, and behind them room for the result.
                    let all = match operation {
                        Operation::ReduceScatter | Operation::ReduceScatterV => total(blocks, self.ranks),
                        _ => blocks.len(self.rank),
                    };
                    let own = blocks.len(self.rank);
                    let buffer = scratch.bytes((all + own) * accumulated.size);
                    (accumulated.prepare)(buffer, send, call.reduction.factor, all);
                    let result = match operation {
                        Operation::AllReduce => buffer,
                        _ => buffer.add(all * accumulated.size),
                    };
                    let (send, size) = (buffer.cast_const(), accumulated.size);
                    // The result is not inside of what is sent, so this leaves the buffer where it is.
                    let reduce = Reduce { operation, send, recv: result, blocks, root, datatype, op, size };
                    self.reduce_as(&reduce, scratch)?;
                    if operation != Operation::Reduce || root == self.rank {
                        (accumulated.finish)(recv, result, self.ranks, own);
                    }
                    scratch.shrink();
                    Ok(())
                }
            }
        }
    }

    /// # Safety
    /// As for [`Backend::collective`](crate::backend::Backend::collective), with elements of the given type.
    #[inline]
    unsafe fn reduce_as(&self, reduce: &Reduce<'_>, scratch: &mut Scratch) -> Result<(), Failure> {
        let f = &self.process.mpi.functions;
        let Reduce { blocks, datatype, op, size, .. } = *reduce;
        let (send, recv) = (self.no_sentinel(reduce.send), self.no_sentinel(reduce.recv).cast_mut());
        let own = blocks.len(self.rank);
        let (count, comm) = (own as c_int, self.comm);
        // SAFETY: the pointers and counts are those of the call's table, which is MPI's too.
        unsafe {
            match reduce.operation {
                Operation::AllReduce => {
                    let send = if send == recv { self.in_place() } else { send };
                    check("MPI_Allreduce", (f.allreduce)(send, recv, count, datatype, op, comm))
                }
                Operation::Reduce => {
                    let (is_root, root) = (reduce.root == self.rank, reduce.root as c_int);
                    let in_place = is_root && send == recv.cast_const();
                    let mut send = send;
                    if in_place {
                        // Through a copy: MPICH 4.0 crashes in MPI_Reduce with MPI_IN_PLACE.
                        let copy = scratch.bytes(own * size);
                        std::ptr::copy_nonoverlapping(reduce.send, copy, own * size);
                        send = copy.cast();
                    }
                    // Only the root's is written.
                    let recv = if is_root { recv } else { std::ptr::null_mut() };
                    let done = (f.reduce)(send, recv, count, datatype, op, root, comm);
                    if in_place {
                        scratch.shrink();
                    }
                    check("MPI_Reduce", done)
                }
                _ => {
                    // In place, MPI would put the result at the buffer's start and overwrite the other blocks.
                    let all = total(blocks, self.ranks) * size;
                    let inside = (send.addr()..send.addr() + all).contains(&recv.addr());
                    let result = if inside && own > 0 { scratch.bytes(own * size).cast() } else { recv };
                    match blocks {
                        Blocks::Equal(_) => {
                            let done = (f.reduce_scatter_block)(send, result, count, datatype, op, comm);
                            check("MPI_Reduce_scatter_block", done)?;
                        }
                        Blocks::Each(counts) => {
                            let (counts, _) = scratch.blocks(counts);
                            let done = (f.reduce_scatter)(send, result, counts, datatype, op, comm);
                            check("MPI_Reduce_scatter", done)?;
                        }
                    }
                    if result != recv {
                        std::ptr::copy_nonoverlapping(result.cast::<u8>(), reduce.recv, own * size);
                        scratch.shrink();
                    }
                    Ok(())
                }
            }
        }
    }
}
