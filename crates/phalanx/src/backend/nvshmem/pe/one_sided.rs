//! Puts and gets: contiguous, strided, of one element; blocking, non-blocking and on a stream; and what completes them.

use super::context::Context;
use super::device::{copy, raw};
use super::memory::{Local, LocalMut, Shared, check_index, too_short};
use crate::buffer::loan::Loan;
use crate::buffer::stream::OnStream;
use crate::types::dtype::Element;
use crate::types::error::{Error, Result, UnsupportedError, UsageError};
use crate::types::memory::RawStream;
use crate::types::op::element_from_bits;
use cudarc::driver::CudaStream;
use cudarc::driver::sys::{CUdeviceptr, CUstreamCaptureStatus};
use phalanx_sys::nvshmem::stream_t;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// The pitch of CUDA's two-dimensional copies, which strided operations are, has this limit in bytes.
const MAX_PITCH: usize = i32::MAX as usize;

/// Steps between the elements of a strided operation, and how many there are.
#[derive(Debug, Clone, Copy)]
struct Strides {
    dest: usize,
    source: usize,
    count: usize,
}

/// Behind what a put or get comes, and when its local buffer is the caller's again.
#[derive(Clone, Copy)]
pub(crate) enum Mode<'s> {
    /// Both by the stream.
    OnStream(&'s Arc<CudaStream>),
    /// The stream's work, and quiet.
    Nbi(&'s Arc<CudaStream>),
    /// What is under way on the buffer, and the host waits.
    Blocking,
}

/// What puts and what gets on a stream: destination, source, bytes, PE, stream.
type Move = unsafe extern "C" fn(*mut c_void, *const c_void, usize, c_int, stream_t);

/// What blocks is enqueued on a stream of the context's own, behind what cudarc knows of the local buffer and nothing else, and
/// waited for with the timeout: the library's blocking functions wait without one, also for what other calls have put on its
/// internal streams.
impl Context {
    /// Writes `source` to `dest` on a PE. The source may be used again when this returns; the data is at the PE after
    /// [`quiet`](Context::quiet) or a barrier. Waits for what cudarc knows to be under way on the source.
    /// `nvshmemx_putmem_on_stream`, in place of `nvshmem_putmem`, which has no timeout
    ///
    /// # Errors
    /// [`UsageError::Length`] if the lengths differ, [`UsageError::Rank`] if there is no such PE; those of
    /// [`sync`](Context::sync).
    pub fn put<S, D>(&self, dest: &D, source: &S, pe: usize) -> Result<()>
    where
        S: Local + ?Sized,
        D: Shared<Elem = S::Elem> + ?Sized,
    {
        self.put_as("put", dest, source, pe, Mode::Blocking)
    }

    /// As [`put`](Context::put), returning at once: the source must not be written before [`quiet`](Context::quiet).
    /// `nvshmemx_putmem_nbi_on_stream`, in place of `nvshmem_putmem_nbi`
    pub fn put_nbi<S, D>(&self, dest: &D, source: &S, pe: usize) -> Result<()>
    where
        S: Local + ?Sized,
        D: Shared<Elem = S::Elem> + ?Sized,
    {
        self.put_as("put_nbi", dest, source, pe, Mode::Nbi(self.host_stream()))
    }

    /// As [`put`](Context::put), behind the work on a stream. `nvshmemx_putmem_on_stream`
    pub fn put_on_stream<S, D>(&self, dest: &D, source: &S, pe: usize, stream: &Arc<CudaStream>) -> Result<()>
    where
        S: Local + ?Sized,
        D: Shared<Elem = S::Elem> + ?Sized,
    {
        self.put_as("put_on_stream", dest, source, pe, Mode::OnStream(stream))
    }

    /// As [`put_on_stream`](Context::put_on_stream); the stream does not wait for it: the source must not be written
    /// before [`quiet_on_stream`](Context::quiet_on_stream). `nvshmemx_putmem_nbi_on_stream`
    pub fn put_nbi_on_stream<S, D>(
        &self,
        dest: &D,
        source: &S,
        pe: usize,
        stream: &Arc<CudaStream>,
    ) -> Result<()>
    where
        S: Local + ?Sized,
        D: Shared<Elem = S::Elem> + ?Sized,
    {
        self.put_as("put_nbi_on_stream", dest, source, pe, Mode::Nbi(stream))
    }

    #[inline]
    fn put_as<S, D>(
        &self,
        operation: &'static str,
        dest: &D,
        source: &S,
        pe: usize,
        mode: Mode<'_>,
    ) -> Result<()>
    where
        S: Local + ?Sized,
        D: Shared<Elem = S::Elem> + ?Sized,
    {
        let library = self.library;
        let put: Move = match mode {
            Mode::Nbi(_) => {
                library.need(library.nvshmemx_putmem_nbi_on_stream, "nvshmemx_putmem_nbi_on_stream")
            }
            _ => library.need(library.nvshmemx_putmem_on_stream, "nvshmemx_putmem_on_stream"),
        }?;
        let (pe, bytes) = self.check_put(operation, dest, source, pe)?;
        if bytes == 0 {
            return self.conclude(mode, None);
        }
        let to = dest.place() as *mut _;
        // SAFETY: initialised; symmetric memory of so many bytes on the PE, which exists; the source is lent and nobody
        // writes to it; the stream is one of the device, as lending has checked; what uses the source later is ordered behind
        // it, or (nbi) memory of the library's is freed only after a barrier, registered memory after a quiet.
        self.reading(mode, source, |from, stream| unsafe { put(to, from, bytes, pe, stream) })
    }

    /// Reads `source` of a PE into `dest`; complete when this returns. Waits for what cudarc knows to be under way on the
    /// destination. `nvshmemx_getmem_on_stream`, in place of `nvshmem_getmem`, which has no timeout
    ///
    /// # Errors
    /// As for [`put`](Context::put).
    pub fn get<D, S>(&self, dest: &mut D, source: &S, pe: usize) -> Result<()>
    where
        D: LocalMut + ?Sized,
        S: Shared<Elem = D::Elem> + ?Sized,
    {
        self.get_as("get", dest, source, pe, Mode::Blocking)
    }

    /// As [`get`](Context::get), returning at once: what is in `dest` is not specified before [`quiet`](Context::quiet).
    /// `nvshmemx_getmem_nbi_on_stream`, in place of `nvshmem_getmem_nbi`
    pub fn get_nbi<D, S>(&self, dest: &mut D, source: &S, pe: usize) -> Result<()>
    where
        D: LocalMut + ?Sized,
        S: Shared<Elem = D::Elem> + ?Sized,
    {
        self.get_as("get_nbi", dest, source, pe, Mode::Nbi(self.host_stream()))
    }

    /// As [`get`](Context::get), behind the work on a stream. `nvshmemx_getmem_on_stream`
    pub fn get_on_stream<D, S>(
        &self,
        dest: &mut D,
        source: &S,
        pe: usize,
        stream: &Arc<CudaStream>,
    ) -> Result<()>
    where
        D: LocalMut + ?Sized,
        S: Shared<Elem = D::Elem> + ?Sized,
    {
        self.get_as("get_on_stream", dest, source, pe, Mode::OnStream(stream))
    }

    /// As [`get_on_stream`](Context::get_on_stream); the stream does not wait for it: what is in `dest` is not specified
    /// before [`quiet_on_stream`](Context::quiet_on_stream). `nvshmemx_getmem_nbi_on_stream`
    pub fn get_nbi_on_stream<D, S>(
        &self,
        dest: &mut D,
        source: &S,
        pe: usize,
        stream: &Arc<CudaStream>,
    ) -> Result<()>
    where
        D: LocalMut + ?Sized,
        S: Shared<Elem = D::Elem> + ?Sized,
    {
        self.get_as("get_nbi_on_stream", dest, source, pe, Mode::Nbi(stream))
    }

    #[inline]
    fn get_as<D, S>(
        &self,
        operation: &'static str,
        dest: &mut D,
        source: &S,
        pe: usize,
        mode: Mode<'_>,
    ) -> Result<()>
    where
        D: LocalMut + ?Sized,
        S: Shared<Elem = D::Elem> + ?Sized,
    {
        let library = self.library;
        let get: Move = match mode {
            Mode::Nbi(_) => {
                library.need(library.nvshmemx_getmem_nbi_on_stream, "nvshmemx_getmem_nbi_on_stream")
            }
            _ => library.need(library.nvshmemx_getmem_on_stream, "nvshmemx_getmem_on_stream"),
        }?;
        let (pe, bytes) = self.check_get(operation, dest, source, pe)?;
        if bytes == 0 {
            return self.conclude(mode, None);
        }
        let from = source.place() as *const _;
        // SAFETY: as for `put_as`; the destination is lent, and nobody else uses it.
        self.writing(mode, dest, |to, stream| unsafe { get(to, from, bytes, pe, stream) })
    }

    /// Makes everything that this PE put complete, and everything it got be there; waits for it.
    /// `nvshmemx_quiet_on_stream`, in place of `nvshmem_quiet`, which has no timeout
    ///
    /// # Errors
    /// Those of [`sync`](Context::sync).
    pub fn quiet(&self) -> Result<()> {
        self.quiet_on_stream(self.host_stream())?;
        self.sync(self.host_stream())
    }

    /// What this PE puts to a PE from here on comes there after what it put before. Between GPUs that reach each other,
    /// `nvshmem_fence` is the stronger [`quiet`](Context::quiet), and so is this.
    pub fn fence(&self) -> Result<()> {
        self.quiet()
    }

    /// [`quiet`](Context::quiet) as work on a stream. `nvshmemx_quiet_on_stream`
    ///
    /// It takes over what `…_nbi` has begun: a quiet or barrier that comes later completes that only if it comes behind this stream.
    ///
    /// # Errors
    /// [`UsageError::Memory`] for a stream of another GPU.
    pub fn quiet_on_stream(&self, stream: &CudaStream) -> Result<()> {
        let quiet = self.library.need(self.library.nvshmemx_quiet_on_stream, "nvshmemx_quiet_on_stream")?;
        self.device.check(stream)?;
        self.enter()?;
        // SAFETY: initialised; a stream of the device.
        unsafe { quiet(raw(stream)) };
        Ok(())
    }

    /// [`fence`](Context::fence) as work on a stream. The library has none, so it is the stronger
    /// [`quiet_on_stream`](Context::quiet_on_stream).
    pub fn fence_on_stream(&self, stream: &CudaStream) -> Result<()> {
        self.quiet_on_stream(stream)
    }

    /// Writes `count` elements, every `source_stride`-th of `source`, to every `dest_stride`-th of `dest` on a PE. As
    /// [`put`](Context::put) in all else. `nvshmemx_iput8_on_stream` to `…64…`, by the width of the elements
    ///
    /// # Errors
    /// Also [`UsageError::Setting`] for a stride of 0 or beyond 2 GiB, and [`Error::Unsupported`] if the PE's memory cannot
    /// be reached by loads and stores: the library would end the process.
    pub fn iput<S, D>(
        &self,
        dest: &D,
        dest_stride: usize,
        source: &S,
        source_stride: usize,
        count: usize,
        pe: usize,
    ) -> Result<()>
    where
        S: Local + ?Sized,
        D: Shared<Elem = S::Elem> + ?Sized,
    {
        let strides = Strides { dest: dest_stride, source: source_stride, count };
        self.iput_as("iput", dest, source, strides, pe, Mode::Blocking)
    }

    /// As [`iput`](Context::iput), behind the work on a stream. `nvshmemx_iput8_on_stream` to `…64…`
    #[allow(clippy::too_many_arguments, reason = "the arguments of the C function")]
    pub fn iput_on_stream<S, D>(
        &self,
        dest: &D,
        dest_stride: usize,
        source: &S,
        source_stride: usize,
        count: usize,
        pe: usize,
        stream: &Arc<CudaStream>,
    ) -> Result<()>
    where
        S: Local + ?Sized,
        D: Shared<Elem = S::Elem> + ?Sized,
    {
        let strides = Strides { dest: dest_stride, source: source_stride, count };
        self.iput_as("iput_on_stream", dest, source, strides, pe, Mode::OnStream(stream))
    }

    fn iput_as<S, D>(
        &self,
        operation: &'static str,
        dest: &D,
        source: &S,
        strides: Strides,
        pe: usize,
        mode: Mode<'_>,
    ) -> Result<()>
    where
        S: Local + ?Sized,
        D: Shared<Elem = S::Elem> + ?Sized,
    {
        let (there, here) = (dest.len(), source.len());
        let pe = self.check_strided::<S::Elem>(operation, there, here, strides, pe, dest.place())?;
        if strides.count == 0 {
            return self.conclude(mode, None);
        }
        let library = self.library;
        let iput = match size_of::<S::Elem>() {
            1 => library.need(library.nvshmemx_iput8_on_stream, "nvshmemx_iput8_on_stream"),
            2 => library.need(library.nvshmemx_iput16_on_stream, "nvshmemx_iput16_on_stream"),
            4 => library.need(library.nvshmemx_iput32_on_stream, "nvshmemx_iput32_on_stream"),
            _ => library.need(library.nvshmemx_iput64_on_stream, "nvshmemx_iput64_on_stream"),
        }?;
        let to = dest.place() as *mut _;
        let (to_step, from_step) = (strides.dest as isize, strides.source as isize);
        self.reading(mode, source, |from, stream| {
            // SAFETY: as for `put_as`; all elements lie in the buffers, and the PE's can be reached by copies.
            unsafe { iput(to, from, to_step, from_step, strides.count, pe, stream) }
        })
    }

    /// Reads `count` elements, every `source_stride`-th of `source` on a PE, into every `dest_stride`-th of `dest`; complete
    /// when this returns. `nvshmemx_iget8_on_stream` to `…64…`
    ///
    /// # Errors
    /// As for [`iput`](Context::iput).
    pub fn iget<D, S>(
        &self,
        dest: &mut D,
        dest_stride: usize,
        source: &S,
        source_stride: usize,
        count: usize,
        pe: usize,
    ) -> Result<()>
    where
        D: LocalMut + ?Sized,
        S: Shared<Elem = D::Elem> + ?Sized,
    {
        let strides = Strides { dest: dest_stride, source: source_stride, count };
        self.iget_as("iget", dest, source, strides, pe, Mode::Blocking)
    }

    /// As [`iget`](Context::iget), behind the work on a stream. `nvshmemx_iget8_on_stream` to `…64…`
    #[allow(clippy::too_many_arguments, reason = "the arguments of the C function")]
    pub fn iget_on_stream<D, S>(
        &self,
        dest: &mut D,
        dest_stride: usize,
        source: &S,
        source_stride: usize,
        count: usize,
        pe: usize,
        stream: &Arc<CudaStream>,
    ) -> Result<()>
    where
        D: LocalMut + ?Sized,
        S: Shared<Elem = D::Elem> + ?Sized,
    {
        let strides = Strides { dest: dest_stride, source: source_stride, count };
        self.iget_as("iget_on_stream", dest, source, strides, pe, Mode::OnStream(stream))
    }

    fn iget_as<D, S>(
        &self,
        operation: &'static str,
        dest: &mut D,
        source: &S,
        strides: Strides,
        pe: usize,
        mode: Mode<'_>,
    ) -> Result<()>
    where
        D: LocalMut + ?Sized,
        S: Shared<Elem = D::Elem> + ?Sized,
    {
        let (here, there) = (dest.len(), source.len());
        let pe = self.check_strided::<D::Elem>(operation, here, there, strides, pe, source.place())?;
        if strides.count == 0 {
            return self.conclude(mode, None);
        }
        let library = self.library;
        let iget = match size_of::<D::Elem>() {
            1 => library.need(library.nvshmemx_iget8_on_stream, "nvshmemx_iget8_on_stream"),
            2 => library.need(library.nvshmemx_iget16_on_stream, "nvshmemx_iget16_on_stream"),
            4 => library.need(library.nvshmemx_iget32_on_stream, "nvshmemx_iget32_on_stream"),
            _ => library.need(library.nvshmemx_iget64_on_stream, "nvshmemx_iget64_on_stream"),
        }?;
        let from = source.place() as *const _;
        let (to_step, from_step) = (strides.dest as isize, strides.source as isize);
        self.writing(mode, dest, |to, stream| {
            // SAFETY: as for `get_as`; all elements lie in the buffers, and the PE's can be reached by copies.
            unsafe { iget(to, from, to_step, from_step, strides.count, pe, stream) }
        })
    }

    /// Writes one element of a PE's memory. The value is there as with [`put`](Context::put).
    /// `nvshmemx_uint8_p_on_stream` to `…uint64…`, in place of `nvshmem_uint8_p`, which has no timeout
    ///
    /// # Errors
    /// [`UsageError`] if there is no such element or PE.
    pub fn p<D: Shared + ?Sized>(&self, dest: &D, index: usize, value: D::Elem, pe: usize) -> Result<()> {
        self.p_as("p", dest, index, value, pe, self.host_stream())?;
        self.sync(self.host_stream())
    }

    /// As [`p`](Context::p), behind the work on a stream. `nvshmemx_uint8_p_on_stream` to `…uint64…`
    ///
    /// # Errors
    /// Also [`Error::Unsupported`] for a stream that is being captured: the graph would read the value where the library's call
    /// had it.
    pub fn p_on_stream<D: Shared + ?Sized>(
        &self,
        dest: &D,
        index: usize,
        value: D::Elem,
        pe: usize,
        stream: &CudaStream,
    ) -> Result<()> {
        self.p_as("p_on_stream", dest, index, value, pe, stream)
    }

    fn p_as<D: Shared + ?Sized>(
        &self,
        operation: &'static str,
        dest: &D,
        index: usize,
        value: D::Elem,
        pe: usize,
        stream: &CudaStream,
    ) -> Result<()> {
        let (library, bits) = (self.library, bits(value));
        let (pe, place) = self.check_element(operation, dest, index, pe)?;
        self.device.check(stream)?;
        if stream.capture_status()? != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            return Err(Error::from(UnsupportedError {
                what: format!("{operation} on a stream that is being captured"),
                why: "the library passes the value by an address that is valid during the call only".into(),
                remedy: "put from symmetric memory, or set the element in a kernel".into(),
            }));
        }
        let stream = raw(stream);
        // SAFETY: initialised; an element of symmetric memory of this width, on a PE that exists; a stream of the device.
        unsafe {
            match size_of::<D::Elem>() {
                1 => library.need(library.nvshmemx_uint8_p_on_stream, "nvshmemx_uint8_p_on_stream")?(
                    place as *mut _,
                    bits as u8,
                    pe,
                    stream,
                ),
                2 => library.need(library.nvshmemx_uint16_p_on_stream, "nvshmemx_uint16_p_on_stream")?(
                    place as *mut _,
                    bits as u16,
                    pe,
                    stream,
                ),
                4 => library.need(library.nvshmemx_uint32_p_on_stream, "nvshmemx_uint32_p_on_stream")?(
                    place as *mut _,
                    bits as u32,
                    pe,
                    stream,
                ),
                _ => library.need(library.nvshmemx_uint64_p_on_stream, "nvshmemx_uint64_p_on_stream")?(
                    place as *mut _,
                    bits,
                    pe,
                    stream,
                ),
            }
        }
        Ok(())
    }

    /// Reads one element of a PE's memory. There is no such thing on a stream: the value could only come later. A copy from
    /// where `nvshmem_ptr` says, as in `nvshmem_uint8_g` to `…uint64_g`, which have no timeout.
    ///
    /// # Errors
    /// [`UsageError`] if there is no such element or PE; [`Error::Unsupported`] as for [`iput`](Context::iput).
    pub fn g<S: Shared + ?Sized>(&self, source: &S, index: usize, pe: usize) -> Result<S::Elem> {
        self.check_element("g", source, index, pe)?;
        let start = self.check_mapped("g", source.place(), pe)?;
        let size = size_of::<S::Elem>();
        Ok(element_from_bits(self.fetch(start + (index * size) as u64, size)?))
    }

    /// A word of at most 8 bytes that can be loaded from here, zero-extended.
    pub(crate) fn fetch(&self, address: CUdeviceptr, bytes: usize) -> Result<u64> {
        self.enter()?;
        let (word, stream) = (self.device.word(), self.host_stream());
        // SAFETY: a word of page-locked memory that lives as long as the process, into which nothing else is under way: after a
        // wait that was given up nothing follows.
        unsafe {
            word.write_volatile(0);
            copy(word.cast(), address as *const u8, bytes, RawStream(stream.cu_stream().cast()))?;
        }
        self.sync(stream)?;
        // SAFETY: as above; the copy is complete.
        Ok(unsafe { word.read_volatile() })
    }
}

