//! Creates communicators of ranks on several hosts, which find each other through the job's store.

use super::gpus::on_gpu;
use super::mpi::join_mpi;
use super::processes::{introduction, on_one_host};
use super::{NewComm, Settings, agreement, job_store};
use crate::backend::host::HostComm;
use crate::contract::BackendKind;
use crate::contract::hosts::HostTopology;
use crate::control::endpoint::Endpoint;
use crate::rendezvous::environment::{Environment, Launcher, Place};
use crate::rendezvous::store::Store;
use crate::rendezvous::store::address::Listeners;
use crate::types::error::{Error, Result, UnsupportedError};

/// Creates the communicator of ranks that, by their launcher, are on several hosts.
pub(super) fn on_hosts(
    launcher: &Launcher,
    environment: &Environment,
    settings: &Settings,
    listener: Option<Listeners>,
) -> Result<NewComm> {
    if !cfg!(feature = "multi-host") {
        return Err(UnsupportedError::left_out("a job of several hosts", "multi-host"));
    }
    let (place, timeout) = (launcher.place(environment)?, settings.timeout);
    let own = introduction(environment, settings)?;
    let store = job_store::open_store(environment, &place, listener, timeout)?;
    let otherwise = if launcher.starts_mpi() { BackendKind::Mpi } else { BackendKind::Host };
    let introductions = agreement::decode(&store.exchange("phalanx/hosts", &own.to_bytes(), timeout)?)?;
    let topology = agreement::topology(&introductions);
    let backend = agreement::agree(&introductions, &topology, otherwise)?;
    crate::os::log::info!(backend = backend.name(), hosts = %topology, "the ranks have agreed");
    if backend == BackendKind::Mpi {
        drop(store);
        return join_mpi(Some(launcher), environment, settings);
    }
    if topology.num_hosts() == 1 {
        // The nodes turn out to be one host.
        drop(store);
        return on_one_host(Some(backend), launcher, environment, settings);
    }
    check_for_hosts(backend, &topology)?;
    across_hosts(backend, store, topology, place, settings)
}

/// Checks that a backend can span several hosts. The result is the same on all ranks.
pub(super) fn check_for_hosts(backend: BackendKind, topology: &HostTopology) -> Result<()> {
    match backend {
        BackendKind::Host => crate::os::check_process_ranks().and_then(|()| topology.check_one_host()),
        BackendKind::Nvshmem => Err(Error::from(UnsupportedError {
            what: format!("the backend nvshmem on several hosts ({topology})"),
            why: "its ranks meet in the memory of one".into(),
            remedy: "use NCCL (PHALANX_BACKEND=nccl), or start all ranks on one host".into(),
        })),
        _ => Ok(()),
    }
}

/// Creates the GPU communicator of ranks on several hosts that have joined a store.
pub(super) fn across_hosts(
    backend: BackendKind,
    store: Store,
    topology: HostTopology,
    place: Place,
    settings: &Settings,
) -> Result<NewComm> {
    let control = HostComm::new(Endpoint::over(store, place.rank, topology, settings.timeout)?);
    on_gpu(backend, control, place.job, settings)
}
