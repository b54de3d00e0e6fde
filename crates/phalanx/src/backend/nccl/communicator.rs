//! The C communicator: made without blocking, watched, and ended in one place.
//!
//! A communicator is either usable, or has failed (then it was aborted and every call answers the same error), or
//! has ended. `ncclInProgress` never leaves this module: whoever gets it waits here, with the deadline.

use super::config::Config;
use super::device::Device;
use super::group;
use super::library::Library;
use super::memory::Handle;
use super::staging::Stages;
use crate::backend::host::{Subject, Witness};
use crate::backend::{Call, Departure, Operation, Stream};
use crate::error::{Error, Result};
use crate::sync::lock;
use phalanx_sys::nccl::{NCCL_SPLIT_NOCOLOR, ncclComm_t, ncclResult_t, ncclUniqueId};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

/// A wait polls for this long without giving its core away: most operations of a few bytes are over by then.
const SPINNING: Duration = Duration::from_micros(200);
/// Then it sleeps for so long between two looks, ...
const NAP: Duration = Duration::from_micros(50);
/// ... and looks for errors and at the peers this often.
const LOOK: Duration = Duration::from_millis(2);
/// How long the end of a communicator (of one that works, and of one that failed) may take in the library.
pub(super) const ENDING: Duration = Duration::from_secs(10);

/// One rank's communicator in the library, and what belongs to it.
pub(crate) struct Communicator {
    pub library: &'static Library,
    pub device: Device,
    pub rank: usize,
    pub ranks: usize,
    pub witness: Witness,
    pub stages: Stages,
    /// The library may write to it during set-up, from a thread of its own: it has an address of its own.
    handle: Box<ncclComm_t>,
    last: Mutex<Last>,
    failed: OnceLock<Error>,
    ended: AtomicBool,
    /// What to give back to the library before the end, by number.
    registrations: Mutex<BTreeMap<u64, Handle>>,
}

/// What this rank enqueued last.
#[derive(Clone, Copy)]
struct Last {
    /// Number of the last collective, and of the last message.
    collectives: u64,
    messages: u64,
    subject: Option<Subject>,
    stream: Stream,
}

// SAFETY: the handle is an address that the library owns; calls with it are made under the device's lock, one
// thread at a time (`Comm` is not `Sync`).
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

/// Where a communicator comes from.
pub(crate) enum Origin<'a> {
    /// An id that rank 0 made and told the others (`ncclCommInitRankConfig`).
    Id(ncclUniqueId),
    /// The ranks of `parent` with the same colour (`ncclCommSplit`).
    Split { parent: &'a Communicator, color: i32, key: i32 },
}

impl Communicator {
    /// Starts to make a communicator; [`finish`](Communicator::finish) waits for it.
    pub fn start(
        library: &'static Library,
        device: Device,
        witness: Witness,
        (rank, ranks): (usize, usize),
        origin: &Origin<'_>,
        config: &Config,
    ) -> Result<Communicator> {
        let mut communicator = Communicator {
            library,
            device,
            rank,
            ranks,
            witness,
            stages: Stages::default(),
            handle: Box::new(std::ptr::null_mut()),
            last: Mutex::new(Last { collectives: 0, messages: 0, subject: None, stream: Stream::NONE }),
            failed: OnceLock::new(),
            ended: AtomicBool::new(false),
            registrations: Mutex::default(),
        };
        communicator.witness.announce(&communicator.making());
        let mut config = config.raw(library)?;
        let handle: *mut ncclComm_t = &raw mut *communicator.handle;
        let _current = communicator.device.enter()?;
        let _turn = lock(communicator.device.turn);
        let (result, function) = match origin {
            Origin::Id(id) => {
                let name = "ncclCommInitRankConfig";
                let init = library.need(library.ncclCommInitRankConfig, name)?;
                // SAFETY: the handle is in a box that lives as long as the communicator; the configuration fits the
                // library's version and is read during the call.
                (unsafe { init(handle, ranks as i32, *id, rank as i32, config.as_mut()) }, name)
            }
            Origin::Split { parent, color, key } => {
                let name = "ncclCommSplit";
                let split = library.need(library.ncclCommSplit, name)?;
                // SAFETY: as above; the parent is usable, and waits for its own part in `finish`.
                (unsafe { split(parent.handle(), *color, *key, handle, config.as_mut()) }, name)
            }
        };
        match result {
            ncclResult_t::Success | ncclResult_t::InProgress => Ok(communicator),
            error => {
                // Nothing was made.
                communicator.ended = AtomicBool::new(true);
                Err(library.error(error, function).into())
            }
        }
    }

