//! The contract on UCX: the same scenarios with ranks as processes of this host that reach each other over the loopback, as
//! ranks of several hosts do over their network (phalanx-cli's `nodes` has hosts). And as processes of two hosts that share no memory, of
//! which those on one host share it.

use crate::mpi::MATRIX;
use crate::world::{Done, all_equal, outcome, same};
use crate::{
    any_source, awaiting, communicators, float_modes, members, messages, objects, one_sided, operations,
    peers, plain, portable, prepared, requests, scans, topologies, values, vectors,
};
use libtest_mimic::{Failed, Trial};
use phalanx::{Comm, Error, PeerEvent, ReduceOp};
use phalanx_testkit::fault::Fault;
use phalanx_testkit::hosts::Elsewhere;
use phalanx_testkit::processes::{Launch, describe, phase};
use phalanx_testkit::random::ANY_ORDER;
use phalanx_testkit::{Scenario, suite, ucx};
use std::path::Path;
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(180);

/// Ranks on two hosts: as many on each, more on the first, and one alone on the second.
const ON_HOSTS: [usize; 3] = [4, 5, 3];

/// Ranks from which on short blocks go along a tree.
const MANY: usize = 17;

/// Scenarios that one world of so many ranks performs.
type Group = (&'static str, &'static [usize], fn(usize) -> Launch);

