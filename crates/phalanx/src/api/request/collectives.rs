//! The methods of [`Comm`] that start a collective, or prepare one to be carried out often: one table.

use super::Request;
use super::plan::Plan;
use super::prepared::Prepared;
use crate::api::comm::Comm;
use crate::buffer::{Owned, Target};
use crate::contract::{Call, Operation};
use crate::types::dtype::Plain;
use crate::types::error::Result;
use crate::types::op::Reduction;

/// Expands `$methods` on the table. A row has what is started, for the documentation, the names of the two methods, each with other names by
/// which one may search it, their parameters, and the plan: the checked call and its buffers.
macro_rules! planned {
    ($methods:ident) => {
        $methods! {
            "an [`all_reduce_in_place`](Comm::all_reduce_in_place)",
            start_all_reduce ["start_all_reduce_in_place", "MPI_Iallreduce"]
            prepare_all_reduce ["prepare_all_reduce_in_place", "MPI_Allreduce_init"] <B>(buf, op) |comm|
                Plan::of_one(comm.shape().whole(Operation::AllReduce, buf.len()).reducing(op), buf);

            "a [`broadcast_in_place`](Comm::broadcast_in_place)",
            start_broadcast ["start_broadcast_in_place", "MPI_Ibcast"]
            prepare_broadcast ["prepare_broadcast_in_place", "MPI_Bcast_init"] <B>(buf, root) |comm|
                Plan::of_one(comm.shape().whole_in_place(Operation::Broadcast, buf.len(), root)?, buf);

            "a [`reduce_in_place`](Comm::reduce_in_place)",
            start_reduce ["start_reduce_in_place", "MPI_Ireduce"]
            prepare_reduce ["prepare_reduce_in_place", "MPI_Reduce_init"] <B>(buf, op, root) |comm|
                Plan::of_one(comm.shape().whole_in_place(Operation::Reduce, buf.len(), root)?.reducing(op), buf);

            "a [`scan_in_place`](Comm::scan_in_place)",
            start_scan ["start_scan_in_place", "MPI_Iscan"]
            prepare_scan ["prepare_scan_in_place", "MPI_Scan_init"] <B>(buf, op) |comm|
                Plan::of_one(comm.shape().whole(Operation::Scan, buf.len()).reducing(op), buf);

            "an [`exclusive_scan_in_place`](Comm::exclusive_scan_in_place)",
            start_exclusive_scan ["start_exclusive_scan_in_place", "MPI_Iexscan"]
            prepare_exclusive_scan ["prepare_exclusive_scan_in_place", "MPI_Exscan_init"] <B>(buf, op) |comm|
                Plan::of_one(comm.shape().whole(Operation::ExclusiveScan, buf.len()).reducing(op), buf);

            "an [`all_gather`](Comm::all_gather)",
            start_all_gather ["MPI_Iallgather"]
            prepare_all_gather ["MPI_Allgather_init"] <S, R>(send, recv) |comm|
                Plan::of_two(comm.shape().all_gather(send.len(), recv.len())?, send, recv);

            "an [`all_gather_v`](Comm::all_gather_v)",
            start_all_gather_v ["MPI_Iallgatherv"]
            prepare_all_gather_v ["MPI_Allgatherv_init"] <S, R>(send, recv, counts) |comm|
                Plan::of_blocks(send, recv, [counts.into(), Vec::new()], |[send, recv], [counts, _]| {
                    comm.shape().all_gather_v(send, recv, counts)
                });

            "a [`reduce_scatter`](Comm::reduce_scatter)",
            start_reduce_scatter ["MPI_Ireduce_scatter_block"]
            prepare_reduce_scatter ["MPI_Reduce_scatter_block_init"] <S, R>(send, recv, op) |comm|
                Plan::of_two(comm.shape().reduce_scatter(send.len(), recv.len())?.reducing(op), send, recv);

            "a [`reduce_scatter_v`](Comm::reduce_scatter_v)",
            start_reduce_scatter_v ["MPI_Ireduce_scatter"]
            prepare_reduce_scatter_v ["MPI_Reduce_scatter_init"] <S, R>(send, recv, counts, op) |comm|
                Plan::of_blocks(send, recv, [counts.into(), Vec::new()], |[send, recv], [counts, _]| {
                    Ok(comm.shape().reduce_scatter_v(send, recv, counts)?.reducing(op))
                });

            "an [`all_to_all`](Comm::all_to_all)",
            start_all_to_all ["MPI_Ialltoall"]
            prepare_all_to_all ["MPI_Alltoall_init"] <S, R>(send, recv) |comm|
                Plan::of_two(comm.shape().all_to_all(send.len(), recv.len())?, send, recv);

            "an [`all_to_all_v`](Comm::all_to_all_v)",
            start_all_to_all_v ["MPI_Ialltoallv"]
            prepare_all_to_all_v ["MPI_Alltoallv_init"] <S, R>(send, send_counts, recv, recv_counts) |comm|
                Plan::of_blocks(send, recv, [send_counts.into(), recv_counts.into()], |[send, recv], [sent, received]| {
                    comm.shape().all_to_all_v(send, sent, recv, received)
                });

            "a [`gather`](Comm::gather)",
            start_gather ["MPI_Igather"]
            prepare_gather ["MPI_Gather_init"] <S, R>(send, recv, root) |comm|
                Plan::of_two(comm.shape().gather(send.len(), recv.len(), root)?, send, recv);

            "a [`gather_v`](Comm::gather_v)",
            start_gather_v ["MPI_Igatherv"]
            prepare_gather_v ["MPI_Gatherv_init"] <S, R>(send, recv, counts, root) |comm|
                Plan::of_blocks(send, recv, [counts.into(), Vec::new()], |[send, recv], [counts, _]| {
                    comm.shape().gather_v(send, recv, counts, root)
                });

            "a [`scatter`](Comm::scatter)",
            start_scatter ["MPI_Iscatter"]
            prepare_scatter ["MPI_Scatter_init"] <S, R>(send, recv, root) |comm|
                Plan::of_two(comm.shape().scatter(send.len(), recv.len(), root)?, send, recv);

            "a [`scatter_v`](Comm::scatter_v)",
            start_scatter_v ["MPI_Iscatterv"]
            prepare_scatter_v ["MPI_Scatterv_init"] <S, R>(send, counts, recv, root) |comm|
                Plan::of_blocks(send, recv, [counts.into(), Vec::new()], |[send, recv], [counts, _]| {
                    comm.shape().scatter_v(send, recv, counts, root)
                });

            "an [`all_reduce_in_place_with`](Comm::all_reduce_in_place_with)",
            start_all_reduce_with ["start_all_reduce_in_place_with"]
            prepare_all_reduce_with ["prepare_all_reduce_in_place_with"] <T, B>(buf, combine) |comm|
                Plan::of_one(comm.shape().whole(Operation::AllReduce, buf.len()), buf).map(|plan| plan.combining(combine));

            "a [`reduce_in_place_with`](Comm::reduce_in_place_with)",
            start_reduce_with ["start_reduce_in_place_with"]
            prepare_reduce_with ["prepare_reduce_in_place_with"] <T, B>(buf, combine, root) |comm|
                Plan::of_one(comm.shape().whole_in_place(Operation::Reduce, buf.len(), root)?, buf).map(|plan| plan.combining(combine));

            "a [`scan_in_place_with`](Comm::scan_in_place_with)",
            start_scan_with ["start_scan_in_place_with"]
            prepare_scan_with ["prepare_scan_in_place_with"] <T, B>(buf, combine) |comm|
                Plan::of_one(comm.shape().whole(Operation::Scan, buf.len()), buf).map(|plan| plan.combining(combine));

            "an [`exclusive_scan_in_place_with`](Comm::exclusive_scan_in_place_with)",
            start_exclusive_scan_with ["start_exclusive_scan_in_place_with"]
            prepare_exclusive_scan_with ["prepare_exclusive_scan_in_place_with"] <T, B>(buf, combine) |comm|
                Plan::of_one(comm.shape().whole(Operation::ExclusiveScan, buf.len()), buf).map(|plan| plan.combining(combine));

            "a [`reduce_scatter_with`](Comm::reduce_scatter_with)",
            start_reduce_scatter_with []
            prepare_reduce_scatter_with [] <T, S, R>(send, recv, combine) |comm|
                Plan::of_two(comm.shape().reduce_scatter(send.len(), recv.len())?, send, recv).map(|plan| plan.combining(combine));
        }
    };
}

