//! [`UcxWorld`]: the worker that all communicators of this process share, and its end.

use super::serving::Serving;
use super::worker::Worker;
use crate::contract::hosts::HostTopology;
use crate::control::host_channel::HostChannel;
use crate::control::world::World;
use crate::os::random_number;
use crate::os::sync::lock;
use crate::rendezvous::environment::cores_from_environment;
use crate::rendezvous::store::Store;
use crate::types::error::{Error, Result, UnsupportedError};
use crate::watch::deadline::after;
use serde::{Deserialize, Serialize};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// What ranks tell each other through the store.
#[derive(Serialize, Deserialize)]
struct Introduction {
    /// Rank 0's is the world's.
    key: [u64; 2],
    /// Where its worker is, or why it has none.
    address: std::result::Result<Vec<u8>, String>,
}

/// The hosts of a world of which some have several ranks.
pub(crate) struct Here {
    pub topology: HostTopology,
    /// World ranks of this host.
    pub ranks: Vec<usize>,
    /// Their communicator on the host backend, from which others are made; `None` if there is one.
    pub channel: Option<Box<dyn HostChannel>>,
}

/// What the ranks of a host need to meet.
pub(crate) struct Meeting<'a> {
    pub topology: &'a HostTopology,
    pub rank: usize,
    /// Of a communicator that grows; empty at the job's start.
    pub name: &'a str,
    pub timeout: Duration,
    /// An error as soon as a rank is lost.
    pub check: &'a dyn Fn() -> Result<()>,
}

/// Lets the ranks of this host meet. It is made by `start/`, which knows the backend of shared memory.
pub(crate) type MeetHere = Arc<dyn Fn(&Meeting<'_>) -> Result<Option<Here>> + Send + Sync>;

/// UCX, and its connections to all ranks of the world.
pub(crate) struct UcxWorld {
    /// Taken at the end.
    worker: Arc<Mutex<Option<Worker>>>,
    /// Lets UCX work in epochs.
    serving: Arc<Serving>,
    pub(super) key: [u64; 2],
    /// Ranks of this host share cores.
    pub(super) is_crowded: bool,
    /// The hosts, if ranks share them.
    pub(super) here: Option<Here>,
    /// For the next meeting.
    pub(super) meet_here: MeetHere,
    /// Whether contributions are combined in rank order, and not for each host first.
    pub(super) reproducible: bool,
    fork: crate::os::ForkMark,
}

/// The worker, in use by this thread.
pub(super) struct Locked<'a>(MutexGuard<'a, Option<Worker>>);

impl std::ops::Deref for Locked<'_> {
    type Target = Worker;

    fn deref(&self) -> &Worker {
        self.0.as_ref().expect("there until the world is dropped")
    }
}

impl std::ops::DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Worker {
        self.0.as_mut().expect("there until the world is dropped")
    }
}

