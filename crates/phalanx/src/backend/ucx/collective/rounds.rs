//! In rounds: each rank tells one other all that it has heard, ever further away, until all have heard from all. Then a rank has every
//! contribution, in rank order from its own on, around; it puts them in their places, or combines them.

use super::{CollectiveState, Group};
use crate::contract::{Call, Flow};
use crate::reduce::{self, Reducer, Targets};
use crate::types::error::Result;

impl Group<'_> {
    /// A barrier, or a collective of short blocks that every rank gets from every other. Round i doubles the blocks: each rank hears those
    /// of the rank 2^i behind it.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective).
    pub(super) unsafe fn disseminate(
        &self,
        state: &mut CollectiveState,
        call: &Call<'_>,
        flow: &Flow<'_>,
    ) -> Result<()> {
        let (rank, ranks) = (self.rank, self.ranks());
        let heard = state.scratch(self.bytes_around(flow, rank, ranks));
        // SAFETY: there is room for the blocks of all; a round reads what earlier ones have written, and writes behind it.
        unsafe {
            if self.bytes_around(flow, rank, 1) > 0 {
                reduce::copy(heard, call.send, self.bytes_around(flow, rank, 1), false);
            }
            let mut blocks = 1;
            for round in 0.. {
                let more = blocks.min(ranks - blocks);
                if more == 0 {
                    break;
                }
                let (behind, before) = ((rank + blocks) % ranks, (rank + ranks - blocks) % ranks);
                let new = heard.wrapping_add(self.bytes_around(flow, rank, blocks));
                state.begin_step(round);
                self.receive_part(state, round, behind, (new, self.bytes_around(flow, behind, more)));
                self.send_part(state, round, before, (heard, self.bytes_around(flow, rank, more)));
                self.finish_step(state, round)?;
                blocks += more;
            }
            self.put_in_place(state, call, flow, heard);
        }
        Ok(())
    }

    /// The bytes of the blocks of `count` ranks, from `first` on, around.
    pub(super) fn bytes_around(&self, flow: &Flow<'_>, first: usize, count: usize) -> usize {
        let at = |rank: usize| flow.blocks.offset(rank) * flow.size;
        match (first + count).checked_sub(self.ranks()) {
            None => at(first + count) - at(first),
            Some(around) => at(self.ranks()) - at(first) + at(around),
        }
    }

    /// Hands out the blocks of all, which lie one behind the other from that of this rank on, around: to their places, or combined.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective); the blocks are there.
    pub(super) unsafe fn put_in_place(
        &self,
        state: &CollectiveState,
        call: &Call<'_>,
        flow: &Flow<'_>,
        blocks: *const u8,
    ) {
        let (rank, ranks) = (self.rank, self.ranks());
        let count = call.blocks.longest();
        if flow.reduced {
            let at = |writer: usize| (writer + ranks - rank) % ranks;
            let block = |writer: usize| blocks.wrapping_add(self.bytes_around(flow, rank, at(writer)));
            let combined = flow.combined(rank, ranks);
            let sources: Vec<*const u8> = combined.clone().map(block).collect();
            if !sources.is_empty() && count > 0 {
                let (target, factors) =
                    (Targets::new(std::slice::from_ref(&call.recv), false), &state.factors[combined]);
                // SAFETY: the caller's contract; the result is apart from the blocks.
                unsafe { Reducer::of(call).run(target, &sources, factors, count) };
            }
        } else if flow.gathered {
            let first = self.bytes_around(flow, rank, ranks - rank);
            let rest = self.bytes_around(flow, 0, rank);
            // SAFETY: the caller's contract; the blocks from this rank's on, and those before it.
            unsafe {
                reduce::copy(call.recv.add(flow.target_offset(rank)), blocks, first, false);
                reduce::copy(call.recv, blocks.add(first), rest, false);
            }
        }
    }
}
