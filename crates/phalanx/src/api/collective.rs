//! The collectives of [`Comm`].

use super::comm::Comm;
use crate::buffer::{Source, Target};
use crate::contract::{Call, Operation};
use crate::types::error::Result;
use crate::types::op::Reduction;

/// # Collectives
///
/// - Every rank of the communicator makes the same calls in the same order. A difference (operation, count, type, reduction,
///   root) is an error on every rank, in that operation or in the next. It is the next if two ranks exchange nothing in the
///   first, such as two that are both the root of a broadcast.
/// - Lengths are in elements and are checked before anything starts.
/// - On the host an operation is complete when it returns. A root may return before the others have arrived.
///
/// `…_in_place` works on one buffer (`MPI_IN_PLACE`), in which each rank's block is at its place of the larger buffer. The
/// blocks of a v-variant are contiguous and in rank order: rank `r`'s begins at element `counts[..r].iter().sum()`.
impl Comm {
    /// Borrows the buffers for a checked call and carries it out.
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
        let loan = buf.lend_mut(&self.lane)?;
        self.run_call(&call.inside::<R::Elem>(&loan, &self.lane, self.rank()).configured(&self.lane))
    }

    /// Combines all ranks' buffers; every rank gets the result.
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

    /// Copies the root's buffer to every rank.
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

    /// Concatenates all ranks' buffers in rank order; every rank gets the result.
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

    /// Exchanges blocks between all ranks: block `j` of rank `i` becomes block `i` of rank `j`.
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
    /// `send_counts[j]` elements go to rank `j`, and `recv_counts[i]` come from rank `i`. The latter must equal rank `i`'s
    /// `send_counts` for this rank. `MPI_Alltoallv`.
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

    /// [`all_to_all_v`](Comm::all_to_all_v) of one buffer, whose length is the sum of the counts. The block from rank `p` replaces
    /// the block for rank `p`, so both have `counts[p]` elements.
    ///
    /// Every rank has its own list, in which `counts[p]` equals rank `p`'s count for this rank. If two differ, the error names both,
    /// as in `all_to_all_v`. Sent blocks are copied first: on the host as many at a time as fit 1 MiB (or one longer block),
    /// on other backends all of them.
    pub fn all_to_all_v_in_place<R: Target + ?Sized>(&self, buf: &mut R, counts: &[usize]) -> Result<()> {
        self.in_place(self.shape().blocks_in_place_v(Operation::AllToAllV, buf.len(), counts, 0)?, buf)
    }

    /// Concatenates all ranks' buffers in rank order at the root.
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

    /// Distributes the root's buffer: each rank gets its block.
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
    /// is written at `rank × len / world_size`.
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
    /// is written at its place, and the rest of its buffer stays as it was.
    pub fn scatter_v_in_place<R: Target + ?Sized>(
        &self,
        buf: &mut R,
        counts: &[usize],
        root: usize,
    ) -> Result<()> {
        self.in_place(self.shape().blocks_in_place_v(Operation::ScatterV, buf.len(), counts, root)?, buf)
    }

    /// Waits until every rank has called it. `MPI_Barrier`.
    pub fn barrier(&self) -> Result<()> {
        self.run_call(&Call::empty(Operation::Barrier))
    }
}
