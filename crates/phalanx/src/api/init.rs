//! Ways to get a communicator with default settings: [`init`], [`join`] and [`run`].

use super::comm::Comm;
use crate::types::error::Result;

/// The communicator of this process, from the launcher's variables; a world of one if there are none.
///
/// Understands `phalanx launch`, torchrun, the launchers of MPI, and Slurm; [`choose`](crate::choose) tells what it would do and why. A program
/// with a launcher of its own says who it is with [`Builder::place`](crate::Builder::place) or [`Builder::unique_id`](crate::Builder::unique_id).
/// Waits until all ranks have come, with the usual deadline; an error names the ranks that have not.
pub fn init() -> Result<Comm> {
    Comm::builder().init()
}

/// Joins a job that is under way: becomes a rank of the communicator that the others make with [`Comm::grow`] or
/// [`Comm::rebuild`].
///
/// The process needs the variables of the job, as the launcher gave them to a rank of it (under `phalanx launch` that is
/// `PHALANX_JOB`, `PHALANX_RANK` and `PHALANX_WORLD_SIZE`); the rank among them does not matter: the others give it a new one.
/// Waits with the usual deadline for them to ask.
///
/// # Errors
/// [`Error::Bootstrap`](crate::Error::Bootstrap): nobody asks for joiners, or for no more than have come.
pub fn join() -> Result<Comm> {
    Comm::builder().join()
}

/// Runs `f` once for each of `ranks` ranks, in a thread of its own, and answers the results in rank order.
///
/// If a rank panics, its peers get an error that names it, and the panic goes on here when all have ended.
///
/// # Errors
/// [`UsageError::WorldSize`](crate::UsageError::WorldSize) for 0 ranks or more than 512; [`SystemError`](crate::SystemError) if threads or memory are short.
pub fn run<R: Send>(ranks: usize, f: impl Fn(Comm) -> R + Sync) -> Result<Vec<R>> {
    Comm::builder().run(ranks, f)
}
