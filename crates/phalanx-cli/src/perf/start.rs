//! How the ranks come to begin an iteration together.

use phalanx::{BackendKind, Comm, ReduceOp, Result};
use std::time::Instant;

/// How much later than the last rank's coming they begin, in nanoseconds: all have left the meeting by then.
const LEAD: i64 = 2_000;
const LEAD_PER_RANK: i64 = 100;

/// No rank waits so long.
const FAR: i64 = 1_000_000_000;

/// What the ranks begin after.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Each begins when it leaves a barrier. They leave it one after the other, some 0.1 µs apart on a host, and an operation whose
    /// first rank is the last to leave is charged with that.
    Barrier,
    /// All begin at one moment of the clock that they share, as far as they can tell (20 ns).
    Moment,
}

impl Start {
    /// Ranks that share a host's memory, and have a core each, can wait for a moment of its clock.
    pub fn of(comm: &Comm, cores: usize) -> Start {
        let share_a_host = comm.backend() == BackendKind::Host && comm.host_topology().num_hosts() == 1;
        if share_a_host && comm.world_size() <= cores { Start::Moment } else { Start::Barrier }
    }

    /// Waits until all begin. Collective.
    pub fn wait(self, comm: &Comm) -> Result<Instant> {
        match self {
            Start::Barrier => comm.barrier()?,
            Start::Moment => {
                let lead = LEAD + LEAD_PER_RANK * comm.world_size() as i64;
                let mut moment = [nanoseconds() + lead];
                comm.all_reduce_in_place(&mut moment, ReduceOp::Max)?;
                // A clock that is far behind the others' is another one, a container's.
                if moment[0] - nanoseconds() < FAR {
                    while nanoseconds() < moment[0] {}
                }
            }
        }
        Ok(Instant::now())
    }
}

/// The clock that all processes of a host share.
#[cfg(unix)]
fn nanoseconds() -> i64 {
    use rustix::time::{ClockId, clock_gettime};
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

/// The clock of this process, of which all ranks are threads.
#[cfg(not(unix))]
fn nanoseconds() -> i64 {
    static ORIGIN: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    ORIGIN.get_or_init(Instant::now).elapsed().as_nanos() as i64
}
