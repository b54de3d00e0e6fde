//! Memory of the host, for a backend whose own memory is elsewhere.

use super::host_channel::HostChannel;
use crate::contract::{Call, MappedParts, Window};
use crate::types::error::{Error, Result};

/// Memory on a host channel, whose failures the backend makes its own.
pub(crate) struct HostChannelWindow<'c, F> {
    window: Box<dyn Window + 'c>,
    fail: F,
}

impl<'c, F: Fn(Error) -> Error> HostChannelWindow<'c, F> {
    /// # Safety
    /// As for [`Backend::symmetric`](crate::contract::Backend::symmetric).
    pub unsafe fn new(channel: &'c dyn HostChannel, call: &Call<'_>, fail: F) -> Result<Self> {
        // SAFETY: the caller's contract.
        match unsafe { channel.symmetric(call) } {
            Ok(window) => Ok(HostChannelWindow { window, fail }),
            Err(error) => Err(fail(error)),
        }
    }
}

impl<F: Fn(Error) -> Error> Window for HostChannelWindow<'_, F> {
    fn own(&self) -> *mut u8 {
        self.window.own()
    }

    fn mapped(&self) -> Option<MappedParts> {
        self.window.mapped()
    }

    fn set_open(&self, is_open: bool) {
        self.window.set_open(is_open);
    }

    fn synchronize(&self) -> Result<()> {
        self.window.synchronize().map_err(&self.fail)
    }

    fn flush(&self, rank: Option<usize>) -> Result<()> {
        self.window.flush(rank).map_err(&self.fail)
    }

    fn signal(&self, rank: usize) -> Result<()> {
        self.window.signal(rank).map_err(&self.fail)
    }

    fn wait_signals(&self, rank: usize, count: u64) -> Result<()> {
        self.window.wait_signals(rank, count).map_err(&self.fail)
    }

    fn free(self: Box<Self>) -> Result<()> {
        let Self { window, fail } = *self;
        window.free().map_err(fail)
    }
}