macro_rules! started {
    ($($what:literal, $start:ident [$($started:literal),*] $prepare:ident [$($prepared:literal),*] <$($generic:ident),+>($($arg:ident),+) |$comm:ident| $plan:expr;)+) => {
        /// # Requests
        ///
        /// Operations that go on while the rank does something else. They take their buffers, and [`Request::wait`] gives them back.
        /// Lists of counts are kept until the operation is over, since `MPI_Iallgatherv` and its like read them until then: a `Vec`
        /// is moved, a slice or an array copied. Closures are kept as long, and called in a thread of the communicator or in a wait.
        ///
        /// Started and plain collectives are one sequence: the order of the calls is what the ranks match, and it
        /// does not matter which form a rank uses. (On MPI it matters for the first one that is started on a communicator: it is
        /// started on all ranks.) Messages are matched in the order of posting.
        ///
        /// ```
        /// # fn main() -> phalanx::Result<()> {
        /// # use phalanx::ReduceOp;
        /// phalanx::try_run(2, |comm| -> phalanx::Result<()> {
        ///     let gradients = vec![1.0f32; 1000];
        ///     let request = comm.start_all_reduce(gradients, ReduceOp::Sum)?;
        ///     // … compute something else meanwhile …
        ///     let gradients = request.wait()?;
        ///     assert!(gradients.iter().all(|g| *g == 2.0));
        ///     Ok(())
        /// })?;
        /// # Ok(())
        /// # }
        /// ```
        impl Comm {
            $(planned_method! {
                concat!("Starts ", $what, "."), $($started),*;
                $start<$($generic),+>($($arg),+) -> Request |$comm| $comm.start($plan?)
            })+

            /// Starts a [`barrier`](Comm::barrier): its [`wait`](Request::wait) returns when every rank has started or called a barrier.
            #[doc(alias = "MPI_Ibarrier")]
            pub fn start_barrier(&self) -> Result<Request<()>> {
                self.start(Plan::of_none(Call::empty(Operation::Barrier)))
            }
        }
    };
}

