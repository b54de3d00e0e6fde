//! The collectives of [`Comm`]: every check on their arguments, once, and the methods.

use crate::backend::{Blocks, Call, Operation};
use crate::buffer::{Source, Target};
use crate::comm::Comm;
use crate::error::{Result, UsageError};
use crate::op::{RawReduction, ReduceOp, Reduction};

/// What the checks need to know of a communicator.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub rank: usize,
    pub world_size: usize,
}

/// The blocks' total length, if every rank's is given.
fn total(operation: &'static str, counts: &[usize]) -> Result<usize> {
    counts.iter().try_fold(0usize, |sum, count| sum.checked_add(*count)).ok_or_else(|| {
        let value = format!("the sum of {} counts", counts.len());
        UsageError::Overflow { operation, what: "the total count", value, limit: usize::MAX.to_string() }
            .into()
    })
}

fn same_len(
    operation: &'static str,
    buffer: &'static str,
    actual: usize,
    expected: usize,
    rule: &'static str,
) -> Result<()> {
    if actual == expected {
        Ok(())
    } else {
        Err(UsageError::Length { operation, buffer, actual, expected, rule }.into())
    }
}

impl Shape {
    pub fn check_rank(&self, operation: &'static str, role: &'static str, rank: usize) -> Result<()> {
        let world_size = self.world_size;
        if rank < world_size {
            Ok(())
        } else {
            Err(UsageError::Rank { operation, role, rank, world_size }.into())
        }
    }

    /// The length of a block, if `len` elements are one for each rank.
    fn share(&self, operation: &'static str, buffer: &'static str, len: usize) -> Result<usize> {
        let world_size = self.world_size;
        if len.is_multiple_of(world_size) {
            Ok(len / world_size)
        } else {
            Err(UsageError::Indivisible { operation, buffer, actual: len, world_size }.into())
        }
    }

    fn all_blocks(&self, operation: &'static str, block: usize) -> Result<usize> {
        block.checked_mul(self.world_size).ok_or_else(|| {
            let value = format!("{block} × {}", self.world_size);
            let limit = usize::MAX.to_string();
            UsageError::Overflow { operation, what: "the length of all blocks", value, limit }.into()
        })
    }

    fn check_counts(&self, operation: &'static str, list: &'static str, counts: &[usize]) -> Result<()> {
        if counts.len() == self.world_size {
            Ok(())
        } else {
            let (actual, world_size) = (counts.len(), self.world_size);
            Err(UsageError::Counts { operation, list, actual, world_size }.into())
        }
    }

    // --- whole buffers --------------------------------------------------------------------------------

