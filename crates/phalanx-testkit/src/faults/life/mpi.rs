//! Lives of MPI's ranks. A wait of MPI cannot be taken back, so the job ends: by its launcher when a rank's
//! process ends, by phalanx when a deadline passes. What must be true then: it ends in time, what is written
//! names the rank and the operation, what had succeeded was right, and no process is left.

use super::{Case, GRACE, PATIENCE, Plan, TIMEOUT, Way, rank};
use crate::faults::Backend;
use crate::fields::Fields;
use crate::mpi::{Ended, Installation};
use crate::scenario::Outcome;
use std::time::Duration;

/// How long a launcher may take to end a job.
const ENDING: Duration = Duration::from_secs(5);

/// One of each way for each MPI; those that are not installed are ignored.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, found) in Installation::all() {
        for (way, way_name) in Way::ALL {
            let installation = found.clone().ok();
            let case = Case::seeded(format!("{name}/life/{way_name}"), move |random| {
                let installation = installation.as_ref().ok_or("it is not installed")?;
                job(installation, &Plan::new(random.next_u64(), way, true, Backend::Mpi))
            });
            cases.push(case.ignored(found.clone().err()));
        }
    }
    cases
}

/// A rank of the job. One that fails says so in the place of an error: its process must not end well.
pub fn rank(plan: &Plan) -> Outcome {
    plan.surroundings.enter()?;
    let number = ["OMPI_COMM_WORLD_RANK", "PMI_RANK"].into_iter().find_map(|name| std::env::var(name).ok());
    let number = number.and_then(|rank| rank.parse().ok()).ok_or("no rank of an MPI job")?;
    let fields = rank::process(plan, Some(number))?.with("own_rank", number);
    match fields.get("outcome") {
        Some("failed" | "alone") => Err(fields.to_string()),
        _ => Ok(fields.to_string()),
    }
}

fn job(installation: &Installation, plan: &Plan) -> Result<(), String> {
    let args = plan.args(true);
    let job = installation.job(plan.ranks).scenario("life/mpi", &args.each_ref().map(String::as_str));
    let timeout = plan.meeting().as_secs_f64().to_string();
    let ended = job.env("PHALANX_TIMEOUT", &timeout).deadline(PATIENCE).run()?;
    judge(plan, &ended).map_err(|problem| format!("{problem}\n{ended:#?}\n{plan:?}"))
}

fn judge(plan: &Plan, ended: &Ended) -> Result<(), String> {
    let Some(status) = ended.status else {
        // Open MPI 4.1's mpirun now and then does not come back from an MPI_Abort while a rank is in
        // MPI_Finalize.
        let known = plan.way == Way::Leave && ended.launcher_alone;
        return if known { Ok(()) } else { Err("the job was still there at its deadline".into()) };
    };
    if !ended.left.is_empty() {
        return Err(format!("processes are left: {:?}", ended.left));
    }
    let failures = ended.outcomes.iter().filter_map(|outcome| outcome.as_ref().err());
    for failure in failures.clone() {
        let fields = Fields::parse(failure).filter(|fields| fields.get("outcome").is_some());
        judge_failure(plan, &fields.ok_or(failure.as_str())?)?;
    }
    if status.success() {
        return Err("the job ended well".into());
    }
    let (victim, since) = ended.mark.ok_or("nothing has happened to the victim")?;
    match plan.way {
        // By the launcher. Hydra names any of the processes that it has ended itself, and who is no rank of
        // MPI's yet has no name at all.
        Way::Kill => {
            let names = [format!("rank {}", plan.victim), victim.to_string(), "EXIT CODE: 9".into()];
            let early = plan.at.is_none() && ended.output.contains("non-zero");
            if !early && !names.iter().any(|name| ended.output.contains(name)) {
                return Err("the rank that was killed is not named".into());
            }
        }
        Way::Exit | Way::Panic if plan.at.is_some() => {
            let status = if plan.way == Way::Exit { 17 } else { 101 };
            says(&ended.output, &format!("rank {} ends with status {status}", plan.victim))?;
        }
        // It was no rank of MPI's yet.
        Way::Exit | Way::Panic => says(&ended.output.to_lowercase(), "exit")?,
        Way::Abort => says(&ended.output, &format!("rank {} aborted the communicator", plan.victim))?,
        Way::Stop | Way::Late | Way::Leave => {
            judge_words(plan, &ended.output, failures.count())?;
        }
    }
    // In the end, ranks wait in `MPI_Finalize`, which has the meeting's deadline.
    let deadline = if plan.at.is_none() || plan.is_last() { plan.meeting() } else { TIMEOUT };
    let limit = deadline + GRACE + ENDING;
    if since > limit {
        Err(format!("{since:?} from the fault to the end, more than {limit:?}"))
    } else {
        Ok(())
    }
}

/// A rank that got an error: a message did not come. It names the peer; more is not known without MPI's help.
fn judge_failure(plan: &Plan, fields: &Fields) -> Result<(), String> {
    let is = |name: &str, value: &str| fields.get(name) == Some(value);
    if is("own_rank", &plan.victim.to_string()) || (is("kind", "timeout") && !is("missing", "")) {
        return Ok(());
    }
    Err(format!("not the error of a rank that misses another: {fields}"))
}

/// Those who wait say in what, when their deadline has passed; the rank at fault does not.
fn judge_words(plan: &Plan, output: &str, failures: usize) -> Result<(), String> {
    let mut waiting = 0;
    for line in output.lines().filter(|line| line.contains("phalanx: timeout after ")) {
        let rest = line.split("timeout after ").nth(1).unwrap_or_default();
        let (_, rest) = rest.split_once(" in ").ok_or(line)?;
        let operation = rest.split(['(', ' ']).next().unwrap_or_default();
        let acts = &plan.acts[plan.at.unwrap_or(0)..];
        let under_way = acts.iter().any(|act| act.names().iter().any(|name| name == operation));
        let by_victim = rest.contains(&format!("on rank {} ", plan.victim))
            || rest.contains(&format!("on rank {}.", plan.victim));
        if by_victim && plan.way == Way::Leave && operation == "finalize" {
            // It is at its end, and waits there for the others.
            continue;
        }
        let at_the_ends = [("init", plan.at.is_none()), ("finalize", plan.is_last())];
        if !under_way && !at_the_ends.contains(&(operation, true)) {
            return Err(format!("{operation} was not under way: {line}"));
        }
        if by_victim {
            return Err(format!("the rank at fault says that it waits: {line}"));
        }
        waiting += 1;
    }
    if waiting + failures == 0 { Err("nobody says where it waits".into()) } else { Ok(()) }
}

fn says(output: &str, part: &str) -> Result<(), String> {
    if output.contains(part) { Ok(()) } else { Err(format!("it does not say {part:?}")) }
}
