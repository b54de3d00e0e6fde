//! Programs of other libraries, ported.
//!
//! ```text
//! cargo run --release -p phalanx --example ported -- rsmpi/broadcast 4     4 ranks as threads
//! phalanx launch -n 4 -- target/release/examples/ported rsmpi/broadcast
//! ```
//!
//! A port does what its original does and asserts the same results. `rsmpi/…` run on host memory or MPI. `nccl4py/…` and `cudarc/…` need NVIDIA's
//! GPUs; those that make the communicators of all GPUs themselves are run once, without a launcher.
//!
//! The originals: rsmpi 0.8.1 (commit fa1dc36), nccl4py 0.3.1 (NVIDIA/nccl, commit 5067397), cudarc 0.19.4 (commit 78d9b31), of whose NCCL there are
//! only tests, and pytorch/examples (commit 77f55b9).
//!
//! Lines are those that are neither blank nor comments nor, in Python, docstrings. Of a test they are its function's. Those of a port include two for
//! `phalanx::init` and `finalize`, which are in this file, unless it makes its communicators itself.
//!
//! | Program | Original | Lines there | Lines here |
//! |---|---|---:|---:|
//! | `rsmpi/all_gather` | `examples/all_gather.rs` | 54 | 17 |
//! | `rsmpi/all_to_all` | `examples/all_to_all.rs` | 14 | 11 |
//! | `rsmpi/barrier` | `examples/barrier.rs` | 25 | 18 |
//! | `rsmpi/broadcast` | `examples/broadcast.rs` | 30 | 17 |
//! | `rsmpi/cartesian` | `examples/cartesian.rs` | 66 | 27 |
//! | `rsmpi/comm_name` | `examples/comm_name.rs` | 10 | 9 |
//! | `rsmpi/complex_datatype` | `examples/complex_datatype.rs` | 62 | 31 |
//! | `rsmpi/duplicate` | `examples/duplicate.rs` | 10 | 11 |
//! | `rsmpi/gather_varcount` | `examples/gather_varcount.rs` | 34 | 11 |
//! | `rsmpi/group` | `examples/group.rs` | 50 | 27 |
//! | `rsmpi/immediate` | `examples/immediate.rs` | 78 | 30 |
//! | `rsmpi/immediate_multiple_requests` | `examples/immediate_multiple_requests.rs` | 128 | 36 |
//! | `rsmpi/immediate_reduce` | `examples/immediate_reduce.rs` | 107 | 18 |
//! | `rsmpi/readme` | `examples/readme.rs` | 38 | 19 |
//! | `rsmpi/ready_send` | `examples/ready_send.rs` | 32 | 16 |
//! | `rsmpi/reduce` | `examples/reduce.rs` | 101 | 26 |
//! | `rsmpi/scan` | `examples/scan.rs` | 19 | 10 |
//! | `rsmpi/scatter_varcount` | `examples/scatter_varcount.rs` | 29 | 13 |
//! | `rsmpi/send_receive` | `examples/send_receive.rs` | 38 | 26 |
//! | `rsmpi/split` | `examples/split.rs` | 80 | 31 |
//! | `rsmpi/vector` | `examples/vector.rs` | 38 | 19 |
//! | `rsmpi/wait_any` | `examples/wait_any.rs` | 33 | 19 |
//! | `nccl4py/allreduce` | `docs/examples/03_collectives/01_allreduce/python/allreduce.py` | 65 | 24 |
//! | `nccl4py/allreduce_basic` | `bindings/nccl4py/examples/01_basic/01_allreduce.py` | 39 | 13 |
//! | `nccl4py/allreduce_ub` | `docs/examples/04_user_buffer_registration/01_allreduce/python/allreduce_ub.py` | 72 | 17 |
//! | `nccl4py/multiple_devices_single_process` | `docs/examples/01_communicators/01_multiple_devices_single_process/python/multiple_devices_single_process.py` | 54 | 13 |
//! | `nccl4py/ring_pattern` | `docs/examples/02_point_to_point/01_ring_pattern/python/ring_pattern.py` | 76 | 26 |
//! | `nccl4py/send_recv` | `bindings/nccl4py/examples/01_basic/02_send_recv.py` | 48 | 19 |
//! | `cudarc/all_reduce` | `src/nccl/safe.rs`, `test_all_reduce` | 25 | 13 |
//! | `cudarc/all_reduce_views` | `src/nccl/safe.rs`, `test_all_reduce_views` | 27 | 13 |
//! | `cudarc/single_thread` | `src/nccl/result.rs`, `single_thread` | 46 | 20 |
//! | `phalanx-candle/examples/train_ddp.rs` | `distributed/ddp-tutorial-series/multigpu.py` and `datautils.py` | 92 | 92 |
//!
//! Where a port does less or something else:
//!
//! - `rsmpi/all_gather`, `rsmpi/reduce`, `rsmpi/immediate_reduce`: the original does one step twice, with two kinds of datatypes or operations that are
//!   one kind here.
//! - `rsmpi/gather_varcount`: the counts are not known before.
//! - `rsmpi/immediate`: no request is cancelled, which phalanx cannot.
//! - `rsmpi/immediate_multiple_requests`: the last step, of increasing numbers, is done in all steps.
//! - `rsmpi/wait_any`: the pauses are a tenth as long.
//! - `nccl4py/allreduce`, `nccl4py/ring_pattern`: the buffers are smaller.
//! - `nccl4py/allreduce_basic`, `nccl4py/allreduce_ub`, `nccl4py/send_recv`: the originals start NCCL by MPI, and a port by any launcher.
//! - `train_ddp`: it learns digits and tests what it has learnt. The original learns random numbers, and saves a checkpoint.

