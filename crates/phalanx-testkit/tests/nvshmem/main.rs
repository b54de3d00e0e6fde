//! The NVSHMEM suite: processes as PEs, one GPU each.
//!
//! It runs on the machine's GPUs, as many as four. Without any it runs, in a process of its own, on the
//! emulated CUDA driver and NVSHMEM of the test kit, which are loaded in the same way; some trials need what
//! only the emulator can be told. `library.rs` has those of NVIDIA's own library on a machine without a GPU.

#[cfg(target_os = "linux")]
mod atomics;
#[cfg(target_os = "linux")]
mod backend;
#[cfg(target_os = "linux")]
mod collectives;
#[cfg(target_os = "linux")]
mod failures;
#[cfg(target_os = "linux")]
mod front;
#[cfg(target_os = "linux")]
mod kernels;
#[cfg(target_os = "linux")]
mod library;
#[cfg(target_os = "linux")]
mod lifecycle;
#[cfg(target_os = "linux")]
mod memory;
#[cfg(target_os = "linux")]
mod mpirun;
#[cfg(target_os = "linux")]
mod one_sided;
#[cfg(target_os = "linux")]
mod signals;
#[cfg(target_os = "linux")]
mod teams;
#[cfg(target_os = "linux")]
mod world;

use std::process::ExitCode;

#[cfg(not(target_os = "linux"))]
fn main() -> ExitCode {
    eprintln!("not run: NVSHMEM is for Linux");
    ExitCode::SUCCESS
}

/// How much of the suite a sample is: what computes much on emulated GPUs, or waits for a deadline.
#[cfg(target_os = "linux")]
const SHARES: &[phalanx_testkit::suite::Share] = &[
    ("one_sided/strided", 8),
    ("one_sided/large", 4),
    ("collectives/reductions", 8),
    ("collectives/of_a_part", 2),
    ("backend/", 8),
    ("failures/init", 3),
    ("library/", 1),
    ("mpirun/", 1),
];

/// What takes seconds on emulated GPUs.
#[cfg(target_os = "linux")]
const SLOW: &[&str] = &[
    "backend/parts",
    "backend/stopped_before_a_message",
    "backend/symmetric_memory",
    "collectives/movements",
    "collectives/of_a_part",
    "of_a_stuck_stream",
    "one_sided/gets",
    "one_sided/puts",
    "beside_a_stuck_stream",
    "signals/host",
];

#[cfg(target_os = "linux")]
fn main() -> ExitCode {
    use libtest_mimic::Arguments;
    use phalanx_testkit::emulated::Emulated;
    use phalanx_testkit::processes;
    use phalanx_testkit::suite;

    let common = [
        lifecycle::SCENARIOS,
        memory::SCENARIOS,
        one_sided::SCENARIOS,
        signals::SCENARIOS,
        atomics::SCENARIOS,
        teams::SCENARIOS,
        collectives::SCENARIOS,
        front::SCENARIOS,
    ];
    let others = [
        backend::SCENARIOS,
        backend::OTHERS,
        failures::SCENARIOS,
        kernels::SCENARIOS,
        library::SCENARIOS,
        mpirun::SCENARIOS,
    ];
    let scenarios = [common.concat(), others.concat()].concat();
    if let Some(code) = processes::serve(&scenarios) {
        return code;
    }
    let mut args = Arguments::from_args();
    // The trials share the GPUs, and some of them kill PEs.
    args.test_threads = Some(1);
    let gpus = match world::gpus() {
        Ok(gpus) => gpus,
        Err(reason) if world::are_emulated() => {
            eprintln!("not even emulated GPUs: {reason}");
            return ExitCode::FAILURE;
        }
        Err(reason) => {
            eprintln!("no GPUs ({reason}): the trials run on emulated ones");
            // NVIDIA's own library is not to be found where the emulated one is.
            let native = suite::run(&args, library::trials(), SHARES, &[]);
            let status = Emulated::new().and_then(|emulated| {
                let mut command = emulated.command(std::env::current_exe()?);
                // The folder of the libraries goes with `emulated`, after the process has ended.
                command.args(std::env::args_os().skip(1)).env(world::EMULATED, emulated.folder()).status()
            });
            return match status {
                Ok(status) if status.success() => native,
                outcome => {
                    eprintln!("on emulated GPUs: {outcome:?}");
                    ExitCode::FAILURE
                }
            };
        }
    };
    let mut trials: Vec<_> =
        common.concat().into_iter().map(|scenario| world::trial(scenario, gpus)).collect();
    if processes::ranks_per_gpu() > 1 {
        // NCCL, which it needs, too, may not let processes share.
        trials.retain(|trial| trial.name() != "front/nccl");
    }
    trials.extend(backend::trials(gpus, world::are_emulated()));
    trials.extend(failures::trials(gpus));
    trials.extend(kernels::trials(gpus));
    trials.extend(mpirun::trials(gpus));
    suite::run(&args, trials, SHARES, SLOW)
}
