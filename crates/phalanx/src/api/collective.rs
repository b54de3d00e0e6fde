//! The collectives of [`Comm`]: every check on their arguments, once, and the methods.

use super::comm::Comm;
use crate::buffer::loan::Loan;
use crate::buffer::stream::Stream;
use crate::buffer::{Source, Target};
use crate::contract::{Blocks, Call, Operation, Shape};
use crate::types::dtype::Element;
use crate::types::error::{Result, UsageError};
use crate::types::op::Reduction;

/// The most elements that lists of counts may add up to: their length in bytes is a number, whatever the type.
const MOST_ELEMENTS: usize = isize::MAX as usize / 8;

/// The blocks' total length, if every rank's is given. What a rank does not hold itself, and so has not the memory for, counts too.
fn total(operation: &'static str, counts: &[usize]) -> Result<usize> {
    let sum = counts.iter().try_fold(0usize, |sum, count| sum.checked_add(*count));
    sum.filter(|sum| *sum <= MOST_ELEMENTS).ok_or_else(|| {
        let largest = (0..counts.len()).max_by_key(|rank| counts[*rank]).unwrap_or(0);
        let value = format!(
            "the sum of {} counts; the largest is counts[{largest}] = {}",
            counts.len(),
            counts[largest]
        );
        UsageError::Overflow { operation, what: "the total count", value, limit: MOST_ELEMENTS.to_string() }
            .into()
    })
}

