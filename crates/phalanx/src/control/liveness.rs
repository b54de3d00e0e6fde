//! Peers that are there and do nothing: a process that was stopped (SIGSTOP, Ctrl-Z, a debugger).
//!
//! It is an error within two seconds, unless `PHALANX_STOPPED_TIMEOUT` allows for more: then it is named in the log, and
//! waited for. A process that a debugger holds is never an error before the deadline: somebody is looking at it.

use super::endpoint::Endpoint;
use crate::os::Halt;
use std::time::{Duration, Instant};

/// How often is looked.
const INTERVAL: Duration = Duration::from_millis(500);
/// Stopped for this long is an error, or else worth a warning: with what it takes to notice, less than two seconds.
pub(crate) const STOPPED: Duration = Duration::from_millis(900);

/// What a rank that waits has seen of stopped peers.
#[derive(Debug)]
pub(crate) struct Liveness {
    looked: Instant,
    stopped: Option<Stopped>,
}

#[derive(Debug)]
struct Stopped {
    rank: usize,
    since: Instant,
    told: bool,
}

impl Liveness {
    pub fn new() -> Liveness {
        Liveness { looked: Instant::now(), stopped: None }
    }

    /// A rank that holds this one up and has been stopped for longer than it may be. Warns of one that is stopped.
    pub fn look(&mut self, endpoint: &Endpoint, awaited: &[usize]) -> Option<usize> {
        if !endpoint.world.is_processes() || self.looked.elapsed() < INTERVAL {
            return None;
        }
        if self.looked.elapsed() > 2 * INTERVAL {
            // This process was stopped itself, or did not wait: what it saw before is nothing to go by.
            self.stopped = None;
        }
        self.looked = Instant::now();
        let at_fault = awaited.iter().map(|rank| endpoint.end_of_chain(*rank).unwrap_or(*rank));
        let Some((rank, pid, halt)) = at_fault
            .map(|rank| (rank, endpoint.pid(rank)))
            .find_map(|(rank, pid)| Some((rank, pid, crate::os::halt(pid)?)))
        else {
            self.stopped = None;
            return None;
        };
        let stopped = match &mut self.stopped {
            Some(stopped) if stopped.rank == rank => stopped,
            other => other.insert(Stopped { rank, since: self.looked, told: false }),
        };
        let since = stopped.since.elapsed();
        let limit = match halt {
            Halt::Stopped => endpoint.world.stopped_timeout,
            Halt::Traced => Duration::MAX,
        };
        if since >= limit {
            return Some(rank);
        }
        if !stopped.told && since >= STOPPED {
            stopped.told = true;
            let how = match halt {
                Halt::Stopped => "is stopped (SIGSTOP or Ctrl-Z; SIGCONT lets it go on)",
                Halt::Traced => "is held by a debugger",
            };
            tracing::warn!(
                rank = endpoint.rank,
                "rank {rank}, process {pid}, {how}; it is waited for, {:.0?} at the most",
                limit.min(endpoint.deadline())
            );
        }
        None
    }
}
