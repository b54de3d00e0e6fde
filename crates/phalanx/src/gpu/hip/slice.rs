//! Memory of an AMD GPU, and the order of its uses on streams.

use super::stream::{HipSource, HipTarget, Stream};
use super::{api, check, enter};
use crate::os::sync::lock;
use crate::types::dtype::Element;
use crate::types::error::{Result, UsageError};
use phalanx_sys::hip::hipError_t;
use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// Memory with a stream of its own, and the other streams that may use it.
///
/// A use on a stream first waits for the memory's own stream and for `others`, and then joins `others`. An
/// exclusive use of the whole memory waits for all of them and clears the list. A borrow lasts until its use
/// is enqueued, so the next use finds it on its stream.
pub(crate) struct Memory {
    start: *mut u8,
    stream: Stream,
    origin: Origin,
    /// Whether `others` is not empty. Saves the lock when only the memory's own stream uses it.
    is_elsewhere: AtomicBool,
    others: Mutex<Vec<Stream>>,
}

/// How memory is given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// `hipMallocAsync`.
    Pool,
    /// `hipMalloc`.
    Device,
    /// Allocated and freed by others.
    Foreign,
}

// SAFETY: an owned address of GPU memory; uses are ordered on streams.
unsafe impl Send for Memory {}
// SAFETY: as above; what changes is behind a lock.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(start: *mut u8, stream: Stream, origin: Origin) -> Memory {
        Memory { start, stream, origin, is_elsewhere: AtomicBool::new(false), others: Mutex::default() }
    }

    /// Allocates `bytes` on a stream, at least one.
    pub(crate) fn allocate(stream: &Stream, bytes: usize) -> Result<Memory> {
        let api = api()?;
        let _current = enter(stream.device())?;
        let mut start: *mut c_void = std::ptr::null_mut();
        let bytes = bytes.max(1);
        if let (Some(allocate), Some(_)) = (api.hipMallocAsync, api.hipFreeAsync) {
            // SAFETY: an out-pointer on the stack, written during the call; a stream of the current device.
            match unsafe { allocate(&raw mut start, bytes, stream.as_raw()) } {
                hipError_t::NotSupported => {}
                result => {
                    check(api, "hipMallocAsync", result)?;
                    return Ok(Memory::new(start.cast(), stream.clone(), Origin::Pool));
                }
            }
        }
        // SAFETY: as above.
        check(api, "hipMalloc", unsafe { (api.hipMalloc)(&raw mut start, bytes) })?;
        Ok(Memory::new(start.cast(), stream.clone(), Origin::Device))
    }

    /// Lends it to one use on a stream; `alone` by an exclusive borrow of the whole.
    #[inline]
    fn lend<'a>(&'a self, offset: usize, stream: &'a Stream, alone: bool) -> Result<Use<'a>> {
        if !self.stream.is(stream) || self.is_elsewhere.load(Ordering::Acquire) {
            self.put_behind_users(stream, alone)?;
        }
        Ok(Use { start: self.start.wrapping_add(offset), borrow: PhantomData })
    }

    #[cold]
    fn put_behind_users(&self, stream: &Stream, alone: bool) -> Result<()> {
        if stream.device() != self.stream.device() {
            return Err(UsageError::Memory {
                memory: format!("the memory of GPU {}", self.stream.device()),
                wanted: format!("GPU {}", stream.device()),
                remedy: "use a communicator or a stream of that GPU, or copy the buffer",
            }
            .into());
        }
        stream.wait_for(&self.stream)?;
        let mut others = lock(&self.others);
        others.iter().try_for_each(|other| stream.wait_for(other))?;
        if alone {
            others.clear();
        }
        if !self.stream.is(stream) && !others.iter().any(|other| other.is(stream)) {
            others.push(stream.clone());
        }
        self.is_elsewhere.store(!others.is_empty(), Ordering::Release);
        Ok(())
    }

    /// Frees the memory behind all its uses.
    fn free(&mut self) -> Result<()> {
        let others = std::mem::take(&mut *lock(&self.others));
        if self.origin == Origin::Foreign {
            return Ok(());
        }
        others.iter().try_for_each(|other| self.stream.wait_for(other))?;
        let api = api()?;
        let _current = enter(self.stream.device())?;
        let start = self.start.cast();
        match (self.origin, api.hipFreeAsync) {
            (Origin::Pool, Some(free)) => {
                // SAFETY: allocated by `allocate` on this stream, freed once, behind all that used it.
                check(api, "hipFreeAsync", unsafe { free(start, self.stream.as_raw()) })?;
            }
            _ => {
                self.stream.drain()?;
                // SAFETY: allocated by `allocate`, freed once; all that used it is done.
                check(api, "hipFree", unsafe { (api.hipFree)(start) })?;
            }
        }
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Err(error) = self.free() {
            crate::os::log::error!(gpu = self.stream.device(), "GPU memory is leaked: {error}");
        }
    }
}

/// One use of GPU memory on a stream. Keep it until the work that uses the memory is enqueued there.
pub struct Use<'a> {
    start: *mut u8,
    borrow: PhantomData<&'a ()>,
}

impl Use<'_> {
    /// Where the memory starts, for kernels and calls of HIP on that stream. It may be written only if it was
    /// lent by an exclusive borrow.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start
    }
}

impl fmt::Debug for Use<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("hip::Use").field("start", &self.start).finish()
    }
}

