//! [`KernelStreams`]: where a program launched kernels of its own that use the communicator's memory.

use super::communicator::Communicator;
use crate::buffer::stream::GpuStream;
use crate::os::RunInstant;
use crate::os::sync::lock;
use crate::types::error::{Error, Result, UnsupportedError, UsageError};
use std::sync::Mutex;

/// The streams on which such kernels may run.
#[derive(Default)]
pub(crate) struct KernelStreams(Mutex<Vec<GpuStream>>);

impl KernelStreams {
    pub fn all(&self) -> Vec<GpuStream> {
        lock(&self.0).clone()
    }

    /// Records that a kernel is about to be launched on a stream.
    pub fn add(&self, communicator: &Communicator, stream: &GpuStream) -> Result<()> {
        communicator.check_owner()?;
        communicator.check()?;
        let device = communicator.device;
        // Nothing ends or is freed meanwhile: for the latter the driver would wait for the kernel.
        let locked = device.library_lock.acquire()?;
        if communicator.has_ended() {
            return Err(Error::from(UnsupportedError {
                what: "a kernel with memory of its communicator".into(),
                why: "its communicator has ended, and took it back".into(),
                remedy: "keep the communicator as long as kernels are launched".into(),
            }));
        }
        if !device.has(stream) {
            return Err(UsageError::Memory {
                memory: format!("a stream of {}", stream.describe()),
                wanted: format!("GPU {} of the communicator", device.ordinal()),
                remedy: "launch the kernel on the communicator's GPU (Comm::gpu)",
            }
            .into());
        }
        communicator.adopt(stream)?;
        *lock(&communicator.last_kernel) = Some(RunInstant::now());
        drop(locked);
        device.remember(&mut lock(&self.0), stream);
        Ok(())
    }

    /// Waits for them, with the communicator's deadline.
    pub fn sync(&self, communicator: &Communicator) -> Result<()> {
        communicator.check_owner()?;
        let auxiliary = communicator.auxiliary_call();
        self.all().iter().try_for_each(|stream| communicator.wait_for(stream.raw(), &auxiliary))
    }
}
