//! MPI in this process: one library, initialised at most once, finalised when the process ends well.
//!
//! MPI that the application initialised is used and never finalised. MPI that phalanx initialised is
//! finalised when the process exits with status 0. With another status, or after a failure, it is not: the
//! launcher then ends the other ranks, which would wait for this one.
//!
//! `MPI_THREAD_MULTIPLE` is requested, since a thread advances requests. Below that level only the main
//! thread may use the communicators.

use super::cuda_support::CudaSupport;
use super::reduction::{Plans, plans};
use super::watchdog::{Abort, InitStep, OperationWatch};
use super::{MpiFailure, check, cuda_support};
use crate::contract::{Call, Operation};
use crate::control::record::CallRecord;
use crate::os::sync::lock;
use crate::rendezvous::environment::{number_from_environment, switch_from_environment};
use crate::types::error::{Error, Result, UnsupportedError};
use phalanx_sys::mpi::{Handle, Mpi};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

/// The launcher's view of the job, to be compared with MPI's.
#[derive(Debug, Clone)]
pub(crate) struct Launched {
    pub launcher: &'static str,
    /// 0 if the launcher does not say.
    pub rank: usize,
    pub world_size: Option<usize>,
}

/// MPI in this process.
pub(crate) struct MpiProcess {
    pub mpi: Mpi,
    pub plans: Plans,
    own_type: Handle,
    /// The largest tag for messages; the next one is reserved for phalanx.
    pub max_tag: u32,
    /// Most bytes in one MPI call.
    pub max_bytes: usize,
    /// Whether only the main thread may call MPI.
    pub main_only: bool,
    /// How many `MpiTransport`s there are, each in a thread of its own, ...
    pub transports: AtomicUsize,
    /// ... and whether they must end, since the process does.
    pub is_ending: AtomicBool,
    /// Whether ranks of one host access each other's parts of windows themselves.
    pub maps_windows: bool,
    /// How many windows were made, and those that were dropped, by number.
    pub windows: AtomicU64,
    pub dropped_windows: Mutex<BTreeMap<u64, Handle>>,
    /// Whether MPI accepts CUDA memory, or why not. Checked before it gets any.
    pub cuda: std::result::Result<CudaSupport, String>,
    /// Why MPI is not finalised: finalising could wait for a dead peer.
    unfinished: OnceLock<&'static str>,
    /// Nanoseconds: the last deadline, which finalising has too.
    timeout: AtomicU64,
    /// Rank in the world.
    pub rank: AtomicUsize,
}

static PROCESS: OnceLock<MpiProcess> = OnceLock::new();

impl MpiProcess {
    /// Loads and initialises MPI, unless that was done before.
    pub fn start(launched: &Launched, timeout: Duration) -> Result<&'static MpiProcess> {
        static STARTING: Mutex<()> = Mutex::new(());
        let _one_at_a_time = lock(&STARTING);
        let process = match PROCESS.get() {
            Some(process) => process,
            None => {
                let started = MpiProcess::initialise(launched, timeout)?;
                PROCESS.get_or_init(|| started)
            }
        };
        process.timeout.store(timeout.as_nanos().try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
        if process.is_finalized() {
            return Err(Error::bootstrap(
                "MPI was finalised in this process, and cannot be started again",
                "call MPI_Finalize after the last use of phalanx",
            ));
        }
        Ok(process)
    }

    fn initialise(launched: &Launched, timeout: Duration) -> Result<MpiProcess> {
        let (max_bytes, forced_cuda) = (max_bytes()?, cuda_support::from_environment()?);
        let maps_windows = switch_from_environment("PHALANX_MPI_MAP_WINDOWS")?.unwrap_or(true);
        let mpi = Mpi::load()?;
        let failed = |failure| super::error(&mpi, failure, launched.rank, "init", 0);
        let level = start_mpi(&mpi, launched.rank, timeout)?.map_err(failed)?;
        let max_tag = tag_limit(&mpi).map_err(failed)? - 1;
        let (plans, own_type) = plans(&mpi).map_err(failed)?;
        let main_only = level < mpi.constants.thread_multiple;
        if main_only {
            crate::os::log::warn!(
                "MPI was initialised below MPI_THREAD_MULTIPLE: only the main thread can use communicators"
            );
        }
        let process = MpiProcess {
            plans,
            own_type,
            max_tag,
            max_bytes,
            main_only,
            transports: AtomicUsize::new(0),
            is_ending: AtomicBool::new(false),
            maps_windows,
            windows: AtomicU64::new(0),
            dropped_windows: Mutex::default(),
            cuda: cuda_support::query(&mpi, forced_cuda),
            unfinished: OnceLock::new(),
            timeout: AtomicU64::new(0),
            rank: AtomicUsize::new(launched.rank),
            mpi,
        };
        crate::os::log::info!(
            version = process.mpi.version,
            flavour = process.mpi.flavour.name(),
            path = %process.mpi.library.path().display(),
            found = process.mpi.library.place().origin,
            cuda_aware = process.cuda.is_ok(),
            "MPI"
        );
        Ok(process)
    }

