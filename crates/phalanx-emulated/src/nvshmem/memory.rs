//! The functions on symmetric and registered memory.

use super::completion::{awaited, complete};
use super::heap::{PAGE, forget, place};
use super::process::{INVALID_VALUE, Pe, exit, initialized, nvshmem};
use super::world::{BOOTSTRAP, HEAP};
use crate::base::lock::lock;
use crate::base::settings::settings;
use crate::base::violation::violation;
use crate::cuda::memory::{self, GARBAGE, Range, When};
use crate::cuda::virtual_memory::{self, Properties};
use std::ffi::c_int;
use std::os::fd::AsRawFd;

/// The team of all PEs. Each of these functions is a barrier of it.
const WORLD: c_int = 0;

/// Allocates at the same offset of all PEs' heaps. Returns 0 without room, or for 0 bytes. `growth` is the
/// number of bytes by which the library lets its heap grow, rounded up.
fn allocate(function: &'static str, alignment: u64, bytes: usize, growth: u64, fill: u8) -> u64 {
    initialized(function, |pe| {
        if bytes == 0 {
            return 0;
        }
        pe.check_idle(function, WORLD);
        pe.agree(function, [bytes as u64, alignment]);
        let start = place(pe, alignment.max(16), bytes as u64, growth);
        if let Some(offset) = start {
            for peer in 0..pe.pes {
                memory::adopt(
                    memory::Kind::Symmetric,
                    pe.world.heap(peer) + offset,
                    bytes as u64,
                    pe.context.device,
                    pe.context.handle,
                );
            }
            let own = pe.world.heap(pe.pe) + offset;
            // SAFETY: this PE's part of the new allocation, before the barrier after which peers use it.
            unsafe { (own as *mut u8).write_bytes(fill, bytes) };
        }
        pe.barrier();
        start.map_or(0, |offset| pe.world.heap(pe.pe) + offset)
    })
}

nvshmem! {
    fn nvshmem_malloc(bytes: usize) -> u64 {
        allocate(FUNCTION, 16, bytes, bytes as u64, GARBAGE)
    }

    fn nvshmem_calloc(count: usize, bytes: usize) -> u64 {
        // As in 3.4.5, which lets the heap grow by one element, and ends the process if the heap cannot grow.
        let start = allocate(FUNCTION, 16, count * bytes, bytes as u64, 0);
        if start == 0 && count * bytes > 0 && settings().symmetric_size.is_some() {
            exit(FUNCTION, "nvshmem malloc failed");
        }
        start
    }

    fn nvshmem_align(alignment: usize, bytes: usize) -> u64 {
        if !alignment.is_power_of_two() || alignment < 8 {
            violation(FUNCTION, format!("the alignment {alignment} is not a power of two, or is below 8"));
        }
        allocate(FUNCTION, alignment as u64, bytes, bytes as u64 + alignment as u64, GARBAGE)
    }

    fn nvshmem_free(address: u64) {
        initialized(FUNCTION, |pe| {
            if address == 0 {
                return;
            }
            let offset = pe.symmetric(FUNCTION, "the memory", address, 1);
            pe.check_idle(FUNCTION, WORLD);
            pe.agree(FUNCTION, [offset, 0]);
            complete(pe, &awaited(pe));
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
        initialized(FUNCTION, |pe| {
            let peer = pe.peer(FUNCTION, peer);
            let heap = pe.world.heap(pe.pe);
            let known = address >= heap && address < heap + HEAP as u64;
            let reached = known && (peer == pe.pe || settings().peer_access);
            if reached { pe.world.heap(peer) + (address - heap) } else { 0 }
        })
    }

    fn nvshmemx_mc_ptr(team: c_int, address: u64) -> u64 {
        // An address that only kernels could use.
        initialized(FUNCTION, |pe| {
            let is_there = settings().multicast && pe.team(FUNCTION, team).members.len() > 1;
            if is_there { (1 << 60) | address } else { 0 }
        })
    }

    fn nvshmemx_buffer_register(address: u64, bytes: usize) -> c_int {
        initialized(FUNCTION, |pe| {
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
        initialized(FUNCTION, |pe| {
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
        initialized(FUNCTION, |pe| map(FUNCTION, pe, address, bytes))
    }

    fn nvshmemx_buffer_unregister_symmetric(address: u64, bytes: usize) -> c_int {
        initialized(FUNCTION, |pe| {
            let offset = pe.symmetric(FUNCTION, "the memory", address, 1);
            if lock(&pe.state).mapped.remove(&offset) != Some(bytes as u64) {
                violation(FUNCTION, format!("no registration has {bytes} bytes at {address:#x}"));
            }
            pe.check_idle(FUNCTION, WORLD);
            pe.agree(FUNCTION, [offset, bytes as u64]);
            complete(pe, &awaited(pe));
            pe.barrier();
            forget(pe, FUNCTION, offset);
            0
        })
    }
}

/// Maps memory of `cuMemCreate` a second time, as a part of the heap. Wrong arguments are violations: in
/// 3.4.5 they unmap the heap.
fn map(function: &'static str, pe: &Pe, address: u64, bytes: usize) -> u64 {
    let refuse =
        |why: String| -> ! { violation(function, format!("{why}: the library would destroy the heap")) };
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
    let mut mine = [0; 14];
    mine[..2].copy_from_slice(&[std::process::id().into(), physical.file.as_raw_fd() as u64]);
    for (peer, words) in pe.world.exchange(BOOTSTRAP, pe.pe, &all, mine).iter().enumerate() {
        if let Err(error) = pe.world.map(peer, offset, bytes, words[0], words[1]) {
            refuse(format!("PE {peer}'s memory cannot be mapped ({error})"));
        }
        let start = pe.world.heap(peer) + offset;
        memory::adopt(memory::Kind::Symmetric, start, bytes as u64, pe.context.device, pe.context.handle);
    }
    pe.barrier();
    pe.world.heap(pe.pe) + offset
}
