//! Buffers: what an operation reads from and writes to.

mod any;
#[cfg(feature = "_gpu")]
pub(crate) mod collective_config;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(feature = "rccl")]
mod hip;
pub(crate) mod host;
pub(crate) mod loan;
#[cfg(feature = "ndarray")]
pub(crate) mod ndarray;
#[cfg(feature = "_gpu")]
pub(crate) mod scratch;
pub(crate) mod stream;

pub use any::{AnySource, AnyTarget};

use crate::buffer::host::HostBuffer;
use crate::buffer::loan::Loan;
use crate::buffer::stream::Stream;
use crate::types::dtype::{DType, ElementType, Plain};
use crate::types::error::Result;
use std::mem::MaybeUninit;

/// Memory an operation can read: slices, arrays, vectors, memory from [`Comm::alloc`](crate::Comm::alloc), arrays and views of `ndarray`
/// (a feature), and GPU memory (cudarc's `CudaSlice` and its views; those of `phalanx::hip`).
///
/// # Safety
/// [`lend`](Source::lend) returns the address of `len` initialised elements. They neither move nor change while the buffer
/// is borrowed. GPU memory moreover stays valid until the work is complete that is on the stream when the `Loan` is dropped.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a buffer",
    label = "not a slice, an array, a vector or other memory of elements",
    note = "one value: send a slice of it, `&[value]`; receive it with `std::slice::from_mut(&mut value)`",
    note = "String and str: send the bytes (`as_bytes`), and their number in a message before"
)]
pub unsafe trait Source {
    /// The type of the elements.
    type Elem: ElementType;
    /// The type of the elements, as a value.
    fn dtype(&self) -> DType;
    /// Number of elements.
    fn len(&self) -> usize;
    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Lends the elements to an operation on a stream, for reading.
    ///
    /// # Errors
    /// [`UsageError::Memory`](crate::UsageError::Memory) if operations on that stream cannot use this memory.
    fn lend<'a>(&'a self, stream: &'a Stream) -> Result<Loan<'a>>;
}

/// Memory an operation can write; the counterpart of [`Source`].
///
/// # Safety
/// As for [`Source`]; moreover, nothing else reads or writes the elements during that time.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a buffer that can be written",
    label = "not a mutable slice, an array, a vector or other memory of elements",
    note = "pass `&mut` of the elements themselves; one value is a buffer as `std::slice::from_mut(&mut value)`"
)]
pub unsafe trait Target: Source {
    /// Lends the elements to an operation on a stream, for writing.
    fn lend_mut<'a>(&'a mut self, stream: &'a Stream) -> Result<Loan<'a>>;
}

/// Memory that an operation only writes: every [`Target`], and host memory that is not initialised yet ([`Uninit`]).
///
/// After a successful operation every element is initialised that the operation gives this rank: for `gather` at the root
/// only, for example.
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// phalanx::try_run(2, |comm| -> phalanx::Result<()> {
///     let mut all: Vec<u32> = Vec::with_capacity(2);
///     comm.all_gather(&[comm.rank() as u32], &mut phalanx::Uninit(&mut all.spare_capacity_mut()[..2]))?;
///     // SAFETY: all_gather has written both elements.
///     unsafe { all.set_len(2) };
///     assert_eq!(all, [0, 1]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
///
/// # Safety
/// As for [`Target`], but the elements need not be initialised.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a buffer that can be written",
    label = "not a mutable slice, an array, a vector or other memory of elements",
    note = "pass `&mut` of the elements themselves; one value is a buffer as `std::slice::from_mut(&mut value)`"
)]
pub unsafe trait Output {
    /// The type of the elements.
    type Elem: ElementType;
    /// The type of the elements, as a value.
    fn output_dtype(&self) -> DType;
    /// Number of elements.
    fn output_len(&self) -> usize;
    /// Lends the elements to an operation on a stream, for writing.
    fn lend_output<'a>(&'a mut self, stream: &'a Stream) -> Result<Loan<'a>>;
}

// SAFETY: a target is more.
unsafe impl<B: Target + ?Sized> Output for B {
    type Elem = B::Elem;
    #[inline]
    fn output_dtype(&self) -> DType {
        self.dtype()
    }
    #[inline]
    fn output_len(&self) -> usize {
        self.len()
    }
    #[inline]
    fn lend_output<'a>(&'a mut self, stream: &'a Stream) -> Result<Loan<'a>> {
        self.lend_mut(stream)
    }
}

