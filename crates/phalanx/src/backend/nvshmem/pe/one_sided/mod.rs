//! Puts and gets: contiguous, strided, of one element; blocking, non-blocking and on a stream; and what completes them.
//!
//! A blocking operation is enqueued on a stream of the context's own and waited for with the timeout. It is ordered behind
//! what cudarc knows of the local buffer, and behind nothing else. The library's blocking functions are not used: they wait
//! without a timeout, also for work of other calls on its internal streams.
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
use crate::buffer::stream::{Loan, OnStream};
use crate::types::error::{Error, Result, UnsupportedError};
use cudarc::driver::CudaStream;
use cudarc::driver::sys::CUdeviceptr;
use phalanx_sys::nvshmem::stream_t;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

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
        let stream_loan = OnStream::new(stream);
        let lent = source.lend(&stream_loan)?;
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
        let stream_loan = OnStream::new(stream);
        let lent = dest.lend_mut(&stream_loan)?;
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
