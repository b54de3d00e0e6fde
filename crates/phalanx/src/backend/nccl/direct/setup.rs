//! Memory that peers write to: allocated, exchanged, opened, given back.

use super::choose::{GpuAlgorithm, GpuTopology};
use super::launch::Order;
use super::tunables::{INBOX_BYTES, MAX_RANKS};
use crate::backend::nccl::device::{DeviceMemory, GpuDevice, PinnedMemory};
use crate::buffer::stream::GpuStream;
use crate::control::host_channel::HostChannel;
use crate::gpu::cuda::{driver, gpu_ids};
use crate::gpu::kernels::{Kernels, MODULES, check, during_captures, generation};
use crate::os::sync::lock;
use crate::types::error::{Error, Result, UnsupportedError};
use crate::types::memory::{GpuId, RawStream};
use cudarc::driver::sys::{self, CUdevice_P2PAttribute, CUdeviceptr, CUipcMemHandle, CUresult};
use cudarc::driver::{CudaContext, result};
use phalanx_sys::nccl::Flavour;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// Functions of the driver that are needed beside those of every backend; cudarc panics where one is missing.
const FUNCTIONS: [&std::ffi::CStr; 8] = [
    c"cuIpcGetMemHandle",
    c"cuIpcOpenMemHandle_v2",
    c"cuIpcCloseMemHandle",
    c"cuCtxEnablePeerAccess",
    c"cuDeviceGetP2PAttribute",
    c"cuThreadExchangeStreamCaptureMode",
    c"cuModuleLoadData",
    c"cuLaunchKernel",
];

/// How long the memory's clearing may take.
const CLEARING: Duration = Duration::from_secs(30);

/// What a rank tells the others of its memory.
#[derive(Clone, Copy)]
struct Offer {
    able: bool,
    algorithm: u64,
    address: u64,
    gpu: [u64; 2],
    handle: [u64; 8],
}

impl Offer {
    const WORDS: usize = 13;

    fn words(&self) -> [u64; Offer::WORDS] {
        let mut words = [0; Offer::WORDS];
        words[..3].copy_from_slice(&[u64::from(self.able), self.algorithm, self.address]);
        words[3..5].copy_from_slice(&self.gpu);
        words[5..].copy_from_slice(&self.handle);
        words
    }

    fn from_words(words: &[u64; Offer::WORDS]) -> Offer {
        Offer {
            able: words[0] != 0,
            algorithm: words[1],
            address: words[2],
            gpu: [words[3], words[4]],
            handle: std::array::from_fn(|i| words[5 + i]),
        }
    }
}

/// A rank's end of the FIFOs between the GPUs of a communicator.
pub(crate) struct Direct {
    pub(super) gpu: &'static Arc<CudaContext>,
    pub(super) topology: GpuTopology,
    /// What each peer's memory holds for this rank; null for itself.
    pub(super) inboxes: [u64; MAX_RANKS],
    /// What this rank's memory holds for the peers. `None` when it has been given back, or left to peers that may still write to it.
    memory: Mutex<Option<DeviceMemory>>,
    pub(super) own: u64,
    /// Memory of peers' processes that is open here.
    opened: Mutex<Vec<CUdeviceptr>>,
    /// Not 0: kernels leave.
    abort_word: PinnedMemory,
    pub(super) kernels: [OnceLock<Kernels>; MODULES],
    pub(super) order: Mutex<Order>,
    /// Where own kernels run beside the library's operations of the same group.
    side: OnceLock<GpuStream>,
}

