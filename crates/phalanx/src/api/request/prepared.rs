//! [`Prepared`]: a collective that is checked once and carried out many times.

use super::plan::{Access, Plan};
use super::{Kept, MaybeDangling};
use crate::api::comm::Comm;
use crate::contract::Call;
use crate::types::error::{Result, UsageError};
use crate::watch::RecordId;

/// A collective that was checked once, with its buffers, and that [`run`](Prepared::run) carries out as often as wanted.
/// `MPI_Allreduce_init` and its like.
///
/// Preparing communicates nothing, and each run matches the plain call: another rank may make that one. Arguments are checked once, and
/// runs in a row have one flight record: with the number and the state of the last, and the times of the first.
///
/// Host memory. For GPU memory there are graphs (`phalanx::nccl::Graph`).
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// # use phalanx::ReduceOp;
/// phalanx::try_run(2, |comm| -> phalanx::Result<()> {
///     let mut norm = comm.prepare_all_reduce(vec![0.0f32], ReduceOp::Sum)?;
///     for step in 0..3 {
///         norm.buffers[0] = (comm.rank() + step) as f32;
///         norm.run()?;
///         assert_eq!(norm.buffers[0], (1 + 2 * step) as f32);
///     }
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[doc(alias = "MPI_Start")]
pub struct Prepared<'c, B> {
    /// The buffer of the operation, or its two: `(send, recv)`. Their lengths stay as they are.
    pub buffers: B,
    comm: &'c Comm,
    access: Access<B>,
    /// Addresses and lengths of the buffers, as the call has them.
    places: [(*const u8, usize); 2],
    call: Call<'static>,
    /// The record of the last run.
    record: Option<RecordId>,
    /// What the call points to.
    _kept: MaybeDangling<Kept>,
}

impl<B> Prepared<'_, B> {
    /// Carries out the operation, as the plain call would.
    ///
    /// # Errors
    /// Those of the plain call; [`UsageError::Length`] if a buffer's length has changed.
    pub fn run(&mut self) -> Result<()> {
        let places = (self.access.look)(&mut self.buffers, &self.comm.stream);
        if places != self.places {
            self.place(places)?;
        }
        self.comm.run_again(&self.call, &mut self.record)
    }

    /// Takes buffers that lie elsewhere.
    #[cold]
    fn place(&mut self, places: [(*const u8, usize); 2]) -> Result<()> {
        for (index, buffer) in ["first", "second"].into_iter().enumerate() {
            let (operation, actual, expected) =
                (self.call.operation.name(), places[index].1, self.places[index].1);
            if actual != expected {
                let rule = "as long as when it was prepared";
                return Err(UsageError::Length { operation, buffer, actual, expected, rule }.into());
            }
        }
        self.call = (self.access.place)(&mut self.buffers, self.call, &self.comm.stream, self.comm.rank())?;
        self.places = places;
        Ok(())
    }
}

impl Comm {
    /// Prepares a planned collective.
    pub(super) fn prepare<B>(&self, plan: Plan<B>) -> Result<Prepared<'_, B>> {
        let Plan { buffers, kept, call, access } = plan;
        let mut buffers = buffers.into_inner();
        let places = (access.look)(&mut buffers, &self.stream);
        let call = (access.place)(&mut buffers, call, &self.stream, self.rank())?;
        Ok(Prepared { buffers, comm: self, access, places, call, record: None, _kept: kept })
    }

    /// Carries out a checked call, as [`run_call`](Self::run_call), again: in the record that it had if there is none since, without reading
    /// the clock.
    fn run_again(&self, call: &Call<'_>, record: &mut Option<RecordId>) -> Result<()> {
        self.requests.wait_for_collectives();
        match record.filter(|record| self.recorder.repeat(*record)) {
            // SAFETY: as in `run_call`; the buffers are borrowed by `Prepared::run`.
            Some(again) => self.again(again, || unsafe { self.backend.recorded_collective(call, &|| ()) }),
            None => self.run_recorded(call, record),
        }
    }

    /// The first run, or one after another operation.
    #[cold]
    fn run_recorded(&self, call: &Call<'_>, record: &mut Option<RecordId>) -> Result<()> {
        let result = self.run_call(call);
        *record = self.recorder.last();
        result
    }
}

impl<B> std::fmt::Debug for Prepared<'_, B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prepared").field("operation", &self.call.operation.name()).finish_non_exhaustive()
    }
}
