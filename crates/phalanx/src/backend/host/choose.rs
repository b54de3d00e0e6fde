//! Choice of the algorithm that carries out a collective.
//!
//! [`choose`] alone compares sizes and ranks to pick one. An example: an all_reduce of 40 KiB among 5 processes has each rank read
//! 4 × 40 KiB, more than slots (16 KiB) and one phase (64 KiB) are for, and less than is pushed (1 MiB): it goes in two phases.

use super::collective::{IN_ONE_LINE, INLINE};
use super::tunables::*;
use crate::contract::{Call, Flow, Operation, Who};
use crate::control::endpoint::Endpoint;
use crate::control::flags::LINE_PAYLOAD;
use crate::control::layout::{CONTRIBUTIONS, Layout};
use crate::control::tunables::{SLOT_BYTES, SLOT_LINES};
use crate::os::LINE;
use crate::types::op::ReductionCode;

/// Ranks of a communicator, as far as the choice depends on them: the same on each of them.
#[derive(Clone, Copy)]
pub(crate) struct Topology<'a> {
    pub ranks: usize,
    /// Ranks share cores.
    pub crowded: bool,
    /// Ranks are on one host.
    pub shares_memory: bool,
    pub layout: &'a Layout,
}

/// Algorithm of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Algorithm {
    /// In rows and columns of ranks (`grid_rounds.rs`).
    Grid,
    /// Through the slots of the writers (`slots.rs`).
    Slots(Form),
    /// In steps, of which the buffers decide the rest.
    Bulk(Bulk),
    /// None: more than ranks of several hosts can tell each other.
    Refused,
}

/// How the data of an operation by slots travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// In the opening of the slot: what is for all, or every reader's block.
    Inline,
    /// In stamped lines behind it; so many for each block.
    Lines(usize),
    /// In the plain bytes of the slot; blocks start so many bytes apart.
    Bytes(usize),
}

/// Algorithm of longer blocks. Where there are several, the openings decide, which say what peers can reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bulk {
    /// By push (`push.rs`) if `push` and every buffer is open to pushes; in one phase if `one_phase` and no `send` is readable by peers; else
    /// in two phases (`two_phase.rs`).
    AllReduce { push: bool, one_phase: bool },
    /// By kernel copy (`kernel_copy.rs`) if `kernel_copy` and rank 0 has found that faster; pairwise (`pairwise.rs`) if `pairwise` and no `send`
    /// is readable by peers; else in one phase.
    AllToAll { kernel_copy: bool, pairwise: bool },
    /// In one phase.
    Other,
}

/// Algorithm of a call: the same on every rank.
#[inline(always)]
pub(crate) fn choose(call: &Call<'_>, flow: &Flow<'_>, topology: Topology<'_>) -> Algorithm {
    let Topology { ranks, crowded, shares_memory, .. } = topology;
    let all_reduce = call.operation == Operation::AllReduce;
    let same_for_all = flow.readers == Who::All && !flow.scattered;
    let longest = flow.longest();
    let given = flow.given(ranks);

    // A few hundred bytes among many ranks. Factors of a pre-multiplied sum travel in the openings, which a grid does not pass on.
    if topology.has_grid()
        && all_reduce
        && call.reduction.code != ReductionCode::PreMulSum
        && given > IN_ONE_LINE
        && given <= GRID_BYTES.min(ranks * GRID_BYTES_PER_RANK)
    {
        return Algorithm::Grid;
    }

    // In the opening: one line of it where many ranks poll the openings of all.
    let many_poll_all = flow.writers == Who::All && same_for_all && ranks > BOTH_LINES_RANKS && shares_memory;
    if given <= if many_poll_all { IN_ONE_LINE } else { INLINE } {
        return Algorithm::Slots(Form::Inline);
    }

    // In the slot behind the opening, unless ranks that each reduce a part read much less than ranks that each reduce all.
    let (most_read, most_lines) = match (crowded, shares_memory) {
        (_, false) => (usize::MAX, BLOCK_LINES_BETWEEN_HOSTS),
        (true, true) => (ONE_PHASE_READ, BLOCK_LINES),
        (false, true) => (SLOTS_READ, BLOCK_LINES),
    };
    if !(flow.reduced && same_for_all) || (ranks - 1) * longest <= most_read {
        let blocks = if flow.scattered { ranks } else { 1 };
        let lines = longest.div_ceil(LINE_PAYLOAD);
        if lines <= most_lines && blocks * lines <= SLOT_LINES {
            return Algorithm::Slots(Form::Lines(lines));
        }
        let stride = longest.next_multiple_of(LINE);
        if shares_memory && stride <= SLOT_BYTES / blocks {
            return Algorithm::Slots(Form::Bytes(stride));
        }
    }
    if !shares_memory {
        return Algorithm::Refused;
    }

    // In steps.
    Algorithm::Bulk(match call.operation {
        // Two phases cut at lines.
        Operation::AllReduce if !LINE.is_multiple_of(flow.size) => Bulk::Other,
        Operation::AllReduce => {
            let (one, two) = ((ranks - 1) * longest, 2 * (ranks - 1) * longest / ranks);
            Bulk::AllReduce {
                push: ranks == 2 || longest >= PUSH,
                one_phase: one <= ONE_PHASE_READ && (crowded || one - two <= TWO_PHASE_SAVING),
            }
        }
        Operation::AllToAll => Bulk::AllToAll {
            kernel_copy: longest >= KERNEL_COPY,
            // Blocks of one step are exchanged with all peers at once.
            pairwise: longest > topology.step(CONTRIBUTIONS, true, longest),
        },
        _ => Bulk::Other,
    })
}

