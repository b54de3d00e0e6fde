//! Puts and gets: contiguous, strided, of one element; blocking, non-blocking and on a stream; and what completes them.

use super::context::Context;
use super::device::raw;
use super::memory::{Local, LocalMut, Shared, check_index, too_short};
use crate::dtype::Element;
use crate::error::{Error, Result, UnsupportedError, UsageError};
use crate::lane::{Lent, OnStream};
use cudarc::driver::CudaStream;
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

impl Context {
    /// Writes `source` to `dest` on a PE. The source may be used again when this returns; the data is at the PE after
    /// [`quiet`](Context::quiet) or a barrier. Waits for what cudarc knows to be under way on the source. `nvshmem_putmem`
    ///
    /// # Errors
    /// [`UsageError::Length`] if the lengths differ, [`UsageError::Rank`] if there is no such PE.
    pub fn put<S, D>(&self, dest: &D, source: &S, pe: usize) -> Result<()>
    where
        S: Local + ?Sized,
        D: Shared<Elem = S::Elem> + ?Sized,
    {
        let put = self.library.need(self.library.nvshmem_putmem, "nvshmem_putmem")?;
        let (pe, bytes) = self.check_put("put", dest, source, pe)?;
        if bytes == 0 {
            return Ok(());
        }
        let lane = self.lane();
        let lent = self.settled(source.lend(&lane)?)?;
        // SAFETY: initialised; symmetric memory of so many bytes on the PE, which exists; the source is lent and nobody
        // writes to it.
        unsafe { put(dest.place() as *mut _, address(&lent), bytes, pe) };
        Ok(())
    }

    /// As [`put`](Context::put), returning at once: the source must not be written before [`quiet`](Context::quiet).
    /// `nvshmem_putmem_nbi`
    pub fn put_nbi<S, D>(&self, dest: &D, source: &S, pe: usize) -> Result<()>
    where
        S: Local + ?Sized,
        D: Shared<Elem = S::Elem> + ?Sized,
    {
        let put = self.library.need(self.library.nvshmem_putmem_nbi, "nvshmem_putmem_nbi")?;
        let (pe, bytes) = self.check_put("put_nbi", dest, source, pe)?;
        if bytes == 0 {
            return Ok(());
        }
        let lane = self.lane();
        let lent = self.settled(source.lend(&lane)?)?;
        // SAFETY: as above; memory of the library's is freed only after a barrier, registered memory after a quiet.
        unsafe { put(dest.place() as *mut _, address(&lent), bytes, pe) };
        Ok(())
    }

    /// As [`put`](Context::put), behind the work on a stream. `nvshmemx_putmem_on_stream`
    pub fn put_on_stream<S, D>(&self, dest: &D, source: &S, pe: usize, stream: &Arc<CudaStream>) -> Result<()>
    where
        S: Local + ?Sized,
        D: Shared<Elem = S::Elem> + ?Sized,
    {
        let put = self.library.need(self.library.nvshmemx_putmem_on_stream, "nvshmemx_putmem_on_stream")?;
        let (pe, bytes) = self.check_put("put_on_stream", dest, source, pe)?;
        if bytes == 0 {
            return Ok(());
        }
        let lane = OnStream::new(stream);
        let lent = source.lend(&lane)?;
        // SAFETY: as above; the stream is one of the device, as lending has checked; what uses the source later is
        // ordered behind it.
        unsafe { put(dest.place() as *mut _, address(&lent), bytes, pe, raw(stream)) };
        Ok(())
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
        let name = "nvshmemx_putmem_nbi_on_stream";
        let put = self.library.need(self.library.nvshmemx_putmem_nbi_on_stream, name)?;
        let (pe, bytes) = self.check_put("put_nbi_on_stream", dest, source, pe)?;
        if bytes == 0 {
            return Ok(());
        }
        let lane = OnStream::new(stream);
        let lent = source.lend(&lane)?;
        // SAFETY: as above; memory of the library's is freed only after a barrier, registered memory after a quiet.
        unsafe { put(dest.place() as *mut _, address(&lent), bytes, pe, raw(stream)) };
        Ok(())
    }

