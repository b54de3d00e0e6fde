//! Tensor and sequence parallelism: a layer's matrices are split over ranks.
//!
//! ```
//! use phalanx_train::device::Host;
//! use phalanx_train::tensor::{ColumnParallel, RowParallel};
//!
//! // y = W₂ (W₁ x), with two rows of W₁ and two columns of W₂, of which each rank has one.
//! let outputs = phalanx::try_run(2, |comm| {
//!     let up = ColumnParallel { inputs: 2, outputs: 1, weight: [vec![1.0, 2.0], vec![3.0, 4.0]][comm.rank()].clone(), bias: None };
//!     let down = RowParallel { inputs: 1, outputs: 2, weight: [vec![1.0, 0.0], vec![0.0, 1.0]][comm.rank()].clone(), bias: Some(vec![0.5, 0.5]) };
//!     let x = [1.0f64, 1.0]; // one row, the same on both ranks
//!     let hidden = up.forward(&Host, &&x[..])?;
//!     down.forward(&comm, &Host, &&hidden[..])
//! })?;
//! assert_eq!(outputs, [[3.5, 7.5]; 2]);
//! # Ok::<(), phalanx_train::Error>(())
//! ```
//!
//! **Regions.** Between two layers that are split, each rank has a part of the activations. What enters such a region is the same on every
//! rank, so the gradient of it is a sum over the ranks; what leaves it is a sum over the ranks, and its gradient is the same on every rank:
//!
//! | | forward | backward |
//! |---|---|---|
//! | into the region | nothing | [`sum`] |
//! | out of the region | [`sum`] | nothing |
//! | [`gather`] along a dimension | all parts on every rank | own part of the gradient, or [`scatter_sum`] if each rank has a summand of it |
//! | [`own_part`] | own part | [`gather`] |
//! | [`scatter_sum`] | own part of the sum | [`gather`] |
//! | [`exchange`] | from parts along one dimension to parts along another | the exchange back |
//!
//! With sequence parallelism, activations outside the regions are split along the sequence: into the region is [`gather`], out of it
//! [`scatter_sum`]. Parameters that are outside (norms, biases behind the sum) see a part of the tokens on each rank: their gradients take
//! [`sum`]. A bias behind a sum that all ranks have whole has the same gradient on every rank, which is counted once.
//!
//! All calls are collective on the communicator of the tensor axis, with the same shapes on every rank but for the split dimension. Parts may be
//! of unlike length: the first ranks have one more, as everywhere ([`Layout`](crate::mesh::Layout)).

mod cross_entropy;
#[cfg(feature = "cuda")]
mod gpu;
mod host;
mod linear;

pub use cross_entropy::{CrossEntropy, VocabularyParallel};
pub use linear::{ColumnParallel, LinearGradients, Products, RowParallel};

use crate::device::{Device, Number};
use crate::mesh::layout::part;
use crate::{Error, Result};
use phalanx::{Comm, ReduceOp, Reducible, Source, Target};
use std::ops::Range;

/// Moving the parts of a tensor.
pub trait Slabs: Device {
    /// For each of `count` rows: `to[row * to_row..][..len] = from[row * from_row..][..len]`. A copy in two dimensions, as
    /// `cudaMemcpy2D` makes it.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn copy_rows<T: Number>(
        &self,
        count: usize,
        len: usize,
        from: &Self::View<'_, T>,
        from_row: usize,
        to: &mut Self::ViewMut<'_, T>,
        to_row: usize,
    ) -> Result<()>;
}

/// A tensor that is split along a dimension over the ranks of a communicator.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Split {
    /// Product of the dimensions before, and of those behind.
    outer: usize,
    inner: usize,
    whole: usize,
    /// Of each rank.
    parts: Vec<Range<usize>>,
    rank: usize,
}

