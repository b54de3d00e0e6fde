//! Collective communication for Rust: ranks that move data together.
//!
//! ```
//! use phalanx::ReduceOp;
//!
//! fn main() -> phalanx::Result<()> {
//!     phalanx::try_run(4, |comm| -> phalanx::Result<()> {
//!         let mine = vec![comm.rank() as f32; 1000];
//!         let mut sum = vec![0.0; 1000];
//!         comm.all_reduce(&mine, &mut sum, ReduceOp::Sum)?;
//!         assert!(sum.iter().all(|x| *x == 6.0));
//!         Ok(())
//!     })?;
//!     Ok(())
//! }
//! ```
//!
//! - A *rank* is one of n equal participants: a thread of this process ([`try_run`]), or a process of its own ([`init`]). Processes
//!   are started by `phalanx launch`, torchrun, mpirun or srun, or meet by a [`UniqueId`].
//! - A [`Comm`] is one rank's end of a communicator. All ranks make the same calls in the same order.
//! - A rank that is missing, dead, or calls something else is an error on every rank, never a hang. The error names it.
//!
//! # Where things are
//! - Operations: the methods of [`Comm`], in [a table](#which-call-do-i-need). Several requests at once, and requests as futures: [`Request`].
//! - Ranks as groups and grids, halos: [`RankGroup`], [`Grid`], [`Neighbors`], [`HaloExchange`].
//! - Buffers: slices, arrays, vectors, and [`HostBuffer`] from [`Comm::alloc`], the fastest.
//! - Types and reductions: [`Element`], [`DType`], [`Unchecked`] (bool, char), [`ReduceOp`], [`PreMulSum`], [`Bitwise`], [`Logical`], [`Locate`].
//! - Parts of files of distributed arrays: [`ArrayPart`].
//! - What a rank would send, without the others: [`dry_run`].
//! - Raw pointers behind `Arc<dyn RawCommunicator>`: [`RawCommunicator`].
//! - Memory that other ranks put to and get from: [`SymmetricMemory`]; of GPUs: `GpuWindow`, `nvshmem`.
//! - Failures: [`Error`]; a rank's last operations: [`Comm::write_flight_record`].
//!
//! # Which call do I need
//!
//! Methods of [`Comm`], and the buffers that they take on each backend: `host` memory (slices, vectors, [`HostBuffer`]), memory of a
//! `gpu` (cudarc's slices and views), or `yes` if the call has no buffers.
//! At – it is refused: with [`Error::Unsupported`], or [`UsageError::Memory`] for a GPU's memory on a backend of host memory.
//! A test makes the tables: it tries every call on two ranks of each backend, with emulated GPUs.
//!
//! | call | what it does | solo | host | ucx | mpi | nccl | nvshmem |
//! |---|---|---|---|---|---|---|---|
//! | [`all_reduce`](Comm::all_reduce) | a sum, or another reduction, for all ranks. `MPI_Allreduce` | host | host | host | host, gpu | host, gpu | host, gpu |
//! | [`all_reduce_coalesced`](Comm::all_reduce_coalesced) | the same of several buffers, with one latency | host | host | host | host, gpu | host, gpu | host, gpu |
//! | [`reduce`](Comm::reduce) | the same for one rank. `MPI_Reduce` | host | host | host | host, gpu | host, gpu | host, gpu |
//! | [`reduce_scatter`](Comm::reduce_scatter), [`reduce_scatter_v`](Comm::reduce_scatter_v) | the same, of which each rank gets a block. `MPI_Reduce_scatter` | host | host | host | host, gpu | host, gpu | host, gpu |
//! | [`scan`](Comm::scan), [`exclusive_scan`](Comm::exclusive_scan) | the same of the ranks up to this one, or before it. `MPI_Scan`, `MPI_Exscan` | host | host | host | host | host | host |
//! | [`all_reduce_with`](Comm::all_reduce_with), [`reduce_with`](Comm::reduce_with), [`reduce_scatter_with`](Comm::reduce_scatter_with), [`scan_with`](Comm::scan_with), [`exclusive_scan_with`](Comm::exclusive_scan_with) | reductions by a closure, of any plain type. `MPI_Op_create`. So are [`Bitwise`], [`Logical`] and [`Locate`] | host | host | host | host | host | host |
//! | [`broadcast`](Comm::broadcast) | one rank's buffer for all. `MPI_Bcast` | host | host | host | host, gpu | host, gpu | host, gpu |
//! | [`all_gather`](Comm::all_gather), [`all_gather_v`](Comm::all_gather_v) | all ranks' blocks for all. `MPI_Allgather` | host | host | host | host, gpu | host, gpu | host, gpu |
//! | [`gather`](Comm::gather), [`gather_v`](Comm::gather_v) | all ranks' blocks for one. `MPI_Gather` | host | host | host | host, gpu | host, gpu | host, gpu |
//! | [`scatter`](Comm::scatter), [`scatter_v`](Comm::scatter_v) | one rank's blocks, one for each rank. `MPI_Scatter` | host | host | host | host, gpu | host, gpu | host, gpu |
//! | [`all_to_all`](Comm::all_to_all), [`all_to_all_v`](Comm::all_to_all_v) | a block from each rank to each. `MPI_Alltoall` | host | host | host | host, gpu | host, gpu | host, gpu |
//! | [`barrier`](Comm::barrier) | waits for all ranks. `MPI_Barrier` | yes | yes | yes | yes | yes | yes |
//! | [`send`](Comm::send), [`send_tagged`](Comm::send_tagged) | a message to another rank. `MPI_Send` | – | host | host | host, gpu | host, gpu | host, gpu |
//! | [`recv`](Comm::recv), [`recv_tagged`](Comm::recv_tagged) | a message from a rank, with a tag by which it matches (on NCCL by the order alone). `MPI_Recv` | host | host | host | host, gpu | host, gpu | host, gpu |
//! | [`send_recv`](Comm::send_recv), [`send_recv_tagged`](Comm::send_recv_tagged) | both at once, also with oneself. `MPI_Sendrecv` | host | host | host | host, gpu | host, gpu | host, gpu |
//! | [`recv_any`](Comm::recv_any), [`recv_any_tagged`](Comm::recv_any_tagged) | from whichever rank sends first. `MPI_ANY_SOURCE` | host | host | host | host, gpu | – | – |
//! | [`probe`](Comm::probe), [`try_probe`](Comm::try_probe), [`recv_vec`](Comm::recv_vec), [`recv_any_value`](Comm::recv_any_value) | a message of unknown length or source. `MPI_Probe`, `MPI_Iprobe` | host | host | host | host | – | – |
//! | [`send_value`](Comm::send_value), [`recv_value`](Comm::recv_value), [`send_object`](Comm::send_object), [`recv_object`](Comm::recv_object) | messages of a number or struct, and of what serde knows | – | yes | yes | yes | yes | yes |
//! | [`broadcast_object`](Comm::broadcast_object), [`gather_object`](Comm::gather_object), [`all_gather_object`](Comm::all_gather_object), [`scatter_objects`](Comm::scatter_objects), [`all_to_all_objects`](Comm::all_to_all_objects) | collectives of values that serde knows, of any length | yes | yes | yes | yes | yes | yes |
//! | [`all_reduce_value`](Comm::all_reduce_value), [`broadcast_value`](Comm::broadcast_value), [`all_gather_value`](Comm::all_gather_value), [`reduce_value`](Comm::reduce_value), [`gather_value`](Comm::gather_value), [`scatter_values`](Comm::scatter_values), [`scan_value`](Comm::scan_value), [`exclusive_scan_value`](Comm::exclusive_scan_value), [`send_recv_value`](Comm::send_recv_value) | the same calls for a single number or struct | yes | yes | yes | yes | yes | yes |
//! | [`all_gather_vec`](Comm::all_gather_vec), [`gather_vec`](Comm::gather_vec), [`all_to_all_vec`](Comm::all_to_all_vec) | lists of lengths that the ranks exchange themselves | host | host | host | host | host | host |
//! | [`neighbor_all_gather`](Comm::neighbor_all_gather), [`neighbor_all_gather_v`](Comm::neighbor_all_gather_v), [`neighbor_all_to_all`](Comm::neighbor_all_to_all), [`neighbor_all_to_all_v`](Comm::neighbor_all_to_all_v) | blocks for the [`Neighbors`] of a graph or [`Grid`]. `MPI_Neighbor_allgather`, `MPI_Neighbor_alltoall` | host | host | host | host | host | host |
//! | [`exchange_halo`](Comm::exchange_halo), [`start_exchange_halo`](Comm::start_exchange_halo) | the edges of an array's parts, in any number of dimensions | host | host | host | host | host, gpu | host, gpu |
//! | [`symmetric`](Comm::symmetric) | memory that others put to and get from, with atomics and signals. `MPI_Win_allocate` | host | host | host | host | host | host |
//! | [`shared_by_host`](Comm::shared_by_host), [`shared_by_host_in_parts`](Comm::shared_by_host_in_parts) | one copy for each host. `MPI_Win_allocate_shared` | host | host | host | host | host | host |
//! | `alloc_gpu`, `register_gpu`, `open_gpu` | GPU memory that others put to and get from, by a descriptor | – | – | – | – | gpu | – |
//! | [`alloc`](Comm::alloc) | host memory for the fastest operations. `MPI_Alloc_mem` | yes | yes | yes | yes | yes | yes |
//! | [`write_at_all`](Comm::write_at_all), [`read_at_all`](Comm::read_at_all) | a file of a distributed array. `MPI_File_write_at_all`, `MPI_File_read_at_all` | host | host | host | host | host | host |
//! | `write_tensors_at_all`, `read_tensor_at_all` | a safetensors file of distributed tensors | host | host | host | host | host | host |
//! | [`split`](Comm::split), [`split_by`](Comm::split_by), [`split_by_host`](Comm::split_by_host), [`split_group`](Comm::split_group), [`split_grid`](Comm::split_grid), [`split_sub_grid`](Comm::split_sub_grid), [`reorder_by_host`](Comm::reorder_by_host), [`duplicate`](Comm::duplicate) | communicators of parts of the ranks, or of all in another order. `MPI_Comm_split`, `MPI_Comm_dup` | yes | yes | yes | yes | yes | yes |
//! | [`split_members`](Comm::split_members) | a communicator that its members alone make. `MPI_Comm_create_group` | yes | yes | yes | yes | – | – |
//! | `split_by_gpu_link` | of the ranks whose GPUs NVLink connects | – | – | – | – | yes | yes |
//! | [`agree`](Comm::agree) | a flag on which the remaining ranks agree. `MPIX_Comm_agree` | yes | yes | yes | yes | yes | yes |
//! | [`shrink`](Comm::shrink) | goes on without lost ranks. `MPIX_Comm_shrink` | yes | yes | yes | – | yes | – |
//! | [`grow`](Comm::grow), [`rebuild`](Comm::rebuild) | takes in new processes; puts them in the place of lost ones | – | processes | yes | – | processes | – |
//! | [`group`](Comm::group) | operations that start together | host | host | host | host, gpu | host, gpu | host, gpu |
//!
//! - **Forms.** Most collectives have an `_in_place` form. `start_…` gives a [`Request`], and `prepare_…` a [`Prepared`] call that runs many times; both
//!   own their buffers, which are host memory. In a [`group`](Comm::group) operations start together, also several communicators' ([`group()`]).
//! - **solo** is a world of one rank. A plain `send` to itself is [`UsageError::SelfExchange`]; it receives what it has started to send.
//! - **mpi** takes GPU memory if the library is CUDA-aware. **rccl** is like nccl, in HIP's memory; it has never run on AMD's GPUs.
//! - **processes**: not if ranks are threads. [`symmetric`](Comm::symmetric) on NCCL and RCCL is for one host.
//! - **Versions.** All of these work with NCCL 2.18.1, the oldest that is supported: what it lacks, phalanx does itself. NVSHMEM is 3.4 or later.
//!   Calls of `Comm::nccl` need these releases; before, they are [`Error::MissingFunction`] or [`Error::Unsupported`]:
//!
//! | of NCCL alone | what it does | since NCCL |
//! |---|---|---|
//! | `alloc` | GPU memory in the best form that the library has | 2.19.3 |
//! | `alloc_as` | a symmetric window (`Registration::Symmetric`) | 2.27.3 |
//! | `estimate` | the time of a collective | 2.22.3 |
//! | `device_comm`, `team` | for your own kernels | 2.28.3 |
//! | `put_signal`, `signal`, `wait_signals` | between symmetric windows | 2.29.2 |
//! | `properties` | what the communicator can | 2.29.2 |
//! | `memory`, `suspend`, `resume` | gives GPU memory back for a while | 2.29.7 |
//! | `configured` | settings of single collectives | 2.31 |
//!
//! # Environment
//! A variable with an empty value is not set.
//!
//! | variable | meaning |
//! |---|---|
//! | `PHALANX_TIMEOUT` | seconds that a wait may take, or `none`; default 300 |
//! | `PHALANX_BACKEND` | `solo`, `host`, `mpi`, `ucx`, `nccl`, `rccl`, `nvshmem` or `auto`: NCCL (RCCL) if each rank has a GPU of NVIDIA's (AMD's), else MPI under an MPI launcher, else the host (UCX between hosts), else solo for one rank |
//! | `PHALANX_INTERFACE` | the network interface of UCX (`eth0`); by default UCX chooses |
//! | `PHALANX_CHECK` | `1`: the ranks compare every collective before it moves anything (NVSHMEM and the host always compare: see [`Builder::check`]) |
//! | `PHALANX_REPRODUCIBLE` | `1`: host memory of several hosts is combined in rank order (see [`Builder::reproducible`]) |
//! | `PHALANX_GPU_ALGORITHM` | which of phalanx's own GPU kernels carry operations on GPUs out: `auto` (the fastest, the default), `nccl` (none), or one for all that have it: `ll`, `ll128`, `two_hops_ll`, `two_hops_ll128`. The same on every rank |
//! | `PHALANX_NCCL_LIB`, `PHALANX_CUDA_LIB`, `PHALANX_MPI_LIB`, `PHALANX_NVSHMEM_LIB`, `PHALANX_UCX_LIB` | the shared libraries of NCCL, of the CUDA driver, of MPI, of NVSHMEM and of UCX (files, or folders that have them), if they are not in the usual places |
//! | `PHALANX_RCCL_LIB`, `PHALANX_HIP_LIB` | the same of RCCL and of the HIP runtime |
//! | `PHALANX_NVRTC_LIB`, `PHALANX_NVJITLINK_LIB` | the shared libraries of NVRTC and nvJitLink, for kernels compiled at run time |
//! | `PHALANX_CUDA_INCLUDE`, `PHALANX_CCCL_INCLUDE`, `PHALANX_NCCL_INCLUDE`, `PHALANX_NVSHMEM_INCLUDE`, `PHALANX_NVSHMEM_DEVICE` | the folders with the headers of CUDA, CCCL, NCCL and NVSHMEM, and with `libnvshmem_device.a`, if they are not in the usual places |
//! | `PHALANX_MPI_CUDA` | whether the MPI library takes CUDA memory: `1` yes, `0` no, whatever it says of itself; for libraries that cannot be asked |
//! | `PHALANX_MPI_MAX_BYTES` | most bytes of one MPI call, default 2147483647; for tests of longer operations |
//! | `PHALANX_MPI_MAP_WINDOWS` | `0`: MPI moves what ranks of one host put to each other's symmetric memory and get from it, too; for tests of MPI's windows |
//! | `PHALANX_NVSHMEM_STAGE` | bytes of each of the two staging buffers in symmetric memory through which the NVSHMEM backend moves other memory; the same on all ranks; default 16777216 |
//! | `PHALANX_STOPPED_TIMEOUT` | seconds that a peer's process may be stopped (SIGSTOP, Ctrl-Z) before that is an error; default 0.9, so that the error comes within two seconds; between hosts `PHALANX_HEARTBEAT_TIMEOUT` counts |
//! | `PHALANX_CORES` | cores that the ranks of a host share; default: those they may run on. With fewer cores than ranks, a waiting rank yields its core at once: for hosts that other programs use as well. The value of the host's rank 0 counts |
//! | `PHALANX_TRACE_DIR` | folder into which every rank writes its last operations when a communicator fails or its rank panics, for `phalanx trace` |
//! | `PHALANX_TRACE_SIGNAL` | `USR1` or `USR2`: signal on which ranks write their last operations, too; default: none |
//! | `PHALANX_METRICS` | set by `phalanx launch --metrics`: the ranks count their operations (`phalanx::metrics`) |
//! | `PHALANX_RANK`, `PHALANX_WORLD_SIZE`, `PHALANX_JOB` | set by `phalanx launch`: this process's rank, the number of ranks, the job's name |
//! | `PHALANX_LOCAL_RANK`, `PHALANX_LOCAL_WORLD_SIZE` | set by `phalanx launch`: the rank on this host, and the number of ranks there |
//! | `PHALANX_NODE_RANK`, `PHALANX_NNODES` | set by `phalanx launch`: the number of this host, and of all hosts |
//! | `PHALANX_RESTART_COUNT` | set by `phalanx launch`: how many times the job was restarted |
//! | `PHALANX_REPLACES` | set by `phalanx launch --restarts` for a process in the place of a failed rank: the rank's number |
//! | `PHALANX_LAUNCHER` | set by `phalanx launch`: the name of the socket on which ranks report why they failed |
//! | `PHALANX_STORE` | `host:port` of the job's store, at which ranks of several hosts meet; set by `phalanx launch`; under torchrun, default `MASTER_ADDR` with `MASTER_PORT` + 1000; ranks of an MPI launcher meet over MPI unless it is set |
//! | `PHALANX_TOKEN`, `PHALANX_TOKEN_FILE` | the secret of the job's ranks, or a file (mode 600) with it; `phalanx launch` sets the first; under torchrun on several hosts the user sets one |
//! | `PHALANX_STORE_TLS` | `1`: the connections of the job's store are encrypted (TLS 1.3); the same for all its processes and launchers |
//! | `PHALANX_HEARTBEAT_TIMEOUT` | seconds of silence after which the store declares a rank lost; default 10, so that a switch may fail over. Read by the process that hosts the store: the launcher, or rank 0 |
//! | `PHALANX_LAUNCHED_BY` | which launcher started this process, where several launchers' variables are set and the innermost cannot be seen: `phalanx`, `torchrun`, `openmpi`, `pals`, `intelmpi`, `pmi`, `pmix`, `slurm`, or `none` |
//! | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`, `TORCHELASTIC_*` | set by torchrun |
//! | `OMPI_COMM_WORLD_*`, `PMI_*`, `PMIX_*`, `MPI_LOCAL*`, `I_MPI_HYDRA_UUID`, `PALS_*`, `SLURM_*` | set by MPI's launchers and Slurm: see [`choose`] |
//!
//! # Memory
//! A communicator of the host backend uses shared memory:
//! - up to 3 MiB for each rank;
//! - up to 2 MiB in each direction for each pair of ranks that exchanges messages (from 5 ranks on 8 MiB divided by the number
//!   of ranks, at least 16 KiB);
//! - pieces of 1 MiB and more for [`Comm::alloc`], allocated at once. Among processes, more than the host or the container's
//!   limit has is an error.
//!
//! A page costs memory from its first use until all ranks have dropped the communicator. A message that arrives before its
//! receive, while another one is received, is kept on the heap until then.
//!
//! # Features
//! All but the last three are defaults. Libraries are found at run time: none of these needs CUDA, ROCm or MPI to build.
//!
//! | feature | what it adds |
//! |---|---|
//! | `nccl` | the backend on NVIDIA's NCCL; implies `cuda` |
//! | `rccl` | the backend on AMD's RCCL, with HIP's memory and streams; nothing of CUDA |
//! | `nvshmem` | the backend on NVSHMEM, and memory that other ranks put to and get from; implies `cuda` |
//! | `mpi` | the backend on an MPI library |
//! | `cuda` | buffers and streams of cudarc; also for MPI that takes CUDA memory |
//! | `jit` | kernels compiled at run time; implies `cuda`, and needs its version 12.4 or later |
//! | `multi-host` | ranks on several hosts: the job's store over TCP, with TLS |
//! | `cuda-12080` | tells cudarc to know CUDA 12.8. A program whose framework tells it another version leaves this out |
//! | `metrics` | counters of operations for the crate metrics and for Prometheus |
//! | `safetensors` | safetensors files of distributed tensors |
//! | `ndarray` | arrays and views of ndarray 0.17 as buffers; `Strided` for those with gaps |
//!
//! # Platforms
//! Linux has everything. On other systems ranks are threads, and process ranks answer [`Error::Unsupported`]. That part is tested on
//! Linux and under Wine, and compiled for macOS; it has never run on Windows or macOS themselves.

