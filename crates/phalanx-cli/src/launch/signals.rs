//! The signals that the launcher forwards to its ranks.
//!
//! A thread turns them into events; nothing happens inside a signal handler.

use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2};
use signal_hook::iterator::{Handle, Signals};
use std::io;

/// Signals that are forwarded and have no effect on the launcher.
const FORWARDED: [i32; 3] = [SIGUSR1, SIGUSR2, SIGCONT];
/// Ctrl-Z in a terminal: the ranks stop, and the launcher with them.
pub const STOP: i32 = SIGTSTP;
/// Signals that end the job.
const ENDING: [i32; 4] = [SIGINT, SIGQUIT, SIGTERM, SIGHUP];

/// Whether this signal ends the job.
pub fn is_ending(signal: i32) -> bool {
    ENDING.contains(&signal)
}

/// Stops this process until it is continued.
pub fn stop_self() {
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP);
}

/// Catches signals until it is dropped.
pub struct Forwarder(Handle);

impl Forwarder {
    /// Calls `caught` with the number of every caught signal.
    pub fn start(mut caught: impl FnMut(i32) + Send + 'static) -> io::Result<Forwarder> {
        let ignored = ignored_signals();
        let wanted = ENDING.iter().chain(&FORWARDED).chain([&STOP]);
        let mut signals = Signals::new(wanted.filter(|&&signal| !ignored(signal)))?;
        let handle = signals.handle();
        let thread = std::thread::Builder::new().name("signals".to_owned());
        thread.spawn(move || signals.forever().for_each(&mut caught))?;
        Ok(Forwarder(handle))
    }
}

/// Tells which signals this process inherited as ignored (from nohup, or a shell's background job). Catching
/// one would undo that.
fn ignored_signals() -> impl Fn(i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap_or_default();
    let mask = u64::from_str_radix(mask.trim(), 16).unwrap_or(0);
    move |signal| mask >> (signal - 1) & 1 == 1
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Inherited as ignored, these stay so: nohup and a shell's background jobs mean it, and the terminal's are the shell's business.
/// SIGPIPE is ignored by Rust itself.
#[cfg(target_os = "linux")]
const LEFT_IGNORED: [i32; 7] = {
    use signal_hook::consts::{SIGPIPE, SIGTTIN, SIGTTOU};
    [SIGHUP, SIGINT, SIGQUIT, SIGTSTP, SIGTTIN, SIGTTOU, SIGPIPE]
};

/// Gives this process, and with it its ranks, the signals of a process that a shell started: none is blocked, and those that whoever
/// started it ignored have their default again, but for the few that are ignored on purpose. Call it before any thread starts.
///
/// With SIGCHLD ignored a rank's status would be lost, and a blocked SIGTERM could not end the job. SIGXFSZ is caught: a file that
/// grows beyond `ulimit -f` is then an error of its write, as on a full disk. A program that is started has the default again.
#[cfg(target_os = "linux")]
pub fn reset_inherited() {
    extern "C" fn nothing(_: libc::c_int) {}
    let caught: extern "C" fn(libc::c_int) = nothing;
    let ignored = ignored_signals();
    let to_reset = (1..=64).filter(|signal| ignored(*signal) && !LEFT_IGNORED.contains(signal));
    // SAFETY: the set is filled by `sigemptyset` before it is used; this process has one thread, and no handler for a signal that it
    // ignores; the handler does nothing, so it may run at any time.
    unsafe {
        let mut none = std::mem::MaybeUninit::uninit();
        libc::sigemptyset(none.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut());
        to_reset.for_each(|signal| {
            libc::signal(signal, libc::SIG_DFL);
        });
        libc::signal(libc::SIGXFSZ, caught as libc::sighandler_t);
    }
}

#[cfg(not(target_os = "linux"))]
pub fn reset_inherited() {}

/// The name of a signal, or its number.
pub fn name(signal: i32) -> String {
    signal_hook::low_level::signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_owned)
}
