//! Ends a communicator: a healthy one is finalized and destroyed, a failed one revoked and aborted, each in a thread with a bound.
//!
//! `ncclCommFinalize` and `ncclCommRevoke` stop its work, after which no call uses it. `ncclCommDestroy` and `ncclCommAbort` free it,
//! later (`reclaim.rs`). A failed one is freed at once if the library has no `ncclCommRevoke` (it came with 2.28.7), and if graphs
//! may use it.
//!
//! Since 2.31 `ncclCommFinalize` waits for all ranks of the host, and hangs if one of them aborts instead. So
//! all ranks decide alike, by what all of them see: if the communicator has failed, it is aborted; otherwise
//! it is finalized once all ranks have left. A rank that leaves early does not wait for that: a thread does.

use super::communicator::{Communicator, ENDING};
use super::device::GpuDevice;
use super::init::NoInits;
use super::library::Library;
use super::library_lock::BoundedCall;
use super::reclaim;
#[cfg(feature = "nccl")]
use super::reclaim::UseOfPeers;
use crate::contract::Departure;
use crate::gpu::backoff::Backoff;
use crate::os::RunInstant;
use crate::os::sync::lock;
use crate::types::error::Error;
use phalanx_sys::nccl::{ncclComm_t, ncclResult_t};
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// `NCCL_REVOKE_DEFAULT`, the only flag that exists.
const REVOKE_DEFAULT: i32 = 0;

/// How long a rank that drops a communicator waits until the others that are threads of this process have left it, too.
const TOGETHER: Duration = Duration::from_millis(100);

/// How long peers of a communicator that has failed may take to let go of this rank's memory; then it is leaked.
#[cfg(feature = "nccl")]
const LETTING_GO: Duration = Duration::from_secs(60);

/// Longest pause between two checks whether the other ranks have left.
const SELDOM: Duration = Duration::from_millis(50);

/// Counts the threads inside the library that end a communicator, and those of them that were given up.
static INSIDE: AtomicUsize = AtomicUsize::new(0);
static LOST: AtomicUsize = AtomicUsize::new(0);

/// Waits until no thread of this process is inside the library to end a communicator. False if one does not
/// return.
pub(crate) fn wait_until_all_are_out() -> bool {
    let since = RunInstant::now();
    let are_out = || INSIDE.load(Ordering::Acquire) == 0;
    let is_in_vain =
        || INSIDE.load(Ordering::Acquire) <= LOST.load(Ordering::Acquire) || since.elapsed() > ENDING;
    while !are_out() && !is_in_vain() {
        nap(since);
    }
    are_out()
}

impl Communicator {
    /// Ends the C communicator's work, and waits for a while until an aborted operation has left the GPU.
    ///
    /// If it is a member of an open group, or is being split, the library still reads it: the end of the
    /// group or split then aborts it.
    pub(crate) fn abort(&self) {
        #[cfg(feature = "nccl")]
        if let Some(direct) = self.direct.get() {
            direct.abort();
        }
        let Some(abort) = self.library.ncclCommAbort else { return };
        if self.control_channel.is_copy() || self.is_queued() || self.ended.load(Ordering::Acquire) {
            return;
        }
        #[cfg(feature = "nccl")]
        self.destroy_graphs();
        let ending = self.ending();
        bounded(self.rank, "ncclCommAbort", move |bounded_call| ending.abort(abort, bounded_call));
        if self.drain() && self.has_ended() {
            self.detach();
        }
    }

    /// What the thread needs that ends the communicator.
    fn ending(&self) -> Ending {
        Ending {
            library: self.library,
            handle: Raw(self.handle()),
            device: self.device,
            ended: self.ended.clone(),
            queued: self.queued.clone(),
            revoked: self.revoked.clone(),
            is_made: self.is_made.load(Ordering::Acquire),
            is_captured: self.is_captured.clone(),
            rank: self.rank,
        }
    }

