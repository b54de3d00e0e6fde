//! A communicator's state, and who may call what when.
//!
//! The rules, each broken one a violation: no call after Destroy or Abort; while the state is `ncclInProgress` only
//! GetAsyncError and Abort; no two threads inside communicators of one device; Abort instead of Destroy after an
//! error.

use super::config::Config;
use super::inside::Inside;
use super::result::*;
use super::transport::mailbox::{Mailbox, Stopped};
use super::transport::message::{Message, Tag};
use super::transport::rendezvous::Peer;
use super::transport::{self, Address};
use crate::call::{Answer, Code, check_fork};
use crate::cuda::context;
use crate::exit;
use crate::handles::{self, Handle, Handles};
use crate::lock;
use crate::random::Random;
use crate::settings::{When, failure, settings};
use crate::violation::violation;
use std::collections::HashMap;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

/// One rank's communicator.
pub struct Communicator {
    pub handle: Handle,
    /// The number that all its ranks know it by.
    pub number: u64,
    pub rank: u32,
    pub ranks: u32,
    /// As callers count devices.
    pub device: usize,
    pub config: Config,
    pub mailbox: Arc<Mailbox>,
    pub random: Random,
    peers: OnceLock<Vec<Peer>>,
    state: Mutex<State>,
    changed: Condvar,
    /// For good: it was aborted.
    aborted: AtomicBool,
    /// For now: operations are given up, and the communicator may go on.
    giving_up: AtomicBool,
    /// How often operations were given up: who waits is to notice, however late it looks.
    revocations: AtomicU64,
}

/// What changes about a communicator.
#[derive(Default)]
pub struct State {
    /// What GetAsyncError answers.
    pub result: Code,
    pub phase: Phase,
    /// Threads that work on it in the background.
    jobs: usize,
    /// Operations that were bound and have not ended, and those that a stream works on.
    pending: usize,
    running: usize,
    /// Graphs that have operations of it.
    pub graphs: usize,
    /// How many there were of each.
    pub collectives: u64,
    pub exchanges: u64,
    pub operations: u64,
    pub sends: HashMap<u32, u64>,
    pub receives: HashMap<u32, u64>,
    pub reductions: super::reduction::Reductions,
    pub registrations: super::registration::Registrations,
    pub windows: super::window::Windows,
    pub device_comms: super::device::DeviceComms,
}

/// What a communicator is fit for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Phase {
    #[default]
    Ready,
    Suspended,
    Revoked,
    Finalized,
}

/// What a call needs a communicator to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// Ready for operations.
    Ready,
    /// Alive and idle: questions, derived communicators.
    Idle,
    /// Not erroneous: the last call.
    End,
    /// Anything that was not ended.
    Any,
}

static COMMUNICATORS: Handles<Communicator> = Handles::new("communicator");

/// A call on a communicator. While it lasts no other thread may be inside one of the same device.
pub struct Call {
    communicator: Arc<Communicator>,
    _visit: Inside,
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
    let visit = Inside::enter(function, communicator.device);
    if let Some(code) = failure(When::Called, function, Some(communicator.rank as i32)) {
        return Err(fail(code, format!("{function} was told to fail")));
    }
    communicator.check(function, need)?;
    Ok(Call { communicator, _visit: visit })
}

/// The communicator of a call that may come while another thread is inside.
pub fn find(function: &'static str, handle: Handle, need: Need) -> Result<Arc<Communicator>, Code> {
    check_fork(function);
    if handle == 0 {
        return Err(fail(INVALID_ARGUMENT, format!("{function} : comm argument is NULL")));
    }
    let communicator = COMMUNICATORS.get(function, handle);
    communicator.check(function, need)?;
    Ok(communicator)
}

/// Takes a communicator away from its callers. Its peers still reach it.
pub fn end(function: &'static str, communicator: &Communicator) {
    COMMUNICATORS.end(function, communicator.handle, function);
}

/// The communicator that a handle stood for a moment ago; whoever ended it since broke a rule.
pub fn still_there(function: &'static str, communicator: &Communicator, meanwhile: &str) {
    if COMMUNICATORS.find(communicator.handle).is_none() {
        violation(function, format!("a communicator was ended while {meanwhile}"));
    }
}

/// A process that has ranks may have ended.
pub fn peer_process_ended(address: &Address) {
    COMMUNICATORS.live().iter().for_each(|communicator| communicator.peer_ended(address));
}

/// The communicator of this process that has a window.
pub fn with_window(window: Handle) -> Option<Arc<Communicator>> {
    COMMUNICATORS.live().into_iter().find(|communicator| communicator.state().windows.has(window))
}

/// A rank whose communicator was not ended.
pub fn left() -> Option<u32> {
    COMMUNICATORS.live().first().map(|communicator| communicator.rank)
}

