//! Device memory of other processes: handles of it, and its mappings.
//!
//! A handle names a file of the process that exported it. A process that has the memory open holds a shared lock
//! on that file, by which the owner sees whether it may free the memory.

use super::capture;
use super::context::current;
use super::device::physical;
use super::error::{INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, OUT_OF_MEMORY};
use super::memory::{self, Kind};
use crate::base::call::{Answer, Code, exported};
use crate::base::handles::Handle;
use crate::base::lock::lock;
use crate::base::pointers::Out;
use crate::base::settings::settings;
use crate::base::violation::violation;
use rustix::fs::{FlockOperation, Mode, OFlags, flock, fstat, open};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};
use std::collections::BTreeMap;
use std::ffi::{c_uint, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Mutex;

/// The only flag of `cuIpcOpenMemHandle`, which is mandatory.
const LAZY_ENABLE_PEER_ACCESS: c_uint = 1;

/// `CUipcMemHandle`: 64 bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpcHandle {
    process: u32,
    /// The file in that process.
    number: i32,
    /// Tells the file from a later one with the same number.
    inode: u64,
    /// Where the memory is in the file.
    offset: u64,
    size: u64,
    /// The device, by its number on the host.
    device: u64,
    unused: [u64; 3],
}

/// Memory of another process that is open here.
struct Opened {
    handle: IpcHandle,
    context: Handle,
    /// How many times it was opened and not closed.
    holders: usize,
    /// Its lock says that this process has the memory open.
    file: OwnedFd,
    len: usize,
}

/// By the address that the caller has.
static OPENED: Mutex<BTreeMap<u64, Opened>> = Mutex::new(BTreeMap::new());

fn export(address: u64) -> Result<IpcHandle, Code> {
    let (file, allocation, offset) = memory::share(address).ok_or(INVALID_VALUE)?;
    Ok(IpcHandle {
        process: std::process::id(),
        number: file.as_raw_fd(),
        inode: fstat(&file).map_err(|_| INVALID_VALUE)?.st_ino,
        offset,
        size: allocation.size,
        device: physical(allocation.device) as u64,
        unused: [0; 3],
    })
}

/// The file of a handle, locked; an error if the memory has been freed.
fn file_of(handle: &IpcHandle) -> Option<OwnedFd> {
    let path = format!("/proc/{}/fd/{}", handle.process, handle.number);
    let file = open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok()?;
    flock(&file, FlockOperation::LockShared).ok()?;
    (fstat(&file).ok()?.st_ino == handle.inode).then_some(file)
}

fn map(handle: &IpcHandle, context: Handle) -> Result<u64, Code> {
    if handle.process == std::process::id() {
        return Err(INVALID_CONTEXT);
    }
    let is_its = |device: &usize| physical(*device) as u64 == handle.device;
    let device = (0..settings().devices.len()).find(is_its).ok_or(INVALID_DEVICE)?;
    let mut opened = lock(&OPENED);
    if let Some((address, known)) = opened.iter_mut().find(|(_, known)| known.handle == *handle) {
        known.holders += 1;
        return Ok(*address);
    }
    let file = file_of(handle).ok_or(INVALID_VALUE)?;
    let len = (handle.offset + handle.size).next_multiple_of(4096) as usize;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, at an address that the system chooses.
    let start = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &file, 0) };
    let address = start.map_err(|_| OUT_OF_MEMORY)? as u64 + handle.offset;
    memory::adopt(Kind::Peer, address, handle.size, device, context);
    opened.insert(address, Opened { handle: *handle, context, holders: 1, file, len });
    Ok(address)
}

fn close(function: &'static str, address: u64) -> Answer {
    let context = current()?.handle;
    let mut opened = lock(&OPENED);
    let Some(known) = opened.get_mut(&address) else {
        violation(function, format!("{address:#x} is not open"));
    };
    if known.context != context {
        violation(function, format!("{address:#x} was opened in another context than the current one"));
    }
    known.holders -= 1;
    if known.holders > 0 {
        return Ok(());
    }
    let Some(Opened { handle, file, len, .. }) = opened.remove(&address) else { return Ok(()) };
    memory::disown(function, address);
    let start = (address - handle.offset) as *mut c_void;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
    // SAFETY: replaces a mapping of `map`. A later access crashes, as it should.
    unsafe { mmap_anonymous(start, len, ProtFlags::empty(), flags) }.map_err(|_| OUT_OF_MEMORY)?;
    // A fork of this process that is about to execute a program has the file, too.
    let _ = flock(&file, FlockOperation::Unlock);
    Ok(())
}

exported! {
    fn cuIpcGetMemHandle(handle: Out<IpcHandle>, address: u64) {
        current()?;
        capture::refuse_unsafe_call()?;
        handle.set(export(address)?);
        Ok(())
    }

    fn cuIpcOpenMemHandle_v2(address: Out<u64>, handle: IpcHandle, flags: c_uint) {
        let context = current()?;
        capture::refuse_unsafe_call()?;
        if flags != LAZY_ENABLE_PEER_ACCESS {
            return Err(INVALID_VALUE);
        }
        address.set(map(&handle, context.handle)?);
        Ok(())
    }

    fn cuIpcCloseMemHandle(address: u64) {
        capture::refuse_unsafe_call()?;
        close(FUNCTION, address)
    }
}