#[inline(always)]
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
    #[inline(always)]
    pub fn check_rank(&self, operation: &'static str, role: &'static str, rank: usize) -> Result<()> {
        let world_size = self.world_size;
        if rank < world_size {
            Ok(())
        } else {
            Err(UsageError::Rank { operation, role, rank, world_size }.into())
        }
    }

    /// The length of a block, if `len` elements are one for each rank.
    #[inline(always)]
    fn share(&self, operation: &'static str, buffer: &'static str, len: usize) -> Result<usize> {
        let world_size = self.world_size;
        if len.is_multiple_of(world_size) {
            Ok(len / world_size)
        } else {
            Err(UsageError::Indivisible { operation, buffer, actual: len, world_size }.into())
        }
    }

    #[inline(always)]
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

    #[inline(always)]
    pub fn all_reduce(&self, send: usize, recv: usize) -> Result<Call<'static>> {
        same_len("all_reduce", "recv", recv, send, "as many as the send buffer")?;
        Ok(self.whole(Operation::AllReduce, send))
    }

    #[inline(always)]
    pub fn broadcast(&self, send: usize, recv: usize, root: usize) -> Result<Call<'static>> {
        self.check_rank("broadcast", "root", root)?;
        if root == self.rank {
            same_len("broadcast", "send", send, recv, "as many as the recv buffer, at the root")?;
        }
        Ok(self.whole(Operation::Broadcast, recv).rooted(root))
    }

    #[inline(always)]
    pub fn reduce(&self, send: usize, recv: usize, root: usize) -> Result<Call<'static>> {
        self.check_rank("reduce", "root", root)?;
        if root == self.rank {
            same_len("reduce", "recv", recv, send, "as many as the send buffer, at the root")?;
        }
        Ok(self.whole(Operation::Reduce, send).rooted(root))
    }

    /// An operation on buffers that are one block each; all that can be wrong with them in place is the root.
    #[inline(always)]
    pub fn whole(&self, operation: Operation, len: usize) -> Call<'static> {
        let blocks = Blocks::Equal(len);
        Call { blocks, recv_blocks: blocks, ..Call::empty(operation) }
    }

    #[inline(always)]
    pub fn whole_in_place(&self, operation: Operation, len: usize, root: usize) -> Result<Call<'static>> {
        self.check_rank(operation.name(), "root", root)?;
        Ok(self.whole(operation, len).rooted(root))
    }

    // --- equal blocks ---------------------------------------------------------------------------------

    #[inline(always)]
    pub fn all_gather(&self, send: usize, recv: usize) -> Result<Call<'static>> {
        let expected = self.all_blocks("all_gather", send)?;
        same_len("all_gather", "recv", recv, expected, "ranks × the send buffer")?;
        Ok(self.whole(Operation::AllGather, send))
    }

    #[inline(always)]
    pub fn gather(&self, send: usize, recv: usize, root: usize) -> Result<Call<'static>> {
        self.check_rank("gather", "root", root)?;
        if root == self.rank {
            let expected = self.all_blocks("gather", send)?;
            same_len("gather", "recv", recv, expected, "ranks × the send buffer, at the root")?;
        }
        Ok(self.whole(Operation::Gather, send).rooted(root))
    }

    #[inline(always)]
    pub fn reduce_scatter(&self, send: usize, recv: usize) -> Result<Call<'static>> {
        let expected = self.all_blocks("reduce_scatter", recv)?;
        same_len("reduce_scatter", "send", send, expected, "ranks × the recv buffer")?;
        Ok(self.whole(Operation::ReduceScatter, recv))
    }

    #[inline(always)]
    pub fn scatter(&self, send: usize, recv: usize, root: usize) -> Result<Call<'static>> {
        self.check_rank("scatter", "root", root)?;
        if root == self.rank {
            let expected = self.all_blocks("scatter", recv)?;
            same_len("scatter", "send", send, expected, "ranks × the recv buffer, at the root")?;
        }
        Ok(self.whole(Operation::Scatter, recv).rooted(root))
    }

    #[inline(always)]
    pub fn all_to_all(&self, send: usize, recv: usize) -> Result<Call<'static>> {
        let block = self.share("all_to_all", "send", send)?;
        same_len("all_to_all", "recv", recv, send, "as many as the send buffer")?;
        Ok(self.whole(Operation::AllToAll, block))
    }

    /// One buffer of `len` elements, which holds all ranks' blocks.
    #[inline(always)]
    pub fn blocks_in_place(&self, operation: Operation, len: usize, root: usize) -> Result<Call<'static>> {
        self.check_rank(operation.name(), "root", root)?;
        let block = self.share(operation.name(), "in-place", len)?;
        Ok(self.whole(operation, block).rooted(root))
    }

    // --- blocks of different lengths ------------------------------------------------------------------

    pub fn all_gather_v<'a>(&self, send: usize, recv: usize, counts: &'a [usize]) -> Result<Call<'a>> {
        let operation = "all_gather_v";
        self.check_counts(operation, "counts", counts)?;
        same_len(operation, "send", send, counts[self.rank], "counts[rank]")?;
        same_len(operation, "recv", recv, total(operation, counts)?, "the sum of the counts")?;
        Ok(each(Operation::AllGatherV, counts))
    }

    pub fn gather_v<'a>(
        &self,
        send: usize,
        recv: usize,
        counts: &'a [usize],
        root: usize,
    ) -> Result<Call<'a>> {
        let operation = "gather_v";
        self.check_rank(operation, "root", root)?;
        self.check_counts(operation, "counts", counts)?;
        same_len(operation, "send", send, counts[self.rank], "counts[rank]")?;
        let all = total(operation, counts)?;
        if root == self.rank {
            same_len(operation, "recv", recv, all, "the sum of the counts, at the root")?;
        }
        Ok(each(Operation::GatherV, counts).rooted(root))
    }

    pub fn scatter_v<'a>(
        &self,
        send: usize,
        recv: usize,
        counts: &'a [usize],
        root: usize,
    ) -> Result<Call<'a>> {
        let operation = "scatter_v";
        self.check_rank(operation, "root", root)?;
        self.check_counts(operation, "counts", counts)?;
        same_len(operation, "recv", recv, counts[self.rank], "counts[rank]")?;
        let all = total(operation, counts)?;
        if root == self.rank {
            same_len(operation, "send", send, all, "the sum of the counts, at the root")?;
        }
        Ok(each(Operation::ScatterV, counts).rooted(root))
    }

    pub fn reduce_scatter_v<'a>(&self, send: usize, recv: usize, counts: &'a [usize]) -> Result<Call<'a>> {
        let operation = "reduce_scatter_v";
        self.check_counts(operation, "counts", counts)?;
        same_len(operation, "recv", recv, counts[self.rank], "counts[rank]")?;
        same_len(operation, "send", send, total(operation, counts)?, "the sum of the counts")?;
        Ok(each(Operation::ReduceScatterV, counts))
    }

    pub fn all_to_all_v<'a>(
        &self,
        send: usize,
        send_counts: &'a [usize],
        recv: usize,
        recv_counts: &'a [usize],
    ) -> Result<Call<'a>> {
        let operation = "all_to_all_v";
        self.check_counts(operation, "send counts", send_counts)?;
        self.check_counts(operation, "recv counts", recv_counts)?;
        same_len(operation, "send", send, total(operation, send_counts)?, "the sum of the send counts")?;
        same_len(operation, "recv", recv, total(operation, recv_counts)?, "the sum of the recv counts")?;
        let (own_sent, own_received) = (send_counts[self.rank], recv_counts[self.rank]);
        same_len(
            operation,
            "own block of the recv",
            own_received,
            own_sent,
            "send_counts[rank], what this rank gives itself",
        )?;
        Ok(Call { recv_blocks: Blocks::Each(recv_counts), ..each(Operation::AllToAllV, send_counts) })
    }

    /// One buffer of `len` elements, which holds all ranks' blocks.
    pub fn blocks_in_place_v<'a>(
        &self,
        operation: Operation,
        len: usize,
        counts: &'a [usize],
        root: usize,
    ) -> Result<Call<'a>> {
        let name = operation.name();
        self.check_rank(name, "root", root)?;
        self.check_counts(name, "counts", counts)?;
        same_len(name, "in-place", len, total(name, counts)?, "the sum of the counts")?;
        Ok(each(operation, counts).rooted(root))
    }
}