impl UcxWorld {
    /// Starts UCX and exchanges addresses over the store, then lets the ranks of this host meet under this name. The error of a rank is
    /// one of all.
    pub fn meet(
        store: &Store,
        topology: &HostTopology,
        (meet_here, name): (MeetHere, &str),
        reproducible: bool,
        timeout: Duration,
    ) -> Result<Arc<UcxWorld>> {
        let (rank, deadline) = (store.rank(), after(Instant::now(), timeout));
        let need = "the ranks' messages need a key";
        let own_key = [random_number(need)?, random_number(need)?];
        let worker = Worker::create(own_key, rank, topology.world_size());
        let made = worker.and_then(|worker| Ok((worker.address()?, worker)));
        let address = made.as_ref().map(|(address, _)| address.clone()).map_err(ToString::to_string);
        let own = postcard::to_allocvec(&Introduction { key: own_key, address }).expect("plain data");
        let all = store.exchange("phalanx/ucx", &own, timeout)?;
        let (_, mut worker) = made.map_err(|error| without_ucx(error, topology))?;
        let mut addresses = Vec::new();
        let mut key = own_key;
        for (other, bytes) in all.iter().enumerate() {
            let introduction: Introduction = postcard::from_bytes(bytes).map_err(|_| {
                Error::bootstrap(
                    format!("rank {other} does not say where its UCX is in a way that can be understood"),
                    "use one version of phalanx in all processes of the job",
                )
            })?;
            if other == 0 {
                key = introduction.key;
            }
            addresses.push(introduction.address.map_err(|why| elsewhere(other, &why, topology))?);
        }
        worker.meet(addresses, key);
        let check = || match store.lost().first() {
            None => Ok(()),
            Some(lost) => Err(Error::bootstrap(
                format!("rank {} was lost while the ranks were meeting: {}", lost.rank, lost.why),
                "see its own output",
            )),
        };
        let timeout = deadline.saturating_duration_since(Instant::now());
        let here = meet_here(&Meeting { topology, rank, name, timeout, check: &check })?;
        let fork = crate::os::ForkMark::of_this_process();
        let cores = match cores_from_environment()? {
            Some(cores) => cores,
            None => std::thread::available_parallelism().map_or(1, usize::from),
        };
        let is_crowded = topology.ranks_of(topology.host_of(rank)).len() > cores;
        let (worker, serving) = (Arc::new(Mutex::new(Some(worker))), Arc::default());
        Ok(Arc::new(UcxWorld { worker, serving, key, is_crowded, here, meet_here, reproducible, fork }))
    }

    /// The world that the ranks of this host have on the host backend.
    pub fn world_here(&self) -> Option<Arc<World>> {
        self.here.as_ref()?.channel.as_ref().map(|channel| channel.endpoint().world.clone())
    }

    /// Whether this process is a copy, made by fork, of the one that made this.
    pub(super) fn is_copy(&self) -> bool {
        self.fork.is_copy()
    }

    /// The worker, when no other thread uses it.
    pub(super) fn worker(&self) -> Locked<'_> {
        Locked(lock(&self.worker))
    }

    /// What lets UCX work in epochs; it is started.
    pub(super) fn serving(&self) -> Result<Arc<Serving>> {
        self.serving.start(&self.worker)?;
        Ok(self.serving.clone())
    }
}

impl Drop for UcxWorld {
    fn drop(&mut self) {
        if self.fork.is_copy() {
            // Its connections are the parent's.
            return std::mem::forget(self.worker.clone());
        }
        self.serving.end();
        let worker = lock(&self.worker).take();
        worker.map(Worker::end);
    }
}

/// How to get UCX, a way on each line.
pub(super) const WAYS: &str = "\n  Debian, Ubuntu: apt install libucx0\n  Python: pip install libucx-cu12 (in the active virtual environment)\n  \
                    conda: conda install -c conda-forge ucx\n  HPC-X: source hpcx-init.sh; hpcx_load\n  elsewhere: \
                    PHALANX_UCX_LIB=/path/to/libucp.so.0\n";

/// The error of a rank on which UCX is not found or does not start.
pub(crate) fn without_ucx(error: Error, topology: &HostTopology) -> Error {
    match error {
        Error::LibraryNotFound(_) | Error::MissingFunction(_) => Error::from(UnsupportedError {
            what: format!(
                "host memory of {} ranks on {} host(s) ({topology})",
                topology.world_size(),
                topology.num_hosts()
            ),
            why: format!("UCX carries it between hosts, and {error}"),
            remedy: format!(
                "install UCX on each host, or start the ranks with an MPI (mpirun, srun --mpi=pmi2).{WAYS}"
            ),
        }),
        error => error,
    }
}

fn elsewhere(rank: usize, why: &str, topology: &HostTopology) -> Error {
    let host = topology.name_of(topology.host_of(rank));
    Error::from(UnsupportedError {
        what: format!(
            "host memory of {} ranks on {} host(s) ({topology})",
            topology.world_size(),
            topology.num_hosts()
        ),
        why: format!("UCX carries it between hosts, and on {host} rank {rank} has none: {why}"),
        remedy: format!("install UCX on {host}.{WAYS}"),
    })
}
