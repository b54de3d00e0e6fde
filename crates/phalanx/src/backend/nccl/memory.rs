//! Memory that the library knows: allocated by it, registered with a communicator, or a window of all ranks.

use super::communicator::Communicator;
use super::config::needs;
use super::device::Device;
use super::device_comm::Held;
use super::library::Library;
use crate::buffer::Source;
use crate::buffer::Target;
use crate::buffer::cuda;
use crate::buffer::stream::{GpuStream, Loan, Stream};
use crate::contract::Operation;
use crate::gpu::hip;
use crate::os::sync::lock;
use crate::types::dtype::Element;
use crate::types::error::{Error, Result, UnsupportedError, UsageError};
use cudarc::driver::{CudaSlice, CudaView, CudaViewMut, DriverError};
use phalanx_sys::nccl::{
    NCCL_WIN_COLL_SYMMETRIC, NCCL_WIN_REQUIRED_ALIGNMENT, NCCL_WIN_STRICT_ORDERING, ncclResult_t,
    ncclWindow_t, version_code,
};
use std::ffi::{c_int, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::num::NonZeroU64;
use std::ops::RangeBounds;
use std::sync::{Arc, Mutex, PoisonError};

/// How a [`Buffer`] is known to its communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Registration {
    /// Not at all: operations copy through the library's own memory where they have to.
    Plain,
    /// By this rank alone (`ncclCommRegister`, 2.19): all ranks have to register theirs, or none.
    Local,
    /// As a window at the same place on all ranks (`ncclCommWindowRegister` with `NCCL_WIN_COLL_SYMMETRIC`, 2.27):
    /// the fastest.
    Symmetric,
    /// The same, where what peers put by the network comes in the order of their calls (`NCCL_WIN_STRICT_ORDERING`, 2.29.7).
    SymmetricOrdered,
}

/// What a communicator has to give back.
#[derive(Clone)]
pub(crate) enum Handle {
    Local(*mut c_void),
    Window(ncclWindow_t),
    Device(Arc<Held>),
}

// SAFETY: an opaque value for calls under the device's lock.
unsafe impl Send for Handle {}

/// The runtime's slice over memory that is not its own to free.
pub trait GpuSlice<T: Element>: Target<Elem = T> + Sized {
    /// # Safety
    /// Memory of `len` elements of the stream's device, that is zeroed before anybody reads it.
    #[doc(hidden)]
    unsafe fn over(stream: &GpuStream, start: *mut u8, len: usize) -> Self;
    /// Whether it was made on this stream.
    #[doc(hidden)]
    fn is_on(&self, stream: &GpuStream) -> bool;
    /// Puts the slice's stream behind these readers and all users that the slice knows itself, and later ones behind that; answers it.
    #[doc(hidden)]
    fn gather_users(&mut self, readers: &[GpuStream]) -> Result<GpuStream>;
    /// Forgets the memory, and gives back what was needed for its order.
    #[doc(hidden)]
    fn forget(self);
}

impl<T: Element> GpuSlice<T> for CudaSlice<T> {
    unsafe fn over(stream: &GpuStream, start: *mut u8, len: usize) -> Self {
        let GpuStream::Cuda(stream) = stream else { unreachable!("a stream of NCCL is one of CUDA") };
        // SAFETY: the caller's contract.
        unsafe { stream.upgrade_device_ptr(start as u64, len) }
    }

    fn is_on(&self, stream: &GpuStream) -> bool {
        matches!(stream, GpuStream::Cuda(stream) if stream.cu_stream() == self.stream().cu_stream())
    }

    fn gather_users(&mut self, readers: &[GpuStream]) -> Result<GpuStream> {
        gather_users(self, readers)?;
        Ok(GpuStream::Cuda(self.stream().clone()))
    }

    fn forget(self) {
        self.leak();
    }
}

impl<T: Element> GpuSlice<T> for hip::Slice<T> {
    unsafe fn over(stream: &GpuStream, start: *mut u8, len: usize) -> Self {
        let GpuStream::Hip(stream) = stream else { unreachable!("a stream of RCCL is one of HIP") };
        // SAFETY: the caller's contract; the buffer waits for the users before it frees the memory.
        unsafe { hip::Slice::from_raw(start.cast(), len, stream) }
    }

    fn is_on(&self, stream: &GpuStream) -> bool {
        matches!(stream, GpuStream::Hip(stream) if stream.as_raw() == self.stream().as_raw())
    }

