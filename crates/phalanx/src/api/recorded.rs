//! Messages of a [`Comm`], recorded in its flight recorder; and writing that record.

use super::comm::Comm;
use super::lending::Lending;
use crate::contract::Transfer;
use crate::types::error::Result;
use crate::watch::{Posted, dump};
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

    /// Writes this rank's flight record into a folder (made if it is not there) and answers the file's path:
    /// the last 1024 operations of this communicator, with their times, for `phalanx trace`.
    ///
    /// With `PHALANX_TRACE_DIR` set this happens by itself when the communicator fails or its rank panics, and on a
    /// signal if `PHALANX_TRACE_SIGNAL` names one. Not collective; can be called at any time.
    pub fn write_flight_record(&self, folder: impl AsRef<Path>) -> Result<PathBuf> {
        dump::write(&self.recorder, folder.as_ref(), &dump::Reason::Request)
    }
}
