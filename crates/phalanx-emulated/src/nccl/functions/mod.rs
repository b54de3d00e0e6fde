//! The exported functions of NCCL and RCCL, except those of groups (`../group.rs`) and of errors
//! (`../result.rs`).
//!
//! | File | What it has |
//! |---|---|
//! | `init.rs`, `derive.rs`, `destroy.rs` | how communicators begin, how new ones are derived from them, how they end |
//! | `collective.rs`, `collective_config.rs`, `one_sided.rs` | collectives and messages; collectives with their own configuration; puts and signals |
//! | `operate.rs` | the common part of the functions that enqueue operations |
//! | `reduction.rs`, `registration.rs`, `window.rs` | reduction operators; NCCL's and registered memory; windows |
//! | `device.rs`, `device_layout.rs` | the host's part of the device API; its structures in each release |
//! | `query.rs` | questions about the library and communicators; suspending communicators |

pub mod collective;
pub mod collective_config;
pub mod derive;
pub mod destroy;
pub mod device;
mod device_layout;
pub mod init;
pub mod one_sided;
mod operate;
pub mod query;
pub mod reduction;
pub mod registration;
pub mod window;
