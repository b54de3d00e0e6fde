//! Ways to get a communicator with default settings: [`init`], [`join`] and [`run`].

use super::comm::Comm;
use crate::types::error::Result;

/// Makes the communicator of this process from the launcher's variables; without them, a world of one.
///
/// Understands `phalanx launch`, torchrun, the launchers of MPI, and Slurm. [`choose`](crate::choose) says what it would do and
/// why. A program with a launcher of its own gives its rank with [`Builder::place`](crate::Builder::place) or [`Builder::unique_id`](crate::Builder::unique_id).
/// Waits with the usual deadline until all ranks have come; the error names the missing ranks.
///
/// Under `phalanx launch --restarts` a process may replace a failed rank. It then gets the communicator that the survivors make
/// with [`Comm::rebuild`].
pub fn init() -> Result<Comm> {
    Comm::builder().init()
}

/// Joins a running job: becomes a rank of the communicator that its ranks make with [`Comm::grow`] or
/// [`Comm::rebuild`].
///
/// The process needs the variables of the job, as the launcher gave them to a rank of it (under `phalanx launch` that is
/// `PHALANX_JOB`, `PHALANX_RANK` and `PHALANX_WORLD_SIZE`); the value of the rank does not matter: the job assigns a new one.
/// Waits with the usual deadline until the job asks for joiners.
///
/// # Errors
/// [`Error::Bootstrap`](crate::Error::Bootstrap): no rank asks for joiners, or enough have joined already.
pub fn join() -> Result<Comm> {
    Comm::builder().join()
}

/// Runs `f` once for each of `ranks` ranks, each in its own thread, and answers the results in rank order.
///
/// If a rank panics, its peers get an error that names it, and the panic continues here when all ranks have ended.
///
/// # Errors
/// [`UsageError::WorldSize`](crate::UsageError::WorldSize) for 0 ranks or more than 512; [`SystemError`](crate::SystemError) if threads or memory are short.
pub fn run<R: Send>(ranks: usize, f: impl Fn(Comm) -> R + Sync) -> Result<Vec<R>> {
    Comm::builder().run(ranks, f)
}
