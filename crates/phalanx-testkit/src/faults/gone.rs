//! Ranks that are killed, stopped, or go away while others need them.

use super::common::{DEADLINE, Ground, MANY, all_within, has, one_verdict, report, says, with_cores};
use super::{Backend, Case};
use crate::fault::Fault;
use crate::processes::{Ended, Launch, describe, phase};
use crate::scenario::Outcome;
use crate::{Fields, Scenario, threads};
use phalanx::{Comm, Error, ReduceOp};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("gone/work", work_until_failure),
    Scenario::rank("gone/short_stop", short_stop),
    Scenario::rank("gone/killed_late", |comm, _| killed_late(comm)),
    Scenario::rank("gone/go", |comm, args| go(comm, &args[0])),
    Scenario::process("gone/one_does_not_return", |_| one_does_not_return()),
    Scenario::rank("gone/panic_amid", |comm, args| panic_amid(comm, &args[0])),
];

/// What ranks do over and over until it fails.
const KINDS: [&str; 12] = [
    "all_reduce_large_shared",
    "all_reduce_large_private",
    "all_reduce_small",
    IN_ROUNDS,
    "all_to_all",
    "all_to_all_fetched",
    "barrier",
    "messages_small",
    "messages_large",
    "requests",
    "epochs",
    "signals",
];

/// Among [`MANY`] ranks.
const IN_ROUNDS: &str = "all_reduce_in_rounds";

/// The ranks of these trials and the one that something happens to.
const RANKS: usize = 4;
const VICTIM: usize = 2;

/// Processes that do a kind of work, and how many.
fn workers(kind: &str, timeout_ms: u64) -> (Launch, usize) {
    let ranks = if kind == IN_ROUNDS { MANY } else { RANKS };
    let launch = Launch::new("gone/work", ranks).arg(kind).arg(timeout_ms).deadline(DEADLINE);
    let launch = if kind == IN_ROUNDS { with_cores(launch, ranks) } else { launch };
    (launch, ranks)
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    if cfg!(target_os = "linux") {
        for kind in KINDS {
            cases.push(Case::new(format!("processes/killed/{kind}"), move || killed(kind, VICTIM)));
            cases.push(Case::new(format!("processes/stopped/{kind}"), move || {
                stopped(kind, "free", Duration::ZERO)
            }));
        }
        // What NCCL's communicators have in host memory.
        for kind in ["epochs", "signals"] {
            let killed = move || killed_on(Backend::Nccl, kind, VICTIM);
            cases.push(Case::new(format!("nccl/killed/{kind}"), killed));
        }
        cases.push(Case::new("processes/killed/rank_0", || killed(KINDS[0], 0)));
        cases
            .push(Case::seeded("processes/killed/in_rounds", |random| killed(IN_ROUNDS, random.below(MANY))));
        // Where peers read and write the memory itself, again and again: each time they are stopped
        // elsewhere.
        cases.push(Case::new("processes/stopped/buffers_used_again", || {
            (0..4).try_for_each(|_| stopped(KINDS[0], "use", Duration::ZERO))
        }));
        // Almost always inside of it: nothing else is done.
        cases.push(Case::seeded("processes/stopped/inside_a_pushed_all_reduce", |random| {
            stopped(KINDS[0], "use", Duration::from_micros(random.below(5000) as u64))
        }));
        cases.push(Case::new("processes/stopped/briefly", stopped_briefly));
        cases.push(Case::new("processes/killed/at_once", killed_at_once));
        cases.push(Case::new("threads/one_does_not_return", expect_named_that_does_not_return));
        cases.push(Case::new("processes/stopped/by_a_debugger_until_the_deadline", held));
        for how in ["leave", "panic", "exit", "abort", "late"] {
            cases.push(Case::new(format!("processes/{how}"), move || gone_process(how)));
        }
    }
    for how in ["leave", "panic", "abort", "late"] {
        cases.push(Case::new(format!("threads/{how}"), move || gone_thread(how)));
    }
    for amid in ["a_request", "the_portable_trait", "a_closure"] {
        if cfg!(target_os = "linux") {
            cases.push(Case::new(format!("processes/panic_amid/{amid}"), move || panicked_process(amid)));
        }
        cases.push(Case::new(format!("threads/panic_amid/{amid}"), move || panicked_thread(amid)));
    }
    cases.push(Case::new("threads/panic_amid/a_started_closure", || {
        let outcomes = threads::run(RANKS, DEADLINE, panic_in_a_started_closure)?;
        outcomes.into_iter().collect::<Result<Vec<String>, String>>().map(drop)
    }));
    cases
}

