//! Communicators made from communicators, and several of them side by side.

use crate::world::{DEADLINE, both, on_threads};
use libtest_mimic::{Failed, Trial};
use phalanx::{Comm, ReduceOp};
use phalanx_testkit::processes::Launch;
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use phalanx_testkit::{Fields, Scenario};
use std::time::{Duration, SystemTime};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("communicators/split_by_parity", |comm, _| split_by_parity(&comm)),
    Scenario::rank("communicators/split_with_none", |comm, _| split_with_none(&comm)),
    Scenario::rank("communicators/split_orders_by_key", |comm, _| split_orders_by_key(&comm)),
    Scenario::rank("communicators/split_of_split", |comm, _| split_of_split(&comm)),
    Scenario::rank("communicators/split_grid", |comm, _| split_grid(&comm)),
    Scenario::rank("communicators/split_grid_refused", |comm, _| split_grid_refused(&comm)),
    Scenario::rank("communicators/interleaved", |comm, _| interleaved(&comm)),
    Scenario::rank("communicators/on_threads_at_once", |comm, _| on_threads_at_once(comm)),
    Scenario::rank("communicators/one_group_for_several", |comm, _| one_group_for_several(&comm)),
    Scenario::rank("communicators/parent_dropped_first", |comm, _| parent_dropped_first(comm)),
    Scenario::rank("communicators/every_collective_in_a_group", |comm, _| every_collective_in_a_group(&comm)),
    Scenario::rank("communicators/messages_in_splits", |comm, _| messages_in_splits(&comm)),
    Scenario::rank("communicators/barrier_waits", |comm, _| barrier_waits(&comm)),
];

/// Run in processes of their own, which nothing else disturbs.
pub const MEASURED: &[Scenario] = &[
    Scenario::rank("communicators/cycles", |comm, args| cycles(&comm, args)),
    Scenario::process("communicators/cycles_of_threads", |_| cycles_of_threads()),
    Scenario::process("communicators/worlds_of_threads", |_| worlds_of_threads()),
    Scenario::rank("communicators/two_worlds", |comm, args| busy_world(&comm, args)),
];

pub fn trials() -> Vec<Trial> {
    let mut trials: Vec<Trial> =
        SCENARIOS.iter().flat_map(|scenario| both(*scenario, &[1, 2, 3, 6])).collect();
    trials.push(Trial::test("threads/communicators/two_worlds", two_worlds_of_threads));
    if cfg!(target_os = "linux") {
        for (name, ranks) in [("communicators/cycles", 2), ("communicators/cycles", 4)] {
            trials.push(Trial::test(format!("processes/{name}/{ranks}"), move || {
                Launch::new(name, ranks).deadline(DEADLINE).reports()?;
                Ok(())
            }));
        }
        for name in ["communicators/cycles_of_threads", "communicators/worlds_of_threads"] {
            trials.push(Trial::test(name.replacen("communicators", "threads/communicators", 1), move || {
                Launch::alone(name).deadline(DEADLINE).reports()?;
                Ok(())
            }));
        }
        trials.push(Trial::test("processes/communicators/two_worlds", two_worlds_of_processes));
    }
    trials
}

fn text(error: phalanx::Error) -> String {
    error.to_string()
}

/// Nobody leaves a barrier before the last rank has come to it, in the world or in a part of it.
fn barrier_waits(comm: &Comm) -> Outcome {
    // The clock is the machine's, for all its processes.
    let nanos = || SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos() as u64;
    let part = some(comm.split(Some(0), -(comm.rank() as i64)).map_err(text)?)?;
    for comm in [comm, &part] {
        let rank = comm.rank();
        for late in 0..comm.world_size() {
            if rank == late {
                std::thread::sleep(Duration::from_millis(50));
            }
            let came = nanos();
            comm.barrier().map_err(text)?;
            let left = nanos();
            let mut last = [came];
            comm.all_reduce_in_place(&mut last, ReduceOp::Max).map_err(text)?;
            if left < last[0] {
                let early = Duration::from_nanos(last[0] - left);
                return Err(format!("rank {rank} left the barrier {early:?} before rank {late} came"));
            }
        }
    }
    Ok(String::new())
}

/// The world ranks of a communicator's ranks, in its order, learnt by using it.
fn members(comm: &Comm, world_rank: usize) -> Result<Vec<usize>, String> {
    let mut members = vec![0u64; comm.world_size()];
    comm.all_gather(&[world_rank as u64], &mut members).map_err(text)?;
    let mut sum = vec![1u32; 5000];
    comm.all_reduce_in_place(&mut sum, ReduceOp::Sum).map_err(text)?;
    if sum != vec![comm.world_size() as u32; 5000] {
        return Err(format!("a sum over {members:?} is wrong"));
    }
    Ok(members.into_iter().map(|rank| rank as usize).collect())
}