    /// It knows its readers.
    fn gather_users(&mut self, _readers: &[GpuStream]) -> Result<GpuStream> {
        hip::Slice::gather_users(self)?;
        Ok(GpuStream::Hip(self.stream().clone()))
    }

    fn forget(self) {}
}

fn gather_users<T>(slice: &mut CudaSlice<T>, readers: &[GpuStream]) -> std::result::Result<(), DriverError> {
    cuda::gather_users(slice, readers.iter().map(|reader| reader.raw().0.cast()))
}

/// GPU memory that a communicator knows: the library's own (`ncclMemAlloc`, zero at first), registered as far as the library can, or a
/// slice of the program's that was [registered](crate::nccl::Nccl::register).
///
/// A buffer of every operation, and of cudarc (of HIP) through [`view`](Buffer::view) and
/// [`view_mut`](Buffer::view_mut). Dropping it waits, with a bound, for the work that uses it; if that does not end the
/// memory is leaked, with a line in the log. It may outlive its communicator. A window that is dropped after the communicator's first
/// one-sided operation stays, with its memory, until the communicator ends: peers may still [put](crate::nccl::Surface::put_signal)
/// something there.
pub struct Buffer<T: Element, S: GpuSlice<T> = CudaSlice<T>> {
    communicator: Arc<Communicator>,
    slice: ManuallyDrop<S>,
    start: *mut u8,
    owner: Owner,
    registration: Registration,
    /// Its registration's number.
    number: Option<NonZeroU64>,
    /// Streams beside the slice's own on which operations may still read it, since the last write. cudarc remembers the last reader alone,
    /// which may be another one by now; and this memory, unlike the driver's, is freed without regard to who uses it.
    readers: Mutex<Vec<GpuStream>>,
    elements: PhantomData<T>,
}

/// Whose memory a buffer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// The library frees it.
    Library,
    /// The slice frees it.
    Program,
}

// SAFETY: an owned address of GPU memory; what orders its users is the slice, which can be sent.
unsafe impl<T: Element, S: GpuSlice<T> + Send> Send for Buffer<T, S> {}
// SAFETY: as above.
unsafe impl<T: Element, S: GpuSlice<T> + Sync> Sync for Buffer<T, S> {}

impl<T: Element, S: GpuSlice<T>> Buffer<T, S> {
    /// Collective unless `wanted` is plain; for a window the ranks `meet` when they have the memory.
    pub(crate) fn new(
        communicator: &Arc<Communicator>,
        stream: &GpuStream,
        len: usize,
        wanted: Registration,
        meet: impl FnOnce() -> Result<()>,
    ) -> Result<Buffer<T, S>> {
        communicator.check_awake(Operation::Alloc)?;
        let bytes = len
            .checked_mul(size_of::<T>())
            .and_then(|bytes| bytes.max(1).checked_next_multiple_of(ALIGNMENT));
        let bytes =
            bytes.filter(|bytes| *bytes <= isize::MAX as usize).ok_or_else(|| UsageError::Overflow {
                operation: "alloc",
                what: "the length in bytes",
                value: format!("{len} × {}", size_of::<T>()),
                limit: isize::MAX.to_string(),
            })?;
        let _current = communicator.device.enter();
        let start = allocate(communicator, bytes)?;
        // SAFETY: memory of at least `len` elements on the stream's device, zeroed before anybody reads it.
        let slice = ManuallyDrop::new(unsafe { S::over(stream, start, len) });
        let mut buffer = Buffer {
            communicator: communicator.clone(),
            slice,
            start,
            owner: Owner::Library,
            registration: Registration::Plain,
            number: None,
            readers: Mutex::default(),
            elements: PhantomData,
        };
        // SAFETY: allocated above; the buffer waits for the stream before it frees the memory.
        unsafe { communicator.device.clear(start, bytes, stream.raw()) }?;
        // Users on other streams come behind that.
        buffer.slice.gather_users(&[])?;
        let handle = match wanted {
            Registration::Plain => None,
            Registration::Local => register(communicator, start, bytes)?,
            Registration::Symmetric | Registration::SymmetricOrdered => {
                let library = communicator.library;
                library.need(library.ncclCommWindowRegister, "ncclCommWindowRegister")?;
                let is_ordered = wanted == Registration::SymmetricOrdered;
                if is_ordered {
                    needs(library, "SymmetricOrdered of windows", version_code(2, 29, 7), true)?;
                }
                meet()?;
                let order = if is_ordered { NCCL_WIN_STRICT_ORDERING } else { 0 };
                open_window(communicator, (start, bytes), NCCL_WIN_COLL_SYMMETRIC | order)?
            }
        };
        buffer.keep(wanted, handle);
        Ok(buffer)
    }

