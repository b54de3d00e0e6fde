//! Scans, and reductions of elements that are no numbers: MPI would not combine them in rank order, or not at all. The contributions are
//! gathered in pieces, and each rank that gets a result combines them.

use crate::contract::{Blocks, Call, Operation, Who};
use crate::reduce::{Reducer, Targets};
use crate::types::op::ReductionCode;

/// Bytes of a piece, of each rank. A piece is at least an element.
const PIECE: usize = 256 << 10;

/// A reduction by gathering: its next gather, and then the combination of what was gathered.
pub(crate) struct Gathering<'a> {
    call: Call<'a>,
    rank: usize,
    ranks: usize,
    /// The ranks' pieces.
    gathered: Vec<u128>,
    /// The ranks' factors of a pre-multiplied sum, and this rank's own behind them.
    factors: Vec<u64>,
    has_factors: bool,
    /// The block that is combined (one for each rank, or one for all), its elements that are done, and those of the piece under way.
    block: usize,
    done: usize,
    piece: usize,
}

impl<'a> Gathering<'a> {
    pub fn new(call: &Call<'a>, rank: usize, ranks: usize) -> Gathering<'a> {
        let is_scaled = call.reduction.code == ReductionCode::PreMulSum;
        let mut gathering = Gathering {
            call: *call,
            rank,
            ranks,
            gathered: Vec::new(),
            factors: if is_scaled { vec![call.reduction.factor; ranks + 1] } else { Vec::new() },
            has_factors: !is_scaled,
            block: 0,
            done: 0,
            piece: 0,
        };
        let longest = gathering.longest().min(call.blocks.longest());
        gathering.gathered = vec![0; (longest * call.dtype.size() * ranks).div_ceil(16)];
        gathering
    }

    /// Elements of a piece.
    fn longest(&self) -> usize {
        (PIECE / self.call.dtype.size()).max(1)
    }

    fn num_blocks(&self) -> usize {
        if self.call.flow().scattered { self.ranks } else { 1 }
    }

    /// The ranks that get a block.
    fn readers(&self, block: usize) -> Who {
        let flow = self.call.flow();
        if flow.scattered { Who::Only(block) } else { flow.readers }
    }

    /// Whether a gather follows the one under way.
    pub fn has_more(&self) -> bool {
        let mut later = self.block + 1..self.num_blocks();
        self.done + self.piece < self.call.blocks.len(self.block)
            || later.any(|block| self.call.blocks.len(block) > 0)
    }

    /// The next gather or all_gather, of bytes; [`combine`](Self::combine) follows it. Its memory is valid as long as this and the call's.
    pub fn next(&mut self) -> Option<Call<'static>> {
        if !self.has_factors {
            self.has_factors = true;
            let bytes = Blocks::Equal(8);
            let (all, own) = self.factors.split_at_mut(self.ranks);
            let (send, recv) = (own.as_ptr().cast(), all.as_mut_ptr().cast());
            return Some(Call {
                send,
                recv,
                blocks: bytes,
                recv_blocks: bytes,
                ..Call::empty(Operation::AllGather)
            });
        }
        while self.done >= self.call.blocks.len(self.block) {
            if self.block + 1 == self.num_blocks() {
                return None;
            }
            (self.block, self.done) = (self.block + 1, 0);
        }
        let size = self.call.dtype.size();
        self.piece = (self.call.blocks.len(self.block) - self.done).min(self.longest());
        let (operation, root) = match self.readers(self.block) {
            Who::All => (Operation::AllGather, 0),
            Who::Only(root) => (Operation::Gather, root),
        };
        let offset = self.call.flow().source_offset(self.block) + self.done * size;
        let (send, recv) = (self.call.send.wrapping_add(offset), self.gathered.as_mut_ptr().cast());
        let bytes = Blocks::Equal(self.piece * size);
        Some(Call { root, send, recv, blocks: bytes, recv_blocks: bytes, ..Call::empty(operation) })
    }

    /// Combines what the last gather has brought.
    ///
    /// # Safety
    /// The gather is complete, and the call's memory valid as its table says.
    pub unsafe fn combine(&mut self) {
        let (piece, size) = (std::mem::take(&mut self.piece), self.call.dtype.size());
        let target = self.call.recv.wrapping_add(self.done * size);
        self.done += piece;
        let combined = self.call.flow().combined(self.rank, self.ranks);
        if piece == 0 || combined.is_empty() || !self.readers(self.block).includes(self.rank) {
            return;
        }
        let all = self.gathered.as_ptr().cast::<u8>();
        let sources: Vec<*const u8> =
            combined.map(|writer| all.wrapping_add(writer * piece * size)).collect();
        let factors = self.factors.split_last().map_or(&[][..], |(_, all)| all);
        // SAFETY: each source has a piece, and the piece of the result lies in `recv`, apart from them.
        unsafe { Reducer::of(&self.call).run(Targets::new(&[target], false), &sources, factors, piece) };
    }
}
