//! Pattern of a collective: the ranks that give, the ranks that get, and the blocks between them.

use super::{Blocks, Call, Operation};
use std::ops::Range;

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

    /// The ranks in this role, of `ranks` in all.
    pub fn among(self, ranks: usize) -> Range<usize> {
        match self {
            Who::All => 0..ranks,
            Who::Only(rank) => rank..rank + 1,
        }
    }
}

/// Pattern of a collective, by its operation and root. For example, in a gather every rank writes one block, and the root reads each into a
/// place of its own (`gathered`).
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
    /// Each reader gets the combination of those before it only, with its own or without.
    scan: Option<Operation>,
    pub blocks: Blocks<'a>,
    /// The blocks of `recv`: the same, except in all_to_all_v.
    recv_blocks: Blocks<'a>,
    /// Bytes of an element.
    pub size: usize,
}

impl<'a> Call<'a> {
    /// Pattern of the collective. Its blocks are empty if the operation moves no data.
    pub fn flow(&self) -> Flow<'a> {
        use Operation::*;
        let root = Who::Only(self.root);
        let (writers, readers, scattered, gathered, reduced) = match self.operation {
            AllReduce | AllReduceRmsNorm | Scan | ExclusiveScan => (Who::All, Who::All, false, false, true),
            Reduce => (Who::All, root, false, false, true),
            Broadcast => (root, Who::All, false, false, false),
            AllGather | AllGatherV | Split | SplitGrid | Grow => (Who::All, Who::All, false, true, false),
            Gather | GatherV => (Who::All, root, false, true, false),
            ReduceScatter | ReduceScatterV => (Who::All, Who::All, true, false, true),
            AllToAll | AllToAllV => (Who::All, Who::All, true, true, false),
            Scatter | ScatterV => (root, Who::All, true, false, false),
            // There is nothing to give, but every rank waits for every other.
            Barrier | Finalize | Alloc | Suspend | Resume | DeviceComm | Init | Shrink | WaitSignals
            | Symmetric | SharedByHost | Epoch | EndEpoch | Free | Experts | Peers | File => {
                (Who::All, Who::All, false, false, false)
            }
            // How many go where, only the routing on the GPUs says: a block is one token.
            ExpertDispatch | ExpertCombine => (Who::All, Who::All, false, false, false),
            Send | Recv | OneSided => unreachable!("not collectives"),
        };
        let size = self.dtype.size();
        let recv_blocks = if self.operation == AllToAllV { self.recv_blocks } else { self.blocks };
        let scan = self.operation.scans().then_some(self.operation);
        let blocks = self.blocks;
        let flow = Flow { writers, readers, scattered, gathered, reduced, scan, blocks, recv_blocks, size };
        // The blocks of an alloc are what the ranks ask for.
        if self.operation.allocates() { flow.without_data() } else { flow }
    }
}