    /// The first operation on the witness: its making.
    fn making(&self) -> Subject {
        Subject::call(1, &Call::empty(Operation::Init))
    }

    /// This rank's part in a split that makes it no member of anything.
    pub fn take_no_part(&self) -> Result<()> {
        let name = "ncclCommSplit";
        let split = self.library.need(self.library.ncclCommSplit, name)?;
        // Never written, since there is no child; the library may look at it until `settle`.
        let child = Box::leak(Box::new(std::ptr::null_mut()));
        let _turn = lock(self.device.turn);
        // SAFETY: a usable communicator; the out-pointer is never freed; no configuration is the default one.
        let result = unsafe { split(self.handle(), NCCL_SPLIT_NOCOLOR, 0, child, std::ptr::null_mut()) };
        match result {
            ncclResult_t::Success | ncclResult_t::InProgress => Ok(()),
            error => Err(self.library.error(error, name).into()),
        }
    }

    /// Waits until the communicator is made.
    pub fn finish(&self) -> Result<()> {
        let (making, since) = (self.making(), Instant::now());
        let made = if self.handle().is_null() { Ok(()) } else { self.settle(&making, since) };
        self.witness.withdraw(&making);
        made
    }

    /// The C handle.
    pub fn handle(&self) -> ncclComm_t {
        // SAFETY: the library writes it once, before `finish` returns; it is aligned and read whole.
        unsafe { (&raw const *self.handle).read_volatile() }
    }

    /// The error that every call answers, if the communicator has failed.
    #[inline]
    pub fn check(&self) -> Result<()> {
        if self.failed.get().is_some() || self.witness.check().is_err() {
            return Err(self.failure());
        }
        Ok(())
    }

    #[cold]
    fn failure(&self) -> Error {
        match self.witness.check() {
            Err(verdict) => self.fail(verdict),
            Ok(()) => self.failed.get().expect("only called after a failure").clone(),
        }
    }

    /// Notes and announces a collective that is about to be enqueued.
    #[inline]
    pub fn next_collective(&self, call: &Call<'_>) -> Subject {
        let mut last = lock(&self.last);
        last.collectives += 1;
        let subject = Subject::call(last.collectives, call);
        if !call.operation.is_empty_handed() {
            (last.subject, last.stream) = (Some(subject), call.stream);
        }
        self.witness.announce(&subject);
        subject
    }

    /// Notes a message that is about to be enqueued.
    pub fn next_message(&self, transfer: &crate::backend::Transfer) -> Subject {
        let mut last = lock(&self.last);
        last.messages += 1;
        let subject = Subject::message(last.messages, transfer);
        (last.subject, last.stream) = (Some(subject), transfer.stream);
        subject
    }

    /// Waits until the library has done what it answered `ncclInProgress` for.
    pub fn settle(&self, subject: &Subject, since: Instant) -> Result<()> {
        let get_error = self.library.need(self.library.ncclCommGetAsyncError, "ncclCommGetAsyncError")?;
        let mut looked = Instant::now();
        let _waiting = self.witness.waiting();
        loop {
            let mut state = ncclResult_t::Success;
            let answered = {
                let _turn = lock(self.device.turn);
                // SAFETY: a communicator that was made or is being made; legal while in progress.
                unsafe { get_error(self.handle(), &raw mut state) }
            };
            let state = if answered == ncclResult_t::Success { state } else { answered };
            match state {
                ncclResult_t::Success => return Ok(()),
                ncclResult_t::InProgress => {}
                error => {
                    let error = self.library.error(error, "ncclCommGetAsyncError");
                    return Err(self.fail(error.within(self.rank, subject).fatal()));
                }
            }
            if since.elapsed() > SPINNING {
                std::thread::sleep(NAP);
            }
            if looked.elapsed() > LOOK {
                looked = Instant::now();
                self.witness.look(subject, since).map_err(|verdict| self.fail(verdict))?;
            }
        }
    }

