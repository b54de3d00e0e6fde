//! The backends: what carries a communicator's data. None uses another.

pub(crate) mod dry_run;
pub(crate) mod host;
#[cfg(all(feature = "mpi", target_pointer_width = "64", target_endian = "little"))]
pub(crate) mod mpi;
#[cfg(feature = "_nccl")]
pub(crate) mod nccl;
#[cfg(feature = "nvshmem")]
pub(crate) mod nvshmem;
pub(crate) mod solo;
#[cfg(all(feature = "multi-host", target_pointer_width = "64", target_endian = "little"))]
pub(crate) mod ucx;
