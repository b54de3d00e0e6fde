//! The contract on UCX: the same scenarios with ranks as processes of this host that reach each other over the loopback, as
//! ranks of several hosts do over their network (phalanx-cli's `nodes` has hosts).

use crate::mpi::MATRIX;
use crate::world::all_equal;
use crate::{
    any_source, awaiting, communicators, float_modes, members, messages, objects, operations, plain,
    portable, prepared, requests, scans, topologies, values, vectors,
};
use libtest_mimic::{Failed, Trial};
use phalanx_testkit::processes::Launch;
use phalanx_testkit::{Scenario, suite, ucx};
use std::time::Duration;

const DEADLINE: Duration = Duration::from_secs(60);

/// Scenarios that one world of so many ranks performs.
type Group = (&'static str, &'static [usize], fn(usize) -> Launch);

const GROUPS: [Group; 10] = [
    ("matrix", &[2, 3, 4, 6], |ranks| of(ranks, MATRIX.into_iter().map(|operation| ("matrix", operation)))),
    ("vectors", &[2, 3, 5], |ranks| all(ranks, &[vectors::SCENARIOS])),
    ("plain", &[3], |ranks| all(ranks, &[plain::SCENARIOS])),
    ("scans", &[2, 3], |ranks| all(ranks, &[scans::SCENARIOS, operations::SCENARIOS])),
    ("messages", &[2, 4], |ranks| all(ranks, &[messages::SCENARIOS, any_source::SCENARIOS])),
    ("requests", &[2, 3], |ranks| all(ranks, &[requests::SCENARIOS, requests::AMONG_MESSAGES])),
    ("communicators", &[2, 4], |ranks| all(ranks, &[communicators::SCENARIOS, members::SCENARIOS])),
    ("objects", &[3], |ranks| {
        let rest = [topologies::SCENARIOS, awaiting::SCENARIOS, prepared::SCENARIOS];
        all(ranks, &[&[objects::SCENARIOS, values::SCENARIOS], &rest[..]].concat())
    }),
    ("portable", &[2, 3], |ranks| all(ranks, &[portable::SCENARIOS])),
    ("programs", &[2, 4], |ranks| {
        of(ranks, [("programs/short_blocks", "1"), ("programs/long_blocks", "2")].into_iter())
    }),
];

fn of(ranks: usize, scenarios: impl Iterator<Item = (&'static str, &'static str)>) -> Launch {
    let launch = scenarios.fold(None, |launch: Option<Launch>, (name, arg)| {
        let launch = launch.map_or_else(|| Launch::new(name, ranks), |launch| launch.then(name));
        Some(launch.arg(arg))
    });
    launch.expect("every group has scenarios").deadline(DEADLINE).env("PHALANX_BACKEND", "ucx")
}

fn all(ranks: usize, scenarios: &[&[Scenario]]) -> Launch {
    let names = scenarios.concat().into_iter().map(|scenario| (scenario.name, ""));
    of(ranks, names.collect::<Vec<_>>().into_iter())
}

pub fn trials() -> Vec<Trial> {
    let trial = |name: String, run: Box<dyn FnOnce() -> Result<(), Failed> + Send>| match ucx::missing() {
        None => Trial::test(name, run),
        Some(reason) => suite::ignored(name, &reason),
    };
    let mut trials = Vec::new();
    for (group, ranks, launch) in GROUPS {
        for ranks in ranks.iter().copied() {
            let perform = move || Ok(launch(ranks).reports().map(drop)?);
            trials.push(trial(format!("ucx/processes/{group}/{ranks}"), Box::new(perform)));
        }
    }
    // These fail their communicator.
    for scenario in plain::COMPARED.iter().chain(operations::COMPARED) {
        let perform = || Ok(all(2, &[&[*scenario]]).reports().map(drop)?);
        trials.push(trial(format!("ucx/processes/compared/{}", scenario.name), Box::new(perform)));
    }
    let float_modes = || all_equal(&all(3, &[float_modes::SCENARIOS]).reports()?);
    trials.push(trial("ucx/processes/float_modes/3".into(), Box::new(float_modes)));
    trials
}
