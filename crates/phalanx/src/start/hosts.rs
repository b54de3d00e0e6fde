//! Creates communicators of ranks on several hosts, which find each other through the job's store.

use super::gpus::on_gpu;
use super::mpi::join_mpi;
use super::processes::{introduction, meet_while, on_one_host};
use super::{NewComm, Settings, agreement, job_store};
use crate::backend::host::HostComm;
#[cfg(all(feature = "multi-host", target_pointer_width = "64", target_endian = "little"))]
use crate::backend::ucx::{Here, MeetHere, Meeting, UcxComm};
use crate::contract::hosts::HostTopology;
use crate::contract::{Backend, BackendKind};
use crate::control::endpoint::Endpoint;
use crate::control::host_channel::HostChannel;
use crate::control::relay::growth::Met;
use crate::rendezvous::environment::{Environment, Launcher, Place};
use crate::rendezvous::store::Store;
use crate::rendezvous::store::address::Listeners;
use crate::types::error::{Error, Result, UnsupportedError};
use std::sync::Arc;
use std::time::Duration;

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
    if topology.num_hosts() == 1 && backend != BackendKind::Ucx {
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

/// Creates the communicator of ranks on several hosts that have joined a store.
pub(super) fn across_hosts(
    backend: BackendKind,
    store: Store,
    topology: HostTopology,
    place: Place,
    settings: &Settings,
) -> Result<NewComm> {
    if backend == BackendKind::Ucx {
        return over_ucx(store, topology, place, settings);
    }
    let control = HostComm::new(Endpoint::over(store, place.rank, topology, settings.timeout)?);
    on_gpu(backend, control, place.job, settings)
}

#[cfg(all(feature = "multi-host", target_pointer_width = "64", target_endian = "little"))]
fn over_ucx(store: Store, topology: HostTopology, place: Place, settings: &Settings) -> Result<NewComm> {
    let job = place.job.clone();
    let comm = UcxComm::over_store(
        store,
        topology,
        (meet_here(place), ""),
        settings.reproducible,
        settings.timeout,
    )?;
    Ok(NewComm::new(Arc::new(comm), job))
}

/// The communicator of a new rank that has met the members and the other new ranks.
#[cfg(all(feature = "multi-host", target_pointer_width = "64", target_endian = "little"))]
pub(super) fn grown_on_hosts(
    met: Met,
    place: Place,
    timeout: Duration,
    settings: &Settings,
) -> Result<Arc<dyn Backend>> {
    let comm = UcxComm::grown(met, meet_here(place), timeout)?;
    comm.set_timeout(settings.timeout);
    Ok(Arc::new(comm))
}

#[cfg(all(feature = "multi-host", target_pointer_width = "64", target_endian = "little"))]
fn meet_here(place: Place) -> MeetHere {
    Arc::new(move |meeting| ranks_here(meeting, &place))
}

/// The hosts, where ranks share them; those of this host meet, and have a communicator of the host backend. On a single host UCX carries
/// everything: who asks for that wants UCX.
#[cfg(all(feature = "multi-host", target_pointer_width = "64", target_endian = "little"))]
fn ranks_here(meeting: &Meeting<'_>, place: &Place) -> Result<Option<Here>> {
    let topology = meeting.topology;
    let hosts = topology.num_hosts();
    if hosts == 1 || hosts == topology.world_size() {
        return Ok(None);
    }
    let ranks = topology.ranks_of(topology.host_of(meeting.rank)).to_vec();
    let rank = ranks.iter().position(|rank| *rank == meeting.rank).expect("a rank is on its host");
    let name = format!("{} {} of the host of rank {}", place.meeting, meeting.name, ranks[0]);
    let place = Place { rank, world_size: ranks.len(), meeting: name, one_host: true, ..place.clone() };
    let channel = match ranks.len() {
        1 => None,
        _ => Some(Box::new(meet_while(&place, meeting.timeout, meeting.check)?) as Box<dyn HostChannel>),
    };
    Ok(Some(Here { topology: topology.clone(), ranks, channel }))
}

#[cfg(not(all(feature = "multi-host", target_pointer_width = "64", target_endian = "little")))]
fn over_ucx(_: Store, _: HostTopology, _: Place, _: &Settings) -> Result<NewComm> {
    Err(no_ucx())
}

#[cfg(not(all(feature = "multi-host", target_pointer_width = "64", target_endian = "little")))]
pub(super) fn grown_on_hosts(_: Met, _: Place, _: Duration, _: &Settings) -> Result<Arc<dyn Backend>> {
    Err(no_ucx())
}

#[cfg(not(all(feature = "multi-host", target_pointer_width = "64", target_endian = "little")))]
fn no_ucx() -> Error {
    Error::from(UnsupportedError {
        what: "the backend ucx".into(),
        why: "it is written for 64-bit little-endian machines, with the feature multi-host".into(),
        remedy: "start all ranks on one host".into(),
    })
}
