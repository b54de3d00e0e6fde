//! A communicator: its state, what it owns, and the calls that are allowed on it.
//!
//! Each of these is a violation:
//! - a call after `ncclCommDestroy` or `ncclCommAbort`;
//! - a call other than `ncclCommGetAsyncError` and `ncclCommAbort` while the state is `ncclInProgress`;
//! - two threads in calls on communicators of one device;
//! - `ncclCommDestroy`, and not `ncclCommAbort`, after an error.

pub mod reductions;
pub mod registrations;
pub mod windows;

use super::config::Config;
use super::exclusive::Exclusive;
use super::result::*;
use super::transport::endpoint;
use super::transport::mailbox::{Mailbox, Stopped};
use super::transport::message::{Address, Message, Tag};
use super::transport::root::Peer;
use crate::base::call::{Answer, Code, check_fork};
use crate::base::exit;
use crate::base::handles::{self, Handle, Handles};
use crate::base::lock::lock;
use crate::base::random::Random;
use crate::base::settings::{When, failure, settings};
use crate::base::violation::violation;
use crate::cuda::context;
use std::collections::{BTreeSet, HashMap};
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, OnceLock, PoisonError};

/// One rank's communicator.
pub struct Communicator {
    pub handle: Handle,
    /// The communicator's number, the same on all ranks.
    pub number: u64,
    pub rank: u32,
    pub ranks: u32,
    /// The device's number in this process.
    pub device: usize,
    pub config: Config,
    pub mailbox: Arc<Mailbox>,
    pub random: Random,
    peers: OnceLock<Vec<Peer>>,
    state: Mutex<State>,
    changed: Condvar,
    /// Whether it was aborted.
    aborted: AtomicBool,
    /// Whether operations are being cancelled. The communicator may be used again afterwards.
    cancelling: AtomicBool,
    /// How many times operations were cancelled, for waits that check after the end of a cancellation.
    cancellations: AtomicU64,
    /// Whether it is being finalized, or was.
    ending: AtomicBool,
}

/// The changing state of a communicator.
#[derive(Default)]
pub struct State {
    /// The result of `ncclCommGetAsyncError`.
    pub result: Code,
    pub phase: Phase,
    /// Jobs in the background.
    jobs: usize,
    /// Operations that were enqueued and have not ended.
    pending: usize,
    /// Streams that perform operations of it.
    running: usize,
    /// Graphs that contain operations of it.
    pub graphs: usize,
    /// Numbers of the last collective, exchange, operation, and message to or from each rank.
    pub collectives: u64,
    pub exchanges: u64,
    pub operations: u64,
    pub sends: HashMap<u32, u64>,
    pub receives: HashMap<u32, u64>,
    /// Ranks with which a message has connected this one: to them (true), and from them.
    connected: BTreeSet<(u32, bool)>,
    pub reductions: reductions::Reductions,
    pub registrations: registrations::Registrations,
    pub windows: windows::Windows,
    /// Device communicators, by the handles of their resource windows.
    pub device_comms: BTreeSet<Handle>,
}

/// The phase of a communicator's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Phase {
    #[default]
    Ready,
    Suspended,
    Revoked,
    Finalized,
}

/// The state of a communicator that a call needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// Ready for operations.
    Ready,
    /// Not failed, and no job in the background: for questions and derived communicators.
    Idle,
    /// Not failed, where a failure is a violation: for the last call.
    End,
    /// Not ended.
    Any,
}

static COMMUNICATORS: Handles<Communicator> = Handles::new("communicator");

/// A call on a communicator. During it, a call of another thread on the same device is a violation.
pub struct Call {
    communicator: Arc<Communicator>,
    _exclusive: Exclusive,
}

impl Deref for Call {
    type Target = Arc<Communicator>;

    fn deref(&self) -> &Arc<Communicator> {
        &self.communicator
    }
}

/// Begins a call on a communicator.
pub fn enter(function: &'static str, handle: Handle, need: Need) -> Result<Call, Code> {
    check_fork(function);
    if handle == 0 {
        return Err(fail(INVALID_ARGUMENT, format!("{function} : comm argument is NULL")));
    }
    let communicator = COMMUNICATORS.get(function, handle);
    let exclusive = Exclusive::enter(function, communicator.device);
    if let Some(code) = failure(When::Called, function, Some(communicator.rank as i32)) {
        return Err(fail(code, format!("{function} was told to fail")));
    }
    communicator.check(function, need)?;
    Ok(Call { communicator, _exclusive: exclusive })
}

