//! Communicators made of others: [`Comm::split`] and its like, [`Comm::split_grid`], [`Comm::shrink`], [`Comm::grow`], [`Comm::rebuild`].

use super::comm::Comm;
use super::object::blocks;
#[cfg(feature = "mpi")]
use crate::backend::mpi::MpiComm;
use crate::contract::{Backend, Call, Operation, RankGrid, grown_name};
#[cfg(feature = "mpi")]
use crate::types::error::UnsupportedError;
use crate::types::error::{Error, Result};
use crate::watch::launcher;
use serde::Serialize;
#[cfg(feature = "mpi")]
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Comm {
    /// Splits this communicator into one for each colour.
    ///
    /// Collective. Ranks with the same colour come together, ordered by `key` and then by their rank here;
    /// `None` leaves a rank out (it gets `Ok(None)`). The new communicators are independent of this one: each has its
    /// own order of calls and fails alone. `ncclCommSplit`, `MPI_Comm_split`.
    #[doc(alias("MPI_Comm_split", "ncclCommSplit", "new_group"))]
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Comm>> {
        self.requests.wait_for_collectives();
        let record = self.recorder.begin(&Call::empty(Operation::Split));
        let limited = self.limited();
        // SAFETY: as in `run_call`.
        let part = self.recorder.end(record, unsafe { self.backend.split(color, key) });
        drop(limited);
        let name = self.recorder.child_name(color.unwrap_or(0));
        self.recorder.skip(self.backend.collectives_of_split() - 1);
        Ok(part?.map(|backend| self.derived(backend.into(), name)))
    }

    /// A communicator of the same ranks in the same order, with messages, an order of calls and failures of its own. `MPI_Comm_dup`.
    ///
    /// Collective, as [`split`](Comm::split). For a library whose messages must not meet its caller's. A communicator for several threads
    /// of a rank is what [`share`](Comm::share) makes.
    ///
    /// ```
    /// # fn main() -> phalanx::Result<()> {
    /// phalanx::try_run(2, |comm| -> phalanx::Result<()> {
    ///     let own = comm.duplicate()?;
    ///     assert_eq!((own.rank(), own.world_size()), (comm.rank(), comm.world_size()));
    ///     own.barrier()
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[doc(alias = "MPI_Comm_dup")]
    pub fn duplicate(&self) -> Result<Comm> {
        self.split_with_color(0)
    }

    /// The communicator of the ranks on this host, in the order of their ranks here. `MPI_Comm_split_type` with `MPI_COMM_TYPE_SHARED`.
    ///
    /// Collective, as [`split`](Comm::split). [`host_topology`](Comm::host_topology) says which ranks share a host.
    #[doc(alias = "MPI_Comm_split_type")]
    pub fn split_by_host(&self) -> Result<Comm> {
        let host = self.host_topology().host_of(self.rank());
        self.split_with_color(host)
    }

    /// The communicator of the ranks with an equal key, in the order of their ranks here. The key is any value that serde knows: a
    /// number, a name, a pair.
    ///
    /// Collective, as [`split`](Comm::split). Keys are compared by their bytes, as postcard writes them; a `HashMap` has no fixed order.
    ///
    /// ```
    /// # fn main() -> phalanx::Result<()> {
    /// phalanx::try_run(4, |comm| -> phalanx::Result<()> {
    ///     let model = if comm.rank() == 1 { "large" } else { "small" };
    ///     let part = comm.split_by(&model)?;
    ///     assert_eq!(part.world_size(), if model == "large" { 1 } else { 3 });
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ObjectError`](crate::ObjectError), the same on every rank, if the ranks' keys have different types or cannot be serialized.
    pub fn split_by<K: Serialize>(&self, key: &K) -> Result<Comm> {
        let (all, lengths) = self.all_gather_packed("split_by", key)?;
        let keys: Vec<&[u8]> = blocks(&all, &lengths).collect();
        let first = keys.iter().position(|key| *key == keys[self.rank()]);
        self.split_with_color(first.expect("this rank's key is among them"))
    }

    pub(super) fn split_with_color(&self, color: usize) -> Result<Comm> {
        Ok(self.split(Some(color as u32), 0)?.expect("a rank with a colour"))
    }

    /// Makes communicators for a grid of ranks, in one exchange on the host.
    ///
    /// `sizes` are the sizes of the grid's dimensions, outermost first: with `[2, 3]`, rank 4 is at row 1 and column 1. Each of `groups`
    /// lists dimensions, and gets one communicator: that of the ranks which differ from this one in these dimensions alone, ordered as
    /// here. The result has the order of `groups`.
    ///
    /// ```
    /// phalanx::try_run(6, |comm| {
    ///     let parts = comm.split_grid(&[2, 3], &[&[0], &[1], &[0, 1]])?;
    ///     // The column, the row, and all.
    ///     assert_eq!(parts.iter().map(|part| part.world_size()).collect::<Vec<_>>(), [2, 3, 6]);
    ///     assert_eq!((parts[0].rank(), parts[1].rank()), (comm.rank() / 3, comm.rank() % 3));
    ///     phalanx::Result::Ok(())
    /// })?;
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// Collective, with the same grid and groups on every rank. The new communicators are independent of this one and of each other, as
    /// those of [`split`](Comm::split). `MPI_Cart_create` with `MPI_Cart_sub`; on NCCL one `ncclCommSplit` for each group.
    ///
    /// # Errors
    /// [`UsageError::Setting`](crate::UsageError::Setting) if the product of the sizes is not the number of ranks, or if a group has a dimension that there is not, or
    /// one twice. Nothing was sent then. [`MismatchError`](crate::MismatchError) if the ranks call it with different grids (MPI and NVSHMEM do
    /// not compare the grids).
    pub fn split_grid(&self, sizes: &[usize], groups: &[&[usize]]) -> Result<Vec<Comm>> {
        let grid = RankGrid { sizes, groups };
        self.shape().check_grid(&grid)?;
        self.requests.wait_for_collectives();
        let record = self.recorder.begin(&grid.call());
        let limited = self.limited();
        // SAFETY: as in `run_call`.
        let parts = self.recorder.end(record, unsafe { self.backend.split_grid(&grid) });
        drop(limited);
        let name = |number: usize, group: &[usize]| {
            self.recorder.child_name(format_args!("{number}.{}", grid.place(group, self.rank())))
        };
        let names: Vec<String> = (0..).zip(groups).map(|(number, group)| name(number, group)).collect();
        self.recorder.skip(self.backend.collectives_of_split_grid(groups.len()).saturating_sub(1));
        Ok(parts?.into_iter().zip(names).map(|(backend, name)| self.derived(backend.into(), name)).collect())
    }

    /// A communicator of the ranks of an MPI communicator that the program made itself: a duplicate of it, which leaves it alone.
    ///
    /// This communicator is any one on the backend MPI. Collective over the ranks of the given one. Its handle is what the MPI library of
    /// this process has: the pointer of Open MPI and of the standard ABI, the `int` of MPICH's ABI as `u32`.
    ///
    /// # Safety
    /// `handle` is that of an intracommunicator that is alive.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) on another backend; [`UsageError::Setting`](crate::UsageError::Setting) for `MPI_COMM_NULL`.
    #[cfg(feature = "mpi")]
    pub unsafe fn adopt_mpi_comm(&self, handle: usize) -> Result<Comm> {
        let Some(backend) = MpiComm::of(&*self.backend) else {
            return Err(Error::from(UnsupportedError {
                what: "adopt_mpi_comm".into(),
                why: format!("the backend is {}", self.backend()),
                remedy: "call it on a communicator on MPI (PHALANX_BACKEND=mpi)".into(),
            }));
        };
        let _limited = self.limited();
        // SAFETY: the caller's contract.
        let (adopted, number) = unsafe { backend.adopt(handle) }?;
        Ok(Comm::new(Arc::new(adopted), format!("MPI/adopted-{number:016x}")))
    }

    /// Makes a new communicator of the remaining ranks, in the order of their ranks here, to go on after a failure.
    /// `MPIX_Comm_shrink`, `ncclCommShrink`.
    ///
    /// Every rank that goes on calls it. Left out are:
    /// - ranks that died, left or panicked;
    /// - ranks that the failure (a [`PeerError`](crate::PeerError) or [`TimeoutError`](crate::TimeoutError)) names. If one comes
    ///   back, it gets [`Error::LeftBehind`](crate::Error::LeftBehind);
    /// - ranks that do not call this within the [deadline](Comm::timeout), which begins anew for each rank lost meanwhile.
    ///
    /// All ranks of the new communicator agree on its members.
    ///
    /// This communicator stays failed (if it had not failed, it works on); drop it when its buffers are no
    /// longer needed. The contents of output buffers of operations in progress are unspecified, and a
    /// rank may have completed an operation that failed on another: begin again at a point that all ranks have, a
    /// checkpoint or the last step that was agreed on.
    #[doc(alias("MPIX_Comm_shrink", "ncclCommShrink"))]
    pub fn shrink(&self) -> Result<Comm> {
        self.requests.wait_for_collectives();
        let limited = self.limited();
        let (backend, numbers) = self.backend.shrink()?;
        drop(limited);
        let kept = processes(&*backend);
        let lost: Vec<u32> =
            processes(&*self.backend).into_iter().filter(|process| !kept.contains(process)).collect();
        launcher::went_on_without(&lost);
        let path: String = numbers.iter().map(|number| format!("/shrink{number}")).collect();
        Ok(self.derived(backend.into(), format!("{}{path}", self.recorder.name())))
    }

    /// Whether the flags of all remaining ranks are set: the same answer for all of them, also if ranks die meanwhile. `MPIX_Comm_agree`.
    ///
    /// Every remaining rank calls it, in the order of its calls of this and of [`shrink`](Comm::shrink), which says which ranks remain. It
    /// works on a communicator that has failed, and leaves one that has not as it is, unless a rank does not come. So ranks can decide
    /// whether a step counts: an operation that failed on one rank may be complete on another. It takes some 200 µs.
    ///
    /// ```
    /// # fn main() -> phalanx::Result<()> {
    /// phalanx::try_run(4, |comm| -> phalanx::Result<()> {
    ///     if comm.rank() == 3 {
    ///         return Ok(()); // It leaves.
    ///     }
    ///     let step = comm.barrier();
    ///     assert!(!comm.agree(step.is_ok())?);
    ///     let comm = comm.shrink()?;
    ///     assert!(comm.agree(true)?);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::LeftBehind`](crate::Error::LeftBehind) as for `shrink`. On MPI, which ends the job where a rank is lost, those of a
    /// collective, which it is there.
    #[doc(alias = "MPIX_Comm_agree")]
    pub fn agree(&self, flag: bool) -> Result<bool> {
        self.requests.wait_for_collectives();
        let _limited = self.limited();
        let answer = self.recorder.noted(self.backend.agree(flag));
        self.recorder.skip(self.backend.collectives_of_agree());
        answer
    }

    /// Makes a new communicator of these ranks, with the same numbers, and of `joiners` processes that call
    /// [`phalanx::join`](crate::join), in the order in which they arrive. `ncclCommGrow`.
    ///
    /// Collective, with the same number on every rank. It waits for the joiners, up to the [deadline](Comm::timeout); if
    /// they do not come, the error names those that are missing, and this communicator works on, as it does if
    /// all have come. The ranks are processes; on several hosts, on UCX or NCCL, with a store that the joiners reach, too.
    ///
    /// # Errors
    /// [`Error::Bootstrap`](crate::Error::Bootstrap) names the ranks that did not come; [`UsageError::WorldSize`](crate::UsageError::WorldSize) for more than 512 ranks on one host, or 4,096;
    /// [`Error::Unsupported`](crate::Error::Unsupported) for threads, a world of one, and MPI.
    #[doc(alias("ncclCommGrow", "MPI_Comm_spawn"))]
    pub fn grow(&self, joiners: usize) -> Result<Comm> {
        self.requests.wait_for_collectives();
        // A refusal here must not use up an operation number.
        self.backend.check_growth(joiners)?;
        let record = self.recorder.begin(&Call::empty(Operation::Grow));
        let limited = self.limited();
        // SAFETY: as in `run_call`.
        let grown = self.recorder.end(record, unsafe { self.backend.grow(joiners) });
        drop(limited);
        self.recorder.skip(self.backend.collectives_of_grow() - 1);
        let (backend, number) = grown?;
        Ok(Comm::new(backend.into(), grown_name(number)))
    }

    /// Replaces lost ranks: [`shrink`](Comm::shrink), then [`grow`](Comm::grow) to the number of ranks that there are here.
    /// The survivors keep their order and come first.
    ///
    /// If a rank is lost meanwhile, the others begin again, with a new [deadline](Comm::timeout); if a newcomer is, they wait for another until the same one. Under
    /// `phalanx launch --restarts` the newcomers are started by the launcher, and get their communicator from
    /// [`phalanx::init`](crate::init).
    pub fn rebuild(&self) -> Result<Comm> {
        /// Pause before newcomers are asked for again.
        const PAUSE: Duration = Duration::from_millis(20);
        let mut survivors = self.shrink()?;
        let mut since = Instant::now();
        while survivors.world_size() < self.world_size() {
            let joiners = self.world_size() - survivors.world_size();
            match survivors.within(self.timeout()).grow(joiners) {
                Err(error) if since.elapsed() >= self.timeout() => return Err(error),
                Err(error) if error.is_fatal() => {
                    survivors = survivors.shrink()?;
                    since = Instant::now();
                }
                Err(Error::Bootstrap(_)) => std::thread::sleep(PAUSE),
                grown => return grown,
            }
        }
        Ok(survivors)
    }
}

