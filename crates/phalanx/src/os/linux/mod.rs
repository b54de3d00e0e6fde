//! Linux: memory that processes share, sleeping and waking, other processes, and Unix sockets that carry file
//! descriptors.
//!
//! | file | what |
//! |---|---|
//! | `memory.rs` | mappings and memfd |
//! | `futex.rs` | futex and membarrier |
//! | `process.rs` | pidfd, reading another process's memory, stopped processes, forks |
//! | `connection.rs` | abstract Unix sockets |
//! | `cpus.rs` | the cores of a thread |

mod connection;
mod cpus;
mod futex;
mod memory;
mod process;

pub(crate) use connection::{Address, Listener, LocalConnection, PeerProcess, write_socket};
pub(crate) use cpus::{CpuSet, usable_cpus};
pub use cpus::{run_on, usable_cores};
pub(crate) use futex::{asymmetric_barriers, futex_wait, futex_wake, heavy_barrier};
pub(crate) use memory::{Mapping, SharedFile, page_size};
pub(crate) use process::{
    ForkMark, Halt, Process, ancestor_environments, read_process, stat_of, waited_for_core,
};

use crate::types::error::Result;
use rustix::event::Timespec;
use std::io;
use std::path::Path;
use std::time::Duration;

/// Writes to the error stream, past the lock of [`std::io::stderr`], which a thread may hold that waits there. A stream that takes
/// nothing for a second gets nothing.
pub(crate) fn write_to_stderr(mut text: &[u8]) {
    use rustix::event::{PollFd, PollFlags, poll};
    // A pipe that is ready takes so much at once.
    const PIPE_BUF: usize = 4096;
    let stream = rustix::stdio::stderr();
    while !text.is_empty() {
        let mut ready = [PollFd::new(&stream, PollFlags::OUT)];
        let second = Timespec { tv_sec: 1, tv_nsec: 0 };
        match poll(&mut ready, Some(&second)) {
            Ok(1) => {}
            Err(rustix::io::Errno::INTR) => continue,
            _ => return,
        }
        match rustix::io::write(stream, &text[..text.len().min(PIPE_BUF)]) {
            Ok(written) if written > 0 => text = &text[written..],
            _ => return,
        }
    }
}

/// Checks that processes of a host can share a region.
pub(crate) fn check_process_ranks() -> Result<()> {
    Ok(())
}

/// Nanoseconds of a clock that all processes of the host share and that is never set.
pub(crate) fn monotonic_nanos() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Checks that this process can create files in a folder.
pub(crate) fn check_writable(folder: &Path) -> io::Result<()> {
    use rustix::fs::{Access, access};
    if !folder.metadata()?.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    Ok(access(folder, Access::WRITE_OK | Access::EXEC_OK)?)
}

/// The host's boot id. Processes with the same boot id have the same monotonic clock.
pub(crate) fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// The user this process runs as.
pub(crate) fn user_id() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// A timeout as the kernel takes it.
fn timespec(timeout: Duration) -> Timespec {
    Timespec {
        tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    }
}
