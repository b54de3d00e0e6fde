//! The emulated CUDA driver and NCCL: what tests of the library rely on is tested here.
//!
//! Every trial is one or more processes of this program that find the emulator by the loader's path. They use the
//! driver through cudarc, and NCCL through a small table of its functions.

#[cfg(target_os = "linux")]
mod capture;
#[cfg(target_os = "linux")]
mod child;
#[cfg(target_os = "linux")]
mod communicators;
#[cfg(target_os = "linux")]
mod cuda;
#[cfg(target_os = "linux")]
mod failures;
#[cfg(target_os = "linux")]
mod matrix;
#[cfg(target_os = "linux")]
mod nccl;
#[cfg(target_os = "linux")]
mod operations;
#[cfg(target_os = "linux")]
mod violations;
#[cfg(target_os = "linux")]
mod world;

use libtest_mimic::{Arguments, Trial};
use std::process::ExitCode;

#[cfg(target_os = "linux")]
fn main() -> ExitCode {
    let scenarios = [
        cuda::SCENARIOS,
        capture::SCENARIOS,
        matrix::SCENARIOS,
        operations::SCENARIOS,
        communicators::SCENARIOS,
        failures::SCENARIOS,
        violations::SCENARIOS,
    ];
    if let Some(code) = phalanx_testkit::processes::serve(&scenarios.concat()) {
        return code;
    }
    let trials = [
        cuda::trials(),
        capture::trials(),
        matrix::trials(),
        operations::trials(),
        communicators::trials(),
        failures::trials(),
        violations::trials(),
    ];
    run(trials.into_iter().flatten().collect())
}

#[cfg(not(target_os = "linux"))]
fn main() -> ExitCode {
    run(Vec::new())
}

fn run(trials: Vec<Trial>) -> ExitCode {
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
