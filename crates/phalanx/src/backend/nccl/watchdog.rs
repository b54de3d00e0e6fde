//! The watchdog: one thread of the process, which watches communicators without a waiting thread.
//!
//! It looks for a thread that is stuck inside the library, for GPU work that cannot end because a peer is
//! gone or missing, and for asynchronous errors of the library. It costs an operation two stores.

use super::communicator::{Communicator, ENDING};
use super::init::look_unless_initializing;
use super::queries::FULL;
use super::reclaim;
use super::shutdown::wait_until_all_are_out;
use super::waiting::ASYNC_ERROR;
use crate::contract::Departure;
use crate::control::control_channel::AnnouncedCall;
use crate::os::RunInstant;
use crate::os::sync::lock;
use crate::os::{at_exit, leave};
use crate::types::error::{Error, Result};
use phalanx_sys::nccl::ncclResult_t;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, Once, Weak};
use std::time::Duration;

/// Longest time between two rounds over all communicators.
const ROUND: Duration = Duration::from_millis(100);

static WATCHED: Mutex<Vec<Watched>> = Mutex::new(Vec::new());

/// All communicators of this process that are alive.
pub(crate) fn all() -> Vec<Arc<Communicator>> {
    lock(&WATCHED).iter().filter_map(|watched| watched.communicator.upgrade()).collect()
}

/// A communicator, with the state seen in the last round.
struct Watched {
    communicator: Weak<Communicator>,
    /// The current call into the library, and when it was first seen.
    library_calls: u64,
    calling_since: RunInstant,
    /// The last enqueued call, and since when it is the last.
    sequence: (String, u64),
    enqueued: RunInstant,
    /// A thread is failing it.
    is_over: bool,
}

/// Watches a communicator from now on. Also registers the end of all communicators at process exit.
pub(crate) fn watch(communicator: &Arc<Communicator>) -> Result<()> {
    start()?;
    // Now, since making it loaded the last of what the library needs.
    communicator.library.ending.call_once(|| at_exit(end));
    let now = RunInstant::now();
    lock(&WATCHED).push(Watched {
        communicator: Arc::downgrade(communicator),
        library_calls: 0,
        calling_since: now,
        sequence: Default::default(),
        enqueued: now,
        is_over: false,
    });
    Ok(())
}

/// Whether the process exits with a status other than 0.
static EXITS_BADLY: AtomicBool = AtomicBool::new(false);

/// Whether the process exits with a status other than 0: its communicators are ended then, also under threads that are in operations.
pub(super) fn exits_badly() -> bool {
    EXITS_BADLY.load(Ordering::Acquire)
}

/// The process exits with communicators that nobody has dropped. After the library's own destructors its
/// threads would crash (those that serve its sockets do), and peers would lose what is still on its way to
/// them.
///
/// Other threads of the process may still be in operations, which are watched meanwhile. Where one does not
/// come out in time, or a group or a split is still open, the process leaves without the destructors.
fn end(status: Option<c_int>) {
    let watched = all();
    let alive: Vec<_> = watched.iter().filter(|one| !one.has_ended()).collect();
    let is_well = status.unwrap_or(0) == 0;
    EXITS_BADLY.store(!is_well, Ordering::Release);
    let longest = alive.iter().map(|one| one.control_channel.timeout()).max().unwrap_or_default();
    let limit = if is_well { longest + 2 * ENDING } else { ENDING };
    let (sender, ended) = channel::<()>();
    // Ranks of one process wait for each other, so each device has a thread. On one device the last that was
    // made comes first, on all ranks, since they wait for each other while they hold the library lock.
    let mut of_devices: BTreeMap<_, Vec<Arc<Communicator>>> = BTreeMap::new();
    for communicator in alive.iter().rev().filter(|one| one.is_departing() || !one.is_queued()) {
        let device = std::ptr::from_ref(communicator.device.library_lock).addr();
        of_devices.entry(device).or_default().push(Arc::clone(communicator));
    }
    for communicators in of_devices.into_values() {
        let sender = sender.clone();
        let ending = move || {
            let _until_they_have_ended = sender;
            for communicator in &communicators {
                match is_well {
                    true => communicator.depart(Departure::Left),
                    // The others see that the process is gone; but not of a rank that has left.
                    false => communicator.end_alone(),
                }
            }
            // Where the others have not left yet, a thread ends it.
            communicators.iter().for_each(|communicator| communicator.wait_at_exit());
        };
        // Without a thread they are not ended, which is seen below.
        let _ = std::thread::Builder::new().name("phalanx-exit".into()).spawn(ending);
    }
    drop(sender);
    let are_through = ended.recv_timeout(limit) == Err(RecvTimeoutError::Disconnected);
    let is_quiet = are_through
        && alive.iter().all(|one| one.has_ended())
        && wait_until_all_are_out()
        && reclaim::wait_longer();
    // The thread-locals of this thread are destroyed: too late to drop a communicator, also one that has ended, whose last owner this may be.
    std::mem::forget(watched);
    if let (Some(status), false) = (status, is_quiet) {
        leave(status);
    }
}

