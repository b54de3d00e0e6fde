//! One thread at a time inside the library, for each device.

use crate::gpu::backoff::Backoff;
use crate::os::sync::lock;
use crate::types::error::{Error, Result, UnsupportedError};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

/// The right to be inside the library for a device: "using different communicators of one device from several threads is not
/// safe" (NCCL's user guide, thread safety).
#[derive(Default)]
pub(crate) struct LibraryLock {
    inside: Mutex<()>,
    /// What the thread inside is there for, if others give up waiting for that.
    bounded_call: Mutex<Option<Arc<BoundedCall>>>,
}

/// What a thread takes turns for that has a bound.
pub(crate) struct BoundedCall {
    function: &'static str,
    is_late: AtomicBool,
}

impl BoundedCall {
    pub fn new(function: &'static str) -> Arc<BoundedCall> {
        Arc::new(BoundedCall { function, is_late: AtomicBool::new(false) })
    }

    /// It takes too long: from now on nobody waits for a turn that it has.
    pub fn give_up(&self) {
        self.is_late.store(true, Ordering::Release);
    }
}

/// A turn, until it is dropped.
pub(crate) type LibraryGuard = MutexGuard<'static, ()>;

/// A turn on an bounded_call.
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
    /// Waits until no other thread is inside. An error if one is that does not come back.
    #[inline]
    pub fn acquire(&'static self) -> Result<LibraryGuard> {
        self.try_acquire().map_or_else(|| self.wait(), Ok)
    }

    /// [`acquire`](LibraryLock::acquire) on an bounded_call.
    pub fn acquire_for(&'static self, bounded_call: &Arc<BoundedCall>) -> Result<BoundedGuard> {
        let guard = self.acquire()?;
        *lock(&self.bounded_call) = Some(bounded_call.clone());
        Ok(BoundedGuard { lock_of: self, _guard: guard })
    }

    /// A turn, if nobody has it.
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

    /// An error if a thread is inside that does not come back.
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
