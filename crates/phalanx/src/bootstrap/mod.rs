//! Who am I, who are the others: from the launcher's variables to a communicator.

mod environment;
mod rendezvous;

pub use environment::Launcher;
pub(crate) use environment::timeout_from_environment;

use crate::backend::BackendKind;
use crate::backend::host::{HostComm, MAX_RANKS, NewChannel, World};
use crate::backend::solo::SoloComm;
use crate::comm::Comm;
use crate::error::{Error, Result, UsageError};
use environment::{Environment, Place};
use std::sync::Arc;
use std::time::Duration;

/// What [`init`](crate::init) does, and why: see [`choose`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Choice {
    /// What would carry the data.
    pub backend: BackendKind,
    /// Why this backend.
    pub reason: &'static str,
    /// The launcher that started this process.
    pub launcher: Option<Launcher>,
}

/// What [`init`](crate::init) would do in this process, from the environment alone: no rank is waited for, and no
/// library is loaded. For diagnoses.
///
/// The launchers that are recognised, in the order in which they count: `phalanx launch`, torchrun, Open MPI, Cray
/// PALS, Intel MPI, MPICH and others with PMI, PMIx, Slurm steps. The backend: `PHALANX_BACKEND`; for one rank, none
/// is needed; MPI for ranks that an MPI launcher started; else the memory of the host.
///
/// # Errors
/// [`UsageError::Setting`] names a variable that makes no sense.
pub fn choose() -> Result<Choice> {
    Choice::from(&Environment::current())
}

impl Choice {
    fn from(environment: &Environment) -> Result<Choice> {
        let forced = environment.backend()?;
        let launcher = environment.launcher()?;
        let world_size = launcher.as_ref().map_or(Some(1), |launcher| launcher.world_size);
        let (backend, reason) = match forced {
            Some(BackendKind::Solo) if world_size != Some(1) => {
                let name = launcher.as_ref().map_or("nobody", |launcher| launcher.name);
                return Err(UsageError::Setting {
                    name: "PHALANX_BACKEND".into(),
                    value: "solo".into(),
                    expected: format!("host or mpi, since {name} started more ranks than this one"),
                }
                .into());
            }
            Some(forced) => (forced, "PHALANX_BACKEND asks for it"),
            None if world_size == Some(1) => (BackendKind::Solo, "there is one rank"),
            None if launcher.as_ref().is_some_and(Launcher::starts_mpi) => {
                (BackendKind::Mpi, "an MPI launcher started the ranks")
            }
            None => (BackendKind::Host, "the launcher started several ranks, and not as those of MPI"),
        };
        Ok(Choice { backend, reason, launcher })
    }
}

/// What [`Comm`] answers to the environment of this process.
pub(crate) fn init(timeout: Duration) -> Result<Comm> {
    let environment = Environment::current();
    let choice = Choice::from(&environment)?;
    tracing::info!(
        backend = choice.backend.name(),
        reason = choice.reason,
        launcher = choice.launcher.as_ref().map_or("none", |launcher| launcher.name),
        recognised_by = ?choice.launcher.as_ref().map(|launcher| launcher.recognised_by),
        ignored = ?choice.launcher.as_ref().map(|launcher| &launcher.ignored),
        "communicator"
    );
    match (choice.backend, choice.launcher) {
        (BackendKind::Solo, _) => Ok(Comm::new(Arc::new(SoloComm::new(timeout)))),
        (BackendKind::Mpi, launcher) => join_mpi(launcher.as_ref(), timeout),
        (BackendKind::Host, Some(launcher)) if launcher.world_size != Some(1) => {
            join(&launcher.place(&environment)?, timeout)
        }
        (BackendKind::Host, _) => {
            let world = Arc::new(World::threads());
            let channel = NewChannel::create(&world, 1)?;
            Ok(Comm::new(Arc::new(HostComm::attach(world, channel, 0, vec![0], timeout))))
        }
    }
}

#[cfg(all(unix, target_pointer_width = "64", target_endian = "little"))]
fn join_mpi(launcher: Option<&Launcher>, timeout: Duration) -> Result<Comm> {
    use crate::backend::mpi::{Launched, MpiComm};
    let launched = Launched {
        launcher: launcher.map_or("nobody", |launcher| launcher.name),
        rank: launcher.map_or(0, |launcher| launcher.rank),
        world_size: launcher.and_then(|launcher| launcher.world_size),
    };
    Ok(Comm::new(Arc::new(MpiComm::world(&launched, timeout)?)))
}

#[cfg(not(all(unix, target_pointer_width = "64", target_endian = "little")))]
fn join_mpi(_: Option<&Launcher>, _: Duration) -> Result<Comm> {
    Err(Error::Unsupported {
        what: "the backend mpi".into(),
        why: "it is written for 64-bit little-endian Unix".into(),
        remedy: "use the host backend, with `phalanx launch`".into(),
    })
}

fn check_world_size(world_size: usize) -> Result<()> {
    if (1..=MAX_RANKS).contains(&world_size) {
        Ok(())
    } else {
        Err(UsageError::WorldSize { world_size, limit: MAX_RANKS }.into())
    }
}

/// Meets the other processes of this host and takes this rank's place in their region.
fn join(place: &Place, timeout: Duration) -> Result<Comm> {
    if !crate::os::PROCESS_RANKS {
        // The typed error of this platform.
        crate::os::SharedFile::create()?;
    }
    let met = rendezvous::meet(place, timeout)?;
    let members = (0..place.world_size).collect();
    let host = HostComm::attach(met.world, met.channel, place.rank, members, timeout);
    Ok(Comm::new(Arc::new(host)))
}

/// Ranks as threads: see [`run`](crate::run).
pub(crate) fn run_threads<R: Send>(
    ranks: usize,
    timeout: Duration,
    f: impl Fn(Comm) -> R + Sync,
) -> Result<Vec<R>> {
    check_world_size(ranks)?;
    let comms = thread_comms(ranks, timeout)?;
    let f = &f;
    std::thread::scope(|scope| {
        let mut threads = Vec::with_capacity(ranks);
        for comm in comms {
            let name = format!("rank {}", comm.rank());
            let thread = std::thread::Builder::new().name(name).spawn_scoped(scope, move || f(comm));
            // On an error the communicators of the ranks that were not started are dropped, and those that
            // were are told that these have left.
            threads.push(thread.map_err(|e| {
                let remedy = format!("{ranks} threads are needed: raise `ulimit -u` or use fewer ranks");
                Error::system("starting a thread", e, remedy)
            })?);
        }
        let ended: Vec<_> = threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        let results = ended.into_iter().map(|result| result.unwrap_or_else(|p| std::panic::resume_unwind(p)));
        Ok(results.collect())
    })
}

fn thread_comms(ranks: usize, timeout: Duration) -> Result<Vec<Comm>> {
    if ranks == 1 {
        return Ok(vec![Comm::new(Arc::new(SoloComm::new(timeout)))]);
    }
    let world = Arc::new(World::threads());
    let channel = NewChannel::create(&world, ranks)?;
    (0..ranks)
        .map(|rank| {
            let opened = NewChannel::open(&world, channel.id())?;
            let members = (0..ranks).collect();
            let host = HostComm::attach(world.clone(), opened, rank, members, timeout);
            Ok(Comm::new(Arc::new(host)))
        })
        .collect()
}
