//! Initialization of a communicator: the library is called in a thread of its own, so that a missing rank
//! becomes an error here instead of an endless wait.

use super::communicator::{Communicator, ENDING, HandleCell};
use super::config::RawConfig;
use super::device::GpuDevice;
use super::library::Library;
use crate::contract::{Call, Operation};
use crate::control::control_channel::AnnouncedCall;
use crate::gpu::backoff::LOOK;
use crate::os::RunInstant;
use crate::os::sync::lock;
use crate::types::error::{Error, Result};
use phalanx_sys::nccl::{NCCL_SPLIT_NOCOLOR, ncclComm_t, ncclResult_t, ncclUniqueId};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The threads of this process that are making a communicator.
static WORK: Mutex<InitThreads> =
    Mutex::new(InitThreads { threads: 0, lost: 0, has_begun: false, is_kept_out: false });

struct InitThreads {
    threads: usize,
    /// Those of them that the library does not let go of.
    lost: usize,
    /// Whether there ever was one.
    has_begun: bool,
    /// Whether [`NoInits`] keeps others from beginning.
    is_kept_out: bool,
}

/// Looks at a communicator, unless one is being made: its thread is inside the library without the library
/// lock.
pub(crate) fn look_unless_initializing<R>(look: impl FnOnce() -> Option<R>) -> Option<R> {
    let work = lock(&WORK);
    if work.threads == 0 { look() } else { None }
}

/// Runs `f` if no communicator was made in this process yet.
pub(crate) fn before_the_first<R>(f: impl FnOnce() -> R) -> Option<R> {
    let work = lock(&WORK);
    (!work.has_begun).then(f)
}

/// A thread that is making a communicator, until dropped.
struct InitThread {
    stage: Arc<AtomicU8>,
}

impl InitThread {
    /// Waits for [`NoInits`]; an error if a call of the library on this device does not come back.
    fn begin(device: &GpuDevice) -> Result<InitThread> {
        loop {
            device.library_lock.check()?;
            let mut work = lock(&WORK);
            if !work.is_kept_out {
                work.threads += 1;
                work.has_begun = true;
                return Ok(InitThread { stage: Arc::new(AtomicU8::new(BEFORE)) });
            }
            drop(work);
            std::thread::sleep(LOOK);
        }
    }
}

impl Drop for InitThread {
    fn drop(&mut self) {
        let mut work = lock(&WORK);
        work.threads -= 1;
        work.lost -= usize::from(self.stage.swap(OVER, Ordering::AcqRel) == LOST);
    }
}

/// No communicator is being made, and none can be until this is dropped. There is one at a time.
pub(super) struct NoInits(());

impl NoInits {
    /// `None` if a communicator is being made, or there is one.
    pub fn begin() -> Option<NoInits> {
        let mut work = lock(&WORK);
        if work.threads > work.lost || work.is_kept_out {
            return None;
        }
        work.is_kept_out = true;
        Some(NoInits(()))
    }

    /// Waits until it can begin, but no longer than the end of a communicator may take.
    pub fn wait() -> Option<NoInits> {
        let since = RunInstant::now();
        loop {
            match NoInits::begin() {
                None if since.elapsed() < ENDING => std::thread::sleep(LOOK),
                begun => return begun,
            }
        }
    }
}

impl Drop for NoInits {
    fn drop(&mut self) {
        lock(&WORK).is_kept_out = false;
    }
}

/// Where a communicator comes from.
#[derive(Clone)]
pub(crate) enum CommOrigin {
    /// An id that rank 0 made and told the others (`ncclCommInitRankConfig`; `ncclCommInitRank` before 2.14),
    /// or several of as many ranks (`ncclCommInitRankScalable`).
    Ids(Vec<ncclUniqueId>),
    /// The ranks of a communicator with the same colour (`ncclCommSplit`); without one: this rank is in no
    /// part.
    Split { parent: Arc<Communicator>, color: Option<i32>, key: i32 },
    /// A communicator of the program's, of the same ranks, which stays as it is (`ncclCommSplit` with one colour).
    Copy(Foreign),
}

/// A communicator of the program's. It is alive, and nobody calls anything with it meanwhile.
#[derive(Clone, Copy)]
pub(crate) struct Foreign(pub ncclComm_t);

/// Arguments of the library's call.
struct InitCall {
    library: &'static Library,
    origin: CommOrigin,
    place: (usize, usize),
    config: Option<RawConfig>,
    handle: Arc<HandleCell>,
}

// SAFETY: addresses of its own (configuration, handle), or the library's, which may move between threads
// (parent).
unsafe impl Send for InitCall {}

/// A communicator that the library is making.
pub(crate) struct PendingInit {
    answer: Receiver<ncclResult_t>,
    function: &'static str,
    parent: Option<Arc<Communicator>>,
    stage: Arc<AtomicU8>,
}

