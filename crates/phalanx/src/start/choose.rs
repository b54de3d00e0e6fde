//! Chooses the backend of this process: what the user asks for, else what its GPUs and its launcher allow.

use super::gpus::gpus_for;
use crate::contract::BackendKind;
use crate::rendezvous::environment::{
    Environment, Launcher, check_from_environment, cores_from_environment, reproducible_from_environment,
    stopped_timeout_from_environment, timeout_from_environment,
};
use crate::rendezvous::store;
use crate::types::error::{Result, UsageError};

/// The backend and launcher that [`init`](crate::init) would use, and why: see [`choose`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Choice {
    /// The backend.
    pub backend: BackendKind,
    /// Why this backend.
    pub reason: String,
    /// The launcher that started this process.
    pub launcher: Option<Launcher>,
}

/// Reports which launcher and backend [`init`](crate::init) would use in this process, without waiting for
/// other ranks. For diagnosis.
///
/// Launchers: `phalanx launch`, torchrun, Open MPI, Cray PALS, Intel MPI, MPICH and others with PMI, PMIx, Slurm steps. Of
/// launchers inside launchers the innermost counts. A [`place`](crate::Builder::place) set by the program comes before all.
///
/// Backends, in order of precedence:
/// 1. the one set by `PHALANX_BACKEND`;
/// 2. NCCL, if each rank of this host has a GPU. The driver and NCCL are loaded to find out. Ranks on other
///    hosts, and ranks that see other GPUs and were not started by MPI, are asked at the start;
/// 3. RCCL, if the same holds for AMD's GPUs (by HIP and RCCL);
/// 4. solo, for one rank;
/// 5. MPI, for ranks that an MPI launcher started;
/// 6. host memory; over UCX, if the ranks turn out to be on several hosts.
///
/// # Errors
/// [`UsageError::Setting`] names a variable that makes no sense, or that is missing;
/// [`Error::Bootstrap`](crate::Error::Bootstrap): ranks of several hosts have no token by which they know
/// each other; or two launchers' variables contradict each other, and the innermost cannot be seen (`PHALANX_LAUNCHED_BY` decides).
pub fn choose() -> Result<Choice> {
    let environment = Environment::current();
    let choice = Choice::from(&environment, None)?;
    choice.check_rendezvous(&environment)?;
    check_settings(&environment)?;
    Ok(choice)
}

/// Checks the other settings of `init`.
fn check_settings(environment: &Environment) -> Result<()> {
    timeout_from_environment()?;
    stopped_timeout_from_environment()?;
    cores_from_environment()?;
    check_from_environment()?;
    reproducible_from_environment()?;
    store::server::silence_from(environment.get("PHALANX_HEARTBEAT_TIMEOUT"))?;
    environment.encrypted()?;
    crate::watch::check_settings()
}

impl Choice {
    pub(super) fn from(environment: &Environment, wanted: Option<BackendKind>) -> Result<Choice> {
        let launcher = environment.launcher()?;
        let world_size = launcher.as_ref().map_or(Some(1), |launcher| launcher.world_size);
        let is_mpi = launcher.as_ref().is_some_and(Launcher::starts_mpi);
        let may_be_elsewhere =
            |launcher: &&Launcher| !launcher.is_one_host() || launcher.world_size.is_none();
        let elsewhere = launcher.as_ref().filter(may_be_elsewhere);
        let ranks = Ranks {
            all: world_size,
            here: elsewhere.map_or(world_size, |launcher| launcher.local_world_size).unwrap_or(1),
            may_be_elsewhere: elsewhere.is_some(),
            are_of_mpi: is_mpi,
            are_threads: false,
        };
        let (backend, reason) = decide(environment, wanted, &ranks)?;
        Ok(Choice { backend, reason, launcher })
    }

    /// Checks that all settings are there that the ranks need to find each other.
    fn check_rendezvous(&self, environment: &Environment) -> Result<()> {
        let without_us = matches!(self.backend, BackendKind::Solo | BackendKind::Mpi);
        let launcher = self.launcher.as_ref().filter(|launcher| {
            let is_alone = launcher.world_size == Some(1) && launcher.is_one_host();
            !(without_us || is_alone || launcher.meets_over_mpi(environment))
        });
        let Some(launcher) = launcher else { return Ok(()) };
        let place = launcher.place(environment)?;
        if place.one_host { Ok(()) } else { environment.rendezvous(&place).map(drop) }
    }
}

