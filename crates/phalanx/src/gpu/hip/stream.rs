//! Streams of AMD GPUs: copies, events and waits.

use super::slice::{Memory, Slice, Use};
use super::{api, check, enter, failed};
use crate::os::RunInstant;
use crate::types::dtype::Element;
use crate::types::error::{Result, UsageError};
use phalanx_sys::hip::{
    hipError_t, hipEventDisableTiming, hipMemcpyDefault, hipStream_t, hipStreamNonBlocking,
};
use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

/// A stream of an AMD GPU (`hipStream_t`); clones are the same stream.
///
/// HIP may drop work on a stream that is destroyed. Dropping the last clone therefore waits up to 10 s for
/// the stream's work; if that does not end, the stream is leaked and the log says so.
#[derive(Clone)]
pub struct Stream(Arc<Inner>);

struct Inner {
    raw: hipStream_t,
    device: usize,
    is_ours: bool,
}

// SAFETY: a HIP stream may be used by any thread, several at once.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// How long the end of a stream, or of memory, may wait for its work.
const ENDING: Duration = Duration::from_secs(10);

impl Inner {
    fn is_idle(&self) -> Result<bool> {
        let api = api()?;
        let _current = enter(self.device)?;
        // SAFETY: a stream that this holds.
        match unsafe { (api.hipStreamQuery)(self.raw) } {
            hipError_t::Success => Ok(true),
            hipError_t::NotReady => Ok(false),
            error => Err(failed(api, "hipStreamQuery", error).into()),
        }
    }

