//! Reductions by a closure: one table, from which [`Comm`] and [`CommGroup`] have their methods.

use super::comm::Comm;
use super::group::CommGroup;
use crate::buffer::{Output, Source, Target};
use crate::contract::Operation;
use crate::reduce::custom::Custom;
use crate::types::dtype::Plain;
use crate::types::error::Result;

/// Expands `$methods` on the table. A row has the documentation, the name, the parameters before and behind the closure, and what a front
/// (`comm`) does with the closure, which lives until the call is over (`by`).
macro_rules! closures {
    ($methods:ident) => {
        $methods! {
            /// [`all_reduce`](Comm::all_reduce) by a closure.
            ///
            /// ```
            /// # fn main() -> phalanx::Result<()> {
            /// /// A value and the rank that has it.
            /// #[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
            /// #[repr(C)]
            /// struct Best {
            ///     value: f64,
            ///     rank: u64,
            /// }
            ///
            /// phalanx::try_run(3, |comm| -> phalanx::Result<()> {
            ///     let own = Best { value: [0.3, 0.9, 0.5][comm.rank()], rank: comm.rank() as u64 };
            ///     let mut best = [own];
            ///     comm.all_reduce_in_place_with(&mut best, |a, b| if b.value > a.value { *b } else { *a })?;
            ///     assert_eq!(best, [Best { value: 0.9, rank: 1 }]);
            ///     Ok(())
            /// })?;
            /// # Ok(())
            /// # }
            /// ```
            #[doc(alias = "MPI_Op_create")]
            all_reduce_with<S, R>(send, recv; combine) |comm, by|
                comm.out_of_place(comm.shape().all_reduce(send.len(), recv.output_len())?.combining(by), send, recv);

            /// [`all_reduce_in_place`](Comm::all_reduce_in_place) by a closure.
            all_reduce_in_place_with<R>(buf; combine) |comm, by|
                comm.in_place(comm.shape().whole(Operation::AllReduce, buf.len()).combining(by), buf);

            /// [`reduce`](Comm::reduce) by a closure.
            reduce_with<S, R>(send, recv; combine, root) |comm, by|
                comm.out_of_place(comm.shape().reduce(send.len(), recv.output_len(), root)?.combining(by), send, recv);

            /// [`reduce_in_place`](Comm::reduce_in_place) by a closure.
            reduce_in_place_with<R>(buf; combine, root) |comm, by|
                comm.in_place(comm.shape().whole_in_place(Operation::Reduce, buf.len(), root)?.combining(by), buf);

            /// [`reduce_scatter`](Comm::reduce_scatter) by a closure.
            reduce_scatter_with<S, R>(send, recv; combine) |comm, by|
                comm.out_of_place(comm.shape().reduce_scatter(send.len(), recv.output_len())?.combining(by), send, recv);

            /// [`reduce_scatter_in_place`](Comm::reduce_scatter_in_place) by a closure.
            reduce_scatter_in_place_with<R>(buf; combine) |comm, by|
                comm.in_place(comm.shape().blocks_in_place(Operation::ReduceScatter, buf.len(), 0)?.combining(by), buf);

            /// [`scan`](Comm::scan) by a closure.
            scan_with<S, R>(send, recv; combine) |comm, by|
                comm.out_of_place(comm.shape().scan(Operation::Scan, send.len(), recv.output_len())?.combining(by), send, recv);

            /// [`scan_in_place`](Comm::scan_in_place) by a closure.
            scan_in_place_with<R>(buf; combine) |comm, by|
                comm.in_place(comm.shape().whole(Operation::Scan, buf.len()).combining(by), buf);

            /// [`exclusive_scan`](Comm::exclusive_scan) by a closure.
            exclusive_scan_with<S, R>(send, recv; combine) |comm, by|
                comm.out_of_place(
                    comm.shape().scan(Operation::ExclusiveScan, send.len(), recv.output_len())?.combining(by),
                    send,
                    recv,
                );

            /// [`exclusive_scan_in_place`](Comm::exclusive_scan_in_place) by a closure.
            exclusive_scan_in_place_with<R>(buf; combine) |comm, by|
                comm.in_place(comm.shape().whole(Operation::ExclusiveScan, buf.len()).combining(by), buf);
        }
    };
}