fn expect(actual: Vec<usize>, expected: Vec<usize>) -> Result<(), String> {
    if actual == expected { Ok(()) } else { Err(format!("members {actual:?}, expected {expected:?}")) }
}

fn some(comm: Option<Comm>) -> Result<Comm, String> {
    comm.ok_or_else(|| "split answered None to a rank with a colour".into())
}

fn split_by_parity(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let half = some(comm.split(Some(rank as u32 % 2), 0).map_err(text)?)?;
    expect(members(&half, rank)?, (0..ranks).filter(|r| r % 2 == rank % 2).collect())?;
    if half.rank() != rank / 2 {
        return Err(format!("rank {rank} has rank {} in its half", half.rank()));
    }
    // The parent works on.
    expect(members(comm, rank)?, (0..ranks).collect())?;
    Ok(String::new())
}

fn split_with_none(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let color = (rank != 0).then_some(u32::MAX);
    match comm.split(color, 0).map_err(text)? {
        None if rank == 0 => {}
        None => return Err(format!("rank {rank} has a colour and got no communicator")),
        Some(_) if rank == 0 => return Err("rank 0 has no colour and got a communicator".into()),
        Some(rest) => expect(members(&rest, rank)?, (1..ranks).collect())?,
    }
    expect(members(comm, rank)?, (0..ranks).collect())?;
    if comm.split(None, 0).map_err(text)?.is_some() {
        return Err("a communicator of nobody".into());
    }
    expect(members(comm, rank)?, (0..ranks).collect())?;
    Ok(String::new())
}

fn split_orders_by_key(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let reversed = some(comm.split(Some(7), -(rank as i64)).map_err(text)?)?;
    expect(members(&reversed, rank)?, (0..ranks).rev().collect())?;
    // Equal keys: by rank.
    let keyed = some(comm.split(Some(7), if rank == 0 { i64::MAX } else { i64::MIN }).map_err(text)?)?;
    expect(members(&keyed, rank)?, (1..ranks).chain([0]).collect())?;
    Ok(String::new())
}

fn split_of_split(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let half = some(comm.split(Some(rank as u32 % 2), 0).map_err(text)?)?;
    let quarter = some(half.split(Some(half.rank() as u32 % 2), 0).map_err(text)?)?;
    expect(members(&quarter, rank)?, (0..ranks).filter(|r| r % 4 == rank % 4).collect())?;
    let single = some(quarter.split(Some(quarter.rank() as u32), 0).map_err(text)?)?;
    expect(members(&single, rank)?, vec![rank])?;
    drop(half);
    expect(members(&quarter, rank)?, (0..ranks).filter(|r| r % 4 == rank % 4).collect())?;
    expect(members(comm, rank)?, (0..ranks).collect())?;
    Ok(String::new())
}

/// Every grid of two and three dimensions that these ranks make, with every group.
fn split_grid(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    for sizes in [[1, ranks, 1], [ranks, 1, 1], [2, ranks / 2, 1], [ranks / 2, 1, 2]] {
        if sizes.iter().product::<usize>() != ranks {
            continue;
        }
        let groups: [&[usize]; 5] = [&[0], &[1], &[2], &[2, 0], &[]];
        let parts = comm.split_grid(&sizes, &groups).map_err(text)?;
        let coordinates =
            |rank: usize| [rank / sizes[2] / sizes[1], rank / sizes[2] % sizes[1], rank % sizes[2]];
        for (part, group) in parts.iter().zip(groups) {
            let is_in = |other: &usize| {
                let (own, other) = (coordinates(rank), coordinates(*other));
                (0..3).all(|dimension| group.contains(&dimension) || own[dimension] == other[dimension])
            };
            expect(members(part, rank)?, (0..ranks).filter(is_in).collect())
                .map_err(|problem| format!("{sizes:?}, {group:?}: {problem}"))?;
        }
        expect(members(comm, rank)?, (0..ranks).collect())?;
    }
    // No group, and a grid without dimensions.
    if !comm.split_grid(&[ranks], &[]).map_err(text)?.is_empty() {
        return Err("communicators that nobody asked for".into());
    }
    expect(members(comm, rank)?, (0..ranks).collect())?;
    Ok(String::new())
}

