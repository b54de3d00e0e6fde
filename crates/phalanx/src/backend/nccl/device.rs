//! [`GpuDevice`]: a GPU, through CUDA or HIP ([`Runtime`]): streams, events and memory beside the library's
//! calls.

use super::library_lock::LibraryLock;
use super::reclaim;
#[cfg(feature = "nccl")]
use super::runtime::Cuda;
#[cfg(feature = "rccl")]
use super::runtime::Hip;
use super::runtime::Runtime;
use crate::buffer::stream::GpuStream;
use crate::gpu::backoff::Backoff;
use crate::os::sync::lock;
use crate::types::error::{Error, Result, UnsupportedError, UsageError};
use crate::types::memory::{GpuId, RawStream};
#[cfg(feature = "nccl")]
use cudarc::driver::CudaContext;
use phalanx_sys::nccl::Flavour;
use std::collections::BTreeMap;
#[cfg(feature = "nccl")]
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

/// A GPU. Opened once for the process, and never closed.
#[derive(Clone, Copy)]
pub(crate) struct GpuDevice {
    runtime: &'static dyn Runtime,
    pub library_lock: &'static LibraryLock,
}

/// The GPUs that have been opened, by library and number.
static OPENED: Mutex<BTreeMap<(bool, usize), GpuDevice>> = Mutex::new(BTreeMap::new());

/// The GPUs that have been opened.
pub(crate) fn opened() -> Vec<GpuDevice> {
    lock(&OPENED).values().copied().collect()
}

/// Makes calls that a capture in another thread would refuse, or that would spoil it.
pub(crate) fn beside_captures<R>(calls: impl FnOnce() -> R) -> R {
    #[cfg(feature = "nccl")]
    if opened().iter().any(|gpu| gpu.cuda().is_some()) {
        return crate::gpu::kernels::during_captures(calls);
    }
    calls()
}

/// How many GPUs this process sees; an error if there is no driver.
pub(crate) fn count(flavour: Flavour) -> Result<usize> {
    match flavour {
        #[cfg(feature = "nccl")]
        Flavour::Nccl => Cuda::count(),
        #[cfg(feature = "rccl")]
        Flavour::Rccl => crate::gpu::hip::device_count(),
        #[cfg(not(all(feature = "nccl", feature = "rccl")))]
        _ => Err(left_out(flavour)),
    }
}

/// Identities of the GPUs that this process sees.
pub(crate) fn ids(flavour: Flavour) -> Result<Vec<GpuId>> {
    match flavour {
        #[cfg(feature = "nccl")]
        Flavour::Nccl => crate::gpu::cuda::gpu_ids(),
        #[cfg(feature = "rccl")]
        Flavour::Rccl => crate::gpu::hip::gpu_ids(),
        #[cfg(not(all(feature = "nccl", feature = "rccl")))]
        _ => Err(left_out(flavour)),
    }
}

#[cfg(not(all(feature = "nccl", feature = "rccl")))]
fn left_out(flavour: Flavour) -> Error {
    let feature = if flavour == Flavour::Rccl { "rccl" } else { "nccl" };
    UnsupportedError::left_out(flavour.search().name, feature)
}

/// The variables that hide GPUs from a process.
pub(crate) fn hidden_by(flavour: Flavour) -> &'static str {
    match flavour {
        Flavour::Nccl => "CUDA_VISIBLE_DEVICES",
        Flavour::Rccl => "HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES",
    }
}

/// Restores the thread's current device when dropped.
pub(crate) struct Current {
    runtime: &'static dyn Runtime,
    before: usize,
}

impl Drop for Current {
    fn drop(&mut self) {
        if self.before != self.runtime.place() {
            self.runtime.make_current(self.before);
        }
    }
}

