//! `join` enters a communicator of the job that grows: on this host, or in the job's store.

use super::gpus::on_gpu;
use super::hosts::grown_on_hosts;
use super::{NewComm, Settings};
use crate::backend::host::HostComm;
use crate::contract::{Backend, BackendKind, grown_name};
use crate::control::endpoint::Endpoint;
use crate::control::join as rendezvous;
use crate::control::relay::growth::enter;
use crate::rendezvous::environment::{
    Environment, Launcher, Place, cores_from_environment, stopped_timeout_from_environment,
};
use crate::rendezvous::store::Rendezvous;
use crate::types::error::{Error, Result, UnsupportedError};
use crate::watch::deadline::after;
use crate::watch::launcher;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Set by `phalanx launch --restarts` for a process that replaces a failed rank.
pub(super) const REPLACES: &str = "PHALANX_REPLACES";

/// Pause of a new rank between two looks for a communicator that grows, or between a meeting that failed and the next: on this host, and
/// where each look is a connection to the job's store.
const NEAR: Duration = Duration::from_millis(20);
const FAR: Duration = Duration::from_millis(100);

/// [`join`](crate::join): becomes a rank of the job's growing communicator.
pub(crate) fn join(settings: &Settings) -> Result<NewComm> {
    join_grown(settings, settings.timeout)
}

/// [`init`](super::processes::init) in the place of a rank that has failed: joins the survivors when they
/// [`rebuild`](crate::Comm::rebuild). A meeting that fails because another rank was lost in it is followed by the next.
pub(super) fn replace(settings: &Settings) -> Result<NewComm> {
    let deadline = after(Instant::now(), settings.timeout);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match join_grown(settings, left) {
            Err(error @ Error::Bootstrap(_)) if Instant::now() < deadline => {
                crate::os::log::info!("the survivors meet again: {error}");
                std::thread::sleep(NEAR);
            }
            outcome => return outcome,
        }
    }
}

pub(super) fn is_phalanx_launch(launcher: &Launcher) -> bool {
    launcher.name == "phalanx launch"
}

/// Connects to `phalanx launch`, which is told how this rank fares.
pub(super) fn tell_launcher(environment: &Environment) {
    let (name, job) = (environment.get(launcher::LAUNCHER), environment.get("PHALANX_JOB"));
    let rank = environment.number("PHALANX_RANK").ok().flatten();
    if let (Some(name), Some(job), Some(rank)) = (name, job, rank) {
        launcher::connect(name, job, rank);
    }
}

fn join_grown(settings: &Settings, timeout: Duration) -> Result<NewComm> {
    let environment = &settings.environment;
    let Some(launcher) = environment.launcher()? else {
        return Err(Error::bootstrap(
            "no variable says which job this process is to join",
            "start it with the variables that the job's ranks have (PHALANX_JOB and others)",
        ));
    };
    let place = launcher.place(environment)?;
    if is_phalanx_launch(&launcher) {
        tell_launcher(environment);
    }
    crate::os::check_process_ranks()?;
    stopped_timeout_from_environment()?;
    cores_from_environment()?;
    let wanted = settings.backend.map_or_else(|| environment.backend(), |backend| Ok(Some(backend)))?;
    // On one host its ranks meet there, unless UCX was asked for.
    let is_in_store = !launcher.is_one_host() && !launcher.meets_over_mpi(environment);
    let store = match is_in_store || wanted == Some(BackendKind::Ucx) {
        true => environment.rendezvous(&place)?,
        false => None,
    };
    let made = meet(&place, store.as_ref(), wanted, settings, timeout)?;
    launcher::joined(None);
    Ok(made)
}

/// Waits until a communicator of the job grows, and meets its ranks.
fn meet(
    place: &Place,
    store: Option<&Rendezvous>,
    wanted: Option<BackendKind>,
    settings: &Settings,
    timeout: Duration,
) -> Result<NewComm> {
    let deadline = after(Instant::now(), timeout);
    let left = || deadline.saturating_duration_since(Instant::now());
    loop {
        if let Some(joined) = rendezvous::enter(place, left())? {
            let (rank, members) = (joined.rank, (0..joined.world_size).collect());
            let (world, channel) = (joined.world, joined.channel);
            let host = HostComm::new(Endpoint::attach(world, channel, rank, members, settings.timeout));
            let backend = backend_of_members(&String::from_utf8_lossy(&joined.payloads[0]), wanted)?;
            return grown(backend, rank, joined.number, host, settings);
        }
        if let Some(met) = store.map(|store| enter(store, left())).transpose()?.flatten() {
            let (number, rank) = (met.number, met.rank);
            let backend = backend_of_members(&met.backend, wanted)?;
            if backend == BackendKind::Ucx {
                let comm = grown_on_hosts(met, place.clone(), left(), settings)?;
                crate::os::log::info!(backend = backend.name(), rank, "joined a communicator");
                return Ok(NewComm::new(comm, grown_name(number)));
            }
            let host = HostComm::grown(met, left())?;
            host.set_timeout(settings.timeout);
            return grown(backend, rank, number, host, settings);
        }
        if Instant::now() >= deadline {
            return Err(Error::bootstrap(
                format!("for {timeout:.1?} no communicator of this job has asked for joiners"),
                "the others call grow or rebuild; see that this process has the variables of their job, on the same host if they are on \
                 one, and is of the same user (PHALANX_JOB, PHALANX_TOKEN, and after a restart those of the new attempt)",
            ));
        }
        std::thread::sleep(if store.is_some() { FAR } else { NEAR });
    }
}

/// The communicator over a grown channel of host memory.
fn grown(
    backend: BackendKind,
    rank: usize,
    number: u64,
    host: HostComm,
    settings: &Settings,
) -> Result<NewComm> {
    crate::os::log::info!(backend = backend.name(), rank, "joined a communicator");
    let name = grown_name(number);
    match backend {
        BackendKind::Nccl | BackendKind::Rccl => on_gpu(backend, host, name, settings),
        _ => Ok(NewComm::new(Arc::new(host), name)),
    }
}

/// The backend of a communicator that grows, from what its members say, if this process may use it.
fn backend_of_members(name: &str, wanted: Option<BackendKind>) -> Result<BackendKind> {
    let kinds = [BackendKind::Host, BackendKind::Ucx, BackendKind::Nccl, BackendKind::Rccl];
    let Some(backend) = kinds.into_iter().find(|kind| kind.name() == name) else {
        return Err(Error::bootstrap(
            format!("the communicator's members do not say what carries its data, but {name:?}"),
            "use one version of phalanx in all processes of the job",
        ));
    };
    match wanted.filter(|wanted| *wanted != backend) {
        None => Ok(backend),
        Some(wanted) => Err(Error::from(UnsupportedError {
            what: format!("joining on the backend {wanted}"),
            why: format!("the communicator that grows is on {backend}; it can be host, ucx, nccl or rccl"),
            remedy: "unset PHALANX_BACKEND, or set it to that of the others".into(),
        })),
    }
}