impl<'a> Topology<'a> {
    #[inline(always)]
    pub fn of(endpoint: &'a Endpoint) -> Topology<'a> {
        Topology {
            ranks: endpoint.ranks,
            crowded: endpoint.crowded,
            shares_memory: endpoint.shares_memory(),
            layout: &endpoint.channel.layout,
        }
    }

    /// Whether short all_reduces go in a grid: its rounds are as many turns of ranks that share a core.
    #[inline(always)]
    pub fn has_grid(&self) -> bool {
        self.ranks >= GRID_RANKS && !self.crowded
    }

    /// Bytes of a block that one step moves, for blocks of up to `longest` bytes. A scattered chunk holds a piece for each rank.
    pub fn step(&self, ring: usize, scattered: bool, longest: usize) -> usize {
        let chunk = self.layout.chunk[ring];
        match self.ranks {
            ranks if scattered => (chunk / ranks) & !63,
            2 if longest <= 2 * LONG_STEP_OF_TWO => chunk.min(LONG_STEP_OF_TWO),
            2 => chunk.min(STEP_OF_TWO),
            _ => chunk,
        }
    }

    /// Bytes of a step of a pairwise exchange.
    pub fn pairwise_step(&self) -> usize {
        let step = if self.ranks == 2 { LONG_STEP_OF_TWO } else { PAIRWISE_STEP };
        step.min(self.layout.chunk[CONTRIBUTIONS])
    }

    /// Chunks that are written before the first is read.
    pub fn lead(&self) -> usize {
        if self.crowded { LEAD_CROWDED } else { LEAD }
    }
}

/// Whether blocks of up to `longest` bytes are stored past the caches.
pub(crate) fn streams(flow: &Flow<'_>) -> bool {
    let both_ways = flow.writers == Who::All && flow.readers == Who::All;
    flow.longest() >= if both_ways { STREAMING } else { STREAMING_ONE_WAY }
}

/// Whether a rank's own block is stored past the caches while the kernel copies those of its peers.
pub(crate) fn streams_beside_kernel_copy(flow: &Flow<'_>) -> bool {
    flow.longest() >= KERNEL_COPY_STREAMING
}

/// How the results of a push are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PushStores {
    Cached,
    /// Past the caches of peers if a trial finds that faster.
    Tried,
    /// Past all caches.
    Streaming,
}

pub(crate) fn push_stores(bytes: usize) -> PushStores {
    match bytes {
        STREAMING.. => PushStores::Streaming,
        PUSH_STREAMING.. => PushStores::Tried,
        _ => PushStores::Cached,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::Blocks;
    use crate::types::MAX_HOST_RANKS;

    fn chosen(operation: Operation, ranks: usize, crowded: bool, bytes: usize) -> Algorithm {
        let call = Call { blocks: Blocks::Equal(bytes), ..Call::empty(operation) };
        let layout = Layout::new(ranks);
        let topology = Topology { ranks, crowded, shares_memory: true, layout: &layout };
        choose(&call, &call.flow(), topology)
    }

    fn is_grid(ranks: usize, crowded: bool, bytes: usize) -> bool {
        chosen(Operation::AllReduce, ranks, crowded, bytes) == Algorithm::Grid
    }

    #[test]
    fn many_ranks_with_cores_of_their_own_take_the_grid_for_short_blocks() {
        assert!(is_grid(GRID_RANKS, false, 256) && is_grid(MAX_HOST_RANKS, false, 256));
        assert!(!is_grid(GRID_RANKS - 1, false, 256) && !is_grid(GRID_RANKS, true, 256));
        assert_eq!(
            [IN_ONE_LINE, IN_ONE_LINE + 1, 768, 769].map(|bytes| is_grid(24, false, bytes)),
            [false, true, true, false]
        );
        assert_eq!([2048, 2049].map(|bytes| is_grid(64, false, bytes)), [true, false]);
    }

    #[test]
    fn two_ranks_push_all_that_is_too_long_for_slots() {
        let may_push = |bytes| {
            matches!(
                chosen(Operation::AllReduce, 2, false, bytes),
                Algorithm::Bulk(Bulk::AllReduce { push: true, .. })
            )
        };
        assert_eq!(
            [SLOT_BYTES, SLOT_BYTES + 64, 32 << 10, 64 << 10].map(may_push),
            [false, true, true, true]
        );
    }

    #[test]
    fn an_all_reduce_of_40_kib_among_5_goes_in_two_phases() {
        let two_phase = Algorithm::Bulk(Bulk::AllReduce { push: false, one_phase: false });
        assert_eq!(chosen(Operation::AllReduce, 5, false, 40 << 10), two_phase);
        assert_eq!(chosen(Operation::AllReduce, 5, true, 40 << 10), two_phase);
    }
}