#[inline(always)]
fn each(operation: Operation, counts: &[usize]) -> Call<'_> {
    let blocks = Blocks::Each(counts);
    Call { blocks, recv_blocks: blocks, ..Call::empty(operation) }
}

impl<'a> Call<'a> {
    #[inline(always)]
    fn rooted(self, root: usize) -> Call<'a> {
        Call { root, ..self }
    }

    #[inline(always)]
    pub(crate) fn reducing<T>(self, reduction: impl Into<Reduction<T>>) -> Call<'a>
    where
        T: Element,
    {
        Call { reduction: reduction.into().into(), ..self }
    }

    /// With its buffers.
    #[inline(always)]
    pub(crate) fn between<T: Element>(self, send: &Loan<'_>, recv: &Loan<'_>, lane: &Stream) -> Call<'a> {
        Call { dtype: T::DTYPE, stream: lane.stream(), ..self }.with_buffers(send.span(), recv.span())
    }

    /// With one buffer: the smaller of the two is `rank`'s block in the larger.
    #[inline(always)]
    pub(crate) fn inside<T: Element>(self, buffer: &Loan<'_>, lane: &Stream, rank: usize) -> Call<'a> {
        use Operation::*;
        let whole = buffer.span();
        let own = || whole.at(self.blocks.offset(rank) * size_of::<T>());
        let (send, recv) = match self.operation {
            AllGather | Gather | AllGatherV | GatherV => (own(), whole),
            ReduceScatter | Scatter | ReduceScatterV | ScatterV => (whole, own()),
            _ => (whole, whole),
        };
        Call { dtype: T::DTYPE, stream: lane.stream(), ..self }.with_buffers(send, recv)
    }
}

/// # Collectives
///
/// Every rank of the communicator makes the same calls in the same order; a difference (operation, count,
/// type, reduction, root) is an error on every rank, in that operation or, where two ranks have nothing to hear from each
/// other in it (two that are both the root of a broadcast), in the next. Lengths are in elements and are checked before
/// anything starts. On the host an operation is complete when it returns. A root may return before the
/// others have arrived.
///
/// `…_in_place` works on one buffer (`MPI_IN_PLACE`); blocks are then at the places they have in the larger buffer. Those of a v-variant
/// lie one behind the other, in rank order: rank `r`'s begins behind `counts[..r].iter().sum()` elements.
impl Comm {
    /// Lends the buffers to a checked call and carries it out.
    #[inline(always)]
    fn out_of_place<S, R>(&self, call: Call<'_>, send: &S, recv: &mut R) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        let (send, recv) = (send.lend(&self.lane)?, recv.lend_mut(&self.lane)?);
        self.run_call(&call.between::<S::Elem>(&send, &recv, &self.lane).configured(&self.lane))
    }

