//! Pointers that C callers pass: [`In`] for arguments, [`Out`] for results.
//!
//! A value of these types exists only as an argument of an exported function. The C caller guarantees that it
//! is null or valid as the function's documentation demands, so the methods are not `unsafe`.

use std::ffi::{CStr, c_char};

/// A pointer to a result, written by the function.
#[repr(transparent)]
#[derive(Debug)]
pub struct Out<T>(*mut T);

/// A pointer to arguments, read by the function.
#[repr(transparent)]
#[derive(Debug)]
pub struct In<T>(*const T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

// SAFETY: the C caller keeps the place valid until the result is there, also if another thread writes it
// late.
unsafe impl<T: Send> Send for Out<T> {}

impl<T> Out<T> {
    /// Whether it is null.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Stores a result, unless the pointer is null.
    pub fn set(self, value: T) {
        if !self.is_null() {
            // SAFETY: not null, and valid by the C caller's guarantee.
            unsafe { self.0.write(value) }
        }
    }

    /// Stores the n-th result.
    pub fn set_nth(self, n: usize, value: T) {
        // SAFETY: the C caller guarantees room for as many results as it says.
        unsafe { self.0.add(n).write(value) }
    }

    /// A pointer to the n-th result.
    pub fn nth(self, n: usize) -> Out<T> {
        Out(self.0.wrapping_add(n))
    }

    /// The same pointer for reading, for structures that are read and written.
    pub fn as_in(self) -> In<T> {
        In(self.0)
    }

    /// The same pointer to another type.
    pub fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// The first `len` results.
    pub fn slice<'a>(self, len: usize) -> &'a mut [T] {
        // SAFETY: not null, and the C caller guarantees room for as many results as it says.
        unsafe { std::slice::from_raw_parts_mut(self.0, len) }
    }
}

impl<T> In<T> {
    /// The null pointer.
    pub fn null() -> In<T> {
        In(std::ptr::null())
    }

    /// The same pointer to another type.
    pub fn cast<U>(self) -> In<U> {
        In(self.0.cast())
    }

    /// The pointer moved forward by a number of bytes.
    pub fn at(self, bytes: usize) -> In<T> {
        In(self.0.wrapping_byte_add(bytes))
    }

    /// Whether it is null.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// The address.
    pub fn address(self) -> u64 {
        self.0 as u64
    }

    /// The first `len` values.
    pub fn slice<'a>(self, len: usize) -> &'a [T] {
        // SAFETY: not null, and the C caller guarantees as many values as it says.
        unsafe { std::slice::from_raw_parts(self.0, len) }
    }
}

impl<T: Copy> In<T> {
    /// The value, unless the pointer is null.
    pub fn get(self) -> Option<T> {
        // SAFETY: not null, and valid by the C caller's guarantee; a `char *` need not be aligned.
        (!self.is_null()).then(|| unsafe { self.0.read_unaligned() })
    }
}

impl In<c_char> {
    /// The string, unless the pointer is null.
    pub fn text(self) -> Option<String> {
        // SAFETY: not null, and a string that ends in NUL by the C caller's guarantee.
        (!self.is_null()).then(|| unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}