    /// [`settle`](Communicator::settle), or the error of a communicator that has failed.
    pub fn settle_unless_failed(&self, subject: &Subject, since: Instant) -> Result<()> {
        self.check()?;
        self.settle(subject, since)
    }

    /// Waits until this rank's operations are complete.
    pub fn sync(&self) -> Result<()> {
        let last = *lock(&self.last);
        let Some(subject) = last.subject else {
            return self.check();
        };
        self.wait_for(last.stream, &subject)?;
        let mut now = lock(&self.last);
        if now.collectives == last.collectives && now.messages == last.messages {
            now.subject = None;
        }
        self.witness.complete(last.collectives);
        Ok(())
    }

    /// Number of the last collective.
    pub fn collectives(&self) -> u64 {
        lock(&self.last).collectives
    }

    /// Notes that something was enqueued that is no collective and no message.
    pub fn used(&self, stream: Stream) {
        let mut last = lock(&self.last);
        last.stream = stream;
        let collectives = last.collectives;
        last.subject.get_or_insert_with(|| Subject::call(collectives, &Call::empty(Operation::Init)));
    }

    /// Calls the library with the communicator, and waits until it has done it.
    pub fn call(&self, function: &'static str, f: impl FnOnce(ncclComm_t) -> ncclResult_t) -> Result<()> {
        self.check()?;
        let _current = self.device.enter()?;
        let result = {
            let _turn = lock(self.device.turn);
            f(self.handle())
        };
        match result {
            // Some functions answer success while a thread of the library still works for them, and will write to
            // what they were given (ncclCommWindowRegister of 2.28).
            ncclResult_t::Success | ncclResult_t::InProgress => {
                self.settle(&Subject::call(self.collectives(), &Call::empty(Operation::Init)), Instant::now())
            }
            error => Err(self.library.error(error, function).into()),
        }
    }

    /// One look for an error.
    pub fn look_for_error(&self) -> Result<()> {
        self.check()?;
        self.settle(&Subject::call(self.collectives(), &Call::empty(Operation::Init)), Instant::now())
    }

    /// Keeps what has to be given back before the end; answers its number.
    pub fn keep_registration(&self, handle: Handle) -> u64 {
        let mut registrations = lock(&self.registrations);
        let number = registrations.last_key_value().map_or(0, |(last, _)| last + 1);
        registrations.insert(number, handle);
        number
    }

    pub fn registration(&self, number: u64) -> Option<Handle> {
        lock(&self.registrations).get(&number).copied()
    }

    /// Gives a registration back, unless the communicator has ended, which did so.
    pub fn end_registration(&self, number: u64) {
        let handle = lock(&self.registrations).remove(&number);
        if let Some(handle) = handle
            && !self.ended.load(Ordering::Acquire)
        {
            self.deregister(handle);
        }
    }

    /// Waits until a stream's work is complete, with the deadline, looking for errors and at the peers.
    pub fn wait_for(&self, stream: Stream, subject: &Subject) -> Result<()> {
        self.check()?;
        let _current = self.device.enter()?;
        let since = Instant::now();
        let _waiting = self.witness.waiting();
        let mut looked = since;
        loop {
            match self.device.is_idle(stream) {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => return Err(self.fail(error)),
            }
            let now = Instant::now();
            if now - since > SPINNING {
                std::thread::sleep(NAP);
            } else {
                std::hint::spin_loop();
            }
            if now - looked > LOOK {
                looked = now;
                self.settle(subject, since)?;
                self.witness.look(subject, since).map_err(|verdict| self.fail(verdict))?;
            }
        }
    }

    /// Fails for all ranks: aborts, so that what is on the GPU ends, and answers the error for every call.
    #[cold]
    pub fn fail(&self, error: Error) -> Error {
        if self.failed.set(error).is_ok() {
            self.witness.give_up();
        }
        // The library must not lose a communicator while a group has operations on it: what comes after its end aborts.
        if !group::is_open() && !self.ended.load(Ordering::Acquire) {
            self.abort();
            self.drain();
        }
        self.failed.get().expect("set above, or before").clone()
    }