// docs.rs, which builds with nightly, shows the features that an item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]
// Without some of the backends, what they share has fewer callers. With all of them, nothing may be unused.
#![cfg_attr(
    not(all(
        feature = "nccl",
        feature = "rccl",
        feature = "nvshmem",
        feature = "mpi",
        feature = "jit",
        feature = "multi-host"
    )),
    allow(dead_code, unused_imports)
)]

mod api;
mod backend;
mod buffer;
mod contract;
mod control;
#[cfg(feature = "_gpu")]
mod gpu;
#[cfg(all(feature = "jit", target_pointer_width = "64", target_endian = "little"))]
pub mod jit;
#[cfg(feature = "_nccl")]
pub mod nccl;
#[cfg(all(feature = "nvshmem", target_pointer_width = "64", target_endian = "little"))]
pub mod nvshmem;
mod os;
mod reduce;
mod rendezvous;
mod start;
mod types;
mod watch;

pub use api::builder::Builder;
pub use api::comm::{Comm, View};
pub use api::file::part::ArrayPart;
#[cfg(feature = "safetensors")]
pub use api::file::tensors::TensorPart;
#[cfg(feature = "cuda")]
pub use api::gpu_window::completion::GpuCompletion;
#[cfg(feature = "cuda")]
pub use api::gpu_window::remote::RemoteGpuWindow;
#[cfg(feature = "cuda")]
pub use api::gpu_window::{GpuDescriptor, GpuWindow};
pub use api::grid::{Grid, HaloExchange, Neighbors};
pub use api::group::{CommGroup, Group, group};
pub use api::init::{dry_run, init, join, run};
pub use api::local::reduce_local;
pub use api::one_sided::SymmetricMemory;
pub use api::one_sided::epoch::Epoch;
pub use api::one_sided::shared_by_host::SharedByHost;
pub use api::rank_group::RankGroup;
pub use api::raw::RawCommunicator;
pub use api::request::{Prepared, PreparedMessage, Request};
pub use api::shared::SharedComm;
pub use api::try_run::try_run;
pub use api::values::RankBlocks;
pub use buffer::host::HostBuffer;
pub use buffer::loan::Loan;
#[cfg(feature = "ndarray")]
pub use buffer::ndarray::Strided;
#[cfg(feature = "_gpu")]
pub use buffer::stream::GpuStream;
pub use buffer::stream::Stream;
pub use buffer::{AnySource, AnyTarget, Output, Owned, Source, Target, Uninit};
#[cfg(feature = "cuda")]
pub use contract::GpuBlock;
pub use contract::hosts::HostTopology;
pub use contract::{BackendKind, DryCall, Envelope, StreamSyncOps};
#[cfg(feature = "rccl")]
pub use gpu::hip;
#[cfg(feature = "rccl")]
pub use nccl::rccl;
pub use phalanx_sys::{Attempt, MissingFunction, NotFound};
pub use rendezvous::environment::{DEFAULT_TIMEOUT, Launcher};
pub use rendezvous::unique_id::UniqueId;
pub use start::{Choice, choose};
pub use types::bits::{Bitwise, Logical};
pub use types::dtype::{
    AnyElement, AtomicElement, DType, Element, ElementType, F8E4M3, F8E5M2, Integer, Plain, Reducible, bf16,
    f16,
};
pub use types::error::{
    BootstrapError, Error, LibraryError, MismatchError, MissingRank, PeerError, PeerEvent, Result,
    SharedIoError, SystemError, TimeoutError, UnsupportedError, UsageError,
};
pub use types::locate::{Locate, Located};
pub use types::object_error::ObjectError;
pub use types::op::{PreMulSum, ReduceOp, Reduction};
pub use types::plain::PlainType;
pub use types::unchecked::Unchecked;
#[cfg(feature = "metrics")]
pub use watch::metrics;
/// What `phalanx launch` and the tests use; no part of the interface.
#[doc(hidden)]
pub mod internal {
    pub use crate::contract::work::{Count, Placement, Planned, Traffic, Work};
    pub use crate::os::{fresh_file, run_on, usable_cores};
    pub use crate::rendezvous::environment::timeout_from_environment;
    pub use crate::rendezvous::store;
    pub use crate::start::{launched, work};
}

/// cudarc, in the version whose slices and streams phalanx takes.
#[cfg(feature = "cuda")]
pub use cudarc;

#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// Chapters of the guide, whose programs are compiled, and run where no GPU is needed.
#[cfg(doctest)]
mod guide {
    #[doc = include_str!("../../../docs/guide/first-program.md")]
    struct FirstProgram;

    #[cfg(feature = "nccl")]
    #[doc = include_str!("../../../docs/guide/memory.md")]
    struct Memory;

    #[doc = include_str!("../../../docs/guide/one-sided.md")]
    struct OneSided;

    #[cfg(feature = "nccl")]
    #[doc = include_str!("../../../docs/guide/overlap.md")]
    struct Overlap;

    #[doc = include_str!("../../../docs/guide/failures.md")]
    struct Failures;

    #[cfg(feature = "nccl")]
    #[doc = include_str!("../../../docs/guide/own-kernels.md")]
    struct OwnKernels;

    #[doc = include_str!("../../../docs/guide/questions.md")]
    struct Questions;
}
