//! `phalanx launch`: starts a program several times, as ranks that find each other.
//!
//! `again` is the part that others reuse: `phalanx perf -p` and `phalanx doctor` start their ranks with it. Where the system is no
//! Unix, `absent` takes the place of all this.

pub mod again;
pub mod guard;
mod job;
mod nodes;
mod notice;
pub mod options;
mod output;
mod part;
mod rank;
mod report;
mod signals;
mod supervisor;

pub use report::describe_status;

use crate::log::say;
use anyhow::{Context, Result, ensure};
use job::{Job, Outcome};
use nodes::Nodes;
use options::{LaunchArgs, NodeArgs};
use output::Output;
use part::Part;
use phalanx::store::{Server, Token};
use report::{print_end, print_failure};
use std::process::ExitCode;
use std::time::Duration;
use supervisor::Events;

/// Exit status when the ranks were still running at `--timeout`, as that of timeout(1).
const TIMED_OUT: u8 = 124;

/// Starts the ranks, waits for them, and answers with the status of the one that failed first.
pub fn run(args: &LaunchArgs) -> Result<ExitCode> {
    let output = match (args.no_prefix, &args.log_dir) {
        (false, _) => Output::Prefixed,
        (true, None) => Output::Inherited,
        (true, Some(_)) => Output::Plain,
    };
    if let Some(dir) = &args.log_dir {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot make the folder {}", dir.display()))?;
    }
    let job = Job {
        program: args.program().to_owned(),
        arguments: args.arguments().to_vec(),
        ranks: args.ranks,
        output,
        log_dir: args.log_dir.clone(),
        timeout: args.timeout,
    };
    let mut all = Launchers::meet(&args.nodes, args.ranks)?;
    let events = Events::catch()?;
    let mut restart = 0;
    loop {
        let restarts_left = args.max_restarts - restart;
        let (outcome, again) = all.attempt(&job, restart, restarts_left, &events)?;
        if !again {
            return Ok(exit_code(&outcome));
        }
        restart += 1;
        say(format_args!("phalanx launch: restart {restart} of at most {}", args.max_restarts));
    }
}

/// The launchers of a job: this one, or those of several nodes.
enum Launchers {
    Alone { store: Option<Server>, part: Part },
    Several(Nodes),
}

impl Launchers {
    fn meet(args: &NodeArgs, ranks: usize) -> Result<Launchers> {
        let (Some(node), Some(address), Some(file)) = (args.node_rank, &args.store, &args.token_file) else {
            ensure!(args.nnodes == 1, "--nnodes {} needs --node-rank, --store and --token-file", args.nnodes);
            let (store, part) = part::alone(ranks)?;
            return Ok(Launchers::Alone { store, part });
        };
        ensure!(
            node < args.nnodes,
            "--node-rank {node} is none of {} machines: they count from 0",
            args.nnodes
        );
        let token = Token::from_file(file)?;
        Ok(Launchers::Several(Nodes::meet(address, token, node, args.nnodes, meeting_timeout()?)?))
    }

    /// Runs the ranks of this node to their end, and answers how the job ended and whether to start it again.
    fn attempt(
        &mut self,
        job: &Job,
        restart: u32,
        restarts_left: u32,
        events: &Events,
    ) -> Result<(Outcome, bool)> {
        match self {
            Launchers::Alone { store, part } => {
                if restart > 0 {
                    part.job = part::job_id()?;
                    part.restart = restart;
                    store.iter().for_each(|store| store.begin_epoch(restart));
                }
                let outcome = job.attempt(part, None, events, |outcome| {
                    say_failure(outcome);
                    None
                });
                say_end(&outcome);
                let again = restarts_left > 0 && matches!(outcome, Outcome::Failed(_));
                Ok((outcome, again))
            }
            Launchers::Several(nodes) => {
                let part = match nodes.begin(restart, job.ranks, events)? {
                    Ok(part) => part,
                    Err(interrupted) => {
                        print_end(&interrupted);
                        return Ok((interrupted, false));
                    }
                };
                let outcome = job.attempt(&part, Some(nodes), events, |outcome| {
                    let counts = nodes.tell(restart, outcome);
                    say_failure(counts.as_ref().unwrap_or(outcome));
                    counts
                });
                say_end(&outcome);
                // It may be news: the ranks had not started, or all had ended.
                if matches!(outcome, Outcome::NotStarted(_) | Outcome::Interrupted { .. }) {
                    nodes.tell(restart, &outcome);
                }
                let succeeded = matches!(outcome, Outcome::Success);
                let (outcome, again) = nodes.conclude(restart, outcome, restarts_left, events);
                if succeeded {
                    print_end(&outcome);
                }
                Ok((outcome, again))
            }
        }
    }
}

/// What is said as soon as it happens, before the ranks are ended.
fn say_failure(outcome: &Outcome) {
    match outcome {
        Outcome::Failed(failure) => print_failure(failure),
        Outcome::Elsewhere(_) => print_end(outcome),
        _ => {}
    }
}

/// What is said when the ranks have ended.
fn say_end(outcome: &Outcome) {
    if !matches!(outcome, Outcome::Failed(_) | Outcome::Elsewhere(_)) {
        print_end(outcome);
    }
}

/// How long the launchers wait for each other: `PHALANX_TIMEOUT`, as for the ranks.
fn meeting_timeout() -> Result<Duration> {
    match std::env::var("PHALANX_TIMEOUT") {
        Err(_) => Ok(phalanx::DEFAULT_TIMEOUT),
        Ok(text) => options::parse_seconds(&text).map_err(|e| anyhow::anyhow!("PHALANX_TIMEOUT: {e}")),
    }
}

/// The exit status that tells a shell what became of the ranks.
fn exit_code(outcome: &Outcome) -> ExitCode {
    match outcome {
        Outcome::Success => ExitCode::SUCCESS,
        Outcome::Failed(failure) => ExitCode::from(failure.exit_code()),
        Outcome::TimedOut { .. } => ExitCode::from(TIMED_OUT),
        Outcome::Interrupted { signal } => ExitCode::from(job::signal_code(*signal)),
        Outcome::Elsewhere(notice) => ExitCode::from(notice.exit_code),
        Outcome::NotStarted(error) => ExitCode::from(error.exit_code()),
        Outcome::Unwritten(_) => ExitCode::FAILURE,
    }
}
