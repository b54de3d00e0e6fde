//! The process's right to a context: NVSHMEM allows one at a time, and none after one that failed.

use crate::os::leave;
use crate::os::sync::lock;
use crate::types::error::{Error, Result, UnsupportedError};
use std::ffi::c_int;
use std::sync::Mutex;

/// Whether the process can begin a context: it has at most one at a time.
pub(crate) enum ProcessState {
    Free,
    InUse,
    /// A context failed or was dropped; no other can follow it.
    Spent(Error),
}

pub(crate) static PROCESS: Mutex<ProcessState> = Mutex::new(ProcessState::Free);

/// The right to have a context. Returned when it is dropped, unless the library was entered.
pub(crate) struct Claim {
    pub entered: bool,
}

impl Claim {
    pub fn new() -> Result<Claim> {
        let mut process = lock(&PROCESS);
        match &*process {
            ProcessState::Free => {
                *process = ProcessState::InUse;
                Ok(Claim { entered: false })
            }
            ProcessState::Spent(error) => Err(error.clone()),
            ProcessState::InUse => Err(Error::from(UnsupportedError {
                what: "a second NVSHMEM context".into(),
                why: "a process is one PE, and this one has a context already".into(),
                remedy: "finalize that one first, or pass it on".into(),
            })),
        }
    }

    /// Marks the process as unable to begin another context.
    pub fn spend(error: &Error) {
        *lock(&PROCESS) = ProcessState::Spent(error.clone());
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut process = lock(&PROCESS);
        if matches!(&*process, ProcessState::InUse) {
            *process = if self.entered { ProcessState::Spent(abandoned()) } else { ProcessState::Free };
        }
    }
}

/// At process exit: a library that was not finalized would crash in its exit handler (3.4.5:
/// `bootstrap_finalize`), and one process alone cannot finalize it. So the process leaves without that
/// handler.
pub(crate) fn at_process_exit(status: Option<c_int>) {
    let is_left = matches!(&*lock(&PROCESS), ProcessState::InUse | ProcessState::Spent(_));
    if let (true, Some(status)) = (is_left, status) {
        leave(status);
    }
}

#[cold]
fn abandoned() -> Error {
    Error::from(UnsupportedError {
        what: "another NVSHMEM context".into(),
        why: "this process's last one was dropped, or failed, without being finalized, and the library keeps its state"
            .into(),
        remedy: "call Context::finalize on every PE; after a failure end the process".into(),
    })
}
