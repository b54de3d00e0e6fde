//! Collectives on tensors, with their gradients.

use crate::error::{failed, usage};
use crate::memory;
use crate::ranks::Ranks;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::shape::Dim;
use candle_core::{CpuStorage, CustomOp1, InplaceOp1, Layout, Result, Shape, Tensor};
use phalanx::{AnySource, AnyTarget, ReduceOp};
use phalanx_train::mesh::part;
use std::sync::Arc;

/// What happens to the elements of a contiguous tensor. Counts are in rows of the first dimension.
#[derive(Debug, Clone)]
pub(crate) enum Kind {
    AllReduce(ReduceOp),
    Broadcast(usize),
    /// The sum goes to the root; the others get zeros.
    ReduceTo(usize),
    AllGather(Arc<[usize]>),
    /// By sum.
    ReduceScatter(Arc<[usize]>),
    AllToAll,
    /// Nothing is sent.
    Copy,
    /// This rank's rows. Nothing is sent.
    OwnPart(Arc<[usize]>),
}

/// A collective, as candle's operation with a gradient. What goes forward by `kind` goes back by `back`.
struct Collective {
    ranks: Ranks,
    kind: Kind,
    back: Option<Kind>,
}

impl Collective {
    fn output(&self, dims: &[usize]) -> Shape {
        let rows = match &self.kind {
            Kind::AllGather(rows) => rows.iter().sum(),
            Kind::ReduceScatter(rows) | Kind::OwnPart(rows) => rows[self.ranks.rank()],
            _ => return dims.into(),
        };
        let mut dims = dims.to_vec();
        dims[0] = rows;
        dims.into()
    }

    /// The elements that are copied, where nothing is sent.
    fn copied(&self, layout: &Layout) -> Result<Option<Layout>> {
        match &self.kind {
            Kind::Copy => Ok(Some(layout.clone())),
            Kind::OwnPart(rows) => {
                let rank = self.ranks.rank();
                layout.narrow(0, rows[..rank].iter().sum(), rows[rank]).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// `row` is the number of elements of a row.
    fn carry_out(&self, send: &AnySource<'_>, recv: &mut AnyTarget<'_>, row: usize) -> Result<()> {
        let comm = self.ranks.comm();
        let counts = |rows: &[usize]| rows.iter().map(|rows| rows * row).collect::<Vec<_>>();
        match &self.kind {
            Kind::AllReduce(op) => comm.all_reduce(send, recv, *op),
            Kind::Broadcast(root) => comm.broadcast(send, recv, *root),
            Kind::ReduceTo(root) => comm.reduce(send, recv, ReduceOp::Sum, *root),
            Kind::AllGather(rows) if is_even(rows) => comm.all_gather(send, recv),
            Kind::AllGather(rows) => comm.all_gather_v(send, recv, &counts(rows)),
            Kind::ReduceScatter(rows) if is_even(rows) => comm.reduce_scatter(send, recv, ReduceOp::Sum),
            Kind::ReduceScatter(rows) => comm.reduce_scatter_v(send, recv, &counts(rows), ReduceOp::Sum),
            Kind::AllToAll => comm.all_to_all(send, recv),
            Kind::Copy | Kind::OwnPart(_) => unreachable!("nothing is sent"),
        }
        .map_err(failed)
    }
}

fn is_even(rows: &[usize]) -> bool {
    rows.iter().all(|count| *count == rows[0])
}

/// Elements of a row.
fn row(dims: &[usize]) -> usize {
    dims.iter().skip(1).product()
}

impl CustomOp1 for Collective {
    fn name(&self) -> &'static str {
        match self.kind {
            Kind::AllReduce(_) => "all_reduce",
            Kind::Broadcast(_) => "broadcast",
            Kind::ReduceTo(_) => "reduce",
            Kind::AllGather(_) => "all_gather",
            Kind::ReduceScatter(_) => "reduce_scatter",
            Kind::AllToAll => "all_to_all",
            Kind::Copy => "copy_to",
            Kind::OwnPart(_) => "scatter_to",
        }
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let shape = self.output(layout.dims());
        let mut result = memory::like(storage, shape.elem_count())?;
        if let Some(part) = self.copied(layout)? {
            storage.copy_strided_src(&mut result, 0, &part)?;
            return Ok((result, shape));
        }
        let send = memory::source(self.name(), storage, layout)?;
        let mut recv = memory::target(self.name(), &mut result, &Layout::contiguous(&shape))?;
        self.carry_out(&send, &mut recv, row(layout.dims()))?;
        Ok((result, shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let shape = self.output(layout.dims());
        let mut result = memory::cuda::like(storage, shape.elem_count())?;
        if let Some(part) = self.copied(layout)? {
            storage.copy_strided_src(&mut result, 0, &part)?;
            return Ok((result, shape));
        }
        if matches!(self.kind, Kind::ReduceTo(root) if root != self.ranks.rank()) {
            // Nothing else writes it here.
            memory::cuda::zero(&mut result)?;
        }
        let send = memory::cuda::source(self.name(), storage, layout)?;
        let mut recv = memory::cuda::target(self.name(), &mut result, &Layout::contiguous(&shape))?;
        self.carry_out(&send, &mut recv, row(layout.dims()))?;
        Ok((result, shape))
    }

    fn bwd(&self, _arg: &Tensor, _result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let Some(back) = self.back.clone() else {
            return Err(usage(format!(
                "{} by another operation than sum and avg has no gradient; detach() the tensor",
                self.name()
            )));
        };
        self.ranks.apply(gradient, back, Some(self.kind.clone())).map(Some)
    }
}

/// A collective that changes a tensor where it lies.
struct InPlace<'a> {
    ranks: &'a Ranks,
    kind: InPlaceKind,
}

enum InPlaceKind {
    AllReduce(ReduceOp),
    Broadcast(usize),
}

impl InPlace<'_> {
    fn carry_out(&self, mut elements: AnyTarget<'_>) -> Result<()> {
        match self.kind {
            InPlaceKind::AllReduce(op) => self.ranks.comm().all_reduce_in_place(&mut elements, op),
            InPlaceKind::Broadcast(root) => self.ranks.comm().broadcast_in_place(&mut elements, root),
        }
        .map_err(failed)
    }
}

impl InplaceOp1 for InPlace<'_> {
    fn name(&self) -> &'static str {
        match self.kind {
            InPlaceKind::AllReduce(_) => "all_reduce_in_place",
            InPlaceKind::Broadcast(_) => "broadcast_in_place",
        }
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        self.carry_out(memory::target(self.name(), storage, layout)?)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        self.carry_out(memory::cuda::target(self.name(), storage, layout)?)
    }
}