impl Direct {
    /// Makes it, if every rank can. Collective. An error only if the exchange fails; the reason why a rank cannot is logged.
    ///
    /// # Safety
    /// As for `Backend::collective` of the host channel.
    pub unsafe fn set_up(
        host_channel: &dyn HostChannel,
        device: &GpuDevice,
        algorithm: GpuAlgorithm,
    ) -> Result<Option<Direct>> {
        let (rank, ranks) = (host_channel.rank(), host_channel.world_size());
        if ranks == 1 {
            return Ok(None);
        }
        let _current = device.enter();
        let begun = Begun::new(host_channel, device, algorithm);
        let offer = match &begun {
            Ok(begun) => begun.offer(algorithm),
            Err(reason) => {
                crate::os::log::debug!(rank, "no own GPU kernels: {reason}");
                Offer { able: false, algorithm: algorithm as u64, address: 0, gpu: [0; 2], handle: [0; 8] }
            }
        };
        let mut all = vec![[0u64; Offer::WORDS]; ranks];
        // SAFETY: the caller's contract.
        unsafe { host_channel.all_gather_words(&offer.words(), all.as_flattened_mut()) }?;
        let offers: Vec<_> = all.iter().map(Offer::from_words).collect();
        let are_able = offers.iter().all(|offer| offer.able);
        let opened = match &begun {
            Ok(begun) if are_able => begun.open(rank, &offers, host_channel.is_of_threads()),
            _ => Err(refusal("a rank cannot")),
        };
        let mut able = vec![[0u64; 2]; ranks];
        let nvlink = opened.as_ref().is_ok_and(|opened| opened.nvlink);
        // SAFETY: as above.
        unsafe {
            host_channel
                .all_gather_words(&[u64::from(opened.is_ok()), u64::from(nvlink)], able.as_flattened_mut())
        }?;
        let opened =
            opened.inspect_err(|reason| crate::os::log::debug!(rank, "no own GPU kernels: {reason}"));
        if able.iter().any(|[able, _]| *able == 0) {
            opened.iter().for_each(|opened| close(&opened.handles));
            if are_able {
                // Nobody frees what a peer has open.
                // SAFETY: as above.
                unsafe { host_channel.all_gather_words(&[0, 0], able.as_flattened_mut()) }?;
            }
            return Ok(None);
        }
        let mut direct = begun?.with(opened?);
        direct.topology.nvlink = able.iter().all(|[_, nvlink]| *nvlink != 0);
        crate::os::log::debug!(rank, nvlink = direct.topology.nvlink, "own GPU kernels are ready");
        Ok(Some(direct))
    }

    /// The stream for kernels that run beside the library's operations of the same group.
    pub fn side(&self, device: &GpuDevice) -> Result<&GpuStream> {
        if let Some(side) = self.side.get() {
            return Ok(side);
        }
        let side = during_captures(|| device.new_stream())?;
        Ok(self.side.get_or_init(|| side))
    }

    /// Makes the kernels that run, and all that follow, leave.
    pub fn abort(&self) {
        self.abort_flag().store(1, Ordering::Release);
    }

    fn abort_flag(&self) -> &AtomicU32 {
        // SAFETY: four bytes of pinned memory that lives as long as this; the host only uses it so.
        unsafe { &*self.abort_word.start().cast::<AtomicU32>() }
    }

    pub(super) fn abort_word(&self) -> u64 {
        self.abort_word.start() as u64
    }

    /// Closes what of the peers is open, before the rank says that it has left. Its own work is complete.
    pub fn close(&self, device: &GpuDevice) {
        let _current = device.enter();
        close(&std::mem::take(&mut *lock(&self.opened)));
    }

    /// Frees the memory: no rank reaches it any more.
    pub fn free(&self) {
        lock(&self.memory).take();
    }
}

impl Drop for Direct {
    fn drop(&mut self) {
        // Peers of a communicator that did not end in order may still write to it.
        std::mem::forget(lock(&self.memory).take());
    }
}

/// Closes memory of peers' processes. No kernel of this rank that uses it runs or follows; its GPU is current.
fn close(opened: &[CUdeviceptr]) {
    for start in opened {
        // SAFETY: opened once, closed once; the caller's contract.
        unsafe { sys::cuIpcCloseMemHandle(*start) };
    }
}

