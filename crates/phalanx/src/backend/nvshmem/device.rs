//! GPU calls of the backend: events, pinned memory, copies. Streams are raw here; the process keeps them
//! alive.

pub(crate) use super::pe::copy;
use super::pe::{PeDevice, device_error};
use crate::types::error::Result;
use crate::types::memory::RawStream;
use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUresult};
use std::ffi::c_void;

fn check(function: &'static str, result: CUresult) -> Result<()> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        error => Err(device_error(function, error, false)),
    }
}

/// Whether a stream's work is complete. The device is current.
pub(crate) fn is_idle(stream: RawStream) -> Result<bool> {
    // SAFETY: a stream of the device, which the process keeps alive.
    match unsafe { sys::cuStreamQuery(stream.0.cast()) } {
        CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        CUresult::CUDA_SUCCESS => Ok(true),
        error => Err(device_error("cuStreamQuery", error, true)),
    }
}

/// A point in a stream's work.
pub(crate) struct StreamEvent(CUevent);

// SAFETY: an event may be used by any thread.
unsafe impl Send for StreamEvent {}

impl StreamEvent {
    /// Records an event behind the stream's current work. The device is current.
    pub fn behind(stream: RawStream) -> Result<StreamEvent> {
        let mut event: CUevent = std::ptr::null_mut();
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: an out-pointer on the stack, written during the call.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut event, flags) })?;
        let event = StreamEvent(event);
        // SAFETY: an event and a stream of the device.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.0, stream.0.cast()) })?;
        Ok(event)
    }

    /// Whether the stream has reached it.
    pub fn is_past(&self) -> Result<bool> {
        // SAFETY: an event that was recorded.
        match unsafe { sys::cuEventQuery(self.0) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            CUresult::CUDA_SUCCESS => Ok(true),
            error => Err(device_error("cuEventQuery", error, true)),
        }
    }

    /// Makes later work of another stream wait for it.
    pub fn hold(&self, stream: RawStream) -> Result<()> {
        // SAFETY: an event and a stream of the device.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream.0.cast(), self.0, 0) })
    }
}

impl Drop for StreamEvent {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once; the driver keeps it for those that wait for it.
        unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}

/// Page-locked host memory, zero at first. No copy is under way when it is dropped, by the contract of the
/// copies.
pub(crate) struct Pinned {
    pub start: *mut u8,
    device: PeDevice,
}

// SAFETY: an owned address; whoever uses it says so in its own contract.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub fn new(device: &PeDevice, bytes: usize) -> Result<Pinned> {
        device.enter()?;
        let mut start: *mut c_void = std::ptr::null_mut();
        let bytes = bytes.max(1);
        // SAFETY: an out-pointer on the stack, written during the call.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut start, bytes, 0) })?;
        let start: *mut u8 = start.cast();
        // SAFETY: so many bytes were allocated.
        unsafe { start.write_bytes(0, bytes) };
        Ok(Pinned { start, device: device.clone() })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: allocated by `new`, freed once.
            unsafe { sys::cuMemFreeHost(self.start.cast()) };
        }
    }
}

/// Number of GPUs that this process sees.
pub(crate) fn count() -> Result<usize> {
    crate::gpu::cuda::driver()?;
    Ok(cudarc::driver::CudaContext::device_count()? as usize)
}
