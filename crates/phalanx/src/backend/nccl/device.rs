//! A GPU: its context and what the backend does there besides NCCL's calls.

use crate::backend::Stream;
use crate::error::{Error, LibraryError, Result};
use crate::sync::lock;
use cudarc::driver::sys::{self, CUcontext, CUdeviceptr, CUresult};
use cudarc::driver::{CudaContext, DriverError};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// A GPU and its primary context.
#[derive(Clone)]
pub(crate) struct Device {
    pub context: Arc<CudaContext>,
    /// One thread at a time is inside NCCL for a device: "using different communicators of one device from
    /// several threads is not safe" (NCCL's user guide, thread safety).
    pub turn: &'static Mutex<()>,
}

/// How many GPUs this process sees; an error if there is no driver.
pub(crate) fn count() -> Result<usize> {
    driver()?;
    Ok(CudaContext::device_count()? as usize)
}

/// Makes sure that cudarc, which panics without it, finds the driver.
fn driver() -> Result<()> {
    static DRIVER: OnceLock<phalanx_sys::Library> = OnceLock::new();
    if DRIVER.get().is_none() {
        // Never unloaded: cudarc holds it, too.
        let _ = DRIVER.set(phalanx_sys::cuda::DRIVER.open()?);
    }
    Ok(())
}

/// The context that is current on this thread becomes so again when this is dropped.
pub(crate) struct Current(CUcontext);

impl Drop for Current {
    fn drop(&mut self) {
        // SAFETY: the context was current when this was made; null means none.
        unsafe { sys::cuCtxSetCurrent(self.0) };
    }
}

impl Device {
    /// The GPU with this number; opened once for the process, so that all communicators share its context and its turn.
    pub fn open(ordinal: usize) -> Result<Device> {
        static OPENED: Mutex<BTreeMap<usize, Device>> = Mutex::new(BTreeMap::new());
        let count = count()?;
        if ordinal >= count {
            return Err(Error::Unsupported {
                what: format!("GPU {ordinal}"),
                why: format!("this process sees {count} GPUs"),
                remedy: "use fewer ranks, or look at CUDA_VISIBLE_DEVICES".into(),
            });
        }
        let mut opened = lock(&OPENED);
        if let Some(device) = opened.get(&ordinal) {
            return Ok(device.clone());
        }
        let _current = current()?;
        let device = Device { context: CudaContext::new(ordinal)?, turn: Box::leak(Box::default()) };
        opened.insert(ordinal, device.clone());
        Ok(device)
    }

    /// Makes the device current until the guard is dropped.
    pub fn enter(&self) -> Result<Current> {
        let before = current()?;
        self.context.bind_to_thread()?;
        Ok(before)
    }

    /// Whether a stream's work is complete.
    pub fn is_idle(&self, stream: Stream) -> Result<bool> {
        // SAFETY: a stream of this device, which is current, kept alive by its lane.
        match unsafe { sys::cuStreamQuery(stream.0.cast()) } {
            CUresult::CUDA_SUCCESS => Ok(true),
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            error => Err(failed("cuStreamQuery", DriverError(error)).fatal()),
        }
    }

    /// Whether a stream has work to do. One that is captured has none, and must not be asked.
    pub fn is_busy(&self, stream: Stream) -> Result<bool> {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: as in `is_idle`; the out-pointer is written during the call.
        check("cuStreamIsCapturing", unsafe { sys::cuStreamIsCapturing(stream.0.cast(), &raw mut status) })?;
        Ok(status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE && !self.is_idle(stream)?)
    }

