//! RCCL's own features: reached through [`Comm::rccl`](crate::Comm::rccl). Streams and memory are in
//! [`hip`](crate::hip).
//!
//! ```no_run
//! # fn main() -> phalanx::Result<()> {
//! use phalanx::{BackendKind, Comm, ReduceOp};
//! Comm::builder().backend(BackendKind::Rccl).try_run(2, |comm| -> phalanx::Result<()> {
//!     let rccl = comm.rccl().expect("the backend was chosen");
//!     let mut gradients = rccl.alloc::<f32>(1 << 20)?; // registered, where the library can
//!     comm.all_reduce_in_place(&mut gradients, ReduceOp::Sum)?;
//!     comm.sync()
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! None of this has run on an AMD GPU so far: see docs/rccl.md in the repository.

pub use super::one_sided::Signal;
pub use super::rccl_comm::{Rccl, gpus, init_all, version};
pub use super::surface::{MemoryStatistic, Surface};
pub use crate::backend::nccl::{Config, Registration};

/// GPU memory from RCCL, registered with a communicator as far as the library can.
pub type Buffer<T> = crate::backend::nccl::Buffer<T, crate::gpu::hip::Slice<T>>;
