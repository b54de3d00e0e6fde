//! Pairwise exchange: all_to_alls of long blocks.
//!
//! In round `k` of n, ranks whose numbers add up to `k` (modulo n) exchange their blocks; where a number alone does, that rank copies its
//! own. Every rank moves one block at a time, between consecutive addresses, through as few chunks as one pair needs.
//! Moving a piece of every block in each step takes up to twice the time with many ranks.
//!
//! Chunks are swapped: a rank writes the next round's data where it has read the last round's. It waits for a chunk to be free only where
//! another collective wrote before.

use super::Collective;
use super::two_phase::{Steps, copy_own};
use crate::backend::host::choose;
use crate::contract::{Call, Flow, Who};
use crate::control::layout::CONTRIBUTIONS;
use crate::reduce;
use crate::types::error::Result;

/// Owners of the memory that a chunk's writers use: `rank` writes to that of the rank `offset + rank`, or `offset - rank`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ChunkOwners {
    offset: usize,
    mirrored: bool,
}

impl ChunkOwners {
    #[inline(always)]
    fn owner(self, rank: usize, ranks: usize) -> usize {
        let rank = if self.mirrored { ranks - rank } else { rank };
        (self.offset + rank) % ranks
    }

    /// The place after every rank has taken over its partner's memory.
    fn exchanged(self, round: usize, ranks: usize) -> ChunkOwners {
        let moved = if self.mirrored { ranks - round } else { round };
        ChunkOwners { offset: (self.offset + moved) % ranks, mirrored: !self.mirrored }
    }
}

/// Partner of a rank in a round; the rank itself, if it copies its own block.
#[inline(always)]
pub(crate) fn partner(rank: usize, round: usize, ranks: usize) -> usize {
    (round + ranks - rank) % ranks
}

impl Collective<'_> {
    /// # Safety
    /// As for `bulk`, after the openings, for an all_to_all.
    pub(crate) unsafe fn pairs(&mut self, call: &Call<'_>, flow: &Flow<'_>) -> Result<()> {
        let rank = self.endpoint.rank;
        let exchange = PairwiseExchange::new(self, flow.longest());
        let (steps, lead) = (exchange.steps(), self.topology().lead());
        for i in 0..steps + lead {
            if i < steps {
                if i < self.chunks() {
                    self.wait_ring_free(&exchange.step, i, Who::All)?;
                }
                let (partner, offset, len) = exchange.part(rank, i);
                if partner != rank {
                    // SAFETY: the block lies in `send`. What was in the chunk has been read: by this rank, if it was one of these steps.
                    unsafe {
                        let source = call.send.add(flow.source_offset(partner) + offset);
                        reduce::copy(self.exchanged_chunk(rank, &exchange.step, i), source, len, false);
                    }
                    self.publish(&exchange.step, i);
                }
            }
            if i >= lead {
                // SAFETY: the caller's contract; the step before was read.
                unsafe { self.read_part(call, flow, &exchange, i - lead) }?;
            }
        }
        self.finish_steps(&exchange.step, steps);
        Ok(())
    }

    /// Reads what the partner of a step has written.
    ///
    /// # Safety
    /// As for `pairs`; steps are read in their order.
    unsafe fn read_part(
        &mut self,
        call: &Call<'_>,
        flow: &Flow<'_>,
        exchange: &PairwiseExchange,
        i: usize,
    ) -> Result<()> {
        let (rank, step) = (self.endpoint.rank, &exchange.step);
        let streaming = choose::streams(flow);
        let (partner, offset, len) = exchange.part(rank, i);
        if partner == rank {
            // SAFETY: own blocks lie in `send` and `recv`, the same place or apart.
            unsafe { copy_own(call, flow, rank, offset, len, streaming) };
        } else {
            let published = &self.endpoint.channel.state(partner).published[step.ring];
            self.endpoint.wait(partner, || published.get() > step.number(i))?;
            // SAFETY: the partner has written its part, and `recv` has room for it.
            unsafe {
                let target = call.recv.add(flow.target_offset(partner) + offset);
                reduce::copy(target, self.exchanged_chunk(partner, step, i), len, streaming);
            }
        }
        let place = &mut self.state.places[step.number(i) as usize % self.chunks()];
        *place = place.exchanged(exchange.round(i), self.endpoint.ranks);
        self.endpoint.own().done_chunk[step.ring].set(step.number(i) + 1);
        self.endpoint.announce_progress();
        Ok(())
    }

    fn chunks(&self) -> usize {
        self.endpoint.channel.layout.ring_chunks[CONTRIBUTIONS]
    }

    /// Chunk in which a rank writes in a step.
    fn exchanged_chunk(&self, writer: usize, step: &Steps, i: usize) -> *mut u8 {
        let number = step.number(i);
        let owner = self.state.places[number as usize % self.chunks()].owner(writer, self.endpoint.ranks);
        self.endpoint.channel.chunk_of(owner, step.ring, number)
    }
}

/// All steps of an all_to_all: round by round, in each the parts of a block.
struct PairwiseExchange {
    ranks: usize,
    block: usize,
    /// Steps of a round.
    parts: usize,
    step: Steps,
}

impl PairwiseExchange {
    fn new(collective: &Collective<'_>, block: usize) -> PairwiseExchange {
        let chunk = collective.topology().pairwise_step();
        let first = collective.state.next_chunk[CONTRIBUTIONS];
        let step = Steps { ring: CONTRIBUTIONS, first, chunk };
        PairwiseExchange { ranks: collective.endpoint.ranks, block, parts: block.div_ceil(chunk), step }
    }

    fn steps(&self) -> usize {
        self.ranks * self.parts
    }

    /// Round 0, in which rank 0 copies its own block, comes last: two ranks begin with what both wait for.
    fn round(&self, i: usize) -> usize {
        (i / self.parts + 1) % self.ranks
    }

    /// Partner of a rank in step `i`, and the offset and length of the part that both exchange.
    fn part(&self, rank: usize, i: usize) -> (usize, usize, usize) {
        let (offset, len) = self.step.range(i % self.parts, self.block);
        (partner(rank, self.round(i), self.ranks), offset, len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_writes_to_a_chunk_has_read_it() {
        for ranks in 1..9 {
            let mut place = ChunkOwners::default();
            for round in (0..ranks).cycle().take(3 * ranks) {
                let next = place.exchanged(round, ranks);
                for rank in 0..ranks {
                    let partner = partner(rank, round, ranks);
                    assert_eq!(super::partner(partner, round, ranks), rank);
                    assert_eq!(next.owner(rank, ranks), place.owner(partner, ranks));
                }
                place = next;
            }
        }
    }
}
