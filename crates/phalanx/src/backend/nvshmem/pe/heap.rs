//! Room in the library's heap: whether it can grow for an allocation.
//!
//! With virtual memory management the heap grows when it is full, in steps of `NVSHMEM_CUMEM_GRANULARITY`. If
//! the GPU has no room for a step, the library (3.4.5) unmaps the whole heap and still uses it. So the room
//! is checked before.

use super::context::Context;
use super::device::failed;
use crate::types::error::Result;
use cudarc::driver::sys::{self, CUdeviceptr, CUresult};
use std::ffi::c_void;
use std::mem::MaybeUninit;

/// The default step, and the driver's and the library's limits for it, in bytes.
const STEP: usize = 512 << 20;
const LEAST: usize = 2 << 20;
const MOST: usize = 2 << 30;
/// The most by which the library rounds up an allocation, in bytes.
const ROUNDING: usize = 4 << 10;

impl Context {
    /// An error if the heap may have to grow by `bytes`, and the GPU has no room for that.
    pub(crate) fn check_room(&self, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // The first step is mapped at initialisation.
        let Some(end) = self.heap.borrow().iter().map(|(start, bytes)| start + bytes).max() else {
            return Ok(());
        };
        let (needed, free) = (heap(bytes), self.device.free_memory()?);
        // Behind the last allocation the heap goes on to the end of its step.
        if needed <= free || !is_dynamic(end - 1)? || is_dynamic(end + (bytes + ROUNDING) as u64)? {
            return Ok(());
        }
        let text = format!(
            "{bytes} bytes of symmetric memory may need {needed} more of the GPU (NVSHMEM_CUMEM_GRANULARITY is the step), which has \
             {free}; nothing was allocated on any PE"
        );
        Err(self.library.error("nvshmem_malloc", 0, text).into())
    }

    /// Whether the heap grows when it is full.
    pub(crate) fn has_dynamic_heap(&self) -> Result<bool> {
        if let Some(known) = self.heap_is_dynamic.get() {
            return Ok(*known);
        }
        let start = self.heap.borrow().first_key_value().map(|(start, _)| *start);
        // ReductionQuery while the heap is there: one that could not grow is unmapped.
        start.map_or(Ok(false), |start| {
            Ok(*self.heap_is_dynamic.get_or_init(|| is_dynamic(start).unwrap_or(true)))
        })
    }
}

/// By how much the heap grows for an allocation.
fn heap(bytes: usize) -> usize {
    (bytes + ROUNDING).next_multiple_of(step())
}

/// The step in bytes by which the heap grows and memory is mapped into it.
pub(crate) fn step() -> usize {
    let step = std::env::var("NVSHMEM_CUMEM_GRANULARITY").ok().and_then(|text| size(&text));
    step.unwrap_or(STEP).clamp(LEAST, MOST)
}

/// A size as the library parses it: a number, and perhaps a unit.
fn size(text: &str) -> Option<usize> {
    let text = text.trim();
    let (number, unit) = match text.char_indices().last()? {
        (at, unit) if unit.is_ascii_alphabetic() => (&text[..at], unit.to_ascii_lowercase()),
        _ => (text, ' '),
    };
    let shift = [' ', 'k', 'm', 'g', 't'].iter().position(|known| *known == unit)? * 10;
    let number: f64 = number.trim().parse().ok().filter(|number: &f64| *number >= 0.0)?;
    Some((number * (1u64 << shift) as f64) as usize)
}

fn is_dynamic(address: CUdeviceptr) -> Result<bool> {
    origin(address).map(|origin| origin.is_some())
}

/// Properties of memory from `cuMemCreate`: export handles, and location.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Created {
    handle_types: u32,
    location: [u32; 2],
}

/// The properties of the memory at an address, if it is from `cuMemCreate`. The device is current.
pub(crate) fn origin(address: CUdeviceptr) -> Result<Option<Created>> {
    let mut handle = 0;
    // SAFETY: an out-pointer on the stack; the driver looks the address up.
    match unsafe { sys::cuMemRetainAllocationHandle(&raw mut handle, address as *mut c_void) } {
        CUresult::CUDA_SUCCESS => {}
        CUresult::CUDA_ERROR_INVALID_VALUE => return Ok(None),
        error => return Err(failed("cuMemRetainAllocationHandle", error, false)),
    }
    let mut properties = MaybeUninit::<sys::CUmemAllocationProp>::zeroed();
    // SAFETY: an out-pointer on the stack; a handle that was retained above, and is given back once.
    let found = unsafe {
        let found = sys::cuMemGetAllocationPropertiesFromHandle(properties.as_mut_ptr(), handle);
        sys::cuMemRelease(handle);
        found
    };
    if found != CUresult::CUDA_SUCCESS {
        return Err(failed("cuMemGetAllocationPropertiesFromHandle", found, false));
    }
    // SAFETY: the structure begins with four words. Not read as its own types, which are enumerations: kinds
    // of handles can be combined.
    let [_, handle_types, kind, number] = unsafe { properties.as_ptr().cast::<[u32; 4]>().read() };
    Ok(Some(Created { handle_types, location: [kind, number] }))
}

#[cfg(test)]
mod tests {
    use super::size;

    #[test]
    fn sizes_have_units() {
        let read = ["1024", "64k", " 2M", "1.5G", "1T", "512 M"].map(size);
        let expected = [1 << 10, 64 << 10, 2 << 20, 3 << 29, 1 << 40, 512 << 20];
        assert_eq!(read, expected.map(Some));
        assert_eq!(["", "x", "12q", "-1", "k"].map(size), [None; 5]);
    }
}
