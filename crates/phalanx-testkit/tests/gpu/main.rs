//! The GPU suite: NCCL on GPU memory, with ranks as threads and as processes, one GPU each.
//!
//! It runs on the machine's GPUs, as many as four; where NCCL is missing beside them it fails. Without any it
//! runs, in a process of its own, on the emulated CUDA driver and NCCL of the test kit, which are loaded in
//! the same way.

mod collectives;
mod communicators;
mod device_comm;
mod exits;
mod experts;
mod failures;
mod flavour;
mod freeing;
mod fused;
mod gpu_window_faults;
mod gpu_windows;
mod gpu_windows_on_hosts;
mod groups;
mod halos;
mod hosts;
mod init_all;
mod injected;
mod kept_errors;
mod linked;
mod memory;
mod messages;
mod mpirun;
mod nccl_failures;
mod own_kernels;
mod peers;
mod placing;
mod programs;
mod releases;
mod signals;
mod soak;
mod sockets;
mod streams;
mod usage;
mod watchdog;
mod world;

use libtest_mimic::{Arguments, Failed, Trial};
use phalanx_testkit::emulated::{EMULATED, Emulated, on_own_kernels};
use phalanx_testkit::faults::FORK;
use phalanx_testkit::processes::{self, Launch, ranks_per_gpu};
use phalanx_testkit::suite::Condition;
use phalanx_testkit::suite::{self, Share};
use std::process::ExitCode;

/// How much of the suite a sample is: what computes much on emulated GPUs, waits for a deadline, or starts
/// many processes. CI runs half of the other trials, and a contributor most scenarios once.
const SHARES: &[Share] = &[
    ("own_kernels/again/", 24),
    ("own_kernels/", 2),
    ("experts/", 2),
    ("halos/nccl/", 2),
    ("halos/l", 4),
    ("gpu_windows/hosts/", 4),
    ("gpu_windows/", 2),
    ("/300007", 4),
    ("mpirun/", 6),
    ("hosts/", 4),
    ("injected/", 4),
    ("device_comm_absent", 8),
    ("kept_error", 4),
    ("registrations", 4),
    ("group_in_flight", 4),
    ("cycles", 4),
    ("host_memory", 3),
    ("threads/mismatch", 3),
    ("threads/absent", 4),
    ("nobody_waits", 3),
    ("missing", 3),
    ("held_inside", 3),
    ("exits/", 3),
    ("programs/", 3),
    ("threads/", 2),
    ("processes/", 2),
    ("releases/", 1),
];

/// What waits for deadlines of several seconds.
const SLOW: &[&str] = &[
    "aborted_graph",
    "absent_at_alloc",
    "device_comm_absent",
    "experts/absent",
    "experts/repeated",
    "gpu_windows/hosts/absent",
    "gpu_windows/hosts/many",
    "gpu_windows/hosts/not_closed",
    "held_inside",
    "hosts/late",
    "hosts/stopped_for_less",
    "init_hangs",
    "at_once_on_one_rank",
    "kept_error",
    "launcher_goes_on",
    "launcher_names",
    "missing_at_init",
    "missing_signal",
    "mpirun/open_mpi/cycles",
    "nobody_waits",
    "own_kernels/long/",
    "own_kernels/memory_of_many",
    "own_kernels/soak",
    "own_kernels/synced",
    "processes/reductions",
    "registrations",
    "stopped_together",
    "threads/mismatch",
    "two_communicators",
    "fused/rows",
    "injected/ncclCommGetAsyncError",
    "own_kernels/shapes",
    "programs/phalanx perf",
    "releases/ids_by_size",
    "threads/reductions",
];