/// One rank's wrong grid is refused before anything is sent: the others wait for its right one.
fn split_grid_refused(comm: &Comm) -> Outcome {
    let ranks = comm.world_size();
    if comm.rank() == 0 {
        let wrong: [(&[usize], &[&[usize]]); 5] = [
            (&[ranks, 2], &[]),
            (&[], if ranks == 1 { &[&[0]] } else { &[] }),
            (&[usize::MAX, usize::MAX], &[]),
            (&[ranks], &[&[0], &[1]]),
            (&[ranks, 1], &[&[0, 0]]),
        ];
        for (sizes, groups) in wrong {
            match comm.split_grid(sizes, groups) {
                Err(phalanx::Error::Usage(_)) => {}
                other => return Err(format!("{sizes:?}, {groups:?}: {:?}", other.err())),
            }
        }
    }
    let all = comm.split_grid(&[ranks], &[&[0]]).map_err(text)?;
    expect(members(&all[0], comm.rank())?, (0..ranks).collect())?;
    Ok(String::new())
}

/// Operations on three communicators in turn, each with a history of its own.
fn interleaved(comm: &Comm) -> Outcome {
    let rank = comm.rank();
    let half = some(comm.split(Some(rank as u32 % 2), 0).map_err(text)?)?;
    let twin = some(comm.split(Some(0), 0).map_err(text)?)?;
    for round in 0..300u64 {
        let len = [1, 600, 20_000][round as usize % 3];
        for comm in [comm, &half, &twin] {
            // Not every communicator in every round: their numbers of operations differ.
            if round % 3 == 0 && std::ptr::eq(comm, &half) {
                continue;
            }
            let mut sum = vec![round + comm.rank() as u64; len];
            comm.all_reduce_in_place(&mut sum, ReduceOp::Sum).map_err(text)?;
            let ranks = comm.world_size() as u64;
            if sum != vec![round * ranks + ranks * (ranks - 1) / 2; len] {
                return Err(format!("wrong sum in round {round}"));
            }
        }
    }
    Ok(String::new())
}

/// Each rank uses four communicators from four threads, with no order between them.
fn on_threads_at_once(comm: Comm) -> Outcome {
    let mut comms = Vec::new();
    for _ in 0..3 {
        comms.push(some(comm.split(Some(0), 0).map_err(text)?)?);
    }
    comms.push(comm);
    let workers: Vec<_> = comms
        .into_iter()
        .enumerate()
        .map(|(i, comm)| {
            std::thread::spawn(move || {
                let ranks = comm.world_size() as u64;
                for round in 0..200u64 {
                    let len = [1, 2000, 30_000][(round as usize + i) % 3];
                    let mut sum = vec![round * (i as u64 + 1); len];
                    comm.all_reduce_in_place(&mut sum, ReduceOp::Sum)
                        .context(|| format!("communicator {i}, round {round}"))?;
                    if sum != vec![round * (i as u64 + 1) * ranks; len] {
                        return Err(format!("wrong sum on communicator {i} in round {round}"));
                    }
                }
                Ok(())
            })
        })
        .collect();
    for worker in workers {
        worker.join().map_err(|_| "a worker panicked")??;
    }
    Ok(String::new())
}

/// A group in which two communicators take part.
fn one_group_for_several(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let reversed = some(comm.split(Some(0), -(rank as i64)).map_err(text)?)?;
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    for size in [1usize, 5000, 200_000] {
        let send = vec![rank as u32; size];
        let (mut here, mut there) = (vec![u32::MAX; size], vec![u32::MAX; size]);
        phalanx::group(|g| {
            g.on(comm).send(&send, next)?;
            // World rank r is rank ranks-1-r of the other communicator.
            g.on(&reversed).send(&send, ranks - 1 - previous)?;
            g.on(comm).recv(&mut here, previous)?;
            g.on(&reversed).recv(&mut there, ranks - 1 - next)
        })
        .context(|| format!("{size} elements, rank {rank}"))?;
        if here != vec![previous as u32; size] || there != vec![next as u32; size] {
            return Err(format!("messages of {size} elements went astray"));
        }
    }
    Ok(String::new())
}

/// A communicator does not need the one it was split from.
fn parent_dropped_first(comm: Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let child = some(comm.split(Some(0), 0).map_err(text)?)?;
    comm.finalize().map_err(text)?;
    let mut buffer = child.alloc::<f32>(50_000).map_err(text)?;
    buffer.fill(1.0);
    child.all_reduce_in_place(&mut buffer, ReduceOp::Sum).map_err(text)?;
    expect(members(&child, rank)?, (0..ranks).collect())?;
    child.finalize().map_err(text)?;
    // Memory outlives the communicator it came from.
    if buffer.iter().any(|value| *value != ranks as f32) {
        return Err("the buffer changed".into());
    }
    Ok(String::new())
}

