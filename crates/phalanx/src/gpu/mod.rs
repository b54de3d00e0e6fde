//! GPUs: drivers found at run time, streams and memory of HIP, identities of devices.

pub(crate) mod backoff;
pub(crate) mod copies;
pub(crate) mod cuda;
pub mod hip;
pub(crate) mod nccl;
