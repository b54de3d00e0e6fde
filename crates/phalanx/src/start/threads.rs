//! Communicators of threads: `run` starts a thread for each rank; one thread can also drive several GPUs.

use super::choose::{Ranks, decide};
use super::gpus::on_gpu;
use super::{NewComm, Settings, check_host_ranks, own_name};
use crate::backend::host::HostComm;
#[cfg(feature = "_nccl")]
use crate::backend::nccl::{NcclComm, NcclSettings};
use crate::backend::solo::SoloComm;
use crate::contract::{Backend, BackendKind};
use crate::control::endpoint::{Endpoint, NewChannel};
use crate::control::world::World;
use crate::os::log;
#[cfg(feature = "_nccl")]
use crate::rendezvous::environment::{check_from_environment, timeout_from_environment};
use crate::types::error::{Error, Result, UnsupportedError};
use crate::watch;
#[cfg(feature = "_nccl")]
use phalanx_sys::nccl::Flavour;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// Ranks as threads: see [`run`](crate::run).
pub(crate) fn run_threads<R: Send>(
    ranks: usize,
    settings: &Settings,
    f: impl Fn(NewComm) -> R + Sync,
) -> Result<Vec<R>> {
    check_host_ranks(ranks)?;
    let (backend, reason) = decide(&settings.environment, settings.backend, &Ranks::threads(ranks))?;
    log::info!(backend = backend.name(), reason, ranks, "communicator of threads");
    if backend == BackendKind::Solo {
        return Ok(vec![f(NewComm::new(Arc::new(SoloComm::new(settings.timeout)), own_name()))]);
    }
    let hosts = thread_ranks(ranks, settings.timeout)?;
    let name = own_name();
    let body = |host: HostComm| {
        let comm = match backend {
            BackendKind::Nccl | BackendKind::Rccl => on_gpu(backend, host, name.clone(), settings)?,
            BackendKind::Mpi | BackendKind::Nvshmem | BackendKind::Ucx => {
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
    let (body, name) = (&body, &name);
    std::thread::scope(|scope| {
        let mut threads = Vec::with_capacity(ranks);
        let (returned, returns) = channel();
        for host in hosts {
            let (thread_name, returns) =
                (format!("rank {}", host.rank()), Returns(host.rank(), returned.clone()));
            let thread = std::thread::Builder::new().name(thread_name).spawn_scoped(scope, move || {
                let _returns = returns;
                body(host)
            });
            // On an error the communicators of unstarted ranks are dropped: the started ranks see them leave.
            threads.push(thread.map_err(|e| {
                let remedy = format!("{ranks} threads are needed: raise `ulimit -u` or use fewer ranks");
                Error::system("starting a thread", e, remedy)
            })?);
        }
        drop(returned);
        await_returns(&returns, ranks, settings.timeout, name, |line| log::say(format_args!("{line}")));
        let ended: Vec<_> = threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        let results = ended.into_iter().map(|result| result.unwrap_or_else(|p| std::panic::resume_unwind(p)));
        results.collect()
    })
}

/// Tells that a rank has returned, or has left by a panic.
struct Returns(usize, Sender<usize>);

impl Drop for Returns {
    fn drop(&mut self) {
        // Nobody listens after an error.
        let _ = self.1.send(self.0);
    }
}

/// Waits for all ranks. When some have returned and no other does within the deadline, it says which ones are waited for.
fn await_returns(
    returns: &Receiver<usize>,
    ranks: usize,
    timeout: Duration,
    name: &str,
    mut say: impl FnMut(String),
) {
    let mut running: BTreeSet<usize> = (0..ranks).collect();
    while !running.is_empty() {
        match returns.recv_timeout(timeout) {
            Ok(rank) => {
                running.remove(&rank);
            }
            Err(RecvTimeoutError::Timeout) if running.len() < ranks => {
                let last = |rank| {
                    watch::last_operation(name, rank).unwrap_or_else(|| "its communicator is gone".into())
                };
                let waited_for: Vec<_> =
                    running.iter().map(|&rank| format!("rank {rank} ({})", last(rank))).collect();
                say(format!(
                    "the other ranks of phalanx::run have returned {timeout:.1?} ago or earlier; waiting for {}",
                    waited_for.join(", ")
                ));
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Creates communicators for one thread that drives several GPUs. The set-up is collective, so it takes a
/// thread for each.
#[cfg(feature = "_nccl")]
pub(crate) fn gpu_ranks(gpus: &[usize], flavour: Flavour) -> Result<Vec<NewComm>> {
    check_host_ranks(gpus.len())?;
    crate::backend::nccl::available(flavour, 1)?;
    let settings = NcclSettings::driven_here(check_from_environment()?)?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BackendKind, Comm, ReduceOp};

    #[test]
    fn a_rank_that_does_not_return_is_named_with_what_it_did_last() {
        let ((returned, returns), mut said) = (channel(), Vec::new());
        let timeout = Duration::from_millis(20);
        returned.send(0).unwrap();
        returned.send(2).unwrap();
        await_returns(&returns, 3, timeout, "a job", |line| {
            said.push(line);
            returned.send(1).unwrap();
        });
        assert_eq!(said.len(), 1);
        assert!(said[0].contains("waiting for rank 1 (its communicator is gone)"), "{said:?}");
    }

    #[test]
    fn what_a_rank_did_last_is_known_by_its_communicators_name() {
        let ran = Comm::builder().backend(BackendKind::Host).run(2, |comm| {
            let name = comm.recorder.name().to_owned();
            let before = watch::last_operation(&name, comm.rank());
            comm.all_reduce_in_place(&mut [1f32; 4], ReduceOp::Sum).unwrap();
            [before, watch::last_operation(&name, comm.rank()), watch::last_operation(&name, 7)]
        });
        for [before, after, none] in ran.unwrap() {
            assert_eq!(before.unwrap(), "it has called nothing");
            assert_eq!(
                after.unwrap(),
                "it has completed all_reduce(f32 × 4), operation number 1, and called nothing since"
            );
            assert_eq!(none, None);
        }
    }
}
