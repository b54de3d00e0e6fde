//! Atomics and cells of the shared-memory protocols, which the test kit replaces with loom's and shuttle's;
//! and locking.

pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, compiler_fence, fence};
pub(crate) use std::sync::{Condvar, Mutex};
use std::sync::{MutexGuard, PoisonError};

/// Locks, also after a holder panicked: what is behind a lock here is consistent at every step.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits to be notified, as [`lock`] locks.
pub(crate) fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// [`std::cell::UnsafeCell`] with loom's interface.
#[repr(transparent)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

impl<T> UnsafeCell<T> {
    #[cfg(test)]
    #[allow(dead_code, reason = "for the models")]
    pub fn new(value: T) -> UnsafeCell<T> {
        UnsafeCell(std::cell::UnsafeCell::new(value))
    }

    #[inline(always)]
    pub fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    #[inline(always)]
    pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}
