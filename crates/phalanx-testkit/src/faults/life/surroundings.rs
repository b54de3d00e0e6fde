//! What a life goes on in: a log that panics, blocked signals, a full disk, no further threads or processes, a job that is frozen for a
//! while. None of it may change the verdict.

use crate::processes::{Launch, World};
use crate::random::Random;
use crate::{full_disk, no_threads};
use std::time::Duration;

/// Where a life goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Surroundings {
    Usual,
    /// The program's log panics at each event.
    PanickingLog,
    /// All signals are blocked on the rank's threads, as some launchers leave them.
    BlockedSignals,
    /// What goes to standard error is refused, and so are the flight records.
    FullDisk,
    /// The rank can start neither threads nor processes.
    NoThreads,
    /// All ranks are stopped at once, for longer than their deadline, and go on.
    Frozen,
}

/// How long a frozen job stands still: longer than the deadline.
const FROZEN: Duration = Duration::from_millis(1300);

impl Surroundings {
    pub fn random(random: &mut Random) -> Surroundings {
        match random.below(8) {
            0 => Surroundings::PanickingLog,
            1 => Surroundings::BlockedSignals,
            2 => Surroundings::FullDisk,
            3 => Surroundings::Frozen,
            4 => Surroundings::NoThreads,
            _ => Surroundings::Usual,
        }
    }

    /// What its processes are started with.
    pub fn launch(self, launch: Launch) -> Launch {
        match self {
            Surroundings::FullDisk if full_disk::cannot_mount().is_none() => {
                launch.env("PHALANX_TRACE_DIR", &format!("{}/records", full_disk::FOLDER))
            }
            _ => launch,
        }
    }

    /// What a rank does to its own process, before all else.
    pub fn enter(self) -> Result<(), String> {
        match self {
            Surroundings::Usual | Surroundings::Frozen => Ok(()),
            Surroundings::PanickingLog => {
                let writer = || -> std::io::Stderr { panic!("the log's writer panics") };
                let log =
                    tracing_subscriber::fmt().with_max_level(tracing_subscriber::filter::LevelFilter::TRACE);
                log.with_writer(writer).try_init().map_err(|error| error.to_string())
            }
            Surroundings::BlockedSignals => block_all_signals(),
            Surroundings::FullDisk => {
                if full_disk::cannot_mount().is_none() {
                    full_disk::mount_here()?;
                }
                full_standard_error()
            }
            Surroundings::NoThreads => no_threads::refuse(),
        }
    }

    /// What happens to all ranks, which have met.
    pub fn happen(self, world: &mut World, ranks: usize) -> Result<(), String> {
        use crate::fault::Fault;
        if self != Surroundings::Frozen {
            return Ok(());
        }
        (0..ranks).try_for_each(|rank| world.await_phase(rank, "met"))?;
        (0..ranks).try_for_each(|rank| world.inject(rank, Fault::Stop))?;
        std::thread::sleep(FROZEN);
        (0..ranks).try_for_each(|rank| world.inject(rank, Fault::Continue))
    }

    /// Time that goes by and is nobody's fault.
    pub fn stands_still(self) -> Duration {
        if self == Surroundings::Frozen { FROZEN } else { Duration::ZERO }
    }
}

#[cfg(target_os = "linux")]
fn block_all_signals() -> Result<(), String> {
    use std::ffi::{c_int, c_ulong};
    unsafe extern "C" {
        fn sigfillset(set: *mut [c_ulong; 16]) -> c_int;
        fn pthread_sigmask(how: c_int, set: *const [c_ulong; 16], old: *mut [c_ulong; 16]) -> c_int;
    }
    const SIG_BLOCK: c_int = 0;
    let mut set = [0; 16];
    // SAFETY: glibc's and musl's set has 128 bytes.
    let refused =
        unsafe { sigfillset(&mut set) != 0 || pthread_sigmask(SIG_BLOCK, &set, std::ptr::null_mut()) != 0 };
    if refused { Err("the signals cannot be blocked".into()) } else { Ok(()) }
}

#[cfg(target_os = "linux")]
fn full_standard_error() -> Result<(), String> {
    let full =
        std::fs::OpenOptions::new().write(true).open("/dev/full").map_err(|error| error.to_string())?;
    rustix::stdio::dup2_stderr(&full).map_err(|error| error.to_string())
}

#[cfg(not(target_os = "linux"))]
fn block_all_signals() -> Result<(), String> {
    Err("for Linux".into())
}

#[cfg(not(target_os = "linux"))]
fn full_standard_error() -> Result<(), String> {
    Err("for Linux".into())
}
