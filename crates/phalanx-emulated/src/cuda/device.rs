//! Devices and their attributes.

use super::error::{INVALID_DEVICE, INVALID_VALUE, NO_DEVICE, NOT_INITIALIZED};
use crate::base::call::{Answer, Code, exported};
use crate::base::pointers::{In, Out};
use crate::base::random::mix;
use crate::base::settings::settings;
use std::ffi::{c_char, c_int, c_uint};
use std::sync::atomic::{AtomicBool, Ordering};

static INITIALIZED: AtomicBool = AtomicBool::new(false);

/// An error before `cuInit`.
pub fn check_initialized() -> Answer {
    if INITIALIZED.load(Ordering::Acquire) { Ok(()) } else { Err(NOT_INITIALIZED) }
}

/// Initialises the driver. The CUDA runtime, and so NCCL, does it without a call of `cuInit`.
pub fn initialize() -> Answer {
    if settings().devices.is_empty() {
        return Err(NO_DEVICE);
    }
    INITIALIZED.store(true, Ordering::Release);
    Ok(())
}

/// A valid device's index.
pub fn index(device: c_int) -> Result<usize, Code> {
    check_initialized()?;
    usize::try_from(device).ok().filter(|index| *index < settings().devices.len()).ok_or(INVALID_DEVICE)
}

/// A device's number on the host, before `CUDA_VISIBLE_DEVICES`.
pub fn physical(index: usize) -> usize {
    settings().devices[index]
}

fn uuid(index: usize) -> [u8; 16] {
    let first = mix(physical(index) as u64 + 1);
    ((u128::from(first) << 64) | u128::from(mix(first))).to_be_bytes()
}

fn bus_id(index: usize) -> String {
    format!("0000:{:02X}:00.0", physical(index) + 0x1b)
}

fn attribute(attribute: c_int) -> Result<c_int, Code> {
    let (major, minor) = settings().compute_capability;
    if attribute < 1 {
        return Err(INVALID_VALUE);
    }
    Ok(match attribute {
        // Threads per block, and a block's width, height and depth.
        1..=3 => 1024,
        4 => 64,
        // A grid's width, height and depth.
        5 => i32::MAX,
        6 | 7 => 65535,
        // Shared memory of a block, threads of a warp, registers, kilohertz, multiprocessors.
        8 => 49152,
        10 => 32,
        12 => 65536,
        13 => 1_980_000,
        16 => 132,
        // Mapping of host memory, concurrent kernels, unified addresses, stream priorities.
        19 | 31 | 41 | 78 => 1,
        // Copy engines.
        40 => 3,
        75 => major,
        76 => minor,
        // Memory pools.
        115 => i32::from(settings().async_alloc),
        // No other feature.
        _ => 0,
    })
}

exported! {
    fn cuInit(flags: c_uint) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        initialize()
    }

    fn cuDriverGetVersion(version: Out<c_int>) {
        version.set(settings().driver_version);
        Ok(())
    }

    fn cuDeviceGetCount(count: Out<c_int>) {
        check_initialized()?;
        count.set(settings().devices.len() as c_int);
        Ok(())
    }

    fn cuDeviceGet(device: Out<c_int>, ordinal: c_int) {
        index(ordinal)?;
        device.set(ordinal);
        Ok(())
    }

    fn cuDeviceGetName(name: Out<c_char>, len: c_int, device: c_int) {
        let index = index(device)?;
        put_text(name, len, &format!("Emulated GPU {}", physical(index)))
    }

    fn cuDeviceGetUuid(to: Out<[u8; 16]>, device: c_int) {
        to.set(uuid(index(device)?));
        Ok(())
    }

    fn cuDeviceGetUuid_v2(to: Out<[u8; 16]>, device: c_int) {
        to.set(uuid(index(device)?));
        Ok(())
    }

    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: c_int) {
        index(device)?;
        bytes.set(settings().device_memory as usize);
        Ok(())
    }

    fn cuDeviceGetAttribute(value: Out<c_int>, which: c_int, device: c_int) {
        index(device)?;
        value.set(attribute(which)?);
        Ok(())
    }

    fn cuDeviceGetPCIBusId(id: Out<c_char>, len: c_int, device: c_int) {
        let index = index(device)?;
        put_text(id, len, &bus_id(index))
    }

    fn cuDeviceGetByPCIBusId(device: Out<c_int>, id: In<c_char>) {
        check_initialized()?;
        let id = id.text().ok_or(INVALID_VALUE)?;
        let is = |index: &usize| bus_id(*index).eq_ignore_ascii_case(&id);
        let index = (0..settings().devices.len()).find(is).ok_or(INVALID_DEVICE)?;
        device.set(index as c_int);
        Ok(())
    }

    fn cuDeviceCanAccessPeer(can: Out<c_int>, device: c_int, peer: c_int) {
        can.set(c_int::from(index(device)? != index(peer)?));
        Ok(())
    }

    fn cuDeviceGetP2PAttribute(value: Out<c_int>, which: c_int, device: c_int, peer: c_int) {
        let (device, peer) = (index(device)?, index(peer)?);
        if device == peer {
            return Err(INVALID_DEVICE);
        }
        let group = |index| physical(index) / settings().nvlink;
        // 2 is access; 3 and 4, atomic operations and arrays, are NVLink's.
        value.set(c_int::from(which == 2 || matches!(which, 3..=4) && group(device) == group(peer)));
        Ok(())
    }
}

/// Stores a string in a buffer of a caller.
fn put_text(to: Out<c_char>, len: c_int, text: &str) -> Answer {
    if len <= 0 || to.is_null() {
        return Err(INVALID_VALUE);
    }
    let shown = text.bytes().take(len as usize - 1).chain([0]);
    for (n, byte) in shown.enumerate() {
        to.set_nth(n, byte as c_char);
    }
    Ok(())
}