/// Host memory that is not initialised yet, as an [`Output`].
pub struct Uninit<'m, T>(pub &'m mut [MaybeUninit<T>]);

// SAFETY: a slice's elements do not move while it is borrowed, and `&mut self` is exclusive.
unsafe impl<T: Plain> Output for Uninit<'_, T> {
    type Elem = T;
    #[inline]
    fn output_dtype(&self) -> DType {
        T::dtype()
    }
    #[inline]
    fn output_len(&self) -> usize {
        self.0.len()
    }
    #[inline]
    fn lend_output<'a>(&'a mut self, _stream: &'a Stream) -> Result<Loan<'a>> {
        Ok(Loan::host(self.0.as_mut_ptr().cast()))
    }
}

macro_rules! slice_like {
    ($([$($generics:tt)*] $ty:ty),* $(,)?) => {$(
        // SAFETY: a slice's elements are initialised and do not move while it is borrowed.
        unsafe impl<$($generics)*> Source for $ty {
            type Elem = T;
            #[inline]
            fn dtype(&self) -> DType {
                T::dtype()
            }
            #[inline]
            fn len(&self) -> usize {
                <[T]>::len(self)
            }
            #[inline]
            fn lend<'a>(&'a self, _stream: &'a Stream) -> Result<Loan<'a>> {
                Ok(Loan::host(<[T]>::as_ptr(self).cast_mut().cast()))
            }
        }
        // SAFETY: as above, and `&mut self` is exclusive.
        unsafe impl<$($generics)*> Target for $ty {
            #[inline]
            fn lend_mut<'a>(&'a mut self, _stream: &'a Stream) -> Result<Loan<'a>> {
                Ok(Loan::host(<[T]>::as_mut_ptr(self).cast()))
            }
        }
    )*};
}

slice_like! {
    [T: Plain] [T],
    [T: Plain] Vec<T>,
    [T: Plain] Box<[T]>,
    [T: Plain] HostBuffer<T>,
    [T: Plain, const N: usize] [T; N],
}

// SAFETY: forwards to the buffer behind the reference.
unsafe impl<B: Source + ?Sized> Source for &B {
    type Elem = B::Elem;
    #[inline]
    fn dtype(&self) -> DType {
        (**self).dtype()
    }
    #[inline]
    fn len(&self) -> usize {
        (**self).len()
    }
    #[inline]
    fn lend<'a>(&'a self, stream: &'a Stream) -> Result<Loan<'a>> {
        (**self).lend(stream)
    }
}

// SAFETY: forwards to the buffer behind the reference.
unsafe impl<B: Source + ?Sized> Source for &mut B {
    type Elem = B::Elem;
    #[inline]
    fn dtype(&self) -> DType {
        (**self).dtype()
    }
    #[inline]
    fn len(&self) -> usize {
        (**self).len()
    }
    #[inline]
    fn lend<'a>(&'a self, stream: &'a Stream) -> Result<Loan<'a>> {
        (**self).lend(stream)
    }
}

// SAFETY: as above, and `&mut self` is exclusive.
unsafe impl<B: Target + ?Sized> Target for &mut B {
    #[inline]
    fn lend_mut<'a>(&'a mut self, stream: &'a Stream) -> Result<Loan<'a>> {
        (**self).lend_mut(stream)
    }
}

/// A buffer that can be given away to a request and back: owned host memory.
///
/// # Safety
/// The elements stay at the same address when the value itself is moved (heap or shared memory).
#[diagnostic::on_unimplemented(
    message = "a request cannot keep `{Self}` until it is over",
    label = "not a `Vec`, a `Box<[T]>` or memory of `Comm::alloc`",
    note = "pass the memory itself, and `Request::wait` gives it back; `to_vec()` copies a slice or an array into such memory",
    note = "borrowed memory can be used by several operations at once in a `phalanx::group`"
)]
pub unsafe trait Owned: Target + Send + 'static {}

// SAFETY: a vector's elements are on the heap.
unsafe impl<T: Plain> Owned for Vec<T> {}
// SAFETY: a boxed slice's elements are on the heap.
unsafe impl<T: Plain> Owned for Box<[T]> {}
// SAFETY: the elements are in the region, wherever the handle is.
unsafe impl<T: Plain> Owned for HostBuffer<T> {}
