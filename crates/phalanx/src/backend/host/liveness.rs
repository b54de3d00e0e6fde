//! Peers that are there and do nothing: a process that was stopped (SIGSTOP, Ctrl-Z, a debugger).
//!
//! Such a peer may go on any moment, and its user may have stopped it on purpose, so the default is to say so in the
//! log, within two seconds, and to wait on until the deadline. `PHALANX_STOPPED_TIMEOUT` makes it an error earlier.
//! A process that a debugger holds is never an error before the deadline.

use super::endpoint::Endpoint;
use crate::os::Halt;
use std::time::{Duration, Instant};

/// How often is looked.
const INTERVAL: Duration = Duration::from_millis(500);
/// Stopped for this long is worth a warning.
const WARNING: Duration = Duration::from_millis(900);

/// What a rank that waits has seen of stopped peers.
pub(super) struct Liveness {
    looked: Instant,
    stopped: Option<Stopped>,
}

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
        let limit = endpoint.world.stopped_timeout.filter(|_| halt == Halt::Stopped);
        if limit.is_some_and(|limit| since >= limit) {
            return Some(rank);
        }
        if !stopped.told && since >= WARNING {
            stopped.told = true;
            let how = match halt {
                Halt::Stopped => "is stopped (SIGSTOP or Ctrl-Z; SIGCONT lets it go on)",
                Halt::Traced => "is held by a debugger",
            };
            tracing::warn!(
                rank = endpoint.rank,
                "rank {rank}, process {pid}, {how}; it is waited for, {:.0?} at the most",
                limit.unwrap_or(Duration::MAX).min(endpoint.deadline())
            );
        }
        None
    }
}
