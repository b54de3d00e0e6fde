//! Communicators of processes: `init` finds the other ranks on this host, in a store or over MPI, and starts the backend that they
//! agree on; `join` enters a communicator that grows.

#[cfg(feature = "cuda")]
use super::choose::flavour;
#[cfg(not(feature = "cuda"))]
use super::choose::gpus_for;
use super::choose::{Choice, visible_gpus};
use super::threads::thread_ranks;
use super::{NewComm, Settings, agreement, job_store, own_name};
use crate::backend::host::HostComm;
#[cfg(all(target_pointer_width = "64", target_endian = "little"))]
use crate::backend::mpi::{Launched, MpiComm};
#[cfg(feature = "cuda")]
use crate::backend::nccl::NcclComm;
use crate::backend::solo::SoloComm;
use crate::contract::hosts::HostTopology;
use crate::contract::{Backend, BackendKind, Departure, grown_name};
use crate::control::endpoint::Endpoint;
#[cfg(feature = "cuda")]
use crate::control::host_channel::HostChannel;
use crate::control::join as rendezvous;
use crate::rendezvous::environment::{
    Environment, Launcher, Place, cores_from_environment, stopped_timeout_from_environment,
};
use crate::rendezvous::store;
use crate::types::error::{Error, Result, UnsupportedError};
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

/// The communicator that the environment of this process asks for.
pub(crate) fn init(mut settings: Settings) -> Result<NewComm> {
    // Closed at the end of this, if what is made needs no port.
    let listener = settings.listener.take();
    let environment = &settings.environment;
    let choice = Choice::from(environment, settings.backend)?;
    let launcher = choice.launcher.as_ref();
    tracing::info!(
        backend = choice.backend.name(),
        reason = choice.reason,
        launcher = launcher.map_or("none", |launcher| launcher.name),
        recognised_by = ?launcher.map(|launcher| launcher.recognised_by),
        ignored = ?launcher.map(|launcher| &launcher.ignored),
        "communicator"
    );
    match choice.backend {
        _ if launcher.is_some_and(|launcher| launcher.meets_over_mpi(environment)) => {
            over_mpi(launcher.expect("asked just now"), environment, &settings)
        }
        BackendKind::Host | BackendKind::Nccl | BackendKind::Rccl | BackendKind::Nvshmem
            if launcher.is_some_and(|launcher| !launcher.is_one_host()) =>
        {
            on_hosts(launcher.expect("asked just now"), environment, &settings, listener)
        }
        BackendKind::Solo => Ok(NewComm::new(Arc::new(SoloComm::new(settings.timeout)), own_name())),
        BackendKind::Mpi => join_mpi(launcher, environment, &settings),
        backend => match launcher.filter(|launcher| launcher.world_size != Some(1)) {
            None => of_host(backend, thread_ranks(1, settings.timeout)?.remove(0), own_name(), &settings),
            Some(launcher) => on_one_host(None, launcher, environment, &settings),
        },
    }
}

/// The communicator of processes that share a host's memory. They agree on a backend during the join, unless `agreed` is given.
fn on_one_host(
    agreed: Option<BackendKind>,
    launcher: &Launcher,
    environment: &Environment,
    settings: &Settings,
) -> Result<NewComm> {
    let place = launcher.place(environment)?;
    let payload = match agreed {
        Some(_) => Vec::new(),
        None => introduction(environment, settings)?.to_bytes(),
    };
    let (host, payloads) = join(&place, &payload, settings.timeout)?;
    let backend = match agreed {
        Some(backend) => backend,
        None => {
            let topology = HostTopology::one_host(place.world_size);
            let otherwise = if launcher.starts_mpi() { BackendKind::Mpi } else { BackendKind::Host };
            let backend = agreement::agree(&agreement::decode(&payloads)?, &topology, otherwise)?;
            tracing::info!(backend = backend.name(), "the ranks have agreed");
            backend
        }
    };
    if backend == BackendKind::Mpi {
        drop(host);
        return join_mpi(Some(launcher), environment, settings);
    }
    of_host(backend, host, place.job, settings)
}

/// The communicator of ranks that are in the memory of one host.
fn of_host(backend: BackendKind, host: HostComm, name: String, settings: &Settings) -> Result<NewComm> {
    match backend {
        BackendKind::Nccl | BackendKind::Rccl => on_gpu(backend, host, name, settings),
        BackendKind::Nvshmem => as_pe(host, name, settings),
        _ => Ok(NewComm::new(Arc::new(host), name)),
    }
}

