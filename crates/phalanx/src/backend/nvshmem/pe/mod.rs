//! NVSHMEM's host API, safe: contexts, symmetric memory, teams, and what is done with them.
//!
//! The public API is [`phalanx::nvshmem`](crate::nvshmem).
//!
//! | file | what |
//! |---|---|
//! | `library.rs`, `device.rs` | the loaded library, and calls with a time limit; this PE's GPU |
//! | `unique_id.rs`, `init.rs`, `process_state.rs` | how PEs find each other; initialisation; one context for each process |
//! | `context.rs`, `control.rs` | the context; the channels on which PEs compare calls and find missing peers |
//! | `allocation.rs`, `heap.rs`, `memory.rs`, `register.rs`, `views.rs` | symmetric memory: allocating it, room in the heap, its types, memory of the user's, peers' parts |
//! | `one_sided/`, `signal.rs`, `atomic.rs` | puts and gets; signals; atomic operations |
//! | `team.rs`, `collective.rs`, `limits.rs` | teams; their collectives; what the library's reductions cannot do |
//! | `kernels.rs` | kernels that use NVSHMEM's device functions |

mod allocation;
mod atomic;
mod collective;
mod context;
mod control;
mod device;
mod heap;
mod init;
#[cfg(feature = "jit")]
mod kernels;
mod library;
mod limits;
mod memory;
mod one_sided;
mod process_state;
mod register;
mod signal;
mod team;
mod unique_id;
mod views;

pub use atomic::{Atomic, AtomicBits};
pub use collective::TeamReduction;
pub(crate) use collective::column;
pub use context::Context;
pub(crate) use control::PeControl;
pub(crate) use device::{PeDevice, copy, failed as device_error};
pub use init::Builder;
pub(crate) use library::NvshmemLibrary;
pub use library::{openshmem_version, path, version};
pub(crate) use limits::{Limits, ReductionMethod, ReductionQuery, TEAM_SCRATCH};
pub use memory::{Local, LocalMut, Shared, Slice, SliceMut, Symmetric};
pub use register::Registered;
pub use signal::{Compare, Signal, SignalOp, Waitable};
pub(crate) use team::strided;
pub use team::{SplitTeam, Team};
pub use unique_id::UniqueId;
pub use views::{Multicast, Peer};
