//! Memory that every rank of the host can read: what [`Comm::alloc`](crate::Comm::alloc) gives.

use crate::types::dtype::Plain;
use crate::types::memory::Allocation;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// A slice of elements in memory that the ranks share.
///
/// Only its owner reads and writes it, as any other buffer; but collectives and messages on it need no
/// copy in and out, which makes large ones two to three times as fast between processes. It is zero at
/// first, aligned to 64 bytes, and may outlive its communicator.
pub struct HostBuffer<T: Plain> {
    start: *mut T,
    len: usize,
    _keep: Box<dyn Send + Sync>,
    elements: PhantomData<T>,
}

impl<T: Plain> HostBuffer<T> {
    /// Wraps an allocation of `len` elements.
    pub(crate) fn new(allocation: Allocation, len: usize) -> HostBuffer<T> {
        let start = allocation.start.cast::<T>();
        assert!(start.is_aligned(), "backends align to 64 bytes");
        HostBuffer { start, len, _keep: allocation.keep, elements: PhantomData }
    }
}

// SAFETY: the buffer owns its elements, as a Vec does.
unsafe impl<T: Plain> Send for HostBuffer<T> {}
// SAFETY: as above; a shared reference gives read access only.
unsafe impl<T: Plain> Sync for HostBuffer<T> {}

impl<T: Plain> Deref for HostBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the allocation holds `len` elements, zeroed or written through `deref_mut`, and peers never
        // write to them.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl<T: Plain> DerefMut for HostBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above; peers read only while this rank is inside an operation that borrows the buffer.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl<T: Plain> fmt::Debug for HostBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostBuffer").field("dtype", &T::dtype()).field("len", &self.len).finish()
    }
}