mod cudarc;
mod nccl4py;
mod rsmpi;

use phalanx::{BackendKind, Comm};
use std::process::ExitCode;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// What a program needs.
#[derive(Clone, Copy)]
enum Program {
    /// Ranks, which exchange host memory.
    Host(fn(&Comm) -> phalanx::Result<()>),
    /// Ranks, each with a GPU.
    Gpu(fn(&Comm) -> phalanx::Result<()>),
    /// All GPUs of this machine. It makes its communicators itself.
    AllGpus(fn() -> phalanx::Result<()>),
}

use Program::{AllGpus, Gpu, Host};

const PROGRAMS: &[(&str, Program)] = &[
    ("rsmpi/all_gather", Host(rsmpi::all_gather::run)),
    ("rsmpi/all_to_all", Host(rsmpi::all_to_all::run)),
    ("rsmpi/barrier", Host(rsmpi::barrier::run)),
    ("rsmpi/broadcast", Host(rsmpi::broadcast::run)),
    ("rsmpi/cartesian", Host(rsmpi::cartesian::run)),
    ("rsmpi/comm_name", Host(rsmpi::comm_name::run)),
    ("rsmpi/complex_datatype", Host(rsmpi::complex_datatype::run)),
    ("rsmpi/duplicate", Host(rsmpi::duplicate::run)),
    ("rsmpi/gather_varcount", Host(rsmpi::gather_varcount::run)),
    ("rsmpi/group", Host(rsmpi::group::run)),
    ("rsmpi/immediate", Host(rsmpi::immediate::run)),
    ("rsmpi/immediate_multiple_requests", Host(rsmpi::immediate_multiple_requests::run)),
    ("rsmpi/immediate_reduce", Host(rsmpi::immediate_reduce::run)),
    ("rsmpi/readme", Host(rsmpi::readme::run)),
    ("rsmpi/ready_send", Host(rsmpi::ready_send::run)),
    ("rsmpi/reduce", Host(rsmpi::reduce::run)),
    ("rsmpi/scan", Host(rsmpi::scan::run)),
    ("rsmpi/scatter_varcount", Host(rsmpi::scatter_varcount::run)),
    ("rsmpi/send_receive", Host(rsmpi::send_receive::run)),
    ("rsmpi/split", Host(rsmpi::split::run)),
    ("rsmpi/vector", Host(rsmpi::vector::run)),
    ("rsmpi/wait_any", Host(rsmpi::wait_any::run)),
    ("nccl4py/allreduce", AllGpus(nccl4py::allreduce::run)),
    ("nccl4py/allreduce_basic", Gpu(nccl4py::allreduce_basic::run)),
    ("nccl4py/allreduce_ub", Gpu(nccl4py::allreduce_ub::run)),
    ("nccl4py/multiple_devices_single_process", AllGpus(nccl4py::multiple_devices_single_process::run)),
    ("nccl4py/ring_pattern", AllGpus(nccl4py::ring_pattern::run)),
    ("nccl4py/send_recv", Gpu(nccl4py::send_recv::run)),
    ("cudarc/all_reduce", AllGpus(cudarc::all_reduce::run)),
    ("cudarc/all_reduce_views", AllGpus(cudarc::all_reduce_views::run)),
    ("cudarc/single_thread", AllGpus(cudarc::single_thread::run)),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [name] => port(name, "2"),
        [name, ranks] => port(name, ranks),
        _ => Err(usage()),
    };
    if let Err(error) = result {
        eprintln!("ported: {error}");
        return ExitCode::FAILURE;
    }
    println!("{} passed", arguments[0]);
    ExitCode::SUCCESS
}

fn usage() -> Box<dyn std::error::Error + Send + Sync> {
    let names: Vec<&str> = PROGRAMS.iter().map(|(name, _)| *name).collect();
    format!("usage: ported PROGRAM [RANKS], where PROGRAM is one of\n  {}", names.join("\n  ")).into()
}

/// Runs a program as this rank, under a launcher, or else as so many ranks, which are threads.
fn port(name: &str, ranks: &str) -> Result<()> {
    let program = PROGRAMS.iter().find(|(known, _)| *known == name);
    let ranks = ranks.parse().map_err(|error| format!("the number of ranks: {ranks:?}: {error}"))?;
    let choice = phalanx::choose()?;
    let (backend, program) = match program.ok_or_else(usage)?.1 {
        AllGpus(program) => return Ok(program()?),
        Gpu(program) => (BackendKind::Nccl, program),
        // Messages from any rank are there on the host and on MPI.
        Host(program) if choice.backend == BackendKind::Mpi => (BackendKind::Mpi, program),
        Host(program) => (BackendKind::Host, program),
    };
    let one_rank = |comm: Comm| -> Result<()> {
        program(&comm)?;
        Ok(comm.finalize()?)
    };
    let builder = Comm::builder().backend(backend);
    if choice.launcher.is_some() {
        return one_rank(builder.init()?);
    }
    builder.try_run(ranks, one_rank).map(drop)
}