macro_rules! methods_of_comm {
    ($($(#[$doc:meta])* $name:ident<$($generic:ident),+>($($arg:ident),+; $combine:ident $(, $root:ident)?)
        |$comm:ident, $by:ident| $run:expr;)+) => {
        /// # Reductions by a closure
        ///
        /// `combine(a, b)` combines two elements of any [`Plain`] type. It is called in rank order, `combine(combine(x0, x1), x2)`, so it need
        /// not commute, and results are the same on every rank. All ranks must pass a closure that does the same: phalanx compares the types,
        /// not the closures. A closure that panics fails the communicator, and the other ranks get an error that names this one.
        ///
        /// Host memory only, on every backend; an element has at most 2 KiB. On MPI the contributions are gathered in pieces of 256 KiB, and
        /// combined by the ranks that get the result. `MPI_Op_create`.
        impl Comm {
            $(methods_of_comm! { @$($generic)+; $(#[$doc])* $name($($arg),+; $combine $(, $root)?) |$comm, $by| $run })+
        }
    };
    (@S R; $(#[$doc:meta])* $name:ident($send:ident, $recv:ident; $combine:ident $(, $root:ident)?)
        |$comm:ident, $by:ident| $run:expr) => {
        $(#[$doc])*
        pub fn $name<T, S, R>(
            &self,
            $send: &S,
            $recv: &mut R,
            $combine: impl Fn(&T, &T) -> T,
            $($root: usize)?
        ) -> Result<()>
        where
            T: Plain,
            S: Source<Elem = T> + ?Sized,
            R: Output<Elem = T> + ?Sized,
        {
            let $comm = self;
            let $by = &Custom::new($combine);
            $run
        }
    };
    (@R; $(#[$doc:meta])* $name:ident($buf:ident; $combine:ident $(, $root:ident)?) |$comm:ident, $by:ident| $run:expr) => {
        $(#[$doc])*
        pub fn $name<T, R>(&self, $buf: &mut R, $combine: impl Fn(&T, &T) -> T, $($root: usize)?) -> Result<()>
        where
            T: Plain,
            R: Target<Elem = T> + ?Sized,
        {
            let $comm = self;
            let $by = &Custom::new($combine);
            $run
        }
    };
}

macro_rules! methods_of_group {
    ($($(#[$doc:meta])* $name:ident<$($generic:ident),+>($($arg:ident),+; $combine:ident $(, $root:ident)?)
        |$comm:ident, $by:ident| $run:expr;)+) => {
        /// # Reductions by a closure
        ///
        /// Those of [`Comm`]. The closures are kept until the group's end, when they are called.
        impl<'env> CommGroup<'_, 'env> {
            $(methods_of_group! { @$($generic)+; $name($($arg),+; $combine $(, $root)?) |$comm, $by| $run })+
        }
    };
    (@S R; $name:ident($send:ident, $recv:ident; $combine:ident $(, $root:ident)?) |$comm:ident, $by:ident| $run:expr) => {
        #[doc = concat!("See [`Comm::", stringify!($name), "`].")]
        pub fn $name<T, S, R>(
            &mut self,
            $send: &'env S,
            $recv: &'env mut R,
            $combine: impl Fn(&T, &T) -> T + 'env,
            $($root: usize)?
        ) -> Result<()>
        where
            T: Plain,
            S: Source<Elem = T> + ?Sized,
            R: Output<Elem = T> + ?Sized,
        {
            let $comm = self;
            let $by = $comm.keep($combine);
            $run
        }
    };
    (@R; $name:ident($buf:ident; $combine:ident $(, $root:ident)?) |$comm:ident, $by:ident| $run:expr) => {
        #[doc = concat!("See [`Comm::", stringify!($name), "`].")]
        pub fn $name<T, R>(
            &mut self,
            $buf: &'env mut R,
            $combine: impl Fn(&T, &T) -> T + 'env,
            $($root: usize)?
        ) -> Result<()>
        where
            T: Plain,
            R: Target<Elem = T> + ?Sized,
        {
            let $comm = self;
            let $by = $comm.keep($combine);
            $run
        }
    };
}

closures! { methods_of_comm }
closures! { methods_of_group }
