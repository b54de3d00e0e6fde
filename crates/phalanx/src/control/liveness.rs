//! Stopped peers: processes halted by SIGSTOP, Ctrl-Z or a debugger.
//!
//! A stopped peer is an error within two seconds, unless `PHALANX_STOPPED_TIMEOUT` allows more: then the log names it and the wait goes on.
//! A process that a debugger holds is no error before the deadline.

use super::endpoint::Endpoint;
use crate::os::Halt;
use std::time::{Duration, Instant};

/// Time between two checks.
const INTERVAL: Duration = Duration::from_millis(500);
/// A peer stopped for this long is an error, or a warning. Noticing included, that is less than two seconds.
pub(crate) const STOPPED: Duration = Duration::from_millis(900);

/// The stopped peer that a waiting rank has seen, if any.
#[derive(Debug)]
pub(crate) struct Liveness {
    last_look: Instant,
    stopped: Option<Stopped>,
}

#[derive(Debug)]
struct Stopped {
    rank: usize,
    since: Instant,
    warned: bool,
}

impl Liveness {
    pub fn new() -> Liveness {
        Liveness { last_look: Instant::now(), stopped: None }
    }

    /// The rank that blocks `awaited`, if it has been stopped longer than allowed. Logs a warning before.
    pub fn find_stopped(&mut self, endpoint: &Endpoint, awaited: &[usize]) -> Option<usize> {
        if !endpoint.world.sees_processes() || self.last_look.elapsed() < INTERVAL {
            return None;
        }
        if self.last_look.elapsed() > 2 * INTERVAL {
            // This process was stopped itself, or did not wait: earlier observations are void.
            self.stopped = None;
        }
        self.last_look = Instant::now();
        let mut at_fault = awaited.iter().map(|rank| endpoint.end_of_chain(*rank).unwrap_or(*rank));
        let Some((rank, pid, halt)) =
            at_fault.find_map(|rank| Some((rank, endpoint.id_here(rank), endpoint.halt(rank)?)))
        else {
            self.stopped = None;
            return None;
        };
        let stopped = match &mut self.stopped {
            Some(stopped) if stopped.rank == rank => stopped,
            other => other.insert(Stopped { rank, since: self.last_look, warned: false }),
        };
        let since = stopped.since.elapsed();
        let limit = match halt {
            Halt::Stopped => endpoint.world.stopped_timeout,
            Halt::Traced => Duration::MAX,
        };
        if since >= limit {
            return Some(rank);
        }
        if !stopped.warned && since >= STOPPED {
            stopped.warned = true;
            let how = match halt {
                Halt::Stopped => "is stopped (SIGSTOP or Ctrl-Z; SIGCONT lets it go on)",
                Halt::Traced => "is held by a debugger",
            };
            crate::os::log::warn!(
                rank = endpoint.rank,
                "rank {rank}, process {pid}, {how}; it is waited for, {:.0?} at the most",
                limit.min(endpoint.deadline())
            );
        }
        None
    }
}
