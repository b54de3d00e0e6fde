//! Two phases: each rank combines a part of each chunk, and passes the result on to those that get it. The contributions to the next
//! chunk are under way meanwhile.

use super::super::choose::piece;
use super::{CollectiveState, Group};
use crate::contract::{Call, Flow};
use crate::reduce::{Reducer, Targets};
use crate::types::error::Result;
use std::ops::Range;

impl Group<'_> {
    /// Carries out a long all_reduce or reduce.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective).
    pub(super) unsafe fn two_phase(
        &self,
        state: &mut CollectiveState,
        call: &Call<'_>,
        flow: &Flow<'_>,
    ) -> Result<()> {
        let (rank, ranks, size) = (self.rank, self.ranks(), flow.size);
        let (most, count) = (piece(size) * ranks, call.blocks.longest());
        let chunks = count.div_ceil(most);
        let part = |chunk: usize, owner: usize| -> Range<usize> {
            let (start, len) = (chunk * most, most.min(count - chunk * most));
            start + len * owner / ranks..start + len * (owner + 1) / ranks
        };
        let room = part(0, ranks - 1).len() * size;
        // For each of two chunks: the contributions, and behind them this rank's part of the result, if it gets none.
        let scratch = state.scratch(2 * room * (ranks + 1));
        let aside =
            |chunk: usize, place: usize| scratch.wrapping_add(room * ((chunk % 2) * (ranks + 1) + place));
        for chunk in 0..chunks {
            let (contributions, results) = (2 * chunk as u64, 2 * chunk as u64 + 1);
            let own = part(chunk, rank);
            state.begin_step(contributions);
            for peer in self.peers() {
                // SAFETY: each rank has its place in the scratch.
                unsafe {
                    self.receive_part(state, contributions, peer, (aside(chunk, peer), own.len() * size))
                };
            }
            for peer in self.peers() {
                let part = part(chunk, peer);
                let data = call.send.wrapping_add(part.start * size);
                // SAFETY: the part lies in `send`, and is not written before it is sent.
                unsafe { self.send_part(state, contributions, peer, (data, part.len() * size)) };
            }
            self.finish_step(state, contributions)?;
            if chunk > 0 {
                self.finish_step(state, results - 2)?;
            }
            let is_reader = flow.readers.includes(rank);
            let target = match is_reader {
                true => call.recv.wrapping_add(own.start * size),
                false => aside(chunk, ranks),
            };
            let source = |writer: usize| match writer == rank {
                true => call.send.wrapping_add(own.start * size),
                false => aside(chunk, writer).cast_const(),
            };
            let sources: Vec<*const u8> = (0..ranks).map(source).collect();
            // SAFETY: each source has a part, which is sent; the target is apart from them, or this rank's own.
            unsafe {
                Reducer::of(call).run(
                    Targets::new(&[target], false),
                    &sources,
                    &state.factors[..ranks],
                    own.len(),
                );
            }
            state.begin_step(results);
            for peer in self.peers().filter(|_| is_reader) {
                let part = part(chunk, peer);
                let place = call.recv.wrapping_add(part.start * size);
                // SAFETY: the part lies in `recv`; in place, its contribution is sent.
                unsafe { self.receive_part(state, results, peer, (place, part.len() * size)) };
            }
            for peer in self.peers().filter(|peer| flow.readers.includes(*peer)) {
                // SAFETY: the result stays until the step is over.
                unsafe { self.send_part(state, results, peer, (target, own.len() * size)) };
            }
        }
        self.finish_step(state, 2 * chunks as u64 - 1)
    }
}
