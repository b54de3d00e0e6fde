//! `phalanx launch`: starts a program several times on this machine, as ranks that find each other.
//!
//! `job` is the part that others reuse: `phalanx perf -p` and `phalanx doctor` start their ranks with it.

pub mod job;
pub mod options;
mod output;
mod rank;
mod report;
mod signals;

pub use job::{Job, Outcome};
pub use output::Output;
pub use report::{describe_status, print_end, print_failure};

use anyhow::Result;
use options::LaunchArgs;
use std::process::ExitCode;

/// Exit status when the ranks were still running at `--timeout`, as that of timeout(1).
const TIMED_OUT: u8 = 124;

/// Starts the ranks, waits for them, and answers with the status of the one that failed first.
pub fn run(args: &LaunchArgs) -> Result<ExitCode> {
    let job = Job {
        program: args.program().to_owned(),
        arguments: args.arguments().to_vec(),
        ranks: args.ranks,
        output: if args.no_prefix { Output::Inherited } else { Output::Prefixed },
        timeout: args.timeout,
    };
    match job.run(print_failure) {
        Ok(outcome) => {
            print_end(&outcome);
            Ok(exit_code(&outcome))
        }
        Err(job::StartError { program, source }) => {
            eprintln!("phalanx launch: {}", report::describe_start_error(&program, &source));
            // The statuses of a shell for a program that is not there or cannot be run.
            let missing = source.kind() == std::io::ErrorKind::NotFound;
            Ok(ExitCode::from(if missing { 127 } else { 126 }))
        }
    }
}

/// The exit status that tells a shell what became of the ranks.
pub fn exit_code(outcome: &Outcome) -> ExitCode {
    match outcome {
        Outcome::Success => ExitCode::SUCCESS,
        Outcome::Failed(failure) => ExitCode::from(failure.exit_code()),
        Outcome::TimedOut { .. } => ExitCode::from(TIMED_OUT),
        Outcome::Interrupted { signal } => ExitCode::from(job::signal_code(*signal)),
    }
}
