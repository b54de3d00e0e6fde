//! Collectives as MPI calls: their arguments, the blocking or non-blocking call, and the work after it.

use super::accumulate::Accumulated;
use super::reduction::ReductionPlan;
use super::{MpiComm, MpiFailure, check, moved_type};
use crate::contract::{Blocks, Call, Operation};
use phalanx_sys::mpi::Handle;
use std::ffi::{c_int, c_void};

/// The most scratch memory kept between operations, in 16-byte words (4 MiB).
const KEPT: usize = (4 << 20) / 16;

/// Scratch memory of operations, kept from one to the next.
#[derive(Default)]
pub(crate) struct Scratch {
    words: Vec<u128>,
    counts: Vec<c_int>,
    offsets: Vec<c_int>,
}

impl Scratch {
    /// At least `bytes` bytes, not initialised.
    pub fn bytes(&mut self, bytes: usize) -> *mut u8 {
        let words = bytes.div_ceil(16);
        if self.words.len() < words {
            self.words.resize(words, 0);
        }
        self.words.as_mut_ptr().cast()
    }

    #[inline]
    pub fn shrink(&mut self) {
        if self.words.len() > KEPT {
            self.words = Vec::new();
        }
    }

    /// Lengths and offsets of blocks, in MPI's form: an element has `per` of the MPI type.
    fn blocks(&mut self, counts: &[usize], per: usize) -> (*const c_int, *const c_int) {
        self.counts.clear();
        self.offsets.clear();
        let mut offset = 0;
        for count in counts {
            let count = (count * per) as c_int;
            self.counts.push(count);
            self.offsets.push(offset);
            offset += count;
        }
        (self.counts.as_ptr(), self.offsets.as_ptr())
    }
}

/// An MPI call: its arguments, and the work after it is complete.
pub(crate) struct Prepared {
    operation: Operation,
    send: *const c_void,
    recv: *mut c_void,
    /// Elements of this rank's block.
    count: c_int,
    /// Lengths and offsets of all blocks, if the lengths differ.
    counts: *const c_int,
    offsets: *const c_int,
    datatype: Handle,
    op: Handle,
    root: c_int,
    /// The work afterwards: the copy first, then the results.
    copy: Option<Copy>,
    results: Option<Results>,
}

/// A copy to the buffer, where MPI cannot write the result itself.
struct Copy {
    from: *const u8,
    to: *mut u8,
    bytes: usize,
}

/// Accumulators to convert to results.
struct Results {
    accumulated: Accumulated,
    from: *const u8,
    to: *mut u8,
    ranks: usize,
    count: usize,
}

impl Prepared {
    /// Moves the results to the caller's buffer.
    ///
    /// # Safety
    /// The call is complete, the memory of the operation still valid; once.
    #[inline(always)]
    pub unsafe fn finish(&self) {
        if let Some(Copy { from, to, bytes }) = self.copy {
            // SAFETY: both have so many bytes, and do not overlap, as whoever prepared this saw to.
            unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
        }
        if let Some(results) = &self.results {
            let Results { accumulated, from, to, ranks, count } = results;
            // SAFETY: so many accumulators and elements, the same or apart.
            unsafe { (accumulated.finish)(*to, *from, *ranks, *count) };
        }
    }
}

impl MpiComm {
    /// Carries out a collective with MPI's blocking calls.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective).
    #[inline]
    pub(crate) unsafe fn carry_out(&self, call: &Call<'_>) -> Result<(), MpiFailure> {
        // SAFETY: no other thread is inside `collective`, and the reference ends with it.
        let scratch = unsafe { &mut *self.scratch.get() };
        // SAFETY: the caller's contract.
        unsafe {
            if self.is_large(call) {
                self.carry_out_large(call, scratch)
            } else if is_nothing(call) {
                Ok(())
            } else {
                self.carry_out_at_once(call, scratch)
            }
        }
    }

    /// Carries out a collective with one MPI call, whose counts fit.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective).
    #[inline(always)]
    pub(crate) unsafe fn carry_out_at_once(
        &self,
        call: &Call<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), MpiFailure> {
        // SAFETY: the caller's contract; the call is complete when it returns.
        unsafe {
            let prepared = self.prepare(call, scratch);
            self.issue(&prepared, None)?;
            prepared.finish();
        }
        scratch.shrink();
        Ok(())
    }