    /// Lets go of the peers' memory, and tells them. No own kernel of this rank runs or follows.
    fn detach(&self) {
        #[cfg(feature = "nccl")]
        if let Some(direct) = self.direct.get() {
            direct.close(&self.device);
            self.control_channel.publish_detached();
        }
    }

    /// Waits, with a bound, until no stream has work of an aborted operation. False if one still has.
    fn drain(&self) -> bool {
        let mut streams = self.streams_beside_the_last();
        let last = lock(&self.last).stream;
        streams.extend(self.stream_of(last));
        let _current = self.device.enter();
        let drained = streams.iter().try_for_each(|stream| self.device.wait_idle(stream.raw(), ENDING));
        if let Err(error) = &drained {
            crate::os::log::error!(rank = self.rank, "GPU work of a failed operation has not ended: {error}");
        }
        self.is_quiet.store(drained.is_ok(), Ordering::Release);
        drained.is_ok()
    }

    /// Makes the library's calls on this communicator in other threads return with an error
    /// (`ncclCommRevoke`, 2.28.7). False if the library cannot.
    pub(crate) fn revoke(&self) -> bool {
        let ending = self.ending();
        let Some(revoke) = ending.library.ncclCommRevoke else { return false };
        bounded(self.rank, "ncclCommRevoke", move |_| {
            // Nobody frees the communicator meanwhile: that it has ended is set under this lock, too.
            let mut revoked = lock(&ending.revoked);
            if !ending.ended.load(Ordering::Acquire) && !*revoked {
                *revoked = ending.revoke(revoke);
            }
        })
    }

    /// Marks a communicator as failed and leaks it: one of our threads is inside it, so it must not be freed.
    pub(crate) fn leak(&self, failure: Error) {
        crate::os::log::error!(
            rank = self.rank,
            "a communicator is leaked: a thread is still inside the library with it"
        );
        self.ended.store(true, Ordering::Release);
        self.fail(failure);
    }

    /// Ends the communicator: waits for its work, then finalizes and destroys it. Aborts it if the work does
    /// not end or must not be waited for.
    pub fn depart(self: &Arc<Self>, departure: Departure) {
        if self.is_departing.swap(true, Ordering::AcqRel) {
            return;
        }
        if departure == Departure::Panicked {
            // Publish the failure before other ranks can notice the abort.
            self.control_channel.depart(departure);
            self.abort();
        } else {
            if !self.has_ended() && !self.end() {
                self.end_alone();
            }
            if !self.is_alone.load(Ordering::Acquire) {
                self.control_channel.depart(departure);
            }
        }
        #[cfg(feature = "nccl")]
        self.free_own_kernels();
        if !self.has_failed() {
            reclaim::wait();
        }
    }

    /// Frees the memory of own kernels when no rank reaches it any more.
    #[cfg(feature = "nccl")]
    fn free_own_kernels(self: &Arc<Self>) {
        if self.direct.get().is_none() {
            return;
        }
        let (this, owner) = (self.clone(), self.clone());
        let use_of_peers = move |waited| {
            let channel = &this.control_channel;
            let is_orderly = !channel.has_casualties() && channel.check().is_ok();
            match channel.are_all_detached() {
                true => UseOfPeers::Over,
                false if is_orderly || waited < LETTING_GO => UseOfPeers::Possible,
                false => UseOfPeers::Endless,
            }
        };
        reclaim::later_unless_used("cuMemFree", use_of_peers, move || {
            owner.direct.get().inspect(|direct| direct.free());
        });
    }

    /// Waits for the end of a communicator that this rank has left: the process exits.
    pub(crate) fn wait_at_exit(&self) {
        let has_ended = || wait_for(ENDING, || self.has_ended());
        if !has_ended() {
            self.end_alone();
            has_ended();
        }
    }

    /// Aborts, and makes the other ranks abort too: they must not wait for this rank in the library.
    pub(crate) fn end_alone(&self) {
        if self.is_departing() && self.library.ends_together() {
            self.is_alone.store(true, Ordering::Release);
            self.control_channel.depart_alone();
        }
        self.abort();
    }

