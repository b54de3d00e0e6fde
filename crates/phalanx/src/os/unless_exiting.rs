//! Work for which an exit of the process waits, since libraries may be gone afterwards.

use super::at_exit;
use std::ffi::c_int;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long an exit waits for what must not be cut off.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

static IS_EXITING: AtomicBool = AtomicBool::new(false);

/// Threads for which an exit waits.
static INSIDE: AtomicUsize = AtomicUsize::new(0);

/// Calls `f`, for which an exit of the process waits for a while; `None` once the process exits, since libraries may be gone then. A caller has
/// a `registered` of its own, and calls this first when the libraries that `f` calls are loaded.
pub(crate) fn unless_exiting<R>(registered: &Once, f: impl FnOnce() -> R) -> Option<R> {
    struct Inside;
    impl Drop for Inside {
        fn drop(&mut self) {
            INSIDE.fetch_sub(1, Ordering::SeqCst);
        }
    }
    registered.call_once(|| at_exit(wait_for_all));
    INSIDE.fetch_add(1, Ordering::SeqCst);
    let _inside = Inside;
    // Either this sees the exit, or the exit this thread.
    (!IS_EXITING.load(Ordering::SeqCst)).then(f)
}

fn wait_for_all(_: Option<c_int>) {
    IS_EXITING.store(true, Ordering::SeqCst);
    let since = Instant::now();
    while INSIDE.load(Ordering::SeqCst) > 0 && since.elapsed() < LONGEST_WAIT {
        std::thread::sleep(Duration::from_micros(50));
    }
}
