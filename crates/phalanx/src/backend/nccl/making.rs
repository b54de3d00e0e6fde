//! How a communicator is made: the library is called in a thread, so that a rank that does not come is an error here
//! and not a wait inside the library.

use super::communicator::{Communicator, ENDING, HandleCell};
use super::config::RawConfig;
use super::device::Device;
use super::library::Library;
use super::waiting::LOOK;
use crate::backend::host::Subject;
use crate::backend::{Call, Operation};
use crate::error::{Error, Result};
use crate::sync::lock;
use phalanx_sys::nccl::{NCCL_SPLIT_NOCOLOR, ncclComm_t, ncclResult_t, ncclUniqueId};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// How many threads of this process are making a communicator.
static AT_WORK: Mutex<usize> = Mutex::new(0);

/// Looks at a communicator, unless one is being made: its thread is inside of the library, and has not taken the turn.
pub(super) fn look_unless_making<R>(look: impl FnOnce() -> Option<R>) -> Option<R> {
    let at_work = lock(&AT_WORK);
    if *at_work == 0 { look() } else { None }
}

/// Where a communicator comes from.
#[derive(Clone)]
pub(super) enum Origin {
    /// An id that rank 0 made and told the others (`ncclCommInitRankConfig`; `ncclCommInitRank` before 2.14).
    Id(ncclUniqueId),
    /// The ranks of a communicator with the same colour (`ncclCommSplit`); without one: this rank is in no part.
    Split { parent: Arc<Communicator>, color: Option<i32>, key: i32 },
}

/// What the library is asked for.
struct Order {
    library: &'static Library,
    origin: Origin,
    place: (usize, usize),
    config: Option<RawConfig>,
    handle: Arc<HandleCell>,
}

// SAFETY: addresses of its own (configuration, handle), or the library's, which may move between threads (parent).
unsafe impl Send for Order {}

/// A communicator that the library is at work on.
pub(super) struct Making {
    answer: Receiver<ncclResult_t>,
    function: &'static str,
    parent: Option<Arc<Communicator>>,
}

impl Origin {
    fn function(&self) -> &'static str {
        match self {
            Origin::Id(_) => "ncclCommInitRankConfig",
            Origin::Split { .. } => "ncclCommSplit",
        }
    }
}

impl Order {
    fn is_possible(&self) -> Result<()> {
        let library = self.library;
        match &self.origin {
            Origin::Id(_) if self.config.is_none() => {
                library.need(library.ncclCommInitRank, "ncclCommInitRank").map(drop)
            }
            Origin::Id(_) => library.need(library.ncclCommInitRankConfig, self.origin.function()).map(drop),
            Origin::Split { .. } => library.need(library.ncclCommSplit, self.origin.function()).map(drop),
        }
    }

    /// Calls the library. The device is current.
    fn carry_out(mut self) -> ncclResult_t {
        let (rank, ranks) = (self.place.0 as i32, self.place.1 as i32);
        let handle = self.handle.as_ptr();
        let Some(config) = self.config.as_mut().map(RawConfig::as_mut) else {
            return self.carry_out_without_config(handle);
        };
        match &self.origin {
            Origin::Id(id) => match self.library.ncclCommInitRankConfig {
                // SAFETY: the cell is kept alive by this order and by the communicator; the configuration fits the
                // library's version and is read during the call.
                Some(init) => unsafe { init(handle, ranks, *id, rank, config) },
                None => ncclResult_t::InvalidUsage,
            },
            Origin::Split { parent, color, key } => match self.library.ncclCommSplit {
                // SAFETY: as above; the parent's rank waits and calls nothing else with it.
                Some(split) => unsafe {
                    split(parent.handle(), color.unwrap_or(NCCL_SPLIT_NOCOLOR), *key, handle, config)
                },
                None => ncclResult_t::InvalidUsage,
            },
        }
    }
}

impl Order {
    /// As the libraries that have no settings do it.
    fn carry_out_without_config(&self, handle: *mut ncclComm_t) -> ncclResult_t {
        let (rank, ranks) = (self.place.0 as i32, self.place.1 as i32);
        match (&self.origin, self.library.ncclCommInitRank) {
            // SAFETY: the cell is kept alive by this order and by the communicator.
            (Origin::Id(id), Some(init)) => unsafe { init(handle, ranks, *id, rank) },
            _ => ncclResult_t::InvalidUsage,
        }
    }
}

