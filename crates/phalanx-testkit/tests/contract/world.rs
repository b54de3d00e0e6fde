//! Makes trials of scenarios: the same one with ranks as threads and as processes.

use libtest_mimic::{Failed, Trial};
use phalanx_testkit::processes::Launch;
use phalanx_testkit::scenario::Outcome;
use phalanx_testkit::{Scenario, threads};
use std::fmt::Debug;
use std::time::Duration;

/// A world that takes longer hangs: on a busy machine the slowest one takes a tenth of this.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Runs a scenario with so many ranks and these arguments.
type Run = fn(Scenario, usize, &[&str]) -> Result<Vec<String>, Failed>;

/// A scenario on thread ranks and on process ranks: two trials, each of some numbers of ranks.
pub fn both(scenario: Scenario, worlds: &'static [usize]) -> Vec<Trial> {
    let on_all = move |run: Run| worlds.iter().try_for_each(|ranks| run(scenario, *ranks, &[""]).map(drop));
    let trial = |(ranks, run)| Trial::test(format!("{ranks}/{}", scenario.name), move || on_all(run));
    runs().map(trial).collect()
}

/// A long scenario on thread ranks and on process ranks, with each of some arguments: a trial for each number of
/// ranks.
pub fn each(
    scenario: Scenario,
    [threads, processes]: [&[usize]; 2],
    args: &'static [&'static str],
) -> Vec<Trial> {
    let of = |((kind, run), worlds): ((&str, Run), &[usize])| {
        let trial = |ranks: &usize| {
            let ranks = *ranks;
            Trial::test(format!("{kind}/{}/{ranks}", scenario.name), move || {
                args.iter().try_for_each(|arg| run(scenario, ranks, &[arg]).map(drop))
            })
        };
        worlds.iter().map(trial).collect::<Vec<_>>()
    };
    runs().zip([threads, processes]).flat_map(of).collect()
}

/// What ranks can be here, and how they run a scenario.
fn runs() -> impl Iterator<Item = (&'static str, Run)> {
    let processes: Option<(_, Run)> = cfg!(target_os = "linux").then_some(("processes", on_processes));
    [("threads", on_threads as Run)].into_iter().chain(processes)
}

/// Runs a scenario on thread ranks; every rank's report.
pub fn on_threads(scenario: Scenario, ranks: usize, args: &[&str]) -> Result<Vec<String>, Failed> {
    let args: Vec<String> = args.iter().map(ToString::to_string).collect();
    let outcomes = threads::run_scenario(&scenario, ranks, &args, DEADLINE)?;
    all_ok(outcomes.into_iter()).map_err(|problems| format!("{ranks} thread ranks:{problems}").into())
}

/// Runs a scenario on process ranks; every rank's report.
pub fn on_processes(scenario: Scenario, ranks: usize, args: &[&str]) -> Result<Vec<String>, Failed> {
    let launch = Launch::new(scenario.name, ranks).deadline(DEADLINE);
    let launch = args.iter().fold(launch, |launch, arg| launch.arg(arg));
    launch.reports().map_err(|problems| format!("{ranks} process ranks:{problems}").into())
}

/// The reports, or a line for each rank that failed.
pub fn all_ok(outcomes: impl Iterator<Item = Result<String, String>>) -> Result<Vec<String>, String> {
    let outcomes: Vec<_> = outcomes.collect();
    if outcomes.iter().all(Result::is_ok) {
        return Ok(outcomes.into_iter().filter_map(Result::ok).collect());
    }
    let problems = outcomes.iter().enumerate().filter_map(|(rank, outcome)| {
        outcome.as_ref().err().map(|problem| format!("\n  rank {rank}: {problem}"))
    });
    Err(problems.collect())
}

/// An error if the ranks' reports differ.
pub fn all_equal(reports: &[String]) -> Result<(), Failed> {
    match reports.iter().position(|report| *report != reports[0]) {
        None => Ok(()),
        Some(rank) => {
            let (first, other) = (&reports[0], &reports[rank]);
            Err(format!("rank {rank} reports {other}, rank 0 reports {first}").into())
        }
    }
}

/// What one rank does, whose problems are errors of any kind.
pub type Done = Result<(), Box<dyn std::error::Error>>;

/// What a rank reports.
pub fn outcome(done: Done) -> Outcome {
    done.map(|()| String::new()).map_err(|problem| problem.to_string())
}

/// An error if two values differ.
pub fn same<T: PartialEq<U> + Debug, U: Debug>(what: &str, actual: T, expected: U) -> Result<(), String> {
    if actual == expected { Ok(()) } else { Err(format!("{what}: {actual:?}, expected {expected:?}")) }
}
