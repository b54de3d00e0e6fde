//! Communicators of threads: `run` starts a thread for each rank; one thread can also drive several GPUs.

use super::choose::{Ranks, decide};
use super::gpus::on_gpu;
use super::{NewComm, Settings, check_world_size, own_name};
use crate::backend::host::HostComm;
#[cfg(feature = "_nccl")]
use crate::backend::nccl::{NcclComm, NcclSettings};
use crate::backend::solo::SoloComm;
use crate::contract::{Backend, BackendKind};
use crate::control::endpoint::{Endpoint, NewChannel};
use crate::control::world::World;
#[cfg(feature = "_nccl")]
use crate::rendezvous::environment::{check_from_environment, timeout_from_environment};
use crate::types::error::{Error, Result, UnsupportedError};
#[cfg(feature = "_nccl")]
use phalanx_sys::nccl::Flavour;
use std::sync::Arc;
use std::time::Duration;

/// Ranks as threads: see [`run`](crate::run).
pub(crate) fn run_threads<R: Send>(
    ranks: usize,
    settings: &Settings,
    f: impl Fn(NewComm) -> R + Sync,
) -> Result<Vec<R>> {
    check_world_size(ranks)?;
    let (backend, reason) = decide(&settings.environment, settings.backend, &Ranks::threads(ranks))?;
    crate::os::log::info!(backend = backend.name(), reason, ranks, "communicator of threads");
    if backend == BackendKind::Solo {
        return Ok(vec![f(NewComm::new(Arc::new(SoloComm::new(settings.timeout)), own_name()))]);
    }
    let hosts = thread_ranks(ranks, settings.timeout)?;
    let name = own_name();
    let body = |host: HostComm| {
        let comm = match backend {
            BackendKind::Nccl | BackendKind::Rccl => on_gpu(backend, host, name.clone(), settings)?,
            BackendKind::Mpi | BackendKind::Nvshmem => {
                return Err(Error::from(UnsupportedError {
                    what: format!("the backend {backend} for threads"),
                    why: "its ranks are processes".into(),
                    remedy: "start the program with mpirun or `phalanx launch` and use phalanx::init()"
                        .into(),
                }));
            }
            _ => NewComm::new(Arc::new(host), name.clone()),
        };
        Ok(f(comm))
    };
    let body = &body;
    std::thread::scope(|scope| {
        let mut threads = Vec::with_capacity(ranks);
        for host in hosts {
            let name = format!("rank {}", host.rank());
            let thread = std::thread::Builder::new().name(name).spawn_scoped(scope, move || body(host));
            // On an error the communicators of unstarted ranks are dropped: the started ranks see them leave.
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

/// Creates communicators for one thread that drives several GPUs. The set-up is collective, so it takes a
/// thread for each.
#[cfg(feature = "_nccl")]
pub(crate) fn gpu_ranks(gpus: &[usize], flavour: Flavour) -> Result<Vec<NewComm>> {
    check_world_size(gpus.len())?;
    crate::backend::nccl::available(flavour, 1)?;
    let settings = NcclSettings::driven_here(check_from_environment()?);
    let hosts = thread_ranks(gpus.len(), timeout_from_environment()?)?;
    std::thread::scope(|scope| {
        let join = |(host, gpu): (HostComm, &usize)| {
            let (gpu, settings) = (*gpu, settings.clone());
            scope.spawn(move || NcclComm::join(Box::new(host), flavour, Some(gpu), settings))
        };
        let threads: Vec<_> = hosts.into_iter().zip(gpus).map(join).collect();
        let joined = threads.into_iter().map(|thread| thread.join().expect("set-up does not panic"));
        let name = own_name();
        joined.map(|nccl| Ok(NewComm::new(Arc::new(nccl?), name.clone()))).collect()
    })
}

/// Creates the host communicators of ranks that are threads of this process.
pub(super) fn thread_ranks(ranks: usize, timeout: Duration) -> Result<Vec<HostComm>> {
    let world = Arc::new(World::threads()?);
    let channel = NewChannel::create(&world, ranks)?;
    (0..ranks)
        .map(|rank| {
            let opened = NewChannel::open(&world, channel.id())?;
            let members = (0..ranks).collect();
            Ok(HostComm::new(Endpoint::attach(world.clone(), opened, rank, members, timeout)))
        })
        .collect()
}
