//! Puts and gets: contiguous, strided, of one element; blocking, non-blocking and on a stream; and what
//! completes them.
//!
//! A blocking operation is enqueued on a stream of the context's own and waited for with the timeout. It is
//! ordered behind what cudarc knows of the local buffer, and behind nothing else. The library's blocking
//! functions are not used: they wait without a timeout, also for work of other calls on its internal streams.
//!
//! | file | what |
//! |---|---|
//! | `put_get.rs`, `strided.rs`, `element.rs` | the operations |
//! | `ordering.rs` | quiet and fence |

mod element;
mod ordering;
mod put_get;
mod strided;

use super::context::Context;
use super::device::raw;
use super::memory::{Local, LocalMut, Shared, too_short};
use crate::buffer::loan::Loan;
use crate::buffer::stream::{GpuStream, Stream};
use crate::types::error::{Error, Result, UnsupportedError};
use cudarc::driver::CudaStream;
use cudarc::driver::sys::CUdeviceptr;
use phalanx_sys::nvshmem::stream_t;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// The ordering of a put or get, and when its local buffer can be used again.
#[derive(Clone, Copy)]
pub(crate) enum Mode<'s> {
    /// Ordered by the stream in both respects.
    OnStream(&'s Arc<CudaStream>),
    /// Ordered behind the stream's work; the buffer can be used after a quiet.
    Nbi(&'s Arc<CudaStream>),
    /// Ordered behind pending work on the buffer; the host waits.
    Blocking,
}

/// Checks and loans, before and after the call of the library.
impl Context {
    /// The stream for blocking operations.
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

    /// Enqueues an operation that reads a local buffer, with a loan of it.
    #[inline]
    pub(crate) fn reading<S: Local + ?Sized>(
        &self,
        mode: Mode<'_>,
        source: &S,
        enqueue: impl FnOnce(*const c_void, stream_t),
    ) -> Result<()> {
        let stream = self.stream_of(mode);
        let on_stream = Stream::gpu(GpuStream::from(stream));
        let loan = source.lend(&on_stream)?;
        enqueue(loan.span().start.cast_const().cast(), raw(stream));
        self.conclude(mode, Some(loan))
    }

    /// Enqueues an operation that writes a local buffer, with a loan of it.
    #[inline]
    fn writing<D: LocalMut + ?Sized>(
        &self,
        mode: Mode<'_>,
        dest: &mut D,
        enqueue: impl FnOnce(*mut c_void, stream_t),
    ) -> Result<()> {
        let stream = self.stream_of(mode);
        let on_stream = Stream::gpu(GpuStream::from(stream));
        let loan = dest.lend_mut(&on_stream)?;
        enqueue(loan.span().start.cast(), raw(stream));
        self.conclude(mode, Some(loan))
    }

    /// Ends an operation: a blocking one is waited for, and its loan returned.
    #[inline]
    pub(crate) fn conclude(&self, mode: Mode<'_>, loan: Option<Loan<'_>>) -> Result<()> {
        if let Mode::Blocking = mode {
            self.sync(self.host_stream())?;
            if let Some(loan) = loan {
                loan.give_back();
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

    /// The address of a PE's memory, which has to be mapped here: the library would end the process
    /// otherwise.
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
