//! The contract on NCCL, in host memory: the same scenarios with a GPU for each rank, on the machine's GPUs (where NCCL is missing, they
//! fail), or without enough of them on emulated ones. (Collectives on GPU memory are the GPU suite's.)
//!
//! What is not here, because NCCL does not have it: tags, results in rank order (so inputs are such that any order is
//! right), reductions of 16-bit integers, averages of integers whose sum overflows, a NaN that a smallest or largest is made of, communicators of one GPU that several
//! threads use at once (their operations would wait for each other in different orders), a barrier between a receive and the send
//! that it waits for (all operations are carried out in the order of the calls). The portable trait takes
//! addresses of GPU memory, and is tested there.

use crate::mpi::MATRIX;
use crate::{communicators, messages, requests, vectors};
use libtest_mimic::{Failed, Trial};
use phalanx_testkit::emulated::Emulated;
use phalanx_testkit::processes::Launch;
use phalanx_testkit::random::{ANY_ORDER, NO_NAN};
use phalanx_testkit::{Scenario, gpus};
use std::time::Duration;

const DEADLINE: Duration = Duration::from_secs(240);

/// Ranks of a world: every operation has two sides, and a machine with GPUs often has two.
const RANKS: usize = 2;

/// Scenarios that one world performs.
type Group = (&'static str, fn() -> Launch);

const GROUPS: [Group; 7] = [
    ("matrix", || of(MATRIX.into_iter().map(|operation| ("matrix", operation)))),
    ("vectors", || all(vectors::SCENARIOS)),
    ("messages", || all(messages::SCENARIOS)),
    ("requests", || all(requests::SCENARIOS)),
    ("requests_among_messages", || all(requests::AMONG_MESSAGES)),
    ("communicators", || all(communicators::SCENARIOS)),
    ("programs", || of([("programs/short_blocks", "1"), ("programs/long_blocks", "2")].into_iter())),
];

fn of(scenarios: impl Iterator<Item = (&'static str, &'static str)>) -> Launch {
    let launch = scenarios.fold(None, |launch: Option<Launch>, (name, arg)| {
        let launch = launch.map_or_else(|| Launch::new(name, RANKS), |launch| launch.then(name));
        Some(launch.arg(arg))
    });
    launch
        .expect("every group has scenarios")
        .deadline(DEADLINE)
        .on_gpus()
        .env("PHALANX_BACKEND", "nccl")
        .env(ANY_ORDER, "1")
        .env(NO_NAN, "1")
}

const NOT_PROMISED: [&str; 3] =
    ["messages/tags", "communicators/on_threads_at_once", "requests/behind_a_barrier"];

fn all(scenarios: &'static [Scenario]) -> Launch {
    let promised = scenarios.iter().filter(|scenario| !NOT_PROMISED.contains(&scenario.name));
    of(promised.map(|scenario| (scenario.name, "")))
}

pub fn trials() -> Vec<Trial> {
    GROUPS
        .iter()
        .map(|(name, launch)| {
            let name = format!("nccl/{name}/{RANKS}");
            if !cfg!(target_os = "linux") {
                return Trial::test(name, || Ok(())).with_ignored_flag(true).with_kind("for Linux");
            }
            Trial::test(name, move || perform(&launch()))
        })
        .collect()
}

fn perform(launch: &Launch) -> Result<(), Failed> {
    if let Some(gpus) = gpus::count().ok().filter(|gpus| *gpus >= RANKS) {
        // Nobody would notice that it ran on others.
        phalanx::nccl::version().map_err(|error| format!("{gpus} GPUs that NCCL cannot use: {error}"))?;
        return Ok(launch.reports().map(drop)?);
    }
    // The folder of the libraries is needed until the ranks have ended.
    let emulated = Emulated::new()?;
    Ok(emulated.launch(launch.clone()).reports().map(drop)?)
}