/// Stages of the thread that calls the library: before the call, inside, cancelled before it, given up inside, or over.
const BEFORE: u8 = 0;
const INSIDE: u8 = 1;
const CANCELLED: u8 = 2;
const LOST: u8 = 3;
const OVER: u8 = 4;

/// How long a thread that goes inside may take until it is where the library notices that it shall come out.
const ENTRY: Duration = Duration::from_millis(20);

impl CommOrigin {
    fn function(&self) -> &'static str {
        match self {
            CommOrigin::Ids(ids) if ids.len() > 1 => "ncclCommInitRankScalable",
            CommOrigin::Ids(_) => "ncclCommInitRankConfig",
            CommOrigin::Split { .. } | CommOrigin::Copy(_) => "ncclCommSplit",
        }
    }
}

impl InitCall {
    fn is_possible(&self) -> Result<()> {
        let library = self.library;
        match &self.origin {
            CommOrigin::Ids(ids) if ids.len() > 1 => {
                library.need(library.ncclCommInitRankScalable, self.origin.function()).map(drop)
            }
            CommOrigin::Ids(_) if self.config.is_none() => {
                library.need(library.ncclCommInitRank, "ncclCommInitRank").map(drop)
            }
            CommOrigin::Ids(_) => {
                library.need(library.ncclCommInitRankConfig, self.origin.function()).map(drop)
            }
            CommOrigin::Split { .. } | CommOrigin::Copy(_) => {
                library.need(library.ncclCommSplit, self.origin.function()).map(drop)
            }
        }
    }

    /// Calls the library. The device is current.
    fn carry_out(mut self) -> ncclResult_t {
        let (rank, ranks) = (self.place.0 as i32, self.place.1 as i32);
        let handle = self.handle.as_ptr();
        let Some(config) = self.config.as_mut().map(RawConfig::as_mut) else {
            return self.carry_out_without_config(handle);
        };
        match &mut self.origin {
            CommOrigin::Ids(ids) if ids.len() > 1 => match self.library.ncclCommInitRankScalable {
                // SAFETY: as below; the ids are read during the call.
                Some(init) => unsafe {
                    init(handle, ranks, rank, ids.len() as i32, ids.as_mut_ptr(), config)
                },
                None => ncclResult_t::InvalidUsage,
            },
            CommOrigin::Ids(ids) => match self.library.ncclCommInitRankConfig {
                // SAFETY: the cell is kept alive by this order and by the communicator; the configuration
                // fits the library's version and is read during the call.
                Some(init) => unsafe { init(handle, ranks, ids[0], rank, config) },
                None => ncclResult_t::InvalidUsage,
            },
            CommOrigin::Split { parent, color, key } => match self.library.ncclCommSplit {
                // SAFETY: as above; the parent's rank waits and calls nothing else with it.
                Some(split) => unsafe {
                    split(parent.handle(), color.unwrap_or(NCCL_SPLIT_NOCOLOR), *key, handle, config)
                },
                None => ncclResult_t::InvalidUsage,
            },
            CommOrigin::Copy(foreign) => match self.library.ncclCommSplit {
                // SAFETY: as above, by the promise of `Foreign`.
                Some(split) => unsafe { split(foreign.0, 0, rank, handle, config) },
                None => ncclResult_t::InvalidUsage,
            },
        }
    }
}

impl InitCall {
    /// For libraries without settings (before 2.14).
    fn carry_out_without_config(&self, handle: *mut ncclComm_t) -> ncclResult_t {
        let (rank, ranks) = (self.place.0 as i32, self.place.1 as i32);
        match (&self.origin, self.library.ncclCommInitRank) {
            // SAFETY: the cell is kept alive by this order and by the communicator.
            (CommOrigin::Ids(ids), Some(init)) => unsafe { init(handle, ranks, ids[0], rank) },
            _ => ncclResult_t::InvalidUsage,
        }
    }
}

impl PendingInit {
    /// Starts the call, without the library lock: the library waits for other ranks, some of which may need
    /// the lock.
    pub fn start(
        library: &'static Library,
        device: &GpuDevice,
        origin: &CommOrigin,
        place: (usize, usize),
        config: Option<RawConfig>,
        handle: &Arc<HandleCell>,
    ) -> Result<PendingInit> {
        let (function, parent) = match origin {
            CommOrigin::Ids(_) | CommOrigin::Copy(_) => (origin.function(), None),
            CommOrigin::Split { parent, .. } => (origin.function(), Some(parent.clone())),
        };
        let order = InitCall { library, origin: origin.clone(), place, config, handle: handle.clone() };
        order.is_possible()?;
        let thread = InitThread::begin(device)?;
        if let Some(parent) = &parent {
            // Nobody ends it while the library is inside.
            let _locked = parent.lock_library()?;
            parent.set_queued(true);
        }
        let (device, (sender, answer)) = (*device, channel());
        let stage = thread.stage.clone();
        let work = move || {
            let _current = device.enter();
            let result = match advance(&thread.stage, BEFORE, INSIDE) {
                true => order.carry_out(),
                false => ncclResult_t::InvalidUsage,
            };
            drop(thread);
            let _ = sender.send(result);
        };
        match std::thread::Builder::new().name("phalanx-init".into()).spawn(work) {
            Ok(_) => Ok(PendingInit { answer, function, parent, stage }),
            Err(error) => {
                parent.iter().for_each(|parent| parent.leave_group());
                let remedy = "a communicator is made in one: raise `ulimit -u`";
                Err(Error::system("starting a thread", error, remedy))
            }
        }
    }

