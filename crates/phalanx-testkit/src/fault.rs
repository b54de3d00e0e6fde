//! Faults: ends, stops and continues a rank's process.
//!
//! Only processes that the test itself started, by their process id.

use std::io;
use std::process::Child;

/// What is done to a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Ends it at once (SIGKILL): it cannot say goodbye.
    Kill,
    /// Stops it (SIGSTOP): it is there and does nothing.
    Stop,
    /// Continues it (SIGCONT).
    Continue,
    /// Asks it for its flight record (SIGUSR1).
    Ask,
    /// Holds it as a debugger does, until this thread releases it.
    Hold,
    /// Lets it go on without a debugger.
    Release,
}

#[cfg(target_os = "linux")]
impl Fault {
    fn inject(self, pid: rustix::process::Pid) -> io::Result<()> {
        use rustix::process::Signal;
        let signal = match self {
            Fault::Kill => Signal::KILL,
            Fault::Stop => Signal::STOP,
            Fault::Continue => Signal::CONT,
            Fault::Ask => Signal::USR1,
            Fault::Hold => {
                debug(pid, PTRACE_SEIZE)?;
                return debug(pid, PTRACE_INTERRUPT);
            }
            Fault::Release => return debug(pid, PTRACE_DETACH),
        };
        Ok(rustix::process::kill_process(pid, signal)?)
    }
}

#[cfg(target_os = "linux")]
const PTRACE_DETACH: u32 = 17;
#[cfg(target_os = "linux")]
const PTRACE_SEIZE: u32 = 0x4206;
#[cfg(target_os = "linux")]
const PTRACE_INTERRUPT: u32 = 0x4207;

/// Makes a request of `ptrace` that has no argument.
#[cfg(target_os = "linux")]
fn debug(pid: rustix::process::Pid, request: u32) -> io::Result<()> {
    use std::ffi::{c_int, c_long, c_uint, c_void};
    unsafe extern "C" {
        fn ptrace(request: c_uint, pid: c_int, address: *mut c_void, data: *mut c_void) -> c_long;
    }
    // SAFETY: these requests read and write no memory.
    let answer =
        unsafe { ptrace(request, pid.as_raw_nonzero().get(), std::ptr::null_mut(), std::ptr::null_mut()) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sends the signal of a fault to a child that has not been waited for yet.
#[cfg(target_os = "linux")]
pub(crate) fn inject(child: &Child, fault: Fault) -> io::Result<()> {
    use rustix::process::Pid;
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    fault.inject(pid)
}

/// The same to this process.
#[cfg(target_os = "linux")]
pub fn inject_here(fault: Fault) -> io::Result<()> {
    fault.inject(rustix::process::getpid())
}

/// Asks the system to end this process when its parent ends, so that no rank survives its test.
#[cfg(target_os = "linux")]
pub(crate) fn end_with_parent() -> io::Result<()> {
    use rustix::process::Signal;
    Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?)
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn inject(_child: &Child, _fault: Fault) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// There are no such signals here.
#[cfg(not(target_os = "linux"))]
pub fn inject_here(_fault: Fault) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn end_with_parent() -> io::Result<()> {
    Ok(())
}
