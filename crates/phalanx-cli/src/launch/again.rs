//! This program once more for each rank: the ranks of `phalanx perf -p` and of the tests of `phalanx doctor`.

use super::{Job, Outcome, Output, describe_status, exit_code, print_end, print_failure};
use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

fn job(ranks: usize, arguments: Vec<OsString>, output: Output, timeout: Option<Duration>) -> Result<Job> {
    let program = std::env::current_exe().context("cannot find this program's own file")?.into();
    Ok(Job { program, arguments, ranks, output, log_dir: None, timeout })
}

/// Runs the ranks, whose output is this program's, and answers with the status of the one that failed first.
pub fn run(ranks: usize, arguments: Vec<OsString>) -> Result<ExitCode> {
    let outcome = job(ranks, arguments, Output::Inherited, None)?.run(|failure| {
        // A rank that exits with 1 has said why itself.
        if failure.status.code() != Some(1) {
            print_failure(failure);
        }
    })?;
    if !matches!(outcome, Outcome::Failed(_)) {
        print_end(&outcome);
    }
    Ok(exit_code(&outcome))
}

/// Runs the ranks for so long at most, without their output; an error says which failed, and why.
pub fn run_silently(ranks: usize, arguments: Vec<OsString>, patience: Duration) -> Result<()> {
    match job(ranks, arguments, Output::Swallowed, Some(patience))?.run(|_| {})? {
        Outcome::Success => Ok(()),
        Outcome::Failed(failure) => {
            let status = describe_status(failure.status);
            match failure.last_words.last() {
                Some(reason) => bail!("rank {}: {reason} ({status})", failure.rank),
                None => bail!("rank {}: {status}", failure.rank),
            }
        }
        Outcome::TimedOut { running, .. } => {
            bail!("ranks {running:?} still ran after {} s", patience.as_secs())
        }
        Outcome::Interrupted { .. }
        | Outcome::Elsewhere(_)
        | Outcome::NotStarted(_)
        | Outcome::Unwritten(_) => bail!("interrupted"),
    }
}