    /// Waits until the library has done it, for `rank`, the rank of what is made. If the library does not
    /// come back, its thread stays, and with it what is half made: nothing can end a call of NCCL that has no
    /// communicator yet.
    pub fn wait(&self, rank: &Communicator, announced: &AnnouncedCall, since: RunInstant) -> Result<()> {
        // A split needs all ranks of the parent, so the parent's control channel diagnoses.
        let (judge, announced) = match &self.parent {
            Some(parent) => {
                (&**parent, &AnnouncedCall::call(parent.collectives(), &Call::empty(Operation::Split)))
            }
            None => (rank, announced),
        };
        let result = loop {
            match self.answer.recv_timeout(LOOK) {
                Ok(result) => break result,
                Err(RecvTimeoutError::Disconnected) => break ncclResult_t::UnhandledCudaError,
                Err(RecvTimeoutError::Timeout) => {}
            }
            if let Err(failure) = judge.control_channel.check_peers(announced, since) {
                self.give_up(rank.rank, &failure);
                return Err(failure);
            }
        };
        self.parent.iter().for_each(|parent| parent.leave_group());
        if !matches!(result, ncclResult_t::Success | ncclResult_t::InProgress) {
            return Err(judge.cause(result, self.function, announced));
        }
        self.parent.as_ref().map_or(Ok(()), |parent| parent.settle(announced, since))
    }

    /// Makes the thread come back, or leaves it. A parent that is being split fails too: the thread is inside
    /// it.
    fn give_up(&self, rank: usize, failure: &Error) {
        let is_out = advance(&self.stage, BEFORE, CANCELLED) || self.fetch();
        if !is_out {
            crate::os::log::error!(rank, "{} has not come back: what it made is leaked", self.function);
            self.lose();
        }
        match &self.parent {
            Some(parent) if is_out => {
                parent.leave_group();
                parent.fail(failure.clone());
            }
            Some(parent) => parent.leak(failure.clone()),
            None => {}
        }
    }

    /// Nobody waits any more for a thread that is still inside.
    fn lose(&self) {
        let mut work = lock(&WORK);
        work.lost += usize::from(advance(&self.stage, INSIDE, LOST));
    }

    /// Makes the thread come back from the library; false if that is impossible.
    fn fetch(&self) -> bool {
        let Some(parent) = &self.parent else { return false };
        // The library forgets a revocation once the threads inside have seen it.
        self.answer.recv_timeout(ENTRY).is_ok() || parent.revoke() && self.answer.recv_timeout(ENDING).is_ok()
    }
}

/// Whether the thread was at one stage, and is at the next one now.
fn advance(stage: &AtomicU8, from: u8, next: u8) -> bool {
    stage.compare_exchange(from, next, Ordering::AcqRel, Ordering::Acquire).is_ok()
}

impl Communicator {
    /// Makes it. Collective.
    pub(crate) fn make(&self, origin: &CommOrigin, config: Option<RawConfig>) -> Result<()> {
        let since = RunInstant::now();
        // The first operation on the control_channel.
        let announced = AnnouncedCall::call(1, &Call::empty(Operation::Init));
        self.control_channel.announce(&announced);
        let place = (self.rank, self.ranks);
        let made = PendingInit::start(self.library, &self.device, origin, place, config, &self.handle)
            .and_then(|pending| pending.wait(self, &announced, since))
            .and_then(|()| {
                self.ended.store(self.handle().is_null(), Ordering::Release);
                self.settle(&announced, since)
            })
            .map(|()| self.is_made.store(true, Ordering::Release))
            .map_err(|error| self.fail(error));
        self.control_channel.withdraw(&announced);
        made
    }

    /// This rank's part in a split of its communicator that makes it no member of anything. Collective.
    pub(crate) fn take_no_part(
        self: &Arc<Self>,
        announced: &AnnouncedCall,
        config: Option<RawConfig>,
    ) -> Result<()> {
        let origin = CommOrigin::Split { parent: self.clone(), color: None, key: 0 };
        PendingInit::start(self.library, &self.device, &origin, (0, 0), config, &Arc::default())
            .and_then(|pending| pending.wait(self, announced, RunInstant::now()))
            .map_err(|error| self.fail(error))
    }
}
