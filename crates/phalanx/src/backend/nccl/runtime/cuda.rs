//! CUDA's driver, by way of cudarc.

use super::{Answer, Runtime};
use crate::backend::nccl::device::MemoryPlace;
use crate::buffer::stream::GpuStream;
use crate::gpu::cuda::driver;
use crate::gpu::cuda::failed;
use crate::types::error::{LibraryError, Result};
use crate::types::memory::RawStream;
use cudarc::driver::sys::{self, CUdeviceptr, CUevent_flags, CUresult, CUstreamCaptureStatus};
use cudarc::driver::{CudaContext, DriverError};
use std::ffi::c_void;
use std::sync::Arc;

/// An NVIDIA GPU, and its primary context.
pub(crate) struct Cuda(Arc<CudaContext>);

/// The context that is current on this thread; null before cuInit, which is when the call fails.
fn current() -> usize {
    let mut context = std::ptr::null_mut();
    // SAFETY: an out-pointer on the stack, written during the call.
    unsafe { sys::cuCtxGetCurrent(&raw mut context) };
    context as usize
}

fn make_current(context: usize) {
    // SAFETY: a device's primary context, or what was current before; null means none.
    unsafe { sys::cuCtxSetCurrent(context as sys::CUcontext) };
}

impl Cuda {
    pub fn count() -> Result<usize> {
        driver()?;
        Ok(CudaContext::device_count()? as usize)
    }

    pub fn open(ordinal: usize) -> Result<Cuda> {
        driver()?;
        let before = current();
        let context = CudaContext::new(ordinal);
        make_current(before);
        Ok(Cuda(context?))
    }
}

impl Runtime for Cuda {
    fn ordinal(&self) -> usize {
        self.0.ordinal()
    }

    fn cuda(&self) -> Option<&Arc<CudaContext>> {
        Some(&self.0)
    }

    fn place(&self) -> usize {
        self.0.cu_ctx() as usize
    }

    fn current(&self) -> usize {
        current()
    }

    fn make_current(&self, place: usize) {
        make_current(place);
    }

    fn default_stream(&self) -> GpuStream {
        GpuStream::Cuda(self.0.default_stream())
    }

    fn new_stream(&self) -> Result<GpuStream> {
        Ok(GpuStream::Cuda(self.0.new_stream()?))
    }

    fn has(&self, stream: &GpuStream) -> bool {
        stream.cuda().is_some_and(|stream| stream.context().cu_ctx() == self.0.cu_ctx())
    }

    fn is_of_pool(&self, address: usize) -> bool {
        let mut pool: sys::CUmemoryPool = std::ptr::null_mut();
        let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE;
        // SAFETY: an attribute that is a handle, which is written during the call; any address may be asked
        // for.
        let answered =
            unsafe { sys::cuPointerGetAttribute((&raw mut pool).cast(), attribute, address as CUdeviceptr) };
        answered == CUresult::CUDA_SUCCESS && !pool.is_null()
    }

    unsafe fn is_captured(&self, stream: RawStream) -> Answer<bool> {
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the caller's contract; the out-pointer is written during the call.
        check("cuStreamIsCapturing", unsafe { sys::cuStreamIsCapturing(stream.0.cast(), &raw mut status) })?;
        Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    unsafe fn is_idle(&self, stream: RawStream) -> Answer<bool> {
        // SAFETY: the caller's contract.
        match unsafe { sys::cuStreamQuery(stream.0.cast()) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("cuStreamQuery", result).map(|()| true),
        }
    }

    fn not_ready(&self) -> LibraryError {
        failed("cuStreamQuery", DriverError(CUresult::CUDA_ERROR_NOT_READY))
    }

    unsafe fn clear(&self, start: *mut u8, bytes: usize, stream: RawStream) -> Answer {
        // SAFETY: the caller's contract.
        let result = unsafe { sys::cuMemsetD8Async(start as CUdeviceptr, 0, bytes, stream.0.cast()) };
        check("cuMemsetD8Async", result)
    }

    unsafe fn copy(&self, target: *mut u8, source: *const u8, bytes: usize, stream: RawStream) -> Answer {
        // SAFETY: the caller's contract; the driver tells by the addresses where they are.
        let result = unsafe {
            sys::cuMemcpyAsync(target as CUdeviceptr, source as CUdeviceptr, bytes, stream.0.cast())
        };
        check("cuMemcpyAsync", result)
    }

    fn allocate(&self, place: MemoryPlace, bytes: usize) -> Answer<*mut u8> {
        if place == MemoryPlace::Device {
            let mut start: CUdeviceptr = 0;
            // SAFETY: an out-pointer on the stack, written during the call.
            check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut start, bytes) })?;
            return Ok(start as *mut u8);
        }
        let mut start: *mut c_void = std::ptr::null_mut();
        // SAFETY: as above.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut start, bytes, 0) })?;
        Ok(start.cast())
    }

    unsafe fn free(&self, place: MemoryPlace, start: *mut u8) {
        // SAFETY: the caller's contract. cuMemFree waits for work that may still use it.
        unsafe {
            match place {
                MemoryPlace::Device => sys::cuMemFree_v2(start as CUdeviceptr),
                MemoryPlace::Host => sys::cuMemFreeHost(start.cast()),
            }
        };
    }

    unsafe fn allocate_on(&self, bytes: usize, stream: RawStream) -> Answer<Option<*mut u8>> {
        if !self.0.has_async_alloc() {
            return Ok(None);
        }
        let mut start: CUdeviceptr = 0;
        // SAFETY: an out-pointer on the stack, written during the call.
        check("cuMemAllocAsync", unsafe { sys::cuMemAllocAsync(&raw mut start, bytes, stream.0.cast()) })?;
        Ok(Some(start as *mut u8))
    }

    unsafe fn free_on(&self, start: *mut u8, stream: RawStream) {
        // SAFETY: the caller's contract.
        unsafe { sys::cuMemFreeAsync(start as CUdeviceptr, stream.0.cast()) };
    }

    fn create_event(&self) -> Answer<*mut c_void> {
        let mut event: sys::CUevent = std::ptr::null_mut();
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: an out-pointer on the stack, written during the call.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut event, flags) })?;
        Ok(event.cast())
    }

    unsafe fn destroy_event(&self, event: *mut c_void) {
        // SAFETY: the caller's contract.
        unsafe { sys::cuEventDestroy_v2(event.cast()) };
    }

    unsafe fn record(&self, event: *mut c_void, stream: RawStream) -> Answer {
        // SAFETY: the caller's contract.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.cast(), stream.0.cast()) })
    }

    unsafe fn wait(&self, stream: RawStream, event: *mut c_void) -> Answer {
        // SAFETY: the caller's contract.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream.0.cast(), event.cast(), 0) })
    }
}

fn check(function: &'static str, result: CUresult) -> Answer {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        error => Err(failed(function, DriverError(error))),
    }
}
