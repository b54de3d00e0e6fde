//! The tests: ranks that add numbers up, as threads of this process and as processes of their own.
//!
//! Short waits, and no output but the verdict.

use crate::launch::{self, Job, Outcome, Output};
use anyhow::{Context, Result, bail, ensure};
use phalanx::{Comm, ReduceOp};
use std::fmt;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// How long the ranks of a test may wait for each other.
const WAIT: Duration = Duration::from_secs(10);
/// How long a test with processes may take in all.
const PATIENCE: Duration = Duration::from_secs(30);
/// Elements: enough that several algorithms have their turn.
const LENGTHS: [usize; 4] = [1, 1000, 100_000, 1_000_000];

/// A test.
#[derive(Debug, Clone, Copy)]
pub enum Trial {
    Threads,
    Processes,
}

pub const ALL: [Trial; 2] = [Trial::Threads, Trial::Processes];

/// How a test went.
pub struct Verdict {
    result: Result<()>,
    took: Duration,
}

impl Verdict {
    pub fn passed(&self) -> bool {
        self.result.is_ok()
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let took = self.took.as_secs_f64() * 1e3;
        match &self.result {
            Ok(()) => write!(f, "OK      {took:.1} ms"),
            Err(error) => write!(f, "FAILED  {took:.1} ms: {}", crate::explain(error)),
        }
    }
}

impl Trial {
    pub fn name(self, ranks: usize) -> String {
        let kind = match self {
            Trial::Threads => "threads",
            Trial::Processes => "processes",
        };
        format!("all_reduce, {ranks} {kind}")
    }

    pub fn run(self, ranks: usize) -> Verdict {
        let start = Instant::now();
        let result = match self {
            Trial::Threads => among_threads(ranks),
            Trial::Processes => among_processes(ranks),
        };
        Verdict { result, took: start.elapsed() }
    }
}

fn among_threads(ranks: usize) -> Result<()> {
    let results = Comm::builder().timeout(WAIT).run(ranks, add_up)?;
    results.into_iter().collect()
}

fn among_processes(ranks: usize) -> Result<()> {
    let job = Job {
        program: std::env::current_exe().context("cannot find this program's own file")?.into(),
        arguments: vec!["doctor".into(), "--as-rank".into()],
        ranks,
        output: Output::Swallowed,
        log_dir: None,
        timeout: Some(PATIENCE),
    };
    match job.run(|_| {})? {
        Outcome::Success => Ok(()),
        Outcome::Failed(failure) => {
            let status = launch::describe_status(failure.status);
            match failure.last_words.last() {
                Some(reason) => bail!("rank {}: {reason} ({status})", failure.rank),
                None => bail!("rank {}: {status}", failure.rank),
            }
        }
        Outcome::TimedOut { running, .. } => {
            bail!("ranks {running:?} still ran after {} s", PATIENCE.as_secs())
        }
        Outcome::Interrupted { .. } | Outcome::Elsewhere(_) | Outcome::NotStarted(_) => bail!("interrupted"),
    }
}

/// One rank of the test with processes.
pub fn be_a_rank() -> Result<ExitCode> {
    add_up(Comm::builder().timeout(WAIT).init()?)?;
    Ok(ExitCode::SUCCESS)
}

/// Adds the ranks' numbers up, and sees whether the sum is right.
fn add_up(comm: Comm) -> Result<()> {
    let ranks = comm.world_size();
    let right = (ranks * (ranks + 1) / 2) as f32;
    for length in LENGTHS {
        let mine = vec![(comm.rank() + 1) as f32; length];
        let mut sum = vec![0.0; length];
        comm.all_reduce(&mine, &mut sum, ReduceOp::Sum)?;
        let wrong = sum.iter().filter(|&&sum| sum != right).count();
        ensure!(wrong == 0, "{wrong} of {length} sums are wrong on rank {}", comm.rank());
    }
    comm.finalize()?;
    Ok(())
}
