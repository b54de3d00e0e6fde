//! Other processes of the host: whether one has ended or is stopped, its memory, and whether this one is a
//! fork.

use super::{Mapping, page_size};
use crate::types::error::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::PidfdFlags;
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// A process that can be watched: a pidfd, immune to the reuse of process ids.
#[derive(Debug)]
pub(crate) struct Process {
    pub(super) fd: OwnedFd,
    /// Its id here: see [`id`](Process::id).
    id: OnceLock<Option<u32>>,
}

impl From<OwnedFd> for Process {
    fn from(fd: OwnedFd) -> Process {
        Process { fd, id: OnceLock::new() }
    }
}

impl Process {
    pub fn current() -> Result<Process> {
        rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())
            .map(Process::from)
            .map_err(|e| {
                Error::system(
                    "pidfd_open",
                    e.into(),
                    "process ranks need Linux 5.3 and a file descriptor for each rank: raise `ulimit -n`, \
                     or run the ranks as threads",
                )
            })
    }

    /// Another handle to the same process.
    pub fn try_clone(&self) -> Result<Process> {
        self.fd.try_clone().map(Process::from).map_err(|e| Error::system("dup", e, "raise `ulimit -n`"))
    }

    /// The process's id in this process's PID namespace, in which it may have another than in its own; `None` if it has none
    /// here, as a process of another container.
    pub fn id(&self) -> Option<u32> {
        *self.id.get_or_init(|| {
            let path = format!("/proc/self/fdinfo/{}", self.fd.as_raw_fd());
            let info = std::fs::read_to_string(path).ok()?;
            let id: i64 = info.lines().find_map(|line| line.strip_prefix("Pid:"))?.trim().parse().ok()?;
            // 0: it has no id here; -1: it has ended.
            u32::try_from(id).ok().filter(|id| *id != 0)
        })
    }

    /// Why the process does not run, if it is stopped and that can be seen.
    pub fn halt(&self) -> Option<Halt> {
        halt(self.id()?)
    }

    /// Whether the process has ended.
    pub fn has_exited(&self) -> bool {
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        matches!(rustix::event::poll(&mut fds, Some(&Timespec::default())), Ok(1..))
    }
}

/// Copies bytes out of another process's memory, as far as the system lets this one look into it:
/// `process_vm_readv`, the kernel's "cross-memory attach". A process that has ended, or is about to, is
/// [`NotFound`](io::ErrorKind::NotFound).
///
/// # Safety
/// `len` bytes are writable at `target`.
pub(crate) unsafe fn read_process(pid: u32, source: u64, target: *mut u8, len: usize) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        let left = len - done;
        let theirs = libc::iovec { iov_base: (source as usize + done) as *mut libc::c_void, iov_len: left };
        // SAFETY: the kernel writes to the rest of the target at most, and looks at the source itself: what
        // cannot be read is an error.
        let read = unsafe {
            let ours = libc::iovec { iov_base: target.add(done).cast(), iov_len: left };
            libc::process_vm_readv(pid as libc::pid_t, &ours, 1, &theirs, 1, 0)
        };
        match read {
            -1 => return Err(not_there(io::Error::last_os_error())),
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => done += read as usize,
        }
    }
    Ok(())
}

/// "No such process" has no kind of its own.
fn not_there(e: io::Error) -> io::Error {
    if e.raw_os_error() == Some(libc::ESRCH) { io::ErrorKind::NotFound.into() } else { e }
}

/// Why a process does not run, although it is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Halt {
    /// By a signal: SIGSTOP, Ctrl-Z.
    Stopped,
    /// By a debugger.
    Traced,
}

/// The fields of `/proc/ID/stat` from the state on, of a process or thread. Before them are the id and the name, which may contain any
/// character.
pub(crate) fn stat_of(id: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    Some(stat.rsplit_once(')')?.1.trim().to_owned())
}

fn halt(pid: u32) -> Option<Halt> {
    match stat_of(pid)?.chars().next() {
        Some('T') => Some(Halt::Stopped),
        Some('t') => Some(Halt::Traced),
        _ => None,
    }
}

/// How long this thread has been ready to run and had no core, since it began; zero where the kernel does not count it.
pub(crate) fn waited_for_core() -> Duration {
    let counted = || {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        // Nanoseconds on a core, nanoseconds of waiting for one, number of slices.
        text.split_whitespace().nth(1)?.parse().ok()
    };
    Duration::from_nanos(counted().unwrap_or(0))
}

/// The environments that the ancestors of this process were started with, its parent's first, up to the first that
/// cannot be read: another user's, or one of another PID namespace.
pub(crate) fn ancestor_environments() -> Vec<HashMap<String, String>> {
    // Shells and wrappers are in between, and a launcher may run inside others.
    const MOST: usize = 32;
    let mut environments = Vec::new();
    let mut process = std::process::id();
    while environments.len() < MOST {
        let Some(parent) = parent_of(process) else { break };
        let bytes = std::fs::read(format!("/proc/{parent}/environ")).unwrap_or_default();
        if bytes.is_empty() {
            break;
        }
        environments.push(parse_environment(&bytes));
        process = parent;
    }
    environments
}

fn parent_of(process: u32) -> Option<u32> {
    let parent = stat_of(process)?.split_whitespace().nth(1)?.parse().ok()?;
    (parent != 0).then_some(parent)
}

fn parse_environment(bytes: &[u8]) -> HashMap<String, String> {
    let entry = |entry: &[u8]| {
        let entry = String::from_utf8_lossy(entry);
        entry.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()))
    };
    bytes.split(|byte| *byte == 0).filter_map(entry).collect()
}

/// Tells a process from its copies: a page that the system clears in what fork makes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ForkMark {
    mark: Option<&'static AtomicU32>,
    generation: u32,
}

impl ForkMark {
    pub fn of_this_process() -> ForkMark {
        static PAGE: OnceLock<Option<Mapping>> = OnceLock::new();
        static GENERATIONS: AtomicU32 = AtomicU32::new(0);
        let page = PAGE.get_or_init(|| {
            let page = Mapping::anonymous(page_size()).ok()?;
            // SAFETY: the advice is for this page, which holds nothing but the mark.
            let advised = unsafe {
                rustix::mm::madvise(page.as_ptr().cast(), page.len(), rustix::mm::Advice::LinuxWipeOnFork)
            };
            let refused = |e: &rustix::io::Errno| {
                crate::os::log::warn!(
                    "madvise(MADV_WIPEONFORK) is refused ({e}): a copy of this process, made by fork, is not told from it, and must not \
                     use its communicators"
                );
            };
            advised.inspect_err(refused).ok()?;
            Some(page)
        });
        // SAFETY: the page is never unmapped, and zeroes are an atomic.
        let mark = page.as_ref().map(|page| unsafe { &*page.as_ptr().cast::<AtomicU32>() });
        let generation = mark.map_or(0, |mark| {
            let next = GENERATIONS.load(Ordering::Relaxed) + 1;
            match mark.compare_exchange(0, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => GENERATIONS.fetch_max(next, Ordering::Relaxed).max(next),
                Err(present) => present,
            }
        });
        ForkMark { mark, generation }
    }

    /// Whether this process is a copy of the one whose mark it is.
    #[inline(always)]
    pub fn is_copy(self) -> bool {
        self.mark.is_some_and(|mark| mark.load(Ordering::Relaxed) != self.generation)
    }
}