    /// Decides how the communicator ends, the same on all ranks: finalized (true), aborted (false), or not
    /// decided yet (`None`).
    ///
    /// A failing rank leaves after its failure is visible, so a rank that sees all others gone sees the
    /// failure too.
    fn outcome_of_all(&self) -> Option<bool> {
        let have_all_left = self.control_channel.have_all_left();
        let is_over = self.is_alone.load(Ordering::Acquire) || self.control_channel.check().is_err();
        if is_over || self.control_channel.is_one_missing() {
            return Some(false);
        }
        have_all_left.then_some(true)
    }

    /// Waits for the decision, then ends the communicator accordingly.
    fn end_with_others(&self) {
        let since = RunInstant::now();
        let orderly = loop {
            match self.outcome_of_all() {
                Some(orderly) => break orderly && self.finish_between_inits(),
                None => nap(since),
            }
        };
        if !orderly {
            self.end_alone();
        }
    }

    /// [`finish`](Communicator::finish) beside what the rank does meanwhile: it may make a communicator, for which the library is called
    /// without its lock.
    fn finish_between_inits(&self) -> bool {
        // Where the library ends a communicator with all ranks together, other calls are allowed meanwhile. Elsewhere it waits for none.
        let _no_inits = (!self.library.ends_together()).then(NoInits::wait);
        self.finish()
    }

    /// Leaves the communicator; false if it has to be aborted.
    fn end(self: &Arc<Self>) -> bool {
        if let Err(error) = self.sync() {
            crate::os::log::error!(rank = self.rank, "a communicator ended with work that failed: {error}");
            return false;
        }
        // Resources are freed in reverse order, since later ones may use earlier ones.
        for (_, handle) in std::mem::take(&mut *lock(&self.registrations)).into_iter().rev() {
            if let Err(error) = self.deregister(handle) {
                crate::os::log::warn!(
                    rank = self.rank,
                    "something of a communicator could not be given back: {error}"
                );
            }
        }
        self.is_quiet.store(true, Ordering::Release);
        self.detach();
        // Lost ranks do not take part in the shutdown.
        if self.control_channel.has_casualties() {
            return false;
        }
        // Tell peers that still need this rank before the shutdown, which may take long.
        self.control_channel.depart(Departure::Left);
        let is_of_threads = self.control_channel.is_of_threads();
        if !self.library.ends_together() && !is_of_threads {
            return self.finish();
        }
        let limit = match self.all_leave.load(Ordering::Acquire) {
            true => ENDING,
            false if is_of_threads => TOGETHER,
            false => Duration::ZERO,
        };
        wait_for(limit, || self.outcome_of_all().is_some());
        if let Some(orderly) = self.outcome_of_all() {
            return orderly && self.finish();
        }
        let this = self.clone();
        let thread = std::thread::Builder::new().name("phalanx-end".into());
        thread.spawn(move || this.end_with_others()).is_ok()
    }

    /// Finalizes and destroys; false if the communicator has to be aborted.
    fn finish(&self) -> bool {
        let ending = self.ending();
        let (sender, finalized) = channel();
        let came_back = bounded(self.rank, "the end of a communicator", move |bounded_call| {
            let is_finalized = ending.finalize(bounded_call);
            if is_finalized {
                ending.destroy(bounded_call);
            }
            let _ = sender.send(is_finalized);
        });
        // While a thread is inside the library, aborting is not allowed.
        !came_back || finalized.recv() == Ok(true)
    }
}

/// State of the thread that ends a communicator. A thread that the library never returns to us holds only
/// this.
struct Ending {
    library: &'static Library,
    handle: Raw,
    device: GpuDevice,
    ended: Arc<AtomicBool>,
    /// The library looks at the communicator at the end of a group, or of a split (of another thread, where
    /// the process exits).
    queued: Arc<AtomicBool>,
    revoked: Arc<Mutex<bool>>,
    /// Before that it cannot be revoked.
    is_made: bool,
    /// Whether a graph may hold operations of it: the abort waits for the graph's end, but not if it was revoked before.
    is_captured: Arc<AtomicBool>,
    rank: usize,
}

