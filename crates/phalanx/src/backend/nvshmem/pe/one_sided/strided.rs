//! Strided puts and gets.

use super::Mode;
use crate::backend::nvshmem::pe::context::Context;
use crate::backend::nvshmem::pe::memory::{Local, LocalMut, Shared, too_short};
use crate::types::dtype::Element;
use crate::types::error::{Result, UsageError};
use cudarc::driver::CudaStream;
use std::ffi::c_int;
use std::sync::Arc;

/// Limit in bytes of the pitch of CUDA's two-dimensional copies, by which strided operations are done.
const MAX_PITCH: usize = i32::MAX as usize;

/// Steps between the elements of a strided operation, and how many there are.
#[derive(Debug, Clone, Copy)]
struct Strides {
    dest: usize,
    source: usize,
    count: usize,
}

impl Context {
    /// Writes `count` elements, every `source_stride`-th of `source`, to every `dest_stride`-th of `dest` on
    /// a PE. As [`put`](Context::put) in all else. `nvshmemx_iput8_on_stream` to `…64…`, by the width of the
    /// elements
    ///
    /// # Errors
    /// Also [`UsageError::Setting`] for a stride of 0 or beyond 2 GiB, and
    /// [`Error::Unsupported`](crate::Error::Unsupported) if the PE's memory cannot be reached by loads and
    /// stores: the library would end the process.
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
            // SAFETY: as for `put_as`; all elements lie in the buffers, and the PE's can be reached by
            // copies.
            unsafe { iput(to, from, to_step, from_step, strides.count, pe, stream) }
        })
    }

    /// Reads `count` elements, every `source_stride`-th of `source` on a PE, into every `dest_stride`-th of
    /// `dest`; complete when this returns. `nvshmemx_iget8_on_stream` to `…64…`
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
            // SAFETY: as for `get_as`; all elements lie in the buffers, and the PE's can be reached by
            // copies.
            unsafe { iget(to, from, to_step, from_step, strides.count, pe, stream) }
        })
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
}
