//! Device memory that the peers' kernels write to: allocated, exchanged, opened, given back.

use super::tunables::{INBOX_BYTES, MAX_RANKS};
use crate::backend::nccl::device::{DeviceMemory, GpuDevice};
use crate::control::host_channel::HostChannel;
use crate::gpu::cuda::{PeerLink, gpu_ids, link};
use crate::gpu::ipc::{self, IpcHandle};
use crate::gpu::kernels::{check, during_captures};
use crate::os::sync::lock;
use crate::types::error::{Error, Result, UnsupportedError};
use crate::types::memory::{GpuId, RawStream};
use cudarc::driver::sys::{self, CUdeviceptr, CUresult};
use cudarc::driver::{CudaContext, result};
use phalanx_sys::nccl::Flavour;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How long the memory's clearing may take.
const CLEARING: Duration = Duration::from_secs(30);

/// What a rank tells the others of its memory.
#[derive(Clone, Copy)]
struct Offer {
    able: bool,
    /// The same on every rank, or the memory is not used.
    tag: u64,
    address: u64,
    gpu: [u64; 2],
    handle: IpcHandle,
}

impl Offer {
    const WORDS: usize = 13;

    fn words(&self) -> [u64; Offer::WORDS] {
        let mut words = [0; Offer::WORDS];
        words[..3].copy_from_slice(&[u64::from(self.able), self.tag, self.address]);
        words[3..5].copy_from_slice(&self.gpu);
        words[5..].copy_from_slice(&self.handle.0);
        words
    }

    fn from_words(words: &[u64; Offer::WORDS]) -> Offer {
        Offer {
            able: words[0] != 0,
            tag: words[1],
            address: words[2],
            gpu: [words[3], words[4]],
            handle: IpcHandle(std::array::from_fn(|i| words[5 + i])),
        }
    }
}

/// Memory of as many bytes on every rank, which the kernels of all reach.
pub(crate) struct PeerMemory {
    /// Where each rank's memory begins, as this rank's GPU reaches it; its own too.
    pub starts: [u64; MAX_RANKS],
    /// Lines of 128 bytes arrive whole between all of them.
    pub nvlink: bool,
    /// This rank's. `None` when it has been given back, or left to peers that may still write to it.
    memory: Mutex<Option<DeviceMemory>>,
    /// Memory of peers' processes that is open here.
    opened: Mutex<Vec<CUdeviceptr>>,
}

impl PeerMemory {
    /// Opens the memory of all ranks to each other, or answers why that cannot be; then it cannot on any rank. Ranks on one GPU need
    /// `may_share`. Collective. An error only if the exchange fails.
    ///
    /// # Safety
    /// As for `Backend::collective` of the host channel.
    pub(super) unsafe fn exchange(
        host_channel: &dyn HostChannel,
        device: &GpuDevice,
        local: Result<LocalMemory>,
        tag: u64,
        may_share: bool,
    ) -> Result<Result<PeerMemory>> {
        let (rank, ranks) = (host_channel.rank(), host_channel.world_size());
        let _current = device.enter();
        let nothing = Offer { able: false, tag, address: 0, gpu: [0; 2], handle: IpcHandle::NONE };
        let offer = local.as_ref().map_or(nothing, |local| local.offer(tag));
        let mut all = vec![[0u64; Offer::WORDS]; ranks];
        // SAFETY: the caller's contract.
        unsafe { host_channel.all_gather_words(&offer.words(), all.as_flattened_mut()) }?;
        let offers: Vec<_> = all.iter().map(Offer::from_words).collect();
        let unable = offers.iter().position(|offer| !offer.able);
        let opened = match (&local, unable) {
            (Ok(local), None) => {
                let is_shared =
                    (1..ranks).any(|rank| offers[..rank].iter().any(|other| other.gpu == offers[rank].gpu));
                match is_shared && !may_share {
                    true => Err(refusal("ranks share a GPU, on which their kernels may not fit at once")),
                    false => local.open(rank, &offers, host_channel.is_of_threads()),
                }
            }
            (Err(reason), _) => Err(reason.clone()),
            (_, Some(unable)) => Err(refusal(&format!("rank {unable} cannot"))),
        };
        let mut able = vec![[0u64; 2]; ranks];
        let nvlink = opened.as_ref().is_ok_and(|opened| opened.nvlink);
        // SAFETY: as above.
        unsafe {
            host_channel
                .all_gather_words(&[u64::from(opened.is_ok()), u64::from(nvlink)], able.as_flattened_mut())
        }?;
        let Some(closed) = able.iter().position(|[able, _]| *able == 0) else {
            let (local, opened) = (local?, opened?);
            return Ok(Ok(PeerMemory {
                starts: opened.starts,
                nvlink: able.iter().all(|[_, nvlink]| *nvlink != 0),
                memory: Mutex::new(Some(local.memory)),
                opened: Mutex::new(opened.handles),
            }));
        };
        opened.iter().for_each(|opened| close(&opened.handles));
        if unable.is_none() {
            // Nobody frees what a peer has open.
            // SAFETY: as above.
            unsafe { host_channel.all_gather_words(&[0, 0], able.as_flattened_mut()) }?;
        }
        Ok(Err(opened.err().unwrap_or_else(|| refusal(&format!("rank {closed} cannot")))))
    }