    /// Waits for the work, at most [`ENDING`].
    fn drain(&self) -> Result<()> {
        let since = RunInstant::now();
        while !self.is_idle()? {
            if since.elapsed() > ENDING {
                return Err(failed(api()?, "hipStreamQuery", hipError_t::NotReady).into());
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    fn destroy(&self) -> Result<()> {
        self.drain()?;
        let api = api()?;
        let _current = enter(self.device)?;
        // SAFETY: made by `new`, destroyed once, with nothing left to do.
        Ok(check(api, "hipStreamDestroy", unsafe { (api.hipStreamDestroy)(self.raw) })?)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.is_ours
            && let Err(error) = self.destroy()
        {
            crate::os::log::error!(gpu = self.device, "a stream is leaked: {error}");
        }
    }
}

impl Stream {
    pub(crate) fn new(device: usize) -> Result<Stream> {
        let api = api()?;
        let _current = enter(device)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: an out-pointer on the stack, written during the call.
        let result = unsafe { (api.hipStreamCreateWithFlags)(&raw mut raw, hipStreamNonBlocking) };
        check(api, "hipStreamCreateWithFlags", result)?;
        Ok(Stream(Arc::new(Inner { raw, device, is_ours: true })))
    }

    pub(crate) fn default_of(device: usize) -> Stream {
        Stream(Arc::new(Inner { raw: std::ptr::null_mut(), device, is_ours: false }))
    }

    /// A stream that the program made otherwise, on the device with this number.
    ///
    /// # Safety
    /// It is a stream of that device (null is the default one), and is not destroyed before the last clone of
    /// this, the last slice that was used on it and the last communicator that it was given to.
    pub unsafe fn from_raw(raw: *mut c_void, device: usize) -> Stream {
        Stream(Arc::new(Inner { raw, device, is_ours: false }))
    }

    /// The C handle (`hipStream_t`), valid as long as this.
    pub fn as_raw(&self) -> *mut c_void {
        self.0.raw
    }

    /// The number of its GPU.
    pub fn device(&self) -> usize {
        self.0.device
    }

    /// Whether there are no other clones.
    pub(crate) fn is_nobody_elses(&mut self) -> bool {
        Arc::get_mut(&mut self.0).is_some()
    }

    /// Whether both are one stream.
    #[inline]
    pub(crate) fn is(&self, other: &Stream) -> bool {
        self.0.raw == other.0.raw && self.0.device == other.0.device
    }

    /// Makes later work on this stream wait for the work that is on `other` now (`hipStreamWaitEvent`).
    pub fn wait_for(&self, other: &Stream) -> Result<()> {
        if self.is(other) {
            return Ok(());
        }
        let api = api()?;
        let mut event = std::ptr::null_mut();
        {
            let _current = enter(other.0.device)?;
            // SAFETY: an out-pointer on the stack, written during the call.
            let made = unsafe { (api.hipEventCreateWithFlags)(&raw mut event, hipEventDisableTiming) };
            check(api, "hipEventCreateWithFlags", made)?;
        }
        let joined = self.join(api, other, event);
        // SAFETY: made above; HIP keeps it until nobody waits for it any more.
        unsafe { (api.hipEventDestroy)(event) };
        joined
    }

    fn join(&self, api: &phalanx_sys::hip::Api, other: &Stream, event: *mut c_void) -> Result<()> {
        {
            let _current = enter(other.0.device)?;
            // SAFETY: an event and a stream of one device.
            check(api, "hipEventRecord", unsafe { (api.hipEventRecord)(event, other.0.raw) })?;
        }
        let _current = enter(self.0.device)?;
        // SAFETY: a recorded event, and a stream that this holds.
        check(api, "hipStreamWaitEvent", unsafe { (api.hipStreamWaitEvent)(self.0.raw, event, 0) })?;
        Ok(())
    }

    /// Whether everything that was enqueued is done (`hipStreamQuery`).
    pub fn is_idle(&self) -> Result<bool> {
        self.0.is_idle()
    }

    /// Waits, with a bound, until everything that was enqueued is done.
    pub(crate) fn drain(&self) -> Result<()> {
        self.0.drain()
    }

    /// Waits on the host until everything that was enqueued is done (`hipStreamSynchronize`), without a
    /// deadline: after operations of a communicator call [`Comm::sync`](crate::Comm::sync) first.
    pub fn synchronize(&self) -> Result<()> {
        let api = api()?;
        let _current = enter(self.0.device)?;
        // SAFETY: a stream that this holds.
        Ok(check(api, "hipStreamSynchronize", unsafe { (api.hipStreamSynchronize)(self.0.raw) })?)
    }

    /// Memory of the stream's GPU: `len` elements, zero. From the GPU's pool (`hipMallocAsync`), or from
    /// `hipMalloc` where it has none.
    pub fn alloc_zeros<T: Element>(&self, len: usize) -> Result<Slice<T>> {
        let mut slice = self.allocate(len)?;
        self.memset_zeros(&mut slice)?;
        Ok(slice)
    }

    /// Memory of `len` elements, uninitialised.
    pub(crate) fn allocate<T: Element>(&self, len: usize) -> Result<Slice<T>> {
        let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| *bytes <= isize::MAX as usize);
        let bytes = bytes.ok_or_else(|| UsageError::Overflow {
            operation: "alloc_zeros",
            what: "the length in bytes",
            value: format!("{len} × {}", size_of::<T>()),
            limit: isize::MAX.to_string(),
        })?;
        Ok(Slice::new(Memory::allocate(self, bytes)?, len))
    }

    /// A copy in GPU memory. It is complete when this returns.
    pub fn clone_htod<T: Element>(&self, values: &[T]) -> Result<Slice<T>> {
        let mut slice = self.allocate(values.len())?;
        self.memcpy_htod(values, &mut slice)?;
        Ok(slice)
    }

    /// A copy in host memory, behind the slice's other users. It is complete when this returns.
    pub fn clone_dtoh<S: HipSource + ?Sized>(&self, slice: &S) -> Result<Vec<S::Elem>> {
        let mut values = Vec::with_capacity(slice.len());
        // SAFETY: the vector has room for so many elements, which the copy has written when it returns.
        unsafe {
            self.download(slice, values.as_mut_ptr())?;
            values.set_len(slice.len());
        }
        Ok(values)
    }

    /// Copies to GPU memory of the same length. It is complete when this returns.
    pub fn memcpy_htod<T, D>(&self, values: &[T], slice: &mut D) -> Result<()>
    where
        T: Element,
        D: HipTarget<Elem = T> + ?Sized,
    {
        same_length("memcpy_htod", slice.len(), values.len())?;
        let to = slice.on_mut(self)?;
        // SAFETY: both have so many elements, and neither is given back before the copy is complete.
        unsafe { self.copy(to.as_ptr(), values.as_ptr().cast(), size_of_val(values)) }?;
        self.synchronize()
    }

    /// Copies to host memory of the same length, behind the slice's other users. It is complete when this
    /// returns.
    pub fn memcpy_dtoh<T, S>(&self, slice: &S, values: &mut [T]) -> Result<()>
    where
        T: Element,
        S: HipSource<Elem = T> + ?Sized,
    {
        same_length("memcpy_dtoh", values.len(), slice.len())?;
        // SAFETY: both have so many elements.
        unsafe { self.download(slice, values.as_mut_ptr()) }
    }

    /// Copies within GPU memory, behind both slices' other users. It is enqueued when this returns.
    pub fn memcpy_dtod<S, D>(&self, from: &S, to: &mut D) -> Result<()>
    where
        S: HipSource + ?Sized,
        D: HipTarget<Elem = S::Elem> + ?Sized,
    {
        same_length("memcpy_dtod", to.len(), from.len())?;
        let bytes = from.len() * size_of::<S::Elem>();
        let (source, target) = (from.on(self)?, to.on_mut(self)?);
        // SAFETY: both have so many elements, and whoever uses them later is behind the copy.
        unsafe { self.copy(target.as_ptr(), source.as_ptr().cast_const(), bytes) }
    }

    /// Writes zeroes, behind the slice's other users. It is enqueued when this returns.
    pub fn memset_zeros<D: HipTarget + ?Sized>(&self, slice: &mut D) -> Result<()> {
        let bytes = slice.len() * size_of::<D::Elem>();
        if bytes == 0 {
            return Ok(());
        }
        let api = api()?;
        let target = slice.on_mut(self)?;
        let _current = enter(self.0.device)?;
        // SAFETY: the slice has so many bytes, and whoever uses it later is behind this.
        let result = unsafe { (api.hipMemsetAsync)(target.as_ptr().cast(), 0, bytes, self.0.raw) };
        Ok(check(api, "hipMemsetAsync", result)?)
    }

    /// # Safety
    /// `to` is writable for as many elements as the slice has.
    unsafe fn download<S: HipSource + ?Sized>(&self, slice: &S, to: *mut S::Elem) -> Result<()> {
        let from = slice.on(self)?;
        // SAFETY: the caller's contract; neither is given back before the copy is complete.
        unsafe { self.copy(to.cast(), from.as_ptr().cast_const(), slice.len() * size_of::<S::Elem>()) }?;
        self.synchronize()
    }

    /// # Safety
    /// Both are valid for so many bytes until the stream's work is complete.
    unsafe fn copy(&self, to: *mut u8, from: *const u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let api = api()?;
        let _current = enter(self.0.device)?;
        // SAFETY: the caller's contract.
        let result =
            unsafe { (api.hipMemcpyAsync)(to.cast(), from.cast(), bytes, hipMemcpyDefault, self.0.raw) };
        Ok(check(api, "hipMemcpyAsync", result)?)
    }
}

fn same_length(operation: &'static str, actual: usize, expected: usize) -> Result<()> {
    if actual == expected {
        return Ok(());
    }
    let (buffer, rule) = ("target", "the length of the source");
    Err(UsageError::Length { operation, buffer, actual, expected, rule }.into())
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("hip::Stream").field("device", &self.0.device).field("raw", &self.0.raw).finish()
    }
}

/// GPU memory that can be read on a stream: [`Slice`], [`View`](super::View), [`ViewMut`](super::ViewMut).
pub trait HipSource {
    /// The type of the elements.
    type Elem: Element;
    /// Number of elements.
    fn len(&self) -> usize;
    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// For one use on a stream, reading: see [`Slice::on`].
    fn on<'a>(&'a self, stream: &'a Stream) -> Result<Use<'a>>;
}

/// GPU memory that can be written on a stream: [`Slice`], [`ViewMut`](super::ViewMut).
pub trait HipTarget: HipSource {
    /// For one use on a stream, reading and writing: see [`Slice::on`].
    fn on_mut<'a>(&'a mut self, stream: &'a Stream) -> Result<Use<'a>>;
}
