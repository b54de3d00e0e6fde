//! The symmetric heap.

use super::init::INVALID_VALUE;
use super::process::{self, Pe, exit, inside, nvshmem};
use super::world::{BOOTSTRAP, HEAP};
use crate::cuda::memory::{self, GARBAGE, Range, When};
use crate::cuda::virtual_memory::{self, Properties};
use crate::lock;
use crate::settings::settings;
use crate::violation::violation;
use std::ffi::c_int;
use std::os::fd::AsRawFd;

const PAGE: u64 = 4096;
/// The team of all PEs, whose barrier is in every one of these functions.
const WORLD: c_int = 0;

/// Allocates on all PEs: the same place everywhere. 0 if there is no room, or nothing to allocate. `grows` is by how much the library
/// lets its heap grow for it, rounded up.
fn allocate(function: &'static str, alignment: u64, bytes: usize, grows: u64, fill: u8) -> u64 {
    inside(function, |pe| {
        if bytes == 0 {
            return 0;
        }
        pe.check_idle(function, WORLD);
        pe.agree(function, [bytes as u64, alignment]);
        let start = place(pe, alignment.max(16), bytes as u64, grows);
        if let Some(offset) = start {
            for peer in 0..pe.pes {
                memory::adopt(
                    pe.world.heap(peer) + offset,
                    bytes as u64,
                    pe.context.device,
                    pe.context.handle,
                );
            }
            let own = pe.world.heap(pe.pe) + offset;
            // SAFETY: this PE's part of the new allocation, of which nobody knows yet.
            unsafe { (own as *mut u8).write_bytes(fill, bytes) };
        }
        pe.barrier();
        start.map_or(0, |offset| pe.world.heap(pe.pe) + offset)
    })
}