    /// Checks that MPI's world is the one that the launcher started.
    pub fn check_world(&self, launched: &Launched) -> Result<()> {
        let place = self.place_in(self.world());
        let (rank, ranks) = place.map_err(|failure| self.error(failure, launched.rank, "init", 0))?;
        self.rank.store(rank, Ordering::Relaxed);
        let expected = launched.world_size.unwrap_or(ranks);
        if ranks == expected && launched.rank < ranks {
            return Ok(());
        }
        let started = match launched.world_size {
            Some(size) => {
                format!("{} started {size} ranks, this one as rank {}", launched.launcher, launched.rank)
            }
            None => format!("{} started this process as rank {}", launched.launcher, launched.rank),
        };
        let place = self.mpi.library.place();
        Err(Error::bootstrap(
            format!(
                "{started}, but for {} ({}, from {}) it is rank {rank} of {ranks}: that MPI does not belong to the \
                 launcher",
                self.mpi.version,
                self.mpi.library.path().display(),
                place.origin
            ),
            "start the program with the mpirun of that MPI (with srun, choose its --mpi=), or set PHALANX_MPI_LIB to \
             the MPI library of the launcher",
        ))
    }

    pub fn world(&self) -> Handle {
        self.mpi.constants.comm_world
    }

    /// This process's rank in a communicator, and the number of ranks. Makes the communicator return its
    /// errors, unless it is the application's.
    pub fn place_in(&self, comm: Handle) -> std::result::Result<(usize, usize), MpiFailure> {
        let (functions, constants) = (&self.mpi.functions, &self.mpi.constants);
        let (mut rank, mut ranks) = (0, 0);
        // SAFETY: the communicator is alive; the variables take the answers.
        unsafe {
            if comm != self.world() {
                let set = (functions.comm_set_errhandler)(comm, constants.errors_return);
                check("MPI_Comm_set_errhandler", set)?;
            }
            check("MPI_Comm_rank", (functions.comm_rank)(comm, &raw mut rank))?;
            check("MPI_Comm_size", (functions.comm_size)(comm, &raw mut ranks))?;
        }
        Ok((rank as usize, ranks as usize))
    }

    pub fn abort_of(&self, comm: Handle) -> Abort {
        Abort { function: self.mpi.functions.abort, comm }
    }

    /// Whether this thread may call MPI.
    #[inline]
    pub fn check_thread(&self) -> Result<()> {
        if self.main_only { self.check_main_thread() } else { Ok(()) }
    }

    #[cold]
    fn check_main_thread(&self) -> Result<()> {
        let mut main = 0;
        // SAFETY: MPI is initialised, and this call is allowed on every thread.
        unsafe { (self.mpi.functions.is_thread_main)(&raw mut main) };
        if main != 0 {
            return Ok(());
        }
        Err(Error::from(UnsupportedError {
            what: "MPI on another thread than the one that initialised it".into(),
            why: "the application initialised MPI below MPI_THREAD_MULTIPLE".into(),
            remedy: "initialise it with MPI_Init_thread and MPI_THREAD_MULTIPLE, or leave that to phalanx"
                .into(),
        }))
    }

    pub fn is_finalized(&self) -> bool {
        let mut finalized = 0;
        // SAFETY: may be called at any time, with a variable for the answer.
        unsafe { (self.mpi.functions.finalized)(&raw mut finalized) };
        finalized != 0
    }

    /// Prevents that MPI is finalised: finalising could wait for a dead peer.
    pub fn leave_unfinished(&self, why: &'static str) {
        let _ = self.unfinished.set(why);
    }
}

/// Initialises MPI, unless the application has; returns the thread level.
fn start_mpi(mpi: &Mpi, rank: usize, timeout: Duration) -> Result<std::result::Result<c_int, MpiFailure>> {
    let (functions, constants) = (&mpi.functions, &mpi.constants);
    let watch = OperationWatch::start(None, rank, timeout)?;
    let start = || {
        let (mut initialised, mut level) = (0, 0);
        // SAFETY: may be called at any time, with a variable for the answer.
        check("MPI_Initialized", unsafe { (functions.initialized)(&raw mut initialised) })?;
        if initialised != 0 {
            // SAFETY: MPI is initialised.
            check("MPI_Query_thread", unsafe { (functions.query_thread)(&raw mut level) })?;
            return Ok(level);
        }
        let _watched = watch.enter_init(InitStep::Start);
        let (argc, argv) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: MPI is not initialised, and `MpiProcess::start` lets one thread at a time in here.
        check("MPI_Init_thread", unsafe {
            (functions.init_thread)(argc, argv, constants.thread_multiple, &raw mut level)
        })?;
        // For functions that have no communicator, such as MPI_Test.
        // SAFETY: MPI is initialised.
        check("MPI_Comm_set_errhandler", unsafe {
            (functions.comm_set_errhandler)(constants.comm_world, constants.errors_return)
        })?;
        crate::os::at_exit(end);
        Ok(level)
    };
    Ok(start())
}