/// The processes of a communicator, as far as it knows them.
fn processes(backend: &dyn Backend) -> Vec<u32> {
    (0..backend.world_size()).filter_map(|rank| backend.process_of(rank)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::BackendKind;

    #[test]
    fn ranks_with_different_grids_get_a_mismatch() {
        let of_threads = Comm::builder().backend(BackendKind::Host).run(4, |comm| {
            let sizes = if comm.rank() == 3 { [4, 1] } else { [2, 2] };
            let Err(Error::Mismatch(error)) = comm.split_grid(&sizes, &[&[0], &[1]]) else {
                panic!("no mismatch")
            };
            assert!(error.to_string().contains("split_grid(grid #"), "{error}");
        });
        of_threads.unwrap();
    }

    #[test]
    fn a_grid_is_recorded_and_the_numbers_of_operations_stay_those_of_the_backend() {
        let of_threads = Comm::builder().backend(BackendKind::Host).run(2, |comm| {
            comm.split_grid(&[2], &[&[0], &[]]).unwrap();
            let records = comm.recorder.records();
            assert_eq!(records.last().unwrap().operation, Operation::SplitGrid);
            comm.barrier().unwrap();
            // Two exchanges, and the barrier.
            assert_eq!(comm.recorder.records().last().unwrap().sequence, 3);
        });
        of_threads.unwrap();
    }

    #[test]
    fn what_is_refused_at_once_counts_nowhere() {
        let of_threads = Comm::builder().backend(BackendKind::Host).run(2, |comm| {
            let before = comm.recorder.child_name("next");
            assert!(matches!(comm.grow(1), Err(Error::Unsupported(_))));
            assert_eq!(comm.recorder.child_name("next"), before);
        });
        of_threads.unwrap();
    }
}
