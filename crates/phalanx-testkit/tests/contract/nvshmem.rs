//! The contract on NVSHMEM, in host memory: the same scenarios with a process and a GPU for each rank, on the
//! machine's GPUs, or else on emulated ones; halos and the portable trait are on GPU memory, too. (Other
//! operations on GPU memory are the NVSHMEM suite's.)
//!
//! What is not here, because it is not promised: results in rank order (so inputs are such that any order is
//! right), a NaN that a smallest or largest is made of, communicators of one GPU that several threads use at
//! once (they share what other memory goes through).

use crate::mpi::MATRIX;
use crate::{
    awaiting, communicators, members, messages, objects, one_sided, operations, plain, portable, prepared,
    requests, scans, topologies, values, vectors,
};
use libtest_mimic::{Failed, Trial};
use phalanx_testkit::Scenario;
use phalanx_testkit::emulated::Emulated;
use phalanx_testkit::processes::Launch;
use phalanx_testkit::random::{ANY_ORDER, NO_NAN};
use std::time::Duration;

const DEADLINE: Duration = Duration::from_secs(240);

/// Scenarios that one world of so many ranks performs.
type Group = (&'static str, usize, fn(usize) -> Launch);

const GROUPS: [Group; 18] = [
    ("matrix", 2, |ranks| of(ranks, MATRIX.into_iter().map(|operation| ("matrix", operation)))),
    ("vectors", 2, |ranks| all(ranks, vectors::SCENARIOS)),
    ("vectors", 3, |ranks| all(ranks, vectors::SCENARIOS)),
    ("plain", 3, |ranks| all(ranks, plain::SCENARIOS)),
    ("scans", 3, |ranks| of(ranks, [scans::SCENARIOS, operations::SCENARIOS].into_iter().flat_map(promised))),
    ("messages", 2, |ranks| all(ranks, messages::SCENARIOS)),
    ("requests", 2, |ranks| all(ranks, requests::SCENARIOS)),
    ("requests", 3, |ranks| all(ranks, requests::AMONG_MESSAGES)),
    ("communicators", 2, |ranks| all(ranks, communicators::SCENARIOS)),
    ("communicators", 4, |ranks| {
        of(ranks, [communicators::SCENARIOS, members::SCENARIOS].into_iter().flat_map(promised))
    }),
    ("objects", 3, |ranks| {
        let all = [
            objects::SCENARIOS,
            values::SCENARIOS,
            topologies::SCENARIOS,
            awaiting::SCENARIOS,
            prepared::SCENARIOS,
        ];
        of(ranks, all.into_iter().flat_map(promised))
    }),
    // Of two PEs also on machines with as many GPUs.
    ("one_sided", 2, one_sided),
    ("one_sided", 3, one_sided),
    ("halos_on_gpu", 3, |ranks| of(ranks, [("cuda/halos", "")].into_iter())),
    ("portable", 2, |ranks| all(ranks, portable::SCENARIOS)),
    ("portable", 3, |ranks| all(ranks, portable::SCENARIOS)),
    ("programs", 2, |ranks| {
        of(ranks, [("programs/short_blocks", "1"), ("programs/long_blocks", "2")].into_iter())
    }),
    // Everything in pieces of a few thousand bytes, of which so few are under way that a long message has to
    // be waited for.
    ("pieces", 3, |ranks| {
        let programs = [("programs/short_blocks", "3"), ("programs/long_blocks", "4")].into_iter();
        let messages = promised(messages::SCENARIOS).filter(|(name, _)| *name != "messages/tags");
        of(
            ranks,
            programs.chain(promised(vectors::SCENARIOS)).chain(promised(plain::SCENARIOS)).chain(messages),
        )
        .env("PHALANX_NVSHMEM_STAGE", "32768")
    }),
];

fn of(ranks: usize, scenarios: impl Iterator<Item = (&'static str, &'static str)>) -> Launch {
    let launch = scenarios.fold(None, |launch: Option<Launch>, (name, arg)| {
        let launch = launch.map_or_else(|| Launch::new(name, ranks), |launch| launch.then(name));
        Some(launch.arg(arg))
    });
    launch
        .expect("every group has scenarios")
        .deadline(DEADLINE)
        .on_gpus()
        .env("PHALANX_BACKEND", "nvshmem")
        .env(ANY_ORDER, "1")
        .env(NO_NAN, "1")
}

fn one_sided(ranks: usize) -> Launch {
    of(ranks, [one_sided::SCENARIOS, one_sided::SHARED].into_iter().flat_map(promised))
}

const NOT_PROMISED: &str = "communicators/on_threads_at_once";

fn promised(scenarios: &'static [Scenario]) -> impl Iterator<Item = (&'static str, &'static str)> {
    scenarios.iter().filter(|scenario| scenario.name != NOT_PROMISED).map(|scenario| (scenario.name, ""))
}

fn all(ranks: usize, scenarios: &'static [Scenario]) -> Launch {
    of(ranks, promised(scenarios))
}

pub fn trials() -> Vec<Trial> {
    let trial = |(name, ranks, launch): &Group| {
        let (name, ranks, launch) = (format!("nvshmem/{name}/{ranks}"), *ranks, *launch);
        Trial::test(name, move || perform(launch(ranks), ranks))
    };
    GROUPS.iter().map(trial).collect()
}

fn perform(launch: Launch, ranks: usize) -> Result<(), Failed> {
    if gpus() >= ranks {
        return Ok(launch.reports().map(drop)?);
    }
    // The folder of the libraries is needed until the ranks have ended.
    let emulated = Emulated::new()?;
    Ok(emulated.launch(launch).reports().map(drop)?)
}

/// How many ranks can have a GPU of the machine's.
fn gpus() -> usize {
    if phalanx::nvshmem::version().is_err() { 0 } else { phalanx_testkit::gpus::count().unwrap_or(0) }
}