/// # In place
///
/// On tensors, on `Var`s, and on views of them whose elements are one after the other. Nothing is copied, and there is no gradient.
impl Ranks {
    /// Combines all ranks' tensors; every rank's tensor becomes the result. The same shape and type on every rank.
    ///
    /// # Errors
    /// For a view that is not contiguous, before anything is sent; phalanx's errors.
    pub fn all_reduce_in_place(&self, tensor: &Tensor, op: ReduceOp) -> Result<()> {
        tensor.inplace_op1(&InPlace { ranks: self, kind: InPlaceKind::AllReduce(op) })
    }

    /// Copies the root's tensor to every rank.
    ///
    /// # Errors
    /// As for [`all_reduce_in_place`](Ranks::all_reduce_in_place).
    pub fn broadcast_in_place(&self, tensor: &Tensor, root: usize) -> Result<()> {
        self.check_rank("broadcast_in_place", "root", root)?;
        tensor.inplace_op1(&InPlace { ranks: self, kind: InPlaceKind::Broadcast(root) })
    }
}

/// # With gradients
///
/// The result is a new tensor; a tensor whose elements are not one after the other is copied first. A gradient goes back by another
/// collective, so all ranks call `backward`, in the same order. It is the gradient of the sum of all ranks' losses.
///
/// | operation | its gradient |
/// |---|---|
/// | [`all_reduce`](Ranks::all_reduce) by sum, by avg | all_reduce by the same |
/// | [`all_gather`](Ranks::all_gather) | reduce_scatter by sum |
/// | [`reduce_scatter`](Ranks::reduce_scatter) by sum | all_gather |
/// | [`broadcast`](Ranks::broadcast) | the sum, at the root; zeros elsewhere |
/// | [`all_to_all`](Ranks::all_to_all) | all_to_all, the dimensions exchanged |
/// | [`send`](Ranks::send), [`recv`](Ranks::recv) | a message the other way |
/// | [`copy_to`](Ranks::copy_to) | all_reduce by sum |
/// | [`reduce_from`](Ranks::reduce_from) | the same gradient |
/// | [`gather_from`](Ranks::gather_from) | this rank's part |
/// | [`scatter_to`](Ranks::scatter_to) | all_gather |
impl Ranks {
    /// Combines all ranks' tensors; every rank gets the result.
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Tensor> {
        let back = matches!(op, ReduceOp::Sum | ReduceOp::Avg).then_some(Kind::AllReduce(op));
        self.apply(tensor, Kind::AllReduce(op), back)
    }

    /// Copies the root's tensor to every rank. The others' tensors say the shape and the type.
    pub fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<Tensor> {
        self.check_rank("broadcast", "root", root)?;
        self.apply(tensor, Kind::Broadcast(root), Some(Kind::ReduceTo(root)))
    }