    /// Reads `source` of a PE into `dest`; complete when this returns. Waits for what cudarc knows to be under way on the
    /// destination. `nvshmem_getmem`
    ///
    /// # Errors
    /// As for [`put`](Context::put).
    pub fn get<D, S>(&self, dest: &mut D, source: &S, pe: usize) -> Result<()>
    where
        D: LocalMut + ?Sized,
        S: Shared<Elem = D::Elem> + ?Sized,
    {
        let get = self.library.need(self.library.nvshmem_getmem, "nvshmem_getmem")?;
        let (pe, bytes) = self.check_get("get", dest, source, pe)?;
        if bytes == 0 {
            return Ok(());
        }
        let lane = self.lane();
        let lent = self.settled(dest.lend_mut(&lane)?)?;
        // SAFETY: initialised; symmetric memory of so many bytes on the PE, which exists; the destination is lent, and
        // nobody else uses it.
        unsafe { get(address(&lent).cast_mut(), source.place() as *const _, bytes, pe) };
        Ok(())
    }

    /// As [`get`](Context::get), returning at once: what is in `dest` is not specified before [`quiet`](Context::quiet).
    /// `nvshmem_getmem_nbi`
    pub fn get_nbi<D, S>(&self, dest: &mut D, source: &S, pe: usize) -> Result<()>
    where
        D: LocalMut + ?Sized,
        S: Shared<Elem = D::Elem> + ?Sized,
    {
        let get = self.library.need(self.library.nvshmem_getmem_nbi, "nvshmem_getmem_nbi")?;
        let (pe, bytes) = self.check_get("get_nbi", dest, source, pe)?;
        if bytes == 0 {
            return Ok(());
        }
        let lane = self.lane();
        let lent = self.settled(dest.lend_mut(&lane)?)?;
        // SAFETY: as above; memory of the library's is freed only after a barrier, registered memory after a quiet.
        unsafe { get(address(&lent).cast_mut(), source.place() as *const _, bytes, pe) };
        Ok(())
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
        let get = self.library.need(self.library.nvshmemx_getmem_on_stream, "nvshmemx_getmem_on_stream")?;
        let (pe, bytes) = self.check_get("get_on_stream", dest, source, pe)?;
        if bytes == 0 {
            return Ok(());
        }
        let lane = OnStream::new(stream);
        let lent = dest.lend_mut(&lane)?;
        // SAFETY: as above; the stream is one of the device, as lending has checked; what uses the destination later is
        // ordered behind it.
        unsafe { get(address(&lent).cast_mut(), source.place() as *const _, bytes, pe, raw(stream)) };
        Ok(())
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
        let name = "nvshmemx_getmem_nbi_on_stream";
        let get = self.library.need(self.library.nvshmemx_getmem_nbi_on_stream, name)?;
        let (pe, bytes) = self.check_get("get_nbi_on_stream", dest, source, pe)?;
        if bytes == 0 {
            return Ok(());
        }
        let lane = OnStream::new(stream);
        let lent = dest.lend_mut(&lane)?;
        // SAFETY: as above; memory of the library's is freed only after a barrier, registered memory after a quiet.
        unsafe { get(address(&lent).cast_mut(), source.place() as *const _, bytes, pe, raw(stream)) };
        Ok(())
    }

    /// Makes everything that this PE put complete, and everything it got be there. Blocks. `nvshmem_quiet`
    pub fn quiet(&self) -> Result<()> {
        let quiet = self.library.need(self.library.nvshmem_quiet, "nvshmem_quiet")?;
        self.enter()?;
        // SAFETY: initialised.
        unsafe { quiet() };
        Ok(())
    }

    /// What this PE puts to a PE from here on comes there after what it put before. `nvshmem_fence`
    pub fn fence(&self) -> Result<()> {
        let fence = self.library.need(self.library.nvshmem_fence, "nvshmem_fence")?;
        self.enter()?;
        // SAFETY: initialised.
        unsafe { fence() };
        Ok(())
    }

