//! [`LibraryLock`]: one thread at a time inside the library, for each device.

use crate::gpu::backoff::Backoff;
use crate::os::RunInstant;
use crate::os::sync::lock;
use crate::types::error::{Error, Result, UnsupportedError};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::Duration;

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
    since: RunInstant,
    limit: Duration,
}

impl BoundedCall {
    /// Begins now.
    pub fn new(function: &'static str, limit: Duration) -> Arc<BoundedCall> {
        Arc::new(BoundedCall { function, since: RunInstant::now(), limit })
    }

    fn is_late(&self) -> bool {
        self.since.elapsed() >= self.limit
    }
}

/// The held lock.
pub(crate) type LibraryGuard = MutexGuard<'static, ()>;

/// The lock, held for a bounded call.
pub(crate) struct BoundedGuard {
    lock_of: &'static LibraryLock,
    _guard: LibraryGuard,
}

impl BoundedGuard {
    /// The call for which it is held from now on.
    pub fn is_for(&self, bounded_call: &Arc<BoundedCall>) {
        *lock(&self.lock_of.bounded_call) = Some(bounded_call.clone());
    }
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
        let guard = BoundedGuard { lock_of: self, _guard: self.acquire()? };
        guard.is_for(bounded_call);
        Ok(guard)
    }

    /// The lock for bounded calls, if it is free.
    pub fn try_acquire_bounded(&'static self) -> Option<BoundedGuard> {
        self.try_acquire().map(|guard| BoundedGuard { lock_of: self, _guard: guard })
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
            Some(bounded_call) if bounded_call.is_late() => Err(Error::from(UnsupportedError {
                what: "another call of the library on this GPU".into(),
                why: format!("a thread of this process has not come back from {}", bounded_call.function),
                remedy: "end the process".into(),
            })),
            _ => Ok(()),
        }
    }
}
