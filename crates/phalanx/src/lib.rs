//! Collective communication for Rust: ranks that move data together.
//!
//! A *rank* is one of n equal participants: a thread of this process ([`run`]) or a process of its own
//! ([`init`], under `phalanx launch`, torchrun, mpirun or srun). A [`Comm`] is a rank's end of a communicator. All ranks
//! make the same calls in the same order; a rank that is missing, dead, or calls something else is an error
//! on every rank that names it, never a hang.
//!
//! ```
//! use phalanx::ReduceOp;
//!
//! fn main() -> phalanx::Result<()> {
//!     phalanx::run(4, |comm| -> phalanx::Result<()> {
//!         let mine = vec![comm.rank() as f32; 1000];
//!         let mut sum = vec![0.0; 1000];
//!         comm.all_reduce(&mine, &mut sum, ReduceOp::Sum)?;
//!         assert!(sum.iter().all(|x| *x == 6.0));
//!         Ok(())
//!     })?
//!     .into_iter()
//!     .collect()
//! }
//! ```
//!
//! # Where things are
//! - Collectives, messages, requests, groups, splitting: the methods of [`Comm`].
//! - Buffers: slices, arrays, vectors, and [`HostBuffer`] from [`Comm::alloc`], the fastest.
//! - Types and operations: [`Element`], [`DType`], [`ReduceOp`], [`PreMulSum`].
//! - Raw pointers behind `Arc<dyn Communicator>`: [`communicator`].
//! - What can go wrong: [`Error`].
//!
//! # Environment
//! | variable | meaning |
//! |---|---|
//! | `PHALANX_TIMEOUT` | seconds a wait may take; default 300 |
//! | `PHALANX_BACKEND` | `solo`, `host`, `mpi` or `auto` |
//! | `PHALANX_MPI_LIB` | the file of the MPI library |
//! | `PHALANX_MPI_MAX_BYTES` | bytes that one MPI call gets at most, default 2147483647: for tests of what is behind it |
//! | `PHALANX_RANK`, `PHALANX_WORLD_SIZE`, `PHALANX_JOB` | set by `phalanx launch`: who this rank is, and of which job |
//! | `PHALANX_LOCAL_RANK`, `PHALANX_LOCAL_WORLD_SIZE` | the same on this host |
//! | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`, `TORCHELASTIC_*` | set by torchrun |
//! | `OMPI_COMM_WORLD_*`, `PMI_*`, `PMIX_*`, `MPI_LOCAL*`, `I_MPI_HYDRA_UUID`, `PALS_*`, `SLURM_*` | set by MPI's launchers and Slurm: see [`choose`] |
//!
//! # Platforms
//! Linux has everything. Elsewhere ranks are threads, and process ranks answer [`Error::Unsupported`]; that
//! part has not been compiled or run on another system so far.

mod backend;
mod bootstrap;
mod buffer;
mod collective;
mod comm;
pub mod communicator;
mod dtype;
mod error;
mod group;
mod host;
mod op;
mod os;
mod p2p;
mod request;
mod sync;

pub use backend::BackendKind;
pub use bootstrap::{Choice, Launcher, choose};
pub use buffer::{Owned, Source, Target};
pub use comm::{Builder, Comm, DEFAULT_TIMEOUT};
pub use communicator::{Communicator, StreamSyncOps};
pub use dtype::{DType, Element, F8E4M3, F8E5M2, bf16, f16};
pub use error::{
    BootstrapError, Error, LibraryError, LibraryNotFound, MismatchError, MissingFunction, MissingRank,
    PeerError, PeerEvent, Result, SharedIoError, SystemError, TimeoutError, UsageError,
};
pub use group::{CommGroup, Group, group};
pub use host::HostBuffer;
pub use op::{PreMulSum, ReduceOp, Reduction};
pub use request::Request;

/// The communicator of this process, from the launcher's variables; a world of one if there are none.
///
/// Understands `phalanx launch`, torchrun, the launchers of MPI, and Slurm; [`choose`] tells what it would do and why.
/// Waits until all ranks have come, with the usual deadline; an error names the ranks that have not.
pub fn init() -> Result<Comm> {
    Comm::builder().init()
}

/// Runs `f` once for each of `ranks` ranks, in a thread of its own, and answers the results in rank order.
///
/// If a rank panics, its peers get an error that names it, and the panic goes on here when all have ended.
///
/// # Errors
/// [`UsageError::WorldSize`] for 0 ranks or more than 512; [`SystemError`] if threads or memory are short.
pub fn run<R: Send>(ranks: usize, f: impl Fn(Comm) -> R + Sync) -> Result<Vec<R>> {
    Comm::builder().run(ranks, f)
}

#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
