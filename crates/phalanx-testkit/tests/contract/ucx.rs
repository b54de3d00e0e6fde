//! The contract on UCX: the same scenarios with ranks as processes of this host that reach each other over the loopback, as
//! ranks of several hosts do over their network (phalanx-cli's `nodes` has hosts). And as processes of two hosts that share no memory, of
//! which those on one host share it.

use crate::mpi::MATRIX;
use crate::world::{Done, all_equal, outcome, same};
use crate::{
    any_source, awaiting, communicators, float_modes, members, messages, objects, operations, peers, plain,
    portable, prepared, requests, scans, topologies, values, vectors,
};
use libtest_mimic::{Failed, Trial};
use phalanx::{Comm, Error, PeerEvent, ReduceOp};
use phalanx_testkit::fault::Fault;
use phalanx_testkit::hosts::Elsewhere;
use phalanx_testkit::processes::{Launch, describe, phase};
use phalanx_testkit::random::ANY_ORDER;
use phalanx_testkit::{Scenario, suite, ucx};
use std::time::Duration;

const DEADLINE: Duration = Duration::from_secs(180);

/// Ranks on two hosts: as many on each, more on the first, and one alone on the second.
const ON_HOSTS: [usize; 3] = [4, 5, 3];

/// Ranks from which on short blocks go along a tree.
const MANY: usize = 17;

/// Scenarios that one world of so many ranks performs.
type Group = (&'static str, &'static [usize], fn(usize) -> Launch);

const GROUPS: [Group; 11] = [
    ("matrix", &[2, 3, 5], |ranks| of(ranks, MATRIX.into_iter().map(|operation| ("matrix", operation)))),
    ("vectors", &[2, 3, 5], |ranks| all(ranks, &[vectors::SCENARIOS])),
    ("plain", &[3], |ranks| all(ranks, &[plain::SCENARIOS])),
    ("scans", &[2, 3], |ranks| all(ranks, &[scans::SCENARIOS, operations::SCENARIOS])),
    ("messages", &[2, 4], |ranks| all(ranks, &[messages::SCENARIOS, any_source::SCENARIOS])),
    ("peers", &[3], |ranks| all(ranks, &[peers::SCENARIOS])),
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

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("ucx/outlive", |comm, args| outcome(outlive(&comm, &args[0], &args[1]))),
    Scenario::rank("ucx/order", |comm, args| outcome(order(&comm, &args[0]))),
    Scenario::rank("ucx/many", |comm, _| outcome(many(&comm))),
    Scenario::rank("ucx/mismatch", |comm, args| outcome(mismatch(&comm, &args[0]))),
    Scenario::rank("ucx/stopped", |comm, args| outcome(stopped(&comm, &args[0]))),
    Scenario::rank("ucx/late", |comm, args| outcome(late(comm, &args[0]))),
];

/// The sum of four ranks on two hosts tells by its bits in which order they were combined. And what only moves, of the same lengths.
fn order(comm: &Comm, expected: &str) -> Done {
    let contribution = |rank: usize, i: usize| [1e8f32, 3.3, -1e8, 7.7][(rank + i) % 4];
    // The last takes several chunks.
    for count in [1, 50, 100_003, 700_003] {
        let own: Vec<f32> = (0..count).map(|i| contribution(comm.rank(), i)).collect();
        let in_order = |i| (1..4).fold(contribution(0, i), |sum, rank| sum + contribution(rank, i));
        let by_host =
            |i| (contribution(0, i) + contribution(1, i)) + (contribution(2, i) + contribution(3, i));
        let bits: Vec<u32> = (0..count)
            .map(|i| if expected == "ranks" { in_order(i) } else { by_host(i) }.to_bits())
            .collect();
        let mut sum = vec![0f32; count];
        comm.all_reduce(&own, &mut sum, ReduceOp::Sum)?;
        same("an all_reduce", sum.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), bits.clone())?;
        sum.fill(0.0);
        comm.reduce(&own, &mut sum, ReduceOp::Sum, 2)?;
        if comm.rank() == 2 {
            same("a reduce", sum.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), bits)?;
        }
        let mut gathered = vec![0f32; 4 * count];
        comm.all_gather(&own, &mut gathered)?;
        let of_all = (0..4).flat_map(|rank| (0..count).map(move |i| contribution(rank, i)));
        same("an all_gather", of_all.eq(gathered.iter().copied()), true)?;
        for root in [0, 3] {
            let mut all = if comm.rank() == root { own.clone() } else { vec![0.0; count] };
            comm.broadcast_in_place(&mut all, root)?;
            let of_root: Vec<f32> = (0..count).map(|i| contribution(root, i)).collect();
            same("a broadcast", all == of_root, true)?;
        }
    }
    Ok(())
}

