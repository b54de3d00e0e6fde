//! Gives memory back to the library and to the driver while the GPUs of this process rest.
//!
//! The driver frees memory only when all GPUs that reach it are idle, and whoever frees waits for that. An operation that is under
//! way on one of them may wait for the rank that frees, in another communicator, and both would wait until a deadline. So what is
//! to be freed is put into a list. A thread frees it when no communicator of the process has an operation under way. It holds the
//! library locks of all GPUs meanwhile, so that none begins. Other work of the program, which waits for no rank, it may wait for.

use super::communicator::{Communicator, ENDING};
use super::device;
use super::init::NoInits;
use super::library_lock::{BoundedCall, BoundedGuard};
use super::watchdog;
use crate::buffer::stream::GpuStream;
use crate::os::sync::lock;
use crate::os::{ForkMark, RunInstant};
use crate::types::error::Result;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, OnceLock};
use std::thread::Thread;
use std::time::Duration;

/// How long who gives memory back waits until it is free.
const LINGER: Duration = Duration::from_millis(100);

/// Shortest and longest pause between two attempts.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(800));

/// How long an attempt keeps operations from beginning, at most, until those under way are over: an eighth of the time since the last.
const PATIENCE: Duration = Duration::from_millis(100);

/// How long a kernel of the program's may take to be launched, once it is announced.
const LAUNCHING: Duration = Duration::from_millis(50);

/// What is to be freed, in the order in which it was put there.
static LIST: Mutex<Vec<Remains>> = Mutex::new(Vec::new());

/// The thread that frees, and the process that has it.
static THREAD: OnceLock<(ForkMark, Option<Thread>)> = OnceLock::new();

/// Memory, or a C communicator, that nothing of this process uses any more.
struct Remains {
    what: &'static str,
    use_of_peers: Box<dyn Fn(Duration) -> UseOfPeers + Send>,
    /// `None` from when the thread frees it.
    free: Option<Box<dyn FnOnce() + Send>>,
    since: RunInstant,
}

/// Whether other ranks may still use what is to be freed.
pub(crate) enum UseOfPeers {
    /// They do not.
    Over,
    /// They may.
    Possible,
    /// They may for ever: it is leaked.
    Endless,
}

impl Remains {
    fn use_of_peers(&self) -> UseOfPeers {
        (self.use_of_peers)(self.since.elapsed())
    }

    fn is_due(&self) -> bool {
        matches!(self.use_of_peers(), UseOfPeers::Over)
    }
}

/// Waits until all that can be free is, but not for long: GPUs may be busy.
pub(crate) fn wait() {
    wait_while(|waited| waited < LINGER);
}

/// [`wait`], as long as the end of a communicator may take. False if something is not free.
pub(super) fn wait_longer() -> bool {
    let since = RunInstant::now();
    wait_while(|_| since.elapsed() < ENDING)
}

/// Allocates; again, once all that can be free is, if there is too little memory.
pub(crate) fn make_room<T>(allocate: impl Fn() -> Result<T>) -> Result<T> {
    match allocate() {
        Err(_) if longest_wait().is_some() && wait_longer() => allocate(),
        allocated => allocated,
    }
}

/// How long what can be free has been waiting for that.
fn longest_wait() -> Option<Duration> {
    lock(&LIST).iter().filter(|remains| remains.is_due()).map(|remains| remains.since.elapsed()).max()
}

/// Waits until all that can be free is, while `is_worth_it`, which is told how long the first has waited.
fn wait_while(is_worth_it: impl Fn(Duration) -> bool) -> bool {
    let since = RunInstant::now();
    while let Some(waited) = longest_wait() {
        if !is_worth_it(waited) {
            return false;
        }
        std::thread::sleep((since.elapsed() / 8).clamp(PAUSES.0 / 20, PAUSES.0));
    }
    true
}

/// Frees something of this process, by a call that `what` names.
pub(crate) fn later(what: &'static str, free: impl FnOnce() + Send + 'static) {
    later_unless_used(what, |_| UseOfPeers::Over, free);
}

