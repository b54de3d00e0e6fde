//! `phalanx launch`: starts a program several times, as ranks that find each other.
//!
//! `phalanx perf -p` and `phalanx doctor` start their ranks with [`own_program`]. On systems other than Unix,
//! `absent.rs` takes the place of this folder.

mod attempt;
mod binding;
mod events;
pub mod guard;
mod job;
mod launchers;
mod limits;
mod log_files;
mod metrics;
mod nodes;
pub mod options;
mod outcome;
mod output;
pub mod own_program;
mod placement;
mod program;
mod rank;
mod report;
mod reports;
mod signals;
mod start_error;
mod status;
mod supervisor;

pub use signals::reset_inherited as reset_inherited_signals;
pub use status::describe as describe_status;

use crate::exit;
use crate::log::say;
use anyhow::{Context, Result, anyhow};
use binding::Binding;
use events::Events;
use job::{Job, Restarts};
use launchers::Launchers;
use options::LaunchArgs;
use output::Output;
use std::process::ExitCode;

/// Starts the ranks and waits for them. Returns the exit status of the rank that failed first.
pub fn run(args: &LaunchArgs) -> Result<ExitCode> {
    let job = job(args)?;
    let mut launchers = Launchers::join(&args.nodes, args.ranks)?;
    let events = Events::catch(args.metrics.as_deref())?;
    let mut restart = 0;
    loop {
        let restarts_left = args.max_restarts.saturating_sub(restart);
        let (outcome, restarts) = launchers.attempt(&job, restart, restarts_left, &events)?;
        if !restarts {
            return Ok(ExitCode::from(outcome.exit_code()));
        }
        restart += 1;
        if args.max_restarts > 0 {
            say(format_args!("phalanx launch: restart {restart} of at most {}", args.max_restarts));
        }
    }
}

/// The error for a thread or process that the system refuses: it names the limit.
pub fn refused(error: std::io::Error) -> anyhow::Error {
    anyhow::anyhow!("{error}{}", start_error::remedy(&error))
}

fn job(args: &LaunchArgs) -> Result<Job> {
    let output = match (args.no_prefix, &args.log_dir) {
        (false, _) => Output::Prefixed,
        (true, None) => Output::Inherited,
        (true, Some(_)) => Output::Plain,
    };
    if args.min_ranks > args.ranks {
        let (least, ranks) = (args.min_ranks, args.ranks);
        return Err(exit::usage(anyhow!("--min-ranks {least} is above --ranks {ranks}")));
    }
    if let Some(dir) = &args.log_dir {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot make the folder {}", dir.display()))?;
    }
    Ok(Job {
        program: args.program().to_owned(),
        arguments: args.arguments().to_vec(),
        ranks: args.ranks,
        output,
        log_dir: args.log_dir.clone(),
        timeout: args.timeout,
        grace: args.grace,
        keep_going: args.keep_going,
        min_ranks: args.min_ranks,
        restarts: Restarts::at_most(args.restarts),
        serves_metrics: args.metrics.is_some(),
        binding: Binding::of(args.bind_to, args.ranks).map_err(exit::usage)?,
        reports_bindings: args.report_bindings,
    })
}
