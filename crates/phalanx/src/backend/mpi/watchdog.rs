//! Deadlines: a thread watches the operation that each communicator is in.
//!
//! An operation records itself before it calls MPI and clears the record afterwards: a few stores, no clock.
//! The thread compares each record with what it last saw.

use crate::control::record::CallRecord;
use crate::os::RunInstant;
use crate::os::sync::lock;
use crate::types::error::{Error, Result, TimeoutError};
use crate::watch::deadline;
use phalanx_sys::mpi::Handle;
use std::ffi::c_int;
use std::fmt::Display;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, Once, OnceLock, PoisonError, Weak};
use std::time::Duration;

/// The code passed to `MPI_Abort`, which becomes the exit status of the job.
const EXIT_CODE: c_int = 124;

/// Time for other ranks to report where they wait, before the first rank ends the job.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// Time limit for `MPI_Abort`.
const ABORT_TIMEOUT: Duration = Duration::from_secs(2);

/// `MPI_Abort` and the communicator to pass to it, once MPI is initialised.
#[derive(Clone, Copy)]
pub(crate) struct Abort {
    pub function: unsafe extern "C" fn(Handle, c_int) -> c_int,
    pub comm: Handle,
}

/// Whether this process has begun to end the job.
static ENDING: AtomicBool = AtomicBool::new(false);

pub(crate) fn is_ending_job() -> bool {
    ENDING.load(Ordering::Relaxed)
}

/// The operation that one communicator is in, and its deadlines.
pub(crate) struct OperationWatch {
    abort: Option<Abort>,
    rank: usize,
    /// Nanoseconds.
    timeout: AtomicU64,
    /// Nanoseconds: the deadline of the current operation, if it has one of its own; else 0.
    limit: AtomicU64,
    inside: AtomicBool,
    /// Incremented at each step of progress; the deadline then starts anew.
    progress: AtomicU64,
    sequence: AtomicU64,
    record: [AtomicU64; 3],
    /// An [`InitStep`], while there is no record.
    step: AtomicU64,
    /// The communicator's name, if the program has given it one.
    name: OnceLock<String>,
}

/// The exchanges in which ranks join.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InitStep {
    /// MPI's own start.
    Start,
    /// The first collective: MPI connects the ranks.
    Duplicate,
    /// The ranks' settings and hosts.
    Introduce,
}

impl InitStep {
    const ALL: [InitStep; 3] = [InitStep::Start, InitStep::Duplicate, InitStep::Introduce];

    fn describe(self) -> &'static str {
        match self {
            InitStep::Start => "init (MPI_Init_thread)",
            InitStep::Duplicate => "init (MPI_Comm_dup, the first exchange over MPI)",
            InitStep::Introduce => "init (the exchange of hosts and settings over MPI)",
        }
    }
}

/// What keeps ranks from a first exchange that all have come to, with this host's interfaces.
fn first_exchange_hint() -> String {
    let interfaces = crate::os::interfaces();
    let found = match interfaces.is_empty() {
        true => String::new(),
        false => format!(" This host has {}.", interfaces.join(", ")),
    };
    format!(
        ". If all ranks have come, MPI may talk over an interface that the hosts do not share.{found} Name the right one: for \
         Open MPI with OMPI_MCA_btl_tcp_if_include and OMPI_MCA_oob_tcp_if_include, for MPICH with HYDRA_IFACE and FI_TCP_IFACE \
         or UCX_NET_DEVICES, for Intel MPI with I_MPI_HYDRA_IFACE and FI_TCP_IFACE. On cores that are busy, let waiting ranks \
         yield: OMPI_MCA_mpi_yield_when_idle=1, I_MPI_THREAD_YIELD=3"
    )
}

/// Marks the communicator as inside an operation, until it is dropped.
pub(crate) struct WatchedOperation<'a>(&'a OperationWatch);

impl WatchedOperation<'_> {
    /// The operation's number on its communicator.
    pub fn sequence(&self) -> u64 {
        self.0.sequence.load(Ordering::Relaxed)
    }
}

impl Drop for WatchedOperation<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.inside.store(false, Ordering::Release);
    }
}

/// A communicator's record, and what the watching thread last saw of it.
struct WatchEntry {
    watch: Weak<OperationWatch>,
    progress: u64,
    since: RunInstant,
}