/// [`later`], once peers do not use it any more; `use_of_peers` is told how long it has been waited for.
pub(crate) fn later_unless_used(
    what: &'static str,
    use_of_peers: impl Fn(Duration) -> UseOfPeers + Send + 'static,
    free: impl FnOnce() + Send + 'static,
) {
    let (process, thread) = THREAD.get_or_init(|| (ForkMark::of_this_process(), start()));
    if process.is_copy() {
        // What it would free is the original's.
        return std::mem::forget((use_of_peers, free));
    }
    let Some(thread) = thread else {
        crate::os::log::error!("no thread to free GPU memory in: raise `ulimit -u`; it is leaked");
        return std::mem::forget((use_of_peers, free));
    };
    let remains = Remains {
        what,
        use_of_peers: Box::new(use_of_peers),
        free: Some(Box::new(free)),
        since: RunInstant::now(),
    };
    lock(&LIST).push(remains);
    thread.unpark();
}

fn start() -> Option<Thread> {
    let work = || {
        let mut last_attempt = RunInstant::now();
        loop {
            free_what_is_due(&mut last_attempt);
            let shortest = lock(&LIST).iter().map(|remains| remains.since.elapsed()).min();
            match shortest {
                Some(waited) => std::thread::park_timeout((waited / 8).clamp(PAUSES.0, PAUSES.1)),
                None => std::thread::park(),
            }
        }
    };
    let thread = std::thread::Builder::new().name("phalanx-reclaim".into()).spawn(work);
    thread.ok().map(|thread| thread.thread().clone())
}

/// One attempt.
fn free_what_is_due(last_attempt: &mut RunInstant) {
    if let Some(waited) = longest_wait() {
        let patience = waited.min(last_attempt.elapsed()) / 8;
        if let Some(rest) = Rest::begin(patience.min(PATIENCE)) {
            rest.free_what_is_due();
        }
        *last_attempt = RunInstant::now();
    }
    // Dropped without the lock: what they own may put more into the list.
    let is_over = |remains: &mut Remains| {
        remains.free.is_none() || matches!(remains.use_of_peers(), UseOfPeers::Endless)
    };
    let over: Vec<_> = lock(&LIST).extract_if(.., is_over).collect();
    drop(over);
}

/// The GPUs of this process at rest: no operation is under way, and none can begin until this is dropped.
struct Rest {
    _no_inits: NoInits,
    guards: Vec<BoundedGuard>,
    /// How long an operation may wait for it.
    limit: Duration,
}

impl Rest {
    /// Keeps operations from beginning, and waits for `patience` until none is under way. `None` if one still is.
    fn begin(patience: Duration) -> Option<Rest> {
        let no_inits = NoInits::begin()?;
        let guards = device::opened()
            .iter()
            .map(|gpu| gpu.library_lock.try_acquire_bounded())
            .collect::<Option<_>>()?;
        let (communicators, since) = (watchdog::all(), RunInstant::now());
        let timeouts = communicators.iter().map(|communicator| communicator.control_channel.timeout());
        let rest = Rest { _no_inits: no_inits, guards, limit: timeouts.fold(ENDING, Duration::max) };
        while communicators.iter().any(|communicator| communicator.is_at_work(patience)) {
            if since.elapsed() >= patience {
                return None;
            }
            std::thread::sleep((since.elapsed() / 8).clamp(PAUSES.0 / 10, PAUSES.0));
        }
        Some(rest)
    }

    fn free_what_is_due(&self) {
        let due: Vec<_> = lock(&LIST)
            .iter_mut()
            .filter(|remains| remains.is_due())
            .filter_map(|remains| Some((remains.what, remains.free.take()?)))
            .collect();
        for (what, free) in due {
            let call = BoundedCall::new(what, self.limit);
            self.guards.iter().for_each(|guard| guard.is_for(&call));
            device::beside_captures(free);
        }
    }
}

impl Communicator {
    /// Whether one of its operations may be under way on the GPU; asks the driver for so long.
    fn is_at_work(&self, limit: Duration) -> bool {
        let last_kernel = *lock(&self.last_kernel);
        let is_waited_for = lock(&self.last).announced.is_none() && last_kernel.is_none();
        if is_waited_for || self.is_quiet.load(Ordering::Acquire) {
            return false;
        }
        if last_kernel.is_some_and(|announced| announced.elapsed() < LAUNCHING) {
            return true;
        }
        let is_busy =
            |stream: &GpuStream| matches!(self.device.is_busy(stream, limit.max(PAUSES.0)), Ok(true));
        self.streams().iter().any(is_busy)
    }
}
