//! Symmetric memory: allocated by all PEs together, so that each can name the others' part by its own.

use super::context::Context;
use super::signal::Signal;
use super::views::Peer;
use crate::buffer::loan::Loan;
use crate::buffer::stream::Stream;
use crate::buffer::{Source, Target};
use crate::types::dtype::{DType, Element};
use crate::types::error::{Error, Result, UsageError};
use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaSlice, CudaView, CudaViewMut};
use std::ffi::c_void;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Bound, RangeBounds};

mod sealed {
    pub trait Sealed {}
}

/// Memory of this PE that the library can read: [`Symmetric`] memory, its slices, and
/// [`Registered`](super::Registered) buffers.
pub trait Local: Source<Elem: Element> + sealed::Sealed {}

/// Memory of this PE that the library can write.
pub trait LocalMut: Local + Target {}

/// Symmetric memory, as the address of the same place on every PE: [`Symmetric`] and its slices.
pub trait Shared: Local {
    /// The address on this PE, by which the library finds a peer's.
    #[doc(hidden)]
    fn place(&self) -> CUdeviceptr;
}

/// `len` elements of symmetric memory on every PE, of the GPU.
///
/// This PE's own part is a buffer for cudarc's copies and kernels ([`view`](Symmetric::view),
/// [`view_mut`](Symmetric::view_mut)) and for the collectives of a [`Comm`](crate::Comm). Peers can write to
/// it at any time; signals and barriers order their writes with this PE's reads.
///
/// [`free`](Symmetric::free) gives it back, on all PEs together. Dropping it cannot: the memory then stays
/// allocated until [`Context::finalize`], with a line in the log.
pub struct Symmetric<'c, T: Element> {
    context: &'c Context,
    /// cudarc's handle on memory that is not cudarc's to free.
    slice: ManuallyDrop<CudaSlice<T>>,
    start: CUdeviceptr,
    /// Its number among the context's allocations, the same on all PEs.
    number: u64,
    origin: MemoryOrigin,
}

/// The origin of symmetric memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryOrigin {
    Heap,
    /// A mapping of the user's memory, of so many bytes.
    Registered(usize),
}

impl<'c, T: Element> Symmetric<'c, T> {
    pub(crate) fn new(
        context: &'c Context,
        start: CUdeviceptr,
        len: usize,
        origin: MemoryOrigin,
    ) -> Symmetric<'c, T> {
        // SAFETY: memory of `len` elements on the stream's device. Every bit pattern is an element.
        let slice = ManuallyDrop::new(unsafe { context.stream().upgrade_device_ptr::<T>(start, len) });
        Symmetric { context, slice, start, number: context.next_allocation(), origin }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.slice.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its context.
    pub fn context(&self) -> &'c Context {
        self.context
    }

    /// The address on this PE, which kernels hand to NVSHMEM's device functions.
    pub fn device_ptr(&self) -> CUdeviceptr {
        self.start
    }

    /// This PE's part, for cudarc's copies and kernels, reading.
    pub fn view(&self) -> CudaView<'_, T> {
        self.slice.as_view()
    }

    /// This PE's part, for cudarc's copies and kernels.
    pub fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.slice.as_view_mut()
    }

    /// A part of it. As with slices of Rust, a range that is out of bounds is a panic.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Slice<'_, T> {
        let (from, to) = bounds(range, self.len());
        Slice { view: self.slice.slice(from..to), start: self.start + (from * size_of::<T>()) as u64 }
    }

    /// A part of it, to write to.
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> SliceMut<'_, T> {
        let (from, to) = bounds(range, self.len());
        let start = self.start + (from * size_of::<T>()) as u64;
        SliceMut { view: self.slice.slice_mut(from..to), start }
    }

    /// Another PE's part, if kernels of this PE can load from it and store to it (over NVLink or PCIe).
    /// `nvshmem_ptr`
    ///
    /// # Errors
    /// [`UsageError::Rank`] if there is no such PE.
    pub fn peer(&self, pe: usize) -> Result<Option<Peer<'_, T>>> {
        let start = self.context.peer("peer", self.start, pe)?;
        Ok(start.map(|start| Peer::new(start, self.len())))
    }

    /// Waits for all work of the GPU, then frees the memory. Collective, in the same order on all PEs: before
    /// it frees, the library waits for all PEs and for their puts to this memory. `nvshmem_free`
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Peer`] if a PE does not come: the memory is then leaked.
    pub fn free(self) -> Result<()> {
        let (context, start, number, origin) = (self.context, self.start, self.number, self.origin);
        let this = ManuallyDrop::new(self);
        // SAFETY: taken once, since `this` is not dropped; cudarc forgets the memory, and frees its events.
        let _ = unsafe { std::ptr::read(&raw const *this.slice) }.leak();
        context.release(start, number, origin)
    }
}

impl Context {
    /// The address of a PE's part of symmetric memory in this process.
    pub(crate) fn peer(
        &self,
        operation: &'static str,
        start: CUdeviceptr,
        pe: usize,
    ) -> Result<Option<CUdeviceptr>> {
        let pe = self.check_pe(operation, pe)?;
        self.check()?;
        let find = self.library.need(self.library.nvshmem_ptr, "nvshmem_ptr")?;
        // SAFETY: initialised; a symmetric address and a PE that exists.
        let found = unsafe { find(start as *const c_void, pe) } as CUdeviceptr;
        Ok((found != 0).then_some(found))
    }
}

impl<T: Element> Drop for Symmetric<'_, T> {
    fn drop(&mut self) {
        crate::os::log::warn!(
            pe = self.context.my_pe(),
            "{} × {} of symmetric memory was dropped and not freed: it stays allocated until the context is finalized; \
             call Symmetric::free on every PE",
            self.len(),
            T::DTYPE,
        );
    }
}

/// Part of [`Symmetric`] memory.
pub struct Slice<'a, T: Element> {
    view: CudaView<'a, T>,
    start: CUdeviceptr,
}

/// Part of [`Symmetric`] memory, to write to.
pub struct SliceMut<'a, T: Element> {
    view: CudaViewMut<'a, T>,
    start: CUdeviceptr,
}

impl<'a, T: Element> Slice<'a, T> {
    /// For cudarc's copies and kernels, reading.
    pub fn view(&self) -> &CudaView<'a, T> {
        &self.view
    }
}

impl<T: Element> SliceMut<'_, T> {
    /// For cudarc's copies and kernels.
    ///
    /// It is a view of its own, since the slice's must not be exchanged for that of another length:
    /// ```compile_fail,E0308
    /// # fn f(long: &mut phalanx::nvshmem::SliceMut<'_, f32>, short: &mut phalanx::nvshmem::SliceMut<'_, f32>) {
    /// std::mem::swap(long.view_mut(), short.view_mut());
    /// # }
    /// ```
    pub fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.view.slice_mut(..)
    }
}

