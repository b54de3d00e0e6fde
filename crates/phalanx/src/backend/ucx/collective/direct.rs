//! Direct: each writer sends each reader its block, and the reader combines what it gets.

use super::super::choose::piece;
use super::{CollectiveState, Group};
use crate::contract::{Call, Flow};
use crate::reduce::{self, Reducer, Targets};
use crate::types::error::Result;

/// One piece of all blocks of a reduction: its elements, from the start of each block.
struct Piece {
    start: usize,
    end: usize,
}

impl Piece {
    /// The part of a block of `len` elements.
    fn of(&self, len: usize) -> std::ops::Range<usize> {
        self.start.min(len)..self.end.min(len)
    }
}

impl Group<'_> {
    /// Carries out a collective that moves blocks and combines nothing.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective).
    pub(super) unsafe fn pass_direct(
        &self,
        state: &mut CollectiveState,
        call: &Call<'_>,
        flow: &Flow<'_>,
    ) -> Result<()> {
        // SAFETY: the caller's contract; what is received goes to other places than this rank's own block.
        unsafe {
            let send = self.apart(state, call, flow);
            self.post_blocks(state, call, flow, send, |_| true);
            self.copy_own(call, flow, send);
        }
        self.finish_step(state, 0)
    }

    /// What this rank gives: a copy of it, if what it gets takes its place.
    ///
    /// # Safety
    /// As for `pass_direct`.
    pub(super) unsafe fn apart(
        &self,
        state: &mut CollectiveState,
        call: &Call<'_>,
        flow: &Flow<'_>,
    ) -> *const u8 {
        let is_exchanged = flow.scattered && flow.gathered;
        if !is_exchanged || call.send != call.recv.cast_const() {
            return call.send;
        }
        let len = flow.send_len(self.rank, self.ranks());
        let copy = state.scratch(len);
        // SAFETY: so many bytes are read, and there is room for them.
        unsafe { reduce::copy(copy, call.send, len, false) };
        copy
    }

    /// Posts step 0: the blocks that go to and come from those peers for which `counts` is true.
    ///
    /// # Safety
    /// As for `pass_direct`, until the step is over.
    pub(super) unsafe fn post_blocks(
        &self,
        state: &mut CollectiveState,
        call: &Call<'_>,
        flow: &Flow<'_>,
        send: *const u8,
        counts: impl Fn(usize) -> bool,
    ) {
        let rank = self.rank;
        let peers = || self.peers().filter(|peer| counts(*peer));
        state.begin_step(0);
        if flow.readers.includes(rank) {
            for peer in peers().filter(|peer| flow.writers.includes(*peer)) {
                let target = flow.target(rank, peer);
                // SAFETY: the place lies in `recv`; places of different writers are apart.
                unsafe { self.receive_part(state, 0, peer, (call.recv.add(target.start), target.len())) };
            }
        }
        if flow.writers.includes(rank) {
            for peer in peers().filter(|peer| flow.readers.includes(*peer)) {
                let source = flow.source(rank, peer);
                // SAFETY: the block lies in `send`, or in its copy.
                unsafe { self.send_part(state, 0, peer, (send.add(source.start), source.len())) };
            }
        }
    }

    /// Carries out a reduction: each reader gets the contributions of all, in pieces, and combines them.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective).
    pub(super) unsafe fn reduce_direct(
        &self,
        state: &mut CollectiveState,
        call: &Call<'_>,
        flow: &Flow<'_>,
    ) -> Result<()> {
        let (most, longest) = (piece(flow.size), call.blocks.longest());
        let pieces = longest.div_ceil(most).max(1);
        let room = most.min(longest) * flow.size * self.ranks();
        // Two pieces are under way.
        let scratch = state.scratch(room * pieces.min(2));
        let aside = |number: usize| scratch.wrapping_add(room * (number % 2));
        let piece = |number: usize| Piece { start: number * most, end: (number + 1) * most };
        // SAFETY: the caller's contract; each piece under way has scratch of its own.
        unsafe {
            self.post_piece(state, call, flow, 0, &piece(0), aside(0));
            for number in 0..pieces {
                if number + 1 < pieces {
                    self.post_piece(state, call, flow, number + 1, &piece(number + 1), aside(number + 1));
                }
                self.finish_step(state, number as u64)?;
                self.combine_piece(state, call, flow, &piece(number), aside(number));
            }
        }
        Ok(())
    }

    /// # Safety
    /// As for `reduce_direct`, until the step is over.
    unsafe fn post_piece(
        &self,
        state: &mut CollectiveState,
        call: &Call<'_>,
        flow: &Flow<'_>,
        number: usize,
        piece: &Piece,
        scratch: *mut u8,
    ) {
        let (rank, ranks, size) = (self.rank, self.ranks(), flow.size);
        let step = number as u64;
        state.begin_step(step);
        let len = |reader: usize| flow.block_len(0, reader) / size;
        if flow.readers.includes(rank) {
            let part = piece.of(len(rank));
            for peer in self.peers().filter(|peer| flow.combined(rank, ranks).contains(peer)) {
                let place = scratch.wrapping_add(peer * part.len() * size);
                // SAFETY: each rank has its place in the scratch.
                unsafe { self.receive_part(state, step, peer, (place, part.len() * size)) };
            }
        }
        let readers = self.peers().filter(|peer| flow.readers.includes(*peer));
        for peer in readers.filter(|peer| flow.combined(*peer, ranks).contains(&rank)) {
            let part = piece.of(len(peer));
            let offset = flow.source_offset(peer) + part.start * size;
            // SAFETY: the part lies in `send`.
            unsafe { self.send_part(state, step, peer, (call.send.add(offset), part.len() * size)) };
        }
    }

    /// # Safety
    /// As for `reduce_direct`, after the step.
    unsafe fn combine_piece(
        &self,
        state: &CollectiveState,
        call: &Call<'_>,
        flow: &Flow<'_>,
        piece: &Piece,
        scratch: *const u8,
    ) {
        let (rank, ranks, size) = (self.rank, self.ranks(), flow.size);
        let combined = flow.combined(rank, ranks);
        let part = piece.of(flow.block_len(0, rank) / size);
        if !flow.readers.includes(rank) || part.is_empty() || combined.is_empty() {
            return;
        }
        let own = call.send.wrapping_add(flow.source_offset(rank) + part.start * size);
        let source = |writer: usize| match writer == rank {
            true => own,
            false => scratch.wrapping_add(writer * part.len() * size),
        };
        let sources: Vec<*const u8> = combined.clone().map(source).collect();
        let target = [call.recv.wrapping_add(part.start * size)];
        let factors = &state.factors[combined];
        // SAFETY: each source has a part, which is sent; the result's part is apart from them, or this rank's own.
        unsafe { Reducer::of(call).run(Targets::new(&target, false), &sources, factors, part.len()) };
    }
}