impl Flow<'_> {
    /// The same pattern with empty blocks: the ranks only agree on the call.
    pub fn without_data(self) -> Self {
        Flow { blocks: Blocks::Equal(0), recv_blocks: Blocks::Equal(0), ..self }
    }

    /// The ranks whose blocks a reduction combines for `reader`; none, for the first of an exclusive scan.
    #[inline(always)]
    pub fn combined(&self, reader: usize, ranks: usize) -> Range<usize> {
        match self.scan {
            None => 0..ranks,
            Some(Operation::Scan) => 0..reader + 1,
            Some(_) => 0..reader,
        }
    }

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
        if self.gathered { self.recv_blocks.offset(writer) * self.size } else { 0 }
    }

    /// Bytes of `send` that rank `own`, a writer, gives to `reader`.
    pub fn source(&self, own: usize, reader: usize) -> Range<usize> {
        let start = self.source_offset(reader);
        start..start + self.block_len(own, reader)
    }

    /// Bytes of `recv` in which rank `own`, a reader, gets the block of `writer`. In reductions they are the same for all writers.
    pub fn target(&self, own: usize, writer: usize) -> Range<usize> {
        let start = self.target_offset(writer);
        let len = if self.gathered {
            self.recv_blocks.len(writer) * self.size
        } else {
            self.block_len(writer, own)
        };
        start..start + len
    }

    /// Whether a rank's own block is at its place in both buffers, so that it need not be copied. That is what "in place" means: for an
    /// all_gather `send` is a block of `recv`, for an all_reduce and an all_to_all both are the same.
    pub fn is_in_place(&self, send: *const u8, recv: *mut u8, rank: usize) -> bool {
        send.wrapping_add(self.source_offset(rank))
            == recv.wrapping_add(self.target_offset(rank)).cast_const()
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
        if self.scattered { self.blocks.offset(ranks) * self.size } else { self.block_len(rank, rank) }
    }

    /// Bytes of `recv` on a reader.
    pub fn recv_len(&self, rank: usize, ranks: usize) -> usize {
        if self.gathered { self.recv_blocks.offset(ranks) * self.size } else { self.block_len(rank, rank) }
    }

    /// Bytes that a rank reads from `send` and writes to `recv`: 0 where it is no writer, or no reader.
    #[inline]
    pub fn used(&self, rank: usize, ranks: usize) -> [usize; 2] {
        let sent = if self.writers.includes(rank) { self.send_len(rank, ranks) } else { 0 };
        let received = if self.readers.includes(rank) { self.recv_len(rank, ranks) } else { 0 };
        [sent, received]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::dtype::DType;

    const RANKS: usize = 4;

    fn call(operation: Operation, blocks: Blocks<'_>) -> Call<'_> {
        Call { dtype: DType::F32, root: 2, blocks, recv_blocks: blocks, ..Call::empty(operation) }
    }

    #[test]
    fn a_buffer_is_as_long_as_the_blocks_in_it() {
        use Operation::*;
        let counts = [3, 0, 1, 5];
        for (operation, root, others) in [
            (AllReduce, [4, 4], [4, 4]),
            (Scan, [4, 4], [4, 4]),
            (ExclusiveScan, [4, 4], [4, 4]),
            (Broadcast, [4, 4], [0, 4]),
            (Reduce, [4, 4], [4, 0]),
            (AllGather, [4, 16], [4, 16]),
            (Gather, [4, 16], [4, 0]),
            (ReduceScatter, [16, 4], [16, 4]),
            (Scatter, [16, 4], [0, 4]),
            (AllToAll, [16, 16], [16, 16]),
            (Barrier, [4, 4], [4, 4]),
            (Alloc, [0, 0], [0, 0]),
        ] {
            let call = call(operation, Blocks::Equal(1));
            let used = |rank| call.flow().used(rank, RANKS);
            assert_eq!((used(2), used(0)), (root, others), "{}", operation.name());
        }
        for (operation, root, others) in [
            (AllGatherV, [4, 36], [12, 36]),
            (GatherV, [4, 36], [12, 0]),
            (ReduceScatterV, [36, 4], [36, 12]),
            (ScatterV, [36, 4], [0, 12]),
        ] {
            let call = call(operation, Blocks::Each(&counts));
            let used = |rank| call.flow().used(rank, RANKS);
            assert_eq!((used(2), used(0)), (root, others), "{}", operation.name());
        }
    }

    #[test]
    fn a_scan_combines_the_ranks_before() {
        let combined = |operation, reader| call(operation, Blocks::Equal(1)).flow().combined(reader, RANKS);
        assert_eq!([0, 3].map(|reader| combined(Operation::Scan, reader)), [0..1, 0..4]);
        assert_eq!([0, 3].map(|reader| combined(Operation::ExclusiveScan, reader)), [0..0, 0..3]);
        assert_eq!([0, 3].map(|reader| combined(Operation::AllReduce, reader)), [0..4, 0..4]);
    }

    #[test]
    fn in_place_the_own_block_is_at_its_place_in_the_larger_buffer() {
        use Operation::*;
        let (start, rank) = (64 as *const u8, 3);
        for (operation, offset_of_send, offset_of_recv) in [
            (AllReduce, 0, 0),
            (Broadcast, 0, 0),
            (AllGather, 12, 0),
            (Gather, 12, 0),
            (ReduceScatter, 0, 12),
            (Scatter, 0, 12),
            (AllToAll, 0, 0),
        ] {
            let call = call(operation, Blocks::Equal(1));
            let (send, recv) = (start.wrapping_add(offset_of_send), start.wrapping_add(offset_of_recv));
            assert!(call.flow().is_in_place(send, recv.cast_mut(), rank), "{}", operation.name());
            assert!(!call.flow().is_in_place(send, recv.wrapping_add(4).cast_mut(), rank));
        }
    }

    #[test]
    fn a_block_is_as_long_where_it_is_sent_as_where_it_is_received() {
        // Elements that each rank sends to each rank.
        let sent: Vec<Vec<usize>> =
            (0..RANKS).map(|from| (0..RANKS).map(|to| 5 * from + to).collect()).collect();
        let received: Vec<Vec<usize>> =
            (0..RANKS).map(|to| sent.iter().map(|row| row[to]).collect()).collect();
        let exchange = |rank: usize| Call {
            recv_blocks: Blocks::Each(&received[rank]),
            ..call(Operation::AllToAllV, Blocks::Each(&sent[rank]))
        };
        for (from, to) in (0..RANKS).flat_map(|from| (0..RANKS).map(move |to| (from, to))) {
            let (sender, receiver) = (exchange(from), exchange(to));
            let (source, target) = (sender.flow().source(from, to), receiver.flow().target(to, from));
            assert_eq!((source.len(), target.len()), (4 * sent[from][to], 4 * sent[from][to]));
            assert_eq!(source.start, 4 * sent[from][..to].iter().sum::<usize>());
            assert_eq!(target.start, 4 * received[to][..from].iter().sum::<usize>());
        }
        let counts = [3, 0, 1, 5];
        let gather = call(Operation::GatherV, Blocks::Each(&counts));
        assert_eq!((gather.flow().source(3, 2), gather.flow().target(2, 3)), (0..20, 16..36));
        let scatter = call(Operation::ScatterV, Blocks::Each(&counts));
        assert_eq!((scatter.flow().source(2, 3), scatter.flow().target(3, 2)), (16..36, 0..20));
    }
}
