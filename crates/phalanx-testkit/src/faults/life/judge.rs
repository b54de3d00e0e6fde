//! What must come of it: one verdict on all survivors, that names the right rank, in time; and nothing left
//! behind.

use super::{GRACE, NOTICED, Plan, Way};
use crate::fault::Fault;
use crate::faults::Backend;
use crate::faults::common::{self, Ground, one_verdict};
use crate::fields::Fields;
use crate::processes::{Ended, Launch, describe};
use crate::program::Problem;
use phalanx::Error;
use std::time::Duration;

/// On NCCL, for so long what a rank had enqueued before it went may still arrive.
const STILL_ARRIVES: Duration = Duration::from_secs(2);

impl Plan {
    /// In a part of the world, the verdict must name the victim, too, by its number there.
    pub fn expect_in_part(&self, error: &Error, rank: usize) -> Result<(), Problem> {
        let there = self.victim / 2;
        let right = self.victim % 2 == rank % 2
            && match error {
                Error::Peer(error) => error.rank == there,
                Error::Timeout(error) => error.missing.iter().all(|missing| missing.rank == there),
                _ => false,
            };
        if right { Ok(()) } else { Err(Problem::Wrong(format!("in a part: {error}"))) }
    }

    /// The verdict on the victim's going, as far as it can be known.
    fn expect(&self, verdict: &Fields) -> Result<(), String> {
        let victim = self.victim.to_string();
        // On NCCL, the deadline may pass before a rank that has left is given up.
        let overdue = self.backend == Backend::Nccl && verdict.get("kind") == Some("timeout");
        let (kind, event) = match self.way {
            Way::Leave if overdue => ("timeout", None),
            Way::Kill | Way::Exit => ("peer", Some("Died")),
            Way::Panic => ("peer", Some("Panicked")),
            Way::Leave => ("peer", Some("Left")),
            Way::Abort => ("aborted", None),
            // Whichever comes first.
            Way::Stop if verdict.get("kind") == Some("peer") => ("peer", Some("Stopped")),
            Way::Stop | Way::Late => ("timeout", None),
        };
        common::has(verdict, "kind", kind)?;
        common::has(verdict, "fatal", true)?;
        if let Some(event) = event {
            common::has(verdict, "event", event)?;
        }
        common::has(verdict, if kind == "timeout" { "missing" } else { "rank" }, victim)
    }
}

pub fn processes(plan: &Plan) -> Result<(), String> {
    let ground = Ground::new(plan.backend)?;
    let mut world = ground.launch(plan.launch(Launch::new("life/rank", plan.ranks), true)).start()?;
    if plan.way == Way::Stop {
        for rank in (0..plan.ranks).filter(|rank| *rank != plan.victim) {
            world.await_phase(rank, "through").map_err(|problem| format!("{problem}\n{plan:?}"))?;
        }
        // The others may be at their end before it happens.
        world.await_stop(plan.victim)?;
        world.inject(plan.victim, Fault::Continue)?;
    }
    plan.surroundings.happen(&mut world, plan.ranks).map_err(|problem| format!("{problem}\n{plan:?}"))?;
    let ended = world.finish();
    judge(plan, &reports(plan, &ended)?)
        .map_err(|problem| format!("{problem}\n{}\n{plan:?}", describe(&ended)))
}

pub fn threads(plan: &Plan) -> Result<(), String> {
    let ground = Ground::new(plan.backend)?;
    let reports = ground.launch(plan.launch(Launch::alone("life/threads"), false)).reports();
    let reports = reports.map_err(|problem| format!("{problem}\n{plan:?}"))?;
    let lines: Vec<String> = reports[0].split('\n').map(str::to_owned).collect();
    judge(plan, &lines).map_err(|problem| format!("{problem}\n{lines:#?}\n{plan:?}"))
}

/// Every rank's report, in rank order; that of a victim which could give none is empty.
fn reports(plan: &Plan, ended: &[Ended]) -> Result<Vec<String>, String> {
    let report = |rank: &Ended| match &rank.outcome {
        Ok(report) => Ok(report.clone()),
        Err(_) if rank.rank == plan.victim && !plan.way.comes_back() => Ok(String::new()),
        Err(_) => Err(format!("rank {} has no report:{}\n{plan:?}", rank.rank, describe(ended))),
    };
    ended.iter().map(report).collect()
}

