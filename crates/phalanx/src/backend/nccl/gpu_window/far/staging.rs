//! [`Staging`]: page-locked memory for two pieces, and [`Tools`]: what moves them.

use super::note::PIECE;
use crate::backend::nccl::device::{GpuDevice, GpuEvent, PinnedMemory};
use crate::buffer::stream::GpuStream;
use crate::contract::CopyDirection;
use crate::contract::carrier::Carrier;
use crate::gpu::kernels::during_captures;
use crate::types::error::Result;
use std::sync::atomic::{AtomicU32, Ordering};

/// Pieces of a staging: one is copied by the GPU while the other is on the network.
pub(super) const SLOTS: usize = 2;

/// Memory for pieces. It is used again and not freed while the service runs: to free page-locked memory waits for the GPU, whose streams may
/// wait for the service.
pub(super) struct Staging {
    memory: PinnedMemory,
    /// Behind the copies from and to each of the places.
    pub events: [GpuEvent; SLOTS],
}

impl Staging {
    pub fn new(device: &GpuDevice) -> Result<Staging> {
        let _current = device.enter();
        let memory = during_captures(|| PinnedMemory::new(device, SLOTS * PIECE + size_of::<AtomicU32>()))?;
        Ok(Staging { memory, events: [GpuEvent::new(device)?, GpuEvent::new(device)?] })
    }

    /// Where a piece is.
    pub fn start(&self, slot: usize) -> *mut u8 {
        assert!(slot < SLOTS, "a place of the staging");
        self.memory.start().wrapping_add(slot * PIECE)
    }

    /// A word that streams wait for.
    pub fn word(&self) -> &AtomicU32 {
        // SAFETY: behind the pieces, aligned and zeroed at first; the GPU only reads it.
        unsafe { &*self.memory.start().add(SLOTS * PIECE).cast::<AtomicU32>() }
    }

    /// Makes it one that nobody has used.
    pub fn reset(&self) {
        self.word().store(0, Ordering::Release);
    }
}

/// What the service has to move pieces with.
pub(super) struct Tools {
    pub carrier: Box<dyn Carrier>,
    pub device: GpuDevice,
    /// Of copies to the GPU, and of those from it. No other stream is ordered with them.
    pub to_gpu: GpuStream,
    pub to_host: GpuStream,
}

impl Tools {
    /// Enqueues copies between a place of a staging, where the parts follow each other, and GPU memory. The place's event is behind them.
    ///
    /// # Safety
    /// The parts (address and bytes) are memory of this GPU and fit into a piece; nothing else touches them and the place until the event is
    /// complete.
    pub unsafe fn copy(
        &self,
        direction: CopyDirection,
        (staging, slot): (&Staging, usize),
        parts: impl Iterator<Item = (u64, usize)>,
    ) -> Result<()> {
        let (mut at, stream) = match direction {
            CopyDirection::Put => (staging.start(slot), &self.to_gpu),
            CopyDirection::Get => (staging.start(slot), &self.to_host),
        };
        for (address, bytes) in parts {
            let (target, source) = match direction {
                CopyDirection::Put => (address as *mut u8, at.cast_const()),
                CopyDirection::Get => (at, address as *const u8),
            };
            // SAFETY: the caller's contract.
            unsafe { self.device.copy(target, source, bytes, stream.raw()) }?;
            at = at.wrapping_add(bytes);
        }
        staging.events[slot].record(stream)
    }
}
