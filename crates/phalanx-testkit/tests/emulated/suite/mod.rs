//! The trials, by what they are about.

mod capture;
mod child;
mod communicators;
mod cuda;
mod ending;
mod failures;
mod ipc;
mod matrix;
mod nccl;
mod operations;
mod violations;
mod world;

use libtest_mimic::Arguments;
use phalanx_testkit::processes;
use phalanx_testkit::suite::{self, Share};
use std::process::ExitCode;

/// How much of the suite a sample is.
const SHARES: &[Share] = &[("matrix/", 4)];

/// Runs the trials, or a scenario of one.
pub fn main() -> ExitCode {
    let scenarios = [
        cuda::SCENARIOS,
        capture::SCENARIOS,
        matrix::SCENARIOS,
        operations::SCENARIOS,
        communicators::SCENARIOS,
        ending::SCENARIOS,
        failures::SCENARIOS,
        ipc::SCENARIOS,
        violations::SCENARIOS,
    ];
    if let Some(code) = processes::serve(&scenarios.concat()) {
        return code;
    }
    let trials = [
        cuda::trials(),
        capture::trials(),
        matrix::trials(),
        operations::trials(),
        communicators::trials(),
        ending::trials(),
        failures::trials(),
        ipc::trials(),
        violations::trials(),
    ];
    suite::run(&Arguments::from_args(), trials.into_iter().flatten().collect(), SHARES, &[])
}
