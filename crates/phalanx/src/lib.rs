//! Collective communication for Rust: ranks that move data together.
//!
//! A *rank* is one of n equal participants: a thread of this process ([`run`]) or a process of its own
//! ([`init`], under `phalanx launch`, torchrun, mpirun or srun, or by a [`UniqueId`]). A [`Comm`] is a rank's end of a communicator. All ranks
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
//! - Raw pointers behind `Arc<dyn RawCommunicator>`: [`communicator`].
//! - Memory that other ranks put to and get from: `nvshmem`.
//! - What can go wrong: [`Error`]; going on without a rank that is gone: [`Comm::shrink`]; what a rank did last:
//!   [`Comm::write_flight_record`].
//!
//! # Environment
//! | variable | meaning |
//! |---|---|
//! | `PHALANX_TIMEOUT` | seconds a wait may take; default 300 |
//! | `PHALANX_BACKEND` | `solo`, `host`, `mpi`, `nccl`, `rccl`, `nvshmem` or `auto`: NCCL (RCCL) if each rank has a GPU of NVIDIA's (AMD's), else MPI under an MPI launcher, else the host, else solo for one rank |
//! | `PHALANX_CHECK` | `1`: the ranks compare every collective before it moves anything (on NVSHMEM they always do, and on the host they always compare: see [`Builder::check`]) |
//! | `PHALANX_NCCL_LIB`, `PHALANX_CUDA_LIB`, `PHALANX_MPI_LIB`, `PHALANX_NVSHMEM_LIB` | the shared libraries (files, or the folders that have them) of NCCL, of the CUDA driver, of MPI and of NVSHMEM, if they are not where they are looked for |
//! | `PHALANX_RCCL_LIB`, `PHALANX_HIP_LIB` | the same of RCCL and of the HIP runtime |
//! | `PHALANX_NVRTC_LIB`, `PHALANX_NVJITLINK_LIB` | the shared libraries of NVRTC and nvJitLink, for kernels compiled at run time |
//! | `PHALANX_CUDA_INCLUDE`, `PHALANX_CCCL_INCLUDE`, `PHALANX_NCCL_INCLUDE`, `PHALANX_NVSHMEM_INCLUDE`, `PHALANX_NVSHMEM_DEVICE` | the folders with the headers of CUDA, CCCL, NCCL and NVSHMEM, and with `libnvshmem_device.a`, likewise |
//! | `PHALANX_MPI_CUDA` | `1`: the MPI library takes CUDA memory, `0`: it does not, whatever it says of itself; for those that cannot be asked |
//! | `PHALANX_MPI_MAX_BYTES` | bytes that one MPI call gets at most, default 2147483647: for tests of what is behind it |
//! | `PHALANX_NVSHMEM_STAGE` | bytes of symmetric memory, twice, through which the NVSHMEM backend moves other memory, the same on all ranks; default 16777216 |
//! | `PHALANX_STOPPED_TIMEOUT` | seconds a peer's process may be stopped (SIGSTOP, Ctrl-Z) before that is an error; default: 0.9, so that it is told within two; between hosts `PHALANX_HEARTBEAT_TIMEOUT` counts |
//! | `PHALANX_CORES` | cores of a host that its ranks have between them; default: those they may run on. With fewer than ranks, who waits gives its core away at once: for hosts that other programs use as well; as rank 0 of the host has it |
//! | `PHALANX_TRACE_DIR` | folder into which every rank writes its last operations when a communicator fails or its rank panics, for `phalanx trace` |
//! | `PHALANX_TRACE_SIGNAL` | `USR1` or `USR2`: on this signal ranks write their last operations, too; default: no signal is taken |
//! | `PHALANX_RANK`, `PHALANX_WORLD_SIZE`, `PHALANX_JOB` | set by `phalanx launch`: who this rank is, and of which job |
//! | `PHALANX_LOCAL_RANK`, `PHALANX_LOCAL_WORLD_SIZE` | the same on this host |
//! | `PHALANX_NODE_RANK`, `PHALANX_NNODES` | set by `phalanx launch`: which host this is, of how many |
//! | `PHALANX_RESTART_COUNT` | set by `phalanx launch`: how often the job was started again |
//! | `PHALANX_STORE` | `host:port` of the job's store, where ranks of several hosts meet; set by `phalanx launch`; under torchrun, default `MASTER_ADDR` with `MASTER_PORT` + 1000; ranks that an MPI launcher started meet over MPI unless it is set |
//! | `PHALANX_TOKEN`, `PHALANX_TOKEN_FILE` | the secret of the job's ranks, or a file (mode 600) with it; `phalanx launch` sets the first; under torchrun on several hosts the user sets one |
//! | `PHALANX_STORE_TLS` | `1`: the connections of the job's store are encrypted (TLS 1.3); the same for all its processes and launchers |
//! | `PHALANX_HEARTBEAT_TIMEOUT` | seconds of silence after which the store takes a rank for lost; default 1.4. For the process that hosts the store: the launcher, or rank 0 |
//! | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`, `TORCHELASTIC_*` | set by torchrun |
//! | `OMPI_COMM_WORLD_*`, `PMI_*`, `PMIX_*`, `MPI_LOCAL*`, `I_MPI_HYDRA_UUID`, `PALS_*`, `SLURM_*` | set by MPI's launchers and Slurm: see [`choose`] |
//!
//! # Memory
//! On the host, a communicator uses memory that its ranks share: up to 3 MiB for each rank and, for each pair that exchanges
//! messages, up to 2 MiB in each direction (8 MiB divided by the number of ranks from 5 on, 16 KiB at least). A page of it costs memory
//! when it is first used, and goes back when all ranks have dropped the communicator. [`Comm::alloc`] takes pieces of 1 MiB and more, allocated at
//! once; among process ranks, more than the host or the container's limit has is an error. A message that comes before its receive,
//! while another one is received, is kept on the heap until then.
//!
//! # Platforms
//! Linux has everything. Elsewhere ranks are threads, and process ranks answer [`Error::Unsupported`]; that part has been tested in
//! the place of Linux's own and under Wine, and was checked by the compiler for macOS. It has never been on Windows or macOS themselves so far.