    pub fn all_reduce<S, R>(&self, send: &S, recv: &mut R, op: Reduction<S::Elem>) -> Result<Call<'static>>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        same_len("all_reduce", "recv", recv.len(), send.len(), "as many as the send buffer")?;
        Ok(call::<S>(Operation::AllReduce, send.as_ptr(), recv.as_mut_ptr(), Blocks::Equal(send.len()))
            .reducing(op.into()))
    }

    pub fn all_reduce_in_place<R: Target + ?Sized>(
        &self,
        buf: &mut R,
        op: Reduction<R::Elem>,
    ) -> Result<Call<'static>> {
        let recv = buf.as_mut_ptr();
        Ok(call::<R>(Operation::AllReduce, recv, recv, Blocks::Equal(buf.len())).reducing(op.into()))
    }

    pub fn broadcast<S, R>(&self, send: &S, recv: &mut R, root: usize) -> Result<Call<'static>>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        self.check_rank("broadcast", "root", root)?;
        if root == self.rank {
            same_len("broadcast", "send", send.len(), recv.len(), "as many as the recv buffer, at the root")?;
        }
        let blocks = Blocks::Equal(recv.len());
        Ok(call::<S>(Operation::Broadcast, send.as_ptr(), recv.as_mut_ptr(), blocks).rooted(root))
    }

    pub fn broadcast_in_place<R: Target + ?Sized>(&self, buf: &mut R, root: usize) -> Result<Call<'static>> {
        self.check_rank("broadcast_in_place", "root", root)?;
        let recv = buf.as_mut_ptr();
        Ok(call::<R>(Operation::Broadcast, recv, recv, Blocks::Equal(buf.len())).rooted(root))
    }

    pub fn reduce<S, R>(
        &self,
        send: &S,
        recv: &mut R,
        op: Reduction<S::Elem>,
        root: usize,
    ) -> Result<Call<'static>>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        self.check_rank("reduce", "root", root)?;
        if root == self.rank {
            same_len("reduce", "recv", recv.len(), send.len(), "as many as the send buffer, at the root")?;
        }
        Ok(call::<S>(Operation::Reduce, send.as_ptr(), recv.as_mut_ptr(), Blocks::Equal(send.len()))
            .rooted(root)
            .reducing(op.into()))
    }

    pub fn reduce_in_place<R: Target + ?Sized>(
        &self,
        buf: &mut R,
        op: Reduction<R::Elem>,
        root: usize,
    ) -> Result<Call<'static>> {
        self.check_rank("reduce_in_place", "root", root)?;
        let recv = buf.as_mut_ptr();
        Ok(call::<R>(Operation::Reduce, recv, recv, Blocks::Equal(buf.len()))
            .rooted(root)
            .reducing(op.into()))
    }

    // --- equal blocks ---------------------------------------------------------------------------------

    pub fn all_gather<S, R>(&self, send: &S, recv: &mut R) -> Result<Call<'static>>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        let expected = self.all_blocks("all_gather", send.len())?;
        same_len("all_gather", "recv", recv.len(), expected, "ranks × the send buffer")?;
        Ok(call::<S>(Operation::AllGather, send.as_ptr(), recv.as_mut_ptr(), Blocks::Equal(send.len())))
    }

    pub fn all_gather_in_place<R: Target + ?Sized>(&self, buf: &mut R) -> Result<Call<'static>> {
        let block = self.share("all_gather", "in-place", buf.len())?;
        let recv = buf.as_mut_ptr();
        Ok(call::<R>(Operation::AllGather, recv.wrapping_add(self.rank * block), recv, Blocks::Equal(block)))
    }

    pub fn gather<S, R>(&self, send: &S, recv: &mut R, root: usize) -> Result<Call<'static>>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        self.check_rank("gather", "root", root)?;
        if root == self.rank {
            let expected = self.all_blocks("gather", send.len())?;
            same_len("gather", "recv", recv.len(), expected, "ranks × the send buffer, at the root")?;
        }
        let blocks = Blocks::Equal(send.len());
        Ok(call::<S>(Operation::Gather, send.as_ptr(), recv.as_mut_ptr(), blocks).rooted(root))
    }

    pub fn gather_in_place<R: Target + ?Sized>(&self, buf: &mut R, root: usize) -> Result<Call<'static>> {
        self.check_rank("gather_in_place", "root", root)?;
        let block = self.share("gather", "in-place", buf.len())?;
        let recv = buf.as_mut_ptr();
        let own = recv.wrapping_add(self.rank * block);
        Ok(call::<R>(Operation::Gather, own, recv, Blocks::Equal(block)).rooted(root))
    }

    pub fn reduce_scatter<S, R>(
        &self,
        send: &S,
        recv: &mut R,
        op: Reduction<S::Elem>,
    ) -> Result<Call<'static>>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        let expected = self.all_blocks("reduce_scatter", recv.len())?;
        same_len("reduce_scatter", "send", send.len(), expected, "ranks × the recv buffer")?;
        let blocks = Blocks::Equal(recv.len());
        Ok(call::<S>(Operation::ReduceScatter, send.as_ptr(), recv.as_mut_ptr(), blocks).reducing(op.into()))
    }

    pub fn reduce_scatter_in_place<R: Target + ?Sized>(
        &self,
        buf: &mut R,
        op: Reduction<R::Elem>,
    ) -> Result<Call<'static>> {
        let block = self.share("reduce_scatter", "in-place", buf.len())?;
        let send = buf.as_mut_ptr();
        let own = send.wrapping_add(self.rank * block);
        Ok(call::<R>(Operation::ReduceScatter, send, own, Blocks::Equal(block)).reducing(op.into()))
    }

    pub fn scatter<S, R>(&self, send: &S, recv: &mut R, root: usize) -> Result<Call<'static>>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        self.check_rank("scatter", "root", root)?;
        if root == self.rank {
            let expected = self.all_blocks("scatter", recv.len())?;
            same_len("scatter", "send", send.len(), expected, "ranks × the recv buffer, at the root")?;
        }
        let blocks = Blocks::Equal(recv.len());
        Ok(call::<S>(Operation::Scatter, send.as_ptr(), recv.as_mut_ptr(), blocks).rooted(root))
    }

    pub fn scatter_in_place<R: Target + ?Sized>(&self, buf: &mut R, root: usize) -> Result<Call<'static>> {
        self.check_rank("scatter_in_place", "root", root)?;
        let block = self.share("scatter", "in-place", buf.len())?;
        let send = buf.as_mut_ptr();
        let own = send.wrapping_add(self.rank * block);
        Ok(call::<R>(Operation::Scatter, send, own, Blocks::Equal(block)).rooted(root))
    }

    pub fn all_to_all<S, R>(&self, send: &S, recv: &mut R) -> Result<Call<'static>>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        let block = self.share("all_to_all", "send", send.len())?;
        same_len("all_to_all", "recv", recv.len(), send.len(), "as many as the send buffer")?;
        Ok(call::<S>(Operation::AllToAll, send.as_ptr(), recv.as_mut_ptr(), Blocks::Equal(block)))
    }

    pub fn all_to_all_in_place<R: Target + ?Sized>(&self, buf: &mut R) -> Result<Call<'static>> {
        let block = self.share("all_to_all", "in-place", buf.len())?;
        let recv = buf.as_mut_ptr();
        Ok(call::<R>(Operation::AllToAll, recv, recv, Blocks::Equal(block)))
    }

    // --- blocks of different lengths ------------------------------------------------------------------

    pub fn all_gather_v<'a, S, R>(&self, send: &S, recv: &mut R, counts: &'a [usize]) -> Result<Call<'a>>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        let operation = "all_gather_v";
        self.check_counts(operation, "counts", counts)?;
        same_len(operation, "send", send.len(), counts[self.rank], "counts[rank]")?;
        same_len(operation, "recv", recv.len(), total(operation, counts)?, "the sum of the counts")?;
        Ok(call::<S>(Operation::AllGatherV, send.as_ptr(), recv.as_mut_ptr(), Blocks::Each(counts)))
    }

    pub fn gather_v<'a, S, R>(
        &self,
        send: &S,
        recv: &mut R,
        counts: &'a [usize],
        root: usize,
    ) -> Result<Call<'a>>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        let operation = "gather_v";
        self.check_rank(operation, "root", root)?;
        self.check_counts(operation, "counts", counts)?;
        same_len(operation, "send", send.len(), counts[self.rank], "counts[rank]")?;
        let all = total(operation, counts)?;
        if root == self.rank {
            same_len(operation, "recv", recv.len(), all, "the sum of the counts, at the root")?;
        }
        let blocks = Blocks::Each(counts);
        Ok(call::<S>(Operation::GatherV, send.as_ptr(), recv.as_mut_ptr(), blocks).rooted(root))
    }

    pub fn scatter_v<'a, S, R>(
        &self,
        send: &S,
        counts: &'a [usize],
        recv: &mut R,
        root: usize,
    ) -> Result<Call<'a>>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        let operation = "scatter_v";
        self.check_rank(operation, "root", root)?;
        self.check_counts(operation, "counts", counts)?;
        same_len(operation, "recv", recv.len(), counts[self.rank], "counts[rank]")?;
        let all = total(operation, counts)?;
        if root == self.rank {
            same_len(operation, "send", send.len(), all, "the sum of the counts, at the root")?;
        }
        let blocks = Blocks::Each(counts);
        Ok(call::<S>(Operation::ScatterV, send.as_ptr(), recv.as_mut_ptr(), blocks).rooted(root))
    }

    pub fn reduce_scatter_v<'a, S, R>(
        &self,
        send: &S,
        recv: &mut R,
        counts: &'a [usize],
        op: Reduction<S::Elem>,
    ) -> Result<Call<'a>>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        let operation = "reduce_scatter_v";
        self.check_counts(operation, "counts", counts)?;
        same_len(operation, "recv", recv.len(), counts[self.rank], "counts[rank]")?;
        same_len(operation, "send", send.len(), total(operation, counts)?, "the sum of the counts")?;
        Ok(call::<S>(Operation::ReduceScatterV, send.as_ptr(), recv.as_mut_ptr(), Blocks::Each(counts))
            .reducing(op.into()))
    }

    pub fn all_to_all_v<'a, S, R>(
        &self,
        send: &S,
        send_counts: &'a [usize],
        recv: &mut R,
        recv_counts: &'a [usize],
    ) -> Result<Call<'a>>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        let operation = "all_to_all_v";
        self.check_counts(operation, "send counts", send_counts)?;
        self.check_counts(operation, "recv counts", recv_counts)?;
        same_len(
            operation,
            "send",
            send.len(),
            total(operation, send_counts)?,
            "the sum of the send counts",
        )?;
        same_len(
            operation,
            "recv",
            recv.len(),
            total(operation, recv_counts)?,
            "the sum of the recv counts",
        )?;
        let (own_sent, own_received) = (send_counts[self.rank], recv_counts[self.rank]);
        same_len(
            operation,
            "own block of the recv",
            own_received,
            own_sent,
            "send_counts[rank], what this rank gives itself",
        )?;
        let blocks = Blocks::Each(send_counts);
        let call = call::<S>(Operation::AllToAllV, send.as_ptr(), recv.as_mut_ptr(), blocks);
        Ok(Call { recv_blocks: Blocks::Each(recv_counts), ..call })
    }
}

