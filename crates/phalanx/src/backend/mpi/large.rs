//! Collectives on more bytes than an MPI call takes: cut into several calls, or made of messages.
//!
//! MPI's counts are C `int`s; its functions with larger ones are missing in Open MPI. So a buffer is cut into parts;
//! a gathering becomes a broadcast of each block, a scattered reduction a reduction of each block, and what goes
//! from each rank to each becomes messages. all_to_all_v is always made of messages, which is how MPI libraries
//! do it too: only its two ends know how long a block is.

use super::collective::Scratch;
use super::{Failure, MpiComm, check, total};
use crate::backend::{Blocks, Call, Operation};
use phalanx_sys::mpi::{Handle, Status};
use std::ffi::c_int;

/// A block that goes to a peer or comes from it.
struct Part<P> {
    peer: usize,
    start: P,
    bytes: usize,
}

impl MpiComm {
    /// Whether a call is too large for one MPI call; the same on every rank.
    #[inline]
    pub(super) fn is_large(&self, call: &Call<'_>) -> bool {
        use Operation::*;
        let elements = match call.operation {
            AllToAllV => return true,
            AllReduce | Broadcast | Reduce => call.blocks.len(self.rank),
            _ => total(call.blocks, self.ranks),
        };
        elements * call.dtype.size() > self.process.max_bytes
    }

    /// # Safety
    /// As for [`Backend::collective`](crate::backend::Backend::collective).
    #[cold]
    pub(super) unsafe fn carry_out_large(
        &self,
        call: &Call<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), Failure> {
        use Operation::*;
        let size = call.dtype.size();
        let at = |rank: usize| call.blocks.offset(rank) * size;
        // SAFETY: the caller's contract, for each part of the buffers.
        unsafe {
            match call.operation {
                AllReduce | Broadcast | Reduce => self.in_parts(call, scratch),
                AllGather | AllGatherV => {
                    let own = call.recv.add(at(self.rank));
                    if call.send != own.cast_const() {
                        std::ptr::copy_nonoverlapping(call.send, own, call.blocks.len(self.rank) * size);
                    }
                    (0..self.ranks).try_for_each(|root| {
                        let block = call.recv.add(at(root));
                        let blocks = Blocks::Equal(call.blocks.len(root));
                        let (operation, send) = (Broadcast, block.cast_const());
                        self.in_parts(&Call { operation, root, send, recv: block, blocks, ..*call }, scratch)
                    })
                }
                ReduceScatter | ReduceScatterV => (0..self.ranks).try_for_each(|root| {
                    let send = call.send.add(at(root));
                    let blocks = Blocks::Equal(call.blocks.len(root));
                    self.in_parts(&Call { operation: Reduce, root, send, blocks, ..*call }, scratch)
                }),
                _ => self.exchange_blocks(call, scratch),
            }
        }
    }