impl Split {
    fn new(comm: &Comm, shape: &[usize], dimension: usize) -> Result<Split> {
        let Some(whole) = shape.get(dimension).copied() else {
            return Err(Error::usage(format!(
                "dimension {dimension} of a tensor of shape {shape:?}: it has the dimensions 0 to {}",
                shape.len().saturating_sub(1)
            )));
        };
        let ranks = comm.world_size();
        Ok(Split {
            outer: shape[..dimension].iter().product(),
            inner: shape[dimension + 1..].iter().product(),
            whole,
            parts: (0..ranks).map(|rank| part(&(0..whole), ranks, rank)).collect(),
            rank: comm.rank(),
        })
    }

    fn len(&self) -> usize {
        self.outer * self.whole * self.inner
    }

    /// Elements of a rank's part.
    fn part_len(&self, rank: usize) -> usize {
        self.outer * self.parts[rank].len() * self.inner
    }

    fn counts(&self) -> Vec<usize> {
        (0..self.parts.len()).map(|rank| self.part_len(rank)).collect()
    }

    fn is_even(&self) -> bool {
        self.whole.is_multiple_of(self.parts.len())
    }

    /// Copies a rank's part to its place in the whole.
    fn copy<D: Slabs, T: Number>(
        &self,
        device: &D,
        rank: usize,
        whole: &mut D::Buffer<T>,
        parts: &D::View<'_, T>,
    ) -> Result<()> {
        let (len, row) = (self.parts[rank].len() * self.inner, self.whole * self.inner);
        let start = self.parts[rank].start * self.inner;
        if self.outer == 0 || len == 0 {
            return Ok(());
        }
        let end = whole.len();
        device.copy_rows(self.outer, len, parts, len, &mut device.view_mut(whole, start..end), row)
    }
}

fn check(what: &str, len: usize, expected: usize) -> Result<()> {
    if len == expected {
        return Ok(());
    }
    Err(Error::usage(format!("{len} numbers of {what}: {expected} are expected from its shape")))
}

/// The sum over all ranks, in place. In rank order, so that all ranks get the same bits.
///
/// # Errors
/// Errors of `comm`.
pub fn sum<T: Target<Elem: Reducible> + ?Sized>(comm: &Comm, data: &mut T) -> Result<()> {
    Ok(comm.all_reduce_in_place(data, ReduceOp::Sum)?)
}

/// All parts of a tensor of `shape` along a dimension, from each rank's own.
///
/// # Errors
/// [`Error::Usage`] if there is no such dimension, or `own` is not of the length that its rank has. Errors of `comm` and of the device.
pub fn gather<D: Slabs, T: Number>(
    comm: &Comm,
    device: &D,
    shape: &[usize],
    dimension: usize,
    own: &D::View<'_, T>,
) -> Result<D::Buffer<T>> {
    let split = Split::new(comm, shape, dimension)?;
    check("this rank's part", own.len(), split.part_len(split.rank))?;
    let mut parts = device.alloc::<T>(split.len())?;
    if split.is_even() {
        comm.all_gather(own, &mut parts)?;
    } else {
        comm.all_gather_v(own, &mut parts, &split.counts())?;
    }
    if split.outer == 1 {
        return Ok(parts);
    }
    let mut whole = device.alloc::<T>(split.len())?;
    let mut at = 0;
    for rank in 0..split.parts.len() {
        let len = split.part_len(rank);
        split.copy(device, rank, &mut whole, &device.view(&parts, at..at + len))?;
        at += len;
    }
    Ok(whole)
}

/// This rank's part of a tensor of `shape`, along a dimension. No rank is asked.
///
/// # Errors
/// [`Error::Usage`] as for [`gather`]. Errors of the device.
pub fn own_part<D: Slabs, T: Number>(
    comm: &Comm,
    device: &D,
    shape: &[usize],
    dimension: usize,
    whole: &D::Buffer<T>,
) -> Result<D::Buffer<T>> {
    let split = Split::new(comm, shape, dimension)?;
    check("the tensor", whole.len(), split.len())?;
    let mut own = device.alloc::<T>(split.part_len(split.rank))?;
    take(&split, device, split.rank, whole, &mut own, 0)?;
    Ok(own)
}

