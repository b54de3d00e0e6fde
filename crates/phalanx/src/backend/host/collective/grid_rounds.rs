//! All_reduces of a few hundred bytes among many ranks.
//!
//! If every rank reads every block, the time grows with the number of ranks, n. Here ranks form a [`Grid`], the block is cut into a slice for
//! each column, and in each of three rounds a rank reads from about √n others: √n, n and √n slices.
//!
//! 1. A rank takes its column's slice of its row's contributions, and shows them one behind the other.
//! 2. It takes what the other ranks of its column show, so that it has the slice of all ranks, reduces it and shows the result.
//! 3. It takes the other slices' results from its row.
//!
//! So every row calculates all of the result, each element from all contributions in rank order, as by every other
//! algorithm: the bits are the same, and for small floats there is one rounding.

use super::{Awaited, Collective, CollectiveState, LINES_BYTES};
use crate::backend::host::grid::Grid;
use crate::contract::Call;
use crate::control::flags::LINE_PAYLOAD;
use crate::reduce::{Reducer, Targets};
use crate::types::error::Result;
use std::ops::Range;

/// How a block is cut, and in which lines of a slot the parts lie; the block itself starts in the first.
struct Slices {
    /// Bytes of the block, and of a slice; the last ones may be shorter, or empty.
    block: usize,
    slice: usize,
    /// The first line of a row's contributions to a slice, and of a slice's result.
    row: usize,
    result: usize,
}

impl Slices {
    fn new(count: usize, size: usize, grid: &Grid) -> Slices {
        let (block, slice) = (count * size, count.div_ceil(grid.columns) * size);
        let row = block.div_ceil(LINE_PAYLOAD);
        Slices { block, slice, row, result: row + ((grid.columns + 1) * slice).div_ceil(LINE_PAYLOAD) }
    }

    /// The bytes of a column's slice; empty for a column that not every row has.
    fn of(&self, column: usize) -> Range<usize> {
        (column * self.slice).min(self.block)..((column + 1) * self.slice).min(self.block)
    }
}

