//! The collectives of [`Comm`], of [`CommGroup`] and of `SharedComm`: one table, from which all have their methods.
//!
//! A new collective is a row here and a check in `checks.rs`. The `start_…` methods (`request/`) own their buffers and the methods of
//! [`RawCommunicator`](crate::RawCommunicator) have none, so both are written by hand.

use super::comm::Comm;
use super::group::CommGroup;
use crate::buffer::{Output, Source, Target};
use crate::contract::{Call, Operation};
use crate::types::error::Result;
use crate::types::op::Reduction;

/// Expands `$methods` on the table. A row has the documentation, the name, the parameters by name, and what a front (`comm`) does:
/// it checks the arguments and hands the call on with the buffers.
macro_rules! collectives {
    ($methods:ident) => {
        $methods! {
            /// Combines all ranks' buffers; every rank gets the result.
            ///
            /// `recv.len() == send.len()`, the same on every rank. NCCL's `ncclAllReduce`, MPI's `MPI_Allreduce`.
            ///
            /// ```
            /// # fn main() -> phalanx::Result<()> {
            /// let sums = phalanx::try_run(3, |comm| -> phalanx::Result<i32> {
            ///     let mut sum = [0];
            ///     comm.all_reduce(&[comm.rank() as i32], &mut sum, phalanx::ReduceOp::Sum)?;
            ///     Ok(sum[0])
            /// })?;
            /// assert_eq!(sums, [3, 3, 3]);
            /// # Ok(())
            /// # }
            /// ```
            #[doc(alias("MPI_Allreduce", "ncclAllReduce"))]
            all_reduce<S, R>(send, recv, op) |comm|
                comm.out_of_place(comm.shape().all_reduce(send.len(), recv.output_len())?.reducing(op), send, recv);

            /// [`all_reduce`](Comm::all_reduce) of one buffer.
            #[doc(alias = "MPI_IN_PLACE")]
            all_reduce_in_place<R>(buf, op) |comm|
                comm.in_place(comm.shape().whole(Operation::AllReduce, buf.len()).reducing(op), buf);

            /// Copies the root's buffer to every rank.
            ///
            /// `recv` has the same length on every rank; `send` is read at the root only, where it has that length
            /// too (others may pass `&[]`). `ncclBroadcast`, `MPI_Bcast`.
            #[doc(alias("MPI_Bcast", "ncclBroadcast"))]
            broadcast<S, R>(send, recv, root) |comm|
                comm.out_of_place(comm.shape().broadcast(send.len(), recv.output_len(), root)?, send, recv);

            /// [`broadcast`](Comm::broadcast) of one buffer: read at the root, written elsewhere.
            #[doc(alias = "ncclBcast")]
            broadcast_in_place<R>(buf, root) |comm|
                comm.in_place(comm.shape().whole_in_place(Operation::Broadcast, buf.len(), root)?, buf);

            /// Combines all ranks' buffers; the root gets the result.
            ///
            /// `recv` is used at the root only, where `recv.len() == send.len()` (others may pass `&mut []`).
            /// `ncclReduce`, `MPI_Reduce`.
            #[doc(alias("MPI_Reduce", "ncclReduce"))]
            reduce<S, R>(send, recv, op, root) |comm|
                comm.out_of_place(comm.shape().reduce(send.len(), recv.output_len(), root)?.reducing(op), send, recv);

            /// [`reduce`](Comm::reduce) of one buffer, which is written at the root only.
            reduce_in_place<R>(buf, op, root) |comm|
                comm.in_place(comm.shape().whole_in_place(Operation::Reduce, buf.len(), root)?.reducing(op), buf);

            /// Combines the buffers of the ranks up to this one: rank `r` gets `x0 ∘ x1 ∘ … ∘ xr`, in rank order.
            ///
            /// `recv.len() == send.len()`, the same on every rank. For [`ReduceOp::Avg`](crate::ReduceOp::Avg) it is their mean. Host memory
            /// only, on every backend. `MPI_Scan`.
            ///
            /// ```
            /// # fn main() -> phalanx::Result<()> {
            /// let firsts = phalanx::try_run(3, |comm| -> phalanx::Result<u64> {
            ///     // Each rank has some lines of a file. Which number has its first?
            ///     let lines = 10 + comm.rank() as u64;
            ///     let mut end = [0];
            ///     comm.scan(&[lines], &mut end, phalanx::ReduceOp::Sum)?;
            ///     Ok(end[0] - lines)
            /// })?;
            /// assert_eq!(firsts, [0, 10, 21]);
            /// # Ok(())
            /// # }
            /// ```
            #[doc(alias = "MPI_Scan")]
            scan<S, R>(send, recv, op) |comm|
                comm.out_of_place(comm.shape().scan(Operation::Scan, send.len(), recv.output_len())?.reducing(op), send, recv);

            /// [`scan`](Comm::scan) of one buffer.
            scan_in_place<R>(buf, op) |comm|
                comm.in_place(comm.shape().whole(Operation::Scan, buf.len()).reducing(op), buf);

            /// Combines the buffers of the ranks before this one: rank `r` gets `x0 ∘ x1 ∘ … ∘ x(r-1)`. Rank 0 gets nothing: its `recv`
            /// stays as it was.
            ///
            /// Otherwise as [`scan`](Comm::scan). `MPI_Exscan`.
            #[doc(alias = "MPI_Exscan")]
            exclusive_scan<S, R>(send, recv, op) |comm|
                comm.out_of_place(comm.shape().scan(Operation::ExclusiveScan, send.len(), recv.output_len())?.reducing(op), send, recv);

            /// [`exclusive_scan`](Comm::exclusive_scan) of one buffer.
            exclusive_scan_in_place<R>(buf, op) |comm|
                comm.in_place(comm.shape().whole(Operation::ExclusiveScan, buf.len()).reducing(op), buf);

            /// Concatenates all ranks' buffers in rank order; every rank gets the result.
            ///
            /// `recv.len() == world_size × send.len()`. `ncclAllGather`, `MPI_Allgather`.
            #[doc(alias("MPI_Allgather", "ncclAllGather", "all_gather_into_tensor"))]
            all_gather<S, R>(send, recv) |comm|
                comm.out_of_place(comm.shape().all_gather(send.len(), recv.output_len())?, send, recv);

            /// [`all_gather`](Comm::all_gather) with this rank's block already at `rank × len / world_size`.
            all_gather_in_place<R>(buf) |comm|
                comm.in_place(comm.shape().blocks_in_place(Operation::AllGather, buf.len(), 0)?, buf);

            /// [`all_gather`](Comm::all_gather) of blocks of different lengths.
            ///
            /// `counts` has every rank's length, the same list on every rank; `send.len() == counts[rank]`,
            /// `recv.len()` is their sum. `MPI_Allgatherv`.
            #[doc(alias = "MPI_Allgatherv")]
            all_gather_v<S, R>(send, recv, counts) |comm|
                comm.out_of_place(comm.shape().all_gather_v(send.len(), recv.output_len(), counts)?, send, recv);

            /// [`all_gather_v`](Comm::all_gather_v) of one buffer, whose length is the sum of the counts, with this rank's block already at its
            /// place.
            all_gather_v_in_place<R>(buf, counts) |comm|
                comm.in_place(comm.shape().blocks_in_place_v(Operation::AllGatherV, buf.len(), counts, 0)?, buf);

            /// Combines all ranks' buffers; each rank gets its block of the result.
            ///
            /// `send.len() == world_size × recv.len()`. `ncclReduceScatter`, `MPI_Reduce_scatter_block`.
            #[doc(alias("MPI_Reduce_scatter_block", "ncclReduceScatter", "reduce_scatter_tensor"))]
            reduce_scatter<S, R>(send, recv, op) |comm|
                comm.out_of_place(comm.shape().reduce_scatter(send.len(), recv.output_len())?.reducing(op), send, recv);

            /// [`reduce_scatter`](Comm::reduce_scatter) of one buffer. The result is in this rank's block, at
            /// `rank × len / world_size`; the other blocks keep what they held.
            reduce_scatter_in_place<R>(buf, op) |comm|
                comm.in_place(comm.shape().blocks_in_place(Operation::ReduceScatter, buf.len(), 0)?.reducing(op), buf);

            /// [`reduce_scatter`](Comm::reduce_scatter) into blocks of different lengths.
            ///
            /// `counts` has every rank's length, the same list on every rank; `recv.len() == counts[rank]`,
            /// `send.len()` is their sum. `MPI_Reduce_scatter`.
            #[doc(alias = "MPI_Reduce_scatter")]
            reduce_scatter_v<S, R>(send, recv, counts, op) |comm|
                comm.out_of_place(comm.shape().reduce_scatter_v(send.len(), recv.output_len(), counts)?.reducing(op), send, recv);

            /// [`reduce_scatter_v`](Comm::reduce_scatter_v) of one buffer, whose length is the sum of the counts. The result is in this
            /// rank's block; the other blocks keep what they held.
            reduce_scatter_v_in_place<R>(buf, counts, op) |comm|
                comm.in_place(comm.shape().blocks_in_place_v(Operation::ReduceScatterV, buf.len(), counts, 0)?.reducing(op), buf);

            /// Exchanges blocks between all ranks: block `j` of rank `i` becomes block `i` of rank `j`.
            ///
            /// `send.len() == recv.len()`, a multiple of the number of ranks. `ncclAlltoAll`, `MPI_Alltoall`.
            #[doc(alias("MPI_Alltoall", "ncclAlltoAll", "all_to_all_single"))]
            all_to_all<S, R>(send, recv) |comm|
                comm.out_of_place(comm.shape().all_to_all(send.len(), recv.output_len())?, send, recv);

            /// [`all_to_all`](Comm::all_to_all) of one buffer.
            all_to_all_in_place<R>(buf) |comm|
                comm.in_place(comm.shape().blocks_in_place(Operation::AllToAll, buf.len(), 0)?, buf);

            /// [`all_to_all`](Comm::all_to_all) of blocks of different lengths.
            ///
            /// `send_counts[j]` elements go to rank `j`, and `recv_counts[i]` come from rank `i`. The latter must equal rank `i`'s
            /// `send_counts` for this rank. `MPI_Alltoallv`.
            #[doc(alias = "MPI_Alltoallv")]
            all_to_all_v<S, R>(send, send_counts, recv, recv_counts) |comm|
                comm.out_of_place(comm.shape().all_to_all_v(send.len(), send_counts, recv.output_len(), recv_counts)?, send, recv);

            /// [`all_to_all_v`](Comm::all_to_all_v) of one buffer, whose length is the sum of the counts. The block from rank `p` replaces
            /// the block for rank `p`, so both have `counts[p]` elements.
            ///
            /// Every rank has its own list, in which `counts[p]` equals rank `p`'s count for this rank. If two differ, the error names both,
            /// as in `all_to_all_v`. Sent blocks are copied first: on the host as many at a time as fit 1 MiB (or one longer block),
            /// on other backends all of them.
            all_to_all_v_in_place<R>(buf, counts) |comm|
                comm.in_place(comm.shape().blocks_in_place_v(Operation::AllToAllV, buf.len(), counts, 0)?, buf);

            /// Concatenates all ranks' buffers in rank order at the root.
            ///
            /// `recv` is used at the root only, where `recv.len() == world_size × send.len()` (others may pass
            /// `&mut []`). `ncclGather`, `MPI_Gather`.
            #[doc(alias("MPI_Gather", "ncclGather"))]
            gather<S, R>(send, recv, root) |comm|
                comm.out_of_place(comm.shape().gather(send.len(), recv.output_len(), root)?, send, recv);

            /// [`gather`](Comm::gather) of one buffer, as long on every rank as at the root, with this rank's block
            /// at `rank × len / world_size`. Written at the root only.
            gather_in_place<R>(buf, root) |comm|
                comm.in_place(comm.shape().blocks_in_place(Operation::Gather, buf.len(), root)?, buf);

            /// [`gather`](Comm::gather) of blocks of different lengths: `counts` as in
            /// [`all_gather_v`](Comm::all_gather_v), the same list on every rank. `MPI_Gatherv`.
            #[doc(alias = "MPI_Gatherv")]
            gather_v<S, R>(send, recv, counts, root) |comm|
                comm.out_of_place(comm.shape().gather_v(send.len(), recv.output_len(), counts, root)?, send, recv);

            /// [`gather_v`](Comm::gather_v) of one buffer, whose length is the sum of the counts on every rank as at the root, with this rank's
            /// block at its place. Written at the root only.
            gather_v_in_place<R>(buf, counts, root) |comm|
                comm.in_place(comm.shape().blocks_in_place_v(Operation::GatherV, buf.len(), counts, root)?, buf);

            /// Distributes the root's buffer: each rank gets its block.
            ///
            /// `send` is read at the root only, where `send.len() == world_size × recv.len()` (others may pass
            /// `&[]`). `ncclScatter`, `MPI_Scatter`.
            #[doc(alias("MPI_Scatter", "ncclScatter"))]
            scatter<S, R>(send, recv, root) |comm|
                comm.out_of_place(comm.shape().scatter(send.len(), recv.output_len(), root)?, send, recv);

            /// [`scatter`](Comm::scatter) of one buffer, as long on every rank as at the root; this rank's block
            /// is written at `rank × len / world_size`.
            scatter_in_place<R>(buf, root) |comm|
                comm.in_place(comm.shape().blocks_in_place(Operation::Scatter, buf.len(), root)?, buf);

            /// [`scatter`](Comm::scatter) of blocks of different lengths: `counts` as in
            /// [`reduce_scatter_v`](Comm::reduce_scatter_v), the same list on every rank. `MPI_Scatterv`.
            #[doc(alias = "MPI_Scatterv")]
            scatter_v<S, R>(send, counts, recv, root) |comm|
                comm.out_of_place(comm.shape().scatter_v(send.len(), recv.output_len(), counts, root)?, send, recv);

            /// [`scatter_v`](Comm::scatter_v) of one buffer, whose length is the sum of the counts on every rank as at the root; this rank's block
            /// is written at its place, and the rest of its buffer stays as it was.
            scatter_v_in_place<R>(buf, counts, root) |comm|
                comm.in_place(comm.shape().blocks_in_place_v(Operation::ScatterV, buf.len(), counts, root)?, buf);
        }
    };
}

