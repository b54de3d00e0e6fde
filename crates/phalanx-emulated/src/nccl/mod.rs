//! The emulated NCCL.
//!
//! From the top down, each file or folder uses those further down only:
//!
//! | File | What it has |
//! |---|---|
//! | `functions/` | the exported functions, by subject |
//! | `group.rs` | groups: operations and jobs that wait for `ncclGroupEnd` |
//! | `launch.rs`, `job.rs` | how operations get into streams; work on communicators, at once or in the background |
//! | `perform.rs` | what a stream does for the operations of a group |
//! | `operation.rs` | an operation, from the checked arguments of a call |
//! | `communicator/` | a communicator's state, what it owns, and the calls that are allowed on it |
//! | `exclusive.rs` | the check that one thread at a time calls communicators of a device |
//! | `transport/` | messages between ranks |
//! | `config.rs`, `types.rs`, `version.rs`, `result.rs` | configurations; element types; releases; status codes and their texts |

pub mod communicator;
pub mod config;
pub mod exclusive;
pub mod functions;
pub mod group;
pub mod job;
pub mod launch;
pub mod operation;
pub mod perform;
pub mod result;
pub mod transport;
pub mod types;
pub mod version;
