//! Communicators of processes: `init` finds the other ranks on this host, in a store or over MPI, and starts
//! the backend that they agree on.

use super::choose::Choice;
use super::gpus::{on_gpu, visible_gpus};
use super::hosts::on_hosts;
use super::join::{REPLACES, is_phalanx_launch, replace, tell_launcher};
use super::mpi::{join_mpi, over_mpi};
use super::threads::thread_ranks;
use super::{NewComm, Settings, agreement, check_host_ranks, own_name};
use crate::backend::host::HostComm;
use crate::backend::solo::SoloComm;
use crate::contract::BackendKind;
use crate::contract::hosts::HostTopology;
use crate::control::endpoint::Endpoint;
use crate::control::join as rendezvous;
use crate::rendezvous::environment::{
    Environment, Launcher, Place, cores_from_environment, stopped_timeout_from_environment,
};
use crate::types::error::{Result, UnsupportedError};
use crate::watch::launcher;
use std::sync::Arc;
use std::time::Duration;

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
    meet_checked(place, payload, timeout, &|| Ok(()))
}

/// Joins the other processes of this host; ends with the error of `check` as soon as it has one.
pub(super) fn meet_while(
    place: &Place,
    timeout: Duration,
    check: &dyn Fn() -> Result<()>,
) -> Result<HostComm> {
    Ok(meet_checked(place, &[], timeout, check)?.0)
}

fn meet_checked(
    place: &Place,
    payload: &[u8],
    timeout: Duration,
    check: &dyn Fn() -> Result<()>,
) -> Result<(HostComm, Vec<Vec<u8>>)> {
    check_host_ranks(place.world_size)?;
    crate::os::check_process_ranks()?;
    // Report errors before other ranks have to wait.
    stopped_timeout_from_environment()?;
    cores_from_environment()?;
    let joined = rendezvous::meet(place, payload, timeout, check)?;
    let members = (0..place.world_size).collect();
    Ok((
        HostComm::new(Endpoint::attach(joined.world, joined.channel, place.rank, members, timeout)),
        joined.payloads,
    ))
}
