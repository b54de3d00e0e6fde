//! Pattern of a collective: the ranks that give, the ranks that get, and the blocks between them.

use super::{Blocks, Call, Operation};

/// Ranks in one role of a collective.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Who {
    All,
    Only(usize),
}

impl Who {
    pub fn includes(self, rank: usize) -> bool {
        self == Who::All || self == Who::Only(rank)
    }
}

/// Pattern of a collective, by its operation and root. An example: in a gather all ranks write a block, and the root reads them to places of
/// their own (`gathered`).
#[derive(Clone, Copy)]
pub(crate) struct Flow<'a> {
    pub writers: Who,
    pub readers: Who,
    /// Each reader gets a block of its own; else all get the same.
    pub scattered: bool,
    /// Each writer's block has a place of its own in `recv`; else there is one place.
    pub gathered: bool,
    /// Blocks are combined; else copied.
    pub reduced: bool,
    pub blocks: Blocks<'a>,
    /// Bytes of an element.
    pub size: usize,
}

impl<'a> Call<'a> {
    /// Pattern of the collective. Its blocks are empty if the data goes as messages (all_to_all_v).
    pub fn flow(&self) -> Flow<'a> {
        use Operation::*;
        let root = Who::Only(self.root);
        let (writers, readers, scattered, gathered, reduced) = match self.operation {
            AllReduce => (Who::All, Who::All, false, false, true),
            Reduce => (Who::All, root, false, false, true),
            Broadcast => (root, Who::All, false, false, false),
            AllGather | AllGatherV | Split | Grow => (Who::All, Who::All, false, true, false),
            Gather | GatherV => (Who::All, root, false, true, false),
            ReduceScatter | ReduceScatterV => (Who::All, Who::All, true, false, true),
            AllToAll => (Who::All, Who::All, true, true, false),
            Scatter | ScatterV => (root, Who::All, true, false, false),
            // There is nothing to give, but every rank waits for every other.
            Barrier | Finalize | Alloc | Suspend | Resume | DeviceComm | AllToAllV => {
                (Who::All, Who::All, false, false, false)
            }
            Send | Recv | Init | Shrink | WaitSignals => unreachable!("not collectives"),
        };
        let size = self.dtype.size();
        // The data of an all_to_all_v goes as messages, and an alloc has none; here the ranks only agree.
        let blocks = if matches!(self.operation, AllToAllV | Alloc) { Blocks::Equal(0) } else { self.blocks };
        Flow { writers, readers, scattered, gathered, reduced, blocks, size }
    }
}

impl Flow<'_> {
    /// Bytes that `writer` gives to `reader`.
    #[inline(always)]
    pub fn block_len(&self, writer: usize, reader: usize) -> usize {
        let block = if self.scattered {
            reader
        } else if self.gathered {
            writer
        } else {
            0
        };
        self.blocks.len(block) * self.size
    }

    /// Where in `send` the block for `reader` starts.
    #[inline(always)]
    pub fn source_offset(&self, reader: usize) -> usize {
        if self.scattered { self.blocks.offset(reader) * self.size } else { 0 }
    }

    /// Where in `recv` the block of `writer` goes.
    #[inline(always)]
    pub fn target_offset(&self, writer: usize) -> usize {
        if self.gathered { self.blocks.offset(writer) * self.size } else { 0 }
    }

    /// Bytes of the longest block.
    #[inline(always)]
    pub fn longest(&self) -> usize {
        self.blocks.longest() * self.size
    }

    /// Bytes that a writer gives in all, at most: the same on every rank.
    #[inline(always)]
    pub fn given(&self, ranks: usize) -> usize {
        if self.scattered { self.send_len(0, ranks) } else { self.longest() }
    }

    /// Bytes of `send` on a writer.
    pub fn send_len(&self, rank: usize, ranks: usize) -> usize {
        if self.scattered {
            (self.blocks.offset(ranks - 1) + self.blocks.len(ranks - 1)) * self.size
        } else {
            self.block_len(rank, rank)
        }
    }
}
