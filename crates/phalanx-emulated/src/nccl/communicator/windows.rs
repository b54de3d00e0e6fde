//! Windows: memory of each rank that the other ranks can write to.

use crate::base::call::{Answer, Code};
use crate::base::handles::{self, Handle};
use crate::cuda::memory::{self, Range};
use crate::nccl::result::{INVALID_ARGUMENT, fail};
use crate::nccl::version::{SEVERAL_SIGNALS, is_since};
use std::collections::BTreeMap;
use std::ffi::c_int;

/// The windows of a communicator.
#[derive(Default)]
pub struct Windows {
    windows: BTreeMap<Handle, Window>,
    /// Whether there has ever been a window.
    had_one: bool,
}

/// A window.
#[derive(Clone)]
pub struct Window {
    /// The window's number, the same on all ranks.
    pub number: u64,
    /// This rank's memory.
    pub range: Range,
    /// The first address of each rank's memory.
    pub starts: Vec<u64>,
}

impl Windows {
    pub fn is_empty(&self) -> bool {
        self.windows.is_empty()
    }

    pub fn has(&self, handle: Handle) -> bool {
        self.windows.contains_key(&handle)
    }

    /// Adds a window.
    pub fn add(&mut self, window: Window) -> Handle {
        let handle = handles::fresh();
        memory::register(window.range.address, true);
        self.windows.insert(handle, window);
        self.had_one = true;
        handle
    }

    /// Removes a window.
    pub fn remove(&mut self, handle: Handle) -> Option<Window> {
        let window = self.windows.remove(&handle)?;
        memory::register(window.range.address, false);
        Some(window)
    }

    /// The first address of this rank's memory in a window.
    pub fn start(&self, handle: Handle) -> Option<u64> {
        self.windows.get(&handle).map(|window| window.range.address)
    }

    /// An address in a rank's memory; `None` without such a rank, or beyond the window.
    pub fn start_at(&self, handle: Handle, rank: c_int, offset: usize) -> Option<u64> {
        let window = self.windows.get(&handle)?;
        let start = window.starts.get(usize::try_from(rank).ok()?)?;
        (offset < window.range.len).then(|| start + offset as u64)
    }

    /// The number of a window.
    pub fn number(&self, function: &str, handle: Handle) -> Result<u64, Code> {
        self.windows.get(&handle).map(|window| window.number).ok_or_else(|| {
            fail(INVALID_ARGUMENT, format!("{function} : {handle:#x} is no window of this communicator"))
        })
    }

    /// Refuses a source outside all windows.
    pub fn check_source(&self, function: &str, address: u64) -> Answer {
        let holds = |window: &Window| {
            address.checked_sub(window.range.address).is_some_and(|at| at < window.range.len as u64)
        };
        if self.windows.values().any(holds) {
            return Ok(());
        }
        Err(fail(INVALID_ARGUMENT, format!("{function} : the source {address:#x} is in no symmetric window")))
    }

    /// Whether signals can be sent: from 2.31 on the first window enables them.
    pub fn enable_signals(&self) -> bool {
        self.had_one || !is_since(SEVERAL_SIGNALS)
    }

    /// Ends all windows with their communicator.
    pub fn clear(&mut self) {
        std::mem::take(&mut self.windows)
            .values()
            .for_each(|window| memory::register(window.range.address, false));
    }
}