    /// Concatenates all ranks' tensors along a dimension, in rank order. The same shape on every rank; for others see
    /// [`all_gather_parts`](Ranks::all_gather_parts).
    pub fn all_gather<D: Dim>(&self, tensor: &Tensor, dim: D) -> Result<Tensor> {
        let dim = dim.to_index(tensor.shape(), "all_gather")?;
        let rows: Arc<[usize]> = vec![tensor.dim(dim)?; self.world_size()].into();
        self.along(tensor, dim, Kind::AllGather(rows.clone()), Kind::ReduceScatter(rows))
    }

    /// [`all_gather`](Ranks::all_gather) of the parts of a dimension of `whole` rows: [`part`] says how many each rank has.
    ///
    /// # Errors
    /// If this rank's tensor has another number of rows than its part, before anything is sent.
    pub fn all_gather_parts<D: Dim>(&self, tensor: &Tensor, dim: D, whole: usize) -> Result<Tensor> {
        let dim = dim.to_index(tensor.shape(), "all_gather_parts")?;
        let rows = self.checked_parts("all_gather_parts", tensor, dim, whole)?;
        self.along(tensor, dim, Kind::AllGather(rows.clone()), Kind::ReduceScatter(rows))
    }

    /// Sums all ranks' tensors, and gives each rank its part along a dimension: [`part`] says which rows. The same shape on every rank.
    pub fn reduce_scatter<D: Dim>(&self, tensor: &Tensor, dim: D) -> Result<Tensor> {
        let dim = dim.to_index(tensor.shape(), "reduce_scatter")?;
        let rows = self.parts(tensor.dim(dim)?);
        self.along(tensor, dim, Kind::ReduceScatter(rows.clone()), Kind::AllGather(rows))
    }

    /// Exchanges parts: splits the tensor into one part for each rank along `split`, and concatenates the parts that it gets along `concat`,
    /// in rank order. Heads become positions, for example, and back (Ulysses).
    ///
    /// # Errors
    /// If the ranks do not divide the length of `split`, before anything is sent.
    pub fn all_to_all<D: Dim>(&self, tensor: &Tensor, split: D, concat: D) -> Result<Tensor> {
        let split = split.to_index(tensor.shape(), "all_to_all")?;
        let concat = concat.to_index(tensor.shape(), "all_to_all")?;
        let (ranks, len) = (self.world_size(), tensor.dim(split)?);
        if !len.is_multiple_of(ranks) {
            return Err(usage(format!(
                "all_to_all: {ranks} ranks cannot share the {len} rows of dimension {split} evenly; pad it"
            )));
        }
        // [.., ranks * part, ..] -> [ranks, .., part, ..], one block for each rank.
        let blocks = Tensor::stack(&tensor.chunk(ranks, split)?, 0)?;
        let received = self.apply(&blocks, Kind::AllToAll, Some(Kind::AllToAll))?;
        let parts = received.chunk(ranks, 0)?;
        let parts = parts.iter().map(|part| part.squeeze(0)).collect::<Result<Vec<_>>>()?;
        Tensor::cat(&parts, concat)
    }

    pub(crate) fn apply(&self, tensor: &Tensor, kind: Kind, back: Option<Kind>) -> Result<Tensor> {
        tensor.contiguous()?.apply_op1(Collective { ranks: self.clone(), kind, back })
    }

    /// Rows of each rank's part.
    pub(crate) fn parts(&self, whole: usize) -> Arc<[usize]> {
        let ranks = self.world_size();
        (0..ranks).map(|rank| part(&(0..whole), ranks, rank).len()).collect()
    }

    /// The same; an error if this rank's tensor is no part of so many rows.
    pub(crate) fn checked_parts(
        &self,
        operation: &str,
        tensor: &Tensor,
        dim: usize,
        whole: usize,
    ) -> Result<Arc<[usize]>> {
        let (rows, own) = (self.parts(whole), tensor.dim(dim)?);
        let (rank, ranks, part) = (self.rank(), self.world_size(), rows[self.rank()]);
        if own == part {
            return Ok(rows);
        }
        Err(usage(format!(
            "{operation}: rank {rank} has {own} rows of dimension {dim}; its part of {whole} among {ranks} ranks is {part}"
        )))
    }

    /// A collective along a dimension, which is brought to the front and back.
    pub(crate) fn along(&self, tensor: &Tensor, dim: usize, kind: Kind, back: Kind) -> Result<Tensor> {
        let rows = tensor.transpose(0, dim)?;
        self.apply(&rows, kind, Some(back))?.transpose(0, dim)?.contiguous()
    }
}
