//! GPUs: drivers found at run time, streams and memory of HIP, identities of devices.

pub(crate) mod backoff;
pub(crate) mod copies;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(feature = "rccl")]
pub mod hip;
#[cfg(feature = "nccl")]
pub(crate) mod ipc;
#[cfg(feature = "nccl")]
pub(crate) mod kernels;
pub(crate) mod nccl;
#[cfg(feature = "_gpu")]
pub(crate) mod pitched;