/// Short blocks to and from different roots, of one length and of several; some ranks give none.
fn many(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let counts: Vec<usize> = (0..ranks).map(|rank| rank % 3).collect();
    let block = |rank: usize, count: usize| (0..count).map(move |i| (1000 * rank + i) as u32);
    let all = |count: usize| (0..ranks).flat_map(|rank| block(rank, count)).collect::<Vec<u32>>();
    let all_v: Vec<u32> = (0..ranks).flat_map(|rank| block(rank, counts[rank])).collect();
    let own_v: Vec<u32> = block(rank, counts[rank]).collect();
    let contribution = |rank: usize| [1e8f32, 3.3, -1e8, 7.7][rank % 4];
    let sum = |ranks: std::ops::Range<usize>| ranks.map(contribution).reduce(|sum, next| sum + next);
    for root in [0, 6, ranks - 1] {
        let own: Vec<u32> = block(rank, 5).collect();
        let mut gathered = vec![0; if rank == root { 5 * ranks } else { 0 }];
        comm.gather(&own, &mut gathered, root)?;
        same("a gather", &gathered, &if rank == root { all(5) } else { Vec::new() })?;
        let mut scattered = vec![0; 5];
        comm.scatter(&gathered, &mut scattered, root)?;
        same("a scatter", &scattered, &own)?;
        let mut in_place = if rank == root { all(5) } else { vec![0; 5 * ranks] };
        comm.scatter_in_place(&mut in_place, root)?;
        same("a scatter in place", &in_place[5 * rank..][..5], &own[..])?;
        let mut gathered = vec![0; if rank == root { all_v.len() } else { 0 }];
        comm.gather_v(&own_v, &mut gathered, &counts, root)?;
        same("a gather_v", &gathered, &if rank == root { all_v.clone() } else { Vec::new() })?;
        let mut scattered = vec![0; own_v.len()];
        comm.scatter_v(&gathered, &counts, &mut scattered, root)?;
        same("a scatter_v", &scattered, &own_v)?;
        let mut reduced = [0f32];
        comm.reduce(&[contribution(rank)], &mut reduced, ReduceOp::Sum, root)?;
        if rank == root {
            same("a reduce in rank order", reduced[0].to_bits(), sum(0..ranks).map_or(0, f32::to_bits))?;
        }
    }
    let mut gathered = vec![0; all_v.len()];
    comm.all_gather_v(&own_v, &mut gathered, &counts)?;
    same("an all_gather_v", &gathered, &all_v)?;
    let mut reduced = [0f32];
    comm.all_reduce(&[contribution(rank)], &mut reduced, ReduceOp::Sum)?;
    same("an all_reduce in rank order", reduced[0].to_bits(), sum(0..ranks).map_or(0, f32::to_bits))?;
    comm.scan(&[contribution(rank)], &mut reduced, ReduceOp::Sum)?;
    Ok(same("a scan", reduced[0].to_bits(), sum(0..rank + 1).map_or(0, f32::to_bits))?)
}

/// Rank 1 calls something else; all ranks are told the same.
fn mismatch(comm: &Comm, other: &str) -> Done {
    comm.barrier()?;
    let mut data = [1u32; 8];
    let called = match (comm.rank(), other) {
        (1, "all_to_all") => comm.all_to_all(&[0u32; 8], &mut data),
        (1, "broadcast") => comm.broadcast_in_place(&mut data, 0),
        (1, "root") => comm.broadcast_in_place(&mut data, 3),
        (_, "root") => comm.broadcast_in_place(&mut data, 2),
        _ => comm.all_reduce_in_place(&mut data, ReduceOp::Sum),
    };
    // A root may not notice before its next call.
    let error = called.and_then(|()| comm.barrier()).err().ok_or("no error")?;
    let Error::Mismatch(mismatch) = &error else { return Err(error.into()) };
    Ok(same("a rank that differs", mismatch.rank == 1 || mismatch.other_rank == 1, true)?)
}

/// Works until a rank is stopped. The ranks of its host see that, and tell the others.
fn stopped(comm: &Comm, victim: &str) -> Done {
    comm.barrier()?;
    phase("together");
    let error = loop {
        if let Err(error) = comm.all_reduce_in_place(&mut [1u32], ReduceOp::Sum) {
            break error;
        }
    };
    let Error::Peer(peer) = &error else { return Err(error.into()) };
    same("the rank that is stopped", peer.rank.to_string().as_str(), victim)?;
    same("what became of it", peer.event, PeerEvent::Stopped)?;
    phase("named");
    Ok(())
}

