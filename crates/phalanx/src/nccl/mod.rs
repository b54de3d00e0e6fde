//! NCCL's own features: reached through [`Comm::nccl`](crate::Comm::nccl).
//!
//! ```no_run
//! # fn main() -> phalanx::Result<()> {
//! use phalanx::{BackendKind, Comm, ReduceOp};
//! Comm::builder().backend(BackendKind::Nccl).try_run(2, |comm| -> phalanx::Result<()> {
//!     let nccl = comm.nccl().expect("the backend was chosen");
//!     let mut gradients = nccl.alloc::<f32>(1 << 20)?; // symmetric memory, where the library has it
//!     comm.all_reduce_in_place(&mut gradients, ReduceOp::Sum)?;
//!     comm.sync()
//! })?;
//! # Ok(())
//! # }
//! ```

mod comm;
#[cfg(feature = "nccl")]
mod device_comm;
mod estimate;
#[cfg(feature = "nccl")]
mod experts;
#[cfg(feature = "nccl")]
mod fused;
#[cfg(feature = "nccl")]
mod graph;
#[cfg(feature = "nccl")]
mod nccl_comm;
mod one_sided;
#[cfg(feature = "nccl")]
mod peers;
#[cfg(feature = "rccl")]
pub mod rccl;
#[cfg(feature = "rccl")]
mod rccl_comm;
mod scaled;
mod surface;

#[cfg(feature = "nccl")]
pub use crate::backend::nccl::device_comm::KernelArgument;
#[cfg(feature = "nccl")]
pub use crate::backend::nccl::direct::{GpuAlgorithm, PeersArgument};
pub use crate::backend::nccl::{Buffer, CollectiveConfig, Config, GpuSlice, Registration, parameters};
#[cfg(feature = "nccl")]
pub use device_comm::{
    DeviceComm, DeviceRequirements, Endpoint, GinConnection, GinType, Properties, Resource, ResourceHandle,
    Team, TeamKind,
};
#[cfg(feature = "nccl")]
pub use experts::{ExpertLayout, Experts};
#[cfg(feature = "nccl")]
pub use fused::{QuantizedElement, RowElement};
#[cfg(feature = "nccl")]
pub use graph::Graph;
#[cfg(feature = "nccl")]
pub use nccl_comm::{Nccl, encrypt_sockets, gpus, init_all, version};
pub use one_sided::Signal;
#[cfg(feature = "nccl")]
pub use peers::Peers;
pub use surface::{MemoryStatistic, Surface};