/// The communicator of ranks that are on several hosts, as far as the launcher knows.
fn on_hosts(
    launcher: &Launcher,
    environment: &Environment,
    settings: &Settings,
    listener: Option<TcpListener>,
) -> Result<NewComm> {
    let (place, timeout) = (launcher.place(environment)?, settings.timeout);
    let own = introduction(environment, settings)?;
    let store = job_store::open_store(environment, &place, listener, timeout)?;
    let otherwise = if launcher.starts_mpi() { BackendKind::Mpi } else { BackendKind::Host };
    let introductions = agreement::decode(&store.exchange("phalanx/hosts", &own.to_bytes(), timeout)?)?;
    let topology = agreement::topology(&introductions);
    let backend = agreement::agree(&introductions, &topology, otherwise)?;
    tracing::info!(backend = backend.name(), hosts = %topology, "the ranks have agreed");
    if backend == BackendKind::Mpi {
        drop(store);
        return join_mpi(Some(launcher), environment, settings);
    }
    if topology.num_hosts() == 1 {
        // The launcher's nodes are parts of one host.
        drop(store);
        return on_one_host(Some(backend), launcher, environment, settings);
    }
    check_for_hosts(backend, &topology)?;
    across_hosts(backend, store, topology, place, settings)
}

/// This rank's introduction.
fn introduction(environment: &Environment, settings: &Settings) -> Result<agreement::Introduction> {
    let wanted = settings.backend.map_or_else(|| environment.backend(), |backend| Ok(Some(backend)))?;
    Ok(agreement::Introduction::own(wanted, settings.gpu, visible_gpus))
}