    /// The FIFOs of a rank in each peer's memory; null in its own.
    pub fn inboxes(&self, rank: usize, ranks: usize) -> [u64; MAX_RANKS] {
        let mut inboxes = self.starts;
        for (peer, inbox) in inboxes.iter_mut().enumerate().take(ranks) {
            // A peer has an inbox for each rank but itself.
            let place = if rank < peer { rank } else { rank.saturating_sub(1) };
            *inbox = if peer == rank { 0 } else { *inbox + (place * INBOX_BYTES) as u64 };
        }
        inboxes
    }

    /// Closes what of the peers is open. This rank's GPU is current, and no kernel of it uses the memory any more.
    pub fn close(&self) {
        close(&std::mem::take(&mut *lock(&self.opened)));
    }

    /// Frees the memory: no rank reaches it any more.
    pub fn free(&self) {
        lock(&self.memory).take();
    }
}

impl Drop for PeerMemory {
    fn drop(&mut self) {
        // Peers of a communicator that did not end in order may still write to it.
        std::mem::forget(lock(&self.memory).take());
    }
}

/// Closes memory of peers' processes. No kernel of this rank that uses it runs or follows; its GPU is current.
fn close(opened: &[CUdeviceptr]) {
    for start in opened {
        // SAFETY: opened once, closed once; the caller's contract.
        unsafe { ipc::close(*start) };
    }
}

/// Fills memory with zeroes. The stream is not cudarc's: that would answer an error of something else that its context
/// keeps, and may wait for the whole GPU.
pub(crate) fn clear(device: &GpuDevice, memory: &DeviceMemory, bytes: usize) -> Result<()> {
    let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
    let raw = RawStream(stream.cast());
    // SAFETY: memory that was just allocated, of so many bytes; waited for here.
    let cleared = unsafe { device.clear(memory.start(), bytes, raw) };
    let cleared = cleared.and_then(|()| device.wait_idle(raw, CLEARING));
    // SAFETY: created above, destroyed once.
    unsafe { result::stream::destroy(stream) }?;
    cleared
}

pub(super) fn refusal(why: &str) -> Error {
    let what = "own GPU kernels".into();
    UnsupportedError { what, why: why.into(), remedy: "NCCL carries all operations out".into() }.into()
}

/// The memory of all ranks, as it is reached from here.
struct Opened {
    starts: [u64; MAX_RANKS],
    /// Of other processes.
    handles: Vec<CUdeviceptr>,
    nvlink: bool,
}

/// This rank's memory, before it knows the others'.
pub(super) struct LocalMemory {
    gpu: &'static Arc<CudaContext>,
    id: GpuId,
    memory: DeviceMemory,
    handle: IpcHandle,
}

impl LocalMemory {
    /// Memory of zeroes. The device is current.
    pub fn new(host_channel: &dyn HostChannel, device: &GpuDevice, bytes: usize) -> Result<LocalMemory> {
        let gpu = device.cuda().ok_or_else(|| refusal("the GPU is not NVIDIA's"))?;
        during_captures(|| {
            let memory = DeviceMemory::new(device, bytes)?;
            clear(device, &memory, bytes)?;
            let handle = match host_channel.is_of_threads() {
                true => IpcHandle::NONE,
                false => IpcHandle::of(memory.start() as CUdeviceptr)?,
            };
            Ok(LocalMemory { gpu, id: gpu_ids()?[device.ordinal()], memory, handle })
        })
    }

    fn offer(&self, tag: u64) -> Offer {
        let address = self.memory.start() as u64;
        Offer { able: true, tag, address, gpu: self.id.words(), handle: self.handle }
    }

    /// Opens the peers' memory.
    fn open(&self, rank: usize, offers: &[Offer], is_of_threads: bool) -> Result<Opened> {
        if offers.iter().any(|offer| offer.tag != offers[0].tag) {
            return Err(refusal("PHALANX_GPU_ALGORITHM differs between the ranks"));
        }
        let ids = gpu_ids()?;
        let mut opened = Opened { starts: [0; MAX_RANKS], handles: Vec::new(), nvlink: true };
        opened.starts[rank] = offers[rank].address;
        for (peer, offer) in offers.iter().enumerate().filter(|(peer, _)| *peer != rank) {
            match self.open_one(peer, offer, &ids, is_of_threads, &mut opened) {
                Ok(start) => opened.starts[peer] = start,
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
        let id = GpuId::from_words(offer.gpu);
        let Some(ordinal) = ids.iter().position(|known| *known == id) else {
            let why = format!("this process does not see the GPU of rank {peer} (CUDA_VISIBLE_DEVICES)");
            return Err(refusal(&why));
        };
        if ordinal != self.gpu.ordinal() {
            opened.nvlink &= self.reach(ordinal)?;
        }
        if is_of_threads {
            enable_peer_access(self.gpu.ordinal(), ordinal)?;
            return Ok(offer.address);
        }
        // SAFETY: a handle of a peer that keeps its memory until this rank has closed it.
        let start = unsafe { offer.handle.open() }?;
        opened.handles.push(start);
        Ok(start)
    }

    /// Whether lines of 128 bytes arrive whole at another GPU. An error if it cannot be reached.
    fn reach(&self, ordinal: usize) -> Result<bool> {
        let own = self.gpu.ordinal();
        match link(own, ordinal)? {
            PeerLink::None => Err(refusal(&format!("GPU {own} does not reach the memory of GPU {ordinal}"))),
            link => Ok(link == PeerLink::NvLink),
        }
    }
}

/// Makes memory of a GPU of this process accessible to the current one, `own`.
pub(crate) fn enable_peer_access(own: usize, ordinal: usize) -> Result<()> {
    if ordinal == own {
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
