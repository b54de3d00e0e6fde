//! The halos of an array that is spread over a grid of ranks.

use super::Grid;
use super::neighbors::Neighbors;
use super::slab::Slab;
use crate::api::checks::same_len;
use crate::api::comm::Comm;
use crate::buffer::Target;
use crate::types::dtype::Plain;
use crate::types::error::{Result, UsageError};
use crate::types::memory::{Space, Span};
use std::ops::Range;

const OPERATION: &str = "exchange_halo";

impl Comm {
    /// Fills the halo of this rank's part of an array: the cells around its own that other ranks of the grid own, with edges and corners.
    ///
    /// `array` is any [`Target`] of plain data: host memory, an array of ndarray, or GPU memory. It is row-major and has `shape`, halo
    /// included. In dimension `d` the first and the last `width[d]` places are the halo; a width of 0 leaves the dimension out. Halo cells
    /// beyond the edge of the grid, where it is not periodic, keep what they held.
    ///
    /// Every rank of the grid calls it, in one order. Each rank's own part may have another shape, but neighbors in one dimension have the
    /// same sizes in the others. The parts move dimension by dimension: two messages there and back for each, packed in memory of their
    /// length. [`start_exchange_halo`](Comm::start_exchange_halo) lets the rank compute meanwhile. MPI has no call for it.
    ///
    /// ```
    /// # fn main() -> phalanx::Result<()> {
    /// use phalanx::Grid;
    ///
    /// phalanx::try_run(3, |comm| -> phalanx::Result<()> {
    ///     let grid = Grid::new(&[3], &[true])?;
    ///     let rank = comm.rank() as u32;
    ///     // Two cells of its own between two of the halo.
    ///     let mut cells = [9, 10 * rank, 10 * rank + 1, 9];
    ///     comm.exchange_halo(&grid, &mut cells, &[4], &[1])?;
    ///     assert_eq!((cells[0], cells[3]), (10 * ((rank + 2) % 3) + 1, 10 * ((rank + 1) % 3)));
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # GPU memory
    /// On NCCL and RCCL all of it is enqueued on the communicator's stream, or on that of `Comm::on`, and nothing waits: strided copies
    /// (`cuMemcpy3DAsync`, `hipMemcpy2DAsync`) into memory that is allocated on the stream, and the messages. On NVSHMEM the call waits for
    /// the messages. A side of an array of up to three dimensions is one copy. A GPU is slow with rows of a few bytes, which are the sides
    /// of the innermost dimension: spread the outer dimensions over the ranks first.
    ///
    /// ```no_run
    /// # #[cfg(feature = "nccl")]
    /// # fn main() -> phalanx::Result<()> {
    /// use phalanx::{BackendKind, Comm, Grid};
    ///
    /// let cells = Comm::builder().backend(BackendKind::Nccl).try_run(2, |comm| -> phalanx::Result<Vec<f32>> {
    ///     let stream = comm.cuda_stream()?;
    ///     // Four rows of three cells, of which two rows are the rank's own.
    ///     let mut cells = stream.clone_htod(&[comm.rank() as f32; 4 * 3])?;
    ///     comm.exchange_halo(&Grid::new(&[2, 1], &[true; 2])?, &mut cells, &[4, 3], &[1, 0])?;
    ///     Ok(stream.clone_dtoh(&cells)?)
    /// })?;
    /// println!("{cells:?}");
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "nccl"))]
    /// # fn main() {}
    /// ```
    ///
    /// # Errors
    /// [`UsageError`], before anything is sent: a grid of another number of ranks; lists that do not have an entry for each dimension; an
    /// array that has not the shape; a part narrower than the halo that its neighbor needs. [`MismatchError`](crate::MismatchError) if
    /// neighbors' sizes differ; on NCCL in [checked mode](crate::Builder::check) only. [`UnsupportedError`](crate::UnsupportedError) for GPU
    /// memory on MPI.
    pub fn exchange_halo<A>(&self, grid: &Grid, array: &mut A, shape: &[usize], width: &[usize]) -> Result<()>
    where
        A: Target + ?Sized,
        A::Elem: Plain,
    {
        grid.check_ranks(OPERATION, self)?;
        check(OPERATION, grid, array.len(), shape, width)?;
        let steps = steps(grid, self.rank(), shape, width);
        let len = array.len();
        let loan = array.lend_mut(&self.stream)?;
        let Span { start, space } = loan.span();
        #[cfg(feature = "_gpu")]
        if space == Space::Device {
            // SAFETY: the array is lent to the stream, and has the shape.
            return unsafe { self.exchange_on_gpu::<A::Elem>(OPERATION, start as u64, &steps) };
        }
        debug_assert_eq!(space, Space::Host);
        // SAFETY: the contract of `lend_mut`: so many elements in host memory, which nothing else uses while the loan lasts.
        let array = unsafe { std::slice::from_raw_parts_mut(start.cast::<A::Elem>(), len) };
        steps.iter().try_for_each(|step| self.exchange_on_host(array, step))
    }

    fn exchange_on_host<T: Plain>(&self, array: &mut [T], step: &Step<'_>) -> Result<()> {
        let sent = step.inner.each_ref().map(|slab| slab.pack(array));
        let mut received = sent.clone();
        self.exchange_blocks(&step.neighbors, &sent, &mut received)?;
        for ((slab, cells), source) in step.outer.iter().zip(&received).zip(step.neighbors.sources()) {
            if source.is_some() {
                slab.unpack(cells, array);
            }
        }
        Ok(())
    }
}

/// The exchange along one dimension: a block to the rank before and to the one behind, and one from each.
pub(super) struct Step<'s> {
    pub neighbors: Neighbors,
    /// The cells that go to the two neighbors.
    pub inner: [Slab<'s>; 2],
    /// The places of those that come from them. All four boxes are as large.
    pub outer: [Slab<'s>; 2],
}

impl Step<'_> {
    /// The cells of a block.
    pub fn cells(&self) -> usize {
        self.inner[0].cells()
    }
}

/// One step for each dimension that has a halo. A step moves what the steps before have filled, too: so edges and corners come along.
fn steps<'s>(grid: &Grid, rank: usize, shape: &'s [usize], width: &[usize]) -> Vec<Step<'s>> {
    // The places of each dimension that are filled so far: at first this rank's own.
    let mut filled: Vec<Range<usize>> =
        shape.iter().zip(width).map(|(size, width)| *width..size - width).collect();
    let mut steps = Vec::with_capacity(shape.len());
    for dimension in (0..shape.len()).filter(|dimension| width[*dimension] > 0) {
        let (size, width) = (shape[dimension], width[dimension]);
        let neighbors = grid.neighbors_along(rank, [dimension]);
        let slab = |start: usize| Slab::new(shape, &filled, dimension, start..start + width);
        let inner = [slab(width), slab(size - 2 * width)];
        let outer = [slab(0), slab(size - width)];
        let [before, behind] = [0, 1].map(|side| neighbors.sources()[side].is_some());
        filled[dimension] = if before { 0 } else { width }..if behind { size } else { size - width };
        steps.push(Step { neighbors, inner, outer });
    }
    steps
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
