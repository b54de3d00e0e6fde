//! The halos of an array that is spread over a grid of ranks.

use super::Grid;
use super::neighbors::Sent;
use crate::api::checks::same_len;
use crate::api::comm::Comm;
use crate::types::dtype::Plain;
use crate::types::error::{Result, UsageError};
use std::ops::Range;

const OPERATION: &str = "exchange_halo";

impl Comm {
    /// Fills the halo of this rank's part of an array: the cells around its own that other ranks of the grid own, with edges and corners.
    ///
    /// `array` is row-major and has `shape`, halo included. In dimension `d` the first and the last `width[d]` places are the halo; a
    /// width of 0 leaves the dimension out. Halo cells beyond the edge of the grid, where it is not periodic, keep what they held.
    ///
    /// Every rank of the grid calls it, in one order. Each rank's own part may have another shape, but neighbors in one dimension have the
    /// same sizes in the others. The parts move dimension by dimension: two messages there and back for each, packed in memory of their
    /// length. [`start_exchange_halo`](Comm::start_exchange_halo) lets the rank compute meanwhile. MPI has no call for it.
    ///
    /// ```
    /// # fn main() -> phalanx::Result<()> {
    /// use phalanx::Grid;
    ///
    /// phalanx::run(3, |comm| -> phalanx::Result<()> {
    ///     let grid = Grid::new(&[3], &[true])?;
    ///     let rank = comm.rank() as u32;
    ///     // Two cells of its own between two of the halo.
    ///     let mut cells = [9, 10 * rank, 10 * rank + 1, 9];
    ///     comm.exchange_halo(&grid, &mut cells, &[4], &[1])?;
    ///     assert_eq!((cells[0], cells[3]), (10 * ((rank + 2) % 3) + 1, 10 * ((rank + 1) % 3)));
    ///     Ok(())
    /// })?
    /// .into_iter()
    /// .collect()
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`UsageError`], before anything is sent: a grid of another number of ranks; lists that do not have an entry for each dimension; an
    /// array that has not the shape; a part narrower than the halo that its neighbor needs. [`MismatchError`](crate::MismatchError) if
    /// neighbors' sizes differ.
    pub fn exchange_halo<T: Plain>(
        &self,
        grid: &Grid,
        array: &mut [T],
        shape: &[usize],
        width: &[usize],
    ) -> Result<()> {
        grid.check_ranks(OPERATION, self)?;
        check(OPERATION, grid, array.len(), shape, width)?;
        // The places of each dimension that are filled so far: at first this rank's own.
        let mut filled: Vec<Range<usize>> =
            shape.iter().zip(width).map(|(size, width)| *width..size - width).collect();
        for dimension in 0..shape.len() {
            let (size, width) = (shape[dimension], width[dimension]);
            if width == 0 {
                continue;
            }
            let neighbors = grid.neighbors_along(self.rank(), [dimension]);
            let slab = |start: usize| Slab::new(shape, &filled, dimension, start..start + width);
            let inner = [slab(width), slab(size - 2 * width)];
            let outer = [slab(0), slab(size - width)];

            let mut sent = Vec::new();
            inner.iter().for_each(|slab| slab.pack_behind(&mut sent, array));
            let mut received = sent.clone();
            let counts = [sent.len() / 2; 2];
            self.neighbor_exchange(
                OPERATION,
                &neighbors,
                Sent::Blocks(&sent, &counts),
                &mut received,
                &counts,
            )?;

            let mut received = &received[..];
            for (slab, source) in outer.iter().zip(neighbors.sources()) {
                let (block, rest) = received.split_at(counts[0]);
                if source.is_some() {
                    slab.unpack(block, array);
                }
                received = rest;
            }
            let [before, behind] = [0, 1].map(|side| neighbors.sources()[side].is_some());
            filled[dimension] = if before { 0 } else { width }..if behind { size } else { size - width };
        }
        Ok(())
    }
}

pub(super) fn check(
    operation: &'static str,
    grid: &Grid,
    len: usize,
    shape: &[usize],
    width: &[usize],
) -> Result<()> {
    let refuse = |what: &str, value: &[usize], expected: String| {
        let (name, value) = (format!("{operation}: {what}"), format!("{value:?}"));
        Err(UsageError::Setting { name, value, expected }.into())
    };
    let dimensions = grid.sizes().len();
    for (what, list) in [("shape", shape), ("width", width)] {
        if list.len() != dimensions {
            return refuse(what, list, format!("an entry for each of the grid's {dimensions} dimensions"));
        }
    }
    if shape.iter().zip(width).any(|(size, width)| width.checked_mul(3).is_none_or(|least| *size < least)) {
        return refuse(
            "shape",
            shape,
            format!("at least 3 × width {width:?}: both halos, and what a neighbor needs"),
        );
    }
    let expected = shape.iter().fold(1, |cells: usize, size| cells.saturating_mul(*size));
    same_len(operation, "in-place", len, expected, "the product of the shape")
}

/// A box of a row-major array.
pub(super) struct Slab<'a> {
    pub shape: &'a [usize],
    pub ranges: Vec<Range<usize>>,
}

impl Slab<'_> {
    /// The box `filled`, but with this range of one dimension.
    fn new<'a>(
        shape: &'a [usize],
        filled: &[Range<usize>],
        dimension: usize,
        range: Range<usize>,
    ) -> Slab<'a> {
        let mut ranges = filled.to_vec();
        ranges[dimension] = range;
        Slab { shape, ranges }
    }

    /// Calls `f` with the place of each contiguous run of cells, in order.
    fn for_each_run(&self, mut f: impl FnMut(Range<usize>)) {
        self.runs_from(0, 0, &mut f);
    }

    fn runs_from(&self, dimension: usize, start: usize, f: &mut impl FnMut(Range<usize>)) {
        let range = self.ranges[dimension].clone();
        let start = start * self.shape[dimension];
        if dimension + 1 == self.shape.len() {
            return f(start + range.start..start + range.end);
        }
        range.for_each(|place| self.runs_from(dimension + 1, start + place, f));
    }

    /// Its cells, one after the other.
    pub fn pack<T: Copy>(&self, array: &[T]) -> Vec<T> {
        let mut cells = Vec::with_capacity(self.ranges.iter().map(Range::len).product());
        self.pack_behind(&mut cells, array);
        cells
    }

    fn pack_behind<T: Copy>(&self, cells: &mut Vec<T>, array: &[T]) {
        self.for_each_run(|run| cells.extend_from_slice(&array[run]));
    }

    /// Copies cells that lie one after the other to their places.
    pub fn unpack<T: Copy>(&self, mut cells: &[T], array: &mut [T]) {
        self.for_each_run(|run| {
            let (run_cells, rest) = cells.split_at(run.len());
            array[run].copy_from_slice(run_cells);
            cells = rest;
        });
    }
}