    /// Registers a slice that starts there, by this rank alone.
    pub(crate) fn of_slice(
        communicator: &Arc<Communicator>,
        slice: S,
        start: *mut u8,
    ) -> Result<Buffer<T, S>> {
        communicator.check_awake(Operation::Alloc)?;
        communicator.library.need(communicator.library.ncclCommRegister, "ncclCommRegister")?;
        let bytes = slice.len() * size_of::<T>();
        let mut buffer = Buffer {
            communicator: communicator.clone(),
            slice: ManuallyDrop::new(slice),
            start,
            owner: Owner::Program,
            registration: Registration::Plain,
            number: None,
            readers: Mutex::default(),
            elements: PhantomData,
        };
        // The library asks for the allocation's handle, since 2.30, which memory of pools does not give.
        if bytes > 0 && !communicator.device.is_of_pool(start.addr()) {
            let handle = register(communicator, start, bytes)?;
            buffer.keep(Registration::Local, handle);
        }
        Ok(buffer)
    }

    /// The library may have nothing to register (one rank, an unfit transport), and says so with a null handle.
    fn keep(&mut self, registration: Registration, handle: Option<Handle>) {
        if let Some(handle) = handle {
            self.registration = registration;
            self.number = Some(self.communicator.keep_registration(handle));
        }
    }

    /// The slice that was [registered](crate::nccl::Nccl::register), as the program's alone again. Waits, with a bound, for the
    /// work that uses it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for memory of the library's own, which goes with the buffer. If the work does not end, or the
    /// library does not give the registration up, the memory is leaked, as when the buffer is dropped.
    pub fn into_slice(self) -> Result<S> {
        if self.owner == Owner::Library {
            return Err(Error::from(UnsupportedError {
                what: "a slice of the library's memory that owns it".into(),
                why: "memory of ncclMemAlloc is freed with its buffer".into(),
                remedy: "keep the buffer, and use its views".into(),
            }));
        }
        let mut this = ManuallyDrop::new(self);
        let released = this.release();
        // SAFETY: each is taken once, and `this` is not dropped.
        let (slice, _communicator, _readers) = unsafe {
            (
                ManuallyDrop::take(&mut this.slice),
                std::ptr::read(&raw const this.communicator),
                std::ptr::read(&raw const this.readers),
            )
        };
        match released {
            // No window, to which peers could write.
            Ok(_) => Ok(slice),
            Err(error) => {
                // What may be in use, or is registered, is not freed.
                std::mem::forget(slice);
                Err(error)
            }
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.slice.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How the communicator knows it; less than was asked for where the library has nothing to gain from it.
    pub fn registration(&self) -> Registration {
        self.registration
    }

    /// Its window, for what is done with it by a communicator: the one it was allocated with.
    pub(crate) fn window_of(&self, communicator: &Arc<Communicator>) -> Result<ncclWindow_t> {
        let refused = |why: String| {
            Error::from(UnsupportedError {
                what: "a buffer as a window".into(),
                why,
                remedy:
                    "allocate its buffers with Registration::Symmetric, on every rank of the communicator"
                        .into(),
            })
        };
        if !Arc::ptr_eq(&self.communicator, communicator) {
            return Err(refused("its buffer is of another communicator".into()));
        }
        match self.number.and_then(|number| self.communicator.registration(number)) {
            Some(Handle::Window(window)) => Ok(window),
            _ => Err(refused(format!("its buffer is memory with {:?} registration", self.registration))),
        }
    }
}

impl<T: Element> Buffer<T> {
    /// Its window (`ncclWindow_t`), for kernels that take it by value: `value(&window)`, beside the buffer itself as one that is read or written, which
    /// puts the kernel in order with its other users on this rank. Valid as long as the buffer and its communicator live.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if it has none, as memory that is registered otherwise.
    pub fn window(&self) -> Result<u64> {
        self.window_of(&self.communicator).map(|window| window as u64)
    }

    /// For cudarc's copies and kernels, reading.
    pub fn view(&self) -> CudaView<'_, T> {
        self.slice.as_view()
    }

    /// For cudarc's copies and kernels.
    pub fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.gather_readers();
        self.slice.as_view_mut()
    }

