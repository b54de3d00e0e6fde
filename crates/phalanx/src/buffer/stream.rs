//! [`Stream`]: where an operation runs. [`GpuStream`]: a stream of CUDA or HIP.

#[cfg(feature = "cuda")]
use crate::types::error::Result;
use crate::types::memory::RawStream;

#[cfg(feature = "_gpu")]
use super::collective_config::RawCollectiveConfig;
#[cfg(feature = "rccl")]
use crate::gpu::hip;
#[cfg(feature = "cuda")]
use cudarc::driver::CudaStream;
#[cfg(feature = "_gpu")]
use std::sync::Arc;
use std::time::Duration;

/// Where an operation runs: on the host, or on a stream of a GPU.
///
/// An operation on the host is complete when the call returns. An operation on a GPU's stream is enqueued there and
/// completes later. A communicator on GPUs has a stream of its own; `Comm::on` chooses another.
#[derive(Debug, Clone, Default)]
pub struct Stream {
    #[cfg(feature = "_gpu")]
    stream: Option<GpuStream>,
    /// Settings of the collectives on it.
    #[cfg(feature = "_gpu")]
    config: Option<Arc<RawCollectiveConfig>>,
    /// How operations on the host use CUDA memory, if the backend can.
    #[cfg(feature = "cuda")]
    cuda_access: Option<CudaAccess>,
}

/// Access to CUDA memory for an operation that runs on the host.
#[cfg(feature = "cuda")]
#[derive(Debug, Clone)]
pub(crate) struct CudaAccess {
    support: Arc<dyn CudaMemorySupport>,
    /// Deadline of this view; `None` means the communicator's.
    limit: Option<Duration>,
}

/// A backend whose operations run on the host and can use CUDA memory, such as a CUDA-aware MPI.
#[cfg(feature = "cuda")]
pub(crate) trait CudaMemorySupport: std::fmt::Debug + Send + Sync {
    /// An error if memory of this stream's GPU cannot be used.
    fn check(&self, stream: &Arc<CudaStream>) -> Result<()>;

    /// Waits until the stream's work is complete. The deadline is `limit`, or else the communicator's.
    fn wait(&self, stream: &Arc<CudaStream>, limit: Option<Duration>) -> Result<()>;
}

#[cfg(feature = "cuda")]
impl CudaAccess {
    pub fn check(&self, stream: &Arc<CudaStream>) -> Result<()> {
        self.support.check(stream)
    }

    pub fn wait(&self, stream: &Arc<CudaStream>) -> Result<()> {
        self.support.wait(stream, self.limit)
    }
}

impl Stream {
    /// The host.
    pub(crate) fn host() -> Stream {
        Stream::default()
    }

    #[cfg(feature = "_gpu")]
    pub(crate) fn gpu(stream: GpuStream) -> Stream {
        Stream { stream: Some(stream), ..Stream::default() }
    }

    /// The host, with operations that may be on CUDA memory.
    #[cfg(feature = "cuda")]
    pub(crate) fn host_with_cuda(support: Arc<dyn CudaMemorySupport>) -> Stream {
        Stream { cuda_access: Some(CudaAccess { support, limit: None }), ..Stream::default() }
    }

    /// This stream with another GPU stream, and the same settings.
    #[cfg(feature = "_gpu")]
    pub(crate) fn with_stream(self, stream: GpuStream) -> Stream {
        Stream { stream: Some(stream), ..self }
    }

    /// This stream with settings for its collectives.
    #[cfg(feature = "_gpu")]
    pub(crate) fn configured(self, config: Arc<RawCollectiveConfig>) -> Stream {
        Stream { config: Some(config), ..self }
    }