/// An error if a backend cannot span several hosts. The same on all ranks.
fn check_for_hosts(backend: BackendKind, topology: &HostTopology) -> Result<()> {
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

/// The communicator of ranks with GPUs on several hosts, which have joined a store.
fn across_hosts(
    backend: BackendKind,
    store: store::Store,
    topology: HostTopology,
    place: Place,
    settings: &Settings,
) -> Result<NewComm> {
    let control = HostComm::new(Endpoint::over(store, place.rank, topology, settings.timeout)?);
    on_gpu(backend, control, place.job, settings)
}

#[cfg(all(target_pointer_width = "64", target_endian = "little"))]
fn join_mpi(launcher: Option<&Launcher>, environment: &Environment, settings: &Settings) -> Result<NewComm> {
    let place = launcher.and_then(|launcher| launcher.place(environment).ok());
    let name = place.map_or_else(|| "MPI_COMM_WORLD".to_owned(), |place| place.job);
    Ok(NewComm::new(Arc::new(mpi_world(launcher, settings)?), name))
}

#[cfg(all(target_pointer_width = "64", target_endian = "little"))]
fn mpi_world(launcher: Option<&Launcher>, settings: &Settings) -> Result<MpiComm> {
    let launched = Launched {
        launcher: launcher.map_or("nobody", |launcher| launcher.name),
        rank: launcher.map_or(0, |launcher| launcher.rank),
        world_size: launcher.and_then(|launcher| launcher.world_size),
    };
    MpiComm::world(&launched, settings.timeout, settings.check)
}

/// The communicator of MPI ranks on possibly several hosts. They exchange introductions over MPI. For NCCL they then join a store whose
/// connections MPI carries.
#[cfg(all(target_pointer_width = "64", target_endian = "little"))]
fn over_mpi(launcher: &Launcher, environment: &Environment, settings: &Settings) -> Result<NewComm> {
    let own = introduction(environment, settings)?;
    let world = mpi_world(Some(launcher), settings)?;
    let introductions = agreement::decode(&world.tell_bytes(&own.to_bytes())?)?;
    let topology = agreement::topology(&introductions);
    let backend = agreement::agree(&introductions, &topology, BackendKind::Mpi)?;
    tracing::info!(backend = backend.name(), hosts = %topology, "the ranks have agreed, over MPI");
    let launcher = launcher.with_world_size(world.world_size());
    if topology.num_hosts() == 1 && backend != BackendKind::Mpi {
        world.depart(Departure::Left);
        return on_one_host(Some(backend), &launcher, environment, settings);
    }
    check_for_hosts(backend, &topology)?;
    let place = launcher.place(environment);
    // A launcher may call the job something else on each host.
    let job = place.as_ref().map_or("MPI_COMM_WORLD", |place| &place.job);
    let job = String::from_utf8_lossy(&world.tell_bytes(job.as_bytes())?[0]).into_owned();
    if backend == BackendKind::Mpi {
        return Ok(NewComm::new(Arc::new(world), job));
    }
    let place = Place { job, ..place? };
    let store = job_store::open_store_over_mpi(world, environment, &place, &topology, settings.timeout)?;
    across_hosts(backend, store, topology, place, settings)
}

#[cfg(not(all(target_pointer_width = "64", target_endian = "little")))]
fn over_mpi(launcher: &Launcher, environment: &Environment, settings: &Settings) -> Result<NewComm> {
    join_mpi(Some(launcher), environment, settings)
}

#[cfg(not(all(target_pointer_width = "64", target_endian = "little")))]
fn join_mpi(_: Option<&Launcher>, _: &Environment, _: &Settings) -> Result<NewComm> {
    Err(Error::from(UnsupportedError {
        what: "the backend mpi".into(),
        why: "it is written for 64-bit little-endian machines".into(),
        remedy: "use the host backend, with `phalanx launch`".into(),
    }))
}

/// The communicator on GPUs of the ranks of a host communicator. Collective.
#[cfg(feature = "cuda")]
pub(super) fn on_gpu(
    backend: BackendKind,
    host: HostComm,
    name: String,
    settings: &Settings,
) -> Result<NewComm> {
    let comm = NcclComm::join(Box::new(host), flavour(backend), settings.gpu, settings.nccl.clone())?;
    Ok(NewComm::new(Arc::new(comm), name))
}

#[cfg(not(feature = "cuda"))]
pub(super) fn on_gpu(
    backend: BackendKind,
    host: HostComm,
    _name: String,
    _settings: &Settings,
) -> Result<NewComm> {
    gpus_for(backend, host.world_size())?;
    unreachable!("the error above")
}

/// The communicator of the ranks of a host communicator as PEs of NVSHMEM. Collective.
#[cfg(feature = "cuda")]
fn as_pe(host: HostComm, name: String, settings: &Settings) -> Result<NewComm> {
    let comm = crate::backend::nvshmem::NvshmemComm::join(Box::new(host), settings.gpu, &name)?;
    Ok(NewComm::new(Arc::new(comm), name))
}

#[cfg(not(feature = "cuda"))]
fn as_pe(host: HostComm, name: String, settings: &Settings) -> Result<NewComm> {
    on_gpu(BackendKind::Nvshmem, host, name, settings)
}

/// Joins the other processes of this host in their region. Also exchanges a payload: returns those of all ranks.
pub(super) fn join(place: &Place, payload: &[u8], timeout: Duration) -> Result<(HostComm, Vec<Vec<u8>>)> {
    crate::os::check_process_ranks()?;
    // Said before anybody is kept waiting.
    stopped_timeout_from_environment()?;
    cores_from_environment()?;
    let joined = rendezvous::meet(place, payload, timeout)?;
    let members = (0..place.world_size).collect();
    Ok((
        HostComm::new(Endpoint::attach(joined.world, joined.channel, place.rank, members, timeout)),
        joined.payloads,
    ))
}

/// [`join`](crate::join): becomes a rank of the job's growing communicator.
pub(crate) fn join_grown(settings: Settings) -> Result<NewComm> {
    let environment = &settings.environment;
    let Some(launcher) = environment.launcher()? else {
        return Err(Error::bootstrap(
            "no variable says which job this process is to join",
            "start it with the variables that the job's ranks have (PHALANX_JOB and others)",
        ));
    };
    let place = launcher.place(environment)?;
    crate::os::check_process_ranks()?;
    stopped_timeout_from_environment()?;
    cores_from_environment()?;
    let joined = rendezvous::join(&place, settings.timeout)?;
    let (rank, members) = (joined.rank, (0..joined.world_size).collect());
    let host = HostComm::new(Endpoint::attach(joined.world, joined.channel, rank, members, settings.timeout));
    let backend = backend_of_members(&joined.payloads[0], environment, &settings)?;
    tracing::info!(backend = backend.name(), rank, "joined a communicator");
    let name = grown_name(joined.number);
    match backend {
        BackendKind::Nccl | BackendKind::Rccl => on_gpu(backend, host, name, &settings),
        _ => Ok(NewComm::new(Arc::new(host), name)),
    }
}

/// The backend of a joined communicator, from its members' payload.
fn backend_of_members(payload: &[u8], environment: &Environment, settings: &Settings) -> Result<BackendKind> {
    let name = String::from_utf8_lossy(payload);
    let kinds = [BackendKind::Host, BackendKind::Nccl, BackendKind::Rccl];
    let Some(backend) = kinds.into_iter().find(|kind| kind.name() == name) else {
        return Err(Error::bootstrap(
            format!("the communicator's members do not say what carries its data, but {name:?}"),
            "use one version of phalanx in all processes of the job",
        ));
    };
    let wanted = settings.backend.map_or_else(|| environment.backend(), |backend| Ok(Some(backend)))?;
    match wanted.filter(|wanted| *wanted != backend) {
        None => Ok(backend),
        Some(wanted) => Err(Error::from(UnsupportedError {
            what: format!("joining on the backend {wanted}"),
            why: format!("the communicator that grows is on {backend}; it can be host, nccl or rccl"),
            remedy: "unset PHALANX_BACKEND, or set it to that of the others".into(),
        })),
    }
}

/// A new channel in host memory between the ranks of a communicator, where its backend has one. Collective.
///
/// # Safety
/// As for [`Backend::split`].
#[cfg(feature = "cuda")]
pub(crate) unsafe fn host_channel(backend: &dyn Backend) -> Result<Option<Box<dyn HostChannel>>> {
    use crate::backend::nvshmem::NvshmemComm;
    if let Some(nccl) = NcclComm::of(backend) {
        // SAFETY: the caller's contract.
        return unsafe { nccl.host_channel() }.map(Some);
    }
    if let Some(nvshmem) = NvshmemComm::of(backend) {
        // SAFETY: the caller's contract.
        return unsafe { nvshmem.host_channel() }.map(Some);
    }
    let Some(host) = (backend as &dyn std::any::Any).downcast_ref::<HostComm>() else { return Ok(None) };
    // SAFETY: the caller's contract.
    unsafe { host.part(Some(0), backend.rank() as i64) }
}
