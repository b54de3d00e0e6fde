//! Creates communicators, for `init`, `run` and `join`: chooses a backend and starts it.
//!
//! | file | what |
//! |---|---|
//! | `choose.rs` | which backend a process would use, and why |
//! | `processes.rs` | `init`: communicators of processes |
//! | `join.rs` | `join`: communicators that grow |
//! | `threads.rs` | `run`: communicators of threads |
//! | `dry_run.rs` | `dry_run`: one rank whose peers do not exist |
//! | `hosts.rs` | communicators of ranks on several hosts |
//! | `mpi/`, `no_mpi.rs` | ranks that an MPI launcher started |
//! | `gpus.rs` | the backends on GPUs, as far as they are built in |
//! | `agreement.rs` | the ranks agree on one backend |
//! | `work.rs` | the work of an operation, by backend |
//! | `job_store.rs` | where the job's store is, and joining it |
//! | `slurm.rs` | the store of a step of Slurm without a token |
//!
//! This is the only folder that knows all backends.

mod agreement;
mod choose;
mod dry_run;
mod gpus;
mod hosts;
mod job_store;
mod join;
#[cfg(all(feature = "mpi", target_pointer_width = "64", target_endian = "little"))]
mod mpi;
#[cfg(not(all(feature = "mpi", target_pointer_width = "64", target_endian = "little")))]
#[path = "no_mpi.rs"]
mod mpi;
mod processes;
mod slurm;
mod threads;
mod work;

pub use choose::{Choice, choose, launched};
pub(crate) use dry_run::dry_rank;
#[cfg(feature = "_gpu")]
pub(crate) use gpus::host_channel;
pub(crate) use join::join;
pub(crate) use processes::init;
#[cfg(feature = "_nccl")]
pub(crate) use threads::gpu_ranks;
pub(crate) use threads::run_threads;
pub use work::work;

use crate::contract::{Backend, BackendKind};
use crate::rendezvous::environment::Environment;
use crate::rendezvous::store::address::Listeners;
use crate::types::MAX_HOST_RANKS;
use crate::types::error::{Result, UsageError};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Settings of a new communicator.
pub(crate) struct Settings {
    pub environment: Environment,
    pub timeout: Duration,
    pub backend: Option<BackendKind>,
    pub gpu: Option<usize>,
    /// Checked mode: calls are compared before they move data.
    pub check: bool,
    /// Contributions are combined in rank order, also between hosts.
    pub reproducible: bool,
    /// The listener of rank 0's `UniqueId`, if it has one.
    pub listener: Option<Listeners>,
    #[cfg(feature = "_nccl")]
    pub nccl: Arc<crate::backend::nccl::NcclSettings>,
}

/// A new communicator: its backend, and its name in flight records, the same on all its ranks.
pub(crate) struct NewComm {
    pub backend: Arc<dyn Backend>,
    pub name: String,
}

impl NewComm {
    fn new(backend: Arc<dyn Backend>, name: String) -> NewComm {
        // Open MPI's jobs have an address in their name. What is behind the first slash is the communicator's.
        NewComm { backend, name: name.replace('/', "_") }
    }
}

/// A name for a communicator within this process.
fn own_name() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("{}.{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Checks the number of ranks that are to share this host's memory.
fn check_host_ranks(world_size: usize) -> Result<()> {
    if (1..=MAX_HOST_RANKS).contains(&world_size) {
        Ok(())
    } else {
        Err(UsageError::WorldSize { world_size, limit: MAX_HOST_RANKS }.into())
    }
}
