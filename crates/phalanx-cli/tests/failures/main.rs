//! Tests of what `phalanx launch` does when a rank fails, or cannot be started: which rank it names, what is written before the others are
//! ended, how they go on, what the system refused. The ranks are this program, started again; their faults are real.

#[path = "../common/mod.rs"]
mod common;
#[cfg(target_os = "linux")]
mod metrics;
#[cfg(target_os = "linux")]
mod naming;
#[cfg(target_os = "linux")]
mod rank;
#[cfg(target_os = "linux")]
mod records;
#[cfg(target_os = "linux")]
mod refusals;
#[cfg(target_os = "linux")]
mod surviving;

use libtest_mimic::Arguments;
use std::process::ExitCode;

#[cfg(target_os = "linux")]
fn main() -> ExitCode {
    if let Some(code) = rank::serve() {
        return code;
    }
    let args = Arguments::from_args();
    let trials =
        [metrics::trials(), naming::trials(), records::trials(), refusals::trials(), surviving::trials()];
    libtest_mimic::run(&args, trials.into_iter().flatten().collect()).exit_code()
}

#[cfg(not(target_os = "linux"))]
fn main() -> ExitCode {
    libtest_mimic::run(&Arguments::from_args(), Vec::new()).exit_code()
}
