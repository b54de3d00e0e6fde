//! The contract: what every operation delivers, for every type and reduction, 1 to 8 ranks (and some of more)
//! as threads and as processes, private and shared buffers, in place and out of place, compared with plain
//! references.
//!
//! `cargo test -p phalanx-testkit --test contract -- <part of a name>` runs a part of it.

mod any_source;
mod awaiting;
mod buffers;
#[cfg(target_os = "linux")]
mod calls;
mod communicators;
#[cfg(target_os = "linux")]
mod cuda;
mod extremes;
mod files;
mod float_modes;
mod jobs;
mod matrix;
mod members;
mod messages;
mod mpi;
#[cfg(target_os = "linux")]
mod nccl;
#[cfg(target_os = "linux")]
mod nvshmem;
mod objects;
mod one_sided;
mod operations;
mod peers;
mod plain;
mod portable;
mod prepared;
mod programs;
mod requests;
mod rounds;
mod scans;
mod topologies;
#[cfg(target_os = "linux")]
mod ucx;
mod values;
mod vectors;
mod world;

use libtest_mimic::{Arguments, Trial};
use phalanx_testkit::processes;
use phalanx_testkit::suite::{self, Share};
use std::process::ExitCode;

/// How much of the suite a sample is. The variants of an operation are data types, numbers of ranks, or MPIs. CI runs half of
/// the other trials, and a contributor each scenario once, as threads or as processes.
const SHARES: &[Share] = &[
    ("threads/all_reduce/", 12),
    ("threads/reduce/", 12),
    ("threads/reduce_scatter/", 12),
    ("processes/all_reduce/", 12),
    ("processes/reduce/", 12),
    ("processes/reduce_scatter/", 12),
    ("processes/all_gather/", 4),
    ("processes/all_to_all/", 4),
    ("processes/broadcast/", 4),
    ("processes/gather/", 4),
    ("processes/scatter/", 4),
    ("mpi/", 20),
    ("nccl/", 16),
    ("nvshmem/", 12),
    ("ucx/", 16),
    ("_v/", 4),
    ("/programs/", 2),
    ("/rounds/", 2),
    ("threads/", 2),
    ("processes/", 2),
];

/// What computes for seconds, or waits for deadlines.
const SLOW: &[&str] = &[
    "communicators/cycles",
    "communicators/interleaved",
    "communicators/on_threads_at_once",
    "communicators/worlds_of_threads",
    "cuda/late_stream",
    "deadline_of_a_collective",
    "dropped_with_a_receive",
    "extremes/huge_buffers",
    "extremes/many_ranks",
    "files/arrays",
    "float_modes/reductions",
    "matrix_on_gpu",
    "messages/every_type",
    "met_by_plain_calls",
    "mpi/mpich/checked/",
    "nccl/processes/matrix",
    "nvshmem/communicators",
    "nvshmem/matrix",
    "nvshmem/vectors",
    "objects/not_serialized",
    "pieces/",
    "portable/barrier_waits",
    "portable_of_two",
    "processes/all_reduce/",
    "processes/reduce/",
    "processes/reduce_scatter/",
    "requests/every_type",
    "rounds/cells",
    "rounds/uneven",
    "scans/closures_of_long_elements",
    "scans/numbers",
    "threads/all_reduce/u",
    "threads/reduce/",
    "threads/reduce_scatter/",
    "ucx/processes/matrix",
    "mpi/open_mpi/checked",
    "plain/pages",
    "programs/long_blocks",
    "reduce_scatter_v/4",
    "threads/all_reduce/f64",
];

fn main() -> ExitCode {
    let scenarios = [
        matrix::SCENARIOS,
        vectors::SCENARIOS,
        plain::SCENARIOS,
        plain::COMPARED,
        scans::SCENARIOS,
        operations::SCENARIOS,
        operations::COMPARED,
        any_source::SCENARIOS,
        any_source::SURVIVED,
        members::SCENARIOS,
        members::SURVIVED,
        peers::SCENARIOS,
        messages::SCENARIOS,
        requests::SCENARIOS,
        requests::AMONG_MESSAGES,
        prepared::SCENARIOS,
        communicators::SCENARIOS,
        communicators::MEASURED,
        programs::SCENARIOS,
        portable::SCENARIOS,
        portable::BOUNDED,
        extremes::SCENARIOS,
        float_modes::SCENARIOS,
        rounds::SCENARIOS,
        objects::SCENARIOS,
        awaiting::SCENARIOS,
        awaiting::FAILING,
        values::SCENARIOS,
        topologies::SCENARIOS,
        jobs::SCENARIOS,
        one_sided::SCENARIOS,
        one_sided::SHARED,
        files::SCENARIOS,
        one_sided::COMPARED,
        #[cfg(target_os = "linux")]
        calls::SCENARIOS,
        #[cfg(target_os = "linux")]
        cuda::SCENARIOS,
        #[cfg(target_os = "linux")]
        ucx::SCENARIOS,
    ];
    if let Some(code) = processes::serve(&scenarios.concat()) {
        return code;
    }
    let mut args = Arguments::from_args();
    // A world of eight ranks needs the whole machine; several at once only disturb each other.
    args.test_threads.get_or_insert(1);
    let trials = [
        matrix::trials(),
        vectors::trials(),
        plain::trials(),
        scans::trials(),
        operations::trials(),
        any_source::trials(),
        members::trials(),
        peers::trials(),
        messages::trials(),
        requests::trials(),
        prepared::trials(),
        communicators::trials(),
        programs::trials(),
        portable::trials(),
        extremes::trials(),
        float_modes::trials(),
        rounds::trials(),
        objects::trials(),
        awaiting::trials(),
        values::trials(),
        topologies::trials(),
        one_sided::trials(),
        files::trials(),
        mpi::trials(),
        on_gpus(),
        jobs::trials(),
    ];
    suite::run(&args, trials.into_iter().flatten().collect(), SHARES, SLOW)
}

/// With GPUs, real or emulated, and between hosts.
#[cfg(target_os = "linux")]
fn on_gpus() -> Vec<Trial> {
    [nccl::trials(), nvshmem::trials(), cuda::trials(), ucx::trials(), calls::trials()]
        .into_iter()
        .flatten()
        .collect()
}

#[cfg(not(target_os = "linux"))]
fn on_gpus() -> Vec<Trial> {
    let ignored = |name| suite::ignored(name, "for Linux");
    ["nccl", "nvshmem", "cuda", "ucx", "calls"].map(ignored).into()
}
