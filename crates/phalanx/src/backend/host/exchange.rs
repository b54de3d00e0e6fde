//! all_to_all_v: made of messages, since only the two ends of a block know how long it is.
//!
//! Apart, all blocks are sent at once. In place, what is received takes the place of what is sent, so blocks are sent from copies, of
//! which there is room for one block at least. Each rank goes through its peers in the order of [`partner`] and waits for those whose
//! copies fill the room before it goes on: a block of an earlier round is never behind one of a later round, on any rank, so
//! none waits for ever.

use super::HostComm;
use super::collective::{CollectiveState, partner};
use super::message::Plane;
use super::tunables::{EXCHANGE_COPIES, EXCHANGE_KEPT};
use crate::contract::{Call, Direction, OperationId, Transfer};
use crate::reduce;
use crate::types::error::{Error, Result};

/// Memory for the blocks that are sent from copies.
#[derive(Default)]
pub(crate) struct BlockCopies(Vec<u8>);

impl BlockCopies {
    /// Memory of so many bytes, of any content. What was there before is no longer used.
    fn reserve(&mut self, bytes: usize) -> Result<*mut u8> {
        self.0.try_reserve_exact(bytes).map_err(|_| {
            let why = format!(
                "an all_to_all_v in place needs {bytes} bytes for copies of what it sends: free memory, or use all_to_all_v with \
                 two buffers"
            );
            Error::system("memory for an all_to_all_v", std::io::ErrorKind::OutOfMemory.into(), why)
        })?;
        Ok(self.0.as_mut_ptr())
    }

    fn shrink(&mut self) {
        if self.0.capacity() > EXCHANGE_KEPT {
            self.0 = Vec::new();
        }
    }
}

impl HostComm {
    /// The blocks of an all_to_all_v, on which the ranks have agreed.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective), inside of it.
    pub(crate) unsafe fn all_to_all_v(&self, call: &Call<'_>) -> Result<()> {
        // SAFETY: inside `collective`, where one thread at a time is.
        let state = unsafe { &mut *self.state.get() };
        let outcome = if call.send == call.recv.cast_const() {
            // SAFETY: the caller's contract.
            unsafe { self.exchange_in_place(call, state) }
        } else {
            // SAFETY: the caller's contract.
            unsafe { self.exchange_apart(call, state) }
        };
        // Whatever went wrong, nothing is under way when this returns. What only this rank knows of is told first: its peers wait for it,
        // and it would for them.
        outcome.map_err(|error| self.closing(error)).and(self.settle(state))
    }

    /// # Safety
    /// As for [`all_to_all_v`](HostComm::all_to_all_v); until the messages are complete.
    unsafe fn exchange_apart(&self, call: &Call<'_>, state: &mut CollectiveState) -> Result<()> {
        let size = call.dtype.size();
        // SAFETY: the blocks lie in `send`.
        let block = |to: usize| unsafe { call.send.add(call.blocks.offset(to) * size) };
        for peer in self.endpoint.peers() {
            // SAFETY: the caller's contract.
            unsafe { self.exchange(call, state, peer, block(peer)) }?;
        }
        let rank = self.endpoint.rank;
        // SAFETY: own blocks have the same length (checked) and are apart.
        unsafe {
            let target = call.recv.add(call.recv_blocks.offset(rank) * size);
            reduce::copy(target, block(rank), call.blocks.len(rank) * size, false);
        }
        Ok(())
    }

    /// # Safety
    /// As for [`all_to_all_v`](HostComm::all_to_all_v), for one buffer; until the messages are complete.
    unsafe fn exchange_in_place(&self, call: &Call<'_>, state: &mut CollectiveState) -> Result<()> {
        let (rank, ranks, size) = (self.endpoint.rank, self.endpoint.ranks, call.dtype.size());
        let all = call.blocks.offset(ranks) * size;
        let room = all.min(EXCHANGE_COPIES.max(call.blocks.longest() * size));
        let copies = state.copies.reserve(room)?;
        let mut used = 0;
        for peer in
            (1..ranks).chain([0]).map(|round| partner(rank, round, ranks)).filter(|peer| *peer != rank)
        {
            let (offset, bytes) = (call.blocks.offset(peer) * size, call.blocks.len(peer) * size);
            if used + bytes > room {
                self.settle(state)?;
                used = 0;
            }
            // SAFETY: the block lies in the buffer, and has room among the copies behind those that are under way. It is copied before
            // anything can take its place.
            unsafe {
                let copy = copies.add(used);
                reduce::copy(copy, call.send.add(offset), bytes, false);
                self.exchange(call, state, peer, copy)?;
            }
            used += bytes;
        }
        self.settle(state)?;
        // Not after an error: a peer may look at them until the communicator is closed.
        state.copies.shrink();
        Ok(())
    }

    /// Posts what goes to a peer, from `block`, and what comes from it.
    ///
    /// # Safety
    /// The block can be read and its place in `recv` written until the messages are complete.
    unsafe fn exchange(
        &self,
        call: &Call<'_>,
        state: &mut CollectiveState,
        peer: usize,
        block: *const u8,
    ) -> Result<()> {
        // A tag of its own for each call, so that a message never meets another call's receive.
        let tag = state.sequence() as u32;
        // SAFETY: the block's place lies in `recv`.
        let place = unsafe { call.recv.add(call.recv_blocks.offset(peer) * call.dtype.size()) };
        for (direction, count) in [
            (Direction::Recv(place), call.recv_blocks.len(peer)),
            (Direction::Send(block), call.blocks.len(peer)),
        ] {
            let transfer = Transfer::host(direction, peer, tag, call.dtype, count);
            // SAFETY: the caller's contract.
            state.message_ids.push(unsafe { self.messages.post(&self.endpoint, transfer, Plane::Internal) }?);
        }
        Ok(())
    }

    /// Waits for all that were posted, also if some fail; answers the first error.
    fn settle(&self, state: &mut CollectiveState) -> Result<()> {
        let settled = |outcome: Result<()>, id: OperationId| {
            outcome.and(self.messages.wait(&self.endpoint, id, &|| ()))
        };
        state.message_ids.drain(..).fold(Ok(()), settled)
    }
}
