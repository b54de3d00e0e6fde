//! The GPU suite on RCCL and HIP: ranks as threads and as processes, one AMD GPU each.
//!
//! It runs on the machine's GPUs, as many as four. Without any it runs, in a process of its own, on the
//! emulated HIP and RCCL of the test kit, which are loaded in the same way. What RCCL shares with NCCL is
//! tested by the same scenarios.
//!
//! Beside that, the real RCCL is asked what it answers without a GPU (`real.rs`).

#[path = "../gpu/collectives.rs"]
mod collectives;
#[path = "../gpu/failures.rs"]
mod failures;
mod flavour;
#[path = "../gpu/halos.rs"]
mod halos;
mod memory;
#[path = "../gpu/messages.rs"]
mod messages;
mod own;
#[path = "../gpu/placing.rs"]
mod placing;
mod real;
mod refused;
mod versions;
#[path = "../gpu/watchdog.rs"]
mod watchdog;
#[path = "../gpu/world.rs"]
mod world;

use libtest_mimic::Arguments;
use phalanx_testkit::processes;
use phalanx_testkit::suite::{self, Share};
use std::process::ExitCode;

/// How much of the suite a sample is: what computes much on emulated GPUs, or waits for a deadline. CI runs most
/// scenarios twice, as threads and as processes, and a contributor once.
const SHARES: &[Share] = &[
    ("/300007", 4),
    ("threads/absent", 4),
    ("nobody_waits", 3),
    ("missing", 3),
    ("held_inside", 3),
    ("mismatch", 3),
    ("threads/", 2),
    ("processes/", 2),
];

/// What waits for deadlines of several seconds.
const SLOW: &[&str] = &[
    "absent_in_a_group",
    "nobody_waits",
    "processes/reductions",
    "stopped_together",
    "threads/mismatch",
    "held_inside/error_stream",
    "threads/in_place",
    "threads/reductions",
];

fn main() -> ExitCode {
    let scenarios = [
        collectives::SCENARIOS,
        messages::SCENARIOS,
        failures::SCENARIOS,
        halos::SCENARIOS,
        watchdog::SCENARIOS,
        memory::SCENARIOS,
        own::SCENARIOS,
        placing::SCENARIOS,
        versions::SCENARIOS,
        refused::SCENARIOS,
    ];
    if let Some(code) = processes::serve(&scenarios.concat()) {
        return code;
    }
    if std::env::args().nth(1).as_deref() == Some(real::PROBE) {
        return real::probe();
    }
    let mut args = Arguments::from_args();
    // The trials share the GPUs, and some of them stop or kill ranks.
    args.test_threads = Some(1);
    let gpus = match world::gpus() {
        Ok(gpus) => gpus,
        Err(code) => return code,
    };
    let modules = [
        collectives::trials,
        messages::trials,
        failures::trials,
        halos::trials,
        watchdog::trials,
        memory::trials,
        own::trials,
        placing::trials,
    ];
    let mut trials: Vec<_> = modules.into_iter().flat_map(|trials| trials(gpus)).collect();
    trials.extend(versions::trials());
    trials.extend(refused::trials());
    trials.extend(real::trials());
    suite::run(&args, trials, SHARES, SLOW)
}
