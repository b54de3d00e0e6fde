//! The symmetric heap: where allocations are, and which addresses operations may use.

use super::process::{self, Pe, exit};
use super::world::HEAP;
use crate::base::lock::lock;
use crate::base::settings::settings;
use crate::base::violation::violation;
use crate::cuda::memory::{self, Range, When};

/// Bytes of a page.
pub const PAGE: u64 = 4096;

/// Reserves bytes of the heap, with an unused page behind them.
pub fn place(pe: &Pe, alignment: u64, bytes: u64, growth: u64) -> Option<u64> {
    let mut state = lock(&pe.state);
    let limit = settings().symmetric_size.unwrap_or_else(|| {
        if state.used + bytes > state.physical {
            let step = growth.next_multiple_of(settings().heap_step);
            if !memory::take(pe.context.device, step) {
                exit(
                    "nvshmem_malloc",
                    "cuMemCreate failed, the heap is unmapped, and the barrier that follows crashes",
                );
            }
            state.physical += step;
        }
        state.physical
    });
    if bytes > limit - state.used {
        return None;
    }
    let start = state.next.next_multiple_of(alignment.max(PAGE));
    state.next = (start + bytes).next_multiple_of(PAGE) + PAGE;
    if state.next > HEAP as u64 {
        violation("nvshmem_malloc", "the emulator has no free addresses left for this process");
    }
    state.used += bytes;
    state.allocations.insert(start, bytes);
    Some(start)
}

/// Whether an address is in the part of a growing heap that has memory: the allocations and the free bytes
/// behind them.
pub fn is_mapped(address: u64) -> bool {
    let Some(pe) = process::pe().filter(|_| settings().symmetric_size.is_none()) else { return false };
    let (heap, state) = (pe.world.heap(pe.pe), lock(&pe.state));
    (heap..heap + state.next + state.physical - state.used).contains(&address)
}

/// Frees all of the heap, at finalisation.
pub fn forget_all(pe: &Pe) {
    memory::put_back(pe.context.device, std::mem::take(&mut lock(&pe.state).physical));
    let state = lock(&pe.state);
    for start in state.allocations.keys().chain(state.mapped.keys()) {
        forget(pe, "nvshmemx_hostlib_finalize", *start);
    }
}

/// Marks a range of the heap as freed.
pub fn forget(pe: &Pe, function: &'static str, offset: u64) {
    for peer in 0..pe.pes {
        memory::disown(function, pe.world.heap(peer) + offset);
    }
}

impl Pe {
    /// The offset of a symmetric range in the heap.
    pub fn symmetric(&self, function: &'static str, role: &'static str, address: u64, len: usize) -> u64 {
        let heap = self.world.heap(self.pe);
        if address < heap || address >= heap + HEAP as u64 {
            violation(function, format!("{role} at {address:#x} is not symmetric memory of this PE"));
        }
        Range { function, role, address, len }.check(When::Called);
        address - heap
    }

    /// A range of this PE that operations may use: symmetric or registered.
    pub fn local(&self, function: &'static str, role: &'static str, address: u64, len: usize) -> Range {
        let range = Range { function, role, address, len };
        range.check(When::Called);
        let heap = self.world.heap(self.pe);
        let is_symmetric = address >= heap && address < heap + HEAP as u64;
        let state = lock(&self.state);
        let is_registered = state
            .registered
            .range(..=address)
            .next_back()
            .is_some_and(|(start, size)| address + len as u64 <= start + size);
        if !is_symmetric && !is_registered && len > 0 {
            violation(function, format!("{role} at {address:#x} is neither symmetric nor registered"));
        }
        range
    }

    /// A PE's part of a symmetric range.
    pub fn remote(
        &self,
        function: &'static str,
        role: &'static str,
        offset: u64,
        len: usize,
        pe: usize,
    ) -> Range {
        Range { function, role, address: self.world.heap(pe) + offset, len }
    }
}