    #[inline(always)]
    fn in_place<R: Target + ?Sized>(&self, call: Call<'_>, buf: &mut R) -> Result<()> {
        let lent = buf.lend_mut(&self.lane)?;
        self.run_call(&call.inside::<R::Elem>(&lent, &self.lane, self.rank()).configured(&self.lane))
    }

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
        let call = self.shape().all_reduce(send.len(), recv.len())?;
        self.out_of_place(call.reducing(op), send, recv)
    }

    /// [`all_reduce`](Comm::all_reduce) of one buffer.
    pub fn all_reduce_in_place<R>(&self, buf: &mut R, op: impl Into<Reduction<R::Elem>>) -> Result<()>
    where
        R: Target + ?Sized,
    {
        self.in_place(self.shape().whole(Operation::AllReduce, buf.len()).reducing(op), buf)
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
        self.out_of_place(self.shape().broadcast(send.len(), recv.len(), root)?, send, recv)
    }

    /// [`broadcast`](Comm::broadcast) of one buffer: read at the root, written elsewhere.
    pub fn broadcast_in_place<R: Target + ?Sized>(&self, buf: &mut R, root: usize) -> Result<()> {
        self.in_place(self.shape().whole_in_place(Operation::Broadcast, buf.len(), root)?, buf)
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
        let call = self.shape().reduce(send.len(), recv.len(), root)?;
        self.out_of_place(call.reducing(op), send, recv)
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
        let call = self.shape().whole_in_place(Operation::Reduce, buf.len(), root)?;
        self.in_place(call.reducing(op), buf)
    }

    /// Puts all ranks' buffers one behind the other, in rank order; everybody gets the result.
    ///
    /// `recv.len() == world_size × send.len()`. `ncclAllGather`, `MPI_Allgather`.
    pub fn all_gather<S, R>(&self, send: &S, recv: &mut R) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        self.out_of_place(self.shape().all_gather(send.len(), recv.len())?, send, recv)
    }

    /// [`all_gather`](Comm::all_gather) with this rank's block already at `rank × len / world_size`.
    pub fn all_gather_in_place<R: Target + ?Sized>(&self, buf: &mut R) -> Result<()> {
        self.in_place(self.shape().blocks_in_place(Operation::AllGather, buf.len(), 0)?, buf)
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
        self.out_of_place(self.shape().all_gather_v(send.len(), recv.len(), counts)?, send, recv)
    }

    /// [`all_gather_v`](Comm::all_gather_v) of one buffer, whose length is the sum of the counts, with this rank's block already at its
    /// place.
    pub fn all_gather_v_in_place<R: Target + ?Sized>(&self, buf: &mut R, counts: &[usize]) -> Result<()> {
        self.in_place(self.shape().blocks_in_place_v(Operation::AllGatherV, buf.len(), counts, 0)?, buf)
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
        let call = self.shape().reduce_scatter(send.len(), recv.len())?;
        self.out_of_place(call.reducing(op), send, recv)
    }

    /// [`reduce_scatter`](Comm::reduce_scatter) of one buffer. The result is in this rank's block, at
    /// `rank × len / world_size`; the other blocks keep what they held.
    pub fn reduce_scatter_in_place<R>(&self, buf: &mut R, op: impl Into<Reduction<R::Elem>>) -> Result<()>
    where
        R: Target + ?Sized,
    {
        let call = self.shape().blocks_in_place(Operation::ReduceScatter, buf.len(), 0)?;
        self.in_place(call.reducing(op), buf)
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
        let call = self.shape().reduce_scatter_v(send.len(), recv.len(), counts)?;
        self.out_of_place(call.reducing(op), send, recv)
    }

    /// [`reduce_scatter_v`](Comm::reduce_scatter_v) of one buffer, whose length is the sum of the counts. The result is in this
    /// rank's block; the other blocks keep what they held.
    pub fn reduce_scatter_v_in_place<R>(
        &self,
        buf: &mut R,
        counts: &[usize],
        op: impl Into<Reduction<R::Elem>>,
    ) -> Result<()>
    where
        R: Target + ?Sized,
    {
        let call = self.shape().blocks_in_place_v(Operation::ReduceScatterV, buf.len(), counts, 0)?;
        self.in_place(call.reducing(op), buf)
    }

    /// Every rank gives every rank a block: block `j` of rank `i` becomes block `i` of rank `j`.
    ///
    /// `send.len() == recv.len()`, a multiple of the number of ranks. `ncclAlltoAll`, `MPI_Alltoall`.
    pub fn all_to_all<S, R>(&self, send: &S, recv: &mut R) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        self.out_of_place(self.shape().all_to_all(send.len(), recv.len())?, send, recv)
    }

    /// [`all_to_all`](Comm::all_to_all) of one buffer.
    pub fn all_to_all_in_place<R: Target + ?Sized>(&self, buf: &mut R) -> Result<()> {
        self.in_place(self.shape().blocks_in_place(Operation::AllToAll, buf.len(), 0)?, buf)
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
        let call = self.shape().all_to_all_v(send.len(), send_counts, recv.len(), recv_counts)?;
        self.out_of_place(call, send, recv)
    }

    /// [`all_to_all_v`](Comm::all_to_all_v) of one buffer, whose length is the sum of the counts: what this rank gives to rank `p` makes
    /// room for what comes from there, so both have `counts[p]` elements.
    ///
    /// Every rank has a list of its own, in which `counts[p]` is what rank `p` has for this rank; two that differ are an error that names
    /// both, as in `all_to_all_v`. What is sent is first copied: on the host as many blocks at a time as have room in 1 MiB, or
    /// one that is longer, elsewhere all of them.
    pub fn all_to_all_v_in_place<R: Target + ?Sized>(&self, buf: &mut R, counts: &[usize]) -> Result<()> {
        self.in_place(self.shape().blocks_in_place_v(Operation::AllToAllV, buf.len(), counts, 0)?, buf)
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
        self.out_of_place(self.shape().gather(send.len(), recv.len(), root)?, send, recv)
    }

    /// [`gather`](Comm::gather) of one buffer, as long on every rank as at the root, with this rank's block
    /// at `rank × len / world_size`. Written at the root only.
    pub fn gather_in_place<R: Target + ?Sized>(&self, buf: &mut R, root: usize) -> Result<()> {
        self.in_place(self.shape().blocks_in_place(Operation::Gather, buf.len(), root)?, buf)
    }

    /// [`gather`](Comm::gather) of blocks of different lengths: `counts` as in
    /// [`all_gather_v`](Comm::all_gather_v), the same list on every rank. `MPI_Gatherv`.
    pub fn gather_v<S, R>(&self, send: &S, recv: &mut R, counts: &[usize], root: usize) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        self.out_of_place(self.shape().gather_v(send.len(), recv.len(), counts, root)?, send, recv)
    }

    /// [`gather_v`](Comm::gather_v) of one buffer, whose length is the sum of the counts on every rank as at the root, with this rank's
    /// block at its place. Written at the root only.
    pub fn gather_v_in_place<R: Target + ?Sized>(
        &self,
        buf: &mut R,
        counts: &[usize],
        root: usize,
    ) -> Result<()> {
        self.in_place(self.shape().blocks_in_place_v(Operation::GatherV, buf.len(), counts, root)?, buf)
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
        self.out_of_place(self.shape().scatter(send.len(), recv.len(), root)?, send, recv)
    }

    /// [`scatter`](Comm::scatter) of one buffer, as long on every rank as at the root; this rank's block
    /// comes to `rank × len / world_size`.
    pub fn scatter_in_place<R: Target + ?Sized>(&self, buf: &mut R, root: usize) -> Result<()> {
        self.in_place(self.shape().blocks_in_place(Operation::Scatter, buf.len(), root)?, buf)
    }

    /// [`scatter`](Comm::scatter) of blocks of different lengths: `counts` as in
    /// [`reduce_scatter_v`](Comm::reduce_scatter_v), the same list on every rank. `MPI_Scatterv`.
    pub fn scatter_v<S, R>(&self, send: &S, counts: &[usize], recv: &mut R, root: usize) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        self.out_of_place(self.shape().scatter_v(send.len(), recv.len(), counts, root)?, send, recv)
    }

    /// [`scatter_v`](Comm::scatter_v) of one buffer, whose length is the sum of the counts on every rank as at the root; this rank's block
    /// comes to its place, and what the others hold elsewhere stays.
    pub fn scatter_v_in_place<R: Target + ?Sized>(
        &self,
        buf: &mut R,
        counts: &[usize],
        root: usize,
    ) -> Result<()> {
        self.in_place(self.shape().blocks_in_place_v(Operation::ScatterV, buf.len(), counts, root)?, buf)
    }

    /// Waits until every rank has come here. `MPI_Barrier`.
    pub fn barrier(&self) -> Result<()> {
        self.run_call(&Call::empty(Operation::Barrier))
    }
}
