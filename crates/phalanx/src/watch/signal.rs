//! Flight records on a signal, for a job that hangs.
//!
//! Off unless `PHALANX_TRACE_SIGNAL` names a signal, since the program may use signals itself. The handler
//! only writes a byte to a pipe. A thread writes the files, also while all ranks are inside operations.

use super::dump;
use super::dump::Reason;
use super::recorder::Recorder;
use crate::os::UserSignal;
use crate::os::sync::lock;
use crate::types::error::{Error, Result, UsageError};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// Environment variable with the signal: `USR1` or `USR2`.
const TRACE_SIGNAL: &str = "PHALANX_TRACE_SIGNAL";

/// Whether the thread runs.
static LISTENING: AtomicBool = AtomicBool::new(false);
/// Every communicator of this process.
static RECORDERS: Mutex<Vec<Weak<Recorder>>> = Mutex::new(Vec::new());

/// Registers a new communicator's recorder.
pub(crate) fn register(recorder: &Arc<Recorder>) {
    let mut recorders = lock(&RECORDERS);
    recorders.retain(|other| other.strong_count() > 0);
    recorders.push(Arc::downgrade(recorder));
}

/// What a rank of this process did last on the communicator with this name, if it is still there.
pub(crate) fn last_operation(name: &str, rank: usize) -> Option<String> {
    let recorders = recorders();
    let recorder = recorders.iter().find(|recorder| recorder.name() == name && recorder.rank == rank)?;
    Some(recorder.records().last().map_or_else(|| "it has called nothing".to_owned(), |last| last.describe()))
}

/// Writes the flight records of communicators that have not failed.
pub(super) fn write_missing() {
    recorders().iter().for_each(|recorder| recorder.write_missing());
}

pub(super) fn recorders() -> Vec<Arc<Recorder>> {
    lock(&RECORDERS).iter().filter_map(Weak::upgrade).collect()
}

fn write_all() {
    for recorder in recorders() {
        dump::on_event(&recorder, &Reason::Signal);
    }
}

/// The signal that the environment names, if any.
pub(crate) fn wanted() -> Result<Option<UserSignal>> {
    let Some(value) = std::env::var_os(TRACE_SIGNAL).filter(|value| !value.is_empty()) else {
        return Ok(None);
    };
    let value = value.to_string_lossy();
    let signal = UserSignal::of(value.trim().trim_start_matches("SIG"));
    signal.map(Some).ok_or_else(|| {
        let (name, expected) = (TRACE_SIGNAL.into(), "USR1 or USR2, where a system has them".into());
        UsageError::Setting { name, value: value.into_owned(), expected }.into()
    })
}

/// Starts the thread that writes flight records on the signal, if one is set.
pub(crate) fn listen() -> Result<()> {
    let Some(signal) = wanted()? else { return Ok(()) };
    // One thread per process.
    if LISTENING.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    let refused = |call| move |error| Error::system(call, error, format!("do without {TRACE_SIGNAL}"));
    let occurrences = signal.occurrences().map_err(refused("sigaction"))?;
    let body = move || occurrences.for_each(|()| write_all());
    std::thread::Builder::new()
        .name("phalanx-trace".into())
        .spawn(body)
        .map_err(refused("starting a thread"))?;
    Ok(())
}