/// Checks, made before anything is started.
impl Context {
    /// Where what the host waits for runs.
    #[inline]
    pub(crate) fn host_stream(&self) -> &Arc<CudaStream> {
        &self.device.host_stream
    }

    #[inline]
    pub(crate) fn stream_of<'s>(&'s self, mode: Mode<'s>) -> &'s Arc<CudaStream> {
        match mode {
            Mode::OnStream(stream) | Mode::Nbi(stream) => stream,
            Mode::Blocking => self.host_stream(),
        }
    }

    /// Enqueues what reads a local buffer, which is lent for it, and sees to what comes after.
    #[inline]
    pub(crate) fn reading<S: Local + ?Sized>(
        &self,
        mode: Mode<'_>,
        source: &S,
        enqueue: impl FnOnce(*const c_void, stream_t),
    ) -> Result<()> {
        let stream = self.stream_of(mode);
        let lane = OnStream::new(stream);
        let lent = source.lend(&lane)?;
        enqueue(lent.span().start.cast_const().cast(), raw(stream));
        self.conclude(mode, Some(lent))
    }

    /// Enqueues what writes a local buffer.
    #[inline]
    fn writing<D: LocalMut + ?Sized>(
        &self,
        mode: Mode<'_>,
        dest: &mut D,
        enqueue: impl FnOnce(*mut c_void, stream_t),
    ) -> Result<()> {
        let stream = self.stream_of(mode);
        let lane = OnStream::new(stream);
        let lent = dest.lend_mut(&lane)?;
        enqueue(lent.span().start.cast(), raw(stream));
        self.conclude(mode, Some(lent))
    }