    /// A part of it, reading.
    ///
    /// # Panics
    /// If the range ends behind the buffer.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> CudaView<'_, T> {
        self.slice.slice(range)
    }

    /// A part of it.
    ///
    /// # Panics
    /// If the range ends behind the buffer.
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> CudaViewMut<'_, T> {
        self.gather_readers();
        self.slice.slice_mut(range)
    }

    /// Whoever writes by cudarc comes behind the operations that read. If that cannot be, cudarc's call answers why.
    fn gather_readers(&mut self) {
        let readers = readers(&mut self.readers);
        if !readers.is_empty() {
            let gathered = gather_users(&mut self.slice, readers);
            if gathered.is_ok() {
                readers.clear();
            }
            self.slice.context().record_err(gathered);
        }
    }
}

impl<T: Element> Buffer<T, hip::Slice<T>> {
    /// For HIP's copies and kernels, reading.
    pub fn view(&self) -> hip::View<'_, T> {
        self.slice.slice(..)
    }

    /// For HIP's copies and kernels.
    pub fn view_mut(&mut self) -> hip::ViewMut<'_, T> {
        self.slice.slice_mut(..)
    }

    /// A part of it, reading.
    ///
    /// # Panics
    /// If the range ends behind the buffer.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> hip::View<'_, T> {
        self.slice.slice(range)
    }

    /// A part of it.
    ///
    /// # Panics
    /// If the range ends behind the buffer.
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> hip::ViewMut<'_, T> {
        self.slice.slice_mut(range)
    }
}

/// Without the lock, which an exclusive borrow does not need.
fn readers(readers: &mut Mutex<Vec<GpuStream>>) -> &mut Vec<GpuStream> {
    readers.get_mut().unwrap_or_else(PoisonError::into_inner)
}

/// Windows begin and end at multiples of this, and so does all memory here.
const ALIGNMENT: usize = NCCL_WIN_REQUIRED_ALIGNMENT;

fn allocate(communicator: &Communicator, bytes: usize) -> Result<*mut u8> {
    let library = communicator.library;
    let allocate = library.need(library.ncclMemAlloc, "ncclMemAlloc")?;
    let mut start = std::ptr::null_mut();
    let _turn = communicator.device.turn.enter()?;
    // SAFETY: an out-pointer on the stack, written during the call; the device is current.
    match unsafe { allocate(&raw mut start, bytes) } {
        ncclResult_t::Success => Ok(start.cast()),
        error => Err(library.error(error, "ncclMemAlloc").into()),
    }
}

fn register(communicator: &Communicator, start: *mut u8, bytes: usize) -> Result<Option<Handle>> {
    let library = communicator.library;
    let register = library.need(library.ncclCommRegister, "ncclCommRegister")?;
    let mut handle = Box::new(std::ptr::null_mut());
    // SAFETY: a usable communicator; memory that lives until it is deregistered; the out-pointer is in a box.
    let call = |comm| unsafe { register(comm, start.cast(), bytes, &raw mut *handle) };
    communicator.call("ncclCommRegister", call)?;
    Ok((!handle.is_null()).then_some(Handle::Local(*handle)))
}