/// One round of a kind of work.
fn round(comm: &Comm, kind: &str, shared: &mut [f32], private: &mut Vec<f32>) -> phalanx::Result<()> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    match kind {
        "all_reduce_large_shared" => comm.all_reduce_in_place(shared, ReduceOp::Max),
        "all_reduce_large_private" => comm.all_reduce_in_place(private, ReduceOp::Max),
        "all_reduce_small" => comm.all_reduce_in_place(&mut private[..5], ReduceOp::Max),
        IN_ROUNDS => comm.all_reduce_in_place(&mut private[..100], ReduceOp::Max),
        "all_to_all" => comm.all_to_all_in_place(private),
        // Blocks of 512 KiB, which processes read out of each other.
        "all_to_all_fetched" => {
            let (send, recv) = private.split_at_mut(1 << 19);
            comm.all_to_all(&send[..], &mut recv[..1 << 19])
        }
        "barrier" => comm.barrier(),
        "messages_small" => {
            let (send, recv) = private.split_at_mut(10);
            comm.send_recv(&send[..], next, &mut recv[..10], previous)
        }
        "messages_large" => {
            let (send, recv) = private.split_at_mut(1 << 19);
            comm.send_recv(&send[..], next, &mut recv[..1 << 19], previous)
        }
        "requests" => {
            let request = comm.start_all_reduce(std::mem::take(private), ReduceOp::Max)?;
            *private = request.wait()?;
            Ok(())
        }
        "epochs" => {
            let mut memory = comm.symmetric::<f32>(1 << 18)?;
            let epoch = memory.epoch()?;
            epoch.put(&private[..1 << 18], next, 0)?;
            epoch.end()
        }
        // In one long epoch nobody meets: only the signals say that a rank is gone.
        "signals" => {
            let mut memory = comm.symmetric::<f32>(1000)?;
            let epoch = memory.epoch()?;
            for _ in 0..200 {
                epoch.put(&private[..1000], next, 0)?;
                epoch.signal(next)?;
                epoch.wait_signals(previous, 1)?;
            }
            epoch.end()
        }
        other => panic!("no kind of work is called {other}"),
    }
}

/// Fills the buffers after the failure and looks at them again when the rank that was stopped has gone on.
fn use_for_a_while(buffers: &mut [&mut [f32]]) -> Result<(), String> {
    const MARK: f32 = -7.5;
    buffers.iter_mut().for_each(|buffer| buffer.fill(MARK));
    phase("failed");
    std::thread::sleep(Duration::from_millis(700));
    for buffer in buffers {
        if let Some(index) = buffer.iter().position(|value| *value != MARK) {
            return Err(format!("after the failure a peer wrote {} to element {index}", buffer[index]));
        }
    }
    Ok(())
}

/// Works until that fails, and reports the failure. Arguments: the kind, the timeout in milliseconds, and
/// what is done with the buffers afterwards: `free` or `use`.
fn work_until_failure(comm: Comm, args: &[String]) -> Outcome {
    let kind = args[0].as_str();
    comm.set_timeout(Duration::from_millis(args[1].parse().map_err(|_| "no timeout")?));
    let mut shared = comm.alloc::<f32>(1 << 20).map_err(|error| error.to_string())?;
    let mut private = vec![1.0f32; 1 << 20];
    let give_up = Instant::now() + DEADLINE;
    for rounds in 0.. {
        let since = Instant::now();
        let result = round(&comm, kind, &mut shared, &mut private);
        let took = since.elapsed();
        if let Err(error) = result {
            let fields = report(comm, &error, took)?;
            // From here on the buffers are this rank's own again. It gives them back, or it uses them, and
            // then nobody else may.
            if args.get(2).is_some_and(|what| what == "use") {
                use_for_a_while(&mut [&mut shared, &mut private])?;
            } else {
                drop((shared, private));
                phase("failed");
            }
            return Ok(fields.to_string());
        }
        if rounds == 5 {
            phase("working");
        }
        if Instant::now() > give_up {
            return Err("nothing failed".into());
        }
    }
    unreachable!("the loop has no end")
}

