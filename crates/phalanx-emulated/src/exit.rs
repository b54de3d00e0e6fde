//! What must be over when the process exits, where `EMULATED_EXIT` says so.

use crate::settings::settings;
use crate::violation::violation;
use crate::{nccl, nvshmem};
use std::ffi::c_int;
use std::sync::Once;

/// Looks at the process's exit whether communicators were not ended: as NCCL's destructors, which are there since it was loaded, after all
/// that the program registers later than this.
pub fn watch_nccl() {
    extern "C" fn exit() {
        if let Some(rank) = nccl::communicator::left() {
            violation("exit", format!("rank {rank}'s communicator was not ended"));
        }
        if nccl::ending::is_freeing() {
            violation("exit", "a thread frees a communicator");
        }
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| register(exit));
}

/// Looks at the process's exit whether NVSHMEM was not finalized. It registers that with every initialisation, so the last looks before
/// what the program has registered earlier.
pub fn watch_nvshmem() {
    extern "C" fn exit() {
        if nvshmem::process::status() >= nvshmem::process::IS_INITIALIZED {
            violation("exit", "NVSHMEM was not finalized");
        }
    }
    register(exit);
}

fn register(function: extern "C" fn()) {
    unsafe extern "C" {
        fn atexit(function: extern "C" fn()) -> c_int;
    }
    if settings().exit_crashes {
        // SAFETY: the function stays: this library is never unloaded.
        assert_eq!(unsafe { atexit(function) }, 0);
    }
}