    #[cfg(feature = "_gpu")]
    #[inline(always)]
    pub(crate) fn config(&self) -> Option<&RawCollectiveConfig> {
        self.config.as_deref()
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn cuda_access(&self) -> Option<&CudaAccess> {
        self.cuda_access.as_ref()
    }

    /// This stream with another deadline for operations on the host.
    #[cfg(feature = "cuda")]
    pub(crate) fn within(self, limit: Option<Duration>) -> Stream {
        Stream {
            cuda_access: self.cuda_access.map(|cuda_access| CudaAccess { limit, ..cuda_access }),
            ..self
        }
    }

    #[cfg(not(feature = "cuda"))]
    pub(crate) fn within(self, _limit: Option<Duration>) -> Stream {
        self
    }

    pub(crate) fn is_host(&self) -> bool {
        #[cfg(feature = "_gpu")]
        return self.stream.is_none();
        #[cfg(not(feature = "_gpu"))]
        return true;
    }

    #[cfg(feature = "_gpu")]
    pub(crate) fn gpu_stream(&self) -> Option<&GpuStream> {
        self.stream.as_ref()
    }

    /// The stream of an NVIDIA GPU; `None` elsewhere.
    #[cfg(feature = "cuda")]
    #[inline]
    pub fn cuda_stream(&self) -> Option<&Arc<CudaStream>> {
        self.stream.as_ref().and_then(GpuStream::cuda)
    }

    /// The stream of an AMD GPU; `None` elsewhere.
    #[cfg(feature = "rccl")]
    #[inline]
    pub fn hip_stream(&self) -> Option<&hip::Stream> {
        self.stream.as_ref().and_then(GpuStream::hip)
    }

    #[cfg(feature = "_gpu")]
    #[inline]
    pub(crate) fn raw(&self) -> RawStream {
        self.stream.as_ref().map_or(RawStream::NONE, GpuStream::raw)
    }

    #[cfg(not(feature = "_gpu"))]
    #[inline]
    pub(crate) fn raw(&self) -> RawStream {
        RawStream(std::ptr::null_mut())
    }
}

/// A stream of a GPU: cudarc's `Arc<CudaStream>` for NVIDIA, a [`hip::Stream`] for AMD.
#[cfg(feature = "_gpu")]
#[derive(Debug, Clone)]
pub enum GpuStream {
    /// Of an NVIDIA GPU.
    #[cfg(feature = "cuda")]
    Cuda(Arc<CudaStream>),
    /// Of an AMD GPU.
    #[cfg(feature = "rccl")]
    Hip(hip::Stream),
}

#[cfg(feature = "_gpu")]
impl GpuStream {
    /// The stream of an NVIDIA GPU; `None` for another.
    #[cfg(feature = "cuda")]
    #[inline]
    pub fn cuda(&self) -> Option<&Arc<CudaStream>> {
        match self {
            GpuStream::Cuda(stream) => Some(stream),
            #[cfg(feature = "rccl")]
            GpuStream::Hip(_) => None,
        }
    }

    /// The stream of an AMD GPU; `None` for another.
    #[cfg(feature = "rccl")]
    #[inline]
    pub fn hip(&self) -> Option<&hip::Stream> {
        match self {
            GpuStream::Hip(stream) => Some(stream),
            #[cfg(feature = "cuda")]
            GpuStream::Cuda(_) => None,
        }
    }

    /// The C handle.
    #[inline]
    pub(crate) fn raw(&self) -> RawStream {
        RawStream(match self {
            #[cfg(feature = "cuda")]
            GpuStream::Cuda(stream) => stream.cu_stream().cast(),
            #[cfg(feature = "rccl")]
            GpuStream::Hip(stream) => stream.as_raw(),
        })
    }

    /// Whether this is the only handle. Synchronises with threads that dropped theirs.
    pub(crate) fn is_nobody_elses(&mut self) -> bool {
        match self {
            #[cfg(feature = "cuda")]
            GpuStream::Cuda(stream) => Arc::get_mut(stream).is_some(),
            #[cfg(feature = "rccl")]
            GpuStream::Hip(stream) => stream.is_nobody_elses(),
        }
    }

    pub(crate) fn describe(&self) -> String {
        let whose = match self {
            #[cfg(feature = "cuda")]
            GpuStream::Cuda(_) => "NVIDIA",
            #[cfg(feature = "rccl")]
            GpuStream::Hip(_) => "AMD",
        };
        format!("{whose} GPU {}", self.gpu())
    }

    /// The number of its GPU.
    pub fn gpu(&self) -> usize {
        match self {
            #[cfg(feature = "cuda")]
            GpuStream::Cuda(stream) => stream.context().ordinal(),
            #[cfg(feature = "rccl")]
            GpuStream::Hip(stream) => stream.device(),
        }
    }
}

#[cfg(feature = "cuda")]
impl From<&Arc<CudaStream>> for GpuStream {
    fn from(stream: &Arc<CudaStream>) -> GpuStream {
        GpuStream::Cuda(stream.clone())
    }
}

#[cfg(feature = "rccl")]
impl From<&hip::Stream> for GpuStream {
    fn from(stream: &hip::Stream) -> GpuStream {
        GpuStream::Hip(stream.clone())
    }
}
