//! NVSHMEM's host interface, as its shared library exports it (3.4 and later).
//!
//! `nvshmem_init`, `nvshmemx_init_attr` and `nvshmem_finalize` are inline in NVIDIA's headers, and no library of version 3
//! exports them: the functions that they call are here. Of the functions that exist for every element type, the table has
//! those for bytes and for each width, and the reductions of phalanx's element types.

#![allow(non_camel_case_types, non_snake_case)]

mod api;
pub mod kernels;
pub mod plugin;
mod types;

pub use api::{Api, FUNCTIONS, Function, OLDEST, REDUCE_OPS, REDUCE_TYPES, Reduce};
pub use plugin::Plugin;
pub use types::*;