/// A rank comes too late, and all name it: also those that wait for a rank of their own host, which waits for it.
fn late(comm: Comm, victim: &str) -> Done {
    comm.barrier()?;
    let victim: usize = victim.parse()?;
    comm.set_timeout(Duration::from_secs(2));
    if comm.rank() == victim {
        std::thread::sleep(Duration::from_secs(4));
        return Ok(());
    }
    let error = comm.all_reduce_in_place(&mut [1u32], ReduceOp::Sum).err().ok_or("no error")?;
    let Error::Timeout(timeout) = &error else { return Err(error.into()) };
    let missing: Vec<usize> = timeout.missing.iter().map(|missing| missing.rank).collect();
    Ok(same("who is missing", missing, vec![victim])?)
}

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
fn killed_ranks_are_outlived(hosts: usize) -> Result<(), Failed> {
    for (round, elements) in [10, 5_000, 70_000, 1_000_000].into_iter().cycle().take(12).enumerate() {
        let victim = 1 + round % 3;
        let launch = Launch::new("ucx/outlive", 4).arg(elements).arg(victim);
        let mut world = launch.deadline(DEADLINE).env("PHALANX_BACKEND", "ucx").on_hosts(hosts).start()?;
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
    trials.push(trial(
        "ucx/processes/killed_ranks_are_outlived".into(),
        Box::new(|| killed_ranks_are_outlived(1)),
    ));
    let many = || Ok(of(MANY, [("ucx/many", "")].into_iter()).reports().map(drop)?);
    trials.push(trial(format!("ucx/processes/many/{MANY}"), Box::new(many)));
    // These fail their communicator.
    for scenario in plain::COMPARED.iter().chain(operations::COMPARED) {
        let perform = || Ok(all(2, &[&[*scenario]]).reports().map(drop)?);
        trials.push(trial(format!("ucx/processes/compared/{}", scenario.name), Box::new(perform)));
    }
    trials.extend(on_two_hosts());
    let float_modes = || all_equal(&all(3, &[float_modes::SCENARIOS]).reports()?);
    trials.push(trial("ucx/processes/float_modes/3".into(), Box::new(float_modes)));
    trials
}

/// On two hosts, which share the cores of this one.
fn apart(launch: Launch) -> Launch {
    launch.on_hosts(2).env("PHALANX_CORES", "1")
}

/// Ranks on two hosts, two or three on each.
fn on_two_hosts() -> Vec<Trial> {
    let obstacle = ucx::missing().or_else(|| Elsewhere::enter().err());
    let trial = |name: String, run: Box<dyn FnOnce() -> Result<(), Failed> + Send>| {
        let name = format!("ucx/hosts/{name}");
        match &obstacle {
            None => Trial::test(name, run),
            Some(reason) => suite::ignored(name, reason),
        }
    };
    let mut trials = Vec::new();
    for (group, _, launch) in GROUPS {
        for ranks in ON_HOSTS {
            let perform = move || Ok(apart(launch(ranks)).env(ANY_ORDER, "1").reports().map(drop)?);
            trials.push(trial(format!("{group}/{ranks}"), Box::new(perform)));
        }
        if ["matrix", "programs"].contains(&group) {
            let perform =
                move || Ok(apart(launch(4)).env("PHALANX_REPRODUCIBLE", "1").reports().map(drop)?);
            trials.push(trial(format!("reproducible/{group}/4"), Box::new(perform)));
        }
    }
    let four = |scenario, arg| apart(of(4, [(scenario, arg)].into_iter()));
    for (expected, setting) in [("ranks", "1"), ("hosts", "0")] {
        let perform = move || {
            Ok(four("ucx/order", expected).env("PHALANX_REPRODUCIBLE", setting).reports().map(drop)?)
        };
        trials.push(trial(format!("combined_in_order_of_{expected}"), Box::new(perform)));
    }
    for other in ["all_to_all", "broadcast", "root"] {
        let perform = move || Ok(four("ucx/mismatch", other).reports().map(drop)?);
        trials.push(trial(format!("mismatch/{other}"), Box::new(perform)));
    }
    for victim in ["0", "1", "3"] {
        let perform = move || Ok(four("ucx/late", victim).reports().map(drop)?);
        trials.push(trial(format!("late/{victim}"), Box::new(perform)));
    }
    let stopped = || {
        let launch = apart(of(4, [("ucx/stopped", "3")].into_iter()));
        let mut world = launch.env("PHALANX_HEARTBEAT_TIMEOUT", "20").start()?;
        (0..4).try_for_each(|rank| world.await_phase(rank, "together"))?;
        world.inject(3, Fault::Stop)?;
        (0..3).try_for_each(|rank| world.await_phase(rank, "named"))?;
        Ok(world.inject(3, Fault::Kill)?)
    };
    trials.push(trial("a_stopped_rank_is_named".into(), Box::new(stopped)));
    trials.push(trial("killed_ranks_are_outlived".into(), Box::new(|| killed_ranks_are_outlived(2))));
    trials
}