fn main() -> ExitCode {
    let scenarios = [
        collectives::SCENARIOS,
        messages::SCENARIOS,
        communicators::SCENARIOS,
        freeing::SCENARIOS,
        exits::SCENARIOS,
        experts::SCENARIOS,
        streams::SCENARIOS,
        groups::SCENARIOS,
        halos::SCENARIOS,
        memory::SCENARIOS,
        device_comm::SCENARIOS,
        kept_errors::SCENARIOS,
        init_all::SCENARIOS,
        failures::SCENARIOS,
        &[FORK],
        fused::SCENARIOS,
        gpu_window_faults::SCENARIOS,
        gpu_windows::SCENARIOS,
        gpu_windows_on_hosts::SCENARIOS,
        hosts::SCENARIOS,
        linked::SCENARIOS,
        mpirun::SCENARIOS,
        own_kernels::SCENARIOS,
        peers::SCENARIOS,
        placing::SCENARIOS,
        releases::SCENARIOS,
        signals::SCENARIOS,
        soak::SCENARIOS,
        usage::SCENARIOS,
        injected::SCENARIOS,
        watchdog::SCENARIOS,
    ];
    if let Some(code) = processes::serve(&scenarios.concat()) {
        return code;
    }
    let mut args = Arguments::from_args();
    // The trials share the GPUs, and some of them stop or kill ranks.
    args.test_threads = Some(1);
    let gpus = match world::gpus() {
        Ok(gpus) => gpus,
        Err(code) => return code,
    };
    let ranks = gpus * ranks_per_gpu();
    let mut trials = Vec::new();
    for module in [
        collectives::trials,
        messages::trials,
        communicators::trials,
        freeing::trials,
        exits::trials,
        streams::trials,
        groups::trials,
        halos::trials,
        memory::trials,
        device_comm::trials,
        kept_errors::trials,
        init_all::trials,
        failures::trials,
        nccl_failures::trials,
        sockets::trials,
        hosts::trials,
        mpirun::trials,
        programs::trials,
        watchdog::trials,
        releases::of_the_loaded_one,
        signals::trials,
        usage::trials,
    ] {
        trials.extend(module(ranks));
    }
    trials.extend(placing::trials(gpus));
    if ranks > gpus {
        trials = trials.into_iter().map(of_processes_only).collect();
    }
    let names: Vec<String> = own_kernels::OF_THE_SUITE
        .iter()
        .flat_map(|module| module(4))
        .filter(|trial| !trial.has_ignored_flag() && (ranks == gpus || is_of_processes(trial.name())))
        .map(|trial| trial.name().to_owned())
        .collect();
    // These have emulated GPUs of their own, whatever the machine has.
    match Emulated::new() {
        Ok(_) => {
            trials.extend(releases::trials().into_iter().chain(injected::trials()));
            trials.extend(device_comm::of_releases());
            trials.extend(kept_errors::emulated_trials());
            trials.extend(own_kernels::trials());
            trials.extend(linked::trials());
            trials.extend(fused::trials());
            trials.extend(gpu_windows::trials());
            trials.extend(gpu_window_faults::trials());
            trials.extend(gpu_windows_on_hosts::trials());
            trials.extend(peers::trials());
            trials.extend(experts::trials());
            trials.extend(halos_of_many());
            trials.extend(soak::trials());
            trials.extend(own_kernels::again(names.into_iter()));
            trials.push(Trial::test("missing_nccl", missing_nccl));
        }
        Err(why) => {
            let names = [
                "releases",
                "injected",
                "kept_errors",
                "own_kernels",
                "experts",
                "gpu_windows",
                "missing_nccl",
            ];
            let left_out = |name: &str| suite::ignored(name, why.to_string());
            trials.extend(names.map(left_out));
        }
    }
    if world::are_emulated() {
        // A world of four would need 8 GiB of this machine's memory, and minutes.
        let is_large = |trial: &Trial| trial.name().ends_with("/large");
        trials = trials
            .into_iter()
            .map(|trial| {
                let is_small = !is_large(&trial);
                trial.only_if(is_small, "emulated GPUs have no 8 GiB for it")
            })
            .collect();
    }
    suite::run(&args, trials, SHARES, SLOW)
}

/// Halos among more ranks than the suite's other worlds have, and by phalanx's own kernels.
fn halos_of_many() -> Vec<Trial> {
    const WORLDS: [(&str, &str, usize); 6] = [
        ("nccl", "threads", 8),
        ("nccl", "processes", 6),
        ("ll", "processes", 3),
        ("ll", "threads", 4),
        ("ll128", "threads", 6),
        ("ll128", "processes", 8),
    ];
    let trial = |(algorithm, kind, ranks): (&'static str, &str, usize)| {
        let on_threads = kind == "threads";
        let trial = Trial::test(format!("halos/{algorithm}/{kind}/{ranks}"), move || {
            let launch = Launch::new("halos/random", ranks).arg("2").deadline(world::DEADLINE);
            let launch = launch.env("PHALANX_BACKEND", "nccl");
            let launch = if on_threads { launch.on_threads() } else { launch };
            Ok(on_own_kernels(algorithm, ranks, launch).map(drop)?)
        });
        trial.only_if(!on_threads || ranks_per_gpu() == 1, "only processes share a GPU")
    };
    WORLDS.map(trial).into()
}

/// This suite, where the driver counts GPUs and NCCL is not to be had: it fails, says why, and runs nothing.
fn missing_nccl() -> Result<(), Failed> {
    let emulated = Emulated::new()?;
    let mut suite = emulated.command(std::env::current_exe()?);
    suite.args(["--list"]).env_remove(EMULATED).env("PHALANX_NCCL_LIB", "/nowhere/libnccl.so.2");
    let ended = suite.output()?;
    let (listed, told) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    let is_told = told.contains("GPUs that nccl cannot use") && told.contains("/nowhere/libnccl.so.2");
    if ended.status.success() || !listed.is_empty() || !is_told {
        return Err(format!("{}: {listed}{told}", ended.status).into());
    }
    Ok(())
}

/// Threads do not share a GPU.
fn of_processes_only(trial: Trial) -> Trial {
    let is_one = is_of_processes(trial.name());
    trial.only_if(is_one, "only processes share a GPU")
}

fn is_of_processes(name: &str) -> bool {
    let starts = ["processes/", "exits/", "sockets/", "hosts/", "mpirun/open_mpi/", "placing/"];
    starts.iter().any(|start| name.starts_with(start))
}
