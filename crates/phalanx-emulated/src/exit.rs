//! What must be over when the process exits, where `EMULATED_EXIT` says so.

use crate::settings::settings;
use crate::violation::violation;
use crate::{nccl, nvshmem};
use std::ffi::c_int;

/// Looks at the process's exit whether anything was not ended: after what the program registers later than this, before what it
/// has registered.
pub fn watch() {
    unsafe extern "C" {
        fn atexit(function: extern "C" fn()) -> c_int;
    }
    extern "C" fn exit() {
        if let Some(rank) = nccl::communicator::left() {
            violation("exit", format!("rank {rank}'s communicator was not ended"));
        }
        if nvshmem::process::status() >= nvshmem::process::IS_INITIALIZED {
            violation("exit", "NVSHMEM was not finalized");
        }
    }
    if settings().exit_crashes {
        // SAFETY: the function stays: this library is never unloaded.
        assert_eq!(unsafe { atexit(exit) }, 0);
    }
}