impl GpuDevice {
    /// The GPU with this number. Opened once, so that all communicators share its context and its library
    /// lock.
    pub fn open(flavour: Flavour, ordinal: usize) -> Result<GpuDevice> {
        let count = count(flavour)?;
        if ordinal >= count {
            return Err(Error::from(UnsupportedError {
                what: format!("GPU {ordinal}"),
                why: format!("this process sees {count} GPUs"),
                remedy: format!("use fewer ranks, or look at {}", hidden_by(flavour)),
            }));
        }
        let mut opened = lock(&OPENED);
        let number = (flavour == Flavour::Rccl, ordinal);
        if let Some(device) = opened.get(&number) {
            return Ok(*device);
        }
        let runtime: Box<dyn Runtime> = match flavour {
            #[cfg(feature = "nccl")]
            Flavour::Nccl => Box::new(Cuda::open(ordinal)?),
            #[cfg(feature = "rccl")]
            Flavour::Rccl => Box::new(Hip::open(ordinal)?),
            #[cfg(not(all(feature = "nccl", feature = "rccl")))]
            _ => return Err(left_out(flavour)),
        };
        let device = GpuDevice { runtime: Box::leak(runtime), library_lock: Box::leak(Box::default()) };
        opened.insert(number, device);
        Ok(device)
    }

    /// Its number.
    pub fn ordinal(&self) -> usize {
        self.runtime.ordinal()
    }

    /// cudarc's context, if it is an NVIDIA GPU.
    #[cfg(feature = "nccl")]
    pub fn cuda(&self) -> Option<&'static Arc<CudaContext>> {
        self.runtime.cuda()
    }

    /// Makes the device current until the guard is dropped. Ignores an error that cudarc keeps in its
    /// context: cudarc's next call returns it, and so do operations that rely on cudarc's ordering, when they
    /// borrow their buffers.
    pub fn enter(&self) -> Current {
        let (runtime, before) = (self.runtime, self.runtime.current());
        if before != runtime.place() {
            runtime.make_current(runtime.place());
        }
        Current { runtime, before }
    }

    /// The stream on which operations run unless another is named.
    pub fn default_stream(&self) -> GpuStream {
        self.runtime.default_stream()
    }

    pub fn new_stream(&self) -> Result<GpuStream> {
        let _current = self.enter();
        self.runtime.new_stream()
    }

    /// Whether a stream is one of this device (and of its primary context).
    pub fn has(&self, stream: &GpuStream) -> bool {
        self.runtime.has(stream)
    }

    /// Whether an address is of memory that came from one of the driver's pools.
    pub fn is_of_pool(&self, address: usize) -> bool {
        self.runtime.is_of_pool(address)
    }

    /// Whether a stream's work is complete. It waits while another thread enqueues to a full stream: see [`is_busy`](Self::is_busy).
    pub fn is_idle(&self, stream: RawStream) -> Result<bool> {
        // SAFETY: a stream of this device, which is current, kept alive by its `Stream`.
        unsafe { self.runtime.is_idle(stream) }.map_err(crate::types::error::LibraryError::fatal)
    }

    /// Adds a stream to those that are in use. Idle ones are dropped: a program may make one for each of its steps.
    pub fn remember(&self, streams: &mut Vec<GpuStream>, stream: &GpuStream) {
        if streams.iter().any(|known| known.raw() == stream.raw()) {
            return;
        }
        let _current = self.enter();
        let is_done = |known: &GpuStream| {
            matches!(self.is_captured(known.raw()), Ok(false))
                && matches!(self.is_idle(known.raw()), Ok(true))
        };
        streams.retain(|known| !is_done(known));
        streams.push(stream.clone());
    }

    /// Whether a stream has work. A captured stream has none, and must not be queried. It waits as [`is_idle`](Self::is_idle) does.
    pub fn has_work(&self, stream: RawStream) -> Result<bool> {
        Ok(!self.is_captured(stream)? && !self.is_idle(stream)?)
    }

    /// Whether a stream is being captured. The default stream cannot be, and querying it is an error while a
    /// blocking stream is.
    pub fn is_captured(&self, stream: RawStream) -> Result<bool> {
        if stream.0.is_null() {
            return Ok(false);
        }
        // SAFETY: as in `is_idle`.
        Ok(unsafe { self.runtime.is_captured(stream) }?)
    }

    /// An error if the stream is being captured, for calls that wait for its work. Querying the stream would
    /// end the capture.
    pub fn refuse_captured(&self, stream: RawStream, what: &'static str, remedy: &'static str) -> Result<()> {
        let _current = self.enter();
        match self.is_captured(stream) {
            Ok(true) => Err(UsageError::Captured { what, remedy }.into()),
            // An error of the stream is reported by its next use.
            _ => Ok(()),
        }
    }

    /// Waits until a stream's work is complete, without watching the peers.
    pub fn wait_idle(&self, stream: RawStream, limit: Duration) -> Result<()> {
        self.wait_until(limit, || self.is_idle(stream))
    }

    fn wait_until(&self, limit: Duration, is_done: impl Fn() -> Result<bool>) -> Result<()> {
        let mut backoff = Backoff::new();
        while !is_done()? {
            if backoff.since.elapsed() > limit {
                return Err(self.runtime.not_ready().into());
            }
            backoff.pause();
        }
        Ok(())
    }

    /// Makes later work on `stream` wait for the work on `other`.
    pub fn join(&self, stream: &GpuStream, other: &GpuStream) -> Result<()> {
        let event = GpuEvent::new(self)?;
        event.record(other)?;
        event.hold(stream)
    }

    /// Writes zeroes, behind the stream's work.
    ///
    /// # Safety
    /// Memory of this device of so many bytes, valid until the stream's work is complete.
    pub unsafe fn clear(&self, start: *mut u8, bytes: usize, stream: RawStream) -> Result<()> {
        // SAFETY: the caller's contract.
        Ok(unsafe { self.runtime.clear(start, bytes, stream) }?)
    }

    /// Copies between memory of the device and pinned host memory, either way, or within one, behind the
    /// stream's work.
    ///
    /// # Safety
    /// Both are valid for so many bytes until the stream's work is complete, and do not overlap.
    pub unsafe fn copy(
        &self,
        target: *mut u8,
        source: *const u8,
        bytes: usize,
        stream: RawStream,
    ) -> Result<()> {
        // SAFETY: the caller's contract.
        Ok(unsafe { self.runtime.copy(target, source, bytes, stream) }?)
    }
}

