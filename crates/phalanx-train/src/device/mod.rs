//! Where a model's numbers are, and the arithmetic on them.
//!
//! A part of this crate that moves and combines numbers is generic over a [`Device`]: [`Host`] for memory of the host, and
//! `Gpu` (feature `cuda`) for that of an NVIDIA GPU. It sees flat buffers and views of them, which phalanx's operations take as they are. On a GPU, each method
//! enqueues work on the device's stream and returns; on the host it is done when the method returns.

#[cfg(feature = "cuda")]
pub(crate) mod gpu;
mod host;

#[cfg(feature = "cuda")]
pub use gpu::{Gpu, keep_freed_memory};
pub use host::Host;
pub(crate) use host::in_double;

use crate::Result;
use phalanx::{Comm, Element, ReduceOp, Reduction, Request, Source, Target};
use std::ops::Range;

/// A type of floating-point numbers: f32, f64, f16 or bf16.
pub trait Number: Element + Default {
    /// The nearest number of this type, ties to even.
    fn from_f64(value: f64) -> Self;
    /// The same number, exactly.
    fn to_f64(self) -> f64;
    /// The nearest number of this type, ties to even.
    fn from_f32(value: f32) -> Self;
    /// The nearest `f32`; exact but for f64.
    fn to_f32(self) -> f32;
}

/// To f32, with the last bit set if anything is lost: rounding the result to fewer bits is then rounding once.
fn to_odd(value: f64) -> f32 {
    let near = value as f32;
    let rounded = f64::from(near);
    if rounded == value || value.is_nan() {
        return near;
    }
    let towards_zero = near.to_bits() - u32::from(rounded.abs() > value.abs());
    f32::from_bits(towards_zero | 1)
}

macro_rules! numbers {
    ($($ty:ty: $from64:expr, $to64:expr, $from32:expr, $to32:expr;)*) => {$(
        impl Number for $ty {
            fn from_f64(value: f64) -> $ty {
                $from64(value)
            }
            fn to_f64(self) -> f64 {
                $to64(self)
            }
            fn from_f32(value: f32) -> $ty {
                $from32(value)
            }
            fn to_f32(self) -> f32 {
                $to32(self)
            }
        }
    )*};
}

numbers! {
    f32: |x| x as f32, f64::from, |x| x, |x| x;
    f64: |x| x, |x| x, f64::from, |x| x as f32;
    half::f16: |x| half::f16::from_f32(to_odd(x)), f64::from, half::f16::from_f32, f32::from;
    half::bf16: |x| half::bf16::from_f32(to_odd(x)), f64::from, half::bf16::from_f32, f32::from;
}

