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
}

#[cfg(target_os = "linux")]
impl Fault {
    fn signal(self) -> rustix::process::Signal {
        use rustix::process::Signal;
        match self {
            Fault::Kill => Signal::KILL,
            Fault::Stop => Signal::STOP,
            Fault::Continue => Signal::CONT,
            Fault::Ask => Signal::USR1,
        }
    }
}

/// Sends the signal of a fault to a child that has not been waited for yet.
#[cfg(target_os = "linux")]
pub(crate) fn inject(child: &Child, fault: Fault) -> io::Result<()> {
    use rustix::process::Pid;
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(rustix::process::kill_process(pid, fault.signal())?)
}

/// The same to this process.
#[cfg(target_os = "linux")]
pub fn inject_here(fault: Fault) -> io::Result<()> {
    Ok(rustix::process::kill_process(rustix::process::getpid(), fault.signal())?)
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
