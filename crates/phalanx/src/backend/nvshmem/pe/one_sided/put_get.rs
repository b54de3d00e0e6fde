//! Contiguous puts and gets.

use super::Mode;
use crate::backend::nvshmem::pe::context::Context;
use crate::backend::nvshmem::pe::memory::{Local, LocalMut, Shared};
use crate::types::error::Result;
use cudarc::driver::CudaStream;
use phalanx_sys::nvshmem::stream_t;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// The C functions for puts and gets: destination, source, bytes, PE, stream.
type Move = unsafe extern "C" fn(*mut c_void, *const c_void, usize, c_int, stream_t);

/// Contiguous puts and gets.
impl Context {
    /// Writes `source` to `dest` on a PE. The source may be used again when this returns; the data is at the
    /// PE after [`quiet`](Context::quiet) or a barrier. Waits for what cudarc knows to be under way on the
    /// source. `nvshmemx_putmem_on_stream`, in place of `nvshmem_putmem`, which has no timeout
    ///
    /// # Errors
    /// [`UsageError::Length`](crate::UsageError::Length) if the lengths differ,
    /// [`UsageError::Rank`](crate::UsageError::Rank) if there is no such PE; those of
    /// [`sync`](Context::sync).
    pub fn put<S, D>(&self, dest: &D, source: &S, pe: usize) -> Result<()>
    where
        S: Local + ?Sized,
        D: Shared<Elem = S::Elem> + ?Sized,
    {
        self.put_as("put", dest, source, pe, Mode::Blocking)
    }

    /// As [`put`](Context::put), returning at once: the source must not be written before
    /// [`quiet`](Context::quiet). `nvshmemx_putmem_nbi_on_stream`, in place of `nvshmem_putmem_nbi`
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

    /// As [`put_on_stream`](Context::put_on_stream); the stream does not wait for it: the source must not be
    /// written before [`quiet_on_stream`](Context::quiet_on_stream). `nvshmemx_putmem_nbi_on_stream`
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
        // SAFETY: initialised; symmetric memory of so many bytes on the PE, which exists; the source is lent
        // and nobody writes to it; the stream is one of the device, as lending has checked; what uses the
        // source later is ordered behind it, or (nbi) memory of the library's is freed only after a barrier,
        // registered memory after a quiet.
        self.reading(mode, source, |from, stream| unsafe { put(to, from, bytes, pe, stream) })
    }

    /// Reads `source` of a PE into `dest`; complete when this returns. Waits for what cudarc knows to be
    /// under way on the destination. `nvshmemx_getmem_on_stream`, in place of `nvshmem_getmem`, which has no
    /// timeout
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

    /// As [`get`](Context::get), returning at once: what is in `dest` is not specified before
    /// [`quiet`](Context::quiet). `nvshmemx_getmem_nbi_on_stream`, in place of `nvshmem_getmem_nbi`
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

    /// As [`get_on_stream`](Context::get_on_stream); the stream does not wait for it: what is in `dest` is
    /// not specified before [`quiet_on_stream`](Context::quiet_on_stream). `nvshmemx_getmem_nbi_on_stream`
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
}