/// A place with memory and arithmetic.
///
/// Two views that a method is given have the same length, unless it says otherwise.
pub trait Device: Clone + Send + Sync + 'static {
    /// Memory that belongs to whoever has it.
    type Buffer<T: Number>: Target<Elem = T> + Send + 'static;
    /// A range of a buffer, for reading.
    type View<'a, T: Number>: Source<Elem = T>;
    /// A range of a buffer, for writing.
    type ViewMut<'a, T: Number>: Target<Elem = T>;

    /// Memory for `len` numbers, all 0.
    fn zeros<T: Number>(&self, len: usize) -> Result<Self::Buffer<T>>;
    /// Memory for `len` numbers that are all overwritten before they are read: what is in it is not said.
    fn alloc<T: Number>(&self, len: usize) -> Result<Self::Buffer<T>> {
        self.zeros(len)
    }
    /// Memory with a copy of these numbers of the host.
    fn upload<T: Number>(&self, numbers: &[T]) -> Result<Self::Buffer<T>>;
    /// A copy on the host; waits for all work before it.
    fn download<T: Number>(&self, from: &Self::View<'_, T>) -> Result<Vec<T>>;

    /// A range of a buffer.
    ///
    /// # Panics
    /// If the range is not within the buffer.
    fn view<'a, T: Number>(&self, buffer: &'a Self::Buffer<T>, range: Range<usize>) -> Self::View<'a, T>;
    /// A range of a buffer, for writing.
    ///
    /// # Panics
    /// If the range is not within the buffer.
    fn view_mut<'a, T: Number>(
        &self,
        buffer: &'a mut Self::Buffer<T>,
        range: Range<usize>,
    ) -> Self::ViewMut<'a, T>;

    /// What can be written, for reading.
    fn reborrow<'a, T: Number>(view: &'a Self::ViewMut<'_, T>) -> Self::View<'a, T>;

    /// `to = from`, each number rounded to the type of `to`.
    fn convert<A: Number, B: Number>(
        &self,
        from: &Self::View<'_, A>,
        to: &mut Self::ViewMut<'_, B>,
    ) -> Result<()>;
    /// `to += factor * from`, computed in f64 for f64, else in f32, and rounded once.
    fn add<A: Number, B: Number>(
        &self,
        factor: f64,
        from: &Self::View<'_, A>,
        to: &mut Self::ViewMut<'_, B>,
    ) -> Result<()>;
    /// `data *= factor`, in the precision of [`add`](Device::add).
    fn scale<T: Number>(&self, data: &mut Self::ViewMut<'_, T>, factor: f64) -> Result<()>;
    /// `data = value`.
    fn fill<T: Number>(&self, data: &mut Self::ViewMut<'_, T>, value: f64) -> Result<()>;
}

/// A device on which communication goes on while the rank does something else.
pub trait Overlap: Device {
    /// A sum under way.
    type Pending<A: Number>: Send;
    /// An all_gather under way.
    type Gathering<A: Number>: Send;

    /// Starts a reduction over all ranks, after those started before.
    ///
    /// # Errors
    /// Errors of `comm`.
    fn start_sum<A: Number>(
        &self,
        comm: &Comm,
        values: Self::Buffer<A>,
        op: Reduction<A>,
    ) -> Result<Self::Pending<A>>;

    /// Gives the buffer back with the sum. On a GPU, work enqueued later sees it; on the host this waits.
    ///
    /// # Errors
    /// Errors of `comm`.
    fn finish_sum<A: Number>(&self, pending: Self::Pending<A>) -> Result<Self::Buffer<A>>;

    /// Starts an all_gather to `all` from this rank's part, rounded to the type of `all`, after those started before.
    ///
    /// # Errors
    /// Errors of `comm` and of the device.
    fn start_gather<M: Number, A: Number>(
        &self,
        comm: &Comm,
        own: &Self::View<'_, M>,
        all: Self::Buffer<A>,
    ) -> Result<Self::Gathering<A>>;

    /// Gives `all` back, as [`finish_sum`](Overlap::finish_sum) does.
    ///
    /// # Errors
    /// Errors of `comm`.
    fn finish_gather<A: Number>(&self, gathering: Self::Gathering<A>) -> Result<Self::Buffer<A>>;

    /// Adds `factor` times this rank's part of the sum of all ranks' `values` to `to`, and before that sums it over the `replicas`, if they are
    /// given. On a GPU this is started, and work that uses `to` waits for it; on the host it is done.
    ///
    /// # Errors
    /// Errors of the communicators and of the device.
    fn add_reduced<A: Number>(
        &self,
        comm: &Comm,
        replicas: Option<&Comm>,
        values: Self::Buffer<A>,
        factor: f64,
        to: &mut Self::ViewMut<'_, A>,
    ) -> Result<()> {
        let mut own = self.alloc::<A>(to.len())?;
        comm.reduce_scatter(&values, &mut own, ReduceOp::Sum)?;
        if let Some(replicas) = replicas {
            replicas.all_reduce_in_place(&mut own, ReduceOp::Sum)?;
        }
        self.add(factor, &self.view(&own, 0..to.len()), to)
    }

    /// Starts to tell all ranks a number of this one. It does not wait for what the device computes.
    ///
    /// # Errors
    /// Errors of `comm`.
    fn start_exchange(&self, comm: &Comm, own: f64) -> Result<Request<(Vec<f64>, Vec<f64>)>> {
        Ok(comm.start_all_gather(vec![own], vec![0.0; comm.world_size()])?)
    }
}
