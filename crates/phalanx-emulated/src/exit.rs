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
    ONCE.call_once(|| watch(exit));
}

/// Looks at the process's exit whether NVSHMEM was not finalized. It registers that with every initialisation, so the last looks before
/// what the program has registered earlier.
pub fn watch_nvshmem() {
    extern "C" fn exit() {
        if nvshmem::process::status() >= nvshmem::process::IS_INITIALIZED {
            violation("exit", "NVSHMEM was not finalized");
        }
    }
    watch(exit);
}

/// Has the process manager told at the process's exit that nothing failed: Hydra ends the other ranks of one that is gone without that.
pub fn leave_process_manager() {
    extern "C" fn exit() {
        nvshmem::init::leave_process_manager();
    }
    register(exit);
}

fn watch(function: extern "C" fn()) {
    if settings().exit_crashes {
        register(function);
    }
}

fn register(function: extern "C" fn()) {
    unsafe extern "C" {
        fn atexit(function: extern "C" fn()) -> c_int;
    }
    // SAFETY: the function stays: this library is never unloaded.
    assert_eq!(unsafe { atexit(function) }, 0);
}