impl Making {
    /// Starts it. The device's turn is not taken: the library waits for other ranks, of which some may need it.
    pub fn start(
        library: &'static Library,
        device: &Device,
        origin: &Origin,
        place: (usize, usize),
        config: Option<RawConfig>,
        handle: &Arc<HandleCell>,
    ) -> Result<Making> {
        let (function, parent) = match origin {
            Origin::Id(_) => (origin.function(), None),
            Origin::Split { parent, .. } => (origin.function(), Some(parent.clone())),
        };
        let order = Order { library, origin: origin.clone(), place, config, handle: handle.clone() };
        order.is_possible()?;
        if let Some(parent) = &parent {
            // Nobody ends it while the library is inside.
            let _turn = parent.turn()?;
            parent.set_queued(true);
        }
        let (device, (sender, answer)) = (*device, channel());
        let work = move || {
            let Ok(_current) = device.enter() else { return };
            *lock(&AT_WORK) += 1;
            let result = order.carry_out();
            *lock(&AT_WORK) -= 1;
            let _ = sender.send(result);
        };
        match std::thread::Builder::new().name("phalanx-init".into()).spawn(work) {
            Ok(_) => Ok(Making { answer, function, parent }),
            Err(error) => {
                parent.iter().for_each(|parent| parent.leave_group());
                let remedy = "a communicator is made in one: raise `ulimit -u`";
                Err(Error::system("starting a thread", error, remedy))
            }
        }
    }

    /// Waits until the library has done it; `rank` is the one that looks out for the others. If the library does not
    /// come back, its thread stays, and with it what is half made: nothing can end a call of NCCL that has no
    /// communicator yet.
    pub fn wait(&self, rank: &Communicator, subject: &Subject, since: Instant) -> Result<()> {
        let result = loop {
            match self.answer.recv_timeout(LOOK) {
                Ok(result) => break result,
                Err(RecvTimeoutError::Disconnected) => break ncclResult_t::UnhandledCudaError,
                Err(RecvTimeoutError::Timeout) => {}
            }
            if let Err(verdict) = self.look(rank, subject, since) {
                let (rank, function) = (rank.rank, self.function);
                tracing::error!(rank, "{function} has not come back: what it made is leaked");
                self.give_up(&verdict);
                return Err(verdict);
            }
        };
        self.parent.iter().for_each(|parent| parent.leave_group());
        if !matches!(result, ncclResult_t::Success | ncclResult_t::InProgress) {
            return Err(rank.cause(result, self.function, subject));
        }
        self.parent.as_ref().map_or(Ok(()), |parent| parent.settle(subject, since))
    }
}

impl Making {
    /// Looks out for the ranks of what is made, and for those of the communicator that is split: the library needs them all.
    fn look(&self, rank: &Communicator, subject: &Subject, since: Instant) -> Result<()> {
        rank.witness.look(subject, since)?;
        self.parent.as_ref().map_or(Ok(()), |parent| {
            let split = Subject::call(parent.collectives(), &Call::empty(Operation::Split));
            parent.witness.look(&split, since)
        })
    }

    /// Lets the library's thread be. The parent of a part fails too: it is what the thread is inside of.
    fn give_up(&self, verdict: &Error) {
        let Some(parent) = &self.parent else { return };
        if parent.revoke() && self.answer.recv_timeout(ENDING).is_ok() {
            parent.leave_group();
            parent.fail(verdict.clone());
        } else {
            parent.leak(verdict.clone());
        }
    }
}

impl Communicator {
    /// Makes it. Collective.
    pub(super) fn make(&self, origin: &Origin, config: Option<RawConfig>) -> Result<()> {
        let since = Instant::now();
        // The first operation on the witness.
        let subject = Subject::call(1, &Call::empty(Operation::Init));
        self.witness.announce(&subject);
        let place = (self.rank, self.ranks);
        let made = Making::start(self.library, &self.device, origin, place, config, &self.handle)
            .and_then(|making| making.wait(self, &subject, since))
            .and_then(|()| {
                self.ended.store(self.handle().is_null(), Ordering::Release);
                self.settle(&subject, since)
            })
            .map_err(|error| self.fail(error));
        self.witness.withdraw(&subject);
        made
    }

    /// This rank's part in a split of its communicator that makes it no member of anything. Collective.
    pub(super) fn take_no_part(self: &Arc<Self>, subject: &Subject, config: Option<RawConfig>) -> Result<()> {
        let origin = Origin::Split { parent: self.clone(), color: None, key: 0 };
        Making::start(self.library, &self.device, &origin, (0, 0), config, &Arc::default())
            .and_then(|making| making.wait(self, subject, Instant::now()))
            .map_err(|error| self.fail(error))
    }
}
