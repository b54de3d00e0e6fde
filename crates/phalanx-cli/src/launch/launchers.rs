//! The launchers of a job: this one alone, or those of several nodes. Runs attempts and decides about
//! restarts.

use super::attempt;
use super::events::Events;
use super::job::Job;
use super::nodes::Nodes;
use super::options::NodeArgs;
use super::outcome::Outcome;
use super::placement::{self, Placement};
use super::report::{print_end, print_failure};

use anyhow::{Context, Result, ensure};
use phalanx::internal::store::{Server, Token};
use std::ops::ControlFlow;
use std::time::Duration;

/// The launchers of a job.
pub enum Launchers {
    Alone { store: Option<Server>, placement: Placement },
    Several(Nodes),
}

impl Launchers {
    /// Starts the store of this node alone, or joins the launchers of the other nodes.
    pub fn join(args: &NodeArgs, ranks: usize) -> Result<Launchers> {
        let (Some(node), Some(address)) = (args.node_rank, &args.store) else {
            ensure!(args.nnodes == 1, "--nnodes {} needs --node-rank, --store and --token-file", args.nnodes);
            let (store, placement) = Placement::on_one_node(ranks)?;
            return Ok(Launchers::Alone { store, placement });
        };
        ensure!(
            node < args.nnodes,
            "--node-rank {node} is none of {} machines: they count from 0",
            args.nnodes
        );
        let token = token(args)?;
        let job = args.job.clone().or_else(|| std::env::var("SLURM_JOB_ID").ok()).unwrap_or_default();
        Ok(Launchers::Several(Nodes::join(address, token, &job, node, args.nnodes, join_timeout()?)?))
    }

    /// Runs the ranks of this node to their end. Returns the job's outcome, and whether to start it again.
    pub fn attempt(
        &mut self,
        job: &Job,
        restart: u32,
        restarts_left: u32,
        events: &Events,
    ) -> Result<(Outcome, bool)> {
        match self {
            Launchers::Alone { store, placement } => {
                if restart > 0 {
                    placement.job = placement::random_job_id()?;
                    placement.restart = restart;
                    store.iter().for_each(|store| store.begin_epoch(restart));
                }
                let outcome = attempt_alone(job, placement, events);
                let restarts = match &outcome {
                    Outcome::Failed(failure) => restarts_left > 0 || failure.starts_over(),
                    _ => false,
                };
                Ok((outcome, restarts))
            }
            Launchers::Several(nodes) => attempt_with(nodes, job, restart, restarts_left, events),
        }
    }
}

fn attempt_alone(job: &Job, placement: &Placement, events: &Events) -> Outcome {
    let outcome = attempt::run(job, placement, None, events, |outcome| {
        print_cause(outcome);
        None
    });
    print_result(&outcome);
    outcome
}

fn attempt_with(
    nodes: &Nodes,
    job: &Job,
    restart: u32,
    restarts_left: u32,
    events: &Events,
) -> Result<(Outcome, bool)> {
    let placement = match nodes.begin_attempt(restart, job, events)? {
        ControlFlow::Continue(placement) => placement,
        ControlFlow::Break(interrupted) => {
            print_end(&interrupted);
            return Ok((interrupted, false));
        }
    };
    let outcome = attempt::run(job, &placement, Some(nodes), events, |outcome| {
        let replacement = nodes.announce(restart, outcome);
        print_cause(replacement.as_ref().unwrap_or(outcome));
        replacement
    });
    print_result(&outcome);
    // Not announced yet: the ranks had not started, or all had ended.
    if matches!(outcome, Outcome::NotStarted(_) | Outcome::Interrupted { .. }) {
        nodes.announce(restart, &outcome);
    }
    let succeeded = matches!(outcome, Outcome::Success);
    let (outcome, restarts) = nodes.end_attempt(restart, outcome, job, restarts_left, events);
    if succeeded {
        print_end(&outcome);
    }
    Ok((outcome, restarts))
}

/// Prints a failure, here or on another node, before the ranks are ended.
fn print_cause(outcome: &Outcome) {
    match outcome {
        Outcome::Failed(failure) => print_failure(failure),
        Outcome::OtherNode(_) => print_end(outcome),
        _ => {}
    }
}

/// Prints the other outcomes when the ranks have ended.
fn print_result(outcome: &Outcome) {
    if !matches!(outcome, Outcome::Failed(_) | Outcome::OtherNode(_)) {
        print_end(outcome);
    }
}

/// How long the launchers wait for each other: `PHALANX_TIMEOUT`, as for the ranks.
/// The job's secret: from a file, or else from the environment.
fn token(args: &NodeArgs) -> Result<Token> {
    if let Some(file) = &args.token_file {
        return Ok(Token::from_file(file)?);
    }
    let text = std::env::var("PHALANX_TOKEN").unwrap_or_default();
    let remedy = "give --token-file, or set PHALANX_TOKEN to a secret of at least 16 characters, the same on all machines";
    ensure!(!text.is_empty(), "--node-rank needs the job's secret: {remedy}");
    Token::new(&text).with_context(|| format!("PHALANX_TOKEN is too short: {remedy}"))
}

fn join_timeout() -> Result<Duration> {
    Ok(phalanx::internal::timeout_from_environment()?)
}
