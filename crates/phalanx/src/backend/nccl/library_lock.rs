//! [`LibraryLock`]: one thread at a time inside the library, for each device.

use crate::gpu::backoff::Backoff;
use crate::os::sync::lock;
use crate::types::error::{Error, Result, UnsupportedError};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

/// Lock that a thread holds while it is inside the library for a device: "using different communicators of
/// one device from several threads is not safe" (NCCL's user guide, thread safety).
#[derive(Default)]
pub(crate) struct LibraryLock {
    inside: Mutex<()>,
    /// The bounded call that holds the lock, if it is one.
    bounded_call: Mutex<Option<Arc<BoundedCall>>>,
}

/// A call with a bound in time. Once it is late, other threads stop waiting for the lock that it holds.
pub(crate) struct BoundedCall {
    function: &'static str,
    is_late: AtomicBool,
}

impl BoundedCall {
    pub fn new(function: &'static str) -> Arc<BoundedCall> {
        Arc::new(BoundedCall { function, is_late: AtomicBool::new(false) })
    }

    /// Marks the call as late: no thread waits any more for a lock that it holds.
    pub fn give_up(&self) {
        self.is_late.store(true, Ordering::Release);
    }
}

/// The held lock.
pub(crate) type LibraryGuard = MutexGuard<'static, ()>;

/// The lock, held for a bounded call.
pub(crate) struct BoundedGuard {
    lock_of: &'static LibraryLock,
    _guard: LibraryGuard,
}

impl Drop for BoundedGuard {
    fn drop(&mut self) {
        *lock(&self.lock_of.bounded_call) = None;
    }
}

impl LibraryLock {
    /// Waits until no other thread is inside. An error if the thread inside is late.
    #[inline]
    pub fn acquire(&'static self) -> Result<LibraryGuard> {
        self.try_acquire().map_or_else(|| self.wait(), Ok)
    }

    /// [`acquire`](LibraryLock::acquire) for a bounded call.
    pub fn acquire_for(&'static self, bounded_call: &Arc<BoundedCall>) -> Result<BoundedGuard> {
        let guard = self.acquire()?;
        *lock(&self.bounded_call) = Some(bounded_call.clone());
        Ok(BoundedGuard { lock_of: self, _guard: guard })
    }

    /// The lock, if it is free.
    #[inline]
    pub fn try_acquire(&'static self) -> Option<LibraryGuard> {
        match self.inside.try_lock() {
            Err(TryLockError::WouldBlock) => None,
            Err(TryLockError::Poisoned(guard)) => Some(guard.into_inner()),
            Ok(guard) => Some(guard),
        }
    }

    #[cold]
    fn wait(&'static self) -> Result<LibraryGuard> {
        let mut backoff = Backoff::new();
        loop {
            if let Some(guard) = self.try_acquire() {
                return Ok(guard);
            }
            self.check()?;
            backoff.pause();
        }
    }

    /// An error if the thread inside is late.
    pub fn check(&self) -> Result<()> {
        match lock(&self.bounded_call).as_deref() {
            Some(bounded_call) if bounded_call.is_late.load(Ordering::Acquire) => {
                Err(Error::from(UnsupportedError {
                    what: "another call of the library on this GPU".into(),
                    why: format!("a thread of this process has not come back from {}", bounded_call.function),
                    remedy: "end the process; its other GPUs can be used".into(),
                }))
            }
            _ => Ok(()),
        }
    }
}
