//! Creates communicators on GPUs, with the backends that are built in.

use super::{NewComm, Settings};
use crate::backend::host::HostComm;
#[cfg(feature = "_nccl")]
use crate::backend::nccl::NcclComm;
#[cfg(feature = "nccl")]
use crate::backend::nccl::NcclSettings;
#[cfg(feature = "nvshmem")]
use crate::backend::nvshmem::NvshmemComm;
#[cfg(feature = "_gpu")]
use crate::contract::Backend;
use crate::contract::BackendKind;
#[cfg(feature = "nccl")]
use crate::contract::messenger::MakeMessenger;
#[cfg(feature = "_gpu")]
use crate::control::host_channel::HostChannel;
use crate::rendezvous::gpus::Visible;
use crate::types::error::{Error, Result, UnsupportedError};
#[cfg(feature = "_nccl")]
use phalanx_sys::nccl::Flavour;
#[cfg(feature = "_gpu")]
use std::sync::Arc;

/// UCX, where it is built in.
#[cfg(all(feature = "nccl", feature = "multi-host", target_pointer_width = "64", target_endian = "little"))]
const MESSENGER: Option<MakeMessenger> = Some(crate::backend::ucx::messenger);
#[cfg(all(
    feature = "nccl",
    not(all(feature = "multi-host", target_pointer_width = "64", target_endian = "little"))
))]
const MESSENGER: Option<MakeMessenger> = None;

/// Checks that a backend has a GPU for each of this many ranks of this host.
pub(super) fn gpus_for(backend: BackendKind, ranks: usize) -> Result<()> {
    match backend {
        #[cfg(feature = "_nccl")]
        BackendKind::Nccl | BackendKind::Rccl => crate::backend::nccl::available(flavour(backend), ranks),
        #[cfg(feature = "nvshmem")]
        BackendKind::Nvshmem => crate::backend::nvshmem::available(),
        _ => Err(left_out(backend, ranks)),
    }
}

/// Returns the GPUs that this process could use with a backend, or only the one with this number.
pub(super) fn visible_gpus(backend: BackendKind, wanted: Option<usize>) -> Result<Visible> {
    match backend {
        #[cfg(feature = "_nccl")]
        BackendKind::Nccl | BackendKind::Rccl => crate::backend::nccl::visible(flavour(backend), wanted),
        _ => Err(left_out(backend, wanted)),
    }
}

/// Creates the GPU communicator of the ranks of a host communicator. Collective.
pub(super) fn on_gpu(
    backend: BackendKind,
    host: HostComm,
    name: String,
    settings: &Settings,
) -> Result<NewComm> {
    match backend {
        #[cfg(feature = "_nccl")]
        BackendKind::Nccl | BackendKind::Rccl => {
            #[cfg(not(feature = "nccl"))]
            let nccl = settings.nccl.clone();
            #[cfg(feature = "nccl")]
            let nccl = Arc::new(NcclSettings { messenger: MESSENGER, ..(*settings.nccl).clone() });
            let comm = NcclComm::join(Box::new(host), flavour(backend), settings.gpu, nccl)?;
            Ok(NewComm::new(Arc::new(comm), name))
        }
        #[cfg(feature = "nvshmem")]
        BackendKind::Nvshmem => {
            let comm = NvshmemComm::join(Box::new(host), settings.gpu, &name)?;
            Ok(NewComm::new(Arc::new(comm), name))
        }
        _ => Err(left_out(backend, (host, name, settings.gpu))),
    }
}

/// The error for a backend that is not built in. Drops the arguments.
fn left_out<T>(backend: BackendKind, _unused: T) -> Error {
    UnsupportedError::left_out(format!("the backend {backend}"), backend.name())
}

/// The library behind a GPU backend: NCCL or RCCL.
#[cfg(feature = "_nccl")]
fn flavour(backend: BackendKind) -> Flavour {
    if backend == BackendKind::Rccl { Flavour::Rccl } else { Flavour::Nccl }
}

/// Creates a host-memory channel between the ranks of a communicator, if its backend has one. Collective.
///
/// # Safety
/// As for [`Backend::split`].
#[cfg(feature = "_gpu")]
pub(crate) unsafe fn host_channel(backend: &dyn Backend) -> Result<Option<Box<dyn HostChannel>>> {
    #[cfg(feature = "_nccl")]
    if let Some(nccl) = NcclComm::of(backend) {
        // SAFETY: the caller's contract.
        return unsafe { nccl.host_channel() }.map(Some);
    }
    #[cfg(feature = "nvshmem")]
    if let Some(nvshmem) = NvshmemComm::of(backend) {
        // SAFETY: the caller's contract.
        return unsafe { nvshmem.host_channel() }.map(Some);
    }
    let Some(host) = (backend as &dyn std::any::Any).downcast_ref::<HostComm>() else { return Ok(None) };
    // SAFETY: the caller's contract.
    unsafe { host.split_channel(Some(0), backend.rank() as i64) }
}
