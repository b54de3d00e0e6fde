//! [`Runtime`]: the functions of CUDA's driver or HIP that the backend needs. One object for each device.
//!
//! Operations on device memory call the library alone. The runtime serves host memory, waits and set-up.

#[cfg(feature = "nccl")]
mod cuda;
#[cfg(feature = "rccl")]
mod hip;

#[cfg(feature = "nccl")]
pub(crate) use cuda::Cuda;
#[cfg(feature = "rccl")]
pub(crate) use hip::Hip;

use crate::backend::nccl::device::MemoryPlace;
use crate::buffer::stream::GpuStream;
use crate::types::error::{LibraryError, Result};
use crate::types::memory::RawStream;
#[cfg(feature = "nccl")]
use cudarc::driver::CudaContext;
use std::ffi::c_void;
#[cfg(feature = "nccl")]
use std::sync::Arc;

/// An answer of the runtime.
pub(crate) type Answer<T = ()> = std::result::Result<T, LibraryError>;

/// A device's runtime.
///
/// # Safety of its functions
/// Streams and events are the device's, and it is current; memory is valid for so many bytes until the
/// stream's work is complete; what is freed or destroyed was made by the same object, and goes once.
pub(crate) trait Runtime: Send + Sync {
    fn ordinal(&self) -> usize;
    #[cfg(feature = "nccl")]
    fn cuda(&self) -> Option<&Arc<CudaContext>> {
        None
    }

    /// What makes the device current: a context, a number.
    fn place(&self) -> usize;
    /// What is current on this thread.
    fn current(&self) -> usize;
    fn make_current(&self, place: usize);

    fn default_stream(&self) -> GpuStream;
    fn new_stream(&self) -> Result<GpuStream>;
    fn has(&self, stream: &GpuStream) -> bool;

    /// Whether an address is of memory that came from one of the driver's pools (`cuMemAllocAsync`).
    fn is_of_pool(&self, _address: usize) -> bool {
        false
    }

    unsafe fn is_captured(&self, stream: RawStream) -> Answer<bool>;
    unsafe fn is_idle(&self, stream: RawStream) -> Answer<bool>;
    /// The error of work that is not complete.
    fn not_ready(&self) -> LibraryError;

    unsafe fn clear(&self, start: *mut u8, bytes: usize, stream: RawStream) -> Answer;
    unsafe fn copy(&self, target: *mut u8, source: *const u8, bytes: usize, stream: RawStream) -> Answer;

    fn allocate(&self, place: MemoryPlace, bytes: usize) -> Answer<*mut u8>;
    unsafe fn free(&self, place: MemoryPlace, start: *mut u8);
    /// `None` if the device has no memory pools.
    unsafe fn allocate_on(&self, bytes: usize, stream: RawStream) -> Answer<Option<*mut u8>>;
    unsafe fn free_on(&self, start: *mut u8, stream: RawStream);

    fn create_event(&self) -> Answer<*mut c_void>;
    unsafe fn destroy_event(&self, event: *mut c_void);
    unsafe fn record(&self, event: *mut c_void, stream: RawStream) -> Answer;
    unsafe fn wait(&self, stream: RawStream, event: *mut c_void) -> Answer;
}