/// Ranks in messages are those of the communicator that carries them.
fn messages_in_splits(comm: &Comm) -> Outcome {
    let rank = comm.rank();
    let half = some(comm.split(Some(rank as u32 % 2), -(rank as i64)).map_err(text)?)?;
    let ranks = half.world_size();
    let (next, previous) = ((half.rank() + 1) % ranks, (half.rank() + ranks - 1) % ranks);
    let mut message = vec![u64::MAX; 3000];
    half.send_recv(&vec![half.rank() as u64; 3000], next, &mut message, previous).map_err(text)?;
    if message != vec![previous as u64; 3000] {
        return Err(format!("a message from {previous} says {}", message[0]));
    }
    Ok(String::new())
}

/// What a process holds: open file descriptors and kilobytes of resident memory.
fn holdings() -> Result<(usize, u64), String> {
    let descriptors = std::fs::read_dir("/proc/self/fd").map_err(|error| error.to_string())?.count();
    let status = std::fs::read_to_string("/proc/self/status").map_err(|error| error.to_string())?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let resident = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    Ok((descriptors, resident.ok_or("no VmRSS")?))
}

/// How much resident memory may come and go with the allocator's moods.
const RESIDENT_SLACK_KB: u64 = 8 << 10;

fn compare_holdings(before: (usize, u64), after: (usize, u64)) -> Outcome {
    if after.0 != before.0 {
        return Err(format!("{} file descriptors before, {} after", before.0, after.0));
    }
    if after.1 > before.1 + RESIDENT_SLACK_KB {
        return Err(format!("{} kB resident before, {} kB after", before.1, after.1));
    }
    let report = Fields::new().with("descriptors", after.0).with("resident_before_kb", before.1);
    Ok(report.with("resident_after_kb", after.1).to_string())
}

/// Splits, uses and drops; memory from it too.
fn cycle(comm: &Comm, round: usize) -> Result<(), String> {
    let child = some(comm.split(Some(round as u32), 0).map_err(text)?)?;
    let mut sum = child.alloc::<u32>(20_000).map_err(text)?;
    sum.fill(1);
    child.all_reduce_in_place(&mut sum, ReduceOp::Sum).map_err(text)?;
    if sum[19_999] != comm.world_size() as u32 {
        return Err(format!("wrong sum in round {round}"));
    }
    Ok(())
}

/// A thousand communicators one behind the other leave nothing behind, in this process. An argument says
/// that all ranks are in it: then one of them looks, since looking opens a file too.
fn cycles(comm: &Comm, args: &[String]) -> Outcome {
    let looks = args.is_empty() || comm.rank() == 0;
    let look = || -> Result<(usize, u64), String> {
        comm.barrier().map_err(text)?;
        let found = if looks { holdings()? } else { (0, 0) };
        // Nobody goes on before all have looked.
        comm.barrier().map_err(text)?;
        Ok(found)
    };
    (0..50).try_for_each(|round| cycle(comm, round))?;
    let before = look()?;
    (0..1000).try_for_each(|round| cycle(comm, round))?;
    compare_holdings(before, look()?)
}

fn cycles_of_threads() -> Outcome {
    let reports = on_threads(MEASURED[0], 4, &["one process"]).map_err(|failed| format!("{failed:?}"))?;
    Ok(reports.concat())
}

/// A thousand worlds of threads one behind the other leave nothing behind.
fn worlds_of_threads() -> Outcome {
    let world = || {
        let sums = phalanx::run(3, |comm| {
            let mut sum = vec![1u32; 3000];
            comm.all_reduce_in_place(&mut sum, ReduceOp::Sum).map(|()| sum[2999])
        });
        match sums.map_err(text)?.into_iter().collect::<phalanx::Result<Vec<_>>>().map_err(text)? {
            sums if sums == [3, 3, 3] => Ok(()),
            sums => Err(format!("sums {sums:?}")),
        }
    };
    (0..50).try_for_each(|_| world())?;
    let before = holdings()?;
    (0..1000).try_for_each(|_| world())?;
    compare_holdings(before, holdings()?)
}

/// A world that is busy for a while, with results that tell whose they are.
fn busy_world(comm: &Comm, args: &[String]) -> Outcome {
    let own: u64 = args.first().and_then(|arg| arg.parse().ok()).ok_or("no number was given")?;
    let ranks = comm.world_size() as u64;
    for round in 0..500 {
        let len = [1, 900, 40_000][round % 3];
        let mut sum = vec![own; len];
        comm.all_reduce_in_place(&mut sum, ReduceOp::Sum).map_err(text)?;
        if sum != vec![own * ranks; len] {
            return Err(format!("world {own} got another world's data in round {round}"));
        }
    }
    Ok(String::new())
}

