//! Device communicators as the communicator keeps them: see [`DeviceComm`](crate::nccl::DeviceComm).

use super::communicator::{Communicator, ENDING};
use super::kernel_streams::KernelStreams;
use crate::types::error::Result;
#[cfg(feature = "nccl")]
use cudarc::driver::DeviceRepr;
use std::ffi::c_void;
use std::fmt;

/// Most bytes of `ncclDevComm`. The largest of a known release has 248.
pub(crate) const MOST: usize = 1024;

/// `ncclDevComm`, which kernels take by value.
pub(crate) type Words = [u64; MOST / 8];

/// A device communicator as the library made it, which the communicator gives back to it at the latest.
pub(crate) struct Held {
    pub argument: KernelArgument,
    /// Streams that kernels were launched on with it.
    pub users: KernelStreams,
}

impl Held {
    /// `ncclDevComm`, as the library wrote it.
    pub fn start(&self) -> *const c_void {
        (&raw const self.argument.0).cast()
    }
}

/// `ncclDevComm` as a kernel's parameter, for `LaunchArgs::arg` of cudarc: see
/// [`DeviceComm::argument`](crate::nccl::DeviceComm::argument).
#[derive(Clone, Copy)]
#[repr(C)]
pub struct KernelArgument(pub(crate) Words);

// SAFETY: the driver copies as many bytes as the kernel's parameter has, which is `ncclDevComm` of the
// library's header, and there are no fewer here; to the kernel, they are what the library wrote.
#[cfg(feature = "nccl")]
unsafe impl DeviceRepr for KernelArgument {}

impl fmt::Debug for KernelArgument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KernelArgument")
    }
}

impl Communicator {
    /// Waits, with a bound, until no kernel uses a device communicator any more.
    pub(crate) fn wait_for_kernels(&self, held: &Held) -> Result<()> {
        let _current = self.device.enter();
        held.users.all().iter().try_for_each(|stream| {
            let (what, remedy) = ("the end of a device communicator", "end the capture before");
            self.device.refuse_captured(stream.raw(), what, remedy)?;
            self.device.wait_idle(stream.raw(), ENDING)
        })
    }
}