/// Takes addresses that end at a page which belongs to nobody.
fn place(pe: &Pe, alignment: u64, bytes: u64, grows: u64) -> Option<u64> {
    let mut state = lock(&pe.state);
    let limit = settings().symmetric_size.unwrap_or_else(|| {
        if state.used + bytes > state.physical {
            let step = grows.next_multiple_of(settings().heap_step);
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
        violation("nvshmem_malloc", "this process has used up the emulator's addresses");
    }
    state.used += bytes;
    state.allocations.insert(start, bytes);
    Some(start)
}

/// Whether an address is in the part of a growing heap that has memory: what is in use, and what is left behind it.
pub fn is_mapped(address: u64) -> bool {
    let Some(pe) = process::pe().filter(|_| settings().symmetric_size.is_none()) else { return false };
    let (heap, state) = (pe.world.heap(pe.pe), lock(&pe.state));
    (heap..heap + state.next + state.physical - state.used).contains(&address)
}

/// At the end: nothing of the heap may be used any more.
pub fn forget_all(pe: &Pe) {
    memory::put_back(pe.context.device, std::mem::take(&mut lock(&pe.state).physical));
    let state = lock(&pe.state);
    for start in state.allocations.keys().chain(state.mapped.keys()) {
        forget(pe, "nvshmemx_hostlib_finalize", *start);
    }
}

fn forget(pe: &Pe, function: &'static str, offset: u64) {
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

    /// A range of this PE's that the library may use: symmetric or registered.
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

nvshmem! {
    fn nvshmem_malloc(bytes: usize) -> u64 {
        allocate(FUNCTION, 16, bytes, bytes as u64, GARBAGE)
    }

    fn nvshmem_calloc(count: usize, bytes: usize) -> u64 {
        // As 3.4.5 does, which lets the heap grow by one element, and ends the process where it cannot grow.
        let start = allocate(FUNCTION, 16, count * bytes, bytes as u64, 0);
        if start == 0 && count * bytes > 0 && settings().symmetric_size.is_some() {
            exit(FUNCTION, "nvshmem malloc failed");
        }
        start
    }

    fn nvshmem_align(alignment: usize, bytes: usize) -> u64 {
        if !alignment.is_power_of_two() || alignment < 8 {
            violation(FUNCTION, format!("the alignment {alignment} is no power of two from 8 on"));
        }
        allocate(FUNCTION, alignment as u64, bytes, bytes as u64 + alignment as u64, GARBAGE)
    }

    fn nvshmem_free(address: u64) {
        inside(FUNCTION, |pe| {
            if address == 0 {
                return;
            }
            let offset = pe.symmetric(FUNCTION, "the memory", address, 1);
            pe.check_idle(FUNCTION, WORLD);
            pe.agree(FUNCTION, [offset, 0]);
            super::rma::complete(pe, &super::rma::awaited(pe));
            pe.barrier();
            let mut state = lock(&pe.state);
            let Some(bytes) = state.allocations.remove(&offset) else {
                violation(FUNCTION, format!("{address:#x} is not the start of an allocation"));
            };
            state.used -= bytes;
            drop(state);
            forget(pe, FUNCTION, offset);
        })
    }

    fn nvshmem_ptr(address: u64, peer: c_int) -> u64 {
        inside(FUNCTION, |pe| {
            let peer = pe.peer(FUNCTION, peer);
            let heap = pe.world.heap(pe.pe);
            let known = address >= heap && address < heap + HEAP as u64;
            let reached = known && (peer == pe.pe || settings().peer_access);
            if reached { pe.world.heap(peer) + (address - heap) } else { 0 }
        })
    }

    fn nvshmemx_mc_ptr(team: c_int, address: u64) -> u64 {
        // An address with which nothing can be done here: there are no kernels that would.
        inside(FUNCTION, |pe| {
            let is_there = settings().multicast && pe.team(FUNCTION, team).members.len() > 1;
            if is_there { (1 << 60) | address } else { 0 }
        })
    }

    fn nvshmemx_buffer_register(address: u64, bytes: usize) -> c_int {
        inside(FUNCTION, |pe| {
            if bytes == 0 {
                return INVALID_VALUE;
            }
            Range { function: FUNCTION, role: "the buffer", address, len: bytes }.check(When::Called);
            let mut state = lock(&pe.state);
            let end = address + bytes as u64;
            if state.registered.iter().any(|(start, size)| address < start + size && *start < end) {
                return INVALID_VALUE;
            }
            state.registered.insert(address, bytes as u64);
            memory::register(address, true);
            0
        })
    }

    fn nvshmemx_buffer_unregister(address: u64) -> c_int {
        inside(FUNCTION, |pe| {
            if !lock(&pe.state).pending.is_empty() {
                violation(FUNCTION, "operations that were not completed by quiet may still use the buffer");
            }
            match lock(&pe.state).registered.remove(&address) {
                Some(_) => {
                    memory::register(address, false);
                    0
                }
                None => INVALID_VALUE,
            }
        })
    }

    fn nvshmemx_buffer_register_symmetric(address: u64, bytes: usize, _flags: c_int) -> u64 {
        inside(FUNCTION, |pe| map(FUNCTION, pe, address, bytes))
    }

    fn nvshmemx_buffer_unregister_symmetric(address: u64, bytes: usize) -> c_int {
        inside(FUNCTION, |pe| {
            let offset = pe.symmetric(FUNCTION, "the memory", address, 1);
            if lock(&pe.state).mapped.remove(&offset) != Some(bytes as u64) {
                violation(FUNCTION, format!("{bytes} bytes at {address:#x} are nothing that was registered"));
            }
            pe.check_idle(FUNCTION, WORLD);
            pe.agree(FUNCTION, [offset, bytes as u64]);
            super::rma::complete(pe, &super::rma::awaited(pe));
            pe.barrier();
            forget(pe, FUNCTION, offset);
            0
        })
    }
}

/// Maps memory a second time, as part of the heap. Whatever is wrong with it takes the heap of 3.4.5 down.
fn map(function: &'static str, pe: &Pe, address: u64, bytes: usize) -> u64 {
    let refuse = |why: String| -> ! { violation(function, format!("{why}: the heap would be taken down")) };
    let Some((start, _, physical)) = virtual_memory::find(address) else {
        refuse(format!("the memory at {address:#x} does not come from cuMemCreate"))
    };
    let rounded = bytes.next_multiple_of(settings().heap_step as usize);
    if start != address || rounded > physical.size {
        refuse(format!(
            "{rounded} bytes (in steps of the heap) at {address:#x} are beyond the memory ({})",
            physical.size
        ));
    }
    let wanted = Properties::exportable(pe.context.device);
    if (physical.properties.handle_types, physical.properties.device) != (wanted.handle_types, wanted.device)
    {
        refuse(format!("{:?} are not the properties of the heap", physical.properties));
    }
    let offset = {
        let mut state = lock(&pe.state);
        let offset = state.next.next_multiple_of(virtual_memory::GRANULE as u64);
        state.next = offset + rounded as u64 + PAGE;
        state.mapped.insert(offset, bytes as u64);
        offset
    };
    pe.check_idle(function, WORLD);
    pe.agree(function, [bytes as u64, offset]);
    let all: Vec<usize> = (0..pe.pes).collect();
    let mut say = [0; 14];
    say[..2].copy_from_slice(&[std::process::id().into(), physical.file.as_raw_fd() as u64]);
    for (peer, words) in pe.world.exchange(BOOTSTRAP, pe.pe, &all, say).iter().enumerate() {
        if let Err(error) = pe.world.map(peer, offset, bytes, words[0], words[1]) {
            refuse(format!("PE {peer}'s memory cannot be mapped ({error})"));
        }
        memory::adopt(pe.world.heap(peer) + offset, bytes as u64, pe.context.device, pe.context.handle);
    }
    pe.barrier();
    pe.world.heap(pe.pe) + offset
}
