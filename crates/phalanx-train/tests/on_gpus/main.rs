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
mod matrices;
#[cfg(target_os = "linux")]
mod missing;
#[cfg(target_os = "linux")]
mod same;
#[cfg(target_os = "linux")]
mod state;
#[cfg(target_os = "linux")]
mod transformer;
#[cfg(target_os = "linux")]
mod world;

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

use libtest_mimic::Arguments;
use std::process::ExitCode;

/// What a rank does by itself: one is enough.
#[cfg(target_os = "linux")]
const ALONE: &[&str] = &["elements", "optimizers", "squares", "merged", "products", "muon"];

#[cfg(target_os = "linux")]
fn main() -> ExitCode {
    let scenarios = [
        arithmetic::SCENARIOS,
        asynchronous::SCENARIOS,
        chains::SCENARIOS,
        gradients::SCENARIOS,
        layers::SCENARIOS,
        matrices::SCENARIOS,
        state::SCENARIOS,
        transformer::SCENARIOS,
    ]
    .concat();
    if let Some(code) = phalanx_testkit::processes::serve(
        &[&scenarios[..], missing::SCENARIOS, &[transformer::LARGE_SCENARIO]].concat(),
    ) {
        return code;
    }
    let mut args = Arguments::from_args();
    // The trials share the GPUs.
    args.test_threads = Some(1);
    let gpus = match world::gpus() {
        Ok(gpus) => gpus,
        Err(code) => return code,
    };
    // By default, two processes for each scenario.
    let (shares, slow) = (&[("/transformer/", 6), ("/1", 4), ("/4", 2), ("threads/", 2)], &["/transformer/"]);
    let of_products = [matrices::SCENARIOS, transformer::SCENARIOS].concat();
    let mut trials = world::trials(&scenarios, ALONE, &of_products, gpus);
    trials.extend([missing::trial(), transformer::large(gpus)]);
    phalanx_testkit::suite::run(&args, trials, shares, slow)
}

#[cfg(not(target_os = "linux"))]
fn main() -> ExitCode {
    libtest_mimic::run(&Arguments::from_args(), Vec::new()).exit_code()
}
