//! [`Comm`]: one rank's end of a communicator, and [`View`]: the same with another deadline or stream.

use super::builder::Builder;
use super::lending::Lending;
use super::object::DEFAULT_OBJECT_LIMIT;
use super::raw::{Portable, RawCommunicator};
use super::request::Requests;
#[cfg(feature = "_gpu")]
use crate::buffer::collective_config::RawCollectiveConfig;
use crate::buffer::host::HostBuffer;
#[cfg(feature = "_gpu")]
use crate::buffer::stream::GpuStream;
use crate::buffer::stream::Stream;
use crate::contract::hosts::HostTopology;
use crate::contract::{Backend, BackendKind, Call, Departure, Operation, Shape};
use crate::start::NewComm;
use crate::types::dtype::Plain;
#[cfg(feature = "_gpu")]
use crate::types::error::{Error, UnsupportedError};
use crate::types::error::{Result, UsageError};
use crate::watch::Recorder;
use crate::watch::deadline::Limited;
use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

/// One rank's end of a communicator: a group of ranks that move data together.
///
/// Made by [`phalanx::init`](crate::init), [`phalanx::try_run`](crate::try_run) or [`Comm::builder`]. It can be
/// sent to another thread, but one thread at a time uses it (it is not `Sync`): the order of a rank's calls
/// is what the other ranks match.
///
/// # How it ends
/// [`finalize`](Comm::finalize) waits for all ranks; [`abort`](Comm::abort) fails the communicator for all
/// ranks at once. Dropping it leaves the communicator: a peer that still needs this rank gets an error that names it
/// ([`PeerEvent::Left`](crate::PeerEvent), or `Panicked` if the thread is panicking); what was sent before
/// still arrives.
///
/// # When a call fails
/// After an error for which [`Error::is_fatal`](crate::Error::is_fatal) holds, every rank gets the same error, now and from every
/// later call. The contents of output buffers of operations in progress are unspecified. The remaining ranks
/// can go on with [`shrink`](Comm::shrink).
#[doc(alias("MPI_Comm", "ncclComm_t", "process_group"))]
pub struct Comm {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) requests: Arc<Requests>,
    pub(crate) stream: Stream,
    pub(crate) recorder: Arc<Recorder>,
    shape: Shape,
    /// Deadline override of a view; `None` means the communicator's.
    pub(crate) deadline: Option<Duration>,
    /// Whether this is a [`View`]: dropping one does not leave the communicator.
    is_view: bool,
    /// In [`try_run`](crate::try_run): whether a communicator of this rank has failed because of another rank.
    pub(super) lost_peer: Option<Arc<AtomicBool>>,
    /// How much symmetric memory was allocated, by number.
    memories: Arc<AtomicU32>,
    /// No `Cell`: the compiler names `one_thread_at_a_time` where a communicator is shared.
    pub(super) object_limit: AtomicUsize,
    one_thread_at_a_time: PhantomData<Cell<()>>,
}

impl From<NewComm> for Comm {
    fn from(new: NewComm) -> Comm {
        Comm::new(new.backend, new.name)
    }
}

impl Comm {
    /// `name` identifies the communicator in flight records; it is the same on all its ranks.
    pub(crate) fn new(backend: Arc<dyn Backend>, name: String) -> Comm {
        let shape = Shape { rank: backend.rank(), world_size: backend.world_size() };
        backend.set_name(&name);
        let recorder = Recorder::new(backend.kind(), name, shape.rank, shape.world_size);
        recorder.set_members(&backend);
        let requests = Arc::new(Requests::new(backend.clone(), recorder.clone()));
        let stream = backend.stream();
        Comm {
            backend,
            requests,
            stream,
            recorder,
            shape,
            deadline: None,
            is_view: false,
            lost_peer: None,
            memories: Arc::default(),
            object_limit: AtomicUsize::new(DEFAULT_OBJECT_LIMIT),
            one_thread_at_a_time: PhantomData,
        }
    }

    /// A communicator that is made of this one.
    pub(crate) fn derived(&self, backend: Arc<dyn Backend>, name: String) -> Comm {
        let mut derived = Comm::new(backend, name);
        derived.lost_peer = self.lost_peer.clone();
        derived
    }