    /// What comes after it was enqueued, if there was something to do.
    #[inline]
    pub(crate) fn conclude(&self, mode: Mode<'_>, lent: Option<Loan<'_>>) -> Result<()> {
        if let Mode::Blocking = mode {
            self.sync(self.host_stream())?;
            if let Some(lent) = lent {
                lent.give_back();
            }
        }
        Ok(())
    }

    /// The PE and the length in bytes; the device is current afterwards.
    #[inline]
    pub(crate) fn check_put<S, D>(
        &self,
        operation: &'static str,
        dest: &D,
        source: &S,
        pe: usize,
    ) -> Result<(c_int, usize)>
    where
        S: Local + ?Sized,
        D: Shared<Elem = S::Elem> + ?Sized,
    {
        if dest.len() != source.len() {
            let rule = "the length of the source; take slices for a part";
            return Err(too_short(operation, "dest", dest.len(), source.len(), rule));
        }
        let pe = self.check_pe(operation, pe)?;
        self.enter()?;
        Ok((pe, source.len() * size_of::<S::Elem>()))
    }

    #[inline]
    fn check_get<D, S>(
        &self,
        operation: &'static str,
        dest: &D,
        source: &S,
        pe: usize,
    ) -> Result<(c_int, usize)>
    where
        D: LocalMut + ?Sized,
        S: Shared<Elem = D::Elem> + ?Sized,
    {
        if dest.len() != source.len() {
            let rule = "the length of the source; take slices for a part";
            return Err(too_short(operation, "dest", dest.len(), source.len(), rule));
        }
        let pe = self.check_pe(operation, pe)?;
        self.enter()?;
        Ok((pe, dest.len() * size_of::<D::Elem>()))
    }

