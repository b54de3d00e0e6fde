//! The C communicator and its state: the last call, failure, and the lock around the library.
//!
//! A communicator is either usable, or has failed (then it was aborted and every call answers the same
//! error), or has ended. `init.rs` creates it, `waiting.rs` waits for it, `shutdown.rs` ends it.

#[cfg(feature = "nccl")]
use super::ahead::Ahead;
use super::arrival::{Arrival, ConnectedKinds};
use super::config::Config;
use super::device::GpuDevice;
#[cfg(feature = "nccl")]
use super::direct::{Algorithm, Direct};
#[cfg(feature = "nccl")]
use super::gpu_window::CopyStream;
#[cfg(feature = "nccl")]
use super::graphs::Graphs;
use super::library::Library;
use super::library_lock::LibraryGuard;
use super::memory::{Handle, free};
use super::staging::Stages;
use crate::buffer::stream::GpuStream;
use crate::contract::{Call, Operation, Transfer};
use crate::control::control_channel::{AnnouncedCall, ControlChannel};
use crate::os::RunInstant;
use crate::os::sync::lock;
use crate::types::error::{Error, Result, UnsupportedError};
use crate::types::memory::RawStream;
use phalanx_sys::nccl::{ncclComm_t, ncclResult_t};
use std::cell::UnsafeCell;
use std::collections::BTreeMap;
use std::num::NonZeroU64;
#[cfg(feature = "nccl")]
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// Bound of finalize, destroy and abort in the library.
pub(crate) const ENDING: Duration = Duration::from_secs(10);

/// One rank's communicator in the library, with its state.
pub(crate) struct Communicator {
    pub library: &'static Library,
    pub device: GpuDevice,
    pub rank: usize,
    pub ranks: usize,
    pub control_channel: ControlChannel,
    pub stages: Stages,
    pub(crate) handle: Arc<HandleCell>,
    pub(crate) last: Mutex<Last>,
    /// Streams that may carry operations, now or later. Ending the communicator may have to wait for them.
    streams: Mutex<Vec<GpuStream>>,
    /// Whether the library runs operations one after the other across streams.
    orders_streams: bool,
    /// Held while the communicator is being failed.
    failing: Mutex<()>,
    /// Whether the library has been told to stop its work. Held by a thread that does so, and by one that ends the communicator.
    pub(crate) revoked: Arc<Mutex<bool>>,
    failed: OnceLock<Error>,
    /// Whether there is no C communicator that can be used: not created yet, ended, or freed. Changes only under the device's library
    /// lock.
    pub(crate) ended: Arc<AtomicBool>,
    /// Whether the library has made it completely.
    pub(crate) is_made: AtomicBool,
    /// Whether a graph may hold operations of the library.
    pub(crate) is_captured: Arc<AtomicBool>,
    /// How far the program is ahead of the GPU.
    #[cfg(feature = "nccl")]
    pub(crate) ahead: Ahead,
    /// When the program was last about to launch a kernel that waits for peers.
    pub(crate) last_kernel: Mutex<Option<RunInstant>>,
    /// Whether it has failed or ended, and nothing of it is under way on the GPU.
    pub(crate) is_quiet: AtomicBool,
    /// Counts entries into the library and returns from it: odd while a thread is inside.
    library_calls: AtomicU64,
    /// It is a member of an open group of some thread, at whose end the library will look at it, or it is being split. Until the end of
    /// that it is not aborted.
    pub(crate) queued: Arc<AtomicBool>,
    /// The communicator is suspended: the library has freed its GPU memory until `resume`.
    pub(crate) is_suspended: AtomicBool,
    /// Whether all ranks have called finalize.
    pub(crate) all_leave: AtomicBool,
    /// Whether this rank has left, or is about to.
    pub(crate) is_departing: AtomicBool,
    /// phalanx's own kernels, if all ranks can run them. Set when the communicator is made.
    #[cfg(feature = "nccl")]
    pub(crate) direct: OnceLock<Direct>,
    /// CUDA graphs of its operations.
    #[cfg(feature = "nccl")]
    pub(crate) graphs: Graphs,
    /// Streams of copies between GPUs that are not the library's.
    #[cfg(feature = "nccl")]
    pub(crate) copies: Mutex<Vec<Weak<CopyStream>>>,
    /// Whether this rank aborts while others may finalize.
    pub(crate) is_alone: AtomicBool,
    /// Whether one-sided operations were used: from then on peers may write to this rank's windows, whatever
    /// it does itself.
    is_one_sided: AtomicBool,
    /// Memory of windows that were dropped since. Freed when the communicator has ended.
    left_to_peers: Mutex<Vec<*mut u8>>,
    /// Registrations to end before the communicator ends, by number.
    pub(crate) registrations: Mutex<BTreeMap<NonZeroU64, Handle>>,
}

