//! The GPU suite: NCCL on GPU memory, with ranks as threads and as processes, one GPU each.
//!
//! It runs on the machine's GPUs, as many as four. Without any it runs, in a process of its own, on the emulated CUDA
//! driver and NCCL of the test kit, which are loaded in the same way.

mod collectives;
mod communicators;
mod failures;
mod memory;
mod messages;
mod streams;
mod watchdog;
mod world;

use libtest_mimic::{Arguments, Trial};
use phalanx_testkit::emulated::Emulated;
use phalanx_testkit::processes;
use std::process::ExitCode;

fn main() -> ExitCode {
    let scenarios = [
        collectives::SCENARIOS,
        messages::SCENARIOS,
        communicators::SCENARIOS,
        streams::SCENARIOS,
        memory::SCENARIOS,
        failures::SCENARIOS,
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
        Err(reason) => return on_emulated_gpus(&reason),
    };
    let mut trials = Vec::new();
    for module in [
        collectives::trials,
        messages::trials,
        communicators::trials,
        streams::trials,
        memory::trials,
        failures::trials,
        watchdog::trials,
    ] {
        trials.extend(module(gpus));
    }
    if world::are_emulated() {
        // A world of four would need 8 GiB of this machine's memory, and minutes.
        let is_large = |trial: &Trial| trial.name().ends_with("/large");
        trials = trials
            .into_iter()
            .map(|trial| {
                let large = is_large(&trial);
                if large { trial.with_ignored_flag(true) } else { trial }
            })
            .collect();
    }
    libtest_mimic::run(&args, trials).exit_code()
}

/// Runs this program again, where it finds the emulated libraries.
fn on_emulated_gpus(reason: &str) -> ExitCode {
    if world::are_emulated() {
        eprintln!("not even emulated GPUs: {reason}");
        return ExitCode::FAILURE;
    }
    eprintln!("no GPUs ({reason}): the trials run on emulated ones");
    let status = Emulated::new().and_then(|emulated| {
        let mut command = emulated.command(std::env::current_exe()?);
        // The folder of the libraries goes with `emulated`, after the process has ended.
        command.args(std::env::args_os().skip(1)).env(world::EMULATED, "1").status()
    });
    match status {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(status) => {
            eprintln!("on emulated GPUs: {status}");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("the emulated libraries cannot be used: {error}");
            ExitCode::FAILURE
        }
    }
}
