//! The suite as a program: every case once, at length, and then as many seeded runs as are asked for.
//!
//! A run's seed follows from the program's and the run's number, and decides which case it is and all that
//! happens in it; `--seed` and `--case` as the report of a failure gives them do it again.

use super::{Backend, Case, Effort};
use crate::random::Random;
use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

/// What is done.
#[derive(Debug, Clone)]
pub struct Options {
    /// Seeded runs.
    pub runs: u64,
    /// Of the first run; the next have the next.
    pub seed: u64,
    /// What carries the data.
    pub backend: Backend,
    /// Only cases with this in their name.
    pub case: Option<String>,
}

/// What became of a family of cases.
#[derive(Debug, Default, Clone)]
struct Tally {
    cases: std::collections::BTreeSet<String>,
    runs: u64,
    failures: u64,
    longest: Duration,
    ignored: Option<String>,
}

/// What became of all of them, as a table.
#[derive(Debug, Default)]
pub struct Summary(BTreeMap<String, Tally>);

impl Summary {
    /// Runs that did not end as they must.
    pub fn failures(&self) -> u64 {
        self.0.values().map(|tally| tally.failures).sum()
    }

    /// Runs.
    pub fn runs(&self) -> u64 {
        self.0.values().map(|tally| tally.runs).sum()
    }

    fn of(&mut self, case: &Case) -> &mut Tally {
        let tally = self.0.entry(family(case).to_owned()).or_default();
        tally.cases.insert(case.name.clone());
        tally
    }

    fn count(&mut self, case: &Case, outcome: &Result<(), String>, took: Duration) {
        let tally = self.of(case);
        tally.runs += 1;
        tally.failures += u64::from(outcome.is_err());
        tally.longest = tally.longest.max(took);
    }
}

/// What a case is shown with: those that are always the same, together.
fn family(case: &Case) -> &str {
    match case.name.rsplit_once('/') {
        Some((family, _)) if !case.seeded && family.contains('/') => family,
        _ => &case.name,
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "| case | cases | runs | failures | longest |")?;
        writeln!(f, "|---|---:|---:|---:|---:|")?;
        for (name, tally) in &self.0 {
            let Tally { cases, runs, failures, longest, ignored } = tally;
            let (cases, longest) = (cases.len(), longest.as_secs_f64());
            let ignored = ignored.as_ref().map_or(String::new(), |reason| format!(" (not run: {reason})"));
            writeln!(f, "| {name}{ignored} | {cases} | {runs} | {failures} | {longest:.1} s |")?;
        }
        Ok(())
    }
}

/// Does it; tells of failures, and now and then of progress, as it goes.
pub fn run(options: &Options) -> Summary {
    let mut cases = options.backend.cases();
    cases.retain(|case| options.case.as_ref().is_none_or(|part| case.name.contains(part)));
    let mut summary = Summary::default();
    for case in cases.iter().filter(|case| case.ignored.is_some()) {
        summary.of(case).ignored.clone_from(&case.ignored);
    }
    cases.retain(|case| case.ignored.is_none());
    for case in cases.iter().filter(|case| !case.seeded) {
        one(case, options.seed, options.backend, &mut summary);
    }
    cases.retain(|case| case.seeded);
    if cases.is_empty() {
        return summary;
    }
    for number in 0..options.runs {
        let seed = options.seed.wrapping_add(number);
        // Which case it is must not change what happens in it.
        let which = Random::new(!seed).below(cases.len());
        one(&cases[which], seed, options.backend, &mut summary);
        if number % 50 == 49 {
            println!("{} of {} runs, {} failures", number + 1, options.runs, summary.failures());
        }
    }
    summary
}

fn one(case: &Case, seed: u64, backend: Backend, summary: &mut Summary) {
    let since = Instant::now();
    let outcome = case.run(seed, Effort::Full);
    summary.count(case, &outcome, since.elapsed());
    if let Err(problem) = outcome {
        let (name, backend) = (&case.name, backend.name());
        println!(
            "FAILED {name} (again: --backend {backend} --runs 1 --seed {seed} --case {name}): {problem}\n"
        );
    }
}