fn start() -> Result<()> {
    static START: Once = Once::new();
    let mut outcome = Ok(());
    START.call_once(|| {
        let thread = std::thread::Builder::new().name("phalanx-watchdog".into()).spawn(|| {
            loop {
                std::thread::sleep(ROUND);
                let now = RunInstant::now();
                lock(&WATCHED).retain_mut(|watched| watched.look(now));
            }
        });
        outcome = thread.map(drop).map_err(|error| {
            Error::system("starting a thread", error, "deadlines on GPUs need one: raise `ulimit -u`")
        });
    });
    outcome
}

impl Watched {
    /// Checks the communicator, until it has failed or ended; false when it is gone.
    fn look(&mut self, now: RunInstant) -> bool {
        let Some(communicator) = self.communicator.upgrade() else { return false };
        if self.is_over || communicator.has_failed() || communicator.has_ended() {
            return true;
        }
        let Some(failure) = self.reason(&communicator, now) else { return true };
        // It may take its time.
        let rescue = move || communicator.rescue(failure);
        if std::thread::Builder::new().name("phalanx-rescue".into()).spawn(rescue).is_err() {
            crate::os::log::error!("no thread to end a communicator in: raise `ulimit -u`");
            return true;
        }
        self.is_over = true;
        true
    }

    fn reason(&mut self, communicator: &Communicator, now: RunInstant) -> Option<Error> {
        if let Err(failure) = communicator.control_channel.check() {
            return Some(failure);
        }
        let last = communicator.last_enqueued();
        let library_calls = communicator.library_calls();
        if library_calls % 2 == 1 && library_calls == self.library_calls {
            let announced = last.map_or_else(|| communicator.auxiliary_call(), |(announced, _)| announced);
            return communicator.control_channel.check_peers(&announced, self.calling_since).err();
        }
        (self.library_calls, self.calling_since) = (library_calls, now);
        let (announced, stream) = last?;
        let sequence = announced.describe();
        if sequence != self.sequence {
            (self.sequence, self.enqueued) = (sequence, now);
        }
        if communicator.is_queued() {
            return None;
        }
        if communicator.control_channel.suspects(&announced, self.enqueued) {
            // What the communicator has let go of meanwhile had nothing to do.
            let stream = communicator.stream_of(stream)?;
            return match communicator.device.is_busy(&stream, FULL) {
                Ok(true) => communicator.control_channel.check_peers(&announced, self.enqueued).err(),
                Ok(false) => None,
                Err(error) => Some(error),
            };
        }
        communicator.reported_error(&announced)
    }
}

impl Communicator {
    /// An asynchronous error of the library.
    fn reported_error(&self, announced: &AnnouncedCall) -> Option<Error> {
        // A thread that is inside the library looks for errors itself.
        let state = look_unless_initializing(|| self.async_state(&self.try_lock_library()?).ok())?;
        match state {
            ncclResult_t::Success | ncclResult_t::InProgress => None,
            error => Some(self.cause(error, ASYNC_ERROR, announced)),
        }
    }

    /// Fails the communicator, in which a thread may be stuck.
    fn rescue(&self, failure: Error) {
        let library_calls = self.library_calls();
        let is_stuck = || library_calls % 2 == 1 && self.library_calls() == library_calls;
        if !is_stuck() || self.revoke() {
            self.fail(failure);
        } else if !is_stuck() {
            // The revocation has not come back, but the thread has.
            self.leak(failure);
        } else {
            // Freeing its memory while the thread runs in it is not an option.
            let name = self.library.name();
            crate::os::log::print(format_args!(
                "rank {}: {failure}. {name} holds the thread that called it and cannot be made to let go \
                 of it (ncclCommRevoke came with 2.28.7), so the process ends",
                self.rank
            ));
            std::process::abort();
        }
    }
}
