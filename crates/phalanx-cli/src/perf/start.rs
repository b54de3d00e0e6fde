//! Lets all ranks begin an iteration at the same time.

use phalanx::{BackendKind, Comm, ReduceOp, Result};
use std::time::Instant;

/// Nanoseconds from the last rank's arrival to the start: by then every rank knows the moment.
const LEAD: i64 = 2_000;
const LEAD_PER_RANK: i64 = 100;

/// A start farther away, in nanoseconds, comes from a rank with a different clock.
const FAR: i64 = 1_000_000_000;

/// How ranks begin an iteration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Each rank begins when it leaves a barrier. On a host, ranks leave it some 0.1 µs after one another,
    /// which is part of the measured time.
    Barrier,
    /// All ranks begin at one moment of their common clock, which they read every 20 ns.
    Moment,
}

impl Start {
    /// A moment, if the ranks share a host's clock and have a core each to wait for it.
    pub fn of(comm: &Comm, cores: usize) -> Start {
        let share_a_host = comm.backend() == BackendKind::Host && comm.host_topology().num_hosts() == 1;
        if share_a_host && comm.world_size() <= cores { Start::Moment } else { Start::Barrier }
    }

    /// Waits for the start, and returns its time. Collective.
    pub fn wait(self, comm: &Comm) -> Result<Instant> {
        match self {
            Start::Barrier => comm.barrier()?,
            Start::Moment => {
                let lead = LEAD + LEAD_PER_RANK * comm.world_size() as i64;
                let mut moment = [nanoseconds() + lead];
                comm.all_reduce_in_place(&mut moment, ReduceOp::Max)?;
                // Containers of one host may have different clocks.
                if moment[0] - nanoseconds() < FAR {
                    while nanoseconds() < moment[0] {}
                }
            }
        }
        Ok(Instant::now())
    }
}

/// The monotonic clock, which all processes of a host share.
#[cfg(unix)]
fn nanoseconds() -> i64 {
    use rustix::time::{ClockId, clock_gettime};
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

/// A clock of this process: all ranks are its threads.
#[cfg(not(unix))]
fn nanoseconds() -> i64 {
    static ORIGIN: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    ORIGIN.get_or_init(Instant::now).elapsed().as_nanos() as i64
}
