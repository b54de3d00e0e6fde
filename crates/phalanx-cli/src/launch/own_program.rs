//! This program as its own ranks: `phalanx perf -p` and the tests of `phalanx doctor`.

use super::attempt;
use super::binding::Binding;
use super::events::Events;
use super::job::{DEFAULT_GRACE, Job, Restarts};
use super::outcome::{End, Failure, Outcome};
use super::output::Output;
use super::placement::Placement;
use super::report::{print_end, print_failure};
use super::status;
use crate::exit;
use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;

/// Runs the ranks with this program's output. Returns the exit status of the rank that failed first.
pub fn run(ranks: usize, arguments: Vec<OsString>) -> Result<ExitCode> {
    let outcome = run_attempt(ranks, arguments, Output::Inherited, None, |failure| {
        let explained = |status: ExitStatus| status.code().is_some_and(exit::is_explained);
        if !matches!(failure.end, End::Status(status) if explained(status)) {
            print_failure(failure);
        }
    })?;
    if !matches!(outcome, Outcome::Failed(_)) {
        print_end(&outcome);
    }
    Ok(ExitCode::from(outcome.exit_code()))
}

/// Runs the ranks without output and with a timeout. An error names the rank that failed, and the reason.
pub fn run_silently(ranks: usize, arguments: Vec<OsString>, timeout: Duration) -> Result<()> {
    match run_attempt(ranks, arguments, Output::Swallowed, Some(timeout), |_| {})? {
        Outcome::Success => Ok(()),
        Outcome::Failed(failure) => {
            let how = match failure.end {
                End::Status(status) => status::describe(status),
                End::StillRuns | End::Elsewhere(_) => "it did not end by itself".to_owned(),
            };
            match failure.last_lines.last() {
                Some(reason) => bail!("rank {}: {reason} ({how})", failure.rank),
                None => bail!("rank {}: {how}", failure.rank),
            }
        }
        Outcome::TimedOut { running, .. } => {
            bail!("ranks {running:?} still ran after {} s", timeout.as_secs())
        }
        Outcome::Interrupted { .. }
        | Outcome::OtherNode(_)
        | Outcome::NotStarted(_)
        | Outcome::OutputLost(_) => bail!("interrupted"),
    }
}

/// Runs the ranks to their end. Calls `failed` as soon as a rank has failed.
fn run_attempt(
    ranks: usize,
    arguments: Vec<OsString>,
    output: Output,
    timeout: Option<Duration>,
    mut failed: impl FnMut(&Failure),
) -> Result<Outcome> {
    let program = std::env::current_exe().context("cannot find this program's own file")?.into();
    let job = Job {
        program,
        arguments,
        ranks,
        output,
        log_dir: None,
        timeout,
        grace: DEFAULT_GRACE,
        keep_going: false,
        min_ranks: 1,
        restarts: Restarts::default(),
        serves_metrics: false,
        binding: Binding::default(),
        reports_bindings: false,
    };
    let (_store, placement) = Placement::on_one_node(ranks)?;
    let events = Events::catch(None)?;
    let outcome = attempt::run(&job, &placement, None, &events, |outcome| {
        if let Outcome::Failed(failure) = outcome {
            failed(failure);
        }
        None
    });
    match outcome {
        Outcome::NotStarted(error) => Err(error.into()),
        outcome => Ok(outcome),
    }
}
