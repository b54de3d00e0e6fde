//! Windows of one rank: its own memory.

use super::SoloComm;
use crate::contract::{Backend, Call, HostMemory, MappedParts, Window};
use crate::os::Mapping;
use crate::types::error::{Result, UsageError};
use std::cell::Cell;

struct SoloWindow<'a> {
    comm: &'a SoloComm,
    memory: Mapping,
    /// Signals that were given and not waited for.
    signals: Cell<u64>,
}

struct SoloMemory(Mapping);

impl SoloComm {
    pub(super) fn window(&self, call: &Call<'_>) -> Result<Box<dyn Window + '_>> {
        self.check()?;
        Ok(Box::new(SoloWindow { comm: self, memory: memory_of(call)?, signals: Cell::new(0) }))
    }

    pub(super) fn host_memory(&self, call: &Call<'_>) -> Result<Box<dyn HostMemory>> {
        self.check()?;
        Ok(Box::new(SoloMemory(memory_of(call)?)))
    }
}

fn memory_of(call: &Call<'_>) -> Result<Mapping> {
    Mapping::anonymous((call.blocks.len(0) * call.dtype.size()).max(1))
}

impl Window for SoloWindow<'_> {
    fn own(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    fn mapped(&self) -> Option<MappedParts> {
        Some(MappedParts { start: self.memory.as_ptr(), stride: 0 })
    }

    fn flush(&self, _rank: Option<usize>) -> Result<()> {
        Ok(())
    }

    fn signal(&self, _rank: usize) -> Result<()> {
        self.signals.set(self.signals.get() + 1);
        Ok(())
    }

    fn wait_signals(&self, _rank: usize, count: u64) -> Result<()> {
        self.comm.check()?;
        let given = self.signals.get();
        self.signals.set(given.checked_sub(count).ok_or_else(|| UsageError::own_signals(count, given))?);
        Ok(())
    }
}

impl HostMemory for SoloMemory {
    fn start(&self) -> *mut u8 {
        self.0.as_ptr()
    }

    fn place(&self) -> (usize, usize) {
        (0, 1)
    }
}
