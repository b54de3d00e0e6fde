//! The work of an operation, counted by the backend that would carry it out.

use crate::backend;
use crate::contract::BackendKind;
use crate::contract::work::{Placement, Planned, Work};

/// Work of an operation on a backend, by the algorithm that it would choose; `None` if it cannot say: the algorithms of MPI, NCCL and
/// NVSHMEM are their own.
pub fn work(backend: BackendKind, planned: &Planned<'_>, placement: &Placement) -> Option<Work> {
    match backend {
        BackendKind::Host => backend::host::work(planned, placement),
        #[cfg(all(feature = "multi-host", target_pointer_width = "64", target_endian = "little"))]
        BackendKind::Ucx => backend::ucx::work(planned, placement, backend::host::work),
        _ => None,
    }
}
