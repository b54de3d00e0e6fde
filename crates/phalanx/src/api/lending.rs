//! [`Lending`]: what happens when a panic leaves an operation.

use crate::contract::Backend;

#[cfg(test)]
#[path = "lending_tests.rs"]
mod tests;

/// An operation under way, whose buffers peers may use.
///
/// A panic that leaves the operation ends the loan: the communicator fails, for all its ranks, and nobody touches the buffers
/// any more when the frames that own them are left.
pub(crate) struct Lending<'a>(&'a dyn Backend);

impl<'a> Lending<'a> {
    #[inline(always)]
    pub fn begin(backend: &'a dyn Backend) -> Lending<'a> {
        Lending(backend)
    }

    /// The operation has returned: it is complete, has failed, or keeps the buffers of a request.
    #[inline(always)]
    pub fn end(self) {
        std::mem::forget(self);
    }
}

impl Drop for Lending<'_> {
    #[cold]
    fn drop(&mut self) {
        self.0.abandon();
    }
}
