//! [`Buffer`](crate::nccl::Buffer): GPU memory that a communicator knows.

use super::lend::readers;
use super::registration::{ALIGNMENT, Handle, Registration, allocate, open_window, register};
use super::slice::GpuSlice;
#[cfg(feature = "nccl")]
use super::slice::gather_users;
use crate::backend::nccl::communicator::Communicator;
use crate::backend::nccl::config::needs;
use crate::buffer::stream::GpuStream;
use crate::contract::Operation;
#[cfg(feature = "rccl")]
use crate::gpu::hip;
use crate::types::dtype::Element;
use crate::types::error::{Error, Result, UnsupportedError, UsageError};
#[cfg(feature = "nccl")]
use cudarc::driver::{CudaSlice, CudaView, CudaViewMut};
use phalanx_sys::nccl::{NCCL_WIN_COLL_SYMMETRIC, NCCL_WIN_STRICT_ORDERING, ncclWindow_t, version_code};
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::num::NonZeroU64;
use std::ops::RangeBounds;
use std::sync::{Arc, Mutex};

/// GPU memory that a communicator knows: the library's own (`ncclMemAlloc`, zero at first), registered as far
/// as the library can, or a slice of the program's that was [registered](crate::nccl::Nccl::register).
///
/// A buffer of every operation, and of cudarc (of HIP) through [`view`](crate::nccl::Buffer::view) and
/// [`view_mut`](crate::nccl::Buffer::view_mut). Dropping it waits, with a bound, for the work that uses it;
/// if that does not end the memory is leaked, with a line in the log. It may outlive its communicator. A
/// window that is dropped after the communicator's first one-sided operation stays, with its memory, until
/// the communicator ends: peers may still [put](crate::nccl::Surface::put_signal) something there.
pub struct Buffer<
    T: Element,
    #[cfg(feature = "nccl")] S: GpuSlice<T> = CudaSlice<T>,
    #[cfg(not(feature = "nccl"))] S: GpuSlice<T>,
> {
    pub(super) communicator: Arc<Communicator>,
    pub(super) slice: ManuallyDrop<S>,
    pub(super) start: *mut u8,
    pub(super) owner: Owner,
    registration: Registration,
    /// Its registration's number.
    pub(super) number: Option<NonZeroU64>,
    /// Streams beside the slice's own on which operations may still read it, since the last write. cudarc
    /// remembers the last reader alone, which may be another one by now; and this memory, unlike the
    /// driver's, is freed without regard to its users.
    pub(super) readers: Mutex<Vec<GpuStream>>,
    elements: PhantomData<T>,
}

/// Owner of a buffer's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
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
    /// Collective unless `wanted` is plain; for a window, `arrive` waits for all ranks once the memory is
    /// allocated.
    pub(crate) fn new(
        communicator: &Arc<Communicator>,
        stream: &GpuStream,
        len: usize,
        wanted: Registration,
        arrive: impl FnOnce() -> Result<()>,
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
        // Users on other streams wait for the zeroes.
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
                arrive()?;
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

    /// Keeps a registration. The library returns a null handle if it has nothing to register (one rank, an
    /// unfit transport).
    fn keep(&mut self, registration: Registration, handle: Option<Handle>) {
        if let Some(handle) = handle {
            self.registration = registration;
            self.number = Some(self.communicator.keep_registration(handle));
        }
    }

    /// The slice that was [registered](crate::nccl::Nccl::register), as the program's alone again. Waits,
    /// with a bound, for the work that uses it.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) for memory of the library's own, which goes with the
    /// buffer. If the work does not end, or the library does not give the registration up, the memory is
    /// leaked, as when the buffer is dropped.
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

#[cfg(feature = "nccl")]
impl<T: Element> Buffer<T> {
    /// Its window (`ncclWindow_t`), for kernels that take it by value: `value(&window)`, beside the buffer
    /// itself as one that is read or written, which puts the kernel in order with its other users on this
    /// rank. Valid as long as the buffer and its communicator live.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) if it has none, as memory that is registered
    /// otherwise.
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

    /// Orders writes by cudarc behind operations that read. After an error, cudarc's next call returns it.
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

#[cfg(feature = "rccl")]
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