pub(crate) fn bounds(range: impl RangeBounds<usize>, len: usize) -> (usize, usize) {
    let from = match range.start_bound() {
        Bound::Included(from) => *from,
        Bound::Excluded(before) => before.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let to = match range.end_bound() {
        Bound::Included(last) => last.saturating_add(1),
        Bound::Excluded(to) => *to,
        Bound::Unbounded => len,
    };
    assert!(from <= to && to <= len, "the range {from}..{to} is out of bounds of {len} elements");
    (from, to)
}

/// The length in bytes.
pub(crate) fn byte_count<T: Element>(operation: &'static str, len: usize) -> Result<usize> {
    let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| *bytes <= isize::MAX as usize);
    bytes.ok_or_else(|| {
        UsageError::Overflow {
            operation,
            what: "the length in bytes",
            value: format!("{len} × {}", size_of::<T>()),
            limit: isize::MAX.to_string(),
        }
        .into()
    })
}

macro_rules! symmetric {
    ($($ty:ty: $field:ident),*) => {$(
        impl<T: Element> sealed::Sealed for $ty {}
        impl<T: Element> Local for $ty {}

        impl<T: Element> Shared for $ty {
            #[inline]
            fn place(&self) -> CUdeviceptr {
                self.start
            }
        }

        // SAFETY: device memory of so many elements, borrowed; cudarc's handle orders later users.
        unsafe impl<T: Element> Source for $ty {
            type Elem = T;
            #[inline]
            fn dtype(&self) -> DType {
                T::DTYPE
            }
            #[inline]
            fn len(&self) -> usize {
                self.$field.len()
            }
            #[inline]
            fn lend<'l>(&'l self, stream: &'l Stream) -> Result<Loan<'l>> {
                self.$field.lend(stream)
            }
        }

        impl<T: Element> fmt::Debug for $ty {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(concat!("nvshmem::", stringify!($ty)))
                    .field("dtype", &T::DTYPE)
                    .field("len", &self.$field.len())
                    .field("start", &format_args!("{:#x}", self.start))
                    .finish()
            }
        }
    )*};
    (mut $($ty:ty: $field:ident),*) => {$(
        impl<T: Element> LocalMut for $ty {}

        // SAFETY: as above, and `&mut self` is exclusive among this PE's users.
        unsafe impl<T: Element> Target for $ty {
            #[inline]
            fn lend_mut<'l>(&'l mut self, stream: &'l Stream) -> Result<Loan<'l>> {
                self.$field.lend_mut(stream)
            }
        }
    )*};
}

symmetric! { Symmetric<'_, T>: slice, Slice<'_, T>: view, SliceMut<'_, T>: view }
symmetric! { mut Symmetric<'_, T>: slice, SliceMut<'_, T>: view }

impl<T: Element> sealed::Sealed for super::Registered<'_, T> {}

impl Symmetric<'_, u64> {
    /// An element as a signal.
    ///
    /// # Errors
    /// [`UsageError::Length`] if there is no such element.
    pub fn signal(&self, index: usize) -> Result<Signal<'_>> {
        check_index("signal", self.len(), index)?;
        Ok(Signal::new(self.start + (index * size_of::<u64>()) as u64))
    }
}

/// An error if there is no such element.
#[inline]
pub(crate) fn check_index(operation: &'static str, len: usize, index: usize) -> Result<()> {
    if index < len {
        Ok(())
    } else {
        Err(too_short(operation, "symmetric", len, index.saturating_add(1), "the index"))
    }
}

/// The error for a buffer of the wrong length.
#[cold]
pub(crate) fn too_short(
    operation: &'static str,
    buffer: &'static str,
    actual: usize,
    expected: usize,
    rule: &'static str,
) -> Error {
    UsageError::Length { operation, buffer, actual, expected, rule }.into()
}

#[cfg(test)]
mod tests {
    use super::bounds;
    use std::ops::Bound;

    #[test]
    fn ranges_of_every_kind() {
        assert_eq!(bounds(.., 5), (0, 5));
        assert_eq!(bounds(1..3, 5), (1, 3));
        assert_eq!(bounds(..=4, 5), (0, 5));
        assert_eq!(bounds((Bound::Excluded(1), Bound::Unbounded), 5), (2, 5));
    }

    #[test]
    #[should_panic(expected = "out of bounds")]
    fn a_range_to_the_last_number_of_all() {
        bounds(..=usize::MAX, 5);
    }
}
