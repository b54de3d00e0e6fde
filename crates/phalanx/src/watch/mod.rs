//! Watching a communicator: the flight recorder, and where its records go.
//!
//! | file | what |
//! |---|---|
//! | `recorder.rs` | the ring of a communicator's last operations, always on |
//! | `clock.rs` | times that cost a few nanoseconds |
//! | `dump.rs` | a ring as a file |
//! | `deadline.rs` | deadlines of single operations |
//! | `signal.rs` | files on a signal |
//!
//! The front calls [`Recorder::begin`] and [`Recorder::end`] around what it hands to a backend, so every backend
//! is recorded in the same way. Of what is short it calls [`Recorder::open`], and the backend says when it has
//! [begun](Recorder::begun).

mod clock;
pub(crate) mod deadline;
mod dump;
mod recorder;
mod signal;

pub(crate) use recorder::{RecordId, Recorder};

use crate::backend::{Ticket, Transfer};
use crate::comm::Comm;
use crate::error::Result;
use std::path::{Path, PathBuf};

/// The folder for flight records, if one is set.
pub(crate) const TRACE_DIR: &str = "PHALANX_TRACE_DIR";

/// An error for settings that would let a flight record get lost, found out before there is one.
pub(crate) fn check_settings() -> Result<()> {
    signal::wanted()?;
    dump::check_folder()
}

/// Does what the environment asks for, from the first communicator on.
pub(crate) fn begin() -> Result<()> {
    dump::check_folder()?;
    signal::listen()
}

/// A posted message and its record.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Posted {
    pub ticket: Ticket,
    pub record: RecordId,
}

impl Comm {
    /// [`Backend::post`](crate::backend::Backend::post), recorded.
    ///
    /// # Safety
    /// As for the backend's.
    #[inline]
    pub(crate) unsafe fn post(&self, transfer: Transfer) -> Result<Posted> {
        self.requests.make_way_for_message();
        let record = self.recorder.begin_message(&transfer);
        let _limited = self.limited();
        // SAFETY: the caller's contract.
        match unsafe { self.backend.post(transfer) } {
            Ok(ticket) => Ok(Posted { ticket, record }),
            Err(error) => self.recorder.end(record, Err(error)),
        }
    }

    /// [`Backend::post_both`](crate::backend::Backend::post_both), recorded.
    ///
    /// # Safety
    /// As for the backend's.
    pub(crate) unsafe fn post_both(&self, transfers: [Transfer; 2]) -> [Result<Posted>; 2] {
        self.requests.make_way_for_message();
        let [first, second] = transfers.map(|transfer| self.recorder.begin_message(&transfer));
        let _limited = self.limited();
        // SAFETY: the caller's contract.
        let [one, other] = unsafe { self.backend.post_both(transfers) };
        [(one, first), (other, second)].map(|(posted, record)| match posted {
            Ok(ticket) => Ok(Posted { ticket, record }),
            Err(error) => self.recorder.end(record, Err(error)),
        })
    }

    /// [`Backend::recorded_transfer`](crate::backend::Backend::recorded_transfer).
    ///
    /// # Safety
    /// As for the backend's.
    #[inline]
    pub(crate) unsafe fn transfer(&self, transfer: Transfer) -> Result<()> {
        self.requests.make_way_for_message();
        let record = self.recorder.open_message(&transfer);
        let begun = || self.recorder.begun(record);
        let _limited = self.limited();
        // SAFETY: the caller's contract.
        self.recorder.end(record, unsafe { self.backend.recorded_transfer(transfer, &begun) })
    }

    /// [`Backend::wait`](crate::backend::Backend::wait), recorded.
    #[inline]
    pub(crate) fn wait(&self, posted: Posted, meanwhile: &dyn Fn()) -> Result<()> {
        let _limited = self.limited();
        self.recorder.end(posted.record, self.backend.wait(posted.ticket, meanwhile))
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
