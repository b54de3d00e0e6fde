//! The emulated NVSHMEM host library: NVIDIA's exported functions, without those that are inline in its
//! headers.
//!
//! PEs are processes of one host. Their heaps are parts of one shared file that every PE maps. Addresses are
//! used once. Non-blocking operations are performed when quiet is called, and not before. As in the library,
//! strided operations and single gets end the process if loads and stores do not reach the peer.
//!
//! From the top down, each file uses files further down only:
//!
//! | File | What it has |
//! |---|---|
//! | `init.rs` | initialisation and finalisation, with the failures that the settings inject |
//! | `collective.rs`, `team.rs` | barriers and collectives on streams; teams |
//! | `rma.rs`, `memory.rs` | puts, gets, signals, quiet; allocation, registration, peers' addresses |
//! | `completion.rs`, `heap.rs` | work on streams, and what quiet completes; offsets and checks of heap addresses |
//! | `process.rs` | this process as a PE, and the checks that each call goes through |
//! | `world.rs`, `pmi.rs` | the shared file: heaps, barriers, exchanges; the client of a process manager |

pub mod collective;
pub mod completion;
pub mod heap;
pub mod init;
pub mod memory;
pub mod pmi;
pub mod process;
pub mod rma;
pub mod team;
pub mod world;
