//! [`Comm`]: one rank's communicator; making one, and how it ends.

use super::raw::{Portable, RawCommunicator};
use super::request::Requests;
use crate::buffer::host::HostBuffer;
#[cfg(feature = "cuda")]
use crate::buffer::stream::GpuStream;
use crate::buffer::stream::Stream;
use crate::contract::hosts::HostTopology;
use crate::contract::{Backend, BackendKind, Call, Departure, Operation, Shape, grown_name};
use crate::rendezvous::environment;
use crate::rendezvous::environment::Environment;
use crate::rendezvous::unique_id::{UniqueId, take_listener};
use crate::start::{self, NewComm, Settings};
use crate::types::dtype::Element;
use crate::types::error::{Error, Result, UsageError};
use crate::watch;
use crate::watch::Recorder;
use crate::watch::deadline::Limited;
use std::cell::Cell;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

/// One rank's end of a communicator: a group of ranks that move data together.
///
/// Made by [`phalanx::init`](crate::init), [`phalanx::run`](crate::run) or [`Comm::builder`]. It can be
/// sent to another thread, but one thread at a time uses it (it is not `Sync`): the order of a rank's calls
/// is what the other ranks match.
///
/// # How it ends
/// [`finalize`](Comm::finalize) waits for everybody; [`abort`](Comm::abort) fails the communicator for all
/// ranks at once. Dropping it leaves: a peer that still needs this rank gets an error that names it
/// ([`PeerEvent::Left`](crate::PeerEvent), or `Panicked` if the thread is panicking); what was sent before
/// still arrives.
///
/// # When a call fails
/// After an error for which [`Error::is_fatal`] holds, every rank gets the same verdict, and so does every
/// later call. What operations in progress had written to their output buffers is unspecified. The ranks that are
/// still there can go on with [`shrink`](Comm::shrink).
pub struct Comm {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) requests: Arc<Requests>,
    pub(crate) lane: Stream,
    pub(crate) recorder: Arc<Recorder>,
    shape: Shape,
    /// Of a view's operations, if it is not the communicator's.
    pub(crate) deadline: Option<Duration>,
    one_thread_at_a_time: PhantomData<Cell<()>>,
}

impl From<NewComm> for Comm {
    fn from(new: NewComm) -> Comm {
        Comm::new(new.backend, new.name)
    }
}

impl Comm {
    /// `name` is the communicator's in flight records: the same on all its ranks.
    pub(crate) fn new(backend: Arc<dyn Backend>, name: String) -> Comm {
        let shape = Shape { rank: backend.rank(), world_size: backend.world_size() };
        let recorder = Recorder::new(backend.kind(), name, shape.rank, shape.world_size);
        let requests = Arc::new(Requests::new(backend.clone(), recorder.clone()));
        let lane = backend.lane();
        Comm { backend, requests, lane, recorder, shape, deadline: None, one_thread_at_a_time: PhantomData }
    }

    /// Settings for a new communicator.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// This rank's number, from 0.
    #[inline]
    pub fn rank(&self) -> usize {
        self.shape.rank
    }

    /// How many ranks there are.
    #[inline]
    pub fn world_size(&self) -> usize {
        self.shape.world_size
    }

    /// What carries the data.
    pub fn backend(&self) -> BackendKind {
        self.backend.kind()
    }

    /// Which ranks share a host, as the ranks found out when they met.
    pub fn host_topology(&self) -> HostTopology {
        self.backend.host_topology()
    }

    /// How long a wait may take before it is an error.
    pub fn timeout(&self) -> Duration {
        self.deadline.unwrap_or_else(|| self.backend.timeout())
    }

    /// Changes [`timeout`](Comm::timeout) for this rank's calls from now on; [`within`](Comm::within) gives single
    /// operations one of their own.
    pub fn set_timeout(&self, timeout: Duration) {
        self.backend.set_timeout(timeout);
    }

