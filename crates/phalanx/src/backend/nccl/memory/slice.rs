//! Slices of CUDA and HIP over memory that the library owns.

use crate::buffer::Target;
#[cfg(feature = "nccl")]
use crate::buffer::cuda;
use crate::buffer::stream::GpuStream;
#[cfg(feature = "rccl")]
use crate::gpu::hip;
use crate::types::dtype::Element;
use crate::types::error::Result;
#[cfg(feature = "nccl")]
use cudarc::driver::{CudaSlice, DriverError};

/// The runtime's slice over memory that is not its own to free.
pub trait GpuSlice<T: Element>: Target<Elem = T> + Sized {
    /// # Safety
    /// Memory of `len` elements of the stream's device, that is zeroed before anybody reads it.
    #[doc(hidden)]
    unsafe fn over(stream: &GpuStream, start: *mut u8, len: usize) -> Self;
    /// Whether it was made on this stream.
    #[doc(hidden)]
    fn is_on(&self, stream: &GpuStream) -> bool;
    /// Puts the slice's stream behind these readers and all users that the slice knows itself, and later ones
    /// behind that; answers it.
    #[doc(hidden)]
    fn gather_users(&mut self, readers: &[GpuStream]) -> Result<GpuStream>;
    /// Forgets the memory, and gives back what was needed for its order.
    #[doc(hidden)]
    fn forget(self);
}

#[cfg(feature = "nccl")]
impl<T: Element> GpuSlice<T> for CudaSlice<T> {
    unsafe fn over(stream: &GpuStream, start: *mut u8, len: usize) -> Self {
        let stream = stream.cuda().expect("a stream of NCCL is one of CUDA");
        // SAFETY: the caller's contract.
        unsafe { stream.upgrade_device_ptr(start as u64, len) }
    }

    fn is_on(&self, stream: &GpuStream) -> bool {
        stream.cuda().is_some_and(|stream| stream.cu_stream() == self.stream().cu_stream())
    }

    fn gather_users(&mut self, readers: &[GpuStream]) -> Result<GpuStream> {
        gather_users(self, readers)?;
        Ok(GpuStream::Cuda(self.stream().clone()))
    }

    fn forget(self) {
        self.leak();
    }
}

#[cfg(feature = "rccl")]
impl<T: Element> GpuSlice<T> for hip::Slice<T> {
    unsafe fn over(stream: &GpuStream, start: *mut u8, len: usize) -> Self {
        let stream = stream.hip().expect("a stream of RCCL is one of HIP");
        // SAFETY: the caller's contract; the buffer waits for the users before it frees the memory.
        unsafe { hip::Slice::from_raw(start.cast(), len, stream) }
    }

    fn is_on(&self, stream: &GpuStream) -> bool {
        stream.hip().is_some_and(|stream| stream.as_raw() == self.stream().as_raw())
    }

    /// It knows its readers.
    fn gather_users(&mut self, _readers: &[GpuStream]) -> Result<GpuStream> {
        hip::Slice::gather_users(self)?;
        Ok(GpuStream::Hip(self.stream().clone()))
    }

    fn forget(self) {}
}

#[cfg(feature = "nccl")]
pub(super) fn gather_users<T>(
    slice: &mut CudaSlice<T>,
    readers: &[GpuStream],
) -> std::result::Result<(), DriverError> {
    cuda::gather_users(slice, readers.iter().map(|reader| reader.raw().0.cast()))
}
