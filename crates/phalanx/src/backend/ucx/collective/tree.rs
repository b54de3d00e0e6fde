//! Along a binomial tree: short broadcasts, gathers, scatters and reductions. A rank passes on what is for or from all ranks below it. Ranks count
//! from the root, so that those below a rank follow it.

use super::{CollectiveState, Group};
use crate::contract::{Call, Flow};
use crate::reduce;
use crate::types::error::Result;

/// A rank in the tree.
struct Node {
    /// Its place, counted from the root.
    place: usize,
    root: usize,
    ranks: usize,
}

impl Node {
    /// Ranks of the part of the tree that begins with a place: itself, and those below it.
    fn part(&self, place: usize) -> usize {
        let most = if place == 0 { self.ranks } else { 1 << place.trailing_zeros() };
        most.min(self.ranks - place)
    }

    /// The rank above this one.
    fn above(&self) -> usize {
        self.rank_at(self.place & (self.place - 1))
    }

    /// The places right below this one, the largest part first.
    fn below(&self) -> impl Iterator<Item = usize> + use<> {
        let (place, part) = (self.place, self.part(self.place));
        let bits = (0..part.next_power_of_two().ilog2()).rev();
        bits.map(move |bit| place + (1 << bit)).filter(move |below| *below < place + part)
    }

    fn rank_at(&self, place: usize) -> usize {
        (place + self.root) % self.ranks
    }
}

impl Group<'_> {
    fn node(&self, root: usize) -> Node {
        let ranks = self.ranks();
        Node { place: (self.rank + ranks - root) % ranks, root, ranks }
    }

    /// The ranks right below a node, which is this rank, and where the blocks of their parts of the tree are among those of its own part: the
    /// start and the bytes.
    fn parts_below(
        &self,
        flow: &Flow<'_>,
        node: &Node,
        blocks: *mut u8,
    ) -> impl Iterator<Item = (usize, (*mut u8, usize))> {
        node.below().map(move |below| {
            let (rank, ranks) = (node.rank_at(below), node.part(below));
            let start = blocks.wrapping_add(self.bytes_around(flow, self.rank, below - node.place));
            (rank, (start, self.bytes_around(flow, rank, ranks)))
        })
    }

    /// A short broadcast.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective).
    pub(super) unsafe fn broadcast_along_tree(
        &self,
        state: &mut CollectiveState,
        call: &Call<'_>,
        flow: &Flow<'_>,
    ) -> Result<()> {
        let (node, len) = (self.node(call.root), flow.longest());
        let mut data = call.send;
        state.begin_step(0);
        if node.place > 0 {
            // SAFETY: `recv` has room for the block.
            unsafe { self.receive_part(state, 0, node.above(), (call.recv, len)) };
            self.finish_step(state, 0)?;
            data = call.recv;
        }
        for below in node.below() {
            // SAFETY: the block is there, and stays until the step is over.
            unsafe { self.send_part(state, 0, node.rank_at(below), (data, len)) };
        }
        if node.place == 0 {
            // SAFETY: the caller's contract.
            unsafe { self.copy_own(call, flow, call.send) };
        }
        self.finish_step(state, 0)
    }

    /// Gathers short blocks at the root, or combines them there, in rank order.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective).
    pub(super) unsafe fn gather_along_tree(
        &self,
        state: &mut CollectiveState,
        call: &Call<'_>,
        flow: &Flow<'_>,
    ) -> Result<()> {
        let node = self.node(call.root);
        let part = self.bytes_around(flow, self.rank, node.part(node.place));
        let blocks = state.scratch(part);
        state.begin_step(0);
        for (rank, part) in self.parts_below(flow, &node, blocks) {
            // SAFETY: the parts lie one behind the other, behind this rank's block.
            unsafe { self.receive_part(state, 0, rank, part) };
        }
        // SAFETY: there is room for this rank's block.
        unsafe { reduce::copy(blocks, call.send, self.bytes_around(flow, self.rank, 1), false) };
        self.finish_step(state, 0)?;
        if node.place == 0 {
            // SAFETY: the caller's contract; all blocks have come.
            unsafe { self.put_in_place(state, call, flow, blocks) };
            return Ok(());
        }
        // SAFETY: the blocks stay until the step is over.
        unsafe { self.send_part(state, 0, node.above(), (blocks, part)) };
        self.finish_step(state, 0)
    }

    /// Scatters the root's short blocks.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective).
    pub(super) unsafe fn scatter_along_tree(
        &self,
        state: &mut CollectiveState,
        call: &Call<'_>,
        flow: &Flow<'_>,
    ) -> Result<()> {
        let node = self.node(call.root);
        let part = self.bytes_around(flow, self.rank, node.part(node.place));
        let blocks = state.scratch(part);
        state.begin_step(0);
        if node.place == 0 {
            let first = self.bytes_around(flow, self.rank, node.ranks - self.rank);
            // SAFETY: the root has all blocks; those from its own on come first.
            unsafe {
                reduce::copy(blocks, call.send.add(flow.source_offset(self.rank)), first, false);
                reduce::copy(blocks.add(first), call.send, part - first, false);
            }
        } else {
            // SAFETY: there is room for the part.
            unsafe { self.receive_part(state, 0, node.above(), (blocks, part)) };
            self.finish_step(state, 0)?;
        }
        for (rank, (start, len)) in self.parts_below(flow, &node, blocks) {
            // SAFETY: the blocks stay until the step is over.
            unsafe { self.send_part(state, 0, rank, (start, len)) };
        }
        if node.place > 0 || !flow.is_in_place(call.send, call.recv, self.rank) {
            // SAFETY: the caller's contract; this rank's block comes first.
            unsafe { reduce::copy(call.recv, blocks, self.bytes_around(flow, self.rank, 1), false) };
        }
        self.finish_step(state, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_is_right_below_one_other() {
        for ranks in 1..40 {
            let node = |place| Node { place, root: 3 % ranks, ranks };
            let mut seen = vec![0; ranks];
            for place in 0..ranks {
                let mut sizes = 1;
                for below in node(place).below() {
                    seen[below] += 1;
                    sizes += node(place).part(below);
                    assert_eq!(node(below).above(), node(place).rank_at(place), "{below} of {ranks}");
                }
                assert_eq!(sizes, node(place).part(place), "{place} of {ranks}");
            }
            assert_eq!((seen[0], seen.iter().sum::<i32>()), (0, ranks as i32 - 1), "{ranks}");
        }
    }
}