    fn check_element<D: Shared + ?Sized>(
        &self,
        operation: &'static str,
        buffer: &D,
        index: usize,
        pe: usize,
    ) -> Result<(c_int, u64)> {
        check_index(operation, buffer.len(), index)?;
        let pe = self.check_pe(operation, pe)?;
        self.enter()?;
        Ok((pe, buffer.place() + (index * size_of::<D::Elem>()) as u64))
    }

    fn check_strided<T: Element>(
        &self,
        operation: &'static str,
        dest_len: usize,
        source_len: usize,
        strides: Strides,
        pe: usize,
        place: u64,
    ) -> Result<c_int> {
        for (buffer, stride, len) in
            [("dest", strides.dest, dest_len), ("source", strides.source, source_len)]
        {
            if stride == 0 || stride.checked_mul(size_of::<T>()).is_none_or(|pitch| pitch > MAX_PITCH) {
                return Err(UsageError::Setting {
                    name: format!("{operation}: {buffer}_stride"),
                    value: stride.to_string(),
                    expected: format!("1 to {} elements", MAX_PITCH / size_of::<T>()),
                }
                .into());
            }
            let needed = match strides.count {
                0 => 0,
                count => (count - 1).saturating_mul(stride).saturating_add(1),
            };
            if needed > len {
                return Err(too_short(operation, buffer, len, needed, "the count and the stride"));
            }
        }
        let number = self.check_pe(operation, pe)?;
        self.enter()?;
        if strides.count > 0 {
            self.check_mapped(operation, place, pe)?;
        }
        Ok(number)
    }

    /// For what can be done only where a PE's memory is mapped; elsewhere the library ends the process. Where it is mapped.
    fn check_mapped(&self, operation: &'static str, place: u64, pe: usize) -> Result<CUdeviceptr> {
        match self.peer(operation, place, pe)? {
            Some(start) => Ok(start),
            None => Err(Error::from(UnsupportedError {
                what: format!("{operation} with PE {pe}"),
                why: "its memory cannot be reached by loads and stores (NVLink, PCIe) from here".into(),
                remedy: "use put or get, on contiguous memory".into(),
            })),
        }
    }
}

/// The bits of an element, zero-extended.
fn bits<T: Element>(value: T) -> u64 {
    crate::types::op::element_bits(value)
}