macro_rules! prepared {
    ($($what:literal, $start:ident [$($started:literal),*] $prepare:ident [$($prepared:literal),*] <$($generic:ident),+>($($arg:ident),+) |$comm:ident| $plan:expr;)+) => {
        /// # Prepared collectives
        ///
        /// Collectives of the same buffers that are carried out many times: see [`Prepared`].
        impl Comm {
            $(planned_method! {
                concat!("Prepares ", $what, "."), $($prepared),*;
                $prepare<$($generic),+>($($arg),+) -> Prepared |$comm| $comm.prepare($plan?)
            })+
        }
    };
}

/// A method with a row's parameters.
macro_rules! planned_method {
    ($doc:expr, $($alias:literal),*; $name:ident<B>($($arg:ident),+) -> $Kind:ident |$comm:ident| $run:expr) => {
        #[doc = $doc]
        $(#[doc(alias = $alias)])*
        pub fn $name<B: Owned>(&self, $($arg: planned_method!(@type B $arg)),+) -> planned_method!(@result $Kind B) {
            let $comm = self;
            $run
        }
    };
    ($doc:expr, $($alias:literal),*; $name:ident<S, R>($($arg:ident),+) -> $Kind:ident |$comm:ident| $run:expr) => {
        #[doc = $doc]
        $(#[doc(alias = $alias)])*
        pub fn $name<S, R>(&self, $($arg: planned_method!(@type S $arg)),+) -> planned_method!(@result $Kind (S, R))
        where
            S: Owned,
            R: Owned + Target<Elem = S::Elem>,
        {
            let $comm = self;
            $run
        }
    };
    ($doc:expr, $($alias:literal),*; $name:ident<T, B>($($arg:ident),+) -> $Kind:ident |$comm:ident| $run:expr) => {
        #[doc = $doc]
        $(#[doc(alias = $alias)])*
        pub fn $name<T, B>(&self, $($arg: planned_method!(@type B $arg)),+) -> planned_method!(@result $Kind B)
        where
            T: Plain,
            B: Owned + Target<Elem = T>,
        {
            let $comm = self;
            $run
        }
    };
    ($doc:expr, $($alias:literal),*; $name:ident<T, S, R>($($arg:ident),+) -> $Kind:ident |$comm:ident| $run:expr) => {
        #[doc = $doc]
        $(#[doc(alias = $alias)])*
        pub fn $name<T, S, R>(&self, $($arg: planned_method!(@type S $arg)),+) -> planned_method!(@result $Kind (S, R))
        where
            T: Plain,
            S: Owned + Target<Elem = T>,
            R: Owned + Target<Elem = T>,
        {
            let $comm = self;
            $run
        }
    };
    (@result Request $buffers:ty) => { Result<Request<$buffers>> };
    (@result Prepared $buffers:ty) => { Result<Prepared<'_, $buffers>> };
    (@type $B:ident send) => { S };
    (@type $B:ident recv) => { R };
    (@type $B:ident buf) => { B };
    (@type $B:ident combine) => { impl Fn(&T, &T) -> T + Send + 'static };
    (@type $B:ident op) => { impl Into<Reduction<$B::Elem>> };
    (@type $B:ident root) => { usize };
    (@type $B:ident $counts:ident) => { impl Into<Vec<usize>> };
}

planned! { started }
planned! { prepared }
