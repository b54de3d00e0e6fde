//! Symmetric memory whose ranks are late, or stopped in the middle of an access. `gone.rs` has those that are killed.

use super::common::{DEADLINE, Ground, has, report, says};
use super::{Backend, Case};
use crate::fault::Fault;
use crate::mpi::Installation;
use crate::processes::{Launch, describe, phase};
use crate::scenario::{Outcome, Scenario};
use crate::{Fields, verdict};
use phalanx::Comm;
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("one_sided/written_later", |comm, _| written_later(comm)),
    Scenario::rank("one_sided/late", |comm, args| late(&comm, &args[0])),
];

const VICTIM: usize = 2;
/// The deadline of the operations.
const LIMIT: Duration = Duration::from_millis(500);
/// When the rank comes that is late.
const LATE: Duration = Duration::from_millis(1500);

pub fn cases() -> Vec<Case> {
    if !cfg!(target_os = "linux") {
        return Vec::new();
    }
    let late = |(name, backend): (&str, Backend), wait: &'static str| {
        Case::new(format!("{name}/one_sided/late/{wait}"), move || {
            let launch = Launch::new("one_sided/late", 2).arg(wait).deadline(DEADLINE);
            Ground::new(backend)?.launch(launch).reports().map(drop)
        })
    };
    let mut cases: Vec<_> = [("processes", Backend::Host), ("nccl", Backend::Nccl)]
        .into_iter()
        .flat_map(|place| ["signals", "end", "epoch"].map(|wait| late(place, wait)))
        .collect();
    cases.push(Case::new("processes/one_sided/written_later", stopped_while_it_writes));
    cases
}

/// On MPI a wait for signals is given up, and the end of an epoch ends the job.
pub fn mpi_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, found) in Installation::all() {
        for wait in ["signals", "end"] {
            let installation = found.clone().ok();
            let case = Case::new(format!("{name}/one_sided/late/{wait}"), move || {
                job(installation.as_ref().ok_or("it is not installed")?, wait)
            });
            cases.push(case.ignored(found.clone().err()));
        }
    }
    cases
}

fn job(installation: &Installation, wait: &str) -> Result<(), String> {
    let job = installation.job(2).scenario("one_sided/late", &[wait]);
    if wait == "signals" {
        return job.succeed().map(drop);
    }
    let since = Instant::now();
    let ended = job.run()?;
    let says = |line: &str| {
        line.contains("phalanx: timeout after ") && line.contains("ms in end of an epoch(memory 1)")
    };
    let failed = ended.status.is_some_and(|status| !status.success());
    if failed && ended.output.lines().any(says) && since.elapsed() < Duration::from_secs(10) {
        return Ok(());
    }
    Err(format!("{:?}: {ended:?}", since.elapsed()))
}

/// Rank 1 is late, and rank 0 names it when the deadline has passed.
fn late(comm: &Comm, wait: &str) -> Outcome {
    let text = |error: phalanx::Error| error.to_string();
    let part = comm.split(Some(0), 0).map_err(text)?.ok_or("no part")?;
    let mut memory = part.symmetric::<u32>(8).map_err(text)?;
    let is_late = comm.rank() == 1;
    let come = || {
        part.set_timeout(LIMIT);
        if is_late {
            std::thread::sleep(LATE);
        }
        Instant::now()
    };
    let (since, outcome) = if wait == "epoch" {
        let since = come();
        (since, memory.epoch().map(std::mem::forget))
    } else {
        let epoch = memory.epoch().map_err(text)?;
        let since = come();
        if wait == "end" {
            (since, epoch.end())
        } else {
            let outcome = if is_late { Ok(()) } else { epoch.wait_signals(1, 1) };
            // Its end would be one more wait for a rank that is late.
            std::mem::forget(epoch);
            if is_late {
                return Ok(String::new());
            }
            (since, outcome)
        }
    };
    let fields = verdict::expected(outcome, wait)?;
    has(&fields, "kind", "timeout")?;
    has(&fields, "missing", 1)?;
    let took = since.elapsed();
    if !is_late && (took < LIMIT || took > LATE) {
        return Err(format!("after {took:?}: {fields}"));
    }
    let operation = match wait {
        "signals" => "wait_signals(rank 1)",
        "end" => "end of an epoch(memory 1)",
        _ => "epoch(memory 1)",
    };
    has(&fields, "operation", operation)?;
    Ok(String::new())
}

/// What no rank puts.
const MARK: f64 = -7.5;

/// Rank [`VICTIM`] writes to rank 0's part all the time. The others end the epoch, and cannot; then their parts are theirs alone.
fn written_later(comm: Comm) -> Outcome {
    const LEN: usize = 1 << 21;
    let text = |error: phalanx::Error| error.to_string();
    comm.set_timeout(Duration::from_secs(1));
    let mut memory = comm.symmetric::<f64>(LEN).map_err(text)?;
    let values = vec![1.0 + comm.rank() as f64; LEN];
    let epoch = memory.epoch().map_err(text)?;
    phase("working");
    let since = Instant::now();
    if comm.rank() == VICTIM {
        // It is stopped here, goes on when the others have failed, and fails as well.
        while epoch.put(&values, 0, 0).is_ok() {
            if since.elapsed() > DEADLINE {
                return Err("it was not stopped".into());
            }
        }
    }
    let error = epoch.end().err().ok_or("the epoch has ended")?;
    memory.local_mut().fill(MARK);
    phase("failed");
    std::thread::sleep(Duration::from_millis(700));
    if let Some(other) = memory.local().iter().find(|value| **value != MARK) {
        return Err(format!("after the failure a peer wrote {other}"));
    }
    drop(memory);
    Ok(report(comm, &error, since.elapsed())?.to_string())
}

fn stopped_while_it_writes() -> Result<(), String> {
    let mut world = Launch::new("one_sided/written_later", 3)
        .deadline(DEADLINE)
        .env("PHALANX_STOPPED_TIMEOUT", "60")
        .start()?;
    (0..3).try_for_each(|rank| world.await_phase(rank, "working"))?;
    world.inject(VICTIM, Fault::Stop)?;
    (0..2).try_for_each(|rank| world.await_phase(rank, "failed"))?;
    world.inject(VICTIM, Fault::Continue)?;
    let ended = world.finish();
    if ended.iter().any(|rank| rank.outcome.is_err()) {
        return Err(describe(&ended));
    }
    let reports: Vec<String> = ended.into_iter().filter_map(|rank| rank.outcome.ok()).collect();
    for report in &reports {
        let fields = Fields::parse(report).ok_or("not a report")?;
        has(&fields, "kind", "timeout")?;
        has(&fields, "missing", VICTIM)?;
        says(&fields, "operation", "end of an epoch(memory 1)")?;
    }
    Ok(())
}
