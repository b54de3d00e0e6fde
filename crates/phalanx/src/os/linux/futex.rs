//! Sleeping on a word in shared memory, and memory barriers that also order other processes.

use super::timespec;
use rustix::thread::{MembarrierCommand, futex};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Sleeps until `word` is no longer `expected`, somebody wakes it, or `timeout` has passed.
pub(crate) fn futex_wait(word: &AtomicU32, expected: u32, timeout: Duration) {
    // Every outcome (woken, changed, interrupted, timed out) means: look again.
    let _ = futex::wait(word, futex::Flags::empty(), expected, Some(&timespec(timeout)));
}

/// Wakes whoever sleeps on `word`.
pub(crate) fn futex_wake(word: &AtomicU32) {
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}

/// Whether [`heavy_barrier`] orders the other ranks' accesses too, so that they need only
/// compiler fences on their fast path. Registers this process to be a target of such barriers.
pub(crate) fn asymmetric_barriers() -> bool {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    *REGISTERED.get_or_init(|| rustix::thread::membarrier(MembarrierCommand::RegisterGlobalExpedited).is_ok())
}

/// A full memory barrier on this thread and, where [`asymmetric_barriers`] is true, on every running
/// thread of every process that registered.
pub(crate) fn heavy_barrier() {
    std::sync::atomic::fence(Ordering::SeqCst);
    if asymmetric_barriers() {
        let _ = rustix::thread::membarrier(MembarrierCommand::GlobalExpedited);
    }
}
