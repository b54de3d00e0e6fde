//! [`Inbox`]: what takes the messages that have come. Nothing here calls UCX.

use std::ffi::c_void;

/// Where UCX's active messages of one number go.
pub(super) trait Inbox {
    /// What travels in front of the data. Any bytes are one.
    type Header: Copy;

    /// Counts a message that is not of this job's ranks.
    fn count_stranger(&mut self);

    /// Takes a message whose data has come with it.
    ///
    /// # Safety
    /// So many bytes can be read at `data`.
    unsafe fn take_eager(&mut self, header: Self::Header, data: *const u8, len: usize);

    /// Takes a message whose sender still has the data; whether its descriptor is kept.
    fn take_rendezvous(&mut self, header: Self::Header, descriptor: *mut c_void, len: usize) -> bool;
}
