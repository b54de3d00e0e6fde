//! Memory of the host, for a backend whose own memory is elsewhere.

use crate::contract::{MappedParts, Window};
use crate::os::RunInstant;
use crate::types::error::{Error, Result};

/// Memory on a host channel that all ranks map. A wait for signals that fails is the communicator's failure, which `fail` makes of the
/// awaited rank, the wait's beginning and the channel's error.
pub(crate) struct HostChannelWindow<'c, F> {
    pub window: Box<dyn Window + 'c>,
    pub fail: F,
}

impl<F: Fn(usize, RunInstant, Error) -> Error> Window for HostChannelWindow<'_, F> {
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
        self.window.synchronize()
    }

    fn flush(&self, rank: Option<usize>) -> Result<()> {
        self.window.flush(rank)
    }

    fn signal(&self, rank: usize) -> Result<()> {
        self.window.signal(rank)
    }

    fn wait_signals(&self, rank: usize, count: u64) -> Result<()> {
        let since = RunInstant::now();
        self.window.wait_signals(rank, count).map_err(|error| (self.fail)(rank, since, error))
    }

    fn free(self: Box<Self>) -> Result<()> {
        self.window.free()
    }
}