    /// This communicator with another deadline: for the waits of what is called, or started, through it.
    ///
    /// ```
    /// # fn main() -> phalanx::Result<()> {
    /// # use std::time::Duration;
    /// phalanx::run(2, |comm| comm.within(Duration::from_secs(5)).barrier())?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// The ranks need not agree on it: the first deadline that passes fails the operation for all.
    pub fn within(&self, timeout: Duration) -> View<'_> {
        View::of(self, self.lane.clone(), Some(timeout))
    }

    /// The deadline of what this thread does as long as the value lives.
    #[inline]
    pub(crate) fn limited(&self) -> Option<Limited> {
        Limited::to(self.deadline)
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
        // SAFETY: `collective.rs` has checked the call against its buffers, which are borrowed by the method
        // that called this; `Comm` is not `Sync` and no job is under way, so no other thread is inside.
        self.recorder.end(record, unsafe { self.backend.recorded_collective(call, &begun) })
    }

    /// Waits until this rank's operations are complete: those that were started with `start_…`, and those on
    /// GPU memory; others are complete when they return. The wait has the deadline of any other: a receive that was started
    /// needs its message. An error of a collective that was started is its [`wait`](crate::Request::wait)'s to tell, too;
    /// of a communicator that has failed this answers the verdict, as every call does.
    pub fn sync(&self) -> Result<()> {
        self.requests.wait_for_collectives();
        let _limited = self.limited();
        self.backend.sync()
    }

    /// Makes communicators of parts of this one: one for each colour.
    ///
    /// Collective. Ranks with the same colour come together, ordered by `key` and then by their rank here;
    /// `None` leaves a rank out (it gets `Ok(None)`). The new communicators are independent of this one: each has its
    /// own order of calls and its own verdict. `ncclCommSplit`, `MPI_Comm_split`.
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Comm>> {
        self.requests.wait_for_collectives();
        let record = self.recorder.begin(&Call::empty(Operation::Split));
        let limited = self.limited();
        // SAFETY: as in `run_call`.
        let part = self.recorder.end(record, unsafe { self.backend.split(color, key) });
        drop(limited);
        let name = self.recorder.child_name(color.unwrap_or(0));
        self.recorder.skip(self.backend.collectives_of_split() - 1);
        Ok(part?.map(|backend| Comm::new(backend.into(), name)))
    }

    /// A new communicator of the ranks that are still there, in the order of their ranks here: to go on after
    /// a failure. `MPIX_Comm_shrink`, `ncclCommShrink`.
    ///
    /// Every rank that wants to go on calls it. Ranks that died, left or panicked are out, and so are those whom
    /// the verdict (a [`PeerError`](crate::PeerError) or [`TimeoutError`](crate::TimeoutError)) names, even if they
    /// come back: they get [`Error::LeftBehind`]. For all others it
    /// waits, up to the [deadline](Comm::timeout) (and again for each rank that is lost meanwhile); who has not
    /// come by then is out, too. All ranks of the new communicator agree on who they are.
    ///
    /// This communicator stays failed (if it had not failed, it works on); drop it when its buffers are no
    /// longer needed. What operations in progress had written to their output buffers is unspecified, and a
    /// rank may have completed an operation that failed on another: begin again at a point that all ranks have, a
    /// checkpoint or the last step that was agreed on.
    pub fn shrink(&self) -> Result<Comm> {
        self.requests.wait_for_collectives();
        let limited = self.limited();
        let (backend, number) = self.backend.shrink()?;
        drop(limited);
        Ok(Comm::new(backend.into(), format!("{}/shrink{number}", self.recorder.name())))
    }

    /// A new communicator of these ranks, with the same numbers, and of `joiners` processes that come in with
    /// [`phalanx::join`](crate::join), in the order in which they come. `ncclCommGrow`.
    ///
    /// Collective, with the same number on every rank. It waits for the joiners, up to the [deadline](Comm::timeout); if
    /// they do not come, the error names those that are missing, and this communicator works on, as it does if
    /// all have come. The ranks are processes of one host.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] names the ranks that did not come; [`UsageError::WorldSize`] for more than 512 ranks;
    /// [`Error::Unsupported`] for threads, a world of one, and MPI.
    pub fn grow(&self, joiners: usize) -> Result<Comm> {
        self.requests.wait_for_collectives();
        // What is refused at once counts nowhere.
        self.backend.check_growth(joiners)?;
        let record = self.recorder.begin(&Call::empty(Operation::Grow));
        let limited = self.limited();
        // SAFETY: as in `run_call`.
        let grown = self.recorder.end(record, unsafe { self.backend.grow(joiners) });
        drop(limited);
        self.recorder.skip(self.backend.collectives_of_grow() - 1);
        let (backend, number) = grown?;
        Ok(Comm::new(backend.into(), grown_name(number)))
    }

    /// [`shrink`](Comm::shrink), and [`grow`](Comm::grow) to as many ranks as there are here: a joiner comes in the place of
    /// each rank that is gone. The survivors keep their order and come first.
    pub fn rebuild(&self) -> Result<Comm> {
        let survivors = self.shrink()?;
        match self.world_size() - survivors.world_size() {
            0 => Ok(survivors),
            joiners => survivors.within(self.timeout()).grow(joiners),
        }
    }

    /// The host memory in which operations are fastest. On the backend host it is shared by the ranks of the host, so that
    /// nothing is copied in and out. On GPUs it is page-locked, and copied to the GPU and back like any host memory: there the
    /// memory to use is the GPU's, a `CudaSlice`, or registered and symmetric memory of `comm.nccl()?.alloc` and
    /// `comm.nvshmem()?.alloc`. `len` elements, zero.
    pub fn alloc<T: Element>(&self, len: usize) -> Result<HostBuffer<T>> {
        let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| *bytes <= isize::MAX as usize);
        let bytes = bytes.ok_or_else(|| UsageError::Overflow {
            operation: "alloc",
            what: "the length in bytes",
            value: format!("{len} × {}", size_of::<T>()),
            limit: isize::MAX.to_string(),
        })?;
        Ok(HostBuffer::new(self.backend.alloc(bytes)?, len))
    }

    /// Leaves together: waits until all ranks have come here and all requests are complete. Nothing can be
    /// called afterwards.
    ///
    /// The wait has the deadline of any other; an error says who did not come.
    pub fn finalize(self) -> Result<()> {
        self.sync()?;
        self.run_call(&Call::empty(Operation::Finalize))
    }

    /// Moves to a stream of its own, if there are streams.
    pub(crate) fn make_portable(&mut self) {
        #[cfg(feature = "cuda")]
        match self.backend.make_portable() {
            None => {}
            Some(Ok(lane)) => self.lane = lane,
            Some(Err(error)) => tracing::warn!("the communicator stays on the default stream: {error}"),
        }
    }

    /// Gives up this handle without leaving the communicator.
    fn disband(self) {
        let this = ManuallyDrop::new(self);
        // SAFETY: each field is taken once, and `this` is not dropped.
        let _dropped = unsafe {
            (
                std::ptr::read(&raw const this.backend),
                std::ptr::read(&raw const this.requests),
                std::ptr::read(&raw const this.lane),
                std::ptr::read(&raw const this.recorder),
            )
        };
    }

    /// Fails the communicator for every rank: their calls answer [`Error::Aborted`] with this rank's number.
    pub fn abort(self) {
        self.backend.abort();
    }

    /// This communicator with another stream (cudarc's `Arc<CudaStream>`, or a [`hip::Stream`](crate::gpu::hip::Stream)):
    /// operations on GPU memory are enqueued there.
    ///
    /// Operations of one communicator are carried out in the order of the calls, whatever their streams. The
    /// stream has to be one of the communicator's GPU; communicators of host memory ignore it. It can be dropped with operations under way:
    /// the communicator has it, too, until they are complete.
    ///
    /// A buffer's users on other streams wait for the operation, and it for them. Of several readers cudarc remembers the last one: an
    /// operation that reads remembers those before it (what comes after it on its stream waits for them, too), but a kernel or a copy of
    /// the program's that reads the same buffer afterwards, on another stream, makes cudarc forget the operation. Who then overwrites or
    /// drops the buffer makes one of these streams wait for the other before (`CudaStream::join`), or waits for the operation.
    ///
    /// # Errors
    /// [`UsageError::Memory`] for a stream of another GPU; [`UsageError::Setting`] for the per-thread default stream, which is
    /// another one in the threads that wait for it.
    #[cfg(feature = "cuda")]
    pub fn on<'s, S: 's>(&self, stream: &'s S) -> Result<View<'_>>
    where
        GpuStream: From<&'s S>,
    {
        let mut lane = self.lane.clone();
        let stream = GpuStream::from(stream);
        if self.backend.adopt(&stream)? {
            lane = lane.with_stream(stream);
        }
        Ok(self.with_lane(lane))
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn requests(&self) -> &Requests {
        &self.requests
    }

    /// Carries out what counts as a call, and records it.
    #[cfg(feature = "cuda")]
    pub(crate) fn recorded<R>(&self, call: &Call<'_>, f: impl FnOnce() -> Result<R>) -> Result<R> {
        let record = self.recorder.begin(call);
        self.recorder.end(record, f())
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn with_lane(&self, lane: Stream) -> View<'_> {
        View::of(self, lane, self.deadline)
    }

    /// The stream on which operations on GPU memory are enqueued; `None` without an NVIDIA GPU. cudarc allocates on it:
    /// `comm.cuda_stream().unwrap().alloc_zeros(…)`.
    #[cfg(feature = "cuda")]
    pub fn cuda_stream(&self) -> Option<&Arc<cudarc::driver::CudaStream>> {
        self.lane.cuda_stream()
    }

    /// The stream on which operations on GPU memory are enqueued; `None` without an AMD GPU. It allocates:
    /// `comm.hip_stream().unwrap().alloc_zeros(…)`.
    #[cfg(feature = "cuda")]
    pub fn hip_stream(&self) -> Option<&crate::gpu::hip::Stream> {
        self.lane.hip_stream()
    }

    /// The number of this rank's GPU in its process; `None` without.
    #[cfg(feature = "cuda")]
    pub fn gpu(&self) -> Option<usize> {
        self.backend.gpu()
    }

    /// This rank's end as the portable trait, for runtimes that hold pointers as `u64`.
    pub fn into_raw_communicator(self) -> Arc<dyn RawCommunicator> {
        Arc::new(Portable::new(self))
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        let panicking = std::thread::panicking();
        if panicking {
            self.recorder.panicked();
            // What was started may wait for peers that wait for this rank.
            self.backend.depart(Departure::Panicked);
        }
        // Bounded: each job ends by its own deadline, at the latest.
        self.requests.stop();
        if !panicking {
            self.backend.depart(Departure::Left);
        }
    }
}

/// A communicator with another deadline, or another stream: see [`Comm::within`] and `Comm::on` (on GPUs).
#[derive(Debug)]
pub struct View<'a> {
    /// Not dropped: the communicator ends with the one it was made from.
    comm: ManuallyDrop<Comm>,
    /// Keeps it on that one's thread.
    of: PhantomData<&'a Comm>,
}

