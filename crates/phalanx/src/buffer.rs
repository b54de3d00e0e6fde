//! Buffers: what an operation reads from and writes to.

use crate::dtype::Element;
use crate::host::HostBuffer;

/// Memory an operation can read: slices, arrays, vectors, and memory from [`Comm::alloc`](crate::Comm::alloc).
///
/// # Safety
/// `as_ptr` points to `len` initialised elements that stay where they are, and are not written, for as
/// long as the buffer is borrowed.
pub unsafe trait Source {
    /// The type of the elements.
    type Elem: Element;
    /// Address of the first element.
    fn as_ptr(&self) -> *const Self::Elem;
    /// Number of elements.
    fn len(&self) -> usize;
    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Memory an operation can write; the counterpart of [`Source`].
///
/// # Safety
/// As for [`Source`]; moreover, while the buffer is mutably borrowed nobody else reads or writes the
/// elements that `as_mut_ptr` points to.
pub unsafe trait Target: Source {
    /// Address of the first element, for writing.
    fn as_mut_ptr(&mut self) -> *mut Self::Elem;
}

macro_rules! slice_like {
    ($([$($generics:tt)*] $ty:ty),* $(,)?) => {$(
        // SAFETY: a slice's elements are initialised and do not move while it is borrowed.
        unsafe impl<$($generics)*> Source for $ty {
            type Elem = T;
            fn as_ptr(&self) -> *const T {
                <[T]>::as_ptr(self)
            }
            fn len(&self) -> usize {
                <[T]>::len(self)
            }
        }
        // SAFETY: as above, and `&mut self` is exclusive.
        unsafe impl<$($generics)*> Target for $ty {
            fn as_mut_ptr(&mut self) -> *mut T {
                <[T]>::as_mut_ptr(self)
            }
        }
    )*};
}

slice_like! {
    [T: Element] [T],
    [T: Element] Vec<T>,
    [T: Element] Box<[T]>,
    [T: Element] HostBuffer<T>,
    [T: Element, const N: usize] [T; N],
}

// SAFETY: what holds for the buffer behind the reference holds for the reference.
unsafe impl<B: Source + ?Sized> Source for &B {
    type Elem = B::Elem;
    fn as_ptr(&self) -> *const B::Elem {
        (**self).as_ptr()
    }
    fn len(&self) -> usize {
        (**self).len()
    }
}

// SAFETY: what holds for the buffer behind the reference holds for the reference.
unsafe impl<B: Source + ?Sized> Source for &mut B {
    type Elem = B::Elem;
    fn as_ptr(&self) -> *const B::Elem {
        (**self).as_ptr()
    }
    fn len(&self) -> usize {
        (**self).len()
    }
}

// SAFETY: as above, and `&mut self` is exclusive.
unsafe impl<B: Target + ?Sized> Target for &mut B {
    fn as_mut_ptr(&mut self) -> *mut B::Elem {
        (**self).as_mut_ptr()
    }
}

/// A buffer that can be given away to a request and back: owned memory.
///
/// # Safety
/// The elements stay at the same address when the value itself is moved (heap or shared memory).
pub unsafe trait Owned: Target + Send + 'static {}

// SAFETY: a vector's elements are on the heap.
unsafe impl<T: Element> Owned for Vec<T> {}
// SAFETY: a boxed slice's elements are on the heap.
unsafe impl<T: Element> Owned for Box<[T]> {}
// SAFETY: the elements are in the region, wherever the handle is.
unsafe impl<T: Element> Owned for HostBuffer<T> {}
