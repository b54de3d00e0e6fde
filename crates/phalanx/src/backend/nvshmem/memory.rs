//! Symmetric memory as a buffer of `Comm`, and the API that only this backend has.

use super::NvshmemComm;
use super::process::NvshmemProcess;
use crate::buffer::loan::Loan;
use crate::buffer::stream::Stream;
use crate::buffer::{Source, Target};
use crate::types::dtype::{DType, Element};
use crate::types::error::{Error, Result, UnsupportedError, UsageError};
use cudarc::driver::{CudaSlice, CudaView, CudaViewMut};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::RangeBounds;
use std::sync::Arc;

/// Features of the NVSHMEM backend alone: [`Comm::nvshmem`](crate::Comm::nvshmem).
#[derive(Clone, Copy)]
pub struct Nvshmem<'a> {
    comm: &'a NvshmemComm,
    stream: &'a Stream,
}

impl<'a> Nvshmem<'a> {
    /// `stream` is the stream on which cudarc knows the memory.
    pub(crate) fn new(comm: &'a NvshmemComm, stream: &'a Stream) -> Nvshmem<'a> {
        Nvshmem { comm, stream }
    }

    /// `len` elements of symmetric memory on every rank, zero: collectives on it are the library's own,
    /// without a copy. Collective over all PEs, with the same length and type on all of them.
    /// `nvshmem_malloc`
    ///
    /// # Errors
    /// [`Error::Library`] if there is not enough memory on some PE, [`Error::Mismatch`] if the PEs ask for
    /// different sizes; [`Error::Unsupported`] on a communicator that has not all PEs.
    pub fn alloc<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        let process = &self.comm.process;
        if self.comm.pes.len() != process.pes {
            return Err(Error::from(UnsupportedError {
                what: "symmetric memory of a part of the PEs".into(),
                why: format!("this communicator has {} of {}", self.comm.pes.len(), process.pes),
                remedy: "allocate with the communicator of all, and use the memory with any".into(),
            }));
        }
        let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| *bytes <= isize::MAX as usize);
        let bytes = bytes.ok_or_else(|| UsageError::Overflow {
            operation: "alloc",
            what: "the length in bytes",
            value: format!("{len} × {}", size_of::<T>()),
            limit: isize::MAX.to_string(),
        })?;
        let (start, number) = self.comm.on_host_channel(|_| process.allocate(bytes))?;
        let stream = self.stream.cuda_stream().unwrap_or(&process.device.stream);
        // SAFETY: memory of `len` elements on the stream's device, zero. Every bit pattern is an element.
        let slice = ManuallyDrop::new(unsafe { stream.upgrade_device_ptr::<T>(start, len) });
        Ok(Buffer { process: process.clone(), slice, start, number })
    }

    /// The number of this rank's PE, which it has in all communicators. `nvshmem_my_pe`
    pub fn my_pe(&self) -> usize {
        self.comm.process.pe
    }

    /// The loaded library's version, as `major.minor.patch`.
    pub fn version(&self) -> String {
        phalanx_sys::nvshmem::version_text(self.comm.process.library.version())
    }
}

impl fmt::Debug for Nvshmem<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvshmem").field("pe", &self.my_pe()).field("pes", &self.comm.pes).finish()
    }
}

/// Symmetric memory of a communicator's ranks, of the GPU, as [`Nvshmem::alloc`] gives it.
///
/// A buffer of every operation, and of cudarc through [`view`](Buffer::view) and
/// [`view_mut`](Buffer::view_mut). The library carries out a collective of equal blocks without a copy, if
/// both buffers are of this type and at the same place on all ranks.
///
/// [`free`](Buffer::free) gives it back, on all PEs together. Dropping it cannot: the memory then stays
/// allocated until [`Comm::finalize`](crate::Comm::finalize) ends the library, with a line in the log.
pub struct Buffer<T: Element> {
    process: Arc<NvshmemProcess>,
    /// cudarc's handle on memory that is not cudarc's to free.
    slice: ManuallyDrop<CudaSlice<T>>,
    start: u64,
    number: u64,
}

impl<T: Element> Buffer<T> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.slice.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The address on this PE.
    pub fn device_ptr(&self) -> u64 {
        self.start
    }

    /// For cudarc's copies and kernels, reading.
    pub fn view(&self) -> CudaView<'_, T> {
        self.slice.as_view()
    }

    /// For cudarc's copies and kernels.
    pub fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.slice.as_view_mut()
    }

    /// A part of it, reading.
    ///
    /// # Panics
    /// If the range ends behind the buffer.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> CudaView<'_, T> {
        self.slice.slice(range)
    }

    /// A part of it.
    ///
    /// # Panics
    /// If the range ends behind the buffer.
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> CudaViewMut<'_, T> {
        self.slice.slice_mut(range)
    }

    /// Waits for whatever the GPU still does, then gives the memory back. Collective, in the same order on
    /// all PEs. `nvshmem_free`
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Peer`] if a PE does not come: the memory is then leaked.
    pub fn free(self) -> Result<()> {
        let this = ManuallyDrop::new(self);
        // SAFETY: each is taken once, since `this` is not dropped; cudarc forgets the memory, and frees its
        // events.
        let (process, slice) =
            unsafe { (std::ptr::read(&raw const this.process), std::ptr::read(&raw const *this.slice)) };
        let _ = slice.leak();
        process.release(this.start, this.number)
    }
}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        crate::os::log::warn!(
            pe = self.process.pe,
            "{} × {} of symmetric memory was dropped and not freed: call Buffer::free on every PE",
            self.slice.len(),
            T::DTYPE,
        );
    }
}

// SAFETY: device memory of so many elements, borrowed; cudarc's handle orders later users.
unsafe impl<T: Element> Source for Buffer<T> {
    type Elem = T;

    fn dtype(&self) -> DType {
        T::DTYPE
    }

    fn len(&self) -> usize {
        self.slice.len()
    }

    fn lend<'l>(&'l self, stream: &'l Stream) -> Result<Loan<'l>> {
        self.slice.lend(stream)
    }
}

// SAFETY: as above, and `&mut self` is exclusive among this PE's users.
unsafe impl<T: Element> Target for Buffer<T> {
    fn lend_mut<'l>(&'l mut self, stream: &'l Stream) -> Result<Loan<'l>> {
        self.slice.lend_mut(stream)
    }
}

impl<T: Element> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("nvshmem::Buffer")
            .field("dtype", &T::DTYPE)
            .field("len", &self.slice.len())
            .field("start", &format_args!("{:#x}", self.start))
            .finish()
    }
}
