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
use rustix::process::Signal;

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
    let _watch = nodes.map(|nodes| {
        let sender = events.sender();
        nodes.watch(placement.restart, move |notice| {
            let _ = sender.send(LaunchEvent::OtherNode(notice));
        })
    });
    Supervisor::new(job.timeout, started, events).run(ending)
}

/// Starts all ranks, or none.
fn start(job: &Job, placement: &Placement, events: &Events) -> Result<Started, StartError> {
    let mut guard = Guard::start(placement);
    let mut ranks: Vec<Rank> = Vec::new();
    for local in 0..job.ranks {
        match Rank::start(job, placement, local) {
            Ok(rank) => {
                guard.watch(rank.group());
                ranks.push(rank);
            }
            Err(error) => {
                for rank in &mut ranks {
                    rank.signal(Signal::KILL);
                    // The status does not matter, but no zombie must stay.
                    let _ = rank.reap();
                }
                return Err(error);
            }
        }
    }
    for (index, rank) in ranks.iter().enumerate() {
        let sender = events.sender();
        rank.watch(move |succeeded| {
            let _ = sender.send(LaunchEvent::Ended { index, succeeded });
        });
    }
    Ok(Started { ranks, guard })
}