/// A peer that is gone is noticed within about 50 ms, says the documentation; the rest is for a machine with much else to do.
const NOTICED: Duration = Duration::from_secs(1);

fn reports_but(ended: Vec<Ended>, but: Option<usize>) -> Result<Vec<String>, String> {
    if ended.iter().any(|rank| Some(rank.rank) != but && rank.outcome.is_err()) {
        return Err(describe(&ended));
    }
    let others = ended.into_iter().filter(|rank| Some(rank.rank) != but);
    Ok(others.filter_map(|rank| rank.outcome.ok()).collect())
}

fn killed(kind: &str, victim: usize) -> Result<(), String> {
    killed_on(Backend::Host, kind, victim)
}

fn killed_on(backend: Backend, kind: &str, victim: usize) -> Result<(), String> {
    let (launch, ranks) = workers(kind, 30_000);
    let ground = Ground::new(backend)?;
    let mut world = ground.launch(launch).start()?;
    for rank in 0..ranks {
        world.await_phase(rank, "working")?;
    }
    world.inject(victim, Fault::Kill)?;
    let reports = reports_but(world.finish(), Some(victim))?;
    let verdict = one_verdict(&reports, ranks - 1)?;
    has(&verdict, "kind", "peer")?;
    has(&verdict, "rank", victim)?;
    has(&verdict, "event", "Died")?;
    has(&verdict, "fatal", true)?;
    all_within(&reports, NOTICED)?;
    Ok(())
}

/// The best of several: a machine with much else to do may be late each time, but not every time.
fn killed_at_once() -> Result<(), String> {
    const TRIES: usize = 6;
    // A sleep of at most 50 ms ends before a rank looks, and the rest is for waking up.
    const AT_ONCE: u64 = 150;
    let took = |report: &String| Fields::parse(report).and_then(|fields| fields.number("took_ms"));
    let mut best = u64::MAX;
    for _ in 0..TRIES {
        let launch = Launch::new("gone/killed_late", RANKS).deadline(DEADLINE);
        let reports = reports_but(launch.run()?, Some(VICTIM))?;
        let slowest =
            reports.iter().map(|report| took(report).ok_or("no time")).collect::<Result<Vec<_>, _>>()?;
        best = best.min(slowest.into_iter().max().unwrap_or(u64::MAX));
    }
    if best <= AT_ONCE {
        Ok(())
    } else {
        Err(format!("never noticed within {AT_ONCE} ms: {best} ms at best"))
    }
}

/// A rank dies when the others have waited for it for a while, and look rarely. Reports how long after its death they know.
fn killed_late(comm: Comm) -> Outcome {
    const WHEN: Duration = Duration::from_millis(600);
    let mut one = [1u8];
    comm.all_reduce_in_place(&mut one, ReduceOp::Max).map_err(|error| error.to_string())?;
    if comm.rank() == VICTIM {
        std::thread::sleep(WHEN);
        return Err(format!("not killed: {:?}", crate::fault::inject_here(Fault::Kill)));
    }
    let since = Instant::now();
    match comm.barrier() {
        Err(phalanx::Error::Peer(error)) if error.rank == VICTIM => {
            let after = since.elapsed().saturating_sub(WHEN);
            Ok(Fields::new().with("took_ms", after.as_millis()).to_string())
        }
        other => Err(format!("{other:?}")),
    }
}

