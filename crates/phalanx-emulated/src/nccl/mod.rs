//! The emulated NCCL.
//!
//! | File | What it has |
//! |---|---|
//! | `communicator.rs`, `inside.rs` | a communicator's state, and who may call what when |
//! | `init.rs`, `derive.rs`, `ending.rs` | how communicators begin, beget others, and end |
//! | `group.rs` | groups, and how work gets into streams: at once or late |
//! | `collective.rs`, `configured.rs`, `one_sided.rs` | the functions that enqueue operations |
//! | `operation.rs`, `perform.rs`, `reduce.rs` | an operation; what a stream does for it; the arithmetic |
//! | `reduction.rs`, `registration.rs`, `window.rs` | reduction operators, registered memory, windows |
//! | `device.rs` | what kernels of a program's own need of a communicator |
//! | `config.rs`, `query.rs`, `result.rs`, `types.rs` | configurations, questions, results, element types |
//! | `transport/` | messages between ranks |

pub mod collective;
pub mod communicator;
pub mod config;
pub mod configured;
pub mod derive;
pub mod device;
pub mod ending;
pub mod group;
pub mod init;
pub mod inside;
pub mod one_sided;
pub mod operation;
pub mod perform;
pub mod query;
pub mod reduce;
pub mod reduction;
pub mod registration;
pub mod result;
pub mod transport;
pub mod types;
pub mod window;