    /// Makes the MPI call: the blocking one, or with a request the non-blocking one.
    ///
    /// # Safety
    /// What the call was prepared from, the scratch memory too, is valid until the call is complete.
    #[inline(always)]
    pub(crate) unsafe fn issue(
        &self,
        prepared: &Prepared,
        request: Option<&mut Handle>,
    ) -> Result<(), MpiFailure> {
        let Prepared { operation, send, recv, count, counts, offsets, datatype: ty, op, root, .. } =
            *prepared;
        let (f, comm) = (&self.process.mpi.functions, self.comm);
        macro_rules! call {
            ($blocking:ident $name:literal, $started:ident $its_name:literal, $($argument:expr),*) => {
                match request {
                    None => check($name, (f.$blocking)($($argument),*)),
                    Some(request) => check($its_name, (f.$started)($($argument,)* request)),
                }
            };
        }
        use Operation::*;
        // SAFETY: the pointers and counts are those of the operation's table, which is MPI's too; buffers
        // that MPI does not use on this rank are not looked at. The rest is the caller's contract.
        unsafe {
            match operation {
                AllReduce => {
                    call!(allreduce "MPI_Allreduce", iallreduce "MPI_Iallreduce", send, recv, count, ty, op, comm)
                }
                Broadcast => call!(bcast "MPI_Bcast", ibcast "MPI_Ibcast", recv, count, ty, root, comm),
                Reduce => {
                    call!(reduce "MPI_Reduce", ireduce "MPI_Ireduce", send, recv, count, ty, op, root, comm)
                }
                AllGather => {
                    call!(allgather "MPI_Allgather", iallgather "MPI_Iallgather",
                        send, count, ty, recv, count, ty, comm)
                }
                AllGatherV => {
                    call!(allgatherv "MPI_Allgatherv", iallgatherv "MPI_Iallgatherv",
                        send, count, ty, recv, counts, offsets, ty, comm)
                }
                ReduceScatter => {
                    call!(reduce_scatter_block "MPI_Reduce_scatter_block",
                        ireduce_scatter_block "MPI_Ireduce_scatter_block", send, recv, count, ty, op, comm)
                }
                ReduceScatterV => {
                    call!(reduce_scatter "MPI_Reduce_scatter", ireduce_scatter "MPI_Ireduce_scatter",
                        send, recv, counts, ty, op, comm)
                }
                Gather => {
                    call!(gather "MPI_Gather", igather "MPI_Igather",
                        send, count, ty, recv, count, ty, root, comm)
                }
                GatherV => {
                    call!(gatherv "MPI_Gatherv", igatherv "MPI_Igatherv",
                        send, count, ty, recv, counts, offsets, ty, root, comm)
                }
                Scatter => {
                    call!(scatter "MPI_Scatter", iscatter "MPI_Iscatter",
                        send, count, ty, recv, count, ty, root, comm)
                }
                ScatterV => {
                    call!(scatterv "MPI_Scatterv", iscatterv "MPI_Iscatterv",
                        send, counts, offsets, ty, recv, count, ty, root, comm)
                }
                AllToAll => {
                    call!(alltoall "MPI_Alltoall", ialltoall "MPI_Ialltoall",
                        send, count, ty, recv, count, ty, comm)
                }
                // Ranks only synchronise.
                _ => call!(barrier "MPI_Barrier", ibarrier "MPI_Ibarrier", comm),
            }
        }
    }

    /// The MPI call for an operation whose counts fit. Makes no call, and writes scratch memory only.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective).
    #[inline(always)]
    pub(crate) unsafe fn prepare(&self, call: &Call<'_>, scratch: &mut Scratch) -> Prepared {
        if call.operation.reduces() {
            // SAFETY: the caller's contract.
            unsafe { self.prepare_reduction(call, scratch) }
        } else {
            self.prepare_move(call, scratch)
        }
    }

    fn in_place(&self) -> *mut c_void {
        std::ptr::without_provenance_mut(self.process.mpi.constants.in_place)
    }

    /// The pointer, unless it means `MPI_IN_PLACE`: that of an empty buffer of bytes may be 1, which does.
    #[inline(always)]
    pub(crate) fn no_sentinel(&self, pointer: *const u8) -> *const c_void {
        static NOTHING: u128 = 0;
        let means_in_place = pointer.addr() == self.process.mpi.constants.in_place;
        if means_in_place { (&raw const NOTHING).cast() } else { pointer.cast() }
    }

    /// The call for an operation, with its buffers as they are. An element has `per` of the MPI type.
    #[inline(always)]
    fn plain(
        &self,
        call: &Call<'_>,
        (datatype, per): (Handle, usize),
        op: Handle,
        scratch: &mut Scratch,
    ) -> Prepared {
        let (counts, offsets) = match call.blocks {
            Blocks::Each(counts) => scratch.blocks(counts, per),
            Blocks::Equal(_) => (std::ptr::null(), std::ptr::null()),
        };
        Prepared {
            operation: call.operation,
            send: self.no_sentinel(call.send),
            recv: self.no_sentinel(call.recv).cast_mut(),
            count: (call.blocks.len(self.rank) * per) as c_int,
            counts,
            offsets,
            datatype,
            op,
            root: call.root as c_int,
            copy: None,
            results: None,
        }
    }

