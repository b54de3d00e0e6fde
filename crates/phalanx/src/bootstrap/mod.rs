//! Who am I, who are the others: from the launcher's variables to a communicator.

mod environment;
mod hosts;
mod meeting;
mod rendezvous;
pub mod store;

#[cfg(feature = "cuda")]
pub(crate) use environment::check_from_environment;
pub(crate) use environment::{stopped_timeout_from_environment, timeout_from_environment};
pub use hosts::HostTopology;

use crate::backend::host::{HostComm, MAX_RANKS, NewChannel, World};
#[cfg(feature = "cuda")]
use crate::backend::nccl::{NcclComm, NcclSettings};
use crate::backend::solo::SoloComm;
use crate::backend::{Backend, BackendKind};
use crate::comm::{Comm, Settings};
use crate::error::{Error, Result, UsageError};
use environment::{Environment, Place};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What [`Comm`] answers to the environment of this process.
pub(crate) fn init(settings: Settings) -> Result<Comm> {
    init_from(&Environment::current(), settings)
}

fn init_from(environment: &Environment, settings: Settings) -> Result<Comm> {
    let place = environment.place()?;
    let world_size = place.as_ref().map_or(1, |place| place.world_size);
    check_world_size(world_size)?;
    let launcher = place.as_ref().map_or("none", |place| place.launcher);
    let backend = choose(environment, &settings, world_size, launcher)?;
    let timeout = settings.timeout;
    let name = place.as_ref().map_or_else(own_name, |place| place.job.clone());
    let host = || match &place {
        Some(place) if world_size > 1 => {
            if !place.one_host {
                // The launcher's nodes may be parts of one host.
                let store = meeting::open_store(environment, place, timeout)?;
                hosts::exchange(&store, timeout)?.check_one_host()?;
            }
            join(place, timeout)
        }
        _ => Ok(thread_ranks(1, timeout)?.remove(0)),
    };
    match backend {
        BackendKind::Solo => Ok(Comm::new(Arc::new(SoloComm::new(timeout)), own_name())),
        BackendKind::Host => Ok(Comm::new(Arc::new(host()?), name)),
        BackendKind::Nccl => on_gpu(host()?, name, &settings),
    }
}

/// Which backend carries the communicator: what the program or `PHALANX_BACKEND` says; else NCCL if each rank
/// has a GPU, solo for one rank, the host for several. Logged with the reason.
fn choose(
    environment: &Environment,
    settings: &Settings,
    world_size: usize,
    launcher: &str,
) -> Result<BackendKind> {
    let forced = match settings.backend {
        Some(backend) => Some((backend, "Builder::backend")),
        None => environment.backend()?.map(|backend| (backend, "PHALANX_BACKEND")),
    };
    let (backend, reason) = match forced {
        Some((BackendKind::Solo, name)) if world_size > 1 => {
            let expected = format!("another, since there are {world_size} ranks");
            return Err(UsageError::Setting { name: name.into(), value: "solo".into(), expected }.into());
        }
        Some((backend, name)) => (backend, name.to_owned()),
        None => match gpus_for(world_size) {
            Ok(()) => (BackendKind::Nccl, "each rank has a GPU".to_owned()),
            Err(why) if world_size == 1 => (BackendKind::Solo, format!("one rank, without GPU: {why}")),
            Err(why) => (BackendKind::Host, format!("several ranks, without GPUs: {why}")),
        },
    };
    tracing::info!(backend = backend.name(), world_size, reason, launcher, "communicator");
    if backend == BackendKind::Nccl {
        gpus_for(world_size)?;
    }
    Ok(backend)
}

#[cfg(feature = "cuda")]
fn gpus_for(ranks: usize) -> Result<()> {
    crate::backend::nccl::available(ranks)
}

#[cfg(not(feature = "cuda"))]
fn gpus_for(_ranks: usize) -> Result<()> {
    Err(Error::Unsupported {
        what: "NCCL".into(),
        why: "phalanx was built without its feature `cuda`".into(),
        remedy: "build it with the feature".into(),
    })
}

/// The communicator on GPUs of the ranks of a host communicator. Collective.
#[cfg(feature = "cuda")]
fn on_gpu(host: HostComm, name: String, settings: &Settings) -> Result<Comm> {
    let gpu = settings.gpu.unwrap_or(host.rank());
    let nccl = NcclComm::join(host, gpu, settings.nccl.clone())?;
    Ok(Comm::new(Arc::new(nccl), name))
}

