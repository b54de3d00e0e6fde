//! Puts and gets of one element.

use crate::backend::nvshmem::pe::context::Context;
use crate::backend::nvshmem::pe::device::{copy, raw};
use crate::backend::nvshmem::pe::memory::{Shared, check_index};
use crate::types::error::{Error, Result, UnsupportedError};
use crate::types::memory::RawStream;
use crate::types::op::{element_bits, element_from_bits};
use cudarc::driver::CudaStream;
use cudarc::driver::sys::{CUdeviceptr, CUstreamCaptureStatus};
use std::ffi::c_int;

impl Context {
    /// Writes one element of a PE's memory. The value is there as with [`put`](Context::put).
    /// `nvshmemx_uint8_p_on_stream` to `…uint64…`, in place of `nvshmem_uint8_p`, which has no timeout
    ///
    /// # Errors
    /// [`UsageError`](crate::UsageError) if there is no such element or PE.
    pub fn p<D: Shared + ?Sized>(&self, dest: &D, index: usize, value: D::Elem, pe: usize) -> Result<()> {
        self.p_as("p", dest, index, value, pe, self.host_stream())?;
        self.sync(self.host_stream())
    }

    /// As [`p`](Context::p), behind the work on a stream. `nvshmemx_uint8_p_on_stream` to `…uint64…`
    ///
    /// # Errors
    /// Also [`Error::Unsupported`] for a stream that is being captured: the graph would read the value from
    /// an address that is valid during the call only.
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
        let (library, bits) = (self.library, element_bits(value));
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
        // SAFETY: initialised; an element of symmetric memory of this width, on a PE that exists; a stream of
        // the device.
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

    /// Reads one element of a PE's memory. There is no form on a stream, where the value could only come
    /// later. Copies from the address that `nvshmem_ptr` gives, in place of `nvshmem_uint8_g` to `…uint64_g`,
    /// which have no timeout.
    ///
    /// # Errors
    /// [`UsageError`](crate::UsageError) if there is no such element or PE; [`Error::Unsupported`] as for
    /// [`iput`](Context::iput).
    pub fn g<S: Shared + ?Sized>(&self, source: &S, index: usize, pe: usize) -> Result<S::Elem> {
        self.check_element("g", source, index, pe)?;
        let start = self.check_mapped("g", source.place(), pe)?;
        let size = size_of::<S::Elem>();
        Ok(element_from_bits(self.fetch(start + (index * size) as u64, size)?))
    }

    /// Reads at most 8 bytes that are mapped here, zero-extended.
    pub(crate) fn fetch(&self, address: CUdeviceptr, bytes: usize) -> Result<u64> {
        self.enter()?;
        let (word, stream) = (self.device.word(), self.host_stream());
        // SAFETY: a word of page-locked memory that lives as long as the process, into which nothing else is
        // under way: after a wait that was given up nothing follows.
        unsafe {
            word.write_volatile(0);
            copy(word.cast(), address as *const u8, bytes, RawStream(stream.cu_stream().cast()))?;
        }
        self.sync(stream)?;
        // SAFETY: as above; the copy is complete.
        Ok(unsafe { word.read_volatile() })
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
}
