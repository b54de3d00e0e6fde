//! [`RemoteWindow`]: memory of another rank, open here.

use super::list::{self, Block};
use super::record::{Place, Registration, SharedRecord};
use super::{refused, stale};
use crate::backend::nccl::communicator::{Communicator, ENDING};
use crate::backend::nccl::device::{GpuDevice, GpuEvent};
use crate::backend::nccl::direct::enable_peer_access;
use crate::buffer::stream::GpuStream;
use crate::contract::{CopyDirection, GpuBlock, Operation, RemoteGpuWindow};
use crate::control::flags::Signals;
use crate::gpu::cuda::{PeerLink, gpu_ids, link};
use crate::gpu::ipc;
use crate::gpu::kernels::{check, during_captures};
use crate::os::sync::lock;
use crate::types::error::{Error, Result};
use cudarc::driver::sys::{self, CUdeviceptr};
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::sync::{Arc, OnceLock};

/// The program's stream, in whose order an open window's copies are made; a communicator's `sync` waits for them.
pub(crate) struct CopyStream {
    pub(super) stream: GpuStream,
    /// The rank of the window.
    pub(super) rank: usize,
    /// Behind the last copy or signal. What the program enqueues afterwards, or captures, is not waited for.
    pub(super) last: GpuEvent,
    /// Why a copy to another host was not made, which shows after it was enqueued. The later ones are not made either.
    pub(super) failure: OnceLock<Error>,
}

impl CopyStream {
    pub fn new(communicator: &Communicator, rank: usize, stream: &GpuStream) -> Result<Arc<CopyStream>> {
        let last = GpuEvent::new(&communicator.device)?;
        Ok(Arc::new(CopyStream { stream: stream.clone(), rank, last, failure: OnceLock::new() }))
    }

    /// Waits for its copies.
    pub fn sync(&self, communicator: &Communicator) -> Result<()> {
        communicator.wait_for_rank(Operation::OneSided, self.rank, || self.is_complete())?;
        self.check()
    }

    pub fn is_complete(&self) -> Result<bool> {
        self.last.is_complete()
    }

    /// An error if a copy was not made.
    pub fn check(&self) -> Result<()> {
        self.failure.get().map_or(Ok(()), |failure| Err(failure.clone()))
    }
}

pub(super) struct RemoteWindow {
    communicator: Arc<Communicator>,
    /// Not dropped while work of the stream may use it.
    record: ManuallyDrop<SharedRecord>,
    mapped: Mapped,
    copies: Arc<CopyStream>,
}

impl RemoteWindow {
    /// `None` if its rank releases it meanwhile.
    pub fn open(
        communicator: &Arc<Communicator>,
        record: SharedRecord,
        registration: &Registration,
        stream: &GpuStream,
    ) -> Result<Option<RemoteWindow>> {
        if !record.hold(communicator.rank) {
            return Ok(None);
        }
        let let_go = |_: &_| record.let_go(communicator.rank);
        let copies = CopyStream::new(communicator, registration.rank as usize, stream).inspect_err(let_go)?;
        let rank = registration.rank as usize;
        // SAFETY: the rank keeps its memory while this one holds the record.
        let mapped = unsafe { Mapped::open(communicator, rank, &registration.place) }.inspect_err(let_go)?;
        communicator.keep_copies(&copies);
        Ok(Some(RemoteWindow {
            communicator: communicator.clone(),
            record: ManuallyDrop::new(record),
            mapped,
            copies,
        }))
    }

    /// An error if nothing can be enqueued any more.
    #[inline]
    fn check(&self) -> Result<()> {
        self.communicator.check_owner()?;
        self.communicator.check()?;
        if !self.record.is_open() {
            return Err(stale(self.copies.rank, "that rank has released it"));
        }
        let remedy = "enqueue the copies outside of the graph: it could be launched when the memory is gone";
        self.communicator.device.refuse_captured(self.copies.stream.raw(), "a copy to another rank", remedy)
    }
}

/// Memory of a rank of this host, as this rank's GPU reaches it.
pub(super) struct Mapped {
    /// Where the elements begin.
    start: CUdeviceptr,
    /// What is to be closed: memory of another process.
    opened: Option<CUdeviceptr>,
}

impl Mapped {
    /// # Safety
    /// The rank keeps the memory until this is closed.
    pub unsafe fn open(communicator: &Communicator, rank: usize, place: &Place) -> Result<Mapped> {
        let start = place.base + place.offset;
        if rank == communicator.rank {
            return Ok(Mapped { start, opened: None });
        }
        let remedy = "use messages between these ranks";
        let Some(ordinal) = gpu_ids()?.iter().position(|id| *id == place.gpu) else {
            let why = format!("this process does not see the GPU of rank {rank} (CUDA_VISIBLE_DEVICES)");
            return Err(refused(&why, remedy));
        };
        let own = communicator.device.ordinal();
        if ordinal != own && link(own, ordinal)? == PeerLink::None {
            let why = format!("GPU {own} does not reach the memory of GPU {ordinal}, which rank {rank} has");
            return Err(refused(&why, remedy));
        }
        let _current = communicator.device.enter();
        if communicator.control_channel.is_of_threads() {
            enable_peer_access(own, ordinal)?;
            return Ok(Mapped { start, opened: None });
        }
        // SAFETY: the caller's contract: the rank keeps its memory.
        let base = during_captures(|| unsafe { place.handle.open() })?;
        Ok(Mapped { start: base + place.offset, opened: Some(base) })
    }