type End = unsafe extern "C" fn(ncclComm_t) -> ncclResult_t;
type Revoke = unsafe extern "C" fn(ncclComm_t, c_int) -> ncclResult_t;

impl Ending {
    /// Stops the communicator's work, and frees it later; at once where the library cannot do one without the other.
    fn abort(&self, abort: End, bounded_call: &Arc<BoundedCall>) {
        let Ok(_locked) = self.device.library_lock.acquire_for(bounded_call) else { return };
        if self.queued.load(Ordering::Acquire) {
            // A group or a split has begun meanwhile, whose end aborts it.
            return;
        }
        let revoked = lock(&self.revoked);
        if self.ended.load(Ordering::Acquire) {
            return;
        }
        let is_captured = self.is_captured.load(Ordering::Acquire);
        let revoke_now = || self.is_made && self.library.ncclCommRevoke.is_some_and(|f| self.revoke(f));
        if *revoked && is_captured {
            crate::os::log::error!(
                rank = self.rank,
                "a communicator is leaked: a CUDA graph may still use it"
            );
        } else if !is_captured && (*revoked || revoke_now()) {
            self.free_later("ncclCommAbort", abort);
        } else {
            // SAFETY: called once, since `ended` is not set; the only thread inside, by both locks.
            unsafe { abort(self.handle.0) };
        }
        self.ended.store(true, Ordering::Release);
    }

    /// False if the library refuses, as it does once the communicator is being finalized.
    fn revoke(&self, revoke: Revoke) -> bool {
        let _current = self.device.enter();
        // SAFETY: a communicator that is there, since the lock of `revoked` is held; other threads may be inside: the library first
        // sets the flags that all its loops look at, which is what this is for.
        let answer = unsafe { revoke(self.handle.0, REVOKE_DEFAULT) };
        matches!(answer, ncclResult_t::Success | ncclResult_t::InProgress)
    }

    /// Frees what has no work any more, before memory that is given back once it has ended.
    fn free_later(&self, what: &'static str, free: End) {
        let (device, handle) = (self.device, Raw(self.handle.0));
        reclaim::later(what, move || {
            let Raw(handle) = { handle };
            let _current = device.enter();
            // SAFETY: called once, by whoever sets `ended` under the library lock. Nobody is inside this communicator: all look at
            // `ended` under that lock before.
            unsafe { free(handle) };
        });
    }

    /// Peers that are lost from now on are ignored.
    fn finalize(&self, bounded_call: &Arc<BoundedCall>) -> bool {
        let Some(finalize) = self.library.ncclCommFinalize else { return true };
        let _current = self.device.enter();
        // SAFETY: a communicator that is there; nothing but looking at it and destroying follows.
        let finalize = |comm| unsafe { finalize(comm) };
        let mut backoff = Backoff::new();
        let mut state = match self.library.ends_together() {
            true => self.call_beside_others(bounded_call, finalize),
            false => self.call(bounded_call, finalize),
        };
        while state == ncclResult_t::InProgress && backoff.since.elapsed() < ENDING {
            backoff.pause();
            let look = |comm| {
                // SAFETY: as above.
                unsafe { self.library.async_state(comm) }.unwrap_or(ncclResult_t::InternalError)
            };
            state = self.call(bounded_call, look);
        }
        if state != ncclResult_t::Success {
            crate::os::log::warn!(
                rank = self.rank,
                "a communicator could not be finalized: {state:?}; it is aborted"
            );
        }
        state == ncclResult_t::Success
    }

    /// Calls the library under the device's library lock, but hidden from the watchdog: the call has its own
    /// bound, and the library refuses to be revoked now.
    fn call(
        &self,
        bounded_call: &Arc<BoundedCall>,
        call: impl FnOnce(ncclComm_t) -> ncclResult_t,
    ) -> ncclResult_t {
        let Ok(_locked) = self.device.library_lock.acquire_for(bounded_call) else {
            return ncclResult_t::InvalidUsage;
        };
        match self.ended.load(Ordering::Acquire) || self.queued.load(Ordering::Acquire) {
            true => ncclResult_t::InvalidUsage,
            false => call(self.handle.0),
        }
    }

