//! [`Staging`]: page-locked memory for two pieces, and [`Tools`]: what the service moves them with.

use super::note::PIECE;
use crate::backend::nccl::device::{GpuDevice, PinnedMemory};
use crate::buffer::stream::GpuStream;
use crate::contract::messenger::Messenger;
use crate::gpu::kernels::during_captures;
use crate::types::error::Result;
use std::sync::atomic::{AtomicU32, Ordering};

/// Pieces of a staging: one is copied by the GPU while the other is on the network.
pub(super) const SLOTS: usize = 2;

/// Memory for pieces. It is used again and not freed while the service runs: to free page-locked memory waits for the GPU, whose streams may
/// wait for the service.
pub(super) struct Staging(PinnedMemory);

/// What a window's stream and the service tell each other, behind the pieces.
#[derive(Default)]
#[repr(C)]
pub(super) struct Words {
    /// Up to which step the stream may go. The service writes it.
    pub granted: AtomicU32,
    /// Which step the stream has done. The stream writes it.
    pub done: AtomicU32,
}

impl Staging {
    pub fn new(device: &GpuDevice) -> Result<Staging> {
        let _current = device.enter();
        during_captures(|| PinnedMemory::new(device, SLOTS * PIECE + size_of::<Words>())).map(Staging)
    }

    /// Where a piece is.
    pub fn start(&self, slot: usize) -> *mut u8 {
        assert!(slot < SLOTS, "a place of the staging");
        self.0.start().wrapping_add(slot * PIECE)
    }

    pub fn words(&self) -> &Words {
        // SAFETY: behind the pieces, aligned and zeroed at first; the GPU, too, writes whole words.
        unsafe { &*self.0.start().add(SLOTS * PIECE).cast::<Words>() }
    }

    /// Makes it one that nobody has used.
    pub fn reset(&self) {
        self.words().granted.store(0, Ordering::Release);
        self.words().done.store(0, Ordering::Release);
    }
}

/// What an open window moves its pieces with.
pub(super) struct Lane {
    pub staging: Staging,
    /// Where steps wait for the service, between work of the program's stream. In that they would fill it: CUDA's default stream, while it is
    /// full, lets no other stream of its context take work, so neither the service's.
    pub stream: GpuStream,
}

impl Lane {
    pub fn new(device: &GpuDevice) -> Result<Lane> {
        Ok(Lane { staging: Staging::new(device)?, stream: during_captures(|| device.new_stream())? })
    }
}

/// What the service has to move pieces with.
pub(super) struct Tools {
    pub messenger: Box<dyn Messenger>,
    pub device: GpuDevice,
    /// Of copies to the GPU, and of those from it. No other stream is ordered with them.
    pub to_gpu: GpuStream,
    pub to_host: GpuStream,
}

impl Tools {
    pub fn stream(&self, way: Way) -> &GpuStream {
        match way {
            Way::ToGpu => &self.to_gpu,
            Way::ToHost => &self.to_host,
        }
    }
}

/// Which way a piece is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    ToGpu,
    ToHost,
}

/// Enqueues copies between a place of a staging, where the parts follow each other, and GPU memory.
///
/// # Safety
/// The parts (address and bytes) are memory of this GPU and fit into a piece; nothing else touches them and the place until the stream has done
/// it. The device is current.
pub(super) unsafe fn copy(
    device: &GpuDevice,
    stream: &GpuStream,
    way: Way,
    mut at: *mut u8,
    parts: impl Iterator<Item = (u64, usize)>,
) -> Result<()> {
    for (address, bytes) in parts {
        let (target, source) = match way {
            Way::ToGpu => (address as *mut u8, at.cast_const()),
            Way::ToHost => (at, address as *const u8),
        };
        // SAFETY: the caller's contract.
        unsafe { device.copy(target, source, bytes, stream.raw()) }?;
        at = at.wrapping_add(bytes);
    }
    Ok(())
}
