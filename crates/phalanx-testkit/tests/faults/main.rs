//! What happens when something goes wrong: ranks that die, stop, panic, leave or do something else than the
//! others; wrong arguments, wrong environments and small limits. Never a hang, never silence, and the same
//! verdict on every rank.
//!
//! `cargo test -p phalanx-testkit --test faults -- <part of a name>` runs a part of it.

mod common;
mod environment;
mod gone;
mod leaks;
mod limits;
mod mismatch;
mod usage;

use libtest_mimic::Arguments;
use phalanx_testkit::processes;
use std::process::ExitCode;

fn main() -> ExitCode {
    let scenarios = [
        gone::SCENARIOS,
        mismatch::SCENARIOS,
        usage::SCENARIOS,
        environment::SCENARIOS,
        limits::SCENARIOS,
        leaks::SCENARIOS,
    ];
    if let Some(code) = processes::serve(&scenarios.concat()) {
        return code;
    }
    let mut args = Arguments::from_args();
    // Deadlines are measured: trials must not take the cores from one another.
    args.test_threads.get_or_insert(1);
    let trials = [
        gone::trials(),
        mismatch::trials(),
        usage::trials(),
        environment::trials(),
        limits::trials(),
        leaks::trials(),
    ];
    libtest_mimic::run(&args, trials.into_iter().flatten().collect()).exit_code()
}