/// Where memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryPlace {
    Device,
    /// Pinned host memory.
    Host,
}

/// Memory that is freed when this is dropped: what used it must be done, but a device's memory waits for that
/// itself.
struct Memory {
    start: *mut u8,
    place: MemoryPlace,
    device: GpuDevice,
}

// SAFETY: an owned address; whoever uses it says so in its own contract.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(device: &GpuDevice, place: MemoryPlace, bytes: usize) -> Result<Memory> {
        let start = reclaim::make_room(|| Ok(device.runtime.allocate(place, bytes.max(1))?))?;
        Ok(Memory { start, place, device: *device })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let (place, device, address) = (self.place, self.device, self.start.expose_provenance());
        let what = if place == MemoryPlace::Device { "cuMemFree" } else { "cuMemFreeHost" };
        reclaim::later(what, move || {
            let _current = device.enter();
            // SAFETY: allocated by `new`, freed once.
            unsafe { device.runtime.free(place, std::ptr::with_exposed_provenance_mut(address)) };
        });
    }
}

/// Memory of a device.
pub(crate) struct DeviceMemory(Memory);

impl DeviceMemory {
    /// The device is current.
    pub fn new(device: &GpuDevice, bytes: usize) -> Result<DeviceMemory> {
        Memory::new(device, MemoryPlace::Device, bytes).map(DeviceMemory)
    }

    /// Its address, for an owner that frees it (`cuMemFree`).
    #[cfg(feature = "nccl")]
    pub fn into_raw(self) -> *mut u8 {
        std::mem::ManuallyDrop::new(self).0.start
    }

    pub fn start(&self) -> *mut u8 {
        self.0.start
    }
}

/// Pinned host memory. No copy is under way when it is dropped, by the contract of the copies.
pub(crate) struct PinnedMemory(Memory);