/// Parses the launcher's variables: the rank, and the number of ranks (`None`: only MPI knows it). For the
/// fuzzer.
pub fn launched(variables: &[(&str, &str)]) -> Result<Option<(usize, Option<usize>)>> {
    let environment = Environment::of(variables);
    environment.backend()?;
    let Some(launcher) = environment.launcher()? else { return Ok(None) };
    if launcher.world_size.is_some() {
        let place = launcher.place(&environment)?;
        environment.rendezvous(&place)?;
    }
    Ok(Some((launcher.rank, launcher.world_size)))
}

/// The ranks of a new communicator, as far as a process knows before it meets the others.
pub(super) struct Ranks {
    /// The number of ranks; `None` if only MPI knows it.
    all: Option<usize>,
    /// The number of ranks on this host.
    here: usize,
    /// Whether some ranks may be on other hosts: then the backend is agreed when they meet.
    may_be_elsewhere: bool,
    are_of_mpi: bool,
    /// Whether the ranks are threads of this process.
    are_threads: bool,
}

impl Ranks {
    /// This many threads of this process.
    pub(super) fn threads(ranks: usize) -> Ranks {
        Ranks { all: Some(ranks), here: ranks, may_be_elsewhere: false, are_of_mpi: false, are_threads: true }
    }
}

/// Chooses the backend of a communicator, with the reason.
pub(super) fn decide(
    environment: &Environment,
    wanted: Option<BackendKind>,
    ranks: &Ranks,
) -> Result<(BackendKind, String)> {
    let forced = match wanted {
        Some(backend) => Some((backend, "Builder::backend")),
        None => environment.backend()?.map(|backend| (backend, "PHALANX_BACKEND")),
    };
    let gpus = |backend: BackendKind| gpus_for(backend, ranks.here);
    let (nccl, rccl, nvshmem) = (BackendKind::Nccl, BackendKind::Rccl, BackendKind::Nvshmem);
    match forced {
        Some((BackendKind::Solo, name)) if ranks.all != Some(1) => {
            let expected = "another, since there are more ranks than this one".into();
            Err(UsageError::Setting { name: name.into(), value: "solo".into(), expected }.into())
        }
        Some((BackendKind::DryRun, name)) => {
            let expected = "a backend whose ranks exist; a dry run is phalanx::dry_run".into();
            Err(UsageError::Setting { name: name.into(), value: "dry_run".into(), expected }.into())
        }
        // Processes exchange the GPUs that they see when they meet.
        Some((backend, name))
            if [nccl, rccl, nvshmem].contains(&backend) && (ranks.are_threads || ranks.all == Some(1)) =>
        {
            gpus(backend).map(|()| (backend, format!("{name} asks for it")))
        }
        Some((backend, name)) => Ok((backend, format!("{name} asks for it"))),
        None => Ok(match gpus(nccl) {
            Ok(()) if ranks.may_be_elsewhere => {
                let over_mpi = ranks.are_of_mpi && environment.get("PHALANX_STORE").is_none();
                let way = if over_mpi { ", over MPI" } else { "" };
                (
                    nccl,
                    format!("each rank of this host has a GPU; the other hosts are asked at the start{way}"),
                )
            }
            Ok(()) => (nccl, "each rank has a GPU".to_owned()),
            Err(_) if gpus(rccl).is_ok() => (rccl, "each rank has an AMD GPU".to_owned()),
            Err(_) if ranks.all == Some(1) => (BackendKind::Solo, "there is one rank".to_owned()),
            Err(_) if ranks.are_of_mpi => {
                (BackendKind::Mpi, "an MPI launcher started the ranks, and not each has a GPU".to_owned())
            }
            Err(why) if !ranks.are_threads && gpus_for(nccl, 1).is_ok() => (
                BackendKind::Host,
                format!(
                    "several ranks, and {why}; NCCL if the others see other GPUs, which they are asked at the start"
                ),
            ),
            Err(why) => (
                BackendKind::Host,
                format!("several ranks without GPUs, not started as those of MPI ({why})"),
            ),
        }),
    }
}
