//! How communicators end: by abort, revocation, a peer's death, and in the recommended way.

use super::child::{emulated, succeeds};
use super::communicators::ranks_that_answer;
use super::nccl::{Config, IN_PROGRESS, INVALID_USAGE, REMOTE_ERROR, SUCCESS, UniqueId, expect, nccl, ok};
use super::world::{Rank, at, begun, own_rank, shared_id, threads, unique_id};
use cudarc::driver::CudaContext;
use libtest_mimic::{Failed, Trial};
use phalanx_testkit::Scenario;
use phalanx_testkit::fault::Fault;
use phalanx_testkit::processes::{Launch, describe, phase};
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::process("ending/abort", abort),
    Scenario::process("ending/abort_init", abort_init),
    Scenario::process("ending/abort_derive", abort_derive),
    Scenario::process("ending/revoke", revoke),
    Scenario::process("ending/cycles", cycles),
    Scenario::process("ending/killed", killed_rank),
    Scenario::process("ending/killed_idle", killed_idle_rank),
    Scenario::process("ending/processes", ended_rank),
];

pub fn trials() -> Vec<Trial> {
    vec![
        succeeds("ending/abort", &[], "ending/abort", &[]),
        succeeds("ending/abort_init", &[("INIT", "hang")], "ending/abort_init", &[]),
        succeeds("ending/abort_derive", &[], "ending/abort_derive", &[]),
        succeeds("ending/revoke", &[], "ending/revoke", &[]),
        succeeds("ending/cycles", &[("DELAY_US", "0..10")], "ending/cycles", &[]),
        Trial::test("ending/killed/hang", || killed("ending/killed", "hang")),
        Trial::test("ending/killed/error", || killed("ending/killed", "error")),
        Trial::test("ending/killed/idle", || killed("ending/killed_idle", "error")),
        Trial::test("ending/processes", || {
            let emulated = emulated(&[])?;
            let folder = emulated.folder().display().to_string();
            Ok(emulated.launch(Launch::new("ending/processes", 3).arg(folder)).reports().map(drop)?)
        }),
    ]
}

fn abort(_: &[String]) -> Outcome {
    let id = unique_id();
    threads(2, |number| {
        let rank = Rank::begin(id, number, 2, false)?;
        if number == 1 {
            std::thread::sleep(Duration::from_millis(150));
            return ok("abort", nccl().abort(rank.comm));
        }
        let slice = rank.upload(&[41u32; 5]);
        let target = rank.upload(&[0u32; 5]);
        rank.stream.synchronize().context(|| "synchronize".into())?;
        rank.done(
            "all_reduce",
            nccl().all_reduce(at(&slice), at(&target), 5, 3, 0, rank.comm, rank.queue()),
        )?;
        let event = rank.stream.record_event(None).context(|| "event".into())?;
        begun(&rank, &target)?;
        assert_eq!(event.try_is_complete(), Ok(false), "the stream waits for the other rank");
        let since = Instant::now();
        ok("abort", nccl().abort(rank.comm))?;
        rank.stream.synchronize().context(|| "synchronize".into())?;
        assert!(since.elapsed() < Duration::from_secs(5));
        // Nothing was delivered.
        assert_eq!(rank.download(&target), [u32::MAX; 5]);
        Ok(())
    })?;
    Ok(String::new())
}

fn abort_init(_: &[String]) -> Outcome {
    let _context = CudaContext::new(0).context(|| "context".into())?;
    let mut comm = 0;
    expect("init", nccl().init_rank_config(&mut comm, 2, unique_id(), 0, &Config::new(false)), IN_PROGRESS)?;
    std::thread::sleep(Duration::from_millis(100));
    expect("still", nccl().state(comm), IN_PROGRESS)?;
    ok("abort", nccl().abort(comm))?;
    Ok(String::new())
}

/// Communicators whose peers never come.
fn abort_derive(_: &[String]) -> Outcome {
    let id = unique_id();
    threads(2, |number| {
        let rank = Rank::begin(id, number, 2, false)?;
        let cell = Box::leak(Box::new(0));
        let mut growth = UniqueId([0; 128]);
        let code = if number == 0 {
            ok("unique id", nccl().comm_unique_id(rank.comm, &mut growth))?;
            nccl().grow(rank.comm, 3, &growth, -1, cell, std::ptr::null())
        } else {
            nccl().grow(rank.comm, 3, std::ptr::null(), -1, cell, std::ptr::null())
        };
        expect("grow", code, IN_PROGRESS)?;
        std::thread::sleep(Duration::from_millis(20));
        expect("still", nccl().state(rank.comm), IN_PROGRESS)?;
        ok("abort", nccl().abort(rank.comm))
    })?;
    let id = unique_id();
    threads(2, |number| {
        let rank = Rank::begin(id, number, 2, false)?;
        let cell = Box::leak(Box::new(0));
        if number == 0 {
            expect("split", nccl().split(rank.comm, 0, 0, cell, std::ptr::null()), IN_PROGRESS)?;
            std::thread::sleep(Duration::from_millis(20));
            expect("still", nccl().state(rank.comm), IN_PROGRESS)?;
        }
        ok("abort", nccl().abort(rank.comm))
    })?;
    Ok(String::new())
}

