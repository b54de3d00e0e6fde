//! Ways to get a communicator with default settings: [`init`], [`join`] and [`run`]; and [`dry_run`], which has no peers.

use super::comm::Comm;
use crate::contract::DryCall;
use crate::os::sync::lock;
use crate::start;
use crate::types::error::Result;
use crate::watch;

/// Makes the communicator of this process from the launcher's variables; without them, a world of one.
///
/// Understands `phalanx launch`, torchrun, the launchers of MPI, and Slurm. [`choose`](crate::choose) says what it would do and
/// why. A program with a launcher of its own gives its rank with [`Builder::place`](crate::Builder::place) or [`Builder::unique_id`](crate::Builder::unique_id).
/// Waits with the usual deadline until all ranks have come; the error names the missing ranks.
///
/// Under `phalanx launch --restarts` a process may replace a failed rank. It then gets the communicator that the survivors make
/// with [`Comm::rebuild`].
#[doc(alias("MPI_Init", "init_process_group"))]
pub fn init() -> Result<Comm> {
    Comm::builder().init()
}

/// Joins a running job: becomes a rank of the communicator that its ranks make with [`Comm::grow`] or
/// [`Comm::rebuild`].
///
/// The process needs the variables of the job, as the launcher gave them to a rank of it (under `phalanx launch` that is
/// `PHALANX_JOB`, `PHALANX_RANK` and `PHALANX_WORLD_SIZE`); the value of the rank does not matter: the job assigns a new one.
/// On several hosts these include the address and the token of the job's store. Waits with the usual deadline until the job asks for joiners.
///
/// # Errors
/// [`Error::Bootstrap`](crate::Error::Bootstrap): no rank asks for joiners, or enough have joined already.
pub fn join() -> Result<Comm> {
    Comm::builder().join()
}

/// Runs `f` once for each of `ranks` ranks, each in its own thread, and answers the results in rank order.
///
/// [`try_run`](crate::try_run) is for an `f` that may fail, and answers the first error.
///
/// If a rank panics, its peers get an error that names it, and the panic continues here when all ranks have ended.
///
/// # Errors
/// [`UsageError::WorldSize`](crate::UsageError::WorldSize) for 0 ranks or more than 512; [`SystemError`](crate::SystemError) if threads or memory are short.
pub fn run<R: Send>(ranks: usize, f: impl Fn(Comm) -> R + Sync) -> Result<Vec<R>> {
    Comm::builder().run(ranks, f)
}

/// Runs `f` as rank `rank` of `ranks` ranks, of which the others do not exist, and lists every operation that it calls: what the rank
/// would send and receive. Nothing is sent.
///
/// ```
/// use phalanx::ReduceOp;
///
/// let (sum, calls) = phalanx::dry_run(5, 8, |comm| {
///     let rows = comm.split_grid(&[2, 4], &[&[1]])?.remove(0);
///     let mut gradient = [1.0f32; 100];
///     rows.all_reduce_in_place(&mut gradient, ReduceOp::Sum)?;
///     phalanx::Result::Ok(gradient[0])
/// })?;
/// assert_eq!(sum?, 4.0); // as if the other ranks of the row had the same data
/// assert_eq!(calls[1].to_string(), "all_reduce of f32, 400 B in, 400 B out, 4 ranks from 4 to 7");
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// An operation gives what it would if every other rank held the same data as this one. What only another rank has is 0: a message, or the
/// buffer of another root; in place, that buffer stays as it was. The buffers are in host memory. `ranks` may be any number.
///
/// # Errors
/// [`UsageError::Setting`](crate::UsageError::Setting) if there is no such rank. Within `f`, [`split`](Comm::split), [`shrink`](Comm::shrink) and [`grow`](Comm::grow) are
/// [`Error::Unsupported`](crate::Error::Unsupported), since they depend on ranks that do not exist; [`split_grid`](Comm::split_grid) works.
pub fn dry_run<R>(rank: usize, ranks: usize, f: impl FnOnce(Comm) -> R) -> Result<(R, Vec<DryCall>)> {
    let (new, log) = start::dry_rank(rank, ranks)?;
    watch::begin()?;
    let result = f(Comm::from(new));
    let calls = std::mem::take(&mut *lock(&log));
    Ok((result, calls))
}
