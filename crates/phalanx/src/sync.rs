//! The atomics of the shared-memory protocols: the standard ones, or loom's when it explores them.

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, compiler_fence, fence};

#[cfg(loom)]
pub(crate) use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicU32, AtomicU64, Ordering, fence},
};

/// loom has no compiler fences; the symmetric protocol is what it explores.
#[cfg(loom)]
pub(crate) fn compiler_fence(_: Ordering) {}

/// [`std::cell::UnsafeCell`] with loom's interface.
#[cfg(not(loom))]
#[repr(transparent)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    #[inline(always)]
    pub fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    #[inline(always)]
    pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}