const GROUPS: [Group; 12] = [
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
    ("one_sided", &[2, 3], |ranks| all(ranks, &[one_sided::SCENARIOS])),
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
    Scenario::rank("ucx/computing", |comm, args| outcome(computing(&comm, &args[0]))),
    Scenario::rank("ucx/accessing", |comm, args| outcome(accessing(&comm, args))),
    Scenario::rank("ucx/late_in_epoch", |comm, args| outcome(late_in_epoch(comm, &args[0]))),
    Scenario::rank("ucx/nothing_shared", |comm, _| outcome(nothing_shared(&comm))),
    Scenario::rank("ucx/within_hosts", |comm, _| outcome(within_hosts(&comm))),
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

/// Elements of a part that take long enough for UCX to fetch them.
const LONG: usize = 1 << 17;

/// Rank 0 does nothing of this library while the others access its part, until one of them makes a file.
fn computing(comm: &Comm, file: &str) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    comm.set_timeout(Duration::from_secs(20));
    let mut memory = comm.symmetric::<u64>(LONG + 10 * ranks + 2)?;
    let mut counts = comm.symmetric::<f32>(1)?;
    let own = LONG + 10 * rank;
    memory.local_mut()[..LONG].fill(7);
    let (epoch, counting) = (memory.epoch()?, counts.epoch()?);
    if rank == 0 {
        let since = Instant::now();
        while !Path::new(file).exists() {
            if since.elapsed() > Duration::from_secs(40) {
                return Err("nobody has come".into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    } else {
        let mut found = vec![0; LONG];
        epoch.get(&mut found, 0, 0)?;
        same("a long get", found.iter().all(|word| *word == 7), true)?;
        epoch.put(&[1, 2, 3], 0, own)?;
        epoch.put_strided(&[4, 0, 5, 0], 2, 0, own + 3, 2)?;
        epoch.flush(0)?;
        let mut strided = [0; 3];
        epoch.get_strided(&mut strided, 1, 0, own + 1, 2)?;
        same("a strided get", strided, [2, 4, 5])?;
        epoch.accumulate(&[10, 20], 0, own, ReduceOp::Sum)?;
        same("a fetched sum", epoch.fetch_and_op(1, 0, own, ReduceOp::Sum)?, 11)?;
        same("a swap", epoch.swap(6, 0, own)?, 12)?;
        same("a compare and swap", epoch.compare_and_swap(6, 8, 0, own)?, 6)?;
        counting.accumulate(&[0.5], 0, 0, ReduceOp::Sum)?;
        counting.flush(0)?;
        epoch.fetch_and_op(1, 0, LONG + 10 * ranks, ReduceOp::Sum)?;
        if rank == 1 {
            while epoch.fetch(0, LONG + 10 * ranks)? != ranks as u64 - 1 {}
            epoch.put(&vec![9; LONG], 0, 0)?;
            epoch.signal(0)?;
            epoch.flush(0)?;
            std::fs::write(file, "")?;
        }
    }
    if rank == 0 {
        epoch.wait_signals(1, 1)?;
    }
    counting.end()?;
    epoch.end()?;
    if rank == 0 {
        same("a long put", memory.local()[..LONG].iter().all(|word| *word == 9), true)?;
        for other in 1..ranks {
            let of_other = &memory.local()[LONG + 10 * other..][..6];
            same("what a rank left", of_other, [8, 22, 3, 4, 0, 5])?;
        }
        same("a sum of floats", counts.local()[0], 0.5 * (ranks as f32 - 1.0))?;
    }
    counts.free()?;
    Ok(memory.free()?)
}

fn a_target_need_not_take_part(launch: fn(Launch) -> Launch, ranks: usize) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("done");
    let scenario = Launch::new("ucx/computing", ranks).arg(file.display());
    launch(scenario.deadline(DEADLINE).env("PHALANX_BACKEND", "ucx")).reports()?;
    Ok(())
}

/// What ranks do in an epoch until a rank is killed or stopped.
const ACCESSES: [&str; 5] = ["puts", "gets", "atomics", "signals", "flushes"];

/// All ranks access one of them until it is killed or stopped. The others name it, and go on without it if it is dead.
fn accessing(comm: &Comm, args: &[String]) -> Done {
    let [kind, victim, event] = args else { return Err("three arguments".into()) };
    let victim: usize = victim.parse()?;
    comm.set_timeout(Duration::from_secs(3));
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let mut memory = comm.symmetric::<u64>(LONG)?;
    let mut own = vec![rank as u64; LONG];
    let target = if rank == victim { 0 } else { victim };
    let epoch = memory.epoch()?;
    let mut step = || -> phalanx::Result<()> {
        match kind.as_str() {
            "puts" => epoch.put(&own, target, 0),
            "gets" => epoch.get(&mut own, target, 0),
            "atomics" => epoch.fetch_and_op(1, target, rank, ReduceOp::Sum).map(drop),
            "signals" => {
                epoch.signal((rank + 1) % ranks)?;
                epoch.wait_signals((rank + ranks - 1) % ranks, 1)
            }
            _ => epoch.put(&own[..10], target, 10 * rank).and_then(|()| epoch.flush(target)),
        }
    };
    step()?;
    phase("together");
    let error = loop {
        if let Err(error) = step() {
            break error;
        }
    };
    match &error {
        Error::Peer(peer) => {
            same("the rank that is named", peer.rank, victim)?;
            same("what became of it", &format!("{:?}", peer.event), event)?;
        }
        // Only the ranks of its host see that it is stopped, if they wait for it.
        Error::Timeout(timeout) if event == "Stopped" => {
            let missing: Vec<usize> = timeout.missing.iter().map(|missing| missing.rank).collect();
            same("who is missing", missing, vec![victim])?;
        }
        _ => return Err(error.into()),
    }
    epoch.end().err().ok_or("the epoch has ended")?;
    memory.local_mut().fill(0);
    phase("named");
    drop((memory, own));
    if event == "Died" {
        let survivors = comm.shrink()?;
        let mut again = survivors.symmetric::<u64>(1)?;
        let epoch = again.epoch()?;
        epoch.accumulate(&[1], 0, 0, ReduceOp::Sum)?;
        epoch.end()?;
        same("the survivors", again.local()[0] as usize, if survivors.rank() == 0 { ranks - 1 } else { 0 })?;
        again.free()?;
        survivors.finalize()?;
    }
    Ok(())
}

/// Four ranks on two hosts, of which the last is killed or stopped in an epoch.
fn lost_in_an_epoch(kind: &str, fault: Fault) -> Result<(), Failed> {
    let event = if fault == Fault::Kill { "Died" } else { "Stopped" };
    let launch = Launch::new("ucx/accessing", 4).arg(kind).arg(3).arg(event);
    let launch = apart(launch.deadline(DEADLINE).env("PHALANX_BACKEND", "ucx"));
    // Who is stopped is silent, too: the ranks of its host know better.
    let mut world = launch.env("PHALANX_HEARTBEAT_TIMEOUT", "20").start()?;
    (0..4).try_for_each(|rank| world.await_phase(rank, "together"))?;
    let since = Instant::now();
    world.inject(3, fault)?;
    let named = (0..3).try_for_each(|rank| world.await_phase(rank, "named"));
    let took = since.elapsed();
    if fault == Fault::Stop {
        world.inject(3, Fault::Kill)?;
    }
    let ended = world.finish();
    named?;
    if ended.iter().any(|rank| rank.rank != 3 && rank.outcome.is_err()) {
        return Err(describe(&ended).into());
    }
    match took < NAMED {
        true => Ok(()),
        false => Err(format!("named after {took:.1?}").into()),
    }
}

/// From a fault to the verdict of all, on a machine with much else to do.
const NAMED: Duration = Duration::from_secs(10);

/// Rank 1 computes for longer than the others wait for it, and is named.
fn late_in_epoch(comm: Comm, wait: &str) -> Done {
    const LATE: usize = 1;
    let mut memory = comm.symmetric::<u64>(1)?;
    let epoch = memory.epoch()?;
    comm.set_timeout(Duration::from_secs(2));
    if comm.rank() == LATE {
        std::thread::sleep(Duration::from_secs(4));
        // The others have failed.
        epoch.end().err().ok_or("the epoch has ended")?;
        return Ok(());
    }
    // It need not take part in this.
    epoch.fetch_and_op(1, LATE, 0, ReduceOp::Sum)?;
    let waited = match wait {
        "signals" => epoch.wait_signals(LATE, 1),
        _ => epoch.end(),
    };
    let error = waited.err().ok_or("no error")?;
    let Error::Timeout(timeout) = &error else { return Err(error.into()) };
    let missing: Vec<usize> = timeout.missing.iter().map(|missing| missing.rank).collect();
    same("who is missing", missing, vec![LATE])?;
    let operation = if wait == "signals" { "wait_signals(rank 1)" } else { "end of an epoch(memory 1)" };
    Ok(same(&error.to_string(), error.to_string().contains(operation), true)?)
}

/// The ranks of each host have a window of their own, where all parts are mapped.
fn within_hosts(comm: &Comm) -> Done {
    let part = comm.split_by_host()?;
    let (rank, ranks) = (part.rank(), part.world_size());
    let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let mut memory = part.symmetric::<u32>(ranks + 1)?;
    let epoch = memory.epoch()?;
    for round in 1..=20 {
        epoch.put(&[100 * round + rank as u32], next, rank)?;
        epoch.accumulate(&[1], 0, ranks, ReduceOp::Sum)?;
        epoch.signal(next)?;
        epoch.wait_signals(before, 1)?;
        same("what was put", epoch.fetch(rank, before)?, 100 * round + before as u32)?;
        epoch.signal(before)?;
        epoch.wait_signals(next, 1)?;
    }
    epoch.end()?;
    same("the sum", memory.local()[ranks], if rank == 0 { 20 * ranks as u32 } else { 0 })?;
    memory.free()?;
    Ok(comm.barrier()?)
}

/// On one host, where UCX was asked for, the ranks share no memory.
fn nothing_shared(comm: &Comm) -> Done {
    let refused = comm.shared_by_host(10, |_: &mut [u8]| phalanx::Result::Ok(()));
    let error = refused.err().ok_or("memory that is shared")?;
    same(&error.to_string(), matches!(error, Error::Unsupported(_)), true)?;
    Ok(comm.barrier()?)
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
    let trial = |name: String, run: Run| match ucx::missing() {
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
    for scenario in plain::COMPARED.iter().chain(operations::COMPARED).chain(one_sided::COMPARED) {
        let perform = || Ok(all(2, &[&[*scenario]]).reports().map(drop)?);
        trials.push(trial(format!("ucx/processes/compared/{}", scenario.name), Box::new(perform)));
    }
    trials.push(trial(
        "ucx/processes/one_sided/a_target_need_not_take_part".into(),
        Box::new(|| a_target_need_not_take_part(|launch| launch, 3)),
    ));
    let nothing_shared = || Ok(of(2, [("ucx/nothing_shared", "")].into_iter()).reports().map(drop)?);
    trials.push(trial("ucx/processes/one_sided/nothing_shared".into(), Box::new(nothing_shared)));
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
    let trial = |name: String, run: Run| {
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
    trials.extend(one_sided_on_two_hosts(&trial));
    trials
}

type Run = Box<dyn FnOnce() -> Result<(), Failed> + Send>;

fn one_sided_on_two_hosts(trial: &dyn Fn(String, Run) -> Trial) -> Vec<Trial> {
    let mut trials = Vec::new();
    for ranks in ON_HOSTS {
        let perform = move || Ok(apart(all(ranks, &[one_sided::SHARED])).reports().map(drop)?);
        trials.push(trial(format!("one_sided/shared_by_host/{ranks}"), Box::new(perform)));
    }
    trials.push(trial(
        "one_sided/a_target_need_not_take_part".into(),
        Box::new(|| a_target_need_not_take_part(apart, 4)),
    ));
    let within_hosts = || Ok(apart(of(5, [("ucx/within_hosts", "")].into_iter())).reports().map(drop)?);
    trials.push(trial("one_sided/within_hosts".into(), Box::new(within_hosts)));
    for kind in ACCESSES {
        for (how, fault) in [("killed", Fault::Kill), ("stopped", Fault::Stop)] {
            let perform = move || lost_in_an_epoch(kind, fault);
            trials.push(trial(format!("one_sided/{how}/{kind}"), Box::new(perform)));
        }
    }
    for wait in ["signals", "end"] {
        let perform =
            move || Ok(apart(of(4, [("ucx/late_in_epoch", wait)].into_iter())).reports().map(drop)?);
        trials.push(trial(format!("one_sided/late/{wait}"), Box::new(perform)));
    }
    trials
}