mod api;
mod backend;
mod buffer;
mod contract;
mod control;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(all(feature = "jit", target_pointer_width = "64", target_endian = "little"))]
pub mod jit;
#[cfg(feature = "cuda")]
pub mod nccl;
#[cfg(all(feature = "cuda", target_pointer_width = "64", target_endian = "little"))]
pub mod nvshmem;
mod os;
mod reduce;
mod rendezvous;
mod start;
mod types;
mod watch;

pub use api::comm::{Builder, Comm, View};
pub use api::group::{CommGroup, Group, group};
pub use api::raw::RawCommunicator;
pub use api::request::Request;
pub use buffer::host::HostBuffer;
pub use buffer::loan::Loan;
#[cfg(feature = "cuda")]
pub use buffer::stream::GpuStream;
pub use buffer::stream::Stream;
pub use buffer::{Owned, Source, Target};
pub use contract::hosts::HostTopology;
pub use contract::{BackendKind, StreamSyncOps};
#[cfg(feature = "cuda")]
pub use gpu::hip;
#[cfg(feature = "cuda")]
pub use nccl::rccl;
pub use phalanx_sys::{Attempt, MissingFunction, NotFound};
pub use rendezvous::environment::{DEFAULT_TIMEOUT, Launcher};
pub use rendezvous::unique_id::UniqueId;
pub use start::{Choice, choose};
pub use types::dtype::{DType, Element, F8E4M3, F8E5M2, bf16, f16};
pub use types::error::{
    BootstrapError, Error, LibraryError, MismatchError, MissingRank, PeerError, PeerEvent, Result,
    SharedIoError, SystemError, TimeoutError, UnsupportedError, UsageError,
};
pub use types::op::{PreMulSum, ReduceOp, Reduction};
/// For `phalanx launch` and the tests: no part of the interface.
#[doc(hidden)]
pub use {rendezvous::store, start::launched};

/// cudarc, in the version whose slices and streams are buffers and lanes here.
#[cfg(feature = "cuda")]
pub use cudarc;

/// The communicator of this process, from the launcher's variables; a world of one if there are none.
///
/// Understands `phalanx launch`, torchrun, the launchers of MPI, and Slurm; [`choose`] tells what it would do and why. A program
/// with a launcher of its own says who it is with [`Builder::place`] or [`Builder::unique_id`].
/// Waits until all ranks have come, with the usual deadline; an error names the ranks that have not.
pub fn init() -> Result<Comm> {
    Comm::builder().init()
}

/// Joins a job that is under way: becomes a rank of the communicator that the others make with [`Comm::grow`] or
/// [`Comm::rebuild`].
///
/// The process needs the variables of the job, as the launcher gave them to a rank of it (under `phalanx launch` that is
/// `PHALANX_JOB`, `PHALANX_RANK` and `PHALANX_WORLD_SIZE`); the rank among them does not matter: the others give it a new one.
/// Waits with the usual deadline for them to ask.
///
/// # Errors
/// [`Error::Bootstrap`]: nobody asks for joiners, or for no more than have come.
pub fn join() -> Result<Comm> {
    Comm::builder().join()
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