fn judge(plan: &Plan, reports: &[String]) -> Result<(), String> {
    let parsed: Option<Vec<Fields>> = reports.iter().map(|report| Fields::parse(report)).collect();
    let parsed = parsed.ok_or("not a report")?;
    let survivors = || parsed.iter().enumerate().filter(|(rank, _)| *rank != plan.victim);
    let outcome = |fields: &Fields| fields.get("outcome").unwrap_or_default().to_owned();
    if plan.at.is_none() && survivors().any(|(_, fields)| outcome(fields) == "alone") {
        return survivors().try_for_each(|(_, fields)| judge_meeting(plan, fields));
    }
    for (rank, fields) in survivors() {
        match outcome(fields).as_str() {
            "failed" => judge_failure(plan, fields).map_err(|problem| format!("rank {rank}: {problem}"))?,
            "done" if plan.is_last() => {}
            // Who came through the meeting in time was not late.
            "done" if plan.at.is_none() && plan.delay.is_some() && plan.way == Way::Stop => {}
            other => return Err(format!("rank {rank} is {other:?}: {fields}")),
        }
    }
    let failures: Vec<String> = survivors()
        .filter(|(_, fields)| outcome(fields) == "failed")
        .map(|(_, fields)| fields.clone().without(&["step", "shrunk", "outcome"]).to_string())
        .collect();
    if failures.is_empty() {
        return Ok(());
    }
    let verdict = one_verdict(&failures, failures.len())?;
    judge_operation(plan, &verdict, survivors().filter_map(|(_, fields)| fields.number("step")).max())?;
    judge_going_on(plan, &parsed)
}

/// The ranks did not meet: each survivor is told why, and who did not come.
fn judge_meeting(plan: &Plan, fields: &Fields) -> Result<(), String> {
    if fields.get("kind") != Some("bootstrap") {
        // The library's communicator was being made.
        plan.expect(fields)?;
        return in_time(fields, plan.meeting() + GRACE);
    }
    let victim = plan.victim.to_string();
    let text = fields.get("text").unwrap_or_default();
    if fields.get("missing") != Some(&victim) && !text.contains(&format!("rank {victim}")) {
        return Err(format!("rank {victim} is not named: {fields}"));
    }
    in_time(fields, plan.meeting() + GRACE)
}

fn judge_failure(plan: &Plan, fields: &Fields) -> Result<(), String> {
    plan.expect(fields)?;
    let early = fields.number("step").is_none_or(|step| step < first_step(plan));
    // An abort ends whatever the others are in, also if they are behind.
    if early && plan.way != Way::Abort {
        return Err(format!("it failed before anything had happened: {fields}"));
    }
    let limit = match plan.way {
        way if way.comes_back() => plan.timeout() + GRACE,
        Way::Leave | Way::Panic if plan.backend == Backend::Nccl => NOTICED + STILL_ARRIVES,
        _ => NOTICED,
    };
    in_time(fields, limit + plan.surroundings.stands_still())
}

/// The first step that may fail. On a GPU, the one before may not be complete on a rank when another has
/// completed it.
fn first_step(plan: &Plan) -> u64 {
    let at = plan.at.unwrap_or(0) as u64;
    if plan.backend == Backend::Nccl { at.saturating_sub(1) } else { at }
}

fn in_time(fields: &Fields, limit: Duration) -> Result<(), String> {
    match fields.number("took_ms") {
        Some(took) if u128::from(took) <= limit.as_millis() => Ok(()),
        _ => Err(format!("not within {limit:?}: {fields}")),
    }
}

/// The operation that the verdict names is one that was under way.
fn judge_operation(plan: &Plan, verdict: &Fields, last: Option<u64>) -> Result<(), String> {
    let Some(operation) = verdict.get("operation") else { return Ok(()) };
    let acts = &plan.acts[first_step(plan) as usize..=last.unwrap_or(0) as usize];
    let name = operation.split('(').next().unwrap_or_default();
    if acts.iter().any(|act| act.names().iter().any(|other| other == name)) {
        Ok(())
    } else {
        Err(format!("{operation} was not under way: {verdict}"))
    }
}

/// Those who failed together go on together.
fn judge_going_on(plan: &Plan, reports: &[Fields]) -> Result<(), String> {
    // In the last step some may have been done already, and gone.
    if reports.iter().any(|fields| fields.get("step").is_some() && fields.get("shrunk").is_none()) {
        return Ok(());
    }
    for (rank, fields) in reports.iter().enumerate().filter(|(_, fields)| fields.get("shrunk").is_some()) {
        let right = if rank == plan.victim { "left behind".into() } else { (plan.ranks - 1).to_string() };
        common::has(fields, "shrunk", right).map_err(|problem| format!("rank {rank}: {problem}"))?;
    }
    Ok(())
}
