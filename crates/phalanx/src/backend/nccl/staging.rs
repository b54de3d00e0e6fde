//! Host memory in operations of GPUs: copied to the device before, and back afterwards.
//!
//! The copies go through pinned memory of the backend's own, so that the GPU never touches the caller's
//! memory: a caller that gives up waiting may free it at once.

use super::device::{DeviceMemory, GpuDevice, PinnedMemory};
use crate::os::sync::lock;
use crate::types::error::Result;
use crate::types::memory::RawStream;
use std::sync::Mutex;

/// Staging memory for one buffer: on the device and pinned on the host.
pub(crate) struct Stage {
    device: DeviceMemory,
    pinned: PinnedMemory,
    bytes: usize,
}

/// Pool of free stages. A stage returns here when its work is complete.
#[derive(Default)]
pub(crate) struct Stages(Mutex<Vec<Stage>>);

/// Smallest stage, so that few are made.
const SMALLEST: usize = 64 * 1024;

/// The copy back to host memory after an operation.
pub(crate) struct Return {
    stage: Stage,
    /// What brings the caller's bytes to the device is on it.
    stream: RawStream,
    /// Where it starts in the stage, and where it goes; null if nothing is to come back.
    offset: usize,
    target: *mut u8,
    bytes: usize,
}

// SAFETY: the target is the buffer of the caller, who waits inside the operation that made this.
unsafe impl Send for Return {}

impl Stages {
    /// The smallest free stage with room for so many bytes, or a new one.
    pub fn take(&self, device: &GpuDevice, bytes: usize) -> Result<Stage> {
        let mut free = lock(&self.0);
        let fits = |(_, stage): &(usize, &Stage)| stage.bytes >= bytes;
        let best = free.iter().enumerate().filter(fits).min_by_key(|(_, stage)| stage.bytes);
        if let Some((index, _)) = best {
            return Ok(free.swap_remove(index));
        }
        drop(free);
        let bytes = bytes.max(SMALLEST).next_power_of_two();
        let _current = device.enter();
        Ok(Stage {
            device: DeviceMemory::new(device, bytes)?,
            pinned: PinnedMemory::new(device, bytes)?,
            bytes,
        })
    }

    pub fn put(&self, stage: Stage) {
        lock(&self.0).push(stage);
    }
}

impl Stage {
    /// The address that takes the buffer's place in the operation.
    pub fn address(&self) -> *mut u8 {
        self.device.start()
    }

    /// Brings the caller's bytes to the device, behind the stream's work.
    ///
    /// # Safety
    /// `source` is readable for so many bytes, no more than the stage has.
    pub unsafe fn fill(
        &self,
        device: &GpuDevice,
        source: *const u8,
        bytes: usize,
        stream: RawStream,
    ) -> Result<()> {
        // SAFETY: the caller's contract; the stage is not in use by anything else.
        unsafe {
            std::ptr::copy_nonoverlapping(source, self.pinned.start(), bytes);
            device.copy(self.device.start(), self.pinned.start(), bytes, stream)
        }
    }

    /// What brings bytes of the stage, from an offset on, back to a target (if it is not null) after the
    /// stream's operation.
    pub fn returning(self, stream: RawStream, (offset, target, bytes): (usize, *mut u8, usize)) -> Return {
        Return { stage: self, stream, offset, target, bytes }
    }
}

impl Return {
    pub fn stream(&self) -> RawStream {
        self.stream
    }

    /// Copies to pinned memory, behind the stream's work.
    pub fn download(&self, device: &GpuDevice, stream: RawStream) -> Result<()> {
        if self.target.is_null() || self.bytes == 0 {
            return Ok(());
        }
        // SAFETY: the bytes lie in the stage, which is kept until the stream's work is complete.
        unsafe {
            let source = self.stage.device.start().add(self.offset);
            device.copy(self.stage.pinned.start().add(self.offset), source, self.bytes, stream)
        }
    }

    /// Gives the stage back, and the caller nothing. The stream's work is complete.
    pub fn discard(self, stages: &Stages) {
        stages.put(self.stage);
    }

    /// Gives the caller its bytes, and the stage back. The stream's work is complete.
    pub fn finish(self, stages: &Stages) {
        if !self.target.is_null() {
            // SAFETY: the target is writable for so many bytes, by the operation's contract.
            unsafe {
                let source = self.stage.pinned.start().add(self.offset);
                std::ptr::copy_nonoverlapping(source, self.target, self.bytes);
            }
        }
        stages.put(self.stage);
    }
}
