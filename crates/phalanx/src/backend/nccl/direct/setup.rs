//! Setting own kernels up: what they need of the driver and of the ranks, and the memory of their FIFOs.

use super::choose::{GpuAlgorithm, GpuTopology};
use super::launch::Order;
use super::peer_memory::{LocalMemory, PeerMemory, refusal};
use super::tunables::{INBOX_BYTES, MAX_RANKS};
use crate::backend::nccl::device::{GpuDevice, PinnedMemory};
use crate::buffer::stream::GpuStream;
use crate::control::host_channel::HostChannel;
use crate::gpu::cuda::driver;
use crate::gpu::kernels::{Kernels, MODULES, during_captures, generation};
use crate::os::sync::lock;
use crate::types::error::Result;
use cudarc::driver::CudaContext;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

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

/// A rank's end of own kernels between the GPUs of a communicator.
pub(crate) struct Direct {
    pub(super) gpu: &'static Arc<CudaContext>,
    pub(super) topology: GpuTopology,
    /// What each peer's memory holds for this rank; null for itself.
    pub(super) inboxes: [u64; MAX_RANKS],
    /// What this rank's memory holds for the peers.
    pub(super) own: u64,
    /// The FIFOs' memory, and that of experts.
    memories: Mutex<Vec<Arc<PeerMemory>>>,
    /// Not 0: kernels leave.
    abort_word: PinnedMemory,
    pub(super) kernels: [OnceLock<Kernels>; MODULES],
    pub(super) order: Mutex<Order>,
    /// Where own kernels run beside what the library carries out of the same messages, or of the same group.
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
        let begun = begin(host_channel, device, algorithm);
        let (gpu, local) = match begun {
            Ok((gpu, abort_word, memory)) => (Some((gpu, abort_word)), Ok(memory)),
            Err(reason) => (None, Err(reason)),
        };
        // SAFETY: the caller's contract.
        let memory = unsafe {
            PeerMemory::exchange(
                host_channel,
                device,
                local,
                algorithm as u64,
                algorithm != GpuAlgorithm::Auto,
            )
        }?;
        let memory =
            memory.inspect_err(|reason| crate::os::log::debug!(rank, "no own GPU kernels: {reason}"));
        let (Ok(memory), Some((gpu, abort_word))) = (memory, gpu) else { return Ok(None) };
        crate::os::log::debug!(rank, nvlink = memory.nvlink, "own GPU kernels are ready");
        Ok(Some(Direct {
            gpu,
            topology: GpuTopology { ranks, nvlink: memory.nvlink, algorithm },
            inboxes: memory.inboxes(rank, ranks),
            own: memory.starts[rank],
            memories: Mutex::new(vec![Arc::new(memory)]),
            abort_word,
            kernels: [const { OnceLock::new() }; MODULES],
            order: Mutex::default(),
            side: OnceLock::new(),
        }))
    }

    /// The stream for kernels that run beside the library's part.
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

    /// Keeps memory until the communicator's end, or until [`release`](Direct::release).
    pub(super) fn keep(&self, memory: Arc<PeerMemory>) {
        lock(&self.memories).push(memory);
    }

    /// Forgets memory that has been freed.
    pub fn release(&self, memory: &Arc<PeerMemory>) {
        lock(&self.memories).retain(|kept| !Arc::ptr_eq(kept, memory));
    }

    /// Closes what of the peers is open, before the rank says that it has left. Its own work is complete.
    pub fn close(&self, device: &GpuDevice) {
        let _current = device.enter();
        lock(&self.memories).iter().for_each(|memory| memory.close());
    }

    /// Frees the memory: no rank reaches it any more.
    pub fn free(&self) {
        lock(&self.memories).iter().for_each(|memory| memory.free());
    }
}

/// The GPU, the abort word and this rank's FIFOs, or why own kernels cannot run here. The device is current.
fn begin(
    host_channel: &dyn HostChannel,
    device: &GpuDevice,
    algorithm: GpuAlgorithm,
) -> Result<(&'static Arc<CudaContext>, PinnedMemory, LocalMemory)> {
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
    let memory = LocalMemory::new(host_channel, device, INBOX_BYTES * (ranks - 1))?;
    let abort_word = during_captures(|| PinnedMemory::new(device, 4))?;
    Ok((gpu, abort_word, memory))
}
