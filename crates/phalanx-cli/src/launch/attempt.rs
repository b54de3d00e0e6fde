//! An attempt: the ranks of this node, from their start to their end.
//!
//! Call [`run`] from the main thread: the kernel kills the ranks when the thread that started them ends.

use super::events::{Events, LaunchEvent};
use super::guard::Guard;
use super::job::Job;
use super::nodes::Nodes;
use super::outcome::Outcome;
use super::placement::Placement;
use super::rank::Rank;
use super::start_error::StartError;
use super::supervisor::{Started, Supervisor};

/// Runs this node's ranks to their end; `nodes` are the other launchers, if there are any.
///
/// Calls `ending` as soon as the ranks are made to end before their time; it may return the outcome that
/// counts instead.
pub fn run(
    job: &Job,
    placement: &Placement,
    nodes: Option<&Nodes>,
    events: &Events,
    ending: impl FnMut(&Outcome) -> Option<Outcome>,
) -> Outcome {
    let started = match start(job, placement, events) {
        Ok(started) => started,
        Err(error) => return Outcome::NotStarted(error),
    };
    let supervisor = Supervisor::new(job, placement, started, events, nodes);
    let watch = nodes.map(|nodes| {
        let sender = events.sender();
        nodes.watch(placement.restart, move |notice| {
            let _ = sender.send(LaunchEvent::OtherNode(notice));
        })
    });
    match watch.transpose() {
        Ok(_watch) => supervisor.run(ending),
        Err(error) => {
            supervisor.end_at_once();
            Outcome::NotStarted(StartError::thread("watches the other nodes", error))
        }
    }
}

/// Starts all ranks, or none.
fn start(job: &Job, placement: &Placement, events: &Events) -> Result<Started, StartError> {
    let mut guard = Guard::start(placement);
    let mut ranks: Vec<Rank> = Vec::new();
    let mut start_all = |ranks: &mut Vec<Rank>| {
        for local in 0..job.ranks {
            let rank = Rank::start(job, placement, local, events.reports(), false)?;
            guard.watch(rank.group());
            ranks.push(rank);
        }
        ranks.iter().enumerate().try_for_each(|(index, rank)| rank.watch(index, events))
    };
    match start_all(&mut ranks) {
        Ok(()) => {
            if job.reports_bindings {
                job.binding.report(placement.first);
            }
            Ok(Started { ranks, guard })
        }
        Err(error) => {
            ranks.iter_mut().for_each(Rank::kill);
            Err(error)
        }
    }
}
