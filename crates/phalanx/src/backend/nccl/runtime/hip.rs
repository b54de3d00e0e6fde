//! HIP, by way of `phalanx-sys`.

use super::{Answer, Runtime};
use crate::backend::nccl::device::MemoryPlace;
use crate::buffer::stream::GpuStream;
use crate::gpu::hip;
use crate::gpu::hip::{check, failed};
use crate::types::error::{LibraryError, Result};
use crate::types::memory::RawStream;
use phalanx_sys::hip::{
    Api, hipError_t, hipEventDisableTiming, hipHostMallocDefault, hipMemcpyDefault,
    hipStreamCaptureStatusNone,
};
use std::ffi::{c_int, c_void};

/// An AMD GPU.
pub(crate) struct Hip {
    api: &'static Api,
    device: hip::Device,
}

impl Hip {
    pub fn open(ordinal: usize) -> Result<Hip> {
        Ok(Hip { api: hip::api()?, device: hip::Device::new(ordinal)? })
    }
}

impl Runtime for Hip {
    fn ordinal(&self) -> usize {
        self.device.ordinal()
    }

    fn place(&self) -> usize {
        self.ordinal()
    }

    fn current(&self) -> usize {
        let mut device = 0;
        // SAFETY: an out-pointer on the stack, written during the call.
        unsafe { (self.api.hipGetDevice)(&raw mut device) };
        device as usize
    }

    fn make_current(&self, place: usize) {
        // SAFETY: this device, or the one that was current before.
        unsafe { (self.api.hipSetDevice)(place as c_int) };
    }

    fn default_stream(&self) -> GpuStream {
        GpuStream::Hip(self.device.default_stream())
    }

    fn new_stream(&self) -> Result<GpuStream> {
        self.device.new_stream().map(GpuStream::Hip)
    }

    fn has(&self, stream: &GpuStream) -> bool {
        stream.hip().is_some_and(|stream| stream.device() == self.ordinal())
    }

    unsafe fn is_captured(&self, stream: RawStream) -> Answer<bool> {
        let Some(is_capturing) = self.api.hipStreamIsCapturing else { return Ok(false) };
        let mut status = hipStreamCaptureStatusNone;
        // SAFETY: the caller's contract; the out-pointer is written during the call.
        check(self.api, "hipStreamIsCapturing", unsafe { is_capturing(stream.0, &raw mut status) })?;
        Ok(status != hipStreamCaptureStatusNone)
    }

    unsafe fn is_idle(&self, stream: RawStream) -> Answer<bool> {
        // SAFETY: the caller's contract.
        match unsafe { (self.api.hipStreamQuery)(stream.0) } {
            hipError_t::NotReady => Ok(false),
            result => check(self.api, "hipStreamQuery", result).map(|()| true),
        }
    }

    fn not_ready(&self) -> LibraryError {
        failed(self.api, "hipStreamQuery", hipError_t::NotReady)
    }

    unsafe fn clear(&self, start: *mut u8, bytes: usize, stream: RawStream) -> Answer {
        // SAFETY: the caller's contract.
        let result = unsafe { (self.api.hipMemsetAsync)(start.cast(), 0, bytes, stream.0) };
        check(self.api, "hipMemsetAsync", result)
    }

    unsafe fn copy(&self, target: *mut u8, source: *const u8, bytes: usize, stream: RawStream) -> Answer {
        let (target, source) = (target.cast(), source.cast());
        // SAFETY: the caller's contract; the runtime tells by the addresses where they are.
        let result = unsafe { (self.api.hipMemcpyAsync)(target, source, bytes, hipMemcpyDefault, stream.0) };
        check(self.api, "hipMemcpyAsync", result)
    }

    fn allocate(&self, place: MemoryPlace, bytes: usize) -> Answer<*mut u8> {
        let mut start = std::ptr::null_mut();
        // SAFETY: an out-pointer on the stack, written during the call.
        let (result, function) = unsafe {
            match place {
                MemoryPlace::Device => ((self.api.hipMalloc)(&raw mut start, bytes), "hipMalloc"),
                MemoryPlace::Host => {
                    ((self.api.hipHostMalloc)(&raw mut start, bytes, hipHostMallocDefault), "hipHostMalloc")
                }
            }
        };
        check(self.api, function, result).map(|()| start.cast())
    }

    unsafe fn free(&self, place: MemoryPlace, start: *mut u8) {
        // SAFETY: the caller's contract. hipFree waits for work that may still use it.
        unsafe {
            match place {
                MemoryPlace::Device => (self.api.hipFree)(start.cast()),
                MemoryPlace::Host => (self.api.hipHostFree)(start.cast()),
            }
        };
    }

    unsafe fn allocate_on(&self, bytes: usize, stream: RawStream) -> Answer<Option<*mut u8>> {
        let (Some(allocate), Some(_)) = (self.api.hipMallocAsync, self.api.hipFreeAsync) else {
            return Ok(None);
        };
        let mut start = std::ptr::null_mut();
        // SAFETY: an out-pointer on the stack, written during the call; the caller's contract.
        match unsafe { allocate(&raw mut start, bytes, stream.0) } {
            hipError_t::NotSupported => Ok(None),
            result => check(self.api, "hipMallocAsync", result).map(|()| Some(start.cast())),
        }
    }

    unsafe fn free_on(&self, start: *mut u8, stream: RawStream) {
        if let Some(free) = self.api.hipFreeAsync {
            // SAFETY: the caller's contract.
            unsafe { free(start.cast(), stream.0) };
        }
    }

    fn create_event(&self) -> Answer<*mut c_void> {
        let mut event = std::ptr::null_mut();
        // SAFETY: an out-pointer on the stack, written during the call.
        let result = unsafe { (self.api.hipEventCreateWithFlags)(&raw mut event, hipEventDisableTiming) };
        check(self.api, "hipEventCreateWithFlags", result).map(|()| event)
    }

    unsafe fn destroy_event(&self, event: *mut c_void) {
        // SAFETY: the caller's contract.
        unsafe { (self.api.hipEventDestroy)(event) };
    }

    unsafe fn record(&self, event: *mut c_void, stream: RawStream) -> Answer {
        // SAFETY: the caller's contract.
        check(self.api, "hipEventRecord", unsafe { (self.api.hipEventRecord)(event, stream.0) })
    }

    unsafe fn wait(&self, stream: RawStream, event: *mut c_void) -> Answer {
        // SAFETY: the caller's contract.
        check(self.api, "hipStreamWaitEvent", unsafe { (self.api.hipStreamWaitEvent)(stream.0, event, 0) })
    }
}