/// The communicator of a call that is allowed during calls of other threads.
pub fn find(function: &'static str, handle: Handle, need: Need) -> Result<Arc<Communicator>, Code> {
    check_fork(function);
    if handle == 0 {
        return Err(fail(INVALID_ARGUMENT, format!("{function} : comm argument is NULL")));
    }
    let communicator = COMMUNICATORS.get(function, handle);
    communicator.check(function, need)?;
    Ok(communicator)
}

/// Ends a communicator's handle. Messages of peers still reach the communicator.
pub fn end(function: &'static str, communicator: &Communicator) {
    COMMUNICATORS.end(function, communicator.handle, function);
}

/// Ends the process if another call ended the communicator meanwhile.
pub fn check_not_ended(function: &'static str, communicator: &Communicator, meanwhile: &str) {
    if COMMUNICATORS.find(communicator.handle).is_none() {
        violation(function, format!("a communicator was ended while {meanwhile}"));
    }
}

/// Tells all communicators that another process has ended.
fn process_ended(address: &Address) {
    COMMUNICATORS.live().iter().for_each(|communicator| communicator.peer_ended(address));
}

/// The communicator with this window.
pub fn with_window(window: Handle) -> Option<Arc<Communicator>> {
    COMMUNICATORS.live().into_iter().find(|communicator| communicator.state().windows.has(window))
}

/// How many threads free a communicator.
static FREEING: AtomicUsize = AtomicUsize::new(0);

/// A thread that frees a communicator, until dropped.
pub struct Freeing(());

impl Freeing {
    pub fn begin() -> Freeing {
        FREEING.fetch_add(1, Ordering::AcqRel);
        Freeing(())
    }
}

impl Drop for Freeing {
    fn drop(&mut self) {
        FREEING.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Checks at the process's exit that all communicators have ended. As NCCL's destructors, which are
/// registered when it is loaded, the check runs after everything that the program registers later.
fn check_at_exit() {
    extern "C" fn check() {
        if let Some(communicator) = COMMUNICATORS.live().first() {
            violation("exit", format!("rank {}'s communicator was not ended", communicator.rank));
        }
        if FREEING.load(Ordering::Acquire) > 0 {
            violation("exit", "a thread is still freeing a communicator");
        }
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| exit::check_at_exit(check));
}

impl Communicator {
    /// A rank's communicator, before it knows the other ranks.
    pub fn new(
        function: &str,
        number: u64,
        (rank, ranks): (u32, u32),
        device: usize,
        config: Config,
    ) -> Arc<Self> {
        check_at_exit();
        endpoint::set_on_loss(process_ended);
        let handle = handles::fresh();
        let Some(mailbox) = endpoint::mailbox((number, rank)) else {
            violation(function, "the unique id was used for a communicator before");
        };
        let communicator = Arc::new(Communicator {
            handle,
            number,
            rank,
            ranks,
            device,
            config,
            mailbox,
            random: Random::new(handle),
            peers: OnceLock::new(),
            state: Mutex::default(),
            changed: Condvar::new(),
            aborted: AtomicBool::new(false),
            cancelling: AtomicBool::new(false),
            cancellations: AtomicU64::new(0),
            ending: AtomicBool::new(false),
        });
        COMMUNICATORS.insert(handle, Arc::clone(&communicator));
        communicator
    }

    /// Sets where the ranks are.
    pub fn connect(&self, peers: Vec<Peer>) {
        // Set once: a communicator is connected once.
        let _ = self.peers.set(peers);
        // An empty message opens a connection, by whose end the peer learns of the end of this process.
        for rank in self.all_ranks() {
            let address = &self.peers()[rank as usize].address;
            if address != endpoint::address() {
                self.send(rank, Tag::Exchange(0), Vec::new());
                endpoint::flush(address);
            }
        }
    }

    /// Drops messages that arrive from here on, and ends what the communicator owns.
    pub fn close(&self) {
        endpoint::end((self.number, self.rank));
        let mut state = self.state();
        state.registrations.clear();
        state.windows.clear();
    }

    pub fn peers(&self) -> &[Peer] {
        self.peers.get().map_or(&[], Vec::as_slice)
    }

    /// Whether messages to a rank, or from it, need no more connection.
    pub fn is_connected(&self, peer: u32, sends: bool) -> bool {
        peer == self.rank || self.state().connected.contains(&(peer, sends))
    }

    /// Connects this rank's end of the first message to a rank, or from it. False if it is connected.
    pub fn begin_connection(&self, peer: u32, sends: bool) -> bool {
        let is_new = peer != self.rank && self.state().connected.insert((peer, sends));
        if is_new {
            self.send(peer, Tag::Connect(u64::from(sends)), Vec::new());
        }
        is_new
    }

    /// Waits until the other end has come, too.
    pub fn end_connection(&self, peer: u32, sends: bool) -> Result<(), Stopped> {
        let before = self.cancellations.load(Ordering::Acquire);
        let stop = || self.is_stopped() || self.cancellations.load(Ordering::Acquire) != before;
        self.mailbox.take(peer, Tag::Connect(u64::from(!sends)), stop).map(drop)
    }

    /// Enables access to the devices of peers in this process, as NCCL does at the first operation. The error
    /// is CUDA's.
    pub fn reach_peers(&self) -> Answer {
        let devices = &settings().devices;
        let neighbours = self.peers().iter().filter(|peer| peer.address == *endpoint::address());
        let visible = neighbours.filter_map(|peer| devices.iter().position(|known| *known == peer.device));
        for device in visible.filter(|device| *device != self.device) {
            context::runtime_enable_access(self.device, device)?;
        }
        Ok(())
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Whether waits and operations must end: after an abort, and during a cancellation.
    pub fn is_stopped(&self) -> bool {
        self.aborted.load(Ordering::Acquire) || self.cancelling.load(Ordering::Acquire)
    }

    /// It is being finalized from now on.
    pub fn begin_end(&self) {
        self.ending.store(true, Ordering::Release);
    }

    /// Whether it is being finalized, or was.
    pub fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire)
    }

    /// Ends all waits and operations for good.
    pub fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        self.wake();
    }

