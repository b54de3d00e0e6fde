//! Who am I, who are the others: from the launcher's variables to a communicator.

mod environment;
mod rendezvous;

pub(crate) use environment::{stopped_timeout_from_environment, timeout_from_environment};

use crate::backend::BackendKind;
use crate::backend::host::{HostComm, MAX_RANKS, NewChannel, World};
use crate::backend::solo::SoloComm;
use crate::comm::Comm;
use crate::error::{Error, Result, UsageError};
use environment::{Environment, Place};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What [`Comm`] answers to the environment of this process.
pub(crate) fn init(timeout: Duration) -> Result<Comm> {
    init_from(&Environment::current(), timeout)
}

fn init_from(environment: &Environment, timeout: Duration) -> Result<Comm> {
    let forced = environment.backend()?;
    let place = environment.place()?;
    let world_size = place.as_ref().map_or(1, |place| place.world_size);
    check_world_size(world_size)?;
    let backend = match forced {
        Some(BackendKind::Solo) if world_size > 1 => {
            return Err(UsageError::Setting {
                name: "PHALANX_BACKEND".into(),
                value: "solo".into(),
                expected: format!("host, since there are {world_size} ranks"),
            }
            .into());
        }
        Some(forced) => forced,
        None if world_size == 1 => BackendKind::Solo,
        None => BackendKind::Host,
    };
    tracing::info!(
        backend = backend.name(),
        world_size,
        reason = if forced.is_some() { "PHALANX_BACKEND" } else { "the number of ranks" },
        launcher = place.as_ref().map_or("none", |place| place.launcher),
        "communicator"
    );
    match (backend, place) {
        (BackendKind::Solo, _) => Ok(Comm::new(Arc::new(SoloComm::new(timeout)), own_name())),
        (BackendKind::Host, Some(place)) if world_size > 1 => join(&place, timeout),
        (BackendKind::Host, _) => {
            let world = Arc::new(World::threads());
            let channel = NewChannel::create(&world, 1)?;
            Ok(Comm::new(Arc::new(HostComm::attach(world, channel, 0, vec![0], timeout)), own_name()))
        }
    }
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
    // Said before anybody is kept waiting.
    stopped_timeout_from_environment()?;
    let met = rendezvous::meet(place, timeout)?;
    let members = (0..place.world_size).collect();
    let host = HostComm::attach(met.world, met.channel, place.rank, members, timeout);
    Ok(Comm::new(Arc::new(host), place.job.clone()))
}

/// A name for a communicator that lives in this process alone.
fn own_name() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("{}.{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
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
        return Ok(vec![Comm::new(Arc::new(SoloComm::new(timeout)), own_name())]);
    }
    let world = Arc::new(World::threads());
    let channel = NewChannel::create(&world, ranks)?;
    let name = own_name();
    (0..ranks)
        .map(|rank| {
            let opened = NewChannel::open(&world, channel.id())?;
            let members = (0..ranks).collect();
            let host = HostComm::attach(world.clone(), opened, rank, members, timeout);
            Ok(Comm::new(Arc::new(host), name.clone()))
        })
        .collect()
}
