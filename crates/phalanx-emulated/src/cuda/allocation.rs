//! The functions that allocate and free memory, and that describe pointers.

use super::capture;
use super::context::{CudaContext, current, wait_to_free};
use super::device::index;
use super::error::{INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED};
use super::memory::{self, Allocation, Kind};
use super::queue::Stream;
use super::stream;
use super::work::Plain;
use crate::base::call::{Answer, Code, exported};
use crate::base::handles::Handle;
use crate::base::pointers::{In, Out};
use crate::base::settings::settings;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

/// Allocates memory of a device that is accessible at once.
pub fn allocate(context: &CudaContext, kind: Kind, size: usize) -> Result<u64, Code> {
    if size == 0 {
        return Err(INVALID_VALUE);
    }
    let address = memory::reserve(kind, context.device, context.handle, size)?;
    memory::open(address);
    Ok(address)
}

fn allocate_in(stream: &Arc<Stream>, size: usize, to: Out<u64>) -> Answer {
    if !settings().async_alloc {
        return Err(NOT_SUPPORTED);
    }
    if size == 0 {
        to.set(0);
        return Ok(());
    }
    let address = memory::reserve(Kind::Pool, stream.device, stream.context, size)?;
    // Accessible once the stream reaches the allocation, and not before.
    stream.enqueue(Arc::new(Plain(move || memory::open(address))))?;
    to.set(address);
    Ok(())
}

fn free_in(function: &'static str, stream: &Arc<Stream>, address: u64) -> Answer {
    if address == 0 {
        return Ok(());
    }
    // A graph with a free may be launched never or many times.
    if stream.capture().is_none() {
        memory::announce_free(function, address, &[Kind::Pool, Kind::Device]);
    }
    stream.enqueue(Arc::new(Plain(move || memory::close(address))))
}

/// Frees at once, also while work uses the memory. CUDA may wait for the device here, but does not promise
/// it.
pub fn free(function: &'static str, address: u64, kinds: &[Kind]) -> Answer {
    if address != 0 {
        memory::announce_free(function, address, kinds);
        memory::close(address);
    }
    Ok(())
}

/// Stores an attribute of a pointer. `data` points to a variable of the attribute's type.
fn put_attribute(data: *mut c_void, attribute: c_int, allocation: &Allocation) -> Answer {
    let host = allocation.kind == Kind::Host;
    let words = |value: u64| put(data, value);
    match attribute {
        1 => words(allocation.context),
        // CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE.
        2 => put(data, if host { 1u32 } else { 2 }),
        3 => words(allocation.address),
        4 if host => words(allocation.address),
        6 => put(data, 1u8),
        7 => words(allocation.id),
        8 => put(data, 0u8),
        9 => put(data, allocation.device as i32),
        11 => words(allocation.address),
        12 => words(allocation.size),
        13 => put(data, 1u8),
        17 => words(if allocation.kind == Kind::Pool { POOLS + allocation.device as u64 } else { 0 }),
        _ => return Err(INVALID_VALUE),
    }
    Ok(())
}

fn put<T>(data: *mut c_void, value: T) {
    // SAFETY: the caller's variable has the attribute's type.
    unsafe { data.cast::<T>().write_unaligned(value) }
}

fn attributed(address: u64) -> Option<Allocation> {
    memory::find(address).filter(|allocation| address < allocation.address + allocation.size)
}

/// How many freed bytes a pool keeps (of `CUmemPool_attribute`).
const RELEASE_THRESHOLD: c_int = 4;
/// The most bytes that were in use at a time.
const USED_MEM_HIGH: c_int = 8;
/// Handles of the devices' pools follow this one.
const POOLS: u64 = 0x900;