    /// [`quiet`](Context::quiet) as work on a stream. `nvshmemx_quiet_on_stream`
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
    /// [`put`](Context::put) in all else. `nvshmem_iput8` to `…64`, by the width of the elements
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
        let pe =
            self.check_strided::<S::Elem>("iput", dest.len(), source.len(), strides, pe, dest.place())?;
        if count == 0 {
            return Ok(());
        }
        let library = self.library;
        let iput = match size_of::<S::Elem>() {
            1 => library.need(library.nvshmem_iput8, "nvshmem_iput8"),
            2 => library.need(library.nvshmem_iput16, "nvshmem_iput16"),
            4 => library.need(library.nvshmem_iput32, "nvshmem_iput32"),
            _ => library.need(library.nvshmem_iput64, "nvshmem_iput64"),
        }?;
        let lane = self.lane();
        let lent = self.settled(source.lend(&lane)?)?;
        let (to, from) = (dest.place() as *mut _, address(&lent));
        // SAFETY: as for `put`; all elements lie in the buffers, and the PE's can be reached by copies.
        unsafe { iput(to, from, dest_stride as isize, source_stride as isize, count, pe) };
        Ok(())
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
        let (there, here) = (dest.len(), source.len());
        let pe = self.check_strided::<S::Elem>("iput_on_stream", there, here, strides, pe, dest.place())?;
        if count == 0 {
            return Ok(());
        }
        let library = self.library;
        let iput = match size_of::<S::Elem>() {
            1 => library.need(library.nvshmemx_iput8_on_stream, "nvshmemx_iput8_on_stream"),
            2 => library.need(library.nvshmemx_iput16_on_stream, "nvshmemx_iput16_on_stream"),
            4 => library.need(library.nvshmemx_iput32_on_stream, "nvshmemx_iput32_on_stream"),
            _ => library.need(library.nvshmemx_iput64_on_stream, "nvshmemx_iput64_on_stream"),
        }?;
        let lane = OnStream::new(stream);
        let lent = source.lend(&lane)?;
        let (to, from) = (dest.place() as *mut _, address(&lent));
        // SAFETY: as above, and as for `put_on_stream`.
        unsafe { iput(to, from, dest_stride as isize, source_stride as isize, count, pe, raw(stream)) };
        Ok(())
    }

    /// Reads `count` elements, every `source_stride`-th of `source` on a PE, into every `dest_stride`-th of `dest`; complete
    /// when this returns. `nvshmem_iget8` to `…64`
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
        let pe =
            self.check_strided::<D::Elem>("iget", dest.len(), source.len(), strides, pe, source.place())?;
        if count == 0 {
            return Ok(());
        }
        let library = self.library;
        let iget = match size_of::<D::Elem>() {
            1 => library.need(library.nvshmem_iget8, "nvshmem_iget8"),
            2 => library.need(library.nvshmem_iget16, "nvshmem_iget16"),
            4 => library.need(library.nvshmem_iget32, "nvshmem_iget32"),
            _ => library.need(library.nvshmem_iget64, "nvshmem_iget64"),
        }?;
        let lane = self.lane();
        let lent = self.settled(dest.lend_mut(&lane)?)?;
        let (to, from) = (address(&lent).cast_mut(), source.place() as *const _);
        // SAFETY: as for `get`; all elements lie in the buffers, and the PE's can be reached by copies.
        unsafe { iget(to, from, dest_stride as isize, source_stride as isize, count, pe) };
        Ok(())
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
        let (here, there) = (dest.len(), source.len());
        let pe = self.check_strided::<D::Elem>("iget_on_stream", here, there, strides, pe, source.place())?;
        if count == 0 {
            return Ok(());
        }
        let library = self.library;
        let iget = match size_of::<D::Elem>() {
            1 => library.need(library.nvshmemx_iget8_on_stream, "nvshmemx_iget8_on_stream"),
            2 => library.need(library.nvshmemx_iget16_on_stream, "nvshmemx_iget16_on_stream"),
            4 => library.need(library.nvshmemx_iget32_on_stream, "nvshmemx_iget32_on_stream"),
            _ => library.need(library.nvshmemx_iget64_on_stream, "nvshmemx_iget64_on_stream"),
        }?;
        let lane = OnStream::new(stream);
        let lent = dest.lend_mut(&lane)?;
        let (to, from) = (address(&lent).cast_mut(), source.place() as *const _);
        // SAFETY: as above, and as for `get_on_stream`.
        unsafe { iget(to, from, dest_stride as isize, source_stride as isize, count, pe, raw(stream)) };
        Ok(())
    }

    /// Writes one element of a PE's memory. `nvshmem_uint8_p` to `…uint64_p`
    ///
    /// # Errors
    /// [`UsageError`] if there is no such element or PE.
    pub fn p<D: Shared + ?Sized>(&self, dest: &D, index: usize, value: D::Elem, pe: usize) -> Result<()> {
        let (library, bits) = (self.library, bits(value));
        let (pe, place) = self.check_element("p", dest, index, pe)?;
        // SAFETY: initialised; an element of symmetric memory of this width, on a PE that exists.
        unsafe {
            match size_of::<D::Elem>() {
                1 => {
                    library.need(library.nvshmem_uint8_p, "nvshmem_uint8_p")?(place as *mut _, bits as u8, pe)
                }
                2 => library.need(library.nvshmem_uint16_p, "nvshmem_uint16_p")?(
                    place as *mut _,
                    bits as u16,
                    pe,
                ),
                4 => library.need(library.nvshmem_uint32_p, "nvshmem_uint32_p")?(
                    place as *mut _,
                    bits as u32,
                    pe,
                ),
                _ => library.need(library.nvshmem_uint64_p, "nvshmem_uint64_p")?(place as *mut _, bits, pe),
            }
        }
        Ok(())
    }

    /// As [`p`](Context::p), behind the work on a stream. `nvshmemx_uint8_p_on_stream` to `…uint64…`
    pub fn p_on_stream<D: Shared + ?Sized>(
        &self,
        dest: &D,
        index: usize,
        value: D::Elem,
        pe: usize,
        stream: &CudaStream,
    ) -> Result<()> {
        let (library, bits) = (self.library, bits(value));
        let (pe, place) = self.check_element("p_on_stream", dest, index, pe)?;
        self.device.check(stream)?;
        let stream = raw(stream);
        // SAFETY: as above; a stream of the device.
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

    /// Reads one element of a PE's memory. There is no such thing on a stream: the value could only come later.
    /// `nvshmem_uint8_g` to `…uint64_g`
    ///
    /// # Errors
    /// [`UsageError`] if there is no such element or PE; [`Error::Unsupported`] as for [`iput`](Context::iput).
    pub fn g<S: Shared + ?Sized>(&self, source: &S, index: usize, pe: usize) -> Result<S::Elem> {
        let library = self.library;
        self.check_mapped("g", source.place(), pe)?;
        let (pe, place) = self.check_element("g", source, index, pe)?;
        // SAFETY: initialised; an element of symmetric memory of this width, on a PE that exists and can be reached.
        let bits = unsafe {
            match size_of::<S::Elem>() {
                1 => library.need(library.nvshmem_uint8_g, "nvshmem_uint8_g")?(place as *const _, pe).into(),
                2 => {
                    library.need(library.nvshmem_uint16_g, "nvshmem_uint16_g")?(place as *const _, pe).into()
                }
                4 => {
                    library.need(library.nvshmem_uint32_g, "nvshmem_uint32_g")?(place as *const _, pe).into()
                }
                _ => library.need(library.nvshmem_uint64_g, "nvshmem_uint64_g")?(place as *const _, pe),
            }
        };
        Ok(crate::op::element_from_bits(bits))
    }
}