/// Typed memory of an AMD GPU, on a stream; made by [`Stream::alloc_zeros`] and [`Stream::clone_htod`].
///
/// A buffer for every operation of a communicator of the same GPU. Its memory is freed behind all work that
/// uses it.
pub struct Slice<T: Element> {
    memory: Memory,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Element> Slice<T> {
    pub(crate) fn new(memory: Memory, len: usize) -> Slice<T> {
        Slice { memory, len, elements: PhantomData }
    }

    /// Memory that the program allocates and frees otherwise.
    ///
    /// # Safety
    /// `start` is memory of the stream's GPU with `len` initialised elements, or such that are written before
    /// they are read; it lives until the work on all streams that this was used on is done, and is not used
    /// elsewhere meanwhile.
    pub unsafe fn from_raw(start: *mut c_void, len: usize, stream: &Stream) -> Slice<T> {
        Slice::new(Memory::new(start.cast(), stream.clone(), Origin::Foreign), len)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The stream that it was made on.
    pub fn stream(&self) -> &Stream {
        &self.memory.stream
    }

    /// Borrows the memory to read it on a stream, in a kernel of your own or a call of HIP. Keep the [`Use`]
    /// until that is enqueued.
    ///
    /// # Errors
    /// [`UsageError::Memory`] for a stream of another GPU.
    pub fn on<'a>(&'a self, stream: &'a Stream) -> Result<Use<'a>> {
        self.memory.lend(0, stream, false)
    }

    /// As [`on`](Slice::on), reading and writing.
    pub fn on_mut<'a>(&'a mut self, stream: &'a Stream) -> Result<Use<'a>> {
        self.memory.lend(0, stream, true)
    }

    /// A part of it, to read.
    ///
    /// # Panics
    /// If the range is not in the slice.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> View<'_, T> {
        let (start, len) = bounds(range, self.len);
        View { memory: &self.memory, start, len, elements: PhantomData }
    }

    /// A part of it, to read and write.
    ///
    /// # Panics
    /// If the range is not in the slice.
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> ViewMut<'_, T> {
        let (start, len) = bounds(range, self.len);
        ViewMut { memory: &self.memory, start, len, elements: PhantomData }
    }

    /// Two parts of it, to read and write.
    ///
    /// # Panics
    /// If `middle` is beyond the end.
    pub fn split_at_mut(&mut self, middle: usize) -> (ViewMut<'_, T>, ViewMut<'_, T>) {
        let part = |range| {
            let (start, len) = bounds(range, self.len);
            ViewMut { memory: &self.memory, start, len, elements: PhantomData }
        };
        (part(0..middle), part(middle..self.len))
    }

    /// Puts the slice's own stream behind all its users.
    pub(crate) fn gather_users(&mut self) -> Result<()> {
        let others = std::mem::take(&mut *lock(&self.memory.others));
        self.memory.is_elsewhere.store(false, Ordering::Release);
        others.iter().try_for_each(|other| self.memory.stream.wait_for(other))
    }
}

/// Start and length of a range in `len` elements.
fn bounds(range: impl RangeBounds<usize>, len: usize) -> (usize, usize) {
    let start = match range.start_bound() {
        Bound::Included(start) => *start,
        Bound::Excluded(start) => start + 1,
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(end) => end + 1,
        Bound::Excluded(end) => *end,
        Bound::Unbounded => len,
    };
    assert!(start <= end && end <= len, "the range {start}..{end} is not in a slice of {len} elements");
    (start, end - start)
}

/// A part of a [`Slice`], to read.
pub struct View<'s, T: Element> {
    memory: &'s Memory,
    start: usize,
    len: usize,
    elements: PhantomData<&'s T>,
}

/// A part of a [`Slice`], to read and write.
pub struct ViewMut<'s, T: Element> {
    memory: &'s Memory,
    start: usize,
    len: usize,
    elements: PhantomData<&'s mut T>,
}

macro_rules! views {
    ($($view:ident),*) => {$(
        impl<T: Element> $view<'_, T> {
            /// Number of elements.
            pub fn len(&self) -> usize {
                self.len
            }

            /// Whether there are none.
            pub fn is_empty(&self) -> bool {
                self.len == 0
            }
        }

        impl<T: Element> HipSource for $view<'_, T> {
            type Elem = T;
            fn len(&self) -> usize {
                self.len
            }
            fn on<'a>(&'a self, stream: &'a Stream) -> Result<Use<'a>> {
                self.memory.lend(self.start * size_of::<T>(), stream, false)
            }
        }

        impl<T: Element> fmt::Debug for $view<'_, T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(concat!("hip::", stringify!($view)))
                    .field("dtype", &T::DTYPE)
                    .field("start", &self.start)
                    .field("len", &self.len)
                    .finish()
            }
        }
    )*};
}

views!(View, ViewMut);

impl<T: Element> HipSource for Slice<T> {
    type Elem = T;
    fn len(&self) -> usize {
        self.len
    }
    fn on<'a>(&'a self, stream: &'a Stream) -> Result<Use<'a>> {
        Slice::on(self, stream)
    }
}

impl<T: Element> HipTarget for Slice<T> {
    fn on_mut<'a>(&'a mut self, stream: &'a Stream) -> Result<Use<'a>> {
        Slice::on_mut(self, stream)
    }
}

impl<T: Element> HipTarget for ViewMut<'_, T> {
    /// Other parts of the slice may be in use at the same time.
    fn on_mut<'a>(&'a mut self, stream: &'a Stream) -> Result<Use<'a>> {
        self.memory.lend(self.start * size_of::<T>(), stream, false)
    }
}

impl<T: Element> fmt::Debug for Slice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("hip::Slice")
            .field("dtype", &T::DTYPE)
            .field("len", &self.len)
            .field("start", &self.memory.start)
            .field("stream", &self.memory.stream)
            .finish()
    }
}
