//! The emulated HIP runtime: the devices, streams and memory of the emulated driver, under HIP's names.
//!
//! The runtime initialises itself at the first call. Each thread has a current device, at first device 0.

use crate::base::call::{Answer, Code, answered, exported};
use crate::base::handles::Handle;
use crate::base::pointers::Out;
use crate::base::settings::settings;
use crate::cuda::allocation::{
    cuMemAlloc_v2, cuMemAllocAsync, cuMemFree_v2, cuMemFreeAsync, cuMemFreeHost, cuMemHostAlloc,
};
use crate::cuda::context::{cuCtxSynchronize, runtime_device, runtime_ensure, runtime_set_device};
use crate::cuda::copy::{StridedCopy, StridedEnd, cuMemcpyAsync, cuMemsetD8Async, strided};
use crate::cuda::device;
use crate::cuda::error::INVALID_VALUE;
use crate::cuda::event::{
    cuEventCreate, cuEventDestroy_v2, cuEventQuery, cuEventRecord, cuEventSynchronize, cuStreamWaitEvent,
};
use crate::cuda::stream::{cuStreamCreate, cuStreamDestroy_v2, cuStreamQuery, cuStreamSynchronize};
use crate::cuda::stream_capture::cuStreamIsCapturing;
use std::ffi::{CStr, c_char, c_int, c_uint};

/// `hipMemcpyDefault`, the last kind of copy.
const DEFAULT: c_int = 4;

/// Initialises the runtime, and makes a device current in this thread.
fn enter() -> Answer {
    device::initialize()?;
    runtime_ensure(runtime_device());
    Ok(())
}

/// A layout of `hipDeviceProp_t`: its size, and the offsets of the total memory and the architecture, in
/// bytes. The name is at offset 0.
struct PropertiesLayout {
    size: usize,
    memory: usize,
    architecture: usize,
}

fn put_properties(to: Out<u8>, layout: &PropertiesLayout, device: c_int) -> Answer {
    enter()?;
    let index = device::index(device)?;
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    let bytes = to.slice(layout.size);
    bytes.fill(0);
    let mut put = |offset: usize, text: &[u8]| bytes[offset..offset + text.len()].copy_from_slice(text);
    put(0, format!("Emulated AMD GPU {}", device::physical(index)).as_bytes());
    put(layout.memory, &settings().device_memory.to_ne_bytes());
    put(layout.architecture, b"gfx942:sramecc+:xnack-");
    Ok(())
}

