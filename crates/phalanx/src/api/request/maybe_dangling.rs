//! [`MaybeDangling`]: a buffer that is moved while an operation uses what it points to.

use std::mem::MaybeUninit;

/// A value that is moved while others use memory that it owns.
///
/// A `Box` says to the compiler, each time it is moved, that nobody else uses what it points to. Inside of this it does not (RFC 3336, which
/// plans a type of this name in the standard library).
pub(super) struct MaybeDangling<B>(MaybeUninit<B>);

impl<B> MaybeDangling<B> {
    pub fn new(value: B) -> MaybeDangling<B> {
        MaybeDangling(MaybeUninit::new(value))
    }

    pub fn get_mut(&mut self) -> &mut B {
        // SAFETY: there is a value until it is dropped or taken.
        unsafe { self.0.assume_init_mut() }
    }

    /// The value, when nobody else uses its memory any more.
    pub fn into_inner(self) -> B {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: there is a value; this one is not used again.
        unsafe { this.0.assume_init_read() }
    }
}

impl<B> Drop for MaybeDangling<B> {
    fn drop(&mut self) {
        // SAFETY: there is a value, and this is its end.
        unsafe { self.0.assume_init_drop() }
    }
}
