//! Ranks that are processes, and are killed: this program starts itself again, once for each rank.

#[cfg(target_os = "linux")]
mod checkpoint;
#[cfg(target_os = "linux")]
mod elastic;
#[cfg(target_os = "linux")]
mod replicas;

// The model of the test `transformer`.
#[cfg(target_os = "linux")]
#[path = "../transformer/math.rs"]
mod math;
#[cfg(target_os = "linux")]
#[path = "../transformer/model.rs"]
mod model;
#[cfg(target_os = "linux")]
#[path = "../transformer/train.rs"]
mod train;
#[cfg(target_os = "linux")]
mod transformer;

use libtest_mimic::Arguments;
use std::process::ExitCode;

#[cfg(target_os = "linux")]
fn main() -> ExitCode {
    let scenarios =
        [checkpoint::SCENARIOS, elastic::SCENARIOS, replicas::SCENARIOS, transformer::SCENARIOS].concat();
    if let Some(code) = phalanx_testkit::processes::serve(&scenarios) {
        return code;
    }
    let trials = [checkpoint::trials(), elastic::trials(), replicas::trials(), transformer::trials()];
    libtest_mimic::run(&Arguments::from_args(), trials.into_iter().flatten().collect()).exit_code()
}

#[cfg(not(target_os = "linux"))]
fn main() -> ExitCode {
    libtest_mimic::run(&Arguments::from_args(), Vec::new()).exit_code()
}
