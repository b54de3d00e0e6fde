//! The parts of training on GPU memory: the same bits as on the host, with ranks as threads and as processes, one GPU each.
//!
//! It runs on the machine's GPUs, as many as four; where NCCL is missing beside them it fails. Without any it runs, in a process of
//! its own, on the emulated ones of the test kit. It needs no file but itself where there are GPUs.

#[cfg(target_os = "linux")]
mod arithmetic;
#[cfg(target_os = "linux")]
mod asynchronous;
#[cfg(target_os = "linux")]
mod chains;
#[cfg(target_os = "linux")]
mod gradients;
#[cfg(target_os = "linux")]
mod layers;
#[cfg(target_os = "linux")]
mod same;
#[cfg(target_os = "linux")]
mod world;

use libtest_mimic::Arguments;
use std::process::ExitCode;

#[cfg(target_os = "linux")]
fn main() -> ExitCode {
    let together =
        [asynchronous::SCENARIOS, chains::SCENARIOS, gradients::SCENARIOS, layers::SCENARIOS].concat();
    let all = [arithmetic::SCENARIOS, &together].concat();
    if let Some(code) = phalanx_testkit::processes::serve(&all) {
        return code;
    }
    let mut args = Arguments::from_args();
    // The trials share the GPUs.
    args.test_threads = Some(1);
    let gpus = match world::gpus() {
        Ok(gpus) => gpus,
        Err(code) => return code,
    };
    let mut trials = world::trials(arithmetic::SCENARIOS, world::ALONE, gpus);
    trials.extend(world::trials(&together, world::TOGETHER, gpus));
    // Most are as right on threads as on processes.
    phalanx_testkit::suite::run(&args, trials, &[("threads/", 2), ("processes/", 2)], &[])
}

#[cfg(not(target_os = "linux"))]
fn main() -> ExitCode {
    libtest_mimic::run(&Arguments::from_args(), Vec::new()).exit_code()
}