    /// An all_reduce, broadcast or reduce, cut into parts.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::backend::Backend::collective).
    unsafe fn in_parts(&self, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Failure> {
        let (count, size) = (call.blocks.len(self.rank), call.dtype.size());
        let most = self.process.max_bytes / size;
        let mut start = 0;
        while start < count {
            let blocks = Blocks::Equal(most.min(count - start));
            // Where the operation has no use for a pointer on this rank it may point anywhere.
            let (send, recv) = (call.send.wrapping_add(start * size), call.recv.wrapping_add(start * size));
            // SAFETY: the caller's contract, for this part.
            unsafe { self.carry_out_at_once(&Call { send, recv, blocks, ..*call }, scratch) }?;
            self.guard.beat();
            start += most;
        }
        Ok(())
    }

    /// A gather, scatter or all_to_all, made of messages.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::backend::Backend::collective).
    unsafe fn exchange_blocks(&self, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Failure> {
        use Operation::*;
        let size = call.dtype.size();
        let (send_blocks, recv_blocks) = (call.blocks, call.recv_blocks);
        let mut send = call.send;
        if matches!(call.operation, AllToAll) && send == call.recv.cast_const() {
            let bytes = total(send_blocks, self.ranks) * size;
            let copy = scratch.bytes(bytes);
            // SAFETY: the buffer has so many bytes, and the copy room for them.
            unsafe { std::ptr::copy_nonoverlapping(send, copy, bytes) };
            send = copy;
        }
        let block = |blocks: Blocks<'_>, rank: usize| (blocks.offset(rank) * size, blocks.len(rank) * size);
        let whole =
            |start, blocks: Blocks<'_>| Part { peer: call.root, start, bytes: blocks.len(self.rank) * size };
        let is_root = self.rank == call.root;
        let to_each = || {
            let part = |peer| {
                let (offset, bytes) = block(send_blocks, peer);
                Part { peer, start: send.wrapping_add(offset), bytes }
            };
            (0..self.ranks).map(part).collect::<Vec<_>>()
        };
        let from_each = || {
            let part = |peer| {
                let (offset, bytes) = block(recv_blocks, peer);
                Part { peer, start: call.recv.wrapping_add(offset), bytes }
            };
            (0..self.ranks).map(part).collect::<Vec<_>>()
        };
        let (sends, receives) = match call.operation {
            Gather | GatherV => {
                (vec![whole(send, send_blocks)], if is_root { from_each() } else { Vec::new() })
            }
            Scatter | ScatterV => {
                let recv =
                    Part { peer: call.root, start: call.recv, bytes: send_blocks.len(self.rank) * size };
                (if is_root { to_each() } else { Vec::new() }, vec![recv])
            }
            _ => (to_each(), from_each()),
        };
        // SAFETY: the parts are the blocks of the call's buffers.
        let done = unsafe { self.exchange(&sends, &receives) };
        scratch.shrink();
        done
    }

    /// Sends and receives all parts, this rank's own too.
    ///
    /// # Safety
    /// The parts can be read and written; one that this rank gives itself is where it belongs or apart from it.
    unsafe fn exchange(&self, sends: &[Part<*const u8>], receives: &[Part<*mut u8>]) -> Result<(), Failure> {
        let f = &self.process.mpi.functions;
        let (byte, comm) = (self.process.mpi.constants.byte, self.comm);
        // The one that no message of the application has.
        let tag = (self.process.max_tag + 1) as c_int;
        let mut requests = Vec::new();
        let mut posted = Ok(());
        let mut add = |function, code, request| match check(function, code) {
            Ok(()) => requests.push(request),
            Err(failure) => posted = Err(failure),
        };
        // SAFETY: the parts are valid, and in use until all requests are complete, below.
        unsafe {
            for part in receives.iter().filter(|part| part.peer != self.rank) {
                for (offset, len) in self.pieces(part.bytes) {
                    let mut request = Handle::ZERO;
                    let (start, peer) = (part.start.add(offset).cast(), part.peer as c_int);
                    let code = (f.irecv)(start, len, byte, peer, tag, comm, &raw mut request);
                    add("MPI_Irecv", code, request);
                }
            }
            for part in sends.iter().filter(|part| part.peer != self.rank) {
                for (offset, len) in self.pieces(part.bytes) {
                    let mut request = Handle::ZERO;
                    let (start, peer) = (part.start.add(offset).cast(), part.peer as c_int);
                    let code = (f.isend)(start, len, byte, peer, tag, comm, &raw mut request);
                    add("MPI_Isend", code, request);
                }
            }
        }
        let own = |peer: usize| peer == self.rank;
        if let (Some(from), Some(to)) =
            (sends.iter().find(|part| own(part.peer)), receives.iter().find(|part| own(part.peer)))
            && from.start != to.start.cast_const()
        {
            // SAFETY: both have the length of this rank's own block.
            unsafe { std::ptr::copy_nonoverlapping(from.start, to.start, to.bytes) };
        }
        // Also if something failed: MPI has the buffers until then.
        self.complete(requests).and(posted)
    }

    /// The pieces of so many bytes that one MPI call takes: offset and length.
    fn pieces(&self, bytes: usize) -> impl Iterator<Item = (usize, c_int)> + use<> {
        let most = self.process.max_bytes;
        (0..bytes).step_by(most).map(move |offset| (offset, most.min(bytes - offset) as c_int))
    }

    /// Waits for all requests. The deadline is the operation's, and starts anew with each that completes.
    fn complete(&self, mut requests: Vec<Handle>) -> Result<(), Failure> {
        let mut polls = 0u32;
        let mut failure = None;
        while !requests.is_empty() {
            let before = requests.len();
            requests.retain_mut(|request| {
                let (mut done, mut status) = (0, Status::new());
                // SAFETY: a request that is not complete.
                let tested =
                    unsafe { (self.process.mpi.functions.test)(request, &raw mut done, &raw mut status) };
                let failed = check("MPI_Test", tested).err();
                failure = failure.or(failed);
                done == 0 && failed.is_none()
            });
            if requests.len() < before {
                self.guard.beat();
                polls = 0;
            }
            polls += 1;
            if polls > super::message::SPINS {
                std::thread::yield_now();
            }
        }
        failure.map_or(Ok(()), Err)
    }
}
