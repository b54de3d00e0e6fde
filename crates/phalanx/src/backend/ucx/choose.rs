//! Choice of the algorithm that carries out a collective.

use super::tunables::*;
use crate::contract::{Call, Flow, Operation};
use crate::types::dtype::DType;
use crate::types::op::ReductionCode;

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
    /// In rounds: each rank tells one other all it has heard, ever further away.
    Dissemination,
    /// All ranks share this host, and the host backend does it.
    OnHost,
    /// The host backend inside each host, and one rank of each over UCX.
    ByHost,
    /// The same; each rank of a host brings a part over UCX.
    ByPlace,
    /// Each writer sends each reader its block: through the host backend inside a host, else over UCX.
    NearAndFar,
}

/// The ranks, as far as the choice depends on them. The same on all.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub ranks: usize,
    pub hosts: usize,
    /// Ranks of the host that has most.
    pub most: usize,
    /// All hosts have as many ranks.
    pub are_equal: bool,
    /// The ranks of each host follow each other.
    pub in_order: bool,
    /// Contributions are to be combined in rank order.
    pub reproducible: bool,
}

impl Shape {
    /// Ranks that all are on hosts of their own.
    pub fn flat(ranks: usize) -> Shape {
        Shape { ranks, hosts: ranks, most: 1, are_equal: true, in_order: true, reproducible: false }
    }

    /// The way through the hosts, if a call has one.
    fn through_hosts(&self, call: &Call<'_>, longest: usize) -> Option<Algorithm> {
        if self.most == 1 {
            return None;
        }
        if self.hosts == 1 {
            return Some(Algorithm::OnHost);
        }
        let combines = || self.combines_by_host(call);
        let is_shared = self.are_equal && longest > BY_PLACE && call.blocks.longest() >= self.most;
        match call.operation {
            Operation::AllReduce if combines() && is_shared => Some(Algorithm::ByPlace),
            Operation::AllReduce | Operation::Reduce if combines() => Some(Algorithm::ByHost),
            Operation::ReduceScatter if self.are_equal && self.in_order && combines() => {
                Some(Algorithm::ByPlace)
            }
            Operation::Broadcast | Operation::Barrier => Some(Algorithm::ByHost),
            Operation::AllGather if self.in_order && self.are_equal && longest > BY_PLACE => {
                Some(Algorithm::ByPlace)
            }
            Operation::AllGather | Operation::AllGatherV if self.in_order => Some(Algorithm::ByHost),
            Operation::AllToAll if self.in_order && longest <= EXCHANGE_BY_HOST => Some(Algorithm::ByHost),
            // The lengths of an all_to_all_v are known to both ends alone.
            Operation::AllToAll | Operation::AllToAllV if self.in_order => Some(Algorithm::NearAndFar),
            Operation::Gather | Operation::GatherV | Operation::Scatter | Operation::ScatterV
                if self.in_order =>
            {
                Some(if longest <= GATHER_BY_HOST { Algorithm::ByHost } else { Algorithm::NearAndFar })
            }
            _ => None,
        }
    }

    /// Whether a reduction may combine the contributions of each host first: its result is as exact, and the same if it has to be.
    fn combines_by_host(&self, call: &Call<'_>) -> bool {
        use ReductionCode::*;
        let is_a_number = !matches!(call.reduction.code, PreMulSum | LocateMin | LocateMax | Custom);
        let is_exact = is_integer(call.dtype) && call.reduction.code != Avg;
        // Shorter floats are rounded once, at the end.
        let is_wide = matches!(call.dtype, DType::F32 | DType::F64) && !self.reproducible;
        call.custom.is_none() && is_a_number && (is_exact || is_wide)
    }
}

fn is_integer(dtype: DType) -> bool {
    use DType::*;
    matches!(dtype, I8 | U8 | I16 | U16 | I32 | U32 | I64 | U64)
}

/// Algorithm of a call: the same on every rank.
#[inline]
pub(super) fn choose(call: &Call<'_>, flow: &Flow<'_>, shape: &Shape) -> Algorithm {
    let (longest, ranks) = (flow.longest(), shape.ranks);
    if let Some(algorithm) = shape.through_hosts(call, longest) {
        return algorithm;
    }
    let is_short = longest <= IN_ROUNDS;
    // Factors come from each rank itself.
    let has_factors = flow.reduced && call.reduction.code == ReductionCode::PreMulSum;
    match call.operation {
        Operation::Barrier | Operation::Finalize if ranks >= ROUNDS => Algorithm::Dissemination,
        Operation::Broadcast if ranks > 2 && longest > BROADCAST_IN_PARTS => Algorithm::BroadcastInParts,
        Operation::Broadcast if ranks >= ROUNDS => Algorithm::Tree,
        Operation::AllReduce | Operation::Scan | Operation::ExclusiveScan
            if ranks >= ROUNDS_OF_BLOCKS && is_short && !has_factors =>
        {
            Algorithm::Dissemination
        }
        Operation::AllGather | Operation::AllGatherV | Operation::Split | Operation::SplitGrid
            if ranks >= ROUNDS_OF_BLOCKS && is_short =>
        {
            Algorithm::Dissemination
        }
        Operation::Reduce if ranks >= TREE && is_short && !has_factors => Algorithm::Tree,
        Operation::Gather | Operation::GatherV | Operation::Scatter | Operation::ScatterV
            if ranks >= TREE && is_short =>
        {
            Algorithm::Tree
        }
        Operation::AllReduce | Operation::Reduce
            if call.blocks.longest() >= ranks && (ranks - 1) * longest > one_phase(ranks) =>
        {
            Algorithm::TwoPhase
        }
        _ => Algorithm::Direct,
    }
}