pub(super) use collectives;

macro_rules! methods_of_comm {
    ($($(#[$doc:meta])* $name:ident<$($generic:ident),+>($($arg:ident),+) |$comm:ident| $run:expr;)+) => {
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
            $(methods_of_comm! { @$($generic)+; $(#[$doc])* $name($($arg),+) |$comm| $run })+

            /// Waits until every rank has called it. `MPI_Barrier`.
            #[doc(alias = "MPI_Barrier")]
            pub fn barrier(&self) -> Result<()> {
                self.run_call(&Call::empty(Operation::Barrier))
            }
        }
    };
    (@S R; $(#[$doc:meta])* $name:ident($($arg:ident),+) |$comm:ident| $run:expr) => {
        $(#[$doc])*
        pub fn $name<S, R>(&self, $($arg: methods_of_comm!(@type $arg)),+) -> Result<()>
        where
            S: Source + ?Sized,
            R: Output<Elem = S::Elem> + ?Sized,
        {
            let $comm = self;
            $run
        }
    };
    (@R; $(#[$doc:meta])* $name:ident($($arg:ident),+) |$comm:ident| $run:expr) => {
        $(#[$doc])*
        pub fn $name<R>(&self, $($arg: methods_of_comm!(@type $arg)),+) -> Result<()>
        where
            R: Target + ?Sized,
        {
            let $comm = self;
            $run
        }
    };
    (@type send) => { &S };
    (@type recv) => { &mut R };
    (@type buf) => { &mut R };
    (@type op) => { impl Into<Reduction<R::Elem>> };
    (@type root) => { usize };
    (@type $counts:ident) => { &[usize] };
}

macro_rules! methods_of_group {
    ($($(#[$doc:meta])* $name:ident<$($generic:ident),+>($($arg:ident),+) |$comm:ident| $run:expr;)+) => {
        /// # Collectives
        ///
        /// Those of [`Comm`]. The buffers are borrowed until the group's end.
        impl<'env> CommGroup<'_, 'env> {
            $(methods_of_group! { @$($generic)+; $name($($arg),+) |$comm| $run })+
        }
    };
    (@S R; $name:ident($($arg:ident),+) |$comm:ident| $run:expr) => {
        #[doc = concat!("See [`Comm::", stringify!($name), "`].")]
        pub fn $name<S, R>(&mut self, $($arg: methods_of_group!(@type $arg)),+) -> Result<()>
        where
            S: Source + ?Sized,
            R: Output<Elem = S::Elem> + ?Sized,
        {
            let $comm = self;
            $run
        }
    };
    (@R; $name:ident($($arg:ident),+) |$comm:ident| $run:expr) => {
        #[doc = concat!("See [`Comm::", stringify!($name), "`].")]
        pub fn $name<R>(&mut self, $($arg: methods_of_group!(@type $arg)),+) -> Result<()>
        where
            R: Target + ?Sized,
        {
            let $comm = self;
            $run
        }
    };
    (@type send) => { &'env S };
    (@type recv) => { &'env mut R };
    (@type buf) => { &'env mut R };
    (@type op) => { impl Into<Reduction<R::Elem>> };
    (@type root) => { usize };
    (@type $counts:ident) => { &'env [usize] };
}

collectives! { methods_of_comm }
collectives! { methods_of_group }

impl Comm {
    /// Borrows the buffers for a checked call and carries it out.
    #[inline(always)]
    pub(super) fn out_of_place<S, R>(&self, call: Call<'_>, send: &S, recv: &mut R) -> Result<()>
    where
        S: Source + ?Sized,
        R: Output<Elem = S::Elem> + ?Sized,
    {
        let call = call.of_types(send.dtype(), recv.output_dtype())?;
        let (send, recv) = (send.lend(&self.stream)?, recv.lend_output(&self.stream)?);
        self.run_call(&call.between(&send, &recv, &self.stream).configured(&self.stream))
    }

    #[inline(always)]
    pub(super) fn in_place<R: Target + ?Sized>(&self, call: Call<'_>, buf: &mut R) -> Result<()> {
        let call = call.of_type(buf.dtype())?;
        let loan = buf.lend_mut(&self.stream)?;
        self.run_call(&call.inside(&loan, &self.stream, self.rank()).configured(&self.stream))
    }
}