/// A rank that a debugger holds is waited for until the deadline, and then named.
fn held() -> Result<(), String> {
    let (launch, ranks) = workers("barrier", 3000);
    let mut world = launch.start()?;
    (0..ranks).try_for_each(|rank| world.await_phase(rank, "working"))?;
    world.inject(VICTIM, Fault::Hold)?;
    for rank in (0..ranks).filter(|rank| *rank != VICTIM) {
        world.await_phase(rank, "failed")?;
    }
    world.inject(VICTIM, Fault::Release)?;
    let verdict = one_verdict(&reports_but(world.finish(), None)?, ranks)?;
    has(&verdict, "kind", "timeout")?;
    has(&verdict, "missing", VICTIM)?;
    says(&verdict, "last_seen", "stopped by a debugger")
}

fn stopped(kind: &str, then: &str, pause: Duration) -> Result<(), String> {
    let (launch, ranks) = workers(kind, 1000);
    let mut world = launch.arg(then).env("PHALANX_STOPPED_TIMEOUT", "60").start()?;
    for rank in 0..ranks {
        world.await_phase(rank, "working")?;
    }
    std::thread::sleep(pause);
    world.inject(VICTIM, Fault::Stop)?;
    for rank in (0..ranks).filter(|rank| *rank != VICTIM) {
        world.await_phase(rank, "failed")?;
    }
    // The others have given up and freed or filled their buffers; the one that was stopped goes on in the
    // middle of whatever it was doing with them.
    world.inject(VICTIM, Fault::Continue)?;
    let reports = reports_but(world.finish(), None)?;
    let verdict = one_verdict(&reports, ranks)?;
    has(&verdict, "kind", "timeout")?;
    has(&verdict, "missing", VICTIM)?;
    has(&verdict, "fatal", true)?;
    says(&verdict, "last_seen", "stopped")?;
    let others: Vec<String> =
        reports.into_iter().enumerate().filter(|(rank, _)| *rank != VICTIM).map(|(_, r)| r).collect();
    all_within(&others, Duration::from_secs(2))?;
    Ok(())
}

/// Barriers and sums for a second and a half.
fn short_stop(comm: Comm, _: &[String]) -> Outcome {
    let mut sum = vec![0u64; 200_000];
    phase("working");
    let since = Instant::now();
    let mut going = [1u8];
    while going[0] == 1 {
        sum.fill(1);
        comm.all_reduce_in_place(&mut sum, ReduceOp::Sum).map_err(|error| error.to_string())?;
        if sum.iter().any(|sum| *sum != RANKS as u64) {
            return Err("a wrong sum".into());
        }
        going = [u8::from(since.elapsed() < Duration::from_millis(1500))];
        comm.all_reduce_in_place(&mut going, ReduceOp::Min).map_err(|error| error.to_string())?;
    }
    Ok(String::new())
}

/// Within the deadline, a rank may be stopped and go on.
fn stopped_briefly() -> Result<(), String> {
    let mut world = Launch::new("gone/short_stop", RANKS).deadline(DEADLINE).start()?;
    world.await_phase(VICTIM, "working")?;
    for _ in 0..4 {
        world.inject(VICTIM, Fault::Stop)?;
        std::thread::sleep(Duration::from_millis(150));
        world.inject(VICTIM, Fault::Continue)?;
        std::thread::sleep(Duration::from_millis(50));
    }
    reports_but(world.finish(), None)?;
    Ok(())
}

/// The deadline of the trials in which a rank comes later than that.
const LATE_TIMEOUT: Duration = Duration::from_millis(500);

/// Five rounds together, then rank [`VICTIM`] goes in the way that is asked for; the others go on.
fn go(comm: Comm, how: &str) -> Outcome {
    let rank = comm.rank();
    let mut buffer = vec![1.0f32; 100_000];
    if how == "late" {
        comm.set_timeout(LATE_TIMEOUT);
    }
    for rounds in 0.. {
        if rounds == 5 && rank == VICTIM {
            match how {
                "leave" => return Ok("left".into()),
                "panic" => panic!("{TOLD_TO}"),
                "exit" => std::process::exit(17),
                "abort" => {
                    comm.abort();
                    return Ok("aborted".into());
                }
                "late" => std::thread::sleep(3 * LATE_TIMEOUT),
                other => panic!("nobody goes by {other}"),
            }
        }
        let since = Instant::now();
        if let Err(error) = comm.all_reduce_in_place(&mut buffer, ReduceOp::Max) {
            return Ok(report(comm, &error, since.elapsed())?.to_string());
        }
        if rounds > 5 {
            return Err(format!("the operation succeeded without rank {VICTIM}"));
        }
    }
    unreachable!("the loop has no end")
}

