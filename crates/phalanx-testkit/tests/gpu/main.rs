//! The GPU suite: NCCL on GPU memory, with ranks as threads and as processes, one GPU each.
//!
//! It runs on the machine's GPUs, as many as four. Without any it reports its trials as ignored, with the reason.

mod collectives;
mod communicators;
mod failures;
mod memory;
mod messages;
mod streams;
mod world;

use libtest_mimic::Arguments;
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
    ];
    if let Some(code) = processes::serve(&scenarios.concat()) {
        return code;
    }
    let mut args = Arguments::from_args();
    // The trials share the GPUs, and some of them stop or kill ranks.
    args.test_threads = Some(1);
    let gpus = world::gpus();
    let mut trials = Vec::new();
    for module in [
        collectives::trials,
        messages::trials,
        communicators::trials,
        streams::trials,
        memory::trials,
        failures::trials,
    ] {
        trials.extend(module(gpus.clone().unwrap_or(0)));
    }
    if let Err(reason) = gpus {
        eprintln!("ignored: {reason}");
        trials = trials.into_iter().map(|trial| trial.with_ignored_flag(true)).collect();
    }
    libtest_mimic::run(&args, trials).exit_code()
}