impl<'a> View<'a> {
    fn of(comm: &'a Comm, lane: Stream, deadline: Option<Duration>) -> View<'a> {
        let comm = Comm {
            backend: comm.backend.clone(),
            requests: comm.requests.clone(),
            lane: lane.within(deadline),
            recorder: comm.recorder.clone(),
            shape: comm.shape,
            deadline,
            one_thread_at_a_time: PhantomData,
        };
        View { comm: ManuallyDrop::new(comm), of: PhantomData }
    }
}

impl std::ops::Deref for View<'_> {
    type Target = Comm;

    fn deref(&self) -> &Comm {
        &self.comm
    }
}

impl Drop for View<'_> {
    fn drop(&mut self) {
        // SAFETY: dropped once, here, and not used afterwards.
        let comm = unsafe { ManuallyDrop::take(&mut self.comm) };
        comm.disband();
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

/// Settings for a new communicator; what is not set comes from the environment (see the table in the
/// crate's documentation) or is the default.
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// use std::time::Duration;
/// let sizes = phalanx::Comm::builder()
///     .timeout(Duration::from_secs(10))
///     .run(2, |comm| comm.world_size())?;
/// assert_eq!(sizes, [2, 2]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Default)]
pub struct Builder {
    timeout: Option<Duration>,
    backend: Option<BackendKind>,
    gpu: Option<usize>,
    check: Option<bool>,
    place: Option<(usize, usize, String)>,
    store: Option<Meeting>,
    #[cfg(feature = "cuda")]
    nccl: crate::backend::nccl::Config,
}

/// Where ranks meet, and by what they know each other.
#[derive(Clone)]
struct Meeting {
    address: String,
    token: String,
    /// Whether the process of rank 0 listens there already.
    is_begun: bool,
}

impl std::fmt::Debug for Meeting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Meeting").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Builder {
    /// How long any wait may take; also for the ranks to find each other. Default: `PHALANX_TIMEOUT`
    /// (seconds), else [`DEFAULT_TIMEOUT`].
    pub fn timeout(mut self, timeout: Duration) -> Builder {
        self.timeout = Some(timeout);
        self
    }

    /// What carries the data. Default: `PHALANX_BACKEND`, else NCCL or RCCL if each rank has a GPU, else the host, else
    /// solo for one rank.
    pub fn backend(mut self, backend: BackendKind) -> Builder {
        self.backend = Some(backend);
        self
    }

    /// Which GPU this rank uses, as the process numbers those it sees. Default: one that no other rank of its host has, of those that its
    /// process sees; the one with the rank's number there, if it can be had.
    pub fn gpu(mut self, gpu: usize) -> Builder {
        self.gpu = Some(gpu);
        self
    }

    /// Whether the ranks compare every collective (operation, count, type, reduction, root) before it moves anything:
    /// a difference is then the same [`MismatchError`](crate::MismatchError) on all ranks. Default: `PHALANX_CHECK=1`.
    ///
    /// On NCCL and MPI it costs a meeting of the ranks for each operation, at its call: all ranks call the collectives of several
    /// communicators in one order, in a group, too. On NCCL the two ends of a message, and of a block of an
    /// `all_to_all_v`, compare its type and count, too, if all ranks are on one host: a `send` then waits until the peer has come to
    /// its `recv`, and messages that go together (of a group, or posted before a wait or an
    /// [`is_done`](crate::Request::is_done)) wait until all their peers have. NVSHMEM's backend always compares. The host's does,
    /// with this setting or without, but ranks that exchange nothing in an operation (two that are both the root of a broadcast)
    /// notice the difference in the next.
    pub fn check(mut self, check: bool) -> Builder {
        self.check = Some(check);
        self
    }

    /// Which rank this process is, of how many, for a program with a launcher of its own: what other launchers' variables say is
    /// then not looked at. The ranks of one host find each other by `job`: any text that they have in common with each other and
    /// with no other job, such as a random number that the launcher gives them. Ranks that may be on several hosts need a
    /// [`store`](Builder::store), too.
    ///
    /// Where the ranks have nothing in common yet, one of them makes a [`unique_id`](Builder::unique_id).
    ///
    /// ```
    /// # fn main() -> phalanx::Result<()> {
    /// let comm = phalanx::Comm::builder().place(0, 1, "a job of one").init()?;
    /// assert_eq!((comm.rank(), comm.world_size()), (0, 1));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`init`](Builder::init) and [`join`](Builder::join) answer [`UsageError::Setting`](crate::UsageError::Setting) if `rank`
    /// is not below `world_size`, there are more than 512 ranks, or `job` is empty.
    pub fn place(mut self, rank: usize, world_size: usize, job: &str) -> Builder {
        self.place = Some((rank, world_size, job.to_owned()));
        self
    }

    /// Where the ranks of several hosts meet, if the program gives them a [`place`](Builder::place): rank 0 listens at `address`
    /// (`host:port`), the others connect to it. `token` is a secret of at least 16 characters, the same for all ranks
    /// (docs/security.md in the repository). Which ranks share a host is found out there. As `PHALANX_STORE` and
    /// `PHALANX_TOKEN`.
    pub fn store(mut self, address: &str, token: &str) -> Builder {
        self.store = Some(Meeting { address: address.to_owned(), token: token.to_owned(), is_begun: false });
        self
    }

    /// Which rank this process is, of how many, and whom it meets: those with the same [`UniqueId`], on one host or on several, as the
    /// id was made. Takes the place of [`place`](Builder::place) and [`store`](Builder::store). It is what `ncclCommInitRank` does;
    /// here it works for every backend, and ranks that do not come are named.
    ///
    /// # Errors
    /// [`init`](Builder::init) answers what it does for [`place`](Builder::place); at rank 0 also
    /// [`UsageError::Setting`](crate::UsageError::Setting) for an id of [`UniqueId::listen`] that another process made, or that was used before.
    pub fn unique_id(mut self, id: &UniqueId, rank: usize, world_size: usize) -> Builder {
        self.place = Some((rank, world_size, id.job()));
        self.store =
            id.store().map(|(address, token)| Meeting { address: address.to_owned(), token, is_begun: true });
        self
    }

    /// Settings of NCCL's and RCCL's communicators.
    #[cfg(feature = "cuda")]
    pub fn nccl(mut self, config: crate::backend::nccl::Config) -> Builder {
        self.nccl = config;
        self
    }

    /// As [`phalanx::init`](crate::init), with these settings.
    pub fn init(self) -> Result<Comm> {
        let settings = self.settings()?;
        watch::begin()?;
        start::init(settings).map(Comm::from)
    }

    /// As [`phalanx::join`](crate::join), with these settings.
    pub fn join(self) -> Result<Comm> {
        let settings = self.settings()?;
        watch::begin()?;
        start::join_grown(settings).map(Comm::from)
    }

    /// As [`phalanx::run`](crate::run), with these settings.
    pub fn run<R: Send>(self, ranks: usize, f: impl Fn(Comm) -> R + Sync) -> Result<Vec<R>> {
        let settings = self.settings()?;
        watch::begin()?;
        start::run_threads(ranks, &settings, |new| f(Comm::from(new)))
    }

    fn settings(self) -> Result<Settings> {
        // First of all, so that it is closed by any error.
        let listener = match (&self.store, &self.place) {
            (Some(Meeting { address, is_begun: true, .. }), Some((0, ..))) => Some(take_listener(address)?),
            _ => None,
        };
        let check = match self.check {
            Some(check) => check,
            None => environment::check_from_environment().map_err(Error::from)?,
        };
        let mut environment = Environment::current();
        if let Some((rank, world_size, job)) = &self.place {
            environment = environment.placed(*rank, *world_size, job);
        }
        if let Some(Meeting { address, token, is_begun }) = &self.store {
            if self.place.is_none() {
                let expected = "Builder::place beside it: which rank this is, of how many".to_owned();
                let (name, value) = ("Builder::store".to_owned(), address.clone());
                return Err(UsageError::Setting { name, value, expected }.into());
            }
            environment = if *is_begun {
                environment.with_id(address, token)
            } else {
                environment.with_store(address, token)
            };
        }
        Ok(Settings {
            environment,
            timeout: match self.timeout {
                Some(timeout) => timeout,
                None => environment::timeout_from_environment().map_err(Error::from)?,
            },
            backend: self.backend,
            gpu: self.gpu,
            check,
            listener,
            #[cfg(feature = "cuda")]
            nccl: Arc::new(crate::backend::nccl::NcclSettings { config: self.nccl, check, driver: None }),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_refused_at_once_counts_nowhere() {
        let of_threads = Comm::builder().backend(BackendKind::Host).run(2, |comm| {
            let before = comm.recorder.child_name("next");
            assert!(matches!(comm.grow(1), Err(Error::Unsupported(_))));
            assert_eq!(comm.recorder.child_name("next"), before);
        });
        of_threads.unwrap();
    }
}
