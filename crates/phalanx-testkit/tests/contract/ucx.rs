//! The contract on UCX: the same scenarios with ranks as processes of this host that reach each other over the loopback, as
//! ranks of several hosts do over their network (phalanx-cli's `nodes` has hosts).

use crate::mpi::MATRIX;
use crate::world::{Done, all_equal, outcome, same};
use crate::{
    any_source, awaiting, communicators, float_modes, members, messages, objects, operations, plain,
    portable, prepared, requests, scans, topologies, values, vectors,
};
use libtest_mimic::{Failed, Trial};
use phalanx::{Comm, Error, PeerEvent, ReduceOp};
use phalanx_testkit::fault::Fault;
use phalanx_testkit::processes::{Launch, describe, phase};
use phalanx_testkit::{Scenario, suite, ucx};
use std::time::Duration;

const DEADLINE: Duration = Duration::from_secs(180);

/// Scenarios that one world of so many ranks performs.
type Group = (&'static str, &'static [usize], fn(usize) -> Launch);

const GROUPS: [Group; 10] = [
    ("matrix", &[2, 3, 5], |ranks| of(ranks, MATRIX.into_iter().map(|operation| ("matrix", operation)))),
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

pub const SCENARIOS: &[Scenario] =
    &[Scenario::rank("ucx/outlive", |comm, args| outcome(outlive(&comm, &args[0], &args[1])))];

/// Works until a rank is killed, and goes on without it.
fn outlive(comm: &Comm, elements: &str, victim: &str) -> Done {
    let mut data = vec![1f32; elements.parse()?];
    let mut is_first = true;
    let error = loop {
        if let Err(error) = comm.all_reduce_in_place(&mut data, ReduceOp::Max) {
            break error;
        }
        if std::mem::take(&mut is_first) {
            phase("together");
        }
    };
    let Error::Peer(peer) = &error else { return Err(error.into()) };
    same("the rank that is gone", peer.rank.to_string().as_str(), victim)?;
    same("what became of it", peer.event, PeerEvent::Died)?;
    let survivors = comm.shrink()?;
    let mut sum = [1u32];
    survivors.all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
    same("the survivors' sum", sum[0] as usize, comm.world_size() - 1)?;
    Ok(survivors.finalize()?)
}

/// Ranks are killed at different moments of short and of long operations. To make a connection to one may fail at once.
fn killed_ranks_are_outlived() -> Result<(), Failed> {
    for (round, elements) in [10, 5_000, 70_000, 1_000_000].into_iter().cycle().take(12).enumerate() {
        let victim = 1 + round % 3;
        let launch = Launch::new("ucx/outlive", 4).arg(elements).arg(victim);
        let mut world = launch.deadline(DEADLINE).env("PHALANX_BACKEND", "ucx").start()?;
        (0..4).try_for_each(|rank| world.await_phase(rank, "together"))?;
        // Any moment will do.
        std::thread::sleep(Duration::from_millis(13 * round as u64));
        world.inject(victim, Fault::Kill)?;
        let ended = world.finish();
        if ended.iter().any(|rank| rank.rank != victim && rank.outcome.is_err()) {
            return Err(format!("{elements} elements, rank {victim}: {}", describe(&ended)).into());
        }
    }
    Ok(())
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
    trials.push(trial("ucx/processes/killed_ranks_are_outlived".into(), Box::new(killed_ranks_are_outlived)));
    // These fail their communicator.
    for scenario in plain::COMPARED.iter().chain(operations::COMPARED) {
        let perform = || Ok(all(2, &[&[*scenario]]).reports().map(drop)?);
        trials.push(trial(format!("ucx/processes/compared/{}", scenario.name), Box::new(perform)));
    }
    let float_modes = || all_equal(&all(3, &[float_modes::SCENARIOS]).reports()?);
    trials.push(trial("ucx/processes/float_modes/3".into(), Box::new(float_modes)));
    trials
}