exported! {
    fn cuMemAlloc_v2(address: Out<u64>, size: usize) {
        let context = current()?;
        capture::refuse_unsafe_call()?;
        context.wait_for_room();
        address.set(allocate(&context, Kind::Device, size)?);
        Ok(())
    }

    fn cuMemFree_v2(address: u64) {
        let context = current()?;
        capture::refuse_unsafe_call()?;
        wait_to_free(context.device);
        free(FUNCTION, address, &[Kind::Device, Kind::Pool])
    }

    fn cuMemAllocAsync(address: Out<u64>, size: usize, stream: Handle) {
        allocate_in(&stream::find(FUNCTION, stream)?, size, address)
    }

    fn cuMemFreeAsync(address: u64, stream: Handle) {
        free_in(FUNCTION, &stream::find(FUNCTION, stream)?, address)
    }

    fn cuMemHostAlloc(address: Out<u64>, size: usize, _flags: c_uint) {
        let context = current()?;
        capture::refuse_unsafe_call()?;
        context.sync_implicitly();
        address.set(allocate(&context, Kind::Host, size)?);
        Ok(())
    }

    fn cuMemAllocHost_v2(address: Out<u64>, size: usize) {
        let context = current()?;
        capture::refuse_unsafe_call()?;
        context.wait_for_room();
        address.set(allocate(&context, Kind::Host, size)?);
        Ok(())
    }

    fn cuMemFreeHost(address: u64) {
        let context = current()?;
        capture::refuse_unsafe_call()?;
        wait_to_free(context.device);
        free(FUNCTION, address, &[Kind::Host])
    }

    fn cuMemHostGetDevicePointer_v2(device: Out<u64>, host: u64, _flags: c_uint) {
        attributed(host).filter(|allocation| allocation.kind == Kind::Host).ok_or(INVALID_VALUE)?;
        device.set(host);
        Ok(())
    }

    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let context = current()?;
        let all = settings().device_memory;
        total.set(all as usize);
        free.set((all - memory::used(context.device)) as usize);
        Ok(())
    }

    fn cuMemGetAddressRange_v2(base: Out<u64>, size: Out<usize>, address: u64) {
        let allocation = attributed(address).ok_or(NOT_FOUND)?;
        base.set(allocation.address);
        size.set(allocation.size as usize);
        Ok(())
    }

    fn cuPointerGetAttribute(data: *mut c_void, attribute: c_int, address: u64) {
        let allocation = attributed(address).ok_or(INVALID_VALUE)?;
        put_attribute(data, attribute, &allocation)
    }

    fn cuPointerGetAttributes(number: c_uint, attributes: In<c_int>, data: In<*mut c_void>, address: u64) {
        let allocation = attributed(address);
        for (attribute, data) in attributes.slice(number as usize).iter().zip(data.slice(number as usize)) {
            // Unlike the call for one attribute, this one returns zeros for unknown pointers.
            match &allocation {
                Some(allocation) => put_attribute(*data, *attribute, allocation)?,
                None if matches!(attribute, 2 | 9) => put(*data, 0u32),
                None => put(*data, 0u64),
            }
        }
        Ok(())
    }

    fn cuDeviceGetDefaultMemPool(pool: Out<Handle>, device: c_int) {
        pool.set(POOLS + index(device)? as u64);
        Ok(())
    }

    fn cuMemPoolSetAttribute(_pool: Handle, attribute: c_int, _value: In<c_void>) {
        // The emulated pools keep nothing.
        if attribute == RELEASE_THRESHOLD { Ok(()) } else { Err(INVALID_VALUE) }
    }

    fn cuMemPoolGetAttribute(pool: Handle, attribute: c_int, value: *mut c_void) {
        let device = index(pool.wrapping_sub(POOLS) as c_int)?;
        if attribute != USED_MEM_HIGH {
            return Err(INVALID_VALUE);
        }
        // Of all of the device's memory.
        put(value, memory::most_used(device));
        Ok(())
    }

    fn cuDeviceGetMemPool(pool: Out<Handle>, device: c_int) {
        pool.set(POOLS + index(device)? as u64);
        Ok(())
    }
}