    fn prepare_move(&self, call: &Call<'_>, scratch: &mut Scratch) -> Prepared {
        let constants = &self.process.mpi.constants;
        let mut prepared = self.plain(call, moved_type(constants, call.dtype), constants.sum, scratch);
        let (flow, is_root) = (call.flow(), self.rank == call.root);
        let in_place = flow.is_in_place(call.send, call.recv, self.rank);
        match call.operation {
            Operation::Broadcast if is_root => {
                if !in_place {
                    let bytes = flow.send_len(self.rank, self.ranks);
                    prepared.copy = Some(Copy { from: call.send, to: call.recv, bytes });
                }
                prepared.recv = prepared.send.cast_mut();
            }
            Operation::AllGather | Operation::AllGatherV | Operation::AllToAll if in_place => {
                prepared.send = self.in_place();
            }
            Operation::Gather | Operation::GatherV if is_root && in_place => prepared.send = self.in_place(),
            Operation::Scatter | Operation::ScatterV if is_root && in_place => {
                prepared.recv = self.in_place();
            }
            _ => {}
        }
        prepared
    }

    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective).
    #[inline(always)]
    unsafe fn prepare_reduction(&self, call: &Call<'_>, scratch: &mut Scratch) -> Prepared {
        let size = call.dtype.size();
        // SAFETY: the caller's contract.
        unsafe {
            match self.process.plans[usize::from(call.dtype.code())][call.reduction.code as usize] {
                ReductionPlan::Direct { datatype, op } => self.combine(call, datatype, op, size, scratch),
                ReductionPlan::Divided { datatype, op, accumulated } => {
                    let prepared = self.combine(call, datatype, op, size, scratch);
                    self.with_results(prepared, call, accumulated, call.recv)
                }
                ReductionPlan::Accumulated { datatype, op, accumulated } => {
                    // All blocks, and behind them room for the result.
                    let all = call.flow().send_len(self.rank, self.ranks) / size;
                    let own = call.blocks.len(self.rank);
                    let buffer = scratch.bytes((all + own) * accumulated.size);
                    (accumulated.prepare)(buffer, call.send, call.reduction.factor, all);
                    let result = match call.operation {
                        Operation::AllReduce => buffer,
                        _ => buffer.add(all * accumulated.size),
                    };
                    // The result is not inside of what is sent, so this leaves the buffer where it is.
                    let inner = Call { send: buffer, recv: result, ..*call };
                    let prepared = self.combine(&inner, datatype, op, accumulated.size, scratch);
                    self.with_results(prepared, call, accumulated, result)
                }
            }
        }
    }

    /// Adds the conversion of the accumulators at `from`, on ranks that receive a result.
    fn with_results(
        &self,
        prepared: Prepared,
        call: &Call<'_>,
        accumulated: Accumulated,
        from: *const u8,
    ) -> Prepared {
        if !call.flow().readers.includes(self.rank) {
            return prepared;
        }
        let (ranks, count) = (self.ranks, call.blocks.len(self.rank));
        let results = Some(Results { accumulated, from, to: call.recv, ranks, count });
        Prepared { results, ..prepared }
    }

    /// A reduction by an MPI type and operation, of elements of `size` bytes.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective), with such elements.
    #[inline(always)]
    unsafe fn combine(
        &self,
        call: &Call<'_>,
        datatype: Handle,
        op: Handle,
        size: usize,
        scratch: &mut Scratch,
    ) -> Prepared {
        let mut prepared = self.plain(call, (datatype, 1), op, scratch);
        let (send, recv, own) = (call.send, call.recv.cast_const(), call.blocks.len(self.rank));
        match call.operation {
            Operation::AllReduce => {
                if send == recv {
                    prepared.send = self.in_place();
                }
            }
            Operation::Reduce if self.rank != call.root => prepared.recv = std::ptr::null_mut(),
            Operation::Reduce => {
                if send == recv {
                    // Through a copy: MPICH 4.0 crashes in MPI_Reduce with MPI_IN_PLACE.
                    let copy = scratch.bytes(own * size);
                    // SAFETY: the buffer has so many bytes, and the copy room for them.
                    unsafe { std::ptr::copy_nonoverlapping(send, copy, own * size) };
                    prepared.send = copy.cast();
                }
            }
            _ => {
                // In place, MPI would put the result at the buffer's start and overwrite the other blocks. That of an empty block is
                // apart, too: MPICH takes no two buffers that begin at one address.
                // The elements may be accumulators, of another size than the call's.
                let all = call.blocks.offset(self.ranks) * size;
                if (send.addr()..send.addr() + all).contains(&recv.addr()) {
                    let result = scratch.bytes(own * size);
                    prepared.copy = Some(Copy { from: result, to: call.recv, bytes: own * size });
                    prepared.recv = self.no_sentinel(result).cast_mut();
                }
            }
        }
        prepared
    }
}

/// Whether there is no data on any rank: MPI libraries differ on empty calls, so none is made.
#[inline]
pub(crate) fn is_nothing(call: &Call<'_>) -> bool {
    matches!(call.blocks, Blocks::Equal(0)) && !call.operation.is_empty_handed()
}
