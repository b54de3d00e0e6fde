//! Words of the memory between GPUs.

pub use std::sync::atomic::AtomicU64;

/// A word of an inbox. The launch has checked that the inboxes of all ranks are memory that it reaches.
pub fn word(address: u64) -> &'static AtomicU64 {
    // SAFETY: aligned, and in an inbox, which all ranks access by atomics. If one is freed meanwhile, the crash is
    // intended.
    unsafe { &*(address as *const AtomicU64) }
}