    /// Wakes all waits, which check whether to stop.
    fn wake(&self) {
        // Waits at all mailboxes: a communicator that grows waits at the mailbox of the new one.
        endpoint::wake();
        // With the lock, so that no wait is between its check and its sleep.
        drop(self.state());
        self.changed.notify_all();
    }

    /// Cancels all operations in streams, those that run and those that wait.
    pub fn cancel_operations(&self) {
        self.cancellations.fetch_add(1, Ordering::AcqRel);
        self.cancelling.store(true, Ordering::Release);
        self.wake();
        // Cancelled operations end as soon as their streams reach them.
        let _ = self.wait(|state| state.pending == 0, || false);
        self.cancelling.store(false, Ordering::Release);
    }

    /// Waits for `ncclCommRevoke` in another thread.
    pub fn await_revocation(&self) {
        let _ = self.wait(|state| matches!(state.phase, Phase::Revoked), || false);
    }

    fn check(&self, function: &str, need: Need) -> Answer {
        self.config.check_name(function);
        let state = self.state();
        match (need, state.result) {
            (Need::Any, _) => return Ok(()),
            (_, IN_PROGRESS) => violation(
                function,
                "the communicator's state is ncclInProgress; only GetAsyncError and Abort may be called",
            ),
            (_, SUCCESS) => {}
            (Need::End, code) => violation(
                function,
                format!("the communicator has failed ({code}); only ncclCommAbort ends it"),
            ),
            (_, code) => return Err(fail(code, format!("{function} : the communicator has failed"))),
        }
        match (need, state.phase) {
            (Need::Ready, Phase::Ready) | (Need::Idle | Need::End | Need::Any, _) => Ok(()),
            (Need::Ready, Phase::Finalized) => violation(function, "the communicator was already finalized"),
            (Need::Ready, phase) => {
                Err(fail(INVALID_USAGE, format!("{function} : the communicator is {phase:?}")))
            }
        }
    }