    /// Makes a [`Builder`]: the settings of a new communicator.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// This rank's number, from 0.
    #[doc(alias("MPI_Comm_rank", "ncclCommUserRank", "get_rank"))]
    #[inline]
    pub fn rank(&self) -> usize {
        self.shape.rank
    }

    /// The number of ranks.
    #[doc(alias("MPI_Comm_size", "ncclCommCount", "get_world_size"))]
    #[inline]
    pub fn world_size(&self) -> usize {
        self.shape.world_size
    }

    /// Which backend carries the data.
    pub fn backend(&self) -> BackendKind {
        self.backend.kind()
    }

    /// Which ranks share a host, as found when the communicator was made.
    pub fn host_topology(&self) -> HostTopology {
        self.backend.host_topology()
    }

    /// The deadline of each wait; a longer one is an error.
    pub fn timeout(&self) -> Duration {
        self.deadline.unwrap_or_else(|| self.backend.timeout())
    }

    /// Changes [`timeout`](Comm::timeout) for this rank's calls from now on; [`within`](Comm::within) gives single
    /// operations a deadline of their own.
    pub fn set_timeout(&self, timeout: Duration) {
        self.backend.set_timeout(timeout);
    }

    /// This communicator with another deadline for the operations that are called or started through the view.
    ///
    /// ```
    /// # fn main() -> phalanx::Result<()> {
    /// # use std::time::Duration;
    /// phalanx::try_run(2, |comm| comm.within(Duration::from_secs(5)).barrier())?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// The ranks need not agree on the deadline: the first that passes fails the operation for all.
    pub fn within(&self, timeout: Duration) -> View<'_> {
        View::of(self, self.stream.clone(), Some(timeout))
    }

    /// This communicator with this stream and this deadline.
    pub(crate) fn view(&self, stream: Stream, deadline: Option<Duration>) -> View<'_> {
        View::of(self, stream, deadline)
    }

    /// Applies the view's deadline to this thread's waits while the value lives.
    #[inline]
    pub(crate) fn limited(&self) -> Option<Limited> {
        Limited::to(self.deadline)
    }

    /// The number of new symmetric memory, from 1: the same on all ranks.
    pub(crate) fn next_memory(&self) -> u32 {
        self.memories.fetch_add(1, Ordering::Relaxed) + 1
    }

    #[inline]
    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    /// Carries out a checked call, after the requests that were started before it.
    #[inline(always)]
    pub(crate) fn run_call(&self, call: &Call<'_>) -> Result<()> {
        self.requests.wait_for_collectives();
        let record = self.recorder.open(call);
        let begun = || self.recorder.begun(record);
        let _limited = self.limited();
        let lending = Lending::begin(&*self.backend);
        // SAFETY: `checks.rs` has checked the call against its buffers, which are borrowed by the method
        // that called this; `Comm` is not `Sync` and no job is under way, so no other thread is inside.
        let result = unsafe { self.backend.recorded_collective(call, &begun) };
        lending.end();
        self.recorder.end(record, result)
    }

    /// Waits until this rank's operations are complete: started ones (`start_…`), and those on GPU memory. Others are complete
    /// when they return.
    ///
    /// The usual deadline applies: a started receive needs its message. The error of a started collective is also
    /// answered by its [`wait`](crate::Request::wait). A communicator that has failed answers its failure, as in every call.
    #[doc(alias("ncclCommGetAsyncError", "synchronize"))]
    pub fn sync(&self) -> Result<()> {
        self.requests.wait_for_collectives();
        let _limited = self.limited();
        self.recorder.noted(self.backend.sync())
    }

    /// Allocates `len` zeros of the host memory in which operations are fastest.
    ///
    /// On the host backend the ranks share it, so nothing is copied in and out. On GPUs it is page-locked, and copied to the
    /// GPU and back like any host memory. Use GPU memory there: a `CudaSlice`, or registered and symmetric memory of
    /// `comm.nccl()?.alloc` and `comm.nvshmem()?.alloc`.
    #[doc(alias = "MPI_Alloc_mem")]
    pub fn alloc<T: Plain>(&self, len: usize) -> Result<HostBuffer<T>> {
        let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| *bytes <= isize::MAX as usize);
        let bytes = bytes.ok_or_else(|| UsageError::Overflow {
            operation: "alloc",
            what: "the length in bytes",
            value: format!("{len} × {}", size_of::<T>()),
            limit: isize::MAX.to_string(),
        })?;
        Ok(HostBuffer::new(self.backend.alloc(bytes)?, len))
    }

    /// Ends the communicator on all ranks together: waits until all of them call this and all requests are complete.
    ///
    /// The usual deadline applies; the error names the missing ranks.
    #[doc(alias("MPI_Finalize", "ncclCommFinalize", "ncclCommDestroy", "destroy_process_group"))]
    pub fn finalize(self) -> Result<()> {
        self.sync()?;
        self.run_call(&Call::empty(Operation::Finalize))
    }

    /// Switches to a stream of its own, if the backend has streams.
    pub(crate) fn make_portable(&mut self) {
        #[cfg(feature = "_gpu")]
        match self.backend.make_portable() {
            None => {}
            Some(Ok(stream)) => self.stream = stream,
            Some(Err(error)) => {
                crate::os::log::warn!("the communicator stays on the default stream: {error}")
            }
        }
    }

    /// Fails the communicator for every rank: all calls answer [`Error::Aborted`](crate::Error::Aborted) with this rank's number.
    #[doc(alias("MPI_Abort", "ncclCommAbort", "ncclCommRevoke"))]
    pub fn abort(self) {
        self.backend.abort();
    }

    /// This communicator with another stream (cudarc's `Arc<CudaStream>`, or a [`hip::Stream`](crate::gpu::hip::Stream)):
    /// operations on GPU memory are enqueued there.
    ///
    /// Operations of one communicator run in the order of the calls, whatever their streams. The stream must belong to the
    /// communicator's GPU; communicators of host memory ignore it. It can be dropped with operations under way: the
    /// communicator keeps it until they are complete.
    ///
    /// The operation waits for a buffer's users on other streams, and they wait for the operation. One case needs care, since
    /// cudarc remembers only the last of several readers. If the program's own kernel or copy on another stream reads the
    /// buffer after an operation has read it, cudarc forgets the operation. Before the buffer is then overwritten or dropped,
    /// make one of these streams wait for the other (`CudaStream::join`), or wait for the operation.
    ///
    /// # Errors
    /// [`UsageError::Memory`] for a stream of another GPU; [`UsageError::Setting`] for the per-thread default stream, which
    /// differs in the threads that wait for it.
    #[cfg(feature = "_gpu")]
    pub fn on<'s, S: 's>(&self, stream: &'s S) -> Result<View<'_>>
    where
        GpuStream: From<&'s S>,
    {
        let stream = GpuStream::from(stream);
        let adopted = self.backend.adopt(&stream)?;
        let own = self.stream.clone();
        Ok(self.with_stream(if adopted { own.with_stream(stream) } else { own }))
    }

    /// This communicator for collectives on GPU memory that run beside a computation, on [another stream](Comm::on): they go by NCCL and
    /// not by phalanx's own kernels, which are faster alone, but take nearly all processors of the GPU. All ranks give an operation the
    /// same; [checked](crate::Builder::check), a difference is an error. A communicator of another backend is as before.
    ///
    /// ```no_run
    /// # fn main() -> phalanx::Result<()> {
    /// # use phalanx::ReduceOp;
    /// # let comm = phalanx::init()?;
    /// let computing = comm.cuda_stream()?;
    /// let side = computing.context().new_stream()?;
    /// let mut gradients = computing.alloc_zeros::<f32>(1 << 20)?;
    /// comm.on(&side)?.beside_computing().all_reduce_in_place(&mut gradients, ReduceOp::Sum)?;
    /// // What is enqueued on `computing` now does not wait, unless it uses the gradients.
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "_gpu")]
    pub fn beside_computing(&self) -> View<'_> {
        let stream = self.stream.clone();
        self.with_stream(match stream.config() {
            Some(_) => stream,
            None => stream.configured(RawCollectiveConfig::of_library()),
        })
    }

    #[cfg(feature = "_gpu")]
    pub(crate) fn requests(&self) -> &Requests {
        &self.requests
    }

    /// Records `f` as this call in the flight recorder.
    #[cfg(feature = "_gpu")]
    pub(crate) fn recorded<R>(&self, call: &Call<'_>, f: impl FnOnce() -> Result<R>) -> Result<R> {
        let record = self.recorder.begin(call);
        self.recorder.end(record, f())
    }

    #[cfg(feature = "_gpu")]
    pub(crate) fn with_stream(&self, stream: Stream) -> View<'_> {
        View::of(self, stream, self.deadline)
    }

    /// The stream on which operations on GPU memory are enqueued. cudarc allocates on it: `comm.cuda_stream()?.alloc_zeros(…)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) if the rank has no GPU of NVIDIA's.
    #[cfg(feature = "cuda")]
    pub fn cuda_stream(&self) -> Result<&Arc<cudarc::driver::CudaStream>> {
        self.stream.cuda_stream().ok_or_else(|| match self.backend() {
            BackendKind::Rccl => self.no_stream("CUDA", "take its `hip_stream`"),
            _ => self.no_stream("CUDA", &with_gpus("nccl")),
        })
    }

    /// The stream on which operations on GPU memory are enqueued. It allocates: `comm.hip_stream()?.alloc_zeros(…)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) if the rank has no GPU of AMD's.
    #[cfg(feature = "rccl")]
    pub fn hip_stream(&self) -> Result<&crate::gpu::hip::Stream> {
        self.stream.hip_stream().ok_or_else(|| match self.backend() {
            BackendKind::Nccl | BackendKind::Nvshmem => self.no_stream("HIP", "take its `cuda_stream`"),
            _ => self.no_stream("HIP", &with_gpus("rccl")),
        })
    }

    #[cfg(feature = "_gpu")]
    #[cold]
    fn no_stream(&self, kind: &str, remedy: &str) -> Error {
        Error::from(UnsupportedError {
            what: format!("a {kind} stream"),
            why: format!("the communicator is of the backend {}", self.backend()),
            remedy: remedy.to_owned(),
        })
    }

    /// The number of this rank's GPU in its process; `None` without a GPU.
    #[cfg(feature = "_gpu")]
    pub fn gpu(&self) -> Option<usize> {
        self.backend.gpu()
    }

    /// Converts to the trait of raw pointers, for runtimes that hold pointers as `u64`.
    pub fn into_raw_communicator(self) -> Arc<dyn RawCommunicator> {
        Arc::new(Portable::new(self))
    }
}