/// Collective.
fn open_window(
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
        // SAFETY: registered with this communicator, which has not ended, and given back once; no kernel has it any more.
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

impl<T: Element, S: GpuSlice<T>> Drop for Buffer<T, S> {
    fn drop(&mut self) {
        let is_free = match self.release() {
            Ok(is_free) => is_free,
            Err(error) => {
                tracing::error!(
                    rank = self.communicator.rank,
                    "GPU memory is leaked: it may be in use, or is still registered ({error})"
                );
                return;
            }
        };
        let communicator = &self.communicator;
        let _current = communicator.device.enter();
        // SAFETY: taken once.
        let slice = unsafe { ManuallyDrop::take(&mut self.slice) };
        if self.owner == Owner::Program {
            return drop(slice);
        }
        slice.forget();
        match is_free {
            // SAFETY: deregistered, not in use; freed once.
            true => unsafe { free(communicator.library, &communicator.device, self.start) },
            false => communicator.leave_to_peers(self.start),
        }
    }
}

/// Gives memory back to the library; the communicator that it was allocated for may have ended.
///
/// # Safety
/// It was allocated by `ncclMemAlloc`, nobody uses it, it is not registered, and this happens once.
pub(crate) unsafe fn free(library: &Library, device: &Device, start: *mut u8) {
    let Some(free) = library.ncclMemFree else { return };
    let _current = device.enter();
    let Ok(_turn) = device.turn.enter() else { return };
    // SAFETY: the caller's contract.
    unsafe { free(start.cast()) };
}

impl<T: Element, S: GpuSlice<T>> Buffer<T, S> {
    /// Waits until neither the streams nor the library have any more to do with the memory; but peers may have (false).
    fn release(&mut self) -> Result<bool> {
        self.communicator.check_owner()?;
        self.wait_for_users()?;
        self.number.map_or(Ok(true), |number| self.communicator.end_registration(number))
    }

    /// An operation reads it on this stream, which is not the slice's own. Where that is known it costs a lock that nobody else holds, beside
    /// the driver's calls for the order.
    #[inline(never)]
    fn keep_reader(&self, stream: &GpuStream) {
        let mut readers = lock(&self.readers);
        if readers.iter().any(|known| known.raw() == stream.raw()) {
            return;
        }
        // A program may make a stream for each of its steps.
        let device = self.communicator.device;
        let _current = device.enter();
        let is_done = |reader: &GpuStream| {
            matches!(device.is_captured(reader.raw()), Ok(false))
                && matches!(device.is_idle(reader.raw()), Ok(true))
        };
        readers.retain(|reader| !is_done(reader));
        readers.push(stream.clone());
    }

    /// Puts an operation that writes behind those that read, and whoever comes after it with that.
    #[cold]
    fn put_behind_readers(&mut self, lane: &Stream) -> Result<()> {
        let readers = readers(&mut self.readers);
        match lane.gpu_stream() {
            Some(stream) => {
                let remedy = "let nccl::Graph capture the operation, or sync before the capture";
                let device = self.communicator.device;
                device.refuse_captured(stream.raw(), "a buffer that is read on other streams", remedy)?;
                let mut others = readers.iter().filter(|reader| reader.raw() != stream.raw());
                others.try_for_each(|reader| device.join(stream, reader))?;
            }
            // On the host it begins when the slice's own stream has done its work.
            None => drop(self.slice.gather_users(readers)?),
        }
        readers.clear();
        Ok(())
    }

    /// Waits until the streams have done what they were given with this memory.
    fn wait_for_users(&mut self) -> Result<()> {
        let device = self.communicator.device;
        let _current = device.enter();
        let stream = self.slice.gather_users(readers(&mut self.readers))?;
        device.wait_idle(stream.raw(), super::communicator::ENDING)
    }
}

// SAFETY: device memory of `len` elements, borrowed; the slice orders later users.
unsafe impl<T: Element, S: GpuSlice<T>> Source for Buffer<T, S> {
    type Elem = T;

    fn len(&self) -> usize {
        self.slice.len()
    }

    fn lend<'a>(&'a self, lane: &'a Stream) -> Result<Loan<'a>> {
        let lent = self.slice.lend(lane)?;
        if let Some(stream) = lane.gpu_stream()
            && !self.slice.is_on(stream)
        {
            self.keep_reader(stream);
        }
        Ok(lent.registered(self.number))
    }
}

// SAFETY: as above, and `&mut self` is exclusive.
unsafe impl<T: Element, S: GpuSlice<T>> Target for Buffer<T, S> {
    fn lend_mut<'a>(&'a mut self, lane: &'a Stream) -> Result<Loan<'a>> {
        if !readers(&mut self.readers).is_empty() {
            self.put_behind_readers(lane)?;
        }
        Ok(self.slice.lend_mut(lane)?.registered(self.number))
    }
}

impl<T: Element, S: GpuSlice<T>> fmt::Debug for Buffer<T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("dtype", &T::DTYPE)
            .field("len", &self.len())
            .field("start", &self.start)
            .field("registration", &self.registration)
            .finish()
    }
}

/// The most that the library offers, no error if that is less than a window, for which the ranks have to be able to meet.
pub(crate) fn best(communicator: &Communicator, can_meet: bool) -> Registration {
    let library = communicator.library;
    if can_meet && library.ncclCommWindowRegister.is_some() {
        Registration::Symmetric
    } else if library.ncclCommRegister.is_some() {
        Registration::Local
    } else {
        Registration::Plain
    }
}