    /// Ends the C communicator at once. `ncclCommAbort` frees it: nothing may be called with it afterwards.
    fn abort(&self) {
        if self.ended.swap(true, Ordering::AcqRel) || self.handle().is_null() {
            return;
        }
        let Some(abort) = self.library.ncclCommAbort else { return };
        let (handle, turn) = (Raw(self.handle()), self.device.turn);
        let aborted = bounded("phalanx-abort", move || {
            let Raw(handle) = { handle };
            let _turn = lock(turn);
            // SAFETY: called once, since `ended` was not set; the only thread inside, by the lock.
            unsafe { abort(handle) };
        });
        if !aborted {
            tracing::error!(
                rank = self.rank,
                "ncclCommAbort has not come back after {ENDING:?}: the communicator is leaked"
            );
        }
    }

    /// Waits, for a while, until the last stream has nothing left of an aborted operation.
    fn drain(&self) {
        let stream = lock(&self.last).stream;
        let drained = self.device.enter().and_then(|_current| self.device.wait_idle(stream, ENDING));
        if let Err(error) = drained {
            tracing::error!(rank = self.rank, "GPU work of a failed operation has not ended: {error}");
        }
    }

    /// The end: waits for the work, finalizes and destroys; aborts what does not end, or must not wait.
    pub fn depart(&self, departure: Departure) {
        if !self.ended.load(Ordering::Acquire) && !self.handle().is_null() {
            let orderly = departure == Departure::Left && self.end();
            if !orderly {
                self.abort();
                self.drain();
            }
        }
        self.witness.depart(departure);
    }

    /// Finalizes and destroys; false if the communicator has to be aborted.
    fn end(&self) -> bool {
        let Ok(_current) = self.device.enter() else { return false };
        if let Err(error) = self.sync() {
            tracing::error!(rank = self.rank, "a communicator ended with work that failed: {error}");
            return false;
        }
        for (_, handle) in std::mem::take(&mut *lock(&self.registrations)) {
            self.deregister(handle);
        }
        // Peers that still need this rank must not wait for it while it ends.
        self.witness.depart(Departure::Left);
        if let Some(finalize) = self.library.ncclCommFinalize {
            let result = {
                let _turn = lock(self.device.turn);
                // SAFETY: a usable communicator; nothing but looking at it and destroying follows.
                unsafe { finalize(self.handle()) }
            };
            match result {
                ncclResult_t::Success | ncclResult_t::InProgress if self.is_finalized() => {}
                state => {
                    tracing::warn!(
                        rank = self.rank,
                        "a communicator could not be finalized: {state:?}; it is aborted"
                    );
                    return false;
                }
            }
        }
        let Some(destroy) = self.library.ncclCommDestroy else { return false };
        if self.ended.swap(true, Ordering::AcqRel) {
            return true;
        }
        let (handle, turn) = (Raw(self.handle()), self.device.turn);
        let destroyed = bounded("phalanx-destroy", move || {
            let Raw(handle) = { handle };
            let _turn = lock(turn);
            // SAFETY: finalized and without error; called once, since `ended` was not set.
            unsafe { destroy(handle) };
        });
        if !destroyed {
            tracing::error!(
                rank = self.rank,
                "ncclCommDestroy has not come back after {ENDING:?} (does a CUDA graph that captured the \
                 communicator still live?): the communicator is leaked"
            );
        }
        true
    }
}

impl Communicator {
    /// Waits, with a bound, until finalizing is done; false if it fails. Peers that have gone do not matter any more.
    fn is_finalized(&self) -> bool {
        let Some(get_error) = self.library.ncclCommGetAsyncError else { return true };
        let since = Instant::now();
        while since.elapsed() < ENDING {
            let mut state = ncclResult_t::InternalError;
            {
                let _turn = lock(self.device.turn);
                // SAFETY: a communicator that is being finalized; legal while in progress.
                unsafe { get_error(self.handle(), &raw mut state) };
            }
            match state {
                ncclResult_t::InProgress => std::thread::sleep(NAP),
                state => return state == ncclResult_t::Success,
            }
        }
        false
    }
}

struct Raw(ncclComm_t);
// SAFETY: moving a communicator between threads is fine (NCCL's user guide, thread safety).
unsafe impl Send for Raw {}

/// Runs `f` in a thread of its own; whether it came back in time.
fn bounded(name: &str, f: impl FnOnce() + Send + 'static) -> bool {
    let (sender, receiver) = channel();
    let thread = std::thread::Builder::new().name(name.into()).spawn(move || {
        f();
        let _ = sender.send(());
    });
    thread.is_ok() && receiver.recv_timeout(ENDING).is_ok()
}