/// How to get a communicator of a backend on GPUs.
#[cfg(feature = "_gpu")]
fn with_gpus(backend: &str) -> String {
    format!(
        "give each rank a GPU, and choose the backend {backend}: by Builder::backend or PHALANX_BACKEND; `phalanx doctor` says \
         whether it works"
    )
}

impl Drop for Comm {
    fn drop(&mut self) {
        if self.is_view {
            return;
        }
        let panicking = std::thread::panicking();
        if panicking {
            self.recorder.panicked();
            // Started operations may wait for peers that wait for this rank.
            self.backend.depart(Departure::Panicked);
        }
        // Bounded: each job ends by its own deadline.
        self.requests.stop();
        self.note_lost_peer();
        if !panicking {
            self.backend.depart(Departure::Left);
        }
    }
}

/// A communicator with another deadline, or another stream: see [`Comm::within`] and `Comm::on` (on GPUs).
#[derive(Debug)]
pub struct View<'a> {
    /// Has `is_view` set.
    comm: Comm,
    /// Keeps the view on the thread of its communicator.
    of: PhantomData<&'a Comm>,
}

impl<'a> View<'a> {
    fn of(comm: &'a Comm, stream: Stream, deadline: Option<Duration>) -> View<'a> {
        let comm = Comm {
            backend: comm.backend.clone(),
            requests: comm.requests.clone(),
            stream: stream.within(deadline),
            recorder: comm.recorder.clone(),
            shape: comm.shape,
            deadline,
            is_view: true,
            lost_peer: comm.lost_peer.clone(),
            memories: comm.memories.clone(),
            object_limit: AtomicUsize::new(comm.object_limit()),
            one_thread_at_a_time: PhantomData,
        };
        View { comm, of: PhantomData }
    }
}

impl std::ops::Deref for View<'_> {
    type Target = Comm;

    fn deref(&self) -> &Comm {
        &self.comm
    }
}

impl std::fmt::Debug for Comm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Comm")
            .field("backend", &self.backend())
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .finish()
    }
}