    /// Enqueues copies on the stream.
    ///
    /// # Safety
    /// As for [`RemoteGpuWindow::copy`]; it is not closed before they are complete.
    pub unsafe fn copy(
        &self,
        device: &GpuDevice,
        copies: &CopyStream,
        (direction, local, element): (CopyDirection, *mut u8, usize),
        blocks: &[GpuBlock],
    ) -> Result<()> {
        let _current = device.enter();
        let stream = copies.stream.raw();
        let place = |block: &GpuBlock| {
            let here = local as u64 + (block.local * element) as u64;
            let there = self.start + (block.remote * element) as u64;
            let (to, from) = match direction {
                CopyDirection::Put => (there, here),
                CopyDirection::Get => (here, there),
            };
            Block { to, from, bytes: (block.len * element) as u64 }
        };
        let bytes = blocks.iter().map(|block| block.len * element).sum();
        // SAFETY: the caller's contract.
        let copied = unsafe {
            match list::is_for_kernel(blocks.len(), bytes) {
                true => blocks.chunks(list::MOST).try_for_each(|part| {
                    let part: Vec<Block> = part.iter().map(place).collect();
                    list::copy_together(device, stream, &part)
                }),
                false => list::copy_each(device, stream, blocks.iter().map(place)),
            }
        };
        // Also behind a part of the copies.
        copies.last.record(&copies.stream).and(copied)
    }

    /// Lets go of the memory.
    ///
    /// # Safety
    /// Once; all copies are complete, and none follows.
    pub unsafe fn close(&self, device: &GpuDevice) {
        let Some(start) = self.opened else { return };
        let _current = device.enter();
        // SAFETY: the caller's contract.
        during_captures(|| unsafe { ipc::close(start) });
    }
}

/// Raises a counter of signals, in the order of a stream (`CUhostFn`).
unsafe extern "C" fn raise(signals: *mut c_void) {
    // SAFETY: the counter is in a record that its window does not drop while the stream has work.
    unsafe { &*signals.cast::<Signals>() }.give();
}

impl RemoteGpuWindow for RemoteWindow {
    unsafe fn copy(
        &self,
        direction: CopyDirection,
        local: *mut u8,
        element: usize,
        blocks: &[GpuBlock],
    ) -> Result<()> {
        self.check()?;
        let what = (direction, local, element);
        // SAFETY: the caller's contract; the window is open until the stream's work is complete.
        unsafe { self.mapped.copy(&self.communicator.device, &self.copies, what, blocks) }
    }

    fn signal(&self) -> Result<()> {
        self.check()?;
        let _current = self.communicator.device.enter();
        let counter = std::ptr::from_ref(self.record.signals(self.communicator.rank)).cast_mut().cast();
        // SAFETY: a stream that is kept; the counter is there until the stream's work is complete, and the function calls nothing.
        let result =
            unsafe { sys::cuLaunchHostFunc(self.copies.stream.raw().0.cast(), Some(raise), counter) };
        check("cuLaunchHostFunc", result)?;
        self.copies.last.record(&self.copies.stream)
    }

    fn is_complete(&self) -> Result<bool> {
        self.communicator.check()?;
        self.copies.is_complete()
    }

    fn sync(&self) -> Result<()> {
        self.copies.sync(&self.communicator)
    }
}

impl Drop for RemoteWindow {
    fn drop(&mut self) {
        let communicator = &self.communicator;
        if communicator.check_owner().is_err() {
            return;
        }
        if let Err(error) = self.copies.last.wait(ENDING) {
            crate::os::log::error!(
                rank = communicator.rank,
                "GPU memory of rank {} stays open: copies may be under way ({error})",
                self.copies.rank
            );
            return;
        }
        // SAFETY: dropped once; its copies are complete.
        unsafe { self.mapped.close(&communicator.device) };
        self.record.let_go(communicator.rank);
        // SAFETY: dropped once; no work of the stream uses it.
        unsafe { ManuallyDrop::drop(&mut self.record) };
    }
}

impl Communicator {
    /// Keeps a stream of copies, for `sync` to wait for.
    pub(super) fn keep_copies(&self, copies: &Arc<CopyStream>) {
        let mut all = lock(&self.copies);
        all.retain(|kept| kept.strong_count() > 0);
        all.push(Arc::downgrade(copies));
    }
}
