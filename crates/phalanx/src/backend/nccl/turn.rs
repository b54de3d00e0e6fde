//! One thread at a time inside the library, for each device.

use crate::gpu::backoff::Backoff;
use crate::os::sync::lock;
use crate::types::error::{Error, Result, UnsupportedError};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

/// The right to be inside the library for a device: "using different communicators of one device from several threads is not
/// safe" (NCCL's user guide, thread safety).
#[derive(Default)]
pub(crate) struct Turnstile {
    inside: Mutex<()>,
    /// What the thread inside is there for, if others give up waiting for that.
    errand: Mutex<Option<Arc<Errand>>>,
}

/// What a thread takes turns for that has a bound.
pub(crate) struct Errand {
    function: &'static str,
    is_late: AtomicBool,
}

impl Errand {
    pub fn new(function: &'static str) -> Arc<Errand> {
        Arc::new(Errand { function, is_late: AtomicBool::new(false) })
    }

    /// It takes too long: from now on nobody waits for a turn that it has.
    pub fn give_up(&self) {
        self.is_late.store(true, Ordering::Release);
    }
}

/// A turn, until it is dropped.
pub(crate) type Inside = MutexGuard<'static, ()>;

/// A turn on an errand.
pub(crate) struct OnErrand {
    turnstile: &'static Turnstile,
    _inside: Inside,
}

impl Drop for OnErrand {
    fn drop(&mut self) {
        *lock(&self.turnstile.errand) = None;
    }
}

impl Turnstile {
    /// Waits until no other thread is inside. An error if one is that does not come back.
    #[inline]
    pub fn enter(&'static self) -> Result<Inside> {
        self.try_enter().map_or_else(|| self.wait(), Ok)
    }

    /// [`enter`](Turnstile::enter) on an errand.
    pub fn enter_on(&'static self, errand: &Arc<Errand>) -> Result<OnErrand> {
        let inside = self.enter()?;
        *lock(&self.errand) = Some(errand.clone());
        Ok(OnErrand { turnstile: self, _inside: inside })
    }

    /// A turn, if nobody has it.
    #[inline]
    pub fn try_enter(&'static self) -> Option<Inside> {
        match self.inside.try_lock() {
            Err(TryLockError::WouldBlock) => None,
            Err(TryLockError::Poisoned(inside)) => Some(inside.into_inner()),
            Ok(inside) => Some(inside),
        }
    }

    #[cold]
    fn wait(&'static self) -> Result<Inside> {
        let mut patience = Backoff::new();
        loop {
            if let Some(inside) = self.try_enter() {
                return Ok(inside);
            }
            self.check()?;
            patience.pause();
        }
    }

    /// An error if a thread is inside that does not come back.
    pub fn check(&self) -> Result<()> {
        match lock(&self.errand).as_deref() {
            Some(errand) if errand.is_late.load(Ordering::Acquire) => Err(Error::from(UnsupportedError {
                what: "another call of the library on this GPU".into(),
                why: format!("a thread of this process has not come back from {}", errand.function),
                remedy: "end the process; its other GPUs can be used".into(),
            })),
            _ => Ok(()),
        }
    }
}