fn two_worlds_of_threads() -> Result<(), Failed> {
    let other = std::thread::spawn(|| on_threads(MEASURED[3], 3, &["1000"]).map(drop));
    on_threads(MEASURED[3], 2, &["1"])?;
    other.join().map_err(|_| "the other world panicked")?
}

fn two_worlds_of_processes() -> Result<(), Failed> {
    let launch = |own: u64| Launch::new(MEASURED[3].name, 3).arg(own).deadline(DEADLINE).start();
    let worlds = [launch(1)?, launch(1000)?];
    for world in worlds {
        let ended = world.finish();
        if ended.iter().any(|rank| rank.outcome.is_err()) {
            return Err(phalanx_testkit::processes::describe(&ended).into());
        }
    }
    Ok(())
}

/// In one group, each collective delivers what it delivers alone.
fn every_collective_in_a_group(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (root, sum) = (ranks - 1, ReduceOp::Sum);
    for block in [3usize, 3000] {
        let count = |of: usize| block + of % 2;
        let counts: Vec<usize> = (0..ranks).map(count).collect();
        let total: usize = counts.iter().sum();
        let small = |len: usize, seed: usize| -> Vec<f32> {
            (0..len).map(|i| ((i * 7 + rank * 3 + seed) % 32) as f32).collect()
        };
        let (whole, own, all, mine) =
            (small(block, 1), small(block, 2), small(block * ranks, 3), small(count(rank), 4));
        let (various, rows) = (small(total, 5), vec![block; ranks]);
        let pairs: Vec<usize> = (0..ranks).map(|peer| count(rank + peer)).collect();
        // In both the same calls, in the same order.
        macro_rules! calls {
            ($on:expr, $b:ident) => {{
                let mut buffers = $b.iter_mut();
                let mut next = || buffers.next().expect("one for each call");
                $on.broadcast(&whole, next(), root)
                    .and_then(|()| $on.reduce_in_place(next(), sum, root))
                    .and_then(|()| $on.all_gather_in_place(next()))
                    .and_then(|()| $on.all_gather_v(&mine, next(), &counts))
                    .and_then(|()| $on.reduce_scatter_in_place(next(), sum))
                    .and_then(|()| $on.reduce_scatter_v(&various, next(), &counts, sum))
                    .and_then(|()| $on.all_to_all_in_place(next()))
                    .and_then(|()| $on.all_to_all_v(&all, &rows, next(), &rows))
                    .and_then(|()| $on.gather(&own, next(), root))
                    .and_then(|()| $on.gather_in_place(next(), root))
                    .and_then(|()| $on.gather_v(&mine, next(), &counts, root))
                    .and_then(|()| $on.scatter(&all, next(), root))
                    .and_then(|()| $on.scatter_in_place(next(), root))
                    .and_then(|()| $on.scatter_v(&various, &counts, next(), root))
                    .and_then(|()| $on.all_gather_v_in_place(next(), &counts))
                    .and_then(|()| $on.reduce_scatter_v_in_place(next(), &counts, sum))
                    .and_then(|()| $on.all_to_all_v_in_place(next(), &pairs))
                    .and_then(|()| $on.gather_v_in_place(next(), &counts, root))
                    .and_then(|()| $on.scatter_v_in_place(next(), &counts, root))
            }};
        }
        let (of_one, of_all) = (small(block, 6), small(block * ranks, 7));
        let fresh = || {
            let zeroes = |len: usize| vec![0f32; len];
            vec![
                zeroes(block),
                of_one.clone(),
                of_all.clone(),
                zeroes(total),
                of_all.clone(),
                zeroes(count(rank)),
                of_all.clone(),
                zeroes(block * ranks),
                zeroes(block * ranks),
                of_all.clone(),
                zeroes(total),
                zeroes(block),
                of_all.clone(),
                zeroes(count(rank)),
                various.clone(),
                various.clone(),
                small(pairs.iter().sum(), 8),
                various.clone(),
                various.clone(),
            ]
        };
        let (mut alone, mut together) = (fresh(), fresh());
        calls!(comm, alone).map_err(text)?;
        phalanx::group(|g| {
            let mut on = g.on(comm);
            calls!(on, together)
        })
        .map_err(text)?;
        if let Some(index) = (0..alone.len()).find(|index| alone[*index] != together[*index]) {
            return Err(format!(
                "call {index} of {block} elements, rank {rank}, delivers something else in a group"
            ));
        }
    }
    Ok(String::new())
}