static WATCHED: Mutex<Vec<WatchEntry>> = Mutex::new(Vec::new());
/// Notified of a new communicator or a changed deadline.
static CHANGED: Condvar = Condvar::new();

impl OperationWatch {
    /// Creates a record and registers it with the watching thread.
    pub fn start(abort: Option<Abort>, rank: usize, timeout: Duration) -> Result<Arc<OperationWatch>> {
        start_watching()?;
        let watch = Arc::new(OperationWatch {
            abort,
            rank,
            timeout: AtomicU64::new(nanoseconds(timeout)),
            limit: AtomicU64::new(0),
            inside: AtomicBool::new(false),
            progress: AtomicU64::new(0),
            sequence: AtomicU64::new(0),
            record: Default::default(),
            step: AtomicU64::new(0),
            name: OnceLock::new(),
        });
        lock(&WATCHED).push(WatchEntry {
            watch: Arc::downgrade(&watch),
            progress: 0,
            since: RunInstant::now(),
        });
        CHANGED.notify_all();
        Ok(watch)
    }

    /// A step in which the ranks join. It has no record.
    pub fn enter_init(&self, step: InitStep) -> WatchedOperation<'_> {
        self.step.store(step as u64, Ordering::Relaxed);
        self.enter_with([0; 3])
    }

    /// Takes the number of the next operation, from 1. One thread at a time calls it.
    #[inline(always)]
    pub fn next(&self) -> u64 {
        let sequence = self.sequence.load(Ordering::Relaxed) + 1;
        self.sequence.store(sequence, Ordering::Relaxed);
        sequence
    }

    /// The number of the last operation.
    pub fn last(&self) -> u64 {
        self.sequence.load(Ordering::Relaxed)
    }

    /// Begins the operation that `next` numbered. One thread at a time calls it.
    #[inline(always)]
    pub fn enter(&self, record: &CallRecord) -> WatchedOperation<'_> {
        self.enter_with(record.words())
    }

    #[inline(always)]
    fn enter_with(&self, words: [u64; 3]) -> WatchedOperation<'_> {
        for (word, value) in self.record.iter().zip(words) {
            word.store(value, Ordering::Relaxed);
        }
        let limit = deadline::limit();
        self.limit.store(limit.map_or(0, nanoseconds), Ordering::Relaxed);
        self.progress();
        self.inside.store(true, Ordering::Release);
        if limit.is_some() {
            // The limit may be shorter than the thread's sleep.
            CHANGED.notify_all();
        }
        WatchedOperation(self)
    }

    /// Reports progress: the deadline starts anew.
    #[inline(always)]
    pub fn progress(&self) {
        // One thread at a time is inside, so no atomic add is needed.
        self.progress.store(self.progress.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// A counter that changes with each step of progress.
    pub fn progress_count(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    pub fn timeout(&self) -> Duration {
        Duration::from_nanos(self.timeout.load(Ordering::Relaxed))
    }

    /// The deadline for a wait of this thread.
    pub fn deadline(&self) -> Duration {
        deadline::of(self.timeout())
    }

    /// The deadline of the current operation.
    fn current(&self) -> Duration {
        match self.limit.load(Ordering::Relaxed) {
            0 => self.timeout(),
            limit => Duration::from_nanos(limit),
        }
    }

    pub fn set_timeout(&self, timeout: Duration) {
        self.timeout.store(nanoseconds(timeout), Ordering::Relaxed);
        CHANGED.notify_all();
    }

    pub fn set_name(&self, name: &str) {
        let _ = self.name.set(name.to_owned());
    }

    /// An operation, with the communicator's name behind it if the program has given it one.
    pub fn named(&self, operation: impl Display) -> String {
        match self.name.get() {
            Some(name) => format!("{operation} of communicator {name}"),
            None => operation.to_string(),
        }
    }

    /// Reports a passed deadline, with a hint at the cause, and ends the job.
    pub fn give_up(&self, operation: &str, sequence: u64, waited: Duration, hint: &str) -> ! {
        let operation = self.named(operation);
        let timeout = TimeoutError { operation, sequence, reporter: self.rank, waited, missing: Vec::new() };
        self.end_job(&format!(
            "{timeout}. MPI cannot take back an operation, so the job ends (MPI_Abort); the ranks that wait tell \
             where{hint}"
        ));
    }

    /// Ends the job, with a reason on standard error.
    pub fn end_job(&self, reason: &str) -> ! {
        ENDING.store(true, Ordering::Relaxed);
        // Both: a program without a log subscriber also needs the reason. A subscriber may wait for ever, so it gets a thread.
        let logged = reason.to_owned();
        let _ = std::thread::Builder::new().spawn(move || crate::os::log::error!("{logged}"));
        crate::os::log::print(format_args!("{reason}"));
        std::thread::sleep(LAST_WORDS);
        if let Some(Abort { function, comm }) = self.abort {
            // SAFETY: MPI is initialised, or the communicator would not be there; the call ends the process.
            let aborting = std::thread::Builder::new().spawn(move || unsafe { function(comm, EXIT_CODE) });
            if aborting.is_ok() {
                std::thread::sleep(ABORT_TIMEOUT);
            }
        }
        std::process::abort()
    }

    fn record(&self) -> String {
        let words = std::array::from_fn(|i| self.record[i].load(Ordering::Relaxed));
        CallRecord::from_words(words).map_or_else(|| self.step().describe().to_owned(), |it| it.to_string())
    }

    fn step(&self) -> InitStep {
        InitStep::ALL[self.step.load(Ordering::Relaxed) as usize]
    }

    /// Whether the ranks have not exchanged anything yet.
    fn is_joining(&self) -> bool {
        self.record.iter().all(|word| word.load(Ordering::Relaxed) == 0)
    }
}

impl WatchEntry {
    /// Checks the record, and returns how long the thread may sleep. `None`: the communicator is gone.
    fn look(&mut self, now: RunInstant) -> Option<Duration> {
        let watch = self.watch.upgrade()?;
        let inside = watch.inside.load(Ordering::Acquire);
        let timeout = if inside { watch.current() } else { watch.timeout() };
        let progress = watch.progress.load(Ordering::Relaxed);
        if !inside || progress != self.progress {
            (self.progress, self.since) = (progress, now);
        } else if now - self.since >= timeout {
            let sequence = watch.sequence.load(Ordering::Relaxed);
            let hint = if watch.is_joining() { first_exchange_hint() } else { String::new() };
            watch.give_up(&watch.record(), sequence, now - self.since, &hint);
        }
        Some((timeout / 16).clamp(Duration::from_millis(1), Duration::from_millis(500)))
    }
}

fn start_watching() -> Result<()> {
    static START: Once = Once::new();
    let mut outcome = Ok(());
    START.call_once(|| {
        let thread = std::thread::Builder::new().name("phalanx-mpi".into()).spawn(watch);
        outcome = thread.map(drop).map_err(|error| {
            Error::system("starting a thread", error, "MPI's deadlines need one: raise `ulimit -u`")
        });
    });
    outcome
}

fn watch() {
    let mut watched = lock(&WATCHED);
    loop {
        let now = RunInstant::now();
        let mut pause = Duration::from_secs(3600);
        watched.retain_mut(|watched| match watched.look(now) {
            Some(tick) => {
                pause = pause.min(tick);
                true
            }
            None => false,
        });
        watched = CHANGED.wait_timeout(watched, pause).unwrap_or_else(PoisonError::into_inner).0;
    }
}

fn nanoseconds(timeout: Duration) -> u64 {
    timeout.as_nanos().try_into().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_exchange_is_named_with_interfaces_and_variables() {
        let watch = OperationWatch::start(None, 0, Duration::from_secs(3600)).unwrap();
        drop(watch.enter_init(InitStep::Duplicate));
        assert!(watch.is_joining() && watch.record().contains("MPI_Comm_dup"), "{}", watch.record());
        let hint = first_exchange_hint();
        for part in ["OMPI_MCA_btl_tcp_if_include", "FI_TCP_IFACE", "OMPI_MCA_mpi_yield_when_idle=1"] {
            assert!(hint.contains(part), "{hint}");
        }
        assert!(!cfg!(target_os = "linux") || hint.contains("lo (127.0.0.1"), "{hint}");
    }
}
