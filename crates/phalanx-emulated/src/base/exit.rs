//! Functions that run at the process's exit.

use super::settings::settings;
use std::ffi::c_int;

/// Runs a check at the process's exit, if `EMULATED_EXIT` asks for such checks.
pub fn check_at_exit(check: extern "C" fn()) {
    if settings().exit_crashes {
        run_at_exit(check);
    }
}

/// Runs a function at the process's exit: before the functions that were registered earlier (`atexit`).
pub fn run_at_exit(function: extern "C" fn()) {
    unsafe extern "C" {
        fn atexit(function: extern "C" fn()) -> c_int;
    }
    // SAFETY: the function stays mapped: this library is never unloaded.
    assert_eq!(unsafe { atexit(function) }, 0);
}