impl Collective<'_> {
    /// # Safety
    /// As for `run`, for a call that goes in a grid.
    // Apart, so that the code of the other algorithms stays short.
    #[inline(never)]
    pub(crate) unsafe fn grid(&mut self, call: &Call<'_>) -> Result<()> {
        let grid = self.state.grid.expect("it goes in a grid");
        let slices = Slices::new(call.blocks.len(0), call.dtype.size(), &grid);
        let own = slices.of(grid.column);
        self.wait_slot_free()?;
        // SAFETY: the caller's contract; the slot is free.
        unsafe {
            self.open(0, call.send, 0);
            self.write_lines(0, call.send, slices.block);
        }
        self.endpoint.announce_progress();
        (self.begun)();
        // SAFETY: the caller's contract; the own slice is in bounds of the block.
        unsafe {
            if own.is_empty() {
                for peer in grid.row_peers() {
                    self.hear(peer, Awaited::FirstLine)?;
                }
            } else {
                self.show_row(call, &grid, &slices, own.clone())?;
                self.show_result(call, &grid, &slices, own)?;
            }
            self.take_results(call, &grid, &slices)?;
        }
        // Nobody has heard all, but a result is there only when all have come: whoever showed it has read what the ranks of its column
        // showed, and each of those had heard its whole row. So every peer is in this operation and has completed the one before; and
        // what it read there it read before whatever this rank does now, since each stamp was stored and loaded with that order.
        self.state.heard = self.state.sequence - 1;
        Ok(())
    }

    /// The first round: takes the row's contributions to the own slice, and shows them in rank order without gaps.
    ///
    /// # Safety
    /// `own` is the own slice, not empty, of a readable block.
    unsafe fn show_row(
        &mut self,
        call: &Call<'_>,
        grid: &Grid,
        slices: &Slices,
        own: Range<usize>,
    ) -> Result<()> {
        let (first, inner) = (own.start / LINE_PAYLOAD, own.start % LINE_PAYLOAD);
        let last = (own.end - 1) / LINE_PAYLOAD;
        for peer in grid.row_peers() {
            self.hear(peer, Awaited::LinesBehind { first, last })?;
            let target = self.scratch_of(peer);
            // SAFETY: the scratch has LINES_BYTES for each rank: enough for a slice and what is before it in its line.
            unsafe { self.read_lines(peer, first, target, inner + own.len()) }?;
        }
        let row = grid.ranks_of(grid.row);
        let start = self.scratch_of(row.start);
        for (column, rank) in row.clone().enumerate() {
            // SAFETY: the slices move to where they or earlier ones lie: the places are LINES_BYTES apart, which is more than a slice.
            unsafe {
                let source = if rank == self.endpoint.rank {
                    call.send.add(own.start)
                } else {
                    self.scratch_of(rank).add(inner).cast_const()
                };
                std::ptr::copy(source, start.add(column * own.len()), own.len());
            }
        }
        // SAFETY: just written; the lines are this rank's and free.
        unsafe { self.write_lines(slices.row, start, row.len() * own.len()) };
        self.endpoint.announce_progress();
        Ok(())
    }

    /// The second round: takes the other rows' contributions to the own slice, reduces all, and shows the result.
    ///
    /// # Safety
    /// As for `show_row`, which was called; `recv` has room for a block.
    unsafe fn show_result(
        &mut self,
        call: &Call<'_>,
        grid: &Grid,
        slices: &Slices,
        own: Range<usize>,
    ) -> Result<()> {
        for row in grid.other_rows() {
            let members = grid.ranks_of(row);
            let writer = members.start + grid.column;
            let len = members.len() * own.len();
            let (first, last) = (slices.row, slices.row + (len - 1) / LINE_PAYLOAD);
            self.hear(writer, Awaited::LinesBehind { first, last })?;
            let target = self.scratch_of(members.start);
            // SAFETY: the scratch has LINES_BYTES for each member of the row.
            unsafe { self.read_lines(writer, slices.row, target, len) }?;
        }
        self.state.sources.clear();
        for row in 0..grid.rows {
            let members = grid.ranks_of(row);
            let start = self.scratch_of(members.start).cast_const();
            let sources = (0..members.len()).map(|column| start.wrapping_add(column * own.len()));
            self.state.sources.extend(sources);
        }
        let CollectiveState { sources, .. } = &*self.state;
        let reducer = Reducer::of(call);
        // SAFETY: every source has a slice and `recv` a block; the sources lie in the scratch.
        unsafe {
            let target = call.recv.add(own.start);
            reducer.run(Targets::new(&[target], false), sources, &[], own.len() / call.dtype.size());
            self.write_lines(slices.result, target, own.len());
        }
        self.endpoint.announce_progress();
        Ok(())
    }

    /// The third round: takes the results of the other slices from the row.
    ///
    /// # Safety
    /// The row was heard; `recv` has room for a block.
    unsafe fn take_results(&self, call: &Call<'_>, grid: &Grid, slices: &Slices) -> Result<()> {
        let start = grid.ranks_of(grid.row).start;
        for peer in grid.row_peers() {
            let slice = slices.of(peer - start);
            // SAFETY: in bounds of the block.
            unsafe { self.read_lines(peer, slices.result, call.recv.add(slice.start), slice.len()) }?;
        }
        Ok(())
    }

    /// Memory for LINES_BYTES of a rank, and of the ranks behind it.
    #[inline(always)]
    fn scratch_of(&mut self, rank: usize) -> *mut u8 {
        self.state.scratch.as_mut_ptr().wrapping_add(rank * LINES_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::super::IN_ONE_LINE;
    use super::*;
    use crate::backend::host::tunables::{GRID_BYTES, GRID_BYTES_PER_RANK, GRID_RANKS};
    use crate::control::tunables::SLOT_LINES;
    use crate::types::MAX_HOST_RANKS;

    #[test]
    fn all_rounds_fit_in_a_slot_and_in_the_scratch() {
        for ranks in GRID_RANKS..=MAX_HOST_RANKS {
            let grid = Grid::new(0, ranks);
            for size in [1, 2, 4, 8] {
                for count in IN_ONE_LINE / size..=GRID_BYTES.min(ranks * GRID_BYTES_PER_RANK) / size {
                    let slices = Slices::new(count, size, &grid);
                    let lines = slices.result + slices.slice.div_ceil(LINE_PAYLOAD);
                    assert!(lines <= SLOT_LINES, "{lines} lines for {count} × {size} bytes of {ranks} ranks");
                    assert!(
                        LINE_PAYLOAD + slices.slice <= LINES_BYTES,
                        "{} bytes of {ranks} ranks",
                        slices.slice
                    );
                    let covered: usize = (0..=grid.columns).map(|column| slices.of(column).len()).sum();
                    assert_eq!((covered, slices.of(grid.columns).len()), (count * size, 0));
                }
            }
        }
    }
}