fn revoke(_: &[String]) -> Outcome {
    let id = unique_id();
    threads(2, |number| {
        let rank = Rank::begin(id, number, 2, false)?;
        if number == 0 {
            // The other rank never calls it.
            let slice = rank.upload(&[41u32; 5]);
            rank.done(
                "all_reduce",
                nccl().all_reduce(at(&slice), at(&slice), 5, 3, 0, rank.comm, rank.queue()),
            )?;
        }
        expect("revoke", nccl().revoke(rank.comm, 0), IN_PROGRESS)?;
        ok("revoke", nccl().settle(rank.comm))?;
        rank.stream.synchronize().context(|| "the stream is free again".into())?;
        let slice = rank.upload(&[1u32]);
        let code = nccl().all_reduce(at(&slice), at(&slice), 1, 3, 0, rank.comm, rank.queue());
        expect("an operation on what was revoked", code, INVALID_USAGE)?;
        let cell = Box::leak(Box::new(0));
        rank.done("split", nccl().split(rank.comm, 0, 0, cell, std::ptr::null()))?;
        // SAFETY: written by another thread, before the parent's state changed.
        let child = unsafe { std::ptr::read_volatile(cell) };
        assert_eq!(ranks_that_answer(&rank, child)?, 2);
        ok("destroy", nccl().destroy(child))?;
        ok("destroy", nccl().destroy(rank.comm))
    })?;
    Ok(String::new())
}

fn status(name: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).unwrap_or(0)
}

fn cycles(_: &[String]) -> Outcome {
    let cycle = || {
        let id = unique_id();
        threads(2, |number| {
            let rank = Rank::begin(id, number, 2, false)?;
            assert_eq!(ranks_that_answer(&rank, rank.comm)?, 2);
            rank.end()
        })
    };
    let measure = || {
        let files = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
        let maps = std::fs::read_to_string("/proc/self/maps").map_or(0, |maps| maps.lines().count());
        (status("Threads:"), files, maps)
    };
    for _ in 0..5 {
        cycle()?;
    }
    std::thread::sleep(Duration::from_millis(100));
    let before = measure();
    for _ in 0..60 {
        cycle()?;
    }
    // Threads take their time to end.
    let since = Instant::now();
    let grown = |after: (usize, usize, usize)| {
        after.0 > before.0 + 2 || after.1 > before.1 + 1 || after.2 > before.2 + 20
    };
    while grown(measure()) && since.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(!grown(measure()), "threads, files, mappings: {before:?}, then {:?}", measure());
    Ok(String::new())
}

fn killed(scenario: &str, setting: &str) -> Result<(), Failed> {
    let emulated = emulated(&[])?.set("PEER_DEATH", setting);
    let folder = emulated.folder().display().to_string();
    let launch = Launch::new(scenario, 3).arg(folder).arg(setting);
    let mut world = emulated.launch(launch).start()?;
    for rank in 0..3 {
        world.await_phase(rank, "ready")?;
    }
    world.inject(2, Fault::Kill)?;
    let ended = world.finish();
    let survived = ended.iter().filter(|rank| rank.outcome.is_ok()).count();
    if survived != 2 {
        return Err(describe(&ended).into());
    }
    Ok(())
}

fn killed_rank(args: &[String]) -> Outcome {
    let number = own_rank();
    let rank = Rank::begin(shared_id(&args[0], "id", number)?, number, 3, false)?;
    assert_eq!(ranks_that_answer(&rank, rank.comm)?, 3);
    let slice = rank.upload(&[1u32]);
    rank.stream.synchronize().context(|| "synchronize".into())?;
    if number == 2 {
        phase("ready");
        std::thread::sleep(Duration::from_secs(60));
        return Err("still alive".into());
    }
    rank.done("all_reduce", nccl().all_reduce(at(&slice), at(&slice), 1, 3, 0, rank.comm, rank.queue()))?;
    phase("ready");
    let event = rank.stream.record_event(None).context(|| "event".into())?;
    let since = Instant::now();
    let mut state = SUCCESS;
    while state == SUCCESS
        && since.elapsed() < Duration::from_millis(if args[1] == "hang" { 500 } else { 20_000 })
    {
        state = nccl().state(rank.comm);
        std::thread::sleep(Duration::from_millis(5));
    }
    expect("state", state, if args[1] == "hang" { SUCCESS } else { REMOTE_ERROR })?;
    assert_eq!(event.try_is_complete(), Ok(false), "the operation hangs");
    ok("abort", nccl().abort(rank.comm))?;
    rank.stream.synchronize().context(|| "synchronize".into())?;
    // The survivors go on with a communicator of their own.
    let next = Rank::begin(shared_id(&args[0], "survivors", number)?, number, 2, false)?;
    assert_eq!(ranks_that_answer(&next, next.comm)?, 2);
    next.end()?;
    Ok(String::new())
}

/// Ranks that have done nothing together yet.
fn killed_idle_rank(args: &[String]) -> Outcome {
    let number = own_rank();
    let rank = Rank::begin(shared_id(&args[0], "id", number)?, number, 3, false)?;
    phase("ready");
    let since = Instant::now();
    while nccl().state(rank.comm) == SUCCESS && since.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(5));
    }
    expect("state", nccl().state(rank.comm), REMOTE_ERROR)?;
    ok("abort", nccl().abort(rank.comm))?;
    Ok(String::new())
}

fn ended_rank(args: &[String]) -> Outcome {
    let number = own_rank();
    let rank = Rank::begin(shared_id(&args[0], "id", number)?, number, 3, false)?;
    let since = Instant::now();
    if number == 1 {
        std::thread::sleep(Duration::from_secs(1));
    }
    // Processes wait for each other at the end.
    rank.end()?;
    assert!(number == 1 || since.elapsed() > Duration::from_millis(200), "rank {number} did not wait");
    Ok(String::new())
}
