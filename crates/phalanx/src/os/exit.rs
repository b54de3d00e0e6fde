//! Handlers that run when the process exits.

use super::sync::lock;
use std::ffi::c_int;
use std::sync::Mutex;

/// A handler; its argument is the exit status, where the system provides it.
pub(crate) type Handler = fn(Option<c_int>);

/// Handlers, each with the process that registered it: forks do not run it.
static HANDLERS: Mutex<Vec<(Handler, u32)>> = Mutex::new(Vec::new());

/// Calls `handler` when the process exits, in the thread that calls `exit`: before what was registered
/// earlier, which includes the destructors of libraries that were loaded earlier.
pub(crate) fn at_exit(handler: Handler) {
    let mut handlers = lock(&HANDLERS);
    handlers.push((handler, std::process::id()));
    register();
}

/// Runs the last remaining handler. The system calls this once for each call of `register`.
fn run_last(status: Option<c_int>) -> bool {
    let last = lock(&HANDLERS).pop();
    let Some((handler, process)) = last else { return false };
    if process == std::process::id() {
        handler(status);
    }
    true
}

/// Ends the process from inside a handler: runs the remaining handlers, but no destructors of libraries.
pub(crate) fn leave(status: c_int) -> ! {
    unsafe extern "C" {
        fn fflush(stream: *mut std::ffi::c_void) -> c_int;
        fn _exit(status: c_int) -> !;
    }
    while run_last(Some(status)) {}
    // SAFETY: all streams of C that are open; nothing of this process is used after its end.
    unsafe {
        fflush(std::ptr::null_mut());
        _exit(status)
    }
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn register() {
    use std::ffi::c_void;
    unsafe extern "C" {
        fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
    }
    extern "C" fn run(status: c_int, _: *mut c_void) {
        run_last(Some(status));
    }
    // SAFETY: the function is there as long as the process, whose program it is part of.
    unsafe { on_exit(run, std::ptr::null_mut()) };
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn register() {
    unsafe extern "C" {
        fn atexit(function: extern "C" fn()) -> c_int;
    }
    extern "C" fn run() {
        run_last(None);
    }
    // SAFETY: as above.
    unsafe { atexit(run) };
}
