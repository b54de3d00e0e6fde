//! Watching a communicator: flight recorder, deadlines, and records as files.
//!
//! | file | what |
//! |---|---|
//! | `recorder.rs`, `slot.rs` | the ring of a communicator's last operations, always on; one of its records |
//! | `clock.rs` | timestamps at a few nanoseconds each |
//! | `dump.rs` | a flight record as a JSON file |
//! | `deadline.rs` | deadlines of single operations |
//! | `reminder.rs` | when to say that a wait goes on |
//! | `metrics.rs` | counters for monitoring |
//! | `ranges.rs` | operations as ranges of NVTX and spans of `tracing` |
//! | `signal.rs` | flight records on a signal |
//! | `launcher.rs` | what a rank tells `phalanx launch`, and flight records that the launcher asks for |
//!
//! `api/` calls [`Recorder::begin`] and [`Recorder::end`] around each operation of a backend, so all backends
//! are recorded alike. For operations that may be short it calls [`Recorder::open`] instead of `begin`, which
//! does not read the clock; the backend calls [`Recorder::begun`] when it first waits.

mod clock;
pub(crate) mod deadline;
pub(crate) mod dump;
pub(crate) mod launcher;
#[cfg(feature = "metrics")]
pub mod metrics;
#[cfg(not(feature = "metrics"))]
#[path = "no_metrics.rs"]
mod metrics;
mod ranges;
mod recorder;
mod reminder;
mod signal;
mod slot;

#[cfg(test)]
pub(crate) use recorder::PANIC_WHEN_BEGUN;
pub(crate) use recorder::{RecordId, Recorder};
pub(crate) use reminder::{Reminder, say_missing};
pub(crate) use signal::last_operation;

use crate::contract::OperationId;
use crate::types::error::Result;

/// Environment variable with the folder for flight records.
pub(crate) const TRACE_DIR: &str = "PHALANX_TRACE_DIR";

/// Checks the settings of flight records, so that a mistake is found before a record is needed.
pub(crate) fn check_settings() -> Result<()> {
    signal::wanted()?;
    dump::check_folder()
}

/// Sets up flight records as the environment asks; called for the first communicator.
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
