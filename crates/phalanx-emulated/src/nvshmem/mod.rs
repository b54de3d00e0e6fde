//! The emulated NVSHMEM host library: what NVIDIA's exports, and none of what is inline in its headers.
//!
//! | File | What it has |
//! |---|---|
//! | `world.rs` | the memory that the PEs of a job share: heaps, barriers, what they tell each other |
//! | `process.rs` | this process as a PE; what every exported function goes through |
//! | `init.rs` | beginning and end, with the ways in which they fail |
//! | `pmi.rs` | the process manager's client, for PEs that mpirun starts |
//! | `memory.rs` | the symmetric heap, registrations, peers' addresses |
//! | `rma.rs` | puts, gets, signals, quiet |
//! | `team.rs`, `collective.rs` | teams, and what they do together |
//!
//! PEs are processes of one host. Each one's heap is part of one shared file, which everybody maps; addresses are given out
//! once. Operations that are not blocking happen when quiet is called, and not before. Strided operations and single gets
//! end the process where a peer cannot be reached by loads and stores, as in the library.

pub mod collective;
pub mod init;
pub mod memory;
pub mod pmi;
pub mod process;
pub mod rma;
pub mod team;
pub mod world;