    /// Calls the library without the device's library lock, since the call waits for other ranks. Two ranks
    /// could end two communicators in different orders. Meanwhile nobody may end this one.
    fn call_beside_others(
        &self,
        bounded_call: &Arc<BoundedCall>,
        call: impl FnOnce(ncclComm_t) -> ncclResult_t,
    ) -> ncclResult_t {
        let begin = |_| {
            self.queued.store(true, Ordering::Release);
            ncclResult_t::Success
        };
        if self.call(bounded_call, begin) != ncclResult_t::Success {
            return ncclResult_t::InvalidUsage;
        }
        let result = call(self.handle.0);
        self.queued.store(false, Ordering::Release);
        result
    }

    /// Of a communicator that is finalized and without error. Without `ncclCommFinalize` (before 2.14) the library finalizes it now.
    fn destroy(&self, bounded_call: &Arc<BoundedCall>) {
        let Some(destroy) = self.library.ncclCommDestroy else { return };
        let Ok(_locked) = self.device.library_lock.acquire_for(bounded_call) else { return };
        let _not_revoked = lock(&self.revoked);
        if !self.queued.load(Ordering::Acquire) && !self.ended.load(Ordering::Acquire) {
            match self.library.ncclCommFinalize {
                Some(_) => self.free_later("ncclCommDestroy", destroy),
                None => {
                    let _current = self.device.enter();
                    // SAFETY: called once, since `ended` is not set; the only thread inside, by both locks.
                    unsafe { destroy(self.handle.0) };
                }
            }
            self.ended.store(true, Ordering::Release);
        }
    }
}

/// Waits with a limit; false if it has passed.
fn wait_for(limit: Duration, is_over: impl Fn() -> bool) -> bool {
    let since = RunInstant::now();
    while !is_over() {
        if since.elapsed() >= limit {
            return false;
        }
        nap(since);
    }
    true
}

/// Sleeps for a sixteenth of the time waited so far, within bounds.
fn nap(since: RunInstant) {
    std::thread::sleep((since.elapsed() / 16).clamp(Duration::from_micros(100), SELDOM));
}

struct Raw(ncclComm_t);
// SAFETY: moving a communicator between threads is fine (NCCL's user guide, thread safety).
unsafe impl Send for Raw {}

/// Runs `f` in a new thread; true if it returned within [`ENDING`]. A late thread is leaked, and no other
/// thread waits for a library lock that it holds.
fn bounded(rank: usize, what: &'static str, f: impl FnOnce(&Arc<BoundedCall>) + Send + 'static) -> bool {
    let (sender, receiver) = channel();
    let bounded_call = BoundedCall::new(what, ENDING);
    // Set by the first of two events: the thread returns, or is given up.
    let settled = Arc::new(AtomicBool::new(false));
    let of_both = settled.clone();
    INSIDE.fetch_add(1, Ordering::AcqRel);
    let thread = std::thread::Builder::new().name("phalanx-end".into()).spawn(move || {
        f(&bounded_call);
        INSIDE.fetch_sub(1, Ordering::AcqRel);
        if of_both.swap(true, Ordering::AcqRel) {
            LOST.fetch_sub(1, Ordering::AcqRel);
        }
        let _ = sender.send(());
    });
    let is_started = thread.is_ok();
    if !is_started {
        INSIDE.fetch_sub(1, Ordering::AcqRel);
    }
    let came_back = is_started && receiver.recv_timeout(ENDING).is_ok();
    if !came_back {
        LOST.fetch_add(1, Ordering::AcqRel);
        if settled.swap(true, Ordering::AcqRel) || !is_started {
            LOST.fetch_sub(1, Ordering::AcqRel);
        }
        crate::os::log::error!(
            rank,
            "{what} has not come back after {ENDING:?} (does a CUDA graph that captured the communicator still \
             live?): it is leaked"
        );
    }
    came_back
}
