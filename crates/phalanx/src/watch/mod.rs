//! Watching a communicator: flight recorder, deadlines, and records as files.
//!
//! | file | what |
//! |---|---|
//! | `recorder.rs` | the ring of a communicator's last operations, always on |
//! | `clock.rs` | timestamps at a few nanoseconds each |
//! | `dump.rs` | a flight record as a JSON file |
//! | `deadline.rs` | deadlines of single operations |
//! | `signal.rs` | flight records on a signal |
//!
//! The front calls [`Recorder::begin`] and [`Recorder::end`] around what it hands to a backend, so every backend
//! is recorded in the same way. Of what is short it calls [`Recorder::open`], and the backend says when it has
//! [begun](Recorder::begun).

mod clock;
pub(crate) mod deadline;
pub(crate) mod dump;
mod recorder;
mod signal;

pub(crate) use recorder::{RecordId, Recorder};

use crate::contract::OperationId;
use crate::types::error::Result;

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
    pub id: OperationId,
    pub record: RecordId,
}
