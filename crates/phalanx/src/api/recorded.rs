//! Messages of a [`Comm`], recorded in its flight recorder; writing that record, and the name in it.

use super::comm::Comm;
use super::lending::Lending;
use crate::contract::Transfer;
use crate::control::diagnosis::public_name;
use crate::types::error::{Result, UsageError};
use crate::watch::{Posted, RecordId, dump};
use std::path::{Path, PathBuf};

impl Comm {
    /// [`Backend::post`](crate::contract::Backend::post), recorded.
    ///
    /// # Safety
    /// As for the backend's.
    #[inline]
    pub(crate) unsafe fn post(&self, transfer: Transfer) -> Result<Posted> {
        self.requests.make_way_for_message();
        let record = self.recorder.begin_message(&transfer);
        let _limited = self.limited();
        let lending = Lending::begin(&*self.backend);
        // SAFETY: the caller's contract.
        let posted = unsafe { self.backend.post(transfer) };
        lending.end();
        match posted {
            Ok(id) => Ok(Posted { id, record }),
            Err(error) => self.recorder.end(record, Err(error)),
        }
    }

    /// [`Backend::post_both`](crate::contract::Backend::post_both), recorded.
    ///
    /// # Safety
    /// As for the backend's.
    pub(crate) unsafe fn post_both(&self, transfers: [Transfer; 2]) -> [Result<Posted>; 2] {
        self.requests.make_way_for_message();
        let lending = Lending::begin(&*self.backend);
        let [first, second] = transfers.map(|transfer| self.recorder.begin_message(&transfer));
        let _limited = self.limited();
        // SAFETY: the caller's contract.
        let [one, other] = unsafe { self.backend.post_both(transfers) };
        lending.end();
        [(one, first), (other, second)].map(|(posted, record)| match posted {
            Ok(id) => Ok(Posted { id, record }),
            Err(error) => self.recorder.end(record, Err(error)),
        })
    }

    /// Posts two messages together and waits for both.
    ///
    /// # Safety
    /// As for [`post_both`](Self::post_both), until this returns.
    pub(crate) unsafe fn transfer_both(&self, transfers: [Transfer; 2]) -> Result<()> {
        // SAFETY: the caller's contract; both are settled below.
        let [received, sent] = unsafe { self.post_both(transfers) };
        let waited = |posted: Result<Posted>| posted.and_then(|posted| self.wait(posted, &|| ()));
        let outcome = waited(sent);
        waited(received).and(outcome)
    }

    /// Carries an operation out again, in the record that it has.
    #[inline(always)]
    pub(super) fn again(&self, record: RecordId, operate: impl FnOnce() -> Result<()>) -> Result<()> {
        let _limited = self.limited();
        let lending = Lending::begin(&*self.backend);
        let result = operate();
        lending.end();
        if result.is_err() {
            return self.recorder.end(record, result);
        }
        self.recorder.repeated(record);
        result
    }

    /// [`Backend::recorded_transfer`](crate::contract::Backend::recorded_transfer).
    ///
    /// # Safety
    /// As for the backend's.
    #[inline]
    pub(crate) unsafe fn transfer(&self, transfer: Transfer) -> Result<()> {
        self.requests.make_way_for_message();
        let record = self.recorder.open_message(&transfer);
        let begun = || self.recorder.begun(record);
        let _limited = self.limited();
        let lending = Lending::begin(&*self.backend);
        // SAFETY: the caller's contract.
        let result = unsafe { self.backend.recorded_transfer(transfer, &begun) };
        lending.end();
        self.recorder.end(record, result)
    }

    /// [`Backend::wait`](crate::contract::Backend::wait), recorded.
    #[inline]
    pub(crate) fn wait(&self, posted: Posted, meanwhile: &dyn Fn()) -> Result<()> {
        let _limited = self.limited();
        let lending = Lending::begin(&*self.backend);
        let result = self.backend.wait(posted.id, meanwhile);
        lending.end();
        self.recorder.end(posted.record, result)
    }

    /// Gives this communicator a name, which flight records and the errors of its operations show beside the one that it has: `0.1:pipeline`.
    /// `MPI_Comm_set_name`.
    ///
    /// Local: every rank gives the same name, since `phalanx trace` puts the records of one name together.
    ///
    /// ```
    /// # fn main() -> phalanx::Result<()> {
    /// phalanx::try_run(2, |comm| -> phalanx::Result<()> {
    ///     let pipeline = comm.split_by_host()?;
    ///     pipeline.set_name("pipeline")?;
    ///     assert!(pipeline.name().ends_with(":pipeline"));
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`UsageError::Setting`](crate::UsageError::Setting) if it was given a name before.
    #[doc(alias = "MPI_Comm_set_name")]
    pub fn set_name(&self, name: &str) -> Result<()> {
        if !self.recorder.set_given_name(name) {
            let (setting, value) = ("the communicator's name".into(), name.into());
            let expected = format!("one name: it is {}", self.name());
            return Err(UsageError::Setting { name: setting, value, expected }.into());
        }
        self.backend.set_given_name(&self.name());
        Ok(())
    }

    /// The communicator's name in flight records, without the job's name in front: `world`, `0.1`, or `0.1:pipeline`. The same on all its
    /// ranks. `MPI_Comm_get_name`.
    pub fn name(&self) -> String {
        let (name, full) = (self.recorder.name(), self.recorder.full_name());
        format!("{}{}", public_name(name), &full[name.len()..])
    }

    /// Writes this rank's flight record into a folder (made if it is not there) and answers the file's path:
    /// the last 1024 operations of this communicator, with their times, for `phalanx trace`.
    ///
    /// With `PHALANX_TRACE_DIR` set this happens by itself when the communicator fails or its rank panics, and on a
    /// signal if `PHALANX_TRACE_SIGNAL` names one. Not collective; can be called at any time.
    pub fn write_flight_record(&self, folder: impl AsRef<Path>) -> Result<PathBuf> {
        dump::write(&self.recorder, folder.as_ref(), &dump::Reason::Request)
    }
}
