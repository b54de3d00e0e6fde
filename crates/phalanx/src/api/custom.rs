//! Reductions by a closure.

use super::comm::Comm;
use crate::buffer::{Output, Source, Target};
use crate::contract::Operation;
use crate::reduce::custom::Custom;
use crate::types::dtype::Plain;
use crate::types::error::Result;

/// # Reductions by a closure
///
/// `combine(a, b)` combines two elements of any [`Plain`] type. It is called in rank order, `combine(combine(x0, x1), x2)`, so it need not
/// commute, and results are the same on every rank. All ranks must pass a closure that does the same: phalanx compares the types, not the
/// closures. A closure that panics fails the communicator, and the other ranks get an error that names this one.
///
/// Host memory only, on every backend; an element has at most 2 KiB. On MPI the contributions are gathered in pieces of 256 KiB, and combined by the ranks that get
/// the result. `MPI_Op_create`.
impl Comm {
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
    /// phalanx::run(3, |comm| -> phalanx::Result<()> {
    ///     let own = Best { value: [0.3, 0.9, 0.5][comm.rank()], rank: comm.rank() as u64 };
    ///     let mut best = [own];
    ///     comm.all_reduce_in_place_with(&mut best, |a, b| if b.value > a.value { *b } else { *a })?;
    ///     assert_eq!(best, [Best { value: 0.9, rank: 1 }]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_reduce_with<T, S, R>(
        &self,
        send: &S,
        recv: &mut R,
        combine: impl Fn(&T, &T) -> T,
    ) -> Result<()>
    where
        T: Plain,
        S: Source<Elem = T> + ?Sized,
        R: Output<Elem = T> + ?Sized,
    {
        let call = self.shape().all_reduce(send.len(), recv.output_len())?;
        self.out_of_place(call.combining(&Custom::new(combine)), send, recv)
    }

    /// [`all_reduce_in_place`](Comm::all_reduce_in_place) by a closure.
    pub fn all_reduce_in_place_with<T, R>(&self, buf: &mut R, combine: impl Fn(&T, &T) -> T) -> Result<()>
    where
        T: Plain,
        R: Target<Elem = T> + ?Sized,
    {
        let call = self.shape().whole(Operation::AllReduce, buf.len());
        self.in_place(call.combining(&Custom::new(combine)), buf)
    }

    /// [`reduce`](Comm::reduce) by a closure.
    pub fn reduce_with<T, S, R>(
        &self,
        send: &S,
        recv: &mut R,
        combine: impl Fn(&T, &T) -> T,
        root: usize,
    ) -> Result<()>
    where
        T: Plain,
        S: Source<Elem = T> + ?Sized,
        R: Output<Elem = T> + ?Sized,
    {
        let call = self.shape().reduce(send.len(), recv.output_len(), root)?;
        self.out_of_place(call.combining(&Custom::new(combine)), send, recv)
    }

    /// [`reduce_scatter`](Comm::reduce_scatter) by a closure.
    pub fn reduce_scatter_with<T, S, R>(
        &self,
        send: &S,
        recv: &mut R,
        combine: impl Fn(&T, &T) -> T,
    ) -> Result<()>
    where
        T: Plain,
        S: Source<Elem = T> + ?Sized,
        R: Output<Elem = T> + ?Sized,
    {
        let call = self.shape().reduce_scatter(send.len(), recv.output_len())?;
        self.out_of_place(call.combining(&Custom::new(combine)), send, recv)
    }

    /// [`scan`](Comm::scan) by a closure.
    pub fn scan_with<T, S, R>(&self, send: &S, recv: &mut R, combine: impl Fn(&T, &T) -> T) -> Result<()>
    where
        T: Plain,
        S: Source<Elem = T> + ?Sized,
        R: Output<Elem = T> + ?Sized,
    {
        let call = self.shape().scan(Operation::Scan, send.len(), recv.output_len())?;
        self.out_of_place(call.combining(&Custom::new(combine)), send, recv)
    }

    /// [`exclusive_scan`](Comm::exclusive_scan) by a closure.
    pub fn exclusive_scan_with<T, S, R>(
        &self,
        send: &S,
        recv: &mut R,
        combine: impl Fn(&T, &T) -> T,
    ) -> Result<()>
    where
        T: Plain,
        S: Source<Elem = T> + ?Sized,
        R: Output<Elem = T> + ?Sized,
    {
        let call = self.shape().scan(Operation::ExclusiveScan, send.len(), recv.output_len())?;
        self.out_of_place(call.combining(&Custom::new(combine)), send, recv)
    }
}