/// Copies a rank's part out of the whole, to `at` of `to`.
fn take<D: Slabs, T: Number>(
    split: &Split,
    device: &D,
    rank: usize,
    whole: &D::Buffer<T>,
    to: &mut D::Buffer<T>,
    at: usize,
) -> Result<()> {
    let (len, row) = (split.parts[rank].len() * split.inner, split.whole * split.inner);
    if split.outer == 0 || len == 0 {
        return Ok(());
    }
    let from = device.view(whole, split.parts[rank].start * split.inner..split.len());
    device.copy_rows(split.outer, len, &from, row, &mut device.view_mut(to, at..at + split.outer * len), len)
}

/// This rank's part of the sum over all ranks of tensors of `shape`, along a dimension.
///
/// # Errors
/// As [`gather`].
pub fn scatter_sum<D: Slabs, T: Number>(
    comm: &Comm,
    device: &D,
    shape: &[usize],
    dimension: usize,
    summand: &D::Buffer<T>,
) -> Result<D::Buffer<T>> {
    let split = Split::new(comm, shape, dimension)?;
    check("the tensor", summand.len(), split.len())?;
    let mut own = device.alloc::<T>(split.part_len(split.rank))?;
    let mut send = None;
    if split.outer != 1 {
        let (parts, mut at) = (send.insert(device.alloc::<T>(split.len())?), 0);
        for rank in 0..split.parts.len() {
            take(&split, device, rank, summand, parts, at)?;
            at += split.part_len(rank);
        }
    }
    let send = send.as_ref().unwrap_or(summand);
    if split.is_even() {
        comm.reduce_scatter(send, &mut own, ReduceOp::Sum)?;
    } else {
        comm.reduce_scatter_v(send, &mut own, &split.counts(), ReduceOp::Sum)?;
    }
    Ok(own)
}

/// From parts along dimension `from` to parts along dimension `to` of a tensor of `shape`: each rank keeps as much. For attention, from a part of
/// the tokens to a part of the heads, and back (Ulysses, Jacobs et al. 2023). Its backward is the exchange the other way.
///
/// # Errors
/// [`Error::Usage`] if a dimension does not exist or both are one, or `own` is not of the length that its rank has. Errors of `comm` and of the
/// device.
pub fn exchange<D: Slabs, T: Number>(
    comm: &Comm,
    device: &D,
    shape: &[usize],
    [from, to]: [usize; 2],
    own: &D::Buffer<T>,
) -> Result<D::Buffer<T>> {
    if from == to {
        return Err(Error::usage(format!(
            "an exchange from dimension {from} to itself: give two dimensions"
        )));
    }
    // What this rank has, by its dimension `to`; and what it gets, by its dimension `from`.
    let (mut before, mut after) = (shape.to_vec(), shape.to_vec());
    let (own_before, own_after) = (Split::new(comm, shape, from)?, Split::new(comm, shape, to)?);
    before[from] = own_before.parts[comm.rank()].len();
    after[to] = own_after.parts[comm.rank()].len();
    let (before, after) = (Split::new(comm, &before, to)?, Split::new(comm, &after, from)?);
    check("this rank's part", own.len(), before.len())?;
    let (mut send, mut received) = (device.alloc::<T>(before.len())?, device.alloc::<T>(after.len())?);
    let mut at = 0;
    for rank in 0..before.parts.len() {
        take(&before, device, rank, own, &mut send, at)?;
        at += before.part_len(rank);
    }
    comm.all_to_all_v(&send, &before.counts(), &mut received, &after.counts())?;
    let (mut whole, mut at) = (device.alloc::<T>(after.len())?, 0);
    for rank in 0..after.parts.len() {
        let len = after.part_len(rank);
        after.copy(device, rank, &mut whole, &device.view(&received, at..at + len))?;
        at += len;
    }
    Ok(whole)
}