/// All ranks but one come back to `run`.
fn one_does_not_return() -> Outcome {
    let ran = Comm::builder().timeout(LATE_TIMEOUT).run(RANKS, |comm| {
        let met = comm.barrier();
        if comm.rank() == VICTIM {
            std::thread::sleep(3 * LATE_TIMEOUT);
        }
        met
    });
    ran.and_then(|ranks| ranks.into_iter().collect::<phalanx::Result<()>>()).map_err(|e| e.to_string())?;
    Ok(String::new())
}

/// After the deadline it is said which rank is waited for, and what that rank did last.
fn expect_named_that_does_not_return() -> Result<(), String> {
    let ended = Launch::alone("gone/one_does_not_return").deadline(DEADLINE).run()?;
    let named = format!("waiting for rank {VICTIM} (it has completed barrier");
    match &ended[..] {
        [process] if process.outcome.is_ok() && process.output.contains(&named) => Ok(()),
        _ => Err(format!("no {named:?}:{}", describe(&ended))),
    }
}

fn expect_gone(how: &str, reports: &[String]) -> Result<(), String> {
    // Who comes late is told as well, when it comes.
    let verdict: Fields = one_verdict(reports, if how == "late" { RANKS } else { RANKS - 1 })?;
    has(&verdict, "fatal", true)?;
    match how {
        "abort" => {
            has(&verdict, "kind", "aborted")?;
            has(&verdict, "rank", VICTIM)?;
        }
        "late" => {
            has(&verdict, "kind", "timeout")?;
            has(&verdict, "missing", VICTIM)?;
            has(&verdict, "sequence", 6)?;
            return all_within(reports, LATE_TIMEOUT + Duration::from_secs(1));
        }
        _ => {
            has(&verdict, "rank", VICTIM)?;
            has(&verdict, "kind", "peer")?;
            let event = match how {
                "leave" => "Left",
                "panic" => "Panicked",
                _ => "Died",
            };
            has(&verdict, "event", event)?;
            says(&verdict, "operation", "all_reduce")?;
            has(&verdict, "sequence", 6)?;
        }
    }
    all_within(reports, NOTICED)?;
    Ok(())
}

fn gone_process(how: &str) -> Result<(), String> {
    let ended = Launch::new("gone/go", RANKS).arg(how).deadline(DEADLINE).run()?;
    let but = (how != "late").then_some(VICTIM);
    expect_gone(how, &reports_but(ended, but)?)
}

fn gone_thread(how: &'static str) -> Result<(), String> {
    let reports = Arc::new(Mutex::new(vec![None; RANKS]));
    let sink = reports.clone();
    let world = threads::run(RANKS, DEADLINE, move |comm| {
        let rank = comm.rank();
        let outcome = go(comm, how);
        if let Ok(mut reports) = sink.lock() {
            reports[rank] = Some(outcome.clone());
        }
        outcome
    });
    match (how, world) {
        // The rank's panic comes back to the caller of `run`, after all others have ended.
        ("panic", Err(problem)) if problem.contains(TOLD_TO) => {}
        ("panic", other) => return Err(format!("the panic did not come back: {other:?}")),
        (_, world) => drop(world?),
    }
    let reports = reports.lock().map_err(|_| "a rank panicked with the reports in hand")?;
    let others = reports.iter().enumerate().filter(|(rank, _)| how == "late" || *rank != VICTIM);
    let others: Result<Vec<String>, String> = others
        .map(|(rank, report)| report.clone().unwrap_or_else(|| Err(format!("rank {rank} has no report"))))
        .collect();
    expect_gone(how, &others?)
}