fn call<S: Source + ?Sized>(
    operation: Operation,
    send: *const S::Elem,
    recv: *mut S::Elem,
    blocks: Blocks<'_>,
) -> Call<'_> {
    Call {
        operation,
        dtype: <S::Elem as crate::Element>::DTYPE,
        reduction: ReduceOp::Sum.into(),
        root: 0,
        send: send.cast(),
        recv: recv.cast(),
        blocks,
        recv_blocks: blocks,
    }
}

impl<'a> Call<'a> {
    fn rooted(self, root: usize) -> Call<'a> {
        Call { root, ..self }
    }

    fn reducing(self, reduction: RawReduction) -> Call<'a> {
        Call { reduction, ..self }
    }
}

/// # Collectives
///
/// Every rank of the communicator makes the same calls in the same order; a difference (operation, count,
/// type, reduction, root) is an error on every rank. Lengths are in elements and are checked before
/// anything starts. On the host an operation is complete when it returns. A root may return before the
/// others have arrived.
///
/// `…_in_place` works on one buffer; blocks are then at the places they have in the larger buffer.
impl Comm {
    /// Combines all ranks' buffers; everybody gets the result.
    ///
    /// `recv.len() == send.len()`, the same on every rank. NCCL's `ncclAllReduce`, MPI's `MPI_Allreduce`.
    ///
    /// ```
    /// # fn main() -> phalanx::Result<()> {
    /// let sums = phalanx::run(3, |comm| -> phalanx::Result<i32> {
    ///     let mut sum = [0];
    ///     comm.all_reduce(&[comm.rank() as i32], &mut sum, phalanx::ReduceOp::Sum)?;
    ///     Ok(sum[0])
    /// })?;
    /// assert!(sums.into_iter().all(|sum| sum.unwrap() == 3));
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_reduce<S, R>(&self, send: &S, recv: &mut R, op: impl Into<Reduction<S::Elem>>) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        self.run_call(&self.shape().all_reduce(send, recv, op.into())?)
    }

    /// [`all_reduce`](Comm::all_reduce) of one buffer.
    pub fn all_reduce_in_place<R>(&self, buf: &mut R, op: impl Into<Reduction<R::Elem>>) -> Result<()>
    where
        R: Target + ?Sized,
    {
        self.run_call(&self.shape().all_reduce_in_place(buf, op.into())?)
    }

    /// Gives the root's buffer to everybody.
    ///
    /// `recv` has the same length on every rank; `send` is read at the root only, where it has that length
    /// too (others may pass `&[]`). `ncclBroadcast`, `MPI_Bcast`.
    pub fn broadcast<S, R>(&self, send: &S, recv: &mut R, root: usize) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        self.run_call(&self.shape().broadcast(send, recv, root)?)
    }

    /// [`broadcast`](Comm::broadcast) of one buffer: read at the root, written elsewhere.
    pub fn broadcast_in_place<R: Target + ?Sized>(&self, buf: &mut R, root: usize) -> Result<()> {
        self.run_call(&self.shape().broadcast_in_place(buf, root)?)
    }

    /// Combines all ranks' buffers; the root gets the result.
    ///
    /// `recv` is used at the root only, where `recv.len() == send.len()` (others may pass `&mut []`).
    /// `ncclReduce`, `MPI_Reduce`.
    pub fn reduce<S, R>(
        &self,
        send: &S,
        recv: &mut R,
        op: impl Into<Reduction<S::Elem>>,
        root: usize,
    ) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        self.run_call(&self.shape().reduce(send, recv, op.into(), root)?)
    }

    /// [`reduce`](Comm::reduce) of one buffer, which is written at the root only.
    pub fn reduce_in_place<R>(
        &self,
        buf: &mut R,
        op: impl Into<Reduction<R::Elem>>,
        root: usize,
    ) -> Result<()>
    where
        R: Target + ?Sized,
    {
        self.run_call(&self.shape().reduce_in_place(buf, op.into(), root)?)
    }

    /// Puts all ranks' buffers one behind the other, in rank order; everybody gets the result.
    ///
    /// `recv.len() == world_size × send.len()`. `ncclAllGather`, `MPI_Allgather`.
    pub fn all_gather<S, R>(&self, send: &S, recv: &mut R) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        self.run_call(&self.shape().all_gather(send, recv)?)
    }

    /// [`all_gather`](Comm::all_gather) with this rank's block already at `rank × len / world_size`.
    pub fn all_gather_in_place<R: Target + ?Sized>(&self, buf: &mut R) -> Result<()> {
        self.run_call(&self.shape().all_gather_in_place(buf)?)
    }

    /// [`all_gather`](Comm::all_gather) of blocks of different lengths.
    ///
    /// `counts` has every rank's length, the same list on every rank; `send.len() == counts[rank]`,
    /// `recv.len()` is their sum. `MPI_Allgatherv`.
    pub fn all_gather_v<S, R>(&self, send: &S, recv: &mut R, counts: &[usize]) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        self.run_call(&self.shape().all_gather_v(send, recv, counts)?)
    }

    /// Combines all ranks' buffers; each rank gets its block of the result.
    ///
    /// `send.len() == world_size × recv.len()`. `ncclReduceScatter`, `MPI_Reduce_scatter_block`.
    pub fn reduce_scatter<S, R>(
        &self,
        send: &S,
        recv: &mut R,
        op: impl Into<Reduction<S::Elem>>,
    ) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        self.run_call(&self.shape().reduce_scatter(send, recv, op.into())?)
    }

    /// [`reduce_scatter`](Comm::reduce_scatter) of one buffer. The result is in this rank's block, at
    /// `rank × len / world_size`; the other blocks keep what they held.
    pub fn reduce_scatter_in_place<R>(&self, buf: &mut R, op: impl Into<Reduction<R::Elem>>) -> Result<()>
    where
        R: Target + ?Sized,
    {
        self.run_call(&self.shape().reduce_scatter_in_place(buf, op.into())?)
    }

    /// [`reduce_scatter`](Comm::reduce_scatter) into blocks of different lengths.
    ///
    /// `counts` has every rank's length, the same list on every rank; `recv.len() == counts[rank]`,
    /// `send.len()` is their sum. `MPI_Reduce_scatter`.
    pub fn reduce_scatter_v<S, R>(
        &self,
        send: &S,
        recv: &mut R,
        counts: &[usize],
        op: impl Into<Reduction<S::Elem>>,
    ) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        self.run_call(&self.shape().reduce_scatter_v(send, recv, counts, op.into())?)
    }

    /// Every rank gives every rank a block: block `j` of rank `i` becomes block `i` of rank `j`.
    ///
    /// `send.len() == recv.len()`, a multiple of the number of ranks. `ncclAlltoAll`, `MPI_Alltoall`.
    pub fn all_to_all<S, R>(&self, send: &S, recv: &mut R) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        self.run_call(&self.shape().all_to_all(send, recv)?)
    }

    /// [`all_to_all`](Comm::all_to_all) of one buffer.
    pub fn all_to_all_in_place<R: Target + ?Sized>(&self, buf: &mut R) -> Result<()> {
        self.run_call(&self.shape().all_to_all_in_place(buf)?)
    }

    /// [`all_to_all`](Comm::all_to_all) of blocks of different lengths.
    ///
    /// `send_counts[j]` elements go to rank `j`, `recv_counts[i]` come from rank `i`, which must be what
    /// rank `i` gives as its `send_counts` for this rank. `MPI_Alltoallv`.
    pub fn all_to_all_v<S, R>(
        &self,
        send: &S,
        send_counts: &[usize],
        recv: &mut R,
        recv_counts: &[usize],
    ) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        self.run_call(&self.shape().all_to_all_v(send, send_counts, recv, recv_counts)?)
    }

    /// Puts all ranks' buffers one behind the other, in rank order, at the root.
    ///
    /// `recv` is used at the root only, where `recv.len() == world_size × send.len()` (others may pass
    /// `&mut []`). `ncclGather`, `MPI_Gather`.
    pub fn gather<S, R>(&self, send: &S, recv: &mut R, root: usize) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        self.run_call(&self.shape().gather(send, recv, root)?)
    }

    /// [`gather`](Comm::gather) of one buffer, as long on every rank as at the root, with this rank's block
    /// at `rank × len / world_size`. Written at the root only.
    pub fn gather_in_place<R: Target + ?Sized>(&self, buf: &mut R, root: usize) -> Result<()> {
        self.run_call(&self.shape().gather_in_place(buf, root)?)
    }

    /// [`gather`](Comm::gather) of blocks of different lengths: `counts` as in
    /// [`all_gather_v`](Comm::all_gather_v), the same list on every rank. `MPI_Gatherv`.
    pub fn gather_v<S, R>(&self, send: &S, recv: &mut R, counts: &[usize], root: usize) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        self.run_call(&self.shape().gather_v(send, recv, counts, root)?)
    }

    /// Gives each rank its block of the root's buffer.
    ///
    /// `send` is read at the root only, where `send.len() == world_size × recv.len()` (others may pass
    /// `&[]`). `ncclScatter`, `MPI_Scatter`.
    pub fn scatter<S, R>(&self, send: &S, recv: &mut R, root: usize) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        self.run_call(&self.shape().scatter(send, recv, root)?)
    }

    /// [`scatter`](Comm::scatter) of one buffer, as long on every rank as at the root; this rank's block
    /// comes to `rank × len / world_size`.
    pub fn scatter_in_place<R: Target + ?Sized>(&self, buf: &mut R, root: usize) -> Result<()> {
        self.run_call(&self.shape().scatter_in_place(buf, root)?)
    }

    /// [`scatter`](Comm::scatter) of blocks of different lengths: `counts` as in
    /// [`reduce_scatter_v`](Comm::reduce_scatter_v), the same list on every rank. `MPI_Scatterv`.
    pub fn scatter_v<S, R>(&self, send: &S, counts: &[usize], recv: &mut R, root: usize) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        self.run_call(&self.shape().scatter_v(send, counts, recv, root)?)
    }

    /// Waits until every rank has come here. `MPI_Barrier`.
    pub fn barrier(&self) -> Result<()> {
        self.run_call(&Call::empty(Operation::Barrier))
    }
}