/// The largest tag of this MPI.
fn tag_limit(mpi: &Mpi) -> std::result::Result<u32, MpiFailure> {
    // The least that the MPI standard allows.
    const LEAST: u32 = 32_767;
    let mut value: *const c_int = std::ptr::null();
    let mut there = 0;
    let variable = (&raw mut value).cast::<c_void>();
    let (world, key) = (mpi.constants.comm_world, mpi.constants.tag_ub);
    // SAFETY: MPI is initialised; for this attribute it stores the address of an int.
    check("MPI_Comm_get_attr", unsafe {
        (mpi.functions.comm_get_attr)(world, key, variable, &raw mut there)
    })?;
    if there == 0 || value.is_null() {
        return Ok(LEAST);
    }
    // SAFETY: the attribute is there, so the address is that of an int which lives as long as MPI.
    Ok(u32::try_from(unsafe { *value }).unwrap_or(LEAST))
}

/// Most bytes in one MPI call: its counts are C `int`s, and so are offsets inside some libraries. Tests lower
/// it with `PHALANX_MPI_MAX_BYTES`.
fn max_bytes() -> Result<usize> {
    const MOST: usize = c_int::MAX as usize;
    let expected = format!("a number of bytes from 64 to {MOST}");
    Ok(number_from_environment("PHALANX_MPI_MAX_BYTES", 64..=MOST, &expected)?.unwrap_or(MOST))
}

/// Finalises MPI when the process exits with status 0. Where the exit status is not known, a failing rank
/// waits in `MPI_Finalize`, at most for the deadline.
fn end(status: Option<c_int>) {
    let Some(process) = PROCESS.get() else { return };
    if !process.end_calls() {
        process.leave_unfinished("a thread of phalanx's own did not come out of MPI");
    }
    match (status.unwrap_or(0), process.unfinished.get()) {
        (0, _) if process.is_finalized() => {}
        (0, None) => process.finalise(),
        (0, Some(why)) => {
            process.say(&format!("does not finalise MPI, which its launcher may report: {why}"))
        }
        (status, _) => process.say(&format!("ends with status {status}, and with it the job")),
    }
}

impl MpiProcess {
    /// Waits until no internal thread calls MPI; `false` if one does not end.
    fn end_calls(&self) -> bool {
        self.is_ending.store(true, Ordering::Release);
        // Longer than `FINISHING` of the transport.
        let until = Instant::now() + Duration::from_secs(4);
        while self.transports.load(Ordering::Acquire) > 0 {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        true
    }

    /// Names the failing rank, which not every launcher does. Makes no call of MPI, which may be inside
    /// `MPI_Abort`.
    fn say(&self, what: &str) {
        if !super::watchdog::is_ending_job() {
            crate::os::log::print(format_args!("rank {} {what}", self.rank.load(Ordering::Relaxed)));
        }
    }

    fn finalise(&'static self) {
        if self.check_thread().is_err() {
            return self.say("does not finalise MPI: another thread than MPI's ends the process");
        }
        let timeout = Duration::from_nanos(self.timeout.load(Ordering::Relaxed));
        let Ok((rank, _)) = self.place_in(self.world()) else { return };
        // MPI_Finalize may wait for all ranks.
        let Ok(watch) = OperationWatch::start(Some(self.abort_of(self.world())), rank, timeout) else {
            return;
        };
        let mut own_type = self.own_type;
        let watched = watch.enter(&CallRecord::of(&Call::empty(Operation::Finalize)));
        // Together: MPICH 4.0.2 hangs in MPI_Finalize, over UCX and TCP, when a rank comes there long before
        // another. SAFETY: MPI is initialised and not finalised; no communicator of phalanx is used any more,
        // since the process exits.
        unsafe {
            (self.mpi.functions.type_free)(&raw mut own_type);
            (self.mpi.functions.barrier)(self.world());
        }
        // MPICH 4.0.2 ends the process in MPI_Finalize if there are windows.
        self.free_dropped_windows();
        drop(watched);
        // It does so now and then all the same, between hosts. All ranks have done their work: that ends well.
        self.leave_if_late(timeout.min(FINALIZING));
        // SAFETY: as above.
        unsafe { (self.mpi.functions.finalize)() };
        FINALIZED.store(true, Ordering::Release);
    }

    /// Ends the process with status 0 if it is not out of `MPI_Finalize` in time.
    fn leave_if_late(&'static self, limit: Duration) {
        let leave = move || {
            std::thread::sleep(limit);
            if !FINALIZED.load(Ordering::Acquire) {
                self.say(&format!(
                    "ends without MPI_Finalize, which has not returned for {limit:.0?}; all ranks have done their work"
                ));
                crate::os::leave(0);
            }
        };
        // Without the thread, the launcher's own limit ends it.
        let _ = std::thread::Builder::new().name("phalanx-finalize".into()).spawn(leave);
    }
}

/// Time for `MPI_Finalize`, once all ranks have come to it: longer than MPI takes to close thousands of connections.
const FINALIZING: Duration = Duration::from_secs(10);

/// Whether `MPI_Finalize` has returned.
static FINALIZED: AtomicBool = AtomicBool::new(false);
