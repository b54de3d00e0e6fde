//! Collectives by phalanx's own kernels, where the GPUs of all ranks reach each other's memory. They take half of NCCL's time up to a
//! few MiB. NCCL does the rest, on the same stream and in the same order.
//!
//! | file | what |
//! |---|---|
//! | `choose.rs`, `tunables.rs` | which calls go where, and by which algorithm |
//! | `setup.rs`, `peer_memory.rs` | what own kernels need; memory that peers write to: allocated, exchanged, opened, given back |
//! | `launch.rs`, `messages.rs`, `norm.rs` | a call as a kernel's arguments, and its launch |
//! | `experts.rs` | dispatch and combine of experts: their scratch, their launch |
//! | `peers.rs` | FIFOs for kernels of programs |
//!
//! The kernels are in `gpu/kernels`, where `fifo.cuh` says how data travels. Three properties matter here:
//!
//! - A kernel's warps wait for those of the peers, and leave when the abort word is set. So a wait on the stream ends as it does with
//!   NCCL: the communicator fails, and its abort sets the word.
//! - Numbers of steps are in device memory, advanced by the kernels. A captured graph can be replayed, and calls between replays work.
//! - Contributions are combined in rank order, with the arithmetic of host memory.

mod choose;
mod experts;
mod launch;
mod messages;
mod norm;
mod peer_memory;
mod peers;
mod setup;
mod tunables;

pub use choose::GpuAlgorithm;
pub(crate) use choose::{Algorithm, is_empty_of_own_type};
pub(crate) use experts::{ExpertScratch, ExpertShape, ExpertTask};
pub(crate) use launch::{KernelLaunch, launch};
pub(crate) use norm::alone;
pub(crate) use peer_memory::{PeerMemory, clear, enable_peer_access};
pub(crate) use peers::PeerFifos;
pub use peers::PeersArgument;
pub(crate) use setup::Direct;
