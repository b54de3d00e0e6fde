//! NCCL's and RCCL's C interface: one table of functions. A [`Flavour`] says which of the two libraries is meant.
//!
//! Names are those of the C libraries. Codes are integer newtypes, since a newer library may return unknown codes.

#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals)]

mod api;
mod config;
mod device;
pub mod kernels;
mod types;

pub use api::{Api, FUNCTIONS, Function};
pub use config::{
    CONFIG_LAYOUTS, NCCL_ENCRYPTION_MODE_NONE, NCCL_ENCRYPTION_MODE_PSK, UNDEF_INT, ncclCollConfig_t,
    ncclConfig_t, ncclEncryptionConfig_t, ncclSimInfo_t,
};
pub use device::*;
pub use types::*;