#[cfg(not(feature = "cuda"))]
fn on_gpu(host: HostComm, _name: String, _settings: &Settings) -> Result<Comm> {
    gpus_for(host.world_size())?;
    unreachable!("the error above")
}

fn check_world_size(world_size: usize) -> Result<()> {
    if (1..=MAX_RANKS).contains(&world_size) {
        Ok(())
    } else {
        Err(UsageError::WorldSize { world_size, limit: MAX_RANKS }.into())
    }
}

/// Meets the other processes of this host and takes this rank's place in their region.
fn join(place: &Place, timeout: Duration) -> Result<HostComm> {
    if !crate::os::PROCESS_RANKS {
        // The typed error of this platform.
        crate::os::SharedFile::create()?;
    }
    let met = rendezvous::meet(place, timeout)?;
    let members = (0..place.world_size).collect();
    Ok(HostComm::attach(met.world, met.channel, place.rank, members, timeout))
}

/// A name for a communicator that lives in this process alone.
fn own_name() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("{}.{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Ranks as threads: see [`run`](crate::run).
pub(crate) fn run_threads<R: Send>(
    ranks: usize,
    settings: &Settings,
    f: impl Fn(Comm) -> R + Sync,
) -> Result<Vec<R>> {
    check_world_size(ranks)?;
    let backend = choose(&Environment::current(), settings, ranks, "threads")?;
    if backend == BackendKind::Solo {
        return Ok(vec![f(Comm::new(Arc::new(SoloComm::new(settings.timeout)), own_name()))]);
    }
    let hosts = thread_ranks(ranks, settings.timeout)?;
    let name = own_name();
    let body = |host| {
        let comm = match backend {
            BackendKind::Nccl => on_gpu(host, name.clone(), settings)?,
            _ => Comm::new(Arc::new(host), name.clone()),
        };
        Ok(f(comm))
    };
    let body = &body;
    std::thread::scope(|scope| {
        let mut threads = Vec::with_capacity(ranks);
        for host in hosts {
            let name = format!("rank {}", host.rank());
            let thread = std::thread::Builder::new().name(name).spawn_scoped(scope, move || body(host));
            // On an error the communicators of the ranks that were not started are dropped, and those that
            // were are told that these have left.
            threads.push(thread.map_err(|e| {
                let remedy = format!("{ranks} threads are needed: raise `ulimit -u` or use fewer ranks");
                Error::system("starting a thread", e, remedy)
            })?);
        }
        let ended: Vec<_> = threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        let results = ended.into_iter().map(|result| result.unwrap_or_else(|p| std::panic::resume_unwind(p)));
        results.collect()
    })
}

/// Communicators for one thread that drives several GPUs. Set-up needs all ranks at once: a thread for each.
#[cfg(feature = "cuda")]
pub(crate) fn gpu_ranks(gpus: &[usize], timeout: Duration, settings: Arc<NcclSettings>) -> Result<Vec<Comm>> {
    check_world_size(gpus.len())?;
    gpus_for(1)?;
    let hosts = thread_ranks(gpus.len(), timeout)?;
    std::thread::scope(|scope| {
        let join = |(host, gpu): (HostComm, &usize)| {
            let (gpu, settings) = (*gpu, settings.clone());
            scope.spawn(move || NcclComm::join(host, gpu, settings))
        };
        let threads: Vec<_> = hosts.into_iter().zip(gpus).map(join).collect();
        let joined = threads.into_iter().map(|thread| thread.join().expect("set-up does not panic"));
        let name = own_name();
        joined.map(|nccl| Ok(Comm::new(Arc::new(nccl?), name.clone()))).collect()
    })
}

/// The host communicators of ranks that are threads of this process.
fn thread_ranks(ranks: usize, timeout: Duration) -> Result<Vec<HostComm>> {
    let world = Arc::new(World::threads());
    let channel = NewChannel::create(&world, ranks)?;
    (0..ranks)
        .map(|rank| {
            let opened = NewChannel::open(&world, channel.id())?;
            let members = (0..ranks).collect();
            Ok(HostComm::attach(world.clone(), opened, rank, members, timeout))
        })
        .collect()
}