    /// Waits until a stream's work is complete, without any rank in mind.
    pub fn wait_idle(&self, stream: Stream, limit: Duration) -> Result<()> {
        let since = Instant::now();
        while !self.is_idle(stream)? {
            if since.elapsed() > limit {
                return Err(failed("cuStreamQuery", DriverError(CUresult::CUDA_ERROR_NOT_READY)).into());
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }

    /// Writes zeroes, behind the stream's work.
    pub fn clear(&self, start: *mut u8, bytes: usize, stream: Stream) -> Result<()> {
        // SAFETY: the caller's memory of so many bytes, which it has just allocated.
        let result = unsafe { sys::cuMemsetD8Async(start as CUdeviceptr, 0, bytes, stream.0.cast()) };
        check("cuMemsetD8Async", result)
    }

    /// Copies between device memory, behind the stream's work.
    ///
    /// # Safety
    /// Both are valid for so many bytes until the stream's work is complete, and do not overlap.
    pub unsafe fn copy(
        &self,
        target: *mut u8,
        source: *const u8,
        bytes: usize,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller's contract.
        let result = unsafe {
            sys::cuMemcpyDtoDAsync_v2(target as CUdeviceptr, source as CUdeviceptr, bytes, stream.0.cast())
        };
        check("cuMemcpyDtoDAsync", result)
    }

    /// Copies to the device, behind the stream's work.
    ///
    /// # Safety
    /// As for [`copy`](Device::copy); the source is pinned host memory.
    pub unsafe fn upload(
        &self,
        target: *mut u8,
        source: *const u8,
        bytes: usize,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller's contract.
        let result = unsafe {
            sys::cuMemcpyHtoDAsync_v2(target as CUdeviceptr, source.cast(), bytes, stream.0.cast())
        };
        check("cuMemcpyHtoDAsync", result)
    }

    /// Copies from the device, behind the stream's work.
    ///
    /// # Safety
    /// As for [`copy`](Device::copy); the target is pinned host memory.
    pub unsafe fn download(
        &self,
        target: *mut u8,
        source: *const u8,
        bytes: usize,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller's contract.
        let result = unsafe {
            sys::cuMemcpyDtoHAsync_v2(target.cast(), source as CUdeviceptr, bytes, stream.0.cast())
        };
        check("cuMemcpyDtoHAsync", result)
    }
}

/// Memory of a device.
pub(crate) struct DeviceMemory {
    pub start: *mut u8,
    context: Arc<CudaContext>,
}

// SAFETY: an owned address; whoever uses it says so in its own contract.
unsafe impl Send for DeviceMemory {}

impl DeviceMemory {
    /// The device is current.
    pub fn new(device: &Device, bytes: usize) -> Result<DeviceMemory> {
        let mut start: CUdeviceptr = 0;
        // SAFETY: an out-pointer on the stack, written during the call.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut start, bytes) })?;
        Ok(DeviceMemory { start: start as *mut u8, context: device.context.clone() })
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let Ok(_current) = current() else { return };
        self.context.record_err(self.context.bind_to_thread());
        // SAFETY: allocated by `new`, freed once. cuMemFree waits for work that may still use it.
        unsafe { sys::cuMemFree_v2(self.start as CUdeviceptr) };
    }
}

/// Memory of a device that begins and ends on a stream: work that was enqueued before the end can still use it.
pub(crate) struct StreamMemory {
    pub start: *mut u8,
    stream: Stream,
}

// SAFETY: an owned address, and a stream that its lane keeps alive.
unsafe impl Send for StreamMemory {}

impl StreamMemory {
    pub fn new(device: &Device, bytes: usize, stream: Stream) -> Result<StreamMemory> {
        if !device.context.has_async_alloc() {
            return Err(Error::Unsupported {
                what: "all_to_all of one buffer".into(),
                why: "the GPU has no memory pools, from which its copy would come".into(),
                remedy: "use all_to_all with two buffers".into(),
            });
        }
        let mut start: CUdeviceptr = 0;
        let bytes = bytes.max(1);
        // SAFETY: an out-pointer on the stack, written during the call.
        check("cuMemAllocAsync", unsafe { sys::cuMemAllocAsync(&raw mut start, bytes, stream.0.cast()) })?;
        Ok(StreamMemory { start: start as *mut u8, stream })
    }
}

impl Drop for StreamMemory {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` on this stream, freed once, behind all work that was enqueued on it.
        unsafe { sys::cuMemFreeAsync(self.start as CUdeviceptr, self.stream.0.cast()) };
    }
}

/// Pinned host memory.
pub(crate) struct PinnedMemory {
    pub start: *mut u8,
    context: Arc<CudaContext>,
}

// SAFETY: an owned address; whoever uses it says so in its own contract.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// The device is current. Zeroed.
    pub fn new(device: &Device, bytes: usize) -> Result<PinnedMemory> {
        let mut start: *mut c_void = std::ptr::null_mut();
        // SAFETY: an out-pointer on the stack, written during the call.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut start, bytes.max(1), 0) })?;
        // SAFETY: so many bytes were allocated.
        unsafe { start.cast::<u8>().write_bytes(0, bytes) };
        Ok(PinnedMemory { start: start.cast(), context: device.context.clone() })
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let Ok(_current) = current() else { return };
        self.context.record_err(self.context.bind_to_thread());
        // SAFETY: allocated by `new`, freed once; no copy is under way, by the contract of the copies.
        unsafe { sys::cuMemFreeHost(self.start.cast()) };
    }
}

fn current() -> Result<Current> {
    let mut context = std::ptr::null_mut();
    // SAFETY: an out-pointer on the stack, written during the call. Before cuInit it fails, and none is current.
    unsafe { sys::cuCtxGetCurrent(&raw mut context) };
    Ok(Current(context))
}

fn check(function: &'static str, result: CUresult) -> Result<()> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        error => Err(failed(function, DriverError(error)).into()),
    }
}

fn failed(function: &'static str, error: DriverError) -> LibraryError {
    LibraryError {
        library: "CUDA".into(),
        function,
        code: error.0 as i32,
        text: describe(error),
        context: None,
        fatal: false,
    }
}

fn describe(error: DriverError) -> String {
    let text = |text: std::result::Result<&std::ffi::CStr, DriverError>| {
        text.map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
    };
    format!("{}, {}", text(error.error_name()), text(error.error_string()))
}

impl From<DriverError> for Error {
    fn from(error: DriverError) -> Error {
        failed("the CUDA driver", error).into()
    }
}
