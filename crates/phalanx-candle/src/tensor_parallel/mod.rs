//! Tensor parallelism: the ways into a region in which each rank has a part, and out of it; and layers that are split.

mod cross_entropy;
mod embedding;
mod linear;

pub use cross_entropy::{CrossEntropySettings, cross_entropy};
pub use embedding::VocabParallelEmbedding;
pub use linear::{ColumnParallelLinear, RowParallelLinear, kv_heads};

use crate::collective::Kind;
use crate::ranks::Ranks;
use candle_core::shape::Dim;
use candle_core::{Result, Tensor};
use phalanx::ReduceOp;

/// # Into a tensor-parallel region, and out of it
///
/// Inside, each rank has a part of a layer. The loss is outside: each rank computes the same one, and its gradient there counts once.
///
/// With sequence parallelism, tokens are split outside as well: then [`all_gather`](Ranks::all_gather) along their dimension leads in, and
/// [`reduce_scatter`](Ranks::reduce_scatter) leads out.
impl Ranks {
    /// Into a region with a tensor that all ranks have: its gradient is the sum of the ranks' gradients. Megatron's f. (candle copies the
    /// tensor: an operation of its own must have new memory.)
    pub fn copy_to(&self, tensor: &Tensor) -> Result<Tensor> {
        self.apply(tensor, Kind::Copy, Some(Kind::AllReduce(ReduceOp::Sum)))
    }

    /// Out of a region with partial sums: the sum over the ranks. Megatron's g.
    pub fn reduce_from(&self, tensor: &Tensor) -> Result<Tensor> {
        self.apply(tensor, Kind::AllReduce(ReduceOp::Sum), Some(Kind::Copy))
    }

    /// Out of a region with parts along a dimension of `whole` rows: all parts.
    ///
    /// # Errors
    /// As for [`all_gather_parts`](Ranks::all_gather_parts).
    pub fn gather_from<D: Dim>(&self, tensor: &Tensor, dim: D, whole: usize) -> Result<Tensor> {
        let dim = dim.to_index(tensor.shape(), "gather_from")?;
        let rows = self.checked_parts("gather_from", tensor, dim, whole)?;
        self.along(tensor, dim, Kind::AllGather(rows.clone()), Kind::OwnPart(rows))
    }

    /// Into a region with this rank's part along a dimension.
    pub fn scatter_to<D: Dim>(&self, tensor: &Tensor, dim: D) -> Result<Tensor> {
        let dim = dim.to_index(tensor.shape(), "scatter_to")?;
        let rows = self.parts(tensor.dim(dim)?);
        self.along(tensor, dim, Kind::OwnPart(rows.clone()), Kind::AllGather(rows))
    }
}
