//! Choice of the algorithm that carries out a collective.

use super::tunables::*;
use crate::contract::{Call, Flow, Operation};

/// Algorithm of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Algorithm {
    /// Each writer sends each reader its block.
    Direct,
    /// Each rank combines a part of what all get, and passes it on.
    TwoPhase,
    /// The root sends each rank a part, which it passes on to all others.
    BroadcastInParts,
    /// Along a tree in which each rank passes on what it has got.
    Tree,
    /// In rounds: each rank signals one other, ever further away.
    Dissemination,
}

/// Algorithm of a call: the same on every rank.
#[inline]
pub(super) fn choose(call: &Call<'_>, flow: &Flow<'_>, ranks: usize) -> Algorithm {
    let longest = flow.longest();
    match call.operation {
        Operation::AllReduce | Operation::Reduce
            if ranks > 2 && (ranks - 1) * longest > ONE_PHASE && call.blocks.longest() >= ranks =>
        {
            Algorithm::TwoPhase
        }
        Operation::Broadcast if ranks > 2 && longest > BROADCAST_IN_PARTS => Algorithm::BroadcastInParts,
        Operation::Broadcast if ranks >= ROUNDS => Algorithm::Tree,
        Operation::Barrier | Operation::Finalize if ranks >= ROUNDS => Algorithm::Dissemination,
        _ => Algorithm::Direct,
    }
}

/// Elements of a piece of a reduction of blocks of this many elements of so many bytes.
pub(super) fn piece(size: usize) -> usize {
    (PIECE / size).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::Blocks;

    fn chosen(operation: Operation, ranks: usize, bytes: usize) -> Algorithm {
        let blocks = Blocks::Equal(bytes);
        let call = Call { blocks, recv_blocks: blocks, ..Call::empty(operation) };
        choose(&call, &call.flow(), ranks)
    }

    #[test]
    fn two_ranks_exchange_all_and_more_share_long_reductions() {
        assert_eq!(chosen(Operation::AllReduce, 2, 64 << 20), Algorithm::Direct);
        assert_eq!(chosen(Operation::AllReduce, 3, 8), Algorithm::Direct);
        assert_eq!(chosen(Operation::AllReduce, 3, 64 << 20), Algorithm::TwoPhase);
    }

    #[test]
    fn a_broadcast_goes_along_a_tree_or_in_parts() {
        assert_eq!(chosen(Operation::Broadcast, 3, 8), Algorithm::Direct);
        assert_eq!(chosen(Operation::Broadcast, 6, 8), Algorithm::Tree);
        assert_eq!(chosen(Operation::Broadcast, 6, 1 << 20), Algorithm::BroadcastInParts);
    }
}
