//! Virtual memory management: physical memory, which is an unnamed file, and the addresses where it is
//! mapped.

use super::context::current;
use super::error::{INVALID_VALUE, OUT_OF_MEMORY};
use super::memory;
use crate::base::call::{Answer, exported};
use crate::base::handles::{self, Handle, Handles};
use crate::base::lock::lock;
use crate::base::pointers::{In, Out};
use crate::base::violation::violation;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_ulonglong, c_void};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// The granularity of sizes and addresses, in bytes.
pub const GRANULE: usize = 2 << 20;

/// `CUmemAllocationProp`, with its inner structures laid out.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Properties {
    kind: c_int,
    pub handle_types: c_int,
    location: c_int,
    pub device: c_int,
    security: *mut c_void,
    flags: [u8; 8],
}

// SAFETY: the pointer is never followed.
unsafe impl Send for Properties {}
// SAFETY: as above.
unsafe impl Sync for Properties {}

/// Physical memory.
#[derive(Debug)]
pub struct Physical {
    pub file: OwnedFd,
    pub size: usize,
    pub properties: Properties,
    handle: Handle,
    /// How many times it was created or retained and not released.
    holders: AtomicUsize,
}

static PHYSICAL: Handles<Physical> = Handles::new("memory handle");

/// Mappings by their start: the length, and the memory.
static MAPPED: Mutex<BTreeMap<u64, (usize, Arc<Physical>)>> = Mutex::new(BTreeMap::new());

/// The handle of NVSHMEM's heap, which the emulated NVSHMEM maps itself.
const HEAP: Handle = 0xa00;

/// Whether an address is in NVSHMEM's heap; set when NVSHMEM is initialised.
static IS_IN_HEAP: OnceLock<fn(u64) -> bool> = OnceLock::new();

/// Tells this file which addresses are in NVSHMEM's heap.
pub fn set_heap(contains: fn(u64) -> bool) {
    IS_IN_HEAP.get_or_init(|| contains);
}

impl Properties {
    /// The properties of pinned device memory that can be exported as a file descriptor.
    pub fn exportable(device: usize) -> Properties {
        let security = std::ptr::null_mut();
        Properties { kind: 1, handle_types: 1, location: 1, device: device as c_int, security, flags: [0; 8] }
    }
}

/// The mapping that contains an address: its start, its length, and the memory.
pub fn find(address: u64) -> Option<(u64, usize, Arc<Physical>)> {
    let mapped = lock(&MAPPED);
    let (start, (size, physical)) = mapped.range(..=address).next_back()?;
    (address < start + *size as u64).then(|| (*start, *size, Arc::clone(physical)))
}

fn are_granules(sizes: &[usize]) -> Answer {
    if sizes.iter().all(|size| *size > 0 && size.is_multiple_of(GRANULE)) {
        Ok(())
    } else {
        Err(INVALID_VALUE)
    }
}