/// Fills memory with zeroes. The stream is not cudarc's: that would answer an error of something else that its context
/// keeps, and may wait for the whole GPU.
fn clear(device: &GpuDevice, memory: &DeviceMemory, bytes: usize) -> Result<()> {
    let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
    let raw = RawStream(stream.cast());
    // SAFETY: memory that was just allocated, of so many bytes; waited for here.
    let cleared = unsafe { device.clear(memory.start(), bytes, raw) };
    let cleared = cleared.and_then(|()| device.wait_idle(raw, CLEARING));
    // SAFETY: created above, destroyed once.
    unsafe { result::stream::destroy(stream) }?;
    cleared
}

fn refusal(why: &str) -> Error {
    let what = "own GPU kernels".into();
    UnsupportedError { what, why: why.into(), remedy: "NCCL carries all operations out".into() }.into()
}

/// The peers' memory, as it is reached from here.
struct Opened {
    inboxes: [u64; MAX_RANKS],
    /// Of other processes.
    handles: Vec<CUdeviceptr>,
    nvlink: bool,
}

/// This rank's memory, before it knows the others'.
struct Begun {
    gpu: &'static Arc<CudaContext>,
    id: GpuId,
    memory: DeviceMemory,
    abort_word: PinnedMemory,
    handle: CUipcMemHandle,
    topology: GpuTopology,
}

impl Begun {
    fn new(host_channel: &dyn HostChannel, device: &GpuDevice, algorithm: GpuAlgorithm) -> Result<Begun> {
        let ranks = host_channel.world_size();
        let gpu = device.cuda().ok_or_else(|| refusal("the GPU is not NVIDIA's"))?;
        if ranks > MAX_RANKS || host_channel.host_topology().num_hosts() > 1 {
            return Err(refusal("they are for at most 16 ranks of one host"));
        }
        if algorithm == GpuAlgorithm::Nccl {
            return Err(refusal("PHALANX_GPU_ALGORITHM=nccl"));
        }
        let driver = driver()?;
        if let Some(missing) = FUNCTIONS.iter().find(|function| !driver.has(function)) {
            return Err(refusal(&format!("the driver has no {}", missing.to_string_lossy())));
        }
        if generation(gpu)? < 7 {
            return Err(refusal("the GPU is older than compute capability 7.0"));
        }
        let bytes = INBOX_BYTES * (ranks - 1);
        during_captures(|| {
            let memory = DeviceMemory::new(device, bytes)?;
            clear(device, &memory, bytes)?;
            let mut handle = CUipcMemHandle { reserved: [0; 64] };
            // SAFETY: an allocation of cuMemAlloc; an out-pointer on the stack.
            let result = unsafe { sys::cuIpcGetMemHandle(&raw mut handle, memory.start() as CUdeviceptr) };
            if !host_channel.is_of_threads() {
                check("cuIpcGetMemHandle", result)?;
            }
            let id = gpu_ids()?[device.ordinal()];
            let abort_word = PinnedMemory::new(device, 4)?;
            let topology = GpuTopology { ranks, nvlink: true, algorithm };
            Ok(Begun { gpu, id, memory, abort_word, handle, topology })
        })
    }

