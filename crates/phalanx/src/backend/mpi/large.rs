//! Collectives larger than one MPI call: cut into several calls, or made of messages.
//!
//! MPI's counts are C `int`s, and Open MPI lacks the functions with larger ones. So a buffer is cut into
//! parts:
//! - a gathering becomes a broadcast of each block,
//! - a scattered reduction becomes a reduction of each block,
//! - an exchange between all pairs becomes messages.
//!
//! all_to_all_v is always made of messages, as in MPI libraries: only the two ends of a block know its
//! length.

use super::collective::{Scratch, is_nothing};
use super::{MpiComm, MpiFailure};
use crate::contract::{Blocks, Call, Direction, Operation, OperationId, Transfer};
use crate::types::dtype::DType;
use crate::types::memory::Space;
use std::ops::Range;

/// A block to send to a peer or to receive from it.
struct PeerBlock<P> {
    peer: usize,
    start: P,
    bytes: usize,
}

/// Splits an operation into operations that each fit one MPI call.
#[derive(Clone)]
pub(crate) struct CallParts<'a> {
    call: Call<'a>,
    /// Largest number of elements of a part; `None` if the operation is one call.
    most: Option<usize>,
    /// The blocks left to do. A block is the whole operation, unless each rank's block is a part of its own.
    blocks: Range<usize>,
    /// Elements of the first of these blocks that are done.
    start: usize,
}

impl<'a> Iterator for CallParts<'a> {
    type Item = Call<'a>;

    fn next(&mut self) -> Option<Call<'a>> {
        use Operation::{AllGather, AllGatherV, Broadcast, Reduce, ReduceScatter, ReduceScatterV};
        let call = self.call;
        while !self.blocks.is_empty() {
            let block = self.blocks.start;
            let Some(most) = self.most else {
                self.blocks.next();
                return Some(call);
            };
            let (size, offset) = (call.dtype.size(), call.blocks.offset(block) * call.dtype.size());
            let (operation, root, send, recv) = match call.operation {
                AllGather | AllGatherV => {
                    let place = call.recv.wrapping_add(offset);
                    (Broadcast, block, place.cast_const(), place)
                }
                ReduceScatter | ReduceScatterV => (Reduce, block, call.send.wrapping_add(offset), call.recv),
                operation => (operation, call.root, call.send, call.recv),
            };
            let count = call.blocks.len(block);
            if self.start >= count {
                self.blocks.next();
                self.start = 0;
                continue;
            }
            let blocks = Blocks::Equal(most.min(count - self.start));
            // Where the operation ignores a pointer on this rank, it may point anywhere.
            let (send, recv) = (send.wrapping_add(self.start * size), recv.wrapping_add(self.start * size));
            self.start += most;
            return Some(Call { operation, root, send, recv, blocks, ..call });
        }
        None
    }
}

impl MpiComm {
    /// Whether a call is too large for one MPI call; the same on every rank.
    #[inline]
    pub(crate) fn is_large(&self, call: &Call<'_>) -> bool {
        if call.operation == Operation::AllToAllV {
            return true;
        }
        let (flow, rank, ranks) = (call.flow(), self.rank, self.ranks);
        flow.send_len(rank, ranks).max(flow.recv_len(rank, ranks)) > self.process.max_bytes
    }

    /// Whether an operation is made of messages.
    pub(crate) fn is_of_messages(&self, call: &Call<'_>) -> bool {
        use Operation::*;
        matches!(call.operation, Gather | GatherV | Scatter | ScatterV | AllToAll | AllToAllV)
            && self.is_large(call)
    }