/// Two ranks exchange as many bytes in two phases as in one, but combine half.
fn one_phase(ranks: usize) -> usize {
    if ranks == 2 { ONE_PHASE_OF_TWO } else { ONE_PHASE }
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
        chosen_for(operation, DType::U8, bytes, &Shape::flat(ranks))
    }

    fn chosen_for(operation: Operation, dtype: DType, elements: usize, shape: &Shape) -> Algorithm {
        let blocks = Blocks::Equal(elements);
        let call = Call { dtype, blocks, recv_blocks: blocks, ..Call::empty(operation) };
        choose(&call, &call.flow(), shape)
    }

    #[test]
    fn floats_are_combined_by_host_unless_they_must_be_combined_in_order() {
        let default = Shape { hosts: 2, most: 2, ..Shape::flat(4) };
        let reproducible = Shape { reproducible: true, ..default };
        for (dtype, shape, expected) in [
            (DType::F32, default, Algorithm::ByHost),
            (DType::F32, reproducible, Algorithm::Direct),
            (DType::I32, reproducible, Algorithm::ByHost),
            (DType::Bf16, default, Algorithm::Direct),
        ] {
            assert_eq!(chosen_for(Operation::AllReduce, dtype, 8, &shape), expected, "{dtype} {shape:?}");
        }
        assert_eq!(chosen_for(Operation::AllReduce, DType::F32, 1 << 20, &default), Algorithm::ByPlace);
        let unequal = Shape { are_equal: false, ranks: 3, ..default };
        assert_eq!(chosen_for(Operation::AllReduce, DType::F32, 1 << 20, &unequal), Algorithm::ByHost);
    }

    #[test]
    fn short_blocks_go_together_and_long_ones_the_direct_way() {
        let shape = Shape { hosts: 2, most: 2, ..Shape::flat(4) };
        for (operation, long) in [
            (Operation::AllToAll, Algorithm::NearAndFar),
            (Operation::Gather, Algorithm::NearAndFar),
            (Operation::ScatterV, Algorithm::NearAndFar),
            (Operation::AllGather, Algorithm::ByPlace),
            (Operation::AllGatherV, Algorithm::ByHost),
        ] {
            assert_eq!(chosen_for(operation, DType::U8, 8, &shape), Algorithm::ByHost, "{operation:?}");
            assert_eq!(chosen_for(operation, DType::U8, 1 << 20, &shape), long, "{operation:?}");
            let apart = Shape { in_order: false, ..shape };
            assert_eq!(chosen_for(operation, DType::U8, 1 << 20, &apart), Algorithm::Direct, "{operation:?}");
        }
        // Each rank knows other lengths.
        for bytes in [8, 1 << 20] {
            let chosen = chosen_for(Operation::AllToAllV, DType::U8, bytes, &shape);
            assert_eq!(chosen, Algorithm::NearAndFar);
        }
    }

    #[test]
    fn what_is_short_among_many_takes_few_messages() {
        for (operation, algorithm) in [
            (Operation::AllReduce, Algorithm::Dissemination),
            (Operation::Scan, Algorithm::Dissemination),
            (Operation::AllGather, Algorithm::Dissemination),
            (Operation::Reduce, Algorithm::Tree),
            (Operation::Gather, Algorithm::Tree),
            (Operation::ScatterV, Algorithm::Tree),
        ] {
            assert_eq!(chosen(operation, 1000, 4), algorithm, "{operation:?}");
            assert_eq!(chosen(operation, 4, 4), Algorithm::Direct, "{operation:?}");
        }
        assert_eq!(chosen(Operation::AllReduce, 1000, 1 << 20), Algorithm::TwoPhase);
        assert_eq!(chosen(Operation::AllGather, 1000, 1 << 20), Algorithm::Direct);
        let blocks = Blocks::Equal(1);
        let mut call =
            Call { dtype: DType::F32, blocks, recv_blocks: blocks, ..Call::empty(Operation::AllReduce) };
        call.reduction.code = ReductionCode::PreMulSum;
        assert_eq!(choose(&call, &call.flow(), &Shape::flat(1000)), Algorithm::Direct);
    }

    #[test]
    fn ranks_of_one_host_need_no_network() {
        let shape = Shape { hosts: 1, most: 3, ..Shape::flat(3) };
        assert_eq!(chosen_for(Operation::AllToAllV, DType::F32, 8, &shape), Algorithm::OnHost);
    }

    #[test]
    fn two_ranks_exchange_all_and_more_share_longer_reductions() {
        assert_eq!(chosen(Operation::AllReduce, 2, 64 << 10), Algorithm::Direct);
        assert_eq!(chosen(Operation::AllReduce, 2, 64 << 20), Algorithm::TwoPhase);
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
