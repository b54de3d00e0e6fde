//! NVSHMEM's host API, safe: contexts, symmetric memory, teams, and what is done with them.
//!
//! Its public face is [`phalanx::nvshmem`](crate::nvshmem).

mod atomic;
mod collective;
mod context;
mod control;
mod device;
mod growth;
#[cfg(feature = "jit")]
mod kernels;
mod library;
mod limits;
mod memory;
mod one_sided;
mod register;
mod signal;
mod team;
mod views;

pub use atomic::{Atomic, AtomicBits};
pub use collective::TeamReduction;
pub(crate) use collective::column;
pub use context::{Builder, Context, UniqueId};
pub(crate) use control::Control;
pub(crate) use device::{Device, copy, failed as device_error};
pub(crate) use library::Library;
pub use library::{openshmem_version, path, version};
pub(crate) use limits::{Asked, Limits, ROOM, Way};
pub use memory::{Local, LocalMut, Shared, Slice, SliceMut, Symmetric};
pub use register::Registered;
pub use signal::{Compare, Signal, SignalOp, Waitable};
pub(crate) use team::strided;
pub use team::{SplitTeam, Team};
pub use views::{Multicast, Peer};
