//! Where an operation runs ([`Lane`]), and a buffer's memory for the time it is used there ([`Lent`]).

use crate::backend::{Span, Stream};
use std::marker::PhantomData;

#[cfg(feature = "cuda")]
use cudarc::driver::CudaStream;
#[cfg(feature = "cuda")]
use std::sync::Arc;

/// Where an operation runs: on the host, which is complete when the call returns, or on a stream of a GPU.
///
/// A communicator on GPUs has a stream of its own; [`Comm::on`](crate::Comm::on) chooses another.
#[derive(Debug, Clone, Default)]
pub struct Lane {
    #[cfg(feature = "cuda")]
    stream: Option<Arc<CudaStream>>,
}

impl Lane {
    /// The host.
    pub(crate) fn host() -> Lane {
        Lane::default()
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn cuda(stream: Arc<CudaStream>) -> Lane {
        Lane { stream: Some(stream) }
    }

    /// The GPU's stream; `None` on the host.
    #[cfg(feature = "cuda")]
    pub fn cuda_stream(&self) -> Option<&Arc<CudaStream>> {
        self.stream.as_ref()
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn stream(&self) -> Stream {
        Stream(self.stream.as_ref().map_or(std::ptr::null_mut(), |stream| stream.cu_stream().cast()))
    }

    #[cfg(not(feature = "cuda"))]
    #[inline]
    pub(crate) fn stream(&self) -> Stream {
        Stream(std::ptr::null_mut())
    }
}

/// A buffer's memory, lent to an operation. When it is dropped, the operation has been enqueued: whoever uses
/// the buffer afterwards is ordered behind it.
#[derive(Debug)]
pub struct Lent<'a> {
    span: Span,
    #[cfg(feature = "cuda")]
    _order: Option<crate::buffer::cuda::Order<'a>>,
    buffer: PhantomData<&'a ()>,
}

impl<'a> Lent<'a> {
    /// Host memory.
    #[inline]
    pub fn host(start: *mut u8) -> Lent<'a> {
        Lent {
            span: Span::host(start),
            #[cfg(feature = "cuda")]
            _order: None,
            buffer: PhantomData,
        }
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn device(address: u64, order: Option<crate::buffer::cuda::Order<'a>>) -> Lent<'a> {
        Lent { span: Span::device(address), _order: order, buffer: PhantomData }
    }

    #[inline]
    pub(crate) fn span(&self) -> Span {
        self.span
    }
}