/// Checks, made before anything is started.
impl Context {
    fn lane(&self) -> OnStream<'_> {
        OnStream::new(self.stream())
    }

    /// What was lent to the context's stream is not being written any more when this returns.
    fn settled<'l>(&self, lent: Lent<'l>) -> Result<Lent<'l>> {
        self.sync(self.stream()).map(|()| lent)
    }

    /// The PE and the length in bytes; the device is current afterwards.
    #[inline]
    pub(super) fn check_put<S, D>(
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

    /// For what the library can do only where a PE's memory is mapped; elsewhere it ends the process.
    fn check_mapped(&self, operation: &'static str, place: u64, pe: usize) -> Result<()> {
        match self.peer(operation, place, pe)? {
            Some(_) => Ok(()),
            None => Err(Error::from(UnsupportedError {
                what: format!("{operation} with PE {pe}"),
                why: "its memory cannot be reached by loads and stores (NVLink, PCIe) from here".into(),
                remedy: "use put or get, on contiguous memory".into(),
            })),
        }
    }
}

#[inline]
fn address(lent: &Lent<'_>) -> *const c_void {
    lent.span().start.cast_const().cast()
}

/// The bits of an element, zero-extended.
fn bits<T: Element>(value: T) -> u64 {
    crate::op::element_bits(value)
}
