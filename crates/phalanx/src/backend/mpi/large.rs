//! Collectives on more bytes than an MPI call takes: cut into several calls, or made of messages.
//!
//! MPI's counts are C `int`s; its functions with larger ones are missing in Open MPI. So a buffer is cut into parts;
//! a gathering becomes a broadcast of each block, a scattered reduction a reduction of each block, and what goes
//! from each rank to each becomes messages. all_to_all_v is always made of messages, which is how MPI libraries
//! do it too: only its two ends know how long a block is.

use super::collective::Scratch;
use super::{Failure, MpiComm, total};
use crate::backend::{Blocks, Call, Direction, Operation, Ticket, Transfer};
use crate::dtype::DType;

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
        // The tag that no message of the application has.
        let (tag, dtype) = (self.process.max_tag + 1, DType::U8);
        let transfer = |peer, bytes, direction| Transfer::host(direction, peer, tag, dtype, bytes);
        let mut tickets = Vec::new();
        // SAFETY: the parts are valid, and in use until all messages are complete, below. Both ends know which parts
        // are empty.
        unsafe {
            for part in receives.iter().filter(|part| part.peer != self.rank && part.bytes > 0) {
                let receive = transfer(part.peer, part.bytes, Direction::Recv(part.start));
                tickets.push(self.post_transfer(receive));
            }
            for part in sends.iter().filter(|part| part.peer != self.rank && part.bytes > 0) {
                tickets.push(self.post_transfer(transfer(
                    part.peer,
                    part.bytes,
                    Direction::Send(part.start),
                )));
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
        self.complete(tickets)
    }

    /// Waits for all messages. The deadline is the operation's, and starts anew with each that completes.
    fn complete(&self, mut tickets: Vec<Ticket>) -> Result<(), Failure> {
        let mut outcome = Ok(());
        let mut polls = 0u32;
        while !tickets.is_empty() {
            tickets.retain(|ticket| match self.take_if_done(*ticket) {
                Some(done) => {
                    outcome = outcome.and(done.map_err(|_| Failure::Verdict));
                    self.guard.beat();
                    polls = 0;
                    false
                }
                None => true,
            });
            polls += 1;
            if polls > super::message::SPINS {
                std::thread::yield_now();
            }
        }
        outcome
    }
}