    /// Sends a message to a rank.
    pub fn send(&self, to: u32, tag: Tag, body: Vec<u8>) {
        let message = Message { communicator: self.number, from: self.rank, to, tag, body };
        endpoint::send(&self.peers()[to as usize].address, message);
    }

    /// Waits for a message from a rank.
    pub fn take(&self, from: u32, tag: Tag) -> Result<Vec<u8>, Stopped> {
        self.mailbox.take(from, tag, || self.is_stopped())
    }

    /// The number of the next exchange. Taken at the call, so that it is the same on all ranks.
    pub fn next_exchange(&self) -> u64 {
        let mut state = self.state();
        state.exchanges += 1;
        state.exchanges
    }

    /// Sends a body to each of the ranks, and returns the bodies that they send.
    pub fn exchange(
        &self,
        number: u64,
        with: impl Iterator<Item = u32> + Clone,
        body: &[u8],
    ) -> Result<Vec<Vec<u8>>, Stopped> {
        for rank in with.clone() {
            self.send(rank, Tag::Exchange(number), body.to_vec());
        }
        let before = self.cancellations.load(Ordering::Acquire);
        let stop = || self.is_stopped() || self.cancellations.load(Ordering::Acquire) != before;
        with.map(|rank| self.mailbox.take(rank, Tag::Exchange(number), stop)).collect()
    }

    /// All ranks.
    pub fn all_ranks(&self) -> std::ops::Range<u32> {
        0..self.ranks
    }

    /// Sets the asynchronous error, unless there is one.
    pub fn fail(&self, code: Code) {
        let mut state = self.state();
        if matches!(state.result, SUCCESS | IN_PROGRESS) {
            state.result = code;
        }
    }

    fn peer_ended(&self, address: &Address) {
        if !settings().peer_death_is_error {
            return;
        }
        let has_rank = |(rank, peer): (usize, &Peer)| {
            peer.address == *address && !self.mailbox.has(rank as u32, Tag::Ended)
        };
        if self.peers().iter().enumerate().any(has_rank) {
            self.fail(REMOTE_ERROR);
        }
    }

    /// Counts an operation that is enqueued.
    pub fn count_operation(&self) {
        self.state().pending += 1;
    }

    /// Performs a number of counted operations, unless the communicator is stopped.
    pub fn perform(&self, operations: usize, work: impl FnOnce()) {
        let run = {
            let mut state = self.state();
            let run = !self.is_stopped();
            state.running += usize::from(run);
            run
        };
        if run {
            work();
        }
        let mut state = self.state();
        state.running -= usize::from(run);
        state.pending -= operations;
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until no operation is in a stream.
    pub fn wait_for_operations(&self) -> Result<(), Stopped> {
        self.wait(|state| state.pending == 0, || self.is_stopped())
    }

    /// Waits until no stream and no job works on it and no graph contains it.
    pub fn wait_for_end_of_use(&self) {
        let quiet = |state: &State| state.running == 0 && state.jobs == 0 && state.graphs == 0;
        // Nothing stops this wait: even an abort waits until graphs are destroyed.
        let _ = self.wait(quiet, || false);
    }

    /// Waits until no graph contains operations of it.
    pub fn wait_for_graphs(&self) -> Result<(), Stopped> {
        self.wait(|state| state.graphs == 0, || self.is_stopped())
    }

    fn wait(&self, done: impl Fn(&State) -> bool, stop: impl Fn() -> bool) -> Result<(), Stopped> {
        let mut state = self.state();
        while !done(&state) {
            if stop() {
                return Err(Stopped);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    /// Counts a graph with operations of it, up or down.
    pub fn count_graph(&self, up: bool) {
        let mut state = self.state();
        state.graphs = if up { state.graphs + 1 } else { state.graphs - 1 };
        drop(state);
        self.changed.notify_all();
    }

    /// Begins a job in the background: the state is `ncclInProgress` until [`end_job`](Self::end_job).
    pub fn begin_job(&self) {
        let mut state = self.state();
        state.jobs += 1;
        state.result = IN_PROGRESS;
    }

    /// Ends a job in the background.
    pub fn end_job(&self, code: Code) {
        let mut state = self.state();
        state.jobs -= 1;
        if state.result == IN_PROGRESS {
            state.result = code;
        }
        drop(state);
        self.changed.notify_all();
    }
}