/// phalanx's own kernel for a call.
#[cfg(feature = "nccl")]
pub(crate) type OwnKernel<'a> = (&'a Direct, Algorithm);
/// There is none.
#[cfg(not(feature = "nccl"))]
pub(crate) type OwnKernel<'a> = &'a std::convert::Infallible;

/// The handle, which the library may write late and from a thread of its own. That thread keeps the cell
/// alive too.
#[derive(Default)]
pub(crate) struct HandleCell(UnsafeCell<ncclComm_t>);

// SAFETY: the library writes it once; it is aligned and read whole, volatile.
unsafe impl Send for HandleCell {}
// SAFETY: as above.
unsafe impl Sync for HandleCell {}

impl HandleCell {
    pub fn as_ptr(&self) -> *mut ncclComm_t {
        self.0.get()
    }
}

/// Counters and the last operation that this rank enqueued.
pub(crate) struct Last {
    /// Number of the last collective, and of the last message.
    pub collectives: u64,
    pub messages: u64,
    /// The last call that may be incomplete, and its stream. Calls without data enqueue nothing and do not
    /// count.
    pub announced: Option<AnnouncedCall>,
    pub stream: RawStream,
    /// Kinds of calls for which the ranks are connected.
    pub connected: ConnectedKinds,
}

// SAFETY: the handle is an address that the library owns; calls with it are made under the device's library
// lock, one thread at a time.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl Drop for Communicator {
    fn drop(&mut self) {
        let memory = std::mem::take(&mut *lock(&self.left_to_peers));
        if self.has_ended() && !self.control_channel.is_copy() {
            // SAFETY: of windows that were dropped, whose users on this rank were waited for then. The communicator has ended,
            // and is freed before.
            memory.into_iter().for_each(|start| unsafe { free(self.library, &self.device, start) });
        }
    }
}

/// The held library lock, with a communicator that exists.
pub(crate) struct LockedLibrary<'a> {
    _call: LibraryCall<'a>,
    _guard: LibraryGuard,
}

/// Guard: while it lives, the watchdog sees a thread inside the library with the communicator.
pub(crate) struct LibraryCall<'a>(&'a AtomicU64);

impl Drop for LibraryCall<'_> {
    #[inline]
    fn drop(&mut self) {
        // One thread at a time is inside.
        self.0.store(self.0.load(Ordering::Relaxed) + 1, Ordering::Release);
    }
}

#[cold]
fn asleep(operation: Operation) -> Error {
    Error::from(UnsupportedError {
        what: format!("{} on a suspended communicator", operation.name()),
        why: "the library has given back the memory that operations need".into(),
        remedy: "call resume on all ranks before".into(),
    })
}

impl Communicator {
    /// State of a communicator before the library has made it.
    pub fn new(
        library: &'static Library,
        device: GpuDevice,
        control_channel: ControlChannel,
        (rank, ranks): (usize, usize),
        config: &Config,
    ) -> Communicator {
        Communicator {
            library,
            device,
            rank,
            ranks,
            control_channel,
            stages: Stages::default(),
            handle: Arc::default(),
            last: Mutex::new(Last {
                collectives: 0,
                messages: 0,
                announced: None,
                stream: RawStream::NONE,
                connected: ConnectedKinds::default(),
            }),
            streams: Mutex::default(),
            // Not for one rank, where it launches at once; nor if graphs and other operations do not mix.
            orders_streams: ranks > 1 && config.mixes_graphs(),
            failing: Mutex::default(),
            revoked: Arc::default(),
            failed: OnceLock::new(),
            ended: Arc::new(AtomicBool::new(true)),
            is_made: AtomicBool::new(false),
            is_captured: Arc::default(),
            #[cfg(feature = "nccl")]
            ahead: Ahead::default(),
            last_kernel: Mutex::default(),
            is_quiet: AtomicBool::new(false),
            library_calls: AtomicU64::new(0),
            queued: Arc::default(),
            is_suspended: AtomicBool::new(false),
            all_leave: AtomicBool::new(false),
            is_departing: AtomicBool::new(false),
            is_alone: AtomicBool::new(false),
            #[cfg(feature = "nccl")]
            direct: OnceLock::new(),
            #[cfg(feature = "nccl")]
            graphs: Graphs::default(),
            #[cfg(feature = "nccl")]
            copies: Mutex::default(),
            is_one_sided: AtomicBool::new(false),
            left_to_peers: Mutex::default(),
            registrations: Mutex::default(),
        }
    }

