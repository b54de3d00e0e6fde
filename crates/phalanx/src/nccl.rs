//! What only NCCL has: reached through [`Comm::nccl`](crate::Comm::nccl).
//!
//! ```no_run
//! # fn main() -> phalanx::Result<()> {
//! use phalanx::{BackendKind, Comm, ReduceOp};
//! for result in Comm::builder().backend(BackendKind::Nccl).run(2, |comm| -> phalanx::Result<()> {
//!     let nccl = comm.nccl().expect("the backend was chosen");
//!     let mut gradients = nccl.alloc::<f32>(1 << 20)?; // symmetric memory, where the library has it
//!     comm.all_reduce_in_place(&mut gradients, ReduceOp::Sum)?;
//!     comm.sync()
//! })? {
//!     result?;
//! }
//! # Ok(())
//! # }
//! ```

mod graph;

pub use graph::Graph;

pub use crate::backend::nccl::{
    Buffer, CollectiveConfig, Config, DeviceComm, DeviceRequirements, Endpoint, GinConnection, GinType,
    GpuSlice, KernelArgument, MemoryStatistic, Nccl, Properties, Registration, Resource, ResourceHandle,
    Signal, Surface, Team, TeamKind, encrypt_sockets, init_all, parameters, version,
};
