//! Calls of the library that allocate, register, and open windows; and their opposites.

use crate::backend::nccl::communicator::Communicator;
use crate::backend::nccl::device::GpuDevice;
use crate::backend::nccl::device_comm::Held;
use crate::backend::nccl::library::Library;
use crate::backend::nccl::reclaim;
use crate::types::error::Result;
use phalanx_sys::nccl::{NCCL_WIN_REQUIRED_ALIGNMENT, ncclResult_t, ncclWindow_t};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// How a [`Buffer`](crate::nccl::Buffer) is known to its communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Registration {
    /// Not registered: operations copy through the library's own memory where they have to.
    Plain,
    /// By this rank alone (`ncclCommRegister`, 2.19): all ranks have to register theirs, or none.
    Local,
    /// As a window at the same place on all ranks (`ncclCommWindowRegister` with `NCCL_WIN_COLL_SYMMETRIC`,
    /// 2.27): the fastest.
    Symmetric,
    /// The same, where what peers put by the network comes in the order of their calls
    /// (`NCCL_WIN_STRICT_ORDERING`, 2.29.7).
    SymmetricOrdered,
}

/// Something registered with a communicator, to be given back before its end.
#[derive(Clone)]
pub(crate) enum Handle {
    Local(*mut c_void),
    Window(ncclWindow_t),
    Device(Arc<Held>),
}

// SAFETY: an opaque value for calls under the device's lock.
unsafe impl Send for Handle {}

/// Windows begin and end at multiples of this, and so does all memory here.
pub(super) const ALIGNMENT: usize = NCCL_WIN_REQUIRED_ALIGNMENT;

pub(super) fn allocate(communicator: &Communicator, bytes: usize) -> Result<*mut u8> {
    let library = communicator.library;
    let allocate = library.need(library.ncclMemAlloc, "ncclMemAlloc")?;
    reclaim::make_room(|| {
        let mut start = std::ptr::null_mut();
        let _locked = communicator.device.library_lock.acquire()?;
        // SAFETY: an out-pointer on the stack, written during the call; the device is current.
        match unsafe { allocate(&raw mut start, bytes) } {
            ncclResult_t::Success => Ok(start.cast()),
            error => Err(library.error(error, "ncclMemAlloc").into()),
        }
    })
}

pub(super) fn register(communicator: &Communicator, start: *mut u8, bytes: usize) -> Result<Option<Handle>> {
    let library = communicator.library;
    let register = library.need(library.ncclCommRegister, "ncclCommRegister")?;
    let mut handle = Box::new(std::ptr::null_mut());
    // SAFETY: a usable communicator; memory that lives until it is deregistered; the out-pointer is in a box.
    let call = |comm| unsafe { register(comm, start.cast(), bytes, &raw mut *handle) };
    communicator.call("ncclCommRegister", call)?;
    Ok((!handle.is_null()).then_some(Handle::Local(*handle)))
}

/// Collective.
pub(super) fn open_window(
    communicator: &Communicator,
    (start, bytes): (*mut u8, usize),
    flags: c_int,
) -> Result<Option<Handle>> {
    let library = communicator.library;
    let register = library.need(library.ncclCommWindowRegister, "ncclCommWindowRegister")?;
    // The library may write to it later, from another thread: it stays where it is, also if waiting fails.
    let window: &'static mut ncclWindow_t = Box::leak(Box::new(std::ptr::null_mut()));
    let out: *mut ncclWindow_t = window;
    // SAFETY: a usable communicator; memory of ncclMemAlloc, aligned, that lives until the window is closed.
    let call = |comm| unsafe { register(comm, start.cast(), bytes, out, flags) };
    communicator.call("ncclCommWindowRegister", call)?;
    // SAFETY: leaked above; the library has written it, since nothing is in progress any more.
    let window = unsafe { *Box::from_raw(out) };
    Ok((!window.is_null()).then_some(Handle::Window(window)))
}

impl Communicator {
    /// Gives a registration back to the library. If that does not take it, the memory stays registered.
    pub(crate) fn deregister(&self, handle: Handle) -> Result<()> {
        let library = self.library;
        // SAFETY: registered with this communicator, which has not ended, and given back once; no kernel has
        // it any more.
        unsafe {
            match handle {
                Handle::Local(handle) => match library.ncclCommDeregister {
                    Some(f) => self.call("ncclCommDeregister", |comm| f(comm, handle)),
                    None => Ok(()),
                },
                Handle::Window(window) => match library.ncclCommWindowDeregister {
                    Some(f) => self.call("ncclCommWindowDeregister", |comm| f(comm, window)),
                    None => Ok(()),
                },
                Handle::Device(held) => {
                    self.wait_for_kernels(&held)?;
                    let destroy = library.need(library.ncclDevCommDestroy, "ncclDevCommDestroy")?;
                    self.call("ncclDevCommDestroy", |comm| destroy(comm, held.start()))
                }
            }
        }
    }
}

/// Gives memory back to the library, later; the communicator that it was allocated for may have ended.
///
/// # Safety
/// It was allocated by `ncclMemAlloc`, nobody uses it, it is not registered, and this happens once.
pub(crate) unsafe fn free(library: &'static Library, device: &GpuDevice, start: *mut u8) {
    let Some(free) = library.ncclMemFree else { return };
    let (device, address) = (*device, start.expose_provenance());
    reclaim::later("ncclMemFree", move || {
        let _current = device.enter();
        // SAFETY: the caller's contract.
        unsafe { free(std::ptr::with_exposed_provenance_mut(address)) };
    });
}

/// The best registration that the library offers; a window only if all ranks can wait for each other.
pub(crate) fn best(communicator: &Communicator, can_wait: bool) -> Registration {
    let library = communicator.library;
    if can_wait && library.ncclCommWindowRegister.is_some() {
        Registration::Symmetric
    } else if library.ncclCommRegister.is_some() {
        Registration::Local
    } else {
        Registration::Plain
    }
}