impl Communicator {
    /// A rank's communicator that has not met the others yet.
    pub fn new(
        function: &str,
        number: u64,
        (rank, ranks): (u32, u32),
        device: usize,
        config: Config,
    ) -> Arc<Self> {
        exit::watch_nccl();
        let handle = handles::fresh();
        let Some(mailbox) = transport::mailbox((number, rank)) else {
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
            giving_up: AtomicBool::new(false),
            revocations: AtomicU64::new(0),
        });
        COMMUNICATORS.insert(handle, Arc::clone(&communicator));
        communicator
    }

    /// Says where the ranks are.
    pub fn connect(&self, peers: Vec<Peer>) {
        // Only who made the communicator connects it, once.
        let _ = self.peers.set(peers);
        // Nobody waits for this: with it there is a connection from which peers learn that this process has ended.
        for rank in self.everyone() {
            let address = &self.peers()[rank as usize].address;
            if address != transport::address() {
                self.send(rank, Tag::Exchange(0), Vec::new());
                transport::flush(address);
            }
        }
    }

    /// Nothing that arrives concerns it any more.
    pub fn close(&self) {
        transport::end((self.number, self.rank));
        let mut state = self.state();
        state.registrations.forget();
        state.windows.forget();
    }

    pub fn peers(&self) -> &[Peer] {
        self.peers.get().map_or(&[], Vec::as_slice)
    }

    /// Connects it to its peers in this process, as NCCL does at the first operation that needs to; the answer is CUDA's.
    pub fn reach_peers(&self) -> Answer {
        let devices = &settings().devices;
        let neighbours = self.peers().iter().filter(|peer| peer.address == *transport::address());
        let visible = neighbours.filter_map(|peer| devices.iter().position(|known| *known == peer.device));
        for device in visible.filter(|device| *device != self.device) {
            context::runtime_reach(self.device, device)?;
        }
        Ok(())
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Whether whatever goes on must be given up.
    pub fn is_stopped(&self) -> bool {
        self.aborted.load(Ordering::Acquire) || self.giving_up.load(Ordering::Acquire)
    }

    /// Lets everything that goes on be given up.
    pub fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        self.wake();
    }

    /// Lets those who wait look whether they should stop.
    fn wake(&self) {
        // All of them, since a communicator that grows waits at the mailbox of the new one.
        transport::wake();
        // With the lock, so that nobody is between looking and waiting.
        drop(self.state());
        self.changed.notify_all();
    }

    /// Gives up everything that is in streams: what has begun, and what has not.
    pub fn give_up_operations(&self) {
        self.revocations.fetch_add(1, Ordering::AcqRel);
        self.giving_up.store(true, Ordering::Release);
        self.wake();
        // It is given up, so this ends as soon as the streams get there.
        let _ = self.wait(|state| state.pending == 0, || false);
        self.giving_up.store(false, Ordering::Release);
    }

    /// Waits for `ncclCommRevoke`, which another thread calls.
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
            (Need::Ready, Phase::Finalized) => violation(function, "the communicator was finalized"),
            (Need::Ready, phase) => {
                Err(fail(INVALID_USAGE, format!("{function} : the communicator is {phase:?}")))
            }
        }
    }

    /// Sends something to a rank.
    pub fn send(&self, to: u32, tag: Tag, body: Vec<u8>) {
        let message = Message { communicator: self.number, from: self.rank, to, tag, body };
        transport::send(&self.peers()[to as usize].address, message);
    }

    /// Waits for something from a rank.
    pub fn take(&self, from: u32, tag: Tag) -> Result<Vec<u8>, Stopped> {
        self.mailbox.take(from, tag, || self.is_stopped())
    }

    /// The number of the next exchange; taken at the call, so that it is the same on all ranks.
    pub fn next_exchange(&self) -> u64 {
        let mut state = self.state();
        state.exchanges += 1;
        state.exchanges
    }

    /// Everybody tells everybody something.
    pub fn exchange(
        &self,
        number: u64,
        with: impl Iterator<Item = u32> + Clone,
        body: &[u8],
    ) -> Result<Vec<Vec<u8>>, Stopped> {
        for rank in with.clone() {
            self.send(rank, Tag::Exchange(number), body.to_vec());
        }
        let before = self.revocations.load(Ordering::Acquire);
        let stop = || self.is_stopped() || self.revocations.load(Ordering::Acquire) != before;
        with.map(|rank| self.mailbox.take(rank, Tag::Exchange(number), stop)).collect()
    }

    /// All ranks.
    pub fn everyone(&self) -> std::ops::Range<u32> {
        0..self.ranks
    }

    /// The state that everybody is told from here on, if it is the first to go wrong.
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
        let lives = |(rank, peer): (usize, &Peer)| {
            peer.address == *address && !self.mailbox.has(rank as u32, Tag::Ended)
        };
        if self.peers().iter().enumerate().any(lives) {
            self.fail(REMOTE_ERROR);
        }
    }

    /// Counts work in, from when it is enqueued to when it has ended.
    pub fn bind(&self) {
        self.state().pending += 1;
    }

    /// Does what was bound as so many operations, unless the communicator has been stopped.
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

    /// Waits until nothing of it is in a stream.
    pub fn wait_for_operations(&self) -> Result<(), Stopped> {
        self.wait(|state| state.pending == 0, || self.is_stopped())
    }

    /// Waits until nobody works on it any more and no graph has it.
    pub fn wait_for_rest(&self) {
        let quiet = |state: &State| state.running == 0 && state.jobs == 0 && state.graphs == 0;
        // Nothing stops this wait: not even an abort returns before graphs are destroyed.
        let _ = self.wait(quiet, || false);
    }

    /// Waits until no graph has it.
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

    /// A graph has, or has no longer, operations of it.
    pub fn count_graph(&self, up: bool) {
        let mut state = self.state();
        state.graphs = if up { state.graphs + 1 } else { state.graphs - 1 };
        drop(state);
        self.changed.notify_all();
    }

    /// Begins work in the background: the state is InProgress until [`end_job`](Self::end_job).
    pub fn begin_job(&self) {
        let mut state = self.state();
        state.jobs += 1;
        state.result = IN_PROGRESS;
    }

    /// Ends work in the background.
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
