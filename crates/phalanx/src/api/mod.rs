//! The typed front: every check of arguments, once.
//!
//! | file | what it has |
//! |---|---|
//! | `init.rs`, `builder.rs`, `try_run.rs` | ways to get a communicator, and its settings |
//! | `comm.rs`, `membership.rs` | `Comm` and `View`; communicators made of others |
//! | `checks.rs`, `collectives.rs` | checks of a collective's arguments; the collectives |
//! | `custom.rs`, `local.rs`, `coalesced.rs` | reductions by a closure, of one rank, of several buffers |
//! | `p2p.rs`, `probe.rs`, `group.rs` | messages; those of unknown senders and lengths; operations that start together |
//! | `shared.rs` | a communicator for several threads |
//! | `values.rs` | collectives of single values, and of lists of unknown lengths |
//! | `object/` | values of any type that serde knows |
//! | `rank_group.rs`, `grid/` | ranks as groups and as grids, reordered by host; neighbors and halos |
//! | `one_sided/` | memory that other ranks access |
//! | `gpu_link.rs`, `gpu_window/` | which GPUs NVLink connects; memory of GPUs that other ranks access |
//! | `file/` | files of distributed arrays |
//! | `request/` | operations that go on while the rank does something else |
//! | `raw/` | the trait of raw pointers |
//! | `recorded.rs` | operations as the flight recorder sees them |

pub(crate) mod builder;
mod checks;
mod coalesced;
mod collectives;
pub(crate) mod comm;
mod custom;
pub(crate) mod file;
#[cfg(feature = "cuda")]
mod gpu_link;
#[cfg(feature = "cuda")]
pub(crate) mod gpu_window;
pub(crate) mod grid;
pub(crate) mod group;
pub(crate) mod init;
pub(crate) mod lending;
pub(crate) mod local;
mod membership;
mod object;
pub(crate) mod one_sided;
pub(crate) mod p2p;
mod probe;
pub(crate) mod rank_group;
pub(crate) mod raw;
mod recorded;
pub(crate) mod request;
pub(crate) mod shared;
pub(crate) mod try_run;
pub(crate) mod values;
