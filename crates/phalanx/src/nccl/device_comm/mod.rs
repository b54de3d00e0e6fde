//! Device communicators: communicators for use inside the program's kernels (NCCL's device API, 2.28).
//!
//! | file | what |
//! |---|---|
//! | `requirements.rs`, `properties.rs` | what a program asks for, and what a communicator can do |
//! | `create.rs` | `ncclDevCommCreate` |
//! | `teams.rs` | teams of ranks |
//! | `pointers.rs` | addresses and endpoints of windows |

mod create;
mod pointers;
mod properties;
mod requirements;
mod teams;

pub use pointers::Endpoint;
pub use properties::{GinConnection, GinType, Properties};
pub use requirements::{DeviceRequirements, Resource, ResourceHandle};
pub use teams::{Team, TeamKind};

use crate::backend::nccl::communicator::Communicator;
use crate::backend::nccl::device_comm::{Held, KernelArgument};
use crate::buffer::stream::GpuStream;
use crate::types::error::Result;
use cudarc::driver::CudaStream;
use std::fmt;
use std::num::NonZeroU64;
use std::sync::Arc;

/// A communicator for kernels (`ncclDevComm`). Kernels take it by value, and use the windows, barriers and
/// resources of all ranks through it. Made by [`Nccl::device_comm`](crate::nccl::Nccl::device_comm).
///
/// A kernel is compiled with the headers of exactly the loaded release, since layouts differ:
/// [`Program::nccl`](crate::jit::Program::nccl) finds them. It is launched with
/// [`jit::device_comm`](crate::jit::device_comm), or by cudarc with
/// [`argument`](crate::nccl::DeviceComm::argument). A kernel with barriers waits for the same kernel on the
/// other ranks: all ranks launch it, with no more blocks than run at once.
///
/// Dropping it waits, with a bound, for the streams on which kernels were launched with it, and destroys it
/// (`ncclDevCommDestroy`). The end of its communicator destroys it too; then no kernel may be launched with
/// it.
///
/// NCCL cannot end a kernel that waits for a missing rank. [`sync`](crate::nccl::DeviceComm::sync) names that
/// rank, but the kernel occupies the GPU until the process ends, unless it gives up itself (barriers can,
/// from 2.30 on).
pub struct DeviceComm {
    communicator: Arc<Communicator>,
    held: Arc<Held>,
    number: NonZeroU64,
    len: usize,
    resources: Vec<ResourceHandle>,
    multimem: Vec<u64>,
    has_lsa_multimem: bool,
}

impl DeviceComm {
    /// `ncclDevComm`, in the size of the loaded release.
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: the words live as long as `self`; they are read as bytes, as many as they have.
        unsafe { std::slice::from_raw_parts(self.held.start().cast(), self.len) }
    }

    /// Returns it as an argument for a kernel that cudarc launches on this stream. Dropping it waits for the
    /// stream: `stream.launch_builder(&kernel).arg(device_comm.argument(&stream)?)`.
    ///
    /// # Errors
    /// [`UsageError::Memory`](crate::UsageError::Memory) for a stream of another GPU, and the communicator's
    /// own if it has failed or ended.
    pub fn argument(&self, stream: &Arc<CudaStream>) -> Result<&KernelArgument> {
        self.launched_on(&GpuStream::Cuda(stream.clone()))?;
        Ok(&self.held.argument)
    }

    /// Records that a kernel is about to be launched on a stream.
    pub(crate) fn launched_on(&self, stream: &GpuStream) -> Result<()> {
        self.held.users.add(&self.communicator, stream)
    }

    /// Waits for the streams on which kernels with it were launched, with the communicator's deadline.
    ///
    /// # Errors
    /// The communicator's failure, as of [`Comm::sync`](crate::Comm::sync), where a rank is gone or the
    /// deadline passes.
    pub fn sync(&self) -> Result<()> {
        self.held.users.sync(&self.communicator)
    }

    /// The handles of [`DeviceRequirements::resources`](crate::nccl::DeviceRequirements::resources), in their
    /// order.
    pub fn resources(&self) -> &[ResourceHandle] {
        &self.resources
    }

    /// The multicast addresses of
    /// [`DeviceRequirements::multimem_teams`](crate::nccl::DeviceRequirements::multimem_teams), in their
    /// order, as the kernel's `ncclMultimemHandle` has them; 0 where there is none.
    pub fn multimem(&self) -> &[u64] {
        &self.multimem
    }
}

impl Drop for DeviceComm {
    fn drop(&mut self) {
        if let Err(error) = self.communicator.end_registration(self.number) {
            crate::os::log::warn!(
                rank = self.communicator.rank,
                "a device communicator is left to the library until its communicator ends: {error}"
            );
        }
    }
}

impl fmt::Debug for DeviceComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceComm").field("rank", &self.communicator.rank).field("bytes", &self.len).finish()
    }
}

#[cfg(feature = "jit")]
impl crate::jit::sealed::Sealed for DeviceComm {}

#[cfg(feature = "jit")]
impl crate::jit::DeviceHandle for DeviceComm {
    fn as_bytes(&self) -> &[u8] {
        DeviceComm::as_bytes(self)
    }

    fn launched_on(&self, stream: &GpuStream) -> Result<()> {
        DeviceComm::launched_on(self, stream)
    }
}