/// Rank [`VICTIM`] panics with something under way that will never be complete; the others wait for a message
/// from it.
fn panic_amid(comm: Comm, amid: &str) -> Outcome {
    // Longer than the trial may take.
    comm.set_timeout(Duration::from_secs(300));
    if amid == "a_closure" {
        return panic_in_a_closure(comm);
    }
    if comm.rank() != VICTIM {
        let since = Instant::now();
        return match comm.recv(&mut [0u8; 3], VICTIM) {
            Ok(()) => Err("a message came".into()),
            Err(error) => Ok(report(comm, &error, since.elapsed())?.to_string()),
        };
    }
    if amid == "a_request" {
        let _request =
            comm.start_all_reduce(vec![1u8; 3], ReduceOp::Sum).map_err(|error| error.to_string())?;
        panic!("{TOLD_TO}");
    }
    let comm = comm.into_raw_communicator();
    // SAFETY: the memory is never given back.
    unsafe {
        let never = Box::leak(Box::new([0u8; 3])).as_mut_ptr() as u64;
        comm.recv(never, 3, phalanx::DType::U8, 0, 0).map_err(|error| error.to_string())?;
    }
    panic!("{TOLD_TO}");
}

/// The closure of rank [`VICTIM`] panics while it reads and writes memory of other ranks.
fn panic_in_a_closure(comm: Comm) -> Outcome {
    let is_victim = comm.rank() == VICTIM;
    let since = Instant::now();
    let mut memory = comm.alloc::<u64>(200_000).map_err(|error| error.to_string())?;
    let reduced = comm.all_reduce_in_place_with(&mut memory, |a, b| {
        assert!(!is_victim, "{TOLD_TO}");
        a + b
    });
    match reduced {
        Ok(()) => Err("a reduction without the rank that panicked".into()),
        Err(error) => Ok(report(comm, &error, since.elapsed())?.to_string()),
    }
}

/// The closure panics in the thread that carries a started reduction out: the rank itself goes on, with the error that all get.
fn panic_in_a_started_closure(comm: Comm) -> Outcome {
    let is_victim = comm.rank() == VICTIM;
    let since = Instant::now();
    let reduced = comm.start_all_reduce_with(vec![1u64; 200_000], move |a, b| {
        assert!(!is_victim, "{TOLD_TO}");
        a + b
    });
    match reduced.and_then(phalanx::Request::wait) {
        Err(Error::Peer(error)) if error.rank == VICTIM && since.elapsed() < NOTICED => Ok(String::new()),
        other => Err(format!("after {:?}: {:?}", since.elapsed(), other.map(|sums| sums.len()))),
    }
}

const TOLD_TO: &str = "this rank was told to panic";

fn panicked_process(amid: &str) -> Result<(), String> {
    let ended = Launch::new("gone/panic_amid", RANKS).arg(amid).deadline(DEADLINE).run()?;
    expect_panicked(&reports_but(ended, Some(VICTIM))?)
}

fn panicked_thread(amid: &'static str) -> Result<(), String> {
    let reports = Arc::new(Mutex::new(Vec::new()));
    let sink = reports.clone();
    let world = threads::run(RANKS, DEADLINE, move |comm| {
        let outcome = panic_amid(comm, amid);
        if let (Ok(mut reports), Ok(report)) = (sink.lock(), &outcome) {
            reports.push(report.clone());
        }
        outcome
    });
    match world {
        Err(problem) if problem.contains(TOLD_TO) => {}
        other => return Err(format!("the panic did not come back: {other:?}")),
    }
    let reports = reports.lock().map_err(|_| "a rank panicked with the reports in hand")?;
    expect_panicked(&reports)
}

fn expect_panicked(reports: &[String]) -> Result<(), String> {
    let verdict = one_verdict(reports, RANKS - 1)?;
    has(&verdict, "rank", VICTIM)?;
    has(&verdict, "event", "Panicked")?;
    all_within(reports, NOTICED)
}