    /// The C handle.
    pub fn handle(&self) -> ncclComm_t {
        // SAFETY: see `HandleCell`.
        unsafe { self.handle.as_ptr().read_volatile() }
    }

    /// Waits for the library lock. An error if the communicator has ended.
    #[inline]
    pub fn lock_library(&self) -> Result<LockedLibrary<'_>> {
        let guard = self.device.library_lock.acquire().map_err(|lost| self.fail(lost))?;
        self.enter_library(guard)
    }

    /// The library lock, if it is free. An error if the communicator has ended.
    pub fn poll_library(&self) -> Result<Option<LockedLibrary<'_>>> {
        match self.device.library_lock.try_acquire() {
            Some(guard) => self.enter_library(guard).map(Some),
            None => self.device.library_lock.check().map(|()| None).map_err(|lost| self.fail(lost)),
        }
    }

    #[inline]
    fn enter_library(&self, guard: LibraryGuard) -> Result<LockedLibrary<'_>> {
        if self.ended.load(Ordering::Relaxed) {
            drop(guard);
            return Err(self.failure());
        }
        Ok(LockedLibrary { _call: self.begin_library_call(), _guard: guard })
    }

    /// The library lock, if it is free and the communicator exists.
    pub fn try_lock_library(&self) -> Option<LockedLibrary<'_>> {
        let guard = self.device.library_lock.try_acquire()?;
        let has_ended = self.ended.load(Ordering::Relaxed);
        (!has_ended).then(|| LockedLibrary { _call: self.begin_library_call(), _guard: guard })
    }

    /// Marks that this thread enters the library with the communicator. It holds the library lock.
    #[inline]
    pub fn begin_library_call(&self) -> LibraryCall<'_> {
        self.library_calls.store(self.library_calls.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        LibraryCall(&self.library_calls)
    }

    /// Number of entries into the library and returns from it.
    pub fn library_calls(&self) -> u64 {
        self.library_calls.load(Ordering::Acquire)
    }

    /// Sets whether it is a member of an open group, or is being split.
    pub fn set_queued(&self, queued: bool) {
        self.queued.store(queued, Ordering::Release);
    }

    /// The group, or the split, has ended; if the communicator failed meanwhile, it can be aborted now.
    pub fn leave_group(&self) {
        self.set_queued(false);
        if self.check().is_err() {
            self.abort();
        }
    }

    pub fn is_queued(&self) -> bool {
        self.queued.load(Ordering::Acquire)
    }

    /// The communicator's failure, if it has failed.
    #[inline]
    pub fn check(&self) -> Result<()> {
        if self.failed.get().is_some() || self.control_channel.check().is_err() {
            return Err(self.failure());
        }
        Ok(())
    }

    /// An error in a forked copy of the process. The library's and driver's state is the original's, and
    /// locks may be held by threads that the copy lacks.
    pub fn check_owner(&self) -> Result<()> {
        if self.control_channel.is_copy() { Err(Error::forked()) } else { Ok(()) }
    }

    /// [`check`](Communicator::check), and an error for an operation on a suspended communicator: its kernels
    /// would read freed memory.
    #[inline]
    pub fn check_awake(&self, operation: Operation) -> Result<()> {
        self.check()?;
        if self.is_suspended.load(Ordering::Relaxed) && operation != Operation::Resume {
            return Err(asleep(operation));
        }
        Ok(())
    }

    /// [`check_awake`](Self::check_awake), and waits while the GPU is far behind: for what enqueues an operation.
    #[inline]
    pub fn admit(&self, operation: Operation) -> Result<()> {
        self.check_awake(operation)?;
        #[cfg(feature = "nccl")]
        self.make_room()?;
        Ok(())
    }

    #[cold]
    pub(crate) fn failure(&self) -> Error {
        match self.control_channel.check() {
            Err(failure) => self.fail(failure),
            Ok(()) => self.fail(Error::Aborted { rank: self.rank }),
        }
    }

    /// Fails the communicator for all ranks: aborts it, so that work on the GPU ends, and keeps the error for
    /// every later call. A second caller waits until that is done and gets the first error. A member of an open group is aborted at the
    /// group's end.
    #[cold]
    pub fn fail(&self, error: Error) -> Error {
        if self.control_channel.is_copy() {
            return Error::forked();
        }
        // A member of an open group is aborted at its end: there is nothing to wait for. An abort may wait for the GPU of a rank that waits
        // for this one in another communicator.
        let _failing = (!self.is_queued()).then(|| lock(&self.failing));
        if self.failed.get().is_none() {
            // At such an exit the communicator has been ended under this operation: the others are to see that the process is gone, and
            // not that it has aborted.
            if !super::watchdog::exits_badly() {
                self.control_channel.give_up();
            }
            self.abort();
        }
        self.failed.get_or_init(|| error).clone()
    }

    pub fn has_failed(&self) -> bool {
        self.failed.get().is_some()
    }

    /// Whether this rank has left: the end is under way, or was.
    pub fn is_departing(&self) -> bool {
        self.is_departing.load(Ordering::Acquire)
    }

    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Keeps a stream alive, on which operations will be enqueued.
    pub fn adopt(&self, stream: &GpuStream) -> Result<()> {
        self.check_owner()?;
        let mut streams = lock(&self.streams);
        if !streams.iter().any(|known| known.raw() == stream.raw()) {
            // A program may make one for each of its steps.
            self.let_go_of_idle(&mut streams, stream);
            streams.push(stream.clone());
        }
        Ok(())
    }

    /// Drops idle streams that have no other owner. Enqueuing needs a `Stream`, which owns its GPU stream;
    /// code that only looks uses the last stream's handle, which is kept, or finds the stream here.
    fn let_go_of_idle(&self, streams: &mut Vec<GpuStream>, other: &GpuStream) {
        if streams.is_empty() {
            return;
        }
        // The end of a stream makes its context current.
        let _current = self.device.enter();
        // During a capture the driver refuses many queries.
        if self.device.is_captured(other.raw()).unwrap_or(true) {
            return;
        }
        let last = lock(&self.last).stream;
        streams.retain_mut(|stream| {
            let raw = stream.raw();
            raw == last || !stream.is_nobody_elses() || self.device.has_work(raw).unwrap_or(true)
        });
    }

    /// The streams whose operations the last operation was not ordered behind.
    pub(crate) fn streams_beside_the_last(&self) -> Vec<GpuStream> {
        if self.orders_streams { Vec::new() } else { self.streams() }
    }

    /// The streams that may carry operations.
    pub(super) fn streams(&self) -> Vec<GpuStream> {
        lock(&self.streams).clone()
    }

    /// A stream that it keeps, by its C handle.
    pub fn stream_of(&self, handle: RawStream) -> Option<GpuStream> {
        lock(&self.streams).iter().find(|stream| stream.raw() == handle).cloned()
    }

    /// The last enqueued call that may be incomplete, and its stream.
    pub fn last_enqueued(&self) -> Option<(AnnouncedCall, RawStream)> {
        let last = lock(&self.last);
        last.announced.map(|announced| (announced, last.stream))
    }

    /// The own kernel that carries a call out; `None` if the library does.
    #[inline]
    pub fn own_kernel(
        &self,
        #[cfg_attr(not(feature = "nccl"), expect(unused))] call: &Call<'_>,
    ) -> Option<OwnKernel<'_>> {
        #[cfg(feature = "nccl")]
        return self.direct.get().and_then(|direct| direct.choose(call).map(|algorithm| (direct, algorithm)));
        #[cfg(not(feature = "nccl"))]
        return None;
    }

    /// Records and announces a collective that is about to be enqueued. Returns the arrival that the library needs
    /// first, if it is the library that carries the call out.
    #[inline(always)]
    pub fn next_collective(&self, call: &Call<'_>, has_own_kernel: bool) -> (AnnouncedCall, Option<Arrival>) {
        let mut last = lock(&self.last);
        last.collectives += 1;
        let announced = AnnouncedCall::call(last.collectives, call);
        if call.flow().used(self.rank, self.ranks) != [0; 2] {
            (last.announced, last.stream) = (Some(announced), call.stream);
        }
        self.control_channel.announce(&announced);
        let arrival = match has_own_kernel {
            true => None,
            false => self.arrival_for(call, &announced, &mut last.connected),
        };
        (announced, arrival)
    }

    /// Records a message that is about to be enqueued.
    pub fn next_message(&self, transfer: &Transfer) -> AnnouncedCall {
        let mut last = lock(&self.last);
        last.messages += 1;
        let announced = AnnouncedCall::message(last.messages, transfer);
        if transfer.count > 0 {
            (last.announced, last.stream) = (Some(announced), transfer.stream);
        }
        announced
    }

    /// Number of the last collective.
    pub fn collectives(&self) -> u64 {
        lock(&self.last).collectives
    }

    /// Name for diagnosis of a library call that is neither a collective nor a message.
    pub(crate) fn auxiliary_call(&self) -> AnnouncedCall {
        AnnouncedCall::call(self.collectives(), &Call::empty(Operation::Init))
    }

    /// Records enqueued work that is neither a collective nor a message.
    pub fn used(&self, stream: RawStream) {
        self.note_enqueuing(stream);
        let auxiliary = self.auxiliary_call();
        let mut last = lock(&self.last);
        last.stream = stream;
        last.announced.get_or_insert(auxiliary);
    }

    /// Records that the stream waits for signals of these peers.
    pub fn awaits(&self, stream: RawStream, peers: impl Iterator<Item = usize>) {
        self.note_enqueuing(stream);
        self.control_channel.expect_signals(peers);
        let mut last = lock(&self.last);
        let announced = AnnouncedCall::call(last.collectives, &Call::empty(Operation::WaitSignals));
        (last.announced, last.stream) = (Some(announced), stream);
    }

    /// Calls the library with the communicator, and waits until it has done it.
    pub fn call(&self, function: &'static str, f: impl FnOnce(ncclComm_t) -> ncclResult_t) -> Result<()> {
        self.check()?;
        let _current = self.device.enter();
        let result = {
            let _locked = self.lock_library()?;
            f(self.handle())
        };
        match result {
            // Some functions answer success while a thread of the library still works for them, and will
            // write to what they were given (ncclCommWindowRegister of 2.28).
            ncclResult_t::Success | ncclResult_t::InProgress => {
                self.settle(&self.auxiliary_call(), RunInstant::now())
            }
            error => {
                self.check()?;
                Err(self.library.error(error, function).into())
            }
        }
    }

    /// Checks once for an error.
    pub fn look_for_error(&self) -> Result<()> {
        self.check()?;
        self.settle(&self.auxiliary_call(), RunInstant::now())
    }

    /// Keeps a registration until the communicator ends. Returns its number, which is unique in this process.
    pub fn keep_registration(&self, handle: Handle) -> NonZeroU64 {
        static MADE: AtomicU64 = AtomicU64::new(0);
        let number = NonZeroU64::MIN.saturating_add(MADE.fetch_add(1, Ordering::Relaxed));
        lock(&self.registrations).insert(number, handle);
        number
    }

    pub fn registration(&self, number: NonZeroU64) -> Option<Handle> {
        lock(&self.registrations).get(&number).cloned()
    }

    /// Ends a registration, unless the communicator's end already did. After an error, the memory stays
    /// registered until the communicator ends. False if peers may still write to the memory, which then stays
    /// registered too.
    pub fn end_registration(&self, number: NonZeroU64) -> Result<bool> {
        self.check_owner()?;
        let Some(handle) = lock(&self.registrations).remove(&number) else { return Ok(true) };
        if self.ended.load(Ordering::Acquire) {
            return Ok(true);
        }
        let keep = || {
            lock(&self.registrations).insert(number, handle.clone());
        };
        if matches!(handle, Handle::Window(_)) && self.is_one_sided.load(Ordering::Relaxed) {
            keep();
            return Ok(false);
        }
        self.deregister(handle.clone()).inspect_err(|_| keep()).map(|()| true)
    }

    /// Records that one-sided operations are used. The first is collective, so no peer writes before this
    /// rank is here.
    pub fn begin_one_sided(&self) {
        self.is_one_sided.store(true, Ordering::Relaxed);
    }

    /// Keeps a dropped window's memory until the communicator ends.
    pub fn leave_to_peers(&self, start: *mut u8) {
        lock(&self.left_to_peers).push(start);
    }
}