impl PinnedMemory {
    /// The device is current. Zeroed.
    pub fn new(device: &GpuDevice, bytes: usize) -> Result<PinnedMemory> {
        let memory = Memory::new(device, MemoryPlace::Host, bytes)?;
        // SAFETY: so many bytes were allocated.
        unsafe { memory.start.write_bytes(0, bytes) };
        Ok(PinnedMemory(memory))
    }

    pub fn start(&self) -> *mut u8 {
        self.0.start
    }
}

/// Memory of a device that begins and ends on a stream: work that was enqueued before the end can still use
/// it.
pub(crate) struct StreamMemory {
    pub start: *mut u8,
    stream: RawStream,
    device: GpuDevice,
}

// SAFETY: an owned address, and a stream that its `Stream` keeps alive.
unsafe impl Send for StreamMemory {}

impl StreamMemory {
    /// The device is current. `what` needs it; without it there is the remedy.
    pub fn new(
        device: &GpuDevice,
        bytes: usize,
        stream: RawStream,
        (what, remedy): (&str, &str),
    ) -> Result<StreamMemory> {
        // SAFETY: a stream of this device, which is current, kept alive by its `Stream`.
        match unsafe { device.runtime.allocate_on(bytes.max(1), stream) }? {
            Some(start) => Ok(StreamMemory { start, stream, device: *device }),
            None => Err(Error::from(UnsupportedError {
                what: what.into(),
                why: "the GPU has no memory pools, from which its scratch memory would come".into(),
                remedy: remedy.into(),
            })),
        }
    }
}

impl Drop for StreamMemory {
    fn drop(&mut self) {
        // The default stream is that of the current device.
        let _current = self.device.enter();
        // SAFETY: allocated by `new` on this stream, freed once, behind all work that was enqueued on it.
        unsafe { self.device.runtime.free_on(self.start, self.stream) };
    }
}

/// An event of a device (`cudaEvent_t`, `hipEvent_t`), without times.
pub(crate) struct GpuEvent {
    raw: *mut std::ffi::c_void,
    device: GpuDevice,
}

// SAFETY: an event may be used by any thread.
unsafe impl Send for GpuEvent {}
// SAFETY: as above.
unsafe impl Sync for GpuEvent {}

impl GpuEvent {
    pub fn new(device: &GpuDevice) -> Result<GpuEvent> {
        let _current = device.enter();
        Ok(GpuEvent { raw: device.runtime.create_event()?, device: *device })
    }

    /// Records it behind a stream's work.
    pub fn record(&self, stream: &GpuStream) -> Result<()> {
        let _current = self.device.enter();
        // SAFETY: an event and a stream of this device.
        Ok(unsafe { self.device.runtime.record(self.raw, stream.raw()) }?)
    }

    /// Whether the work is complete behind which it was recorded last; also before it is recorded. Of CUDA's GPUs.
    #[cfg(feature = "nccl")]
    pub fn is_complete(&self) -> Result<bool> {
        use cudarc::driver::sys::{CUresult, cuEventQuery};
        let _current = self.device.enter();
        // SAFETY: an event of this device.
        match crate::gpu::kernels::during_captures(|| unsafe { cuEventQuery(self.raw.cast()) }) {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => crate::gpu::kernels::check("cuEventQuery", result).map(|()| true),
        }
    }

    /// [`is_complete`](GpuEvent::is_complete), waited for.
    #[cfg(feature = "nccl")]
    pub fn wait(&self, limit: Duration) -> Result<()> {
        self.device.wait_until(limit, || self.is_complete())
    }

    /// Makes later work on the stream wait for the event.
    pub fn hold(&self, stream: &GpuStream) -> Result<()> {
        let _current = self.device.enter();
        // SAFETY: as above.
        Ok(unsafe { self.device.runtime.wait(stream.raw(), self.raw) }?)
    }
}

impl Drop for GpuEvent {
    fn drop(&mut self) {
        let _current = self.device.enter();
        // SAFETY: made by `new`, destroyed once; the runtime keeps it for streams that wait for it.
        unsafe { self.device.runtime.destroy_event(self.raw) };
    }
}