    /// The parts of an operation that is not made of messages.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective).
    pub(crate) unsafe fn parts<'a>(&self, call: &Call<'a>) -> CallParts<'a> {
        use Operation::*;
        let size = call.dtype.size();
        let is_large = self.is_large(call);
        if is_large && matches!(call.operation, AllGather | AllGatherV) {
            let place = call.flow().target(self.rank, self.rank);
            let own = call.recv.wrapping_add(place.start);
            if call.send != own.cast_const() {
                // SAFETY: this rank's block, and its place among all of them.
                unsafe { std::ptr::copy_nonoverlapping(call.send, own, place.len()) };
            }
        }
        let blocks = match call.operation {
            Split => 0..0,
            _ if is_nothing(call) => 0..0,
            AllGather | AllGatherV | ReduceScatter | ReduceScatterV if is_large => 0..self.ranks,
            _ => 0..1,
        };
        let most = is_large.then(|| (self.process.max_bytes / size).max(1));
        CallParts { call: *call, most, blocks, start: 0 }
    }

    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective).
    #[cold]
    pub(crate) unsafe fn carry_out_large(
        &self,
        call: &Call<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), MpiFailure> {
        // SAFETY: the caller's contract, for each part of the buffers, and until all messages are complete.
        unsafe {
            if self.is_of_messages(call) {
                let ids = self.post_blocks(call, scratch);
                let done = self.complete(ids);
                scratch.shrink();
                return done;
            }
            for part in self.parts(call) {
                self.carry_out_at_once(&part, scratch)?;
                self.watch.progress();
            }
        }
        Ok(())
    }

    /// Posts the messages of which a gather, scatter or all_to_all is made.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective), until all messages are complete;
    /// so long the scratch memory, too, is left alone.
    pub(crate) unsafe fn post_blocks(&self, call: &Call<'_>, scratch: &mut Scratch) -> Vec<OperationId> {
        let (flow, rank, ranks) = (call.flow(), self.rank, self.ranks);
        let mut send = call.send;
        if flow.scattered && flow.gathered && send == call.recv.cast_const() {
            let bytes = flow.send_len(rank, ranks);
            let copy = scratch.bytes(bytes);
            // SAFETY: the buffer has so many bytes, and the copy room for them.
            unsafe { std::ptr::copy_nonoverlapping(send, copy, bytes) };
            send = copy;
        }
        let to = |peer| {
            let source = flow.source(rank, peer);
            PeerBlock { peer, start: send.wrapping_add(source.start), bytes: source.len() }
        };
        let from = |peer| {
            let target = flow.target(rank, peer);
            PeerBlock { peer, start: call.recv.wrapping_add(target.start), bytes: target.len() }
        };
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        if flow.writers.includes(rank) {
            sends.extend(flow.readers.among(ranks).map(to));
        }
        if flow.readers.includes(rank) {
            receives.extend(flow.writers.among(ranks).map(from));
        }
        // SAFETY: the parts are the blocks of the call's buffers.
        unsafe { self.exchange(&sends, &receives, call.is_on_gpu()) }
    }

    /// Posts messages for all parts. A rank's block for itself is copied, by MPI if the memory is a GPU's.
    ///
    /// # Safety
    /// The parts can be read and written until the messages are complete; one that this rank gives itself is
    /// where it belongs or apart from it.
    unsafe fn exchange(
        &self,
        sends: &[PeerBlock<*const u8>],
        receives: &[PeerBlock<*mut u8>],
        on_gpu: bool,
    ) -> Vec<OperationId> {
        // A tag that no message of the application has.
        let (tag, dtype) = (self.process.max_tag + 1, DType::U8);
        let space = if on_gpu { Space::Device } else { Space::Host };
        let transfer =
            |peer, count, direction| Transfer { space, ..Transfer::host(direction, peer, tag, dtype, count) };
        let is_own = |peer: usize| peer == self.rank;
        let own =
            sends.iter().find(|part| is_own(part.peer)).zip(receives.iter().find(|part| is_own(part.peer)));
        let own = own.filter(|(from, to)| from.start != to.start.cast_const());
        let by_message = |peer, bytes| bytes > 0 && (!is_own(peer) || (on_gpu && own.is_some()));
        let mut ids = Vec::new();
        // SAFETY: the caller's contract. Both ends know which parts are empty.
        unsafe {
            for part in receives.iter().filter(|part| by_message(part.peer, part.bytes)) {
                let receive = transfer(part.peer, part.bytes, Direction::Recv(part.start));
                ids.push(self.post_transfer(receive));
            }
            for part in sends.iter().filter(|part| by_message(part.peer, part.bytes)) {
                let send = transfer(part.peer, part.bytes, Direction::Send(part.start));
                ids.push(self.post_transfer(send));
            }
        }
        if let Some((from, to)) = own.filter(|_| !on_gpu) {
            // SAFETY: both have the length of this rank's own block.
            unsafe { std::ptr::copy_nonoverlapping(from.start, to.start, to.bytes) };
        }
        ids
    }

    /// Waits for all messages. The deadline starts anew with each that completes.
    fn complete(&self, mut ids: Vec<OperationId>) -> Result<(), MpiFailure> {
        let mut outcome = Ok(());
        let mut polls = 0u32;
        while !ids.is_empty() {
            if self.settle(&mut ids, &mut outcome) {
                polls = 0;
            }
            polls += 1;
            if polls > super::message::SPINS {
                std::thread::yield_now();
            }
        }
        outcome
    }

    /// Removes the complete messages; `true` if there were any.
    pub(crate) fn settle(&self, ids: &mut Vec<OperationId>, outcome: &mut Result<(), MpiFailure>) -> bool {
        let before = ids.len();
        ids.retain(|id| match self.take_if_done(*id) {
            Some(done) => {
                *outcome = (*outcome).and(done.map_err(|_| MpiFailure::CommFailed));
                self.watch.progress();
                false
            }
            None => true,
        });
        ids.len() < before
    }
}
