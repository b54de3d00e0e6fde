//! All_to_alls of long blocks, pair by pair.
//!
//! In round `k` of n, ranks whose numbers add up to `k` (modulo n) exchange their blocks; where a number alone does, that rank copies its
//! own. So every rank moves one block at a time, in pieces of a chunk each, from and to addresses that follow each other, through as few
//! chunks as one pair needs; moving a piece of every block in each step takes up to twice the time with many ranks.
//!
//! The chunks change hands here too: a rank writes the next round's where it has read the last one's, whoever wrote it. So it needs
//! nobody's leave, but where another collective wrote before.

use super::{Collective, Flow, STREAMING, Steps, Who, copy_own};
use crate::backend::Call;
use crate::backend::host::layout::{CHUNKS, CONTRIBUTIONS};
use crate::backend::host::reduce;
use crate::error::Result;

/// Bytes that a step moves, at most.
const PIECE: usize = 32 << 10;

/// Whose memory a chunk's writers use, as of late: `rank`'s is that of the rank `offset + rank`, or `offset - rank`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Place {
    offset: usize,
    mirrored: bool,
}

impl Place {
    #[inline(always)]
    fn owner(self, rank: usize, ranks: usize) -> usize {
        let rank = if self.mirrored { ranks - rank } else { rank };
        (self.offset + rank) % ranks
    }

    /// When every rank has what was its partner's.
    fn exchanged(self, round: usize, ranks: usize) -> Place {
        let moved = if self.mirrored { ranks - round } else { round };
        Place { offset: (self.offset + moved) % ranks, mirrored: !self.mirrored }
    }
}

/// With whom a rank exchanges in a round; itself, if it is to copy its own block.
#[inline(always)]
fn partner(rank: usize, round: usize, ranks: usize) -> usize {
    (round + ranks - rank) % ranks
}

impl Collective<'_> {
    /// Whether a block takes several steps if each step moves a piece of every block.
    pub(super) fn goes_in_pairs(&self, flow: &Flow<'_>) -> bool {
        flow.scattered
            && flow.gathered
            && flow.longest() > self.step_len(CONTRIBUTIONS, true)
            && !self.any_readable(0)
    }

    /// # Safety
    /// As for `bulk`, after the openings, for an all_to_all.
    pub(super) unsafe fn pairs(&mut self, call: &Call<'_>, flow: &Flow<'_>) -> Result<()> {
        let (rank, ranks) = (self.endpoint.rank, self.endpoint.ranks);
        let channel = &self.endpoint.channel;
        let block = flow.longest();
        let chunk = PIECE.min(channel.layout.chunk[CONTRIBUTIONS]);
        let step = Steps { ring: CONTRIBUTIONS, first: self.state.next_chunk[CONTRIBUTIONS], chunk };
        let pieces = block.div_ceil(chunk);
        let (steps, lead) = (ranks * pieces, self.lead());
        let streaming = block >= STREAMING;
        // Everybody's own block comes last or in between.
        let round = |i: usize| (i / pieces + 1) % ranks;
        let range = |i: usize| step.range(i % pieces, block);
        for i in 0..steps + lead {
            if i < steps {
                let partner = partner(rank, round(i), ranks);
                if i < CHUNKS {
                    self.wait_ring_free(&step, i, Who::All)?;
                }
                if partner != rank {
                    let (offset, len) = range(i);
                    let owner = self.place(&step, i).owner(rank, ranks);
                    let target = channel.chunk_of(owner, CONTRIBUTIONS, step.number(i));
                    // SAFETY: the block lies in `send`. What was in the chunk has been read: by this rank if it was one of these steps.
                    unsafe {
                        reduce::copy(target, call.send.add(partner * block + offset), len, false);
                    }
                    self.publish(&step, i);
                }
            }
            if i >= lead {
                let i = i - lead;
                let partner = partner(rank, round(i), ranks);
                let (offset, len) = range(i);
                if partner == rank {
                    // SAFETY: own blocks lie in `send` and `recv`, the same place or apart.
                    unsafe { copy_own(call, flow, rank, offset, len, streaming) };
                } else {
                    let number = step.number(i);
                    let published = &channel.state(partner).published[CONTRIBUTIONS];
                    self.endpoint.wait(partner, || published.get() > number)?;
                    let owner = self.place(&step, i).owner(partner, ranks);
                    let source = channel.chunk_of(owner, CONTRIBUTIONS, number);
                    // SAFETY: the partner has written its piece, and `recv` has room for it.
                    unsafe {
                        reduce::copy(call.recv.add(partner * block + offset), source, len, streaming);
                    }
                }
                *self.place(&step, i) = self.place(&step, i).exchanged(round(i), ranks);
                self.endpoint.own().done_chunk[CONTRIBUTIONS].set(step.number(i) + 1);
                self.endpoint.announce_progress();
            }
        }
        self.finish_steps(&step, steps);
        Ok(())
    }

    fn place(&mut self, step: &Steps, i: usize) -> &mut Place {
        &mut self.state.places[step.number(i) as usize % CHUNKS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_writes_to_a_chunk_has_read_it() {
        for ranks in 1..9 {
            let mut place = Place::default();
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
