//! Communicators of processes: `init` finds the other ranks on this host, in a store or over MPI, and starts
//! the backend that they agree on; `join` enters a communicator that grows.

use super::choose::Choice;
use super::gpus::{on_gpu, visible_gpus};
use super::hosts::on_hosts;
use super::mpi::{join_mpi, over_mpi};
use super::threads::thread_ranks;
use super::{NewComm, Settings, agreement, check_host_ranks, own_name};
use crate::backend::host::HostComm;
use crate::backend::solo::SoloComm;
use crate::contract::hosts::HostTopology;
use crate::contract::{BackendKind, grown_name};
use crate::control::endpoint::Endpoint;
use crate::control::join as rendezvous;
use crate::rendezvous::environment::{
    Environment, Launcher, Place, cores_from_environment, stopped_timeout_from_environment,
};
use crate::types::error::{Error, Result, UnsupportedError};
use crate::watch::deadline::after;
use crate::watch::launcher;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Set by `phalanx launch --restarts` for a process that replaces a failed rank.
const REPLACES: &str = "PHALANX_REPLACES";

/// Creates the communicator that this process's environment describes.
pub(crate) fn init(settings: Settings) -> Result<NewComm> {
    let choice = Choice::from(&settings.environment, settings.backend)?;
    let is_launched = choice.launcher.as_ref().is_some_and(is_phalanx_launch);
    if is_launched && settings.environment.get(REPLACES).is_some() {
        return replace(&settings);
    }
    if is_launched {
        tell_launcher(&settings.environment);
    }
    let made = make(&choice, settings);
    if is_launched {
        match &made {
            Ok(new) => launcher::joined(Some(&new.name)),
            Err(error) => launcher::not_joined(error),
        }
    }
    made
}

fn is_phalanx_launch(launcher: &Launcher) -> bool {
    launcher.name == "phalanx launch"
}

/// Connects to `phalanx launch`, which is told how this rank fares.
fn tell_launcher(environment: &Environment) {
    let (name, job) = (environment.get(launcher::LAUNCHER), environment.get("PHALANX_JOB"));
    let rank = environment.number("PHALANX_RANK").ok().flatten();
    if let (Some(name), Some(job), Some(rank)) = (name, job, rank) {
        launcher::connect(name, job, rank);
    }
}

/// [`init`] in the place of a rank that has failed: joins the survivors when they [`rebuild`](crate::Comm::rebuild). A meeting
/// that fails because another rank was lost in it is followed by the next.
fn replace(settings: &Settings) -> Result<NewComm> {
    let deadline = after(Instant::now(), settings.timeout);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match join_grown(settings, left) {
            Err(error @ Error::Bootstrap(_)) if Instant::now() < deadline => {
                crate::os::log::info!("the survivors meet again: {error}");
                std::thread::sleep(BETWEEN_MEETINGS);
            }
            outcome => return outcome,
        }
    }
}

/// Pause of a newcomer between a meeting that failed and the next.
const BETWEEN_MEETINGS: Duration = Duration::from_millis(20);

fn make(choice: &Choice, mut settings: Settings) -> Result<NewComm> {
    // Closed at the end of this, if what is made needs no port.
    let listener = settings.listener.take();
    let environment = &settings.environment;
    let launcher = choice.launcher.as_ref();
    crate::os::log::info!(
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
        BackendKind::Ucx => match launcher {
            Some(launcher) => on_hosts(launcher, environment, &settings, listener),
            None => Err(UnsupportedError {
                what: "the backend ucx for a process that nothing has started as a rank".into(),
                why: "its ranks meet at their job's store".into(),
                remedy: "start the program with `phalanx launch`".into(),
            }
            .into()),
        },
        BackendKind::Solo => Ok(NewComm::new(Arc::new(SoloComm::new(settings.timeout)), own_name())),
        BackendKind::Mpi => join_mpi(launcher, environment, &settings),
        backend => match launcher.filter(|launcher| launcher.world_size != Some(1)) {
            None => of_host(backend, thread_ranks(1, settings.timeout)?.remove(0), own_name(), &settings),
            Some(launcher) => on_one_host(None, launcher, environment, &settings),
        },
    }
}

/// Creates the communicator of processes that share a host's memory. They agree on a backend during the join,
/// unless `agreed` is given.
pub(super) fn on_one_host(
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
    let (host, payloads) = meet(&place, &payload, settings.timeout)?;
    let backend = match agreed {
        Some(backend) => backend,
        None => {
            let topology = HostTopology::one_host(place.world_size);
            let otherwise = if launcher.starts_mpi() { BackendKind::Mpi } else { BackendKind::Host };
            let backend = agreement::agree(&agreement::decode(&payloads)?, &topology, otherwise)?;
            crate::os::log::info!(backend = backend.name(), "the ranks have agreed");
            backend
        }
    };
    if backend == BackendKind::Mpi {
        drop(host);
        return join_mpi(Some(launcher), environment, settings);
    }
    if backend == BackendKind::Ucx {
        drop(host);
        return on_hosts(launcher, environment, settings, None);
    }
    of_host(backend, host, place.job, settings)
}

/// This rank's introduction.
pub(super) fn introduction(
    environment: &Environment,
    settings: &Settings,
) -> Result<agreement::Introduction> {
    let wanted = settings.backend.map_or_else(|| environment.backend(), |backend| Ok(Some(backend)))?;
    Ok(agreement::Introduction::own(
        wanted,
        settings.gpu,
        [settings.check, settings.reproducible],
        visible_gpus,
    ))
}

/// Creates the host communicator of ranks that have joined one region.
fn of_host(backend: BackendKind, host: HostComm, name: String, settings: &Settings) -> Result<NewComm> {
    match backend {
        BackendKind::Nccl | BackendKind::Rccl | BackendKind::Nvshmem => on_gpu(backend, host, name, settings),
        _ => Ok(NewComm::new(Arc::new(host), name)),
    }
}

/// Joins the other processes of this host in their region. Also exchanges a payload: returns those of all
/// ranks.
pub(super) fn meet(place: &Place, payload: &[u8], timeout: Duration) -> Result<(HostComm, Vec<Vec<u8>>)> {
    check_host_ranks(place.world_size)?;
    crate::os::check_process_ranks()?;
    // Report errors before other ranks have to wait.
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
pub(crate) fn join(settings: &Settings) -> Result<NewComm> {
    join_grown(settings, settings.timeout)
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
    let joined = rendezvous::join(&place, timeout)?;
    let (rank, members) = (joined.rank, (0..joined.world_size).collect());
    let host = HostComm::new(Endpoint::attach(joined.world, joined.channel, rank, members, settings.timeout));
    let backend = backend_of_members(&joined.payloads[0], environment, settings)?;
    crate::os::log::info!(backend = backend.name(), rank, "joined a communicator");
    let name = grown_name(joined.number);
    let made = match backend {
        BackendKind::Nccl | BackendKind::Rccl => on_gpu(backend, host, name, settings),
        _ => Ok(NewComm::new(Arc::new(host), name)),
    }?;
    launcher::joined(None);
    Ok(made)
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