    fn offer(&self, algorithm: GpuAlgorithm) -> Offer {
        let mut handle = [0; 8];
        for (word, bytes) in handle.iter_mut().zip(self.handle.reserved.chunks_exact(8)) {
            *word = u64::from_ne_bytes(std::array::from_fn(|i| bytes[i] as u8));
        }
        let (low, high) = self.id.0.split_at(8);
        let word = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().expect("eight bytes"));
        Offer {
            able: true,
            algorithm: algorithm as u64,
            address: self.memory.start() as u64,
            gpu: [word(low), word(high)],
            handle,
        }
    }

    /// Opens the peers' memory.
    fn open(&self, rank: usize, offers: &[Offer], is_of_threads: bool) -> Result<Opened> {
        if offers.iter().any(|offer| offer.algorithm != offers[0].algorithm) {
            return Err(refusal("PHALANX_GPU_ALGORITHM differs between the ranks"));
        }
        let ids = gpu_ids()?;
        let mut opened = Opened { inboxes: [0; MAX_RANKS], handles: Vec::new(), nvlink: true };
        for (peer, offer) in offers.iter().enumerate().filter(|(peer, _)| *peer != rank) {
            match self.open_one(peer, offer, &ids, is_of_threads, &mut opened) {
                // The peer has an inbox for each rank but itself.
                Ok(start) => {
                    let place = if rank < peer { rank } else { rank - 1 };
                    opened.inboxes[peer] = start + (place * INBOX_BYTES) as u64;
                }
                Err(error) => {
                    close(&opened.handles);
                    return Err(error);
                }
            }
        }
        Ok(opened)
    }

    /// Opens a peer's memory: where it begins, as this GPU reaches it.
    fn open_one(
        &self,
        peer: usize,
        offer: &Offer,
        ids: &[GpuId],
        is_of_threads: bool,
        opened: &mut Opened,
    ) -> Result<CUdeviceptr> {
        let id = GpuId(std::array::from_fn(|i| offer.gpu[i / 8].to_ne_bytes()[i % 8]));
        let Some(ordinal) = ids.iter().position(|known| *known == id) else {
            let why = format!("this process does not see the GPU of rank {peer} (CUDA_VISIBLE_DEVICES)");
            return Err(refusal(&why));
        };
        if ordinal != self.gpu.ordinal() {
            opened.nvlink &= self.reach(ordinal)?;
        }
        if is_of_threads {
            self.enable_peer_access(ordinal)?;
            return Ok(offer.address);
        }
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        for (bytes, word) in handle.reserved.chunks_exact_mut(8).zip(offer.handle) {
            bytes.iter_mut().zip(word.to_ne_bytes()).for_each(|(to, from)| *to = from as _);
        }
        let mut start: CUdeviceptr = 0;
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        // SAFETY: a handle of a peer that keeps its memory until this rank has closed it; an out-pointer on the stack.
        let result = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut start, handle, flags) };
        check("cuIpcOpenMemHandle", result)?;
        opened.handles.push(start);
        Ok(start)
    }

    /// The rank's end of the FIFOs, with the peers' memory.
    fn with(self, opened: Opened) -> Direct {
        Direct {
            gpu: self.gpu,
            topology: self.topology,
            inboxes: opened.inboxes,
            own: self.memory.start() as u64,
            memory: Mutex::new(Some(self.memory)),
            opened: Mutex::new(opened.handles),
            abort_word: self.abort_word,
            kernels: [const { OnceLock::new() }; MODULES],
            order: Mutex::default(),
            side: OnceLock::new(),
        }
    }

    /// Whether lines of 128 bytes arrive whole at another GPU, which is so where it has atomic operations on this one's memory: over
    /// NVLink. An error if it cannot be reached.
    fn reach(&self, ordinal: usize) -> Result<bool> {
        let (from, to) = (self.gpu.ordinal() as i32, ordinal as i32);
        let ask = |attribute| {
            let mut answer = 0;
            // SAFETY: an out-pointer on the stack; devices that the process sees.
            check("cuDeviceGetP2PAttribute", unsafe {
                sys::cuDeviceGetP2PAttribute(&raw mut answer, attribute, from, to)
            })
            .map(|()| answer != 0)
        };
        if !ask(CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED)? {
            return Err(refusal(&format!("GPU {from} does not reach the memory of GPU {to}")));
        }
        ask(CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)
    }

    fn enable_peer_access(&self, ordinal: usize) -> Result<()> {
        if ordinal == self.gpu.ordinal() {
            return Ok(());
        }
        let peer = GpuDevice::open(Flavour::Nccl, ordinal)?;
        let context = peer.cuda().expect("a GPU of NVIDIA's").cu_ctx();
        // SAFETY: the primary context of a device that stays open; this rank's own is current.
        match unsafe { sys::cuCtxEnablePeerAccess(context, 0) } {
            CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            result => check("cuCtxEnablePeerAccess", result),
        }
    }
}
