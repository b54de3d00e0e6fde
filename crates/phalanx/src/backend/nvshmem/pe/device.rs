//! The GPU of this PE.

use crate::gpu::cuda::driver;
use crate::os::sync::lock;
use crate::types::error::{Error, LibraryError, Result, UnsupportedError, UsageError};
use crate::types::memory::RawStream;
use cudarc::driver::sys::{self, CUdeviceptr, CUresult};
use cudarc::driver::{CudaContext, CudaStream, DriverError};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// A GPU and its primary context, which NVSHMEM works in.
#[derive(Debug, Clone)]
pub(crate) struct PeDevice {
    pub context: Arc<CudaContext>,
    pub stream: Arc<CudaStream>,
    /// The stream of blocking operations: nothing on it waits for other PEs, or for other work than that of
    /// its buffers.
    pub host_stream: Arc<CudaStream>,
    word: Word,
}

/// A word of page-locked memory for values from the GPU. It is never freed: the GPU may write late.
#[derive(Debug, Clone, Copy)]
struct Word(*mut u64);

// SAFETY: an address, of memory that is never freed.
unsafe impl Send for Word {}
// SAFETY: as above.
unsafe impl Sync for Word {}

impl Word {
    /// The device is current.
    fn new() -> Result<Word> {
        let mut start = std::ptr::null_mut();
        // SAFETY: an out-pointer on the stack, written during the call.
        match unsafe { sys::cuMemHostAlloc(&raw mut start, size_of::<u64>(), 0) } {
            CUresult::CUDA_SUCCESS => Ok(Word(start.cast())),
            error => Err(failed("cuMemHostAlloc", error, false)),
        }
    }
}

impl PeDevice {
    /// Opens a GPU by number. NVSHMEM ends the process if it finds that there is none.
    ///
    /// Opened once for the process and never closed: closing waits for work that may never end.
    pub fn open(ordinal: usize) -> Result<PeDevice> {
        static OPENED: Mutex<BTreeMap<usize, PeDevice>> = Mutex::new(BTreeMap::new());
        driver()?;
        let count = CudaContext::device_count()? as usize;
        if ordinal >= count {
            return Err(Error::from(UnsupportedError {
                what: format!("NVSHMEM on GPU {ordinal}"),
                why: format!("this process sees {count} GPUs"),
                remedy: "use fewer PEs, name a GPU (Builder::gpu), or look at CUDA_VISIBLE_DEVICES".into(),
            }));
        }
        let mut opened = lock(&OPENED);
        if let Some(device) = opened.get(&ordinal) {
            return Ok(device.clone());
        }
        let context = CudaContext::new(ordinal)?;
        // Not the default stream, which waits for all others of the process.
        let (stream, host_stream) = (context.new_stream()?, context.new_stream()?);
        // Allocated now, since later the driver may wait for all work of the GPU.
        let word = Word::new()?;
        let device = PeDevice { context, stream, host_stream, word };
        opened.insert(ordinal, device.clone());
        Ok(device)
    }

    /// Makes it current on this thread.
    #[inline]
    pub fn enter(&self) -> Result<()> {
        Ok(self.context.bind_to_thread()?)
    }

    /// An error if a stream is another GPU's.
    #[inline]
    pub fn check(&self, stream: &CudaStream) -> Result<()> {
        if stream.context().cu_ctx() == self.context.cu_ctx() { Ok(()) } else { Err(self.stranger(stream)) }
    }

    #[cold]
    fn stranger(&self, stream: &CudaStream) -> Error {
        UsageError::Memory {
            memory: format!("a stream of GPU {}", stream.context().ordinal()),
            wanted: format!("GPU {} and its primary context", self.context.ordinal()),
            remedy: "make the stream on the context's GPU (nvshmem::Context::stream)",
        }
        .into()
    }

    /// Free bytes of the GPU. The device is current.
    pub fn free_memory(&self) -> Result<usize> {
        let (mut free, mut all) = (0, 0);
        // SAFETY: out-pointers on the stack.
        match unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut all) } {
            CUresult::CUDA_SUCCESS => Ok(free),
            error => Err(failed("cuMemGetInfo", error, false)),
        }
    }

    /// A word of page-locked memory, which lives as long as the process.
    pub fn word(&self) -> *mut u64 {
        self.word.0
    }

    /// Whether a stream's work is complete.
    pub fn is_idle(&self, stream: &CudaStream) -> Result<bool> {
        // SAFETY: a stream of this device, which is current.
        match unsafe { sys::cuStreamQuery(stream.cu_stream()) } {
            CUresult::CUDA_SUCCESS => Ok(true),
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            error => Err(failed("cuStreamQuery", error, true)),
        }
    }
}

/// The error for a result of the driver.
#[cold]
pub(crate) fn failed(function: &'static str, result: CUresult, fatal: bool) -> Error {
    let error = DriverError(result);
    let text = |text: std::result::Result<&std::ffi::CStr, DriverError>| {
        text.map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
    };
    LibraryError {
        library: "CUDA".into(),
        function,
        code: result as i32,
        text: format!("{}, {}", text(error.error_name()), text(error.error_string())),
        context: None,
        fatal,
    }
    .into()
}

/// Copies behind the stream's work, between any memories; host memory is page-locked. The device is current.
///
/// # Safety
/// Both are valid for so many bytes until the stream's work is complete, and do not overlap.
pub(crate) unsafe fn copy(target: *mut u8, source: *const u8, bytes: usize, stream: RawStream) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let (to, from) = (target as CUdeviceptr, source as CUdeviceptr);
    // SAFETY: the caller's contract; the driver tells by the addresses where they are.
    match unsafe { sys::cuMemcpyAsync(to, from, bytes, stream.0.cast()) } {
        CUresult::CUDA_SUCCESS => Ok(()),
        error => Err(failed("cuMemcpyAsync", error, false)),
    }
}

/// A stream's handle for the library.
#[inline]
pub(crate) fn raw(stream: &CudaStream) -> phalanx_sys::nvshmem::stream_t {
    stream.cu_stream().cast()
}
