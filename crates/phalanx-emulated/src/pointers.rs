//! Pointers that come from C callers.
//!
//! A value of these types exists only as an argument of an exported function, so whoever made it vouches for it: it
//! is null or fit for what the function's documentation says. That is why their methods are not `unsafe`.

use std::ffi::{CStr, c_char};

/// Where a result goes.
#[repr(transparent)]
#[derive(Debug)]
pub struct Out<T>(*mut T);

/// Where values are read.
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

// SAFETY: results may be written by another thread, which is what "late" means for those that come late.
unsafe impl<T: Send> Send for Out<T> {}

impl<T> Out<T> {
    /// Whether it is null.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Stores a result; not if it is null.
    pub fn set(self, value: T) {
        if !self.is_null() {
            // SAFETY: comes from a C caller, see above.
            unsafe { self.0.write(value) }
        }
    }

    /// Stores a result in the n-th place.
    pub fn set_nth(self, n: usize, value: T) {
        // SAFETY: comes from a C caller, who says how many places there are.
        unsafe { self.0.add(n).write(value) }
    }

    /// The n-th place.
    pub fn nth(self, n: usize) -> Out<T> {
        Out(self.0.wrapping_add(n))
    }

    /// What is there already, for structures that are read and written.
    pub fn as_in(self) -> In<T> {
        In(self.0)
    }

    /// The same place as another type.
    pub fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// The first `len` of it.
    pub fn slice<'a>(self, len: usize) -> &'a mut [T] {
        // SAFETY: comes from a C caller, who says how many there are; it is not null.
        unsafe { std::slice::from_raw_parts_mut(self.0, len) }
    }
}

impl<T> In<T> {
    /// Nothing.
    pub fn null() -> In<T> {
        In(std::ptr::null())
    }

    /// The same place as another type.
    pub fn cast<U>(self) -> In<U> {
        In(self.0.cast())
    }

    /// So many bytes behind.
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
        // SAFETY: comes from a C caller, who says how many there are; it is not null.
        unsafe { std::slice::from_raw_parts(self.0, len) }
    }
}

impl<T: Copy> In<T> {
    /// The value, if it is not null.
    pub fn get(self) -> Option<T> {
        // SAFETY: comes from a C caller, see above; C does not promise alignment of what a `char *` points to.
        (!self.is_null()).then(|| unsafe { self.0.read_unaligned() })
    }
}

impl In<c_char> {
    /// The string, if it is not null.
    pub fn text(self) -> Option<String> {
        // SAFETY: comes from a C caller and is a string.
        (!self.is_null()).then(|| unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}