exported! {
    fn hipRuntimeGetVersion(version: Out<c_int>) {
        version.set(settings().hip_version);
        Ok(())
    }

    fn hipGetDeviceCount(count: Out<c_int>) {
        count.set(0);
        device::initialize()?;
        count.set(settings().devices.len() as c_int);
        Ok(())
    }

    fn hipDeviceGetPCIBusId(id: Out<c_char>, len: c_int, device: c_int) {
        enter()?;
        answered(device::cuDeviceGetPCIBusId(id, len, device))
    }

    fn hipGetDevice(device: Out<c_int>) {
        enter()?;
        device.set(runtime_device() as c_int);
        Ok(())
    }

    fn hipSetDevice(device: c_int) {
        enter()?;
        runtime_set_device(device::index(device)?);
        Ok(())
    }

    fn hipGetDevicePropertiesR0600(properties: Out<u8>, device: c_int) {
        put_properties(properties, &PropertiesLayout { size: 1472, memory: 288, architecture: 1160 }, device)
    }

    fn hipGetDeviceProperties(properties: Out<u8>, device: c_int) {
        put_properties(properties, &PropertiesLayout { size: 792, memory: 256, architecture: 396 }, device)
    }

    fn hipDeviceSynchronize() {
        enter()?;
        answered(cuCtxSynchronize())
    }

    fn hipMalloc(address: Out<u64>, size: usize) {
        enter()?;
        answered(cuMemAlloc_v2(address, size))
    }

    fn hipFree(address: u64) {
        enter()?;
        answered(cuMemFree_v2(address))
    }

    fn hipHostMalloc(address: Out<u64>, size: usize, flags: c_uint) {
        enter()?;
        answered(cuMemHostAlloc(address, size, flags))
    }

    fn hipHostFree(address: u64) {
        enter()?;
        answered(cuMemFreeHost(address))
    }

    fn hipMallocAsync(address: Out<u64>, size: usize, stream: Handle) {
        enter()?;
        answered(cuMemAllocAsync(address, size, stream))
    }

    fn hipFreeAsync(address: u64, stream: Handle) {
        enter()?;
        answered(cuMemFreeAsync(address, stream))
    }

    fn hipMemcpyAsync(to: u64, from: u64, len: usize, kind: c_int, stream: Handle) {
        enter()?;
        if !(0..=DEFAULT).contains(&kind) {
            return Err(INVALID_VALUE);
        }
        answered(cuMemcpyAsync(to, from, len, stream))
    }

    fn hipMemcpy2DAsync(to: u64, to_pitch: usize, from: u64, from_pitch: usize, row: usize, rows: usize, kind: c_int, stream: Handle) {
        enter()?;
        if !(0..=DEFAULT).contains(&kind) {
            return Err(INVALID_VALUE);
        }
        let [to, from] = [(to, to_pitch), (from, from_pitch)].map(|(start, pitch)| StridedEnd::device(start, pitch, rows));
        strided(FUNCTION, stream, &StridedCopy::new(to, from, (row, rows, 1)))
    }

    fn hipMemsetAsync(to: u64, value: c_int, count: usize, stream: Handle) {
        enter()?;
        answered(cuMemsetD8Async(to, value as u8, count, stream))
    }

    fn hipStreamCreateWithFlags(stream: Out<Handle>, flags: c_uint) {
        enter()?;
        answered(cuStreamCreate(stream, flags))
    }

    fn hipStreamDestroy(stream: Handle) {
        enter()?;
        answered(cuStreamDestroy_v2(stream))
    }

    fn hipStreamQuery(stream: Handle) {
        enter()?;
        answered(cuStreamQuery(stream))
    }

    fn hipStreamSynchronize(stream: Handle) {
        enter()?;
        answered(cuStreamSynchronize(stream))
    }

    fn hipStreamIsCapturing(stream: Handle, state: Out<c_int>) {
        enter()?;
        answered(cuStreamIsCapturing(stream, state))
    }

    fn hipStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint) {
        enter()?;
        answered(cuStreamWaitEvent(stream, event, flags))
    }

    fn hipEventCreateWithFlags(event: Out<Handle>, flags: c_uint) {
        enter()?;
        answered(cuEventCreate(event, flags))
    }

    fn hipEventRecord(event: Handle, stream: Handle) {
        enter()?;
        answered(cuEventRecord(event, stream))
    }

    fn hipEventQuery(event: Handle) {
        enter()?;
        answered(cuEventQuery(event))
    }

    fn hipEventSynchronize(event: Handle) {
        enter()?;
        answered(cuEventSynchronize(event))
    }

    fn hipEventDestroy(event: Handle) {
        enter()?;
        answered(cuEventDestroy_v2(event))
    }
}

/// The name and the text of a status code. HIP's codes are CUDA's.
fn texts(code: Code) -> (&'static CStr, &'static CStr) {
    match code {
        0 => (c"hipSuccess", c"no error"),
        1 => (c"hipErrorInvalidValue", c"invalid argument"),
        2 => (c"hipErrorOutOfMemory", c"out of memory"),
        3 => (c"hipErrorNotInitialized", c"initialization error"),
        100 => (c"hipErrorNoDevice", c"no ROCm-capable device is detected"),
        101 => (c"hipErrorInvalidDevice", c"invalid device ordinal"),
        400 => (c"hipErrorInvalidHandle", c"invalid resource handle"),
        600 => (c"hipErrorNotReady", c"device not ready"),
        700 => (c"hipErrorIllegalAddress", c"an illegal memory access was encountered"),
        719 => (c"hipErrorLaunchFailure", c"unspecified launch failure"),
        801 => (c"hipErrorNotSupported", c"operation not supported"),
        _ => (c"hipErrorUnknown", c"unknown error"),
    }
}

#[allow(non_snake_case, reason = "the names are the C library's")]
#[unsafe(no_mangle)]
pub extern "C" fn hipGetErrorName(code: Code) -> *const c_char {
    texts(code).0.as_ptr()
}

#[allow(non_snake_case, reason = "the names are the C library's")]
#[unsafe(no_mangle)]
pub extern "C" fn hipGetErrorString(code: Code) -> *const c_char {
    texts(code).1.as_ptr()
}