exported! {
    fn cuMemGetAllocationGranularity(granularity: Out<usize>, _properties: In<Properties>, _option: c_int) {
        granularity.set(GRANULE);
        Ok(())
    }

    fn cuMemCreate(to: Out<Handle>, size: usize, properties: In<Properties>, _flags: c_ulonglong) {
        current()?;
        are_granules(&[size])?;
        let properties = properties.get().ok_or(INVALID_VALUE)?;
        if properties.kind != 1 || properties.location != 1 {
            return Err(INVALID_VALUE);
        }
        if !memory::take(properties.device as usize, size as u64) {
            return Err(OUT_OF_MEMORY);
        }
        let file = memfd_create("emulated-memory", MemfdFlags::CLOEXEC).map_err(|_| OUT_OF_MEMORY)?;
        ftruncate(&file, size as u64).map_err(|_| OUT_OF_MEMORY)?;
        let handle = handles::fresh();
        let holders = AtomicUsize::new(1);
        PHYSICAL.insert(handle, Arc::new(Physical { file, size, properties, handle, holders }));
        to.set(handle);
        Ok(())
    }

    fn cuMemRelease(handle: Handle) {
        if handle == HEAP {
            return Ok(());
        }
        let physical = PHYSICAL.get(FUNCTION, handle);
        if physical.holders.fetch_sub(1, Ordering::AcqRel) == 1 {
            PHYSICAL.end(FUNCTION, handle, FUNCTION);
            memory::put_back(physical.properties.device as usize, physical.size as u64);
        }
        Ok(())
    }

    fn cuMemRetainAllocationHandle(to: Out<Handle>, address: u64) {
        if IS_IN_HEAP.get().is_some_and(|is_in_heap| is_in_heap(address)) {
            to.set(HEAP);
            return Ok(());
        }
        let (_, _, physical) = find(address).ok_or(INVALID_VALUE)?;
        physical.holders.fetch_add(1, Ordering::AcqRel);
        to.set(physical.handle);
        Ok(())
    }

    fn cuMemGetAllocationPropertiesFromHandle(properties: Out<Properties>, handle: Handle) {
        properties.set(match handle {
            HEAP => Properties::exportable(current()?.device),
            _ => PHYSICAL.get(FUNCTION, handle).properties,
        });
        Ok(())
    }

    fn cuMemAddressReserve(
        to: Out<u64>, size: usize, _alignment: usize, _wanted: u64, _flags: c_ulonglong,
    ) {
        are_granules(&[size])?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping, at an address that the system chooses.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), size + GRANULE, ProtFlags::empty(), flags) };
        to.set((start.map_err(|_| OUT_OF_MEMORY)? as u64).next_multiple_of(GRANULE as u64));
        Ok(())
    }

    fn cuMemAddressFree(_start: u64, size: usize) {
        // Addresses are never used twice.
        are_granules(&[size])
    }

    fn cuMemMap(start: u64, size: usize, offset: usize, handle: Handle, _flags: c_ulonglong) {
        let physical = PHYSICAL.get(FUNCTION, handle);
        are_granules(&[start as usize, size])?;
        if offset != 0 || size > physical.size {
            return Err(INVALID_VALUE);
        }
        let (flags, none) = (MapFlags::SHARED | MapFlags::FIXED, ProtFlags::empty());
        // SAFETY: the caller reserved these addresses (`cuMemAddressReserve`).
        unsafe { mmap(start as *mut c_void, size, none, flags, &physical.file, 0) }.map_err(|_| OUT_OF_MEMORY)?;
        lock(&MAPPED).insert(start, (size, physical));
        Ok(())
    }

    fn cuMemSetAccess(start: u64, size: usize, _access: In<c_void>, _count: usize) {
        let (mapped, _, physical) = find(start).filter(|(mapped, len, _)| (*mapped, *len) == (start, size)).ok_or(INVALID_VALUE)?;
        // SAFETY: a mapping of `cuMemMap`, which the caller does not access yet.
        unsafe { mprotect(mapped as *mut c_void, size, MprotectFlags::READ | MprotectFlags::WRITE) }
            .map_err(|_| INVALID_VALUE)?;
        memory::adopt(memory::Kind::Symmetric, start, size as u64, physical.properties.device as usize, current()?.handle);
        Ok(())
    }

    fn cuMemUnmap(start: u64, size: usize) {
        match lock(&MAPPED).remove(&start) {
            Some((len, _)) if len == size => {}
            _ => violation(FUNCTION, format!("no mapping of {size} bytes starts at {start:#x}")),
        }
        memory::disown(FUNCTION, start);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: replaces a mapping of `cuMemMap`. A later access crashes, as it should.
        unsafe { mmap_anonymous(start as *mut c_void, size, ProtFlags::empty(), flags) }.map_err(|_| INVALID_VALUE)?;
        Ok(())
    }
}
