//! Linux: memfd, futex, membarrier, pidfd, Unix sockets.

use crate::types::error::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::io::{Errno, retry_on_intr};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use rustix::process::{PidfdFlags, Resource};
use rustix::thread::{MembarrierCommand, futex};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// An error where processes of a host cannot share a region.
pub(crate) fn check_process_ranks() -> Result<()> {
    Ok(())
}

/// Pages of memory, unmapped on drop. Zero until written, and not backed by memory until touched.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is plain memory; who may touch which byte when is the users' protocol.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Memory of this process alone.
    pub fn anonymous(len: usize) -> Result<Mapping> {
        // SAFETY: a fresh mapping at an address the kernel chooses overlaps nothing.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        Mapping::from_mmap(start, len)
    }

    fn from_mmap(start: rustix::io::Result<*mut std::ffi::c_void>, len: usize) -> Result<Mapping> {
        let start = start.map_err(|e| {
            Error::system(
                "mmap",
                e.into(),
                format!(
                    "the region needs {len} bytes of address space: raise `ulimit -v` or use fewer ranks"
                ),
            )
        })?;
        let start = NonNull::new(start.cast()).expect("mmap never returns null on success");
        Ok(Mapping { start, len })
    }

    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Puts zeroed memory of this process alone in the place of a range of whole pages, at once: other
    /// processes go on with the pages that were there.
    pub fn replace_with_private(&self, offset: usize, len: usize) {
        assert!(offset + len <= self.len, "a range of the mapping");
        // SAFETY: the range is this mapping's. Its owner gives up what it held, and touches it through raw
        // pointers or references to plain numbers, for which any contents are valid.
        let replaced = unsafe {
            rustix::mm::mmap_anonymous(
                self.start.as_ptr().add(offset).cast(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::FIXED,
            )
        };
        // Without it a stopped peer could write to memory that its owner uses for something else.
        replaced.expect("private memory can take the place of shared memory");
    }

    pub fn len(&self) -> usize {
        self.len
    }
}

/// Bytes of a page: 4096 on x86, up to 65536 on other processors.
pub(crate) fn page_size() -> usize {
    rustix::param::page_size()
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and nothing refers to it after its owner is gone.
        // An error could only mean that the range is not mapped, which is what is wanted.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Memory that processes share: an anonymous file (memfd) without a name in any file system, so
/// nothing can be left behind and nothing stale can be found.
#[derive(Debug)]
pub(crate) struct SharedFile(OwnedFd);

impl SharedFile {
    pub fn create() -> Result<SharedFile> {
        rustix::fs::memfd_create("phalanx", MemfdFlags::CLOEXEC).map(SharedFile).map_err(|e| {
            Error::system(
                "memfd_create",
                e.into(),
                "process ranks need one file descriptor and Linux 3.17: raise `ulimit -n`, or run the \
                 ranks as threads",
            )
        })
    }

    /// Another handle to the same memory.
    pub fn try_clone(&self) -> Result<SharedFile> {
        self.0.try_clone().map(SharedFile).map_err(|e| Error::system("dup", e, "raise `ulimit -n`"))
    }

    /// Makes the file at least `len` bytes long; never shrinks it. The pages stay unallocated.
    pub fn extend_to(&self, len: u64) -> Result<()> {
        self.check_limit(len)?;
        // Writing the last byte, unlike ftruncate, cannot shrink a file that a peer just extended.
        rustix::io::pwrite(&self.0, &[0], len - 1)
            .map(drop)
            .map_err(|e| out_of_memory("pwrite", e, len, None))
    }

    /// Allocates the pages of a range, so that using them later cannot fail. What is more than there is, is an error before the system
    /// ends somebody for it.
    pub fn commit(&self, offset: u64, len: u64) -> Result<()> {
        self.check_limit(offset + len)?;
        // Others allocate at the same time.
        const LOOK: u64 = 64 << 20;
        // A signal ends the call, and takes back what it has allocated: in steps that come to their end between two signals.
        const STEP: u64 = 1 << 20;
        for start in (offset..offset + len).step_by(STEP as usize) {
            let left = offset + len - start;
            if left >= LOOK && (start - offset).is_multiple_of(LOOK) {
                check_available(left)?;
            }
            let step = STEP.min(left);
            retry_on_intr(|| rustix::fs::fallocate(&self.0, FallocateFlags::empty(), start, step))
                .map_err(|e| out_of_memory("fallocate", e, len, None))?;
        }
        Ok(())
    }

    /// Gives the pages of a range back to the system; they read as zero afterwards.
    pub fn release(&self, offset: u64, len: u64) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if let Err(e) = rustix::fs::fallocate(&self.0, flags, offset, len) {
            tracing::warn!("cannot give {len} bytes of shared memory back: {e}");
        }
    }

    /// Bytes of its pages.
    #[cfg(test)]
    pub fn allocated(&self) -> u64 {
        rustix::fs::fstat(&self.0).unwrap().st_blocks as u64 * 512
    }

    pub fn map(&self, offset: u64, len: usize) -> Result<Mapping> {
        // SAFETY: a fresh mapping at an address the kernel chooses overlaps nothing.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &self.0,
                offset,
            )
        };
        Mapping::from_mmap(start, len)
    }

    /// Growing past `RLIMIT_FSIZE` would kill the process with SIGXFSZ: answer an error instead.
    pub fn check_limit(&self, len: u64) -> Result<()> {
        match rustix::process::getrlimit(Resource::Fsize).current {
            Some(limit) if limit < len => Err(Error::system(
                "memfd",
                io::Error::from(io::ErrorKind::FileTooLarge),
                format!("the region needs {len} bytes and `ulimit -f` allows {limit}: raise it"),
            )),
            _ => Ok(()),
        }
    }
}

fn out_of_memory(call: &'static str, e: rustix::io::Errno, len: u64, available: Option<u64>) -> Error {
    let available = available.map_or(String::new(), |available| format!(", and {available} can be had"));
    Error::system(
        call,
        e.into(),
        format!(
            "{len} bytes of shared memory are needed{available}: free memory, raise the container's limit, or ask for less"
        ),
    )
}

/// Whether there are so many bytes to be had, as far as is known.
fn check_available(len: u64) -> Result<()> {
    match super::memory::available() {
        Some(available) if available < len => {
            Err(out_of_memory("fallocate", rustix::io::Errno::NOMEM, len, Some(available)))
        }
        _ => Ok(()),
    }
}

/// Sleeps until `word` is no longer `expected`, somebody wakes it, or `timeout` has passed.
pub(crate) fn futex_wait(word: &AtomicU32, expected: u32, timeout: Duration) {
    let timeout = Timespec {
        tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    };
    // Every outcome (woken, changed, interrupted, timed out) means: look again.
    let _ = futex::wait(word, futex::Flags::empty(), expected, Some(&timeout));
}

/// Wakes whoever sleeps on `word`.
pub(crate) fn futex_wake(word: &AtomicU32) {
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}

/// Whether [`heavy_barrier`] orders the other ranks' accesses too, so that they need only
/// compiler fences on their fast path. Registers this process to be a target of such barriers.
pub(crate) fn asymmetric_barriers() -> bool {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    *REGISTERED.get_or_init(|| rustix::thread::membarrier(MembarrierCommand::RegisterGlobalExpedited).is_ok())
}

/// A full memory barrier on this thread and, where [`asymmetric_barriers`] is true, on every running
/// thread of every process that registered.
pub(crate) fn heavy_barrier() {
    std::sync::atomic::fence(Ordering::SeqCst);
    if asymmetric_barriers() {
        let _ = rustix::thread::membarrier(MembarrierCommand::GlobalExpedited);
    }
}

/// A process that can be watched: a pidfd, immune to the reuse of process ids.
#[derive(Debug)]
pub(crate) struct Process(OwnedFd);

impl Process {
    pub fn current() -> Result<Process> {
        rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).map(Process).map_err(
            |e| {
                Error::system(
                    "pidfd_open",
                    e.into(),
                    "process ranks need Linux 5.3 and a file descriptor for each rank: raise `ulimit -n`, \
                     or run the ranks as threads",
                )
            },
        )
    }

    /// Another handle to the same process.
    pub fn try_clone(&self) -> Result<Process> {
        self.0.try_clone().map(Process).map_err(|e| Error::system("dup", e, "raise `ulimit -n`"))
    }

    /// Whether the process has ended.
    pub fn has_exited(&self) -> bool {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        matches!(rustix::event::poll(&mut fds, Some(&Timespec::default())), Ok(1..))
    }
}

/// Copies bytes out of another process's memory, as far as the system lets this one look into it: `process_vm_readv`, the kernel's
/// "cross-memory attach". A process that has ended, or is about to, is
/// [`NotFound`](io::ErrorKind::NotFound).
///
/// # Safety
/// `len` bytes are writable at `target`.
pub(crate) unsafe fn read_process(pid: u32, source: u64, target: *mut u8, len: usize) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        let left = len - done;
        let theirs = libc::iovec { iov_base: (source as usize + done) as *mut libc::c_void, iov_len: left };
        // SAFETY: the kernel writes to the rest of the target at most, and looks at the source itself: what cannot be read is an error.
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

/// Whether a process is stopped, where that can be seen.
pub(crate) fn halt(pid: u32) -> Option<Halt> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    match stat.rsplit_once(')')?.1.trim_start().chars().next() {
        Some('T') => Some(Halt::Stopped),
        Some('t') => Some(Halt::Traced),
        _ => None,
    }
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
            let page = Mapping::anonymous(4096).ok()?;
            // SAFETY: the advice is for this page, which holds nothing but the mark.
            let advised = unsafe {
                rustix::mm::madvise(page.as_ptr().cast(), page.len(), rustix::mm::Advice::LinuxWipeOnFork)
            };
            advised.ok()?;
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

/// The cores this thread may use, as a bit set.
pub(crate) type CpuSet = [u64; 16];

/// The cores this thread may use.
pub(crate) fn usable_cpus() -> CpuSet {
    let mut set = [0; 16];
    if let Ok(affinity) = rustix::thread::sched_getaffinity(None) {
        for cpu in
            (0..rustix::thread::CpuSet::MAX_CPU.min(64 * set.len())).filter(|cpu| affinity.is_set(*cpu))
        {
            set[cpu / 64] |= 1 << (cpu % 64);
        }
    }
    set
}

/// Nanoseconds of a clock that all processes of the host share and that is never set.
pub(crate) fn monotonic_nanos() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// An error if this process cannot make files in a folder.
pub(crate) fn check_writable(folder: &Path) -> io::Result<()> {
    use rustix::fs::{Access, access};
    if !folder.metadata()?.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    Ok(access(folder, Access::WRITE_OK | Access::EXEC_OK)?)
}

/// What changes when the host starts again: processes with the same one have one monotonic clock.
pub(crate) fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// Writes to a socket. In a program that is not Rust's, a broken pipe would otherwise be its end.
pub(crate) fn write_socket(stream: &UnixStream, bytes: &[u8]) -> io::Result<usize> {
    Ok(rustix::net::send(stream, bytes, SendFlags::NOSIGNAL)?)
}

/// The user this process runs as.
pub(crate) fn user_id() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The address of a rendezvous: an abstract Unix socket, which has no place in the file system and
/// ends with its last descriptor.
pub(crate) struct Address(SocketAddr);

impl Address {
    pub fn new(name: &str) -> io::Result<Address> {
        SocketAddr::from_abstract_name(name).map(Address)
    }

    pub fn listen(&self) -> io::Result<Listener> {
        UnixListener::bind_addr(&self.0).map(Listener)
    }

    pub fn connect(&self) -> io::Result<Connection> {
        UnixStream::connect_addr(&self.0).map(Connection)
    }
}

pub(crate) struct Listener(UnixListener);

impl Listener {
    /// The next connection, or `None` if none came within `timeout`.
    pub fn accept(&self, timeout: Duration) -> io::Result<Option<Connection>> {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        let timeout = Timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        match rustix::event::poll(&mut fds, Some(&timeout)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => Ok(None),
            Ok(_) => self.0.accept().map(|(stream, _)| Some(Connection(stream))),
            Err(e) => Err(e.into()),
        }
    }
}

/// A connection that carries bytes and file descriptors between processes of one host.
pub(crate) struct Connection(UnixStream);

/// The most file descriptors one message carries (the kernel's `SCM_MAX_FD`).
const MAX_FDS: usize = 253;

/// How long until those that are under way are looked at again.
const TICK: Duration = Duration::from_millis(1);

impl Connection {
    /// The user at the other end, as the kernel knows it.
    pub fn peer_user(&self) -> io::Result<u32> {
        Ok(rustix::net::sockopt::socket_peercred(&self.0)?.uid.as_raw())
    }

    pub fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        let timeout = Some(timeout.max(Duration::from_millis(1)));
        self.0.set_read_timeout(timeout)?;
        self.0.set_write_timeout(timeout)
    }

    /// Sends all of `bytes`.
    pub fn send(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match write_socket(&self.0, bytes) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Receives exactly `bytes.len()` bytes.
    pub fn receive(&self, bytes: &mut [u8]) -> io::Result<()> {
        use std::io::Read;
        (&self.0).read_exact(bytes)
    }

    /// Gives the peer handles of its own to a region's file and to processes.
    pub fn send_handles(
        &self,
        file: Option<&SharedFile>,
        processes: &[&Process],
        deadline: Instant,
    ) -> io::Result<()> {
        let fds: Vec<BorrowedFd<'_>> =
            file.map(|f| f.0.as_fd()).into_iter().chain(processes.iter().map(|p| p.0.as_fd())).collect();
        // A message carries only so many.
        for fds in fds.chunks(MAX_FDS) {
            loop {
                match self.send_fds(fds) {
                    // Those that a user's processes have sent and nobody has taken yet count against `ulimit -n`.
                    Err(Errno::TOOMANYREFS) if Instant::now() < deadline => std::thread::sleep(TICK),
                    sent => break sent?,
                }
            }
        }
        Ok(())
    }

    fn send_fds(&self, fds: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
        let mut space = vec![MaybeUninit::uninit(); SendAncillaryMessage::ScmRights(fds).size()];
        retry_on_intr(|| {
            let mut control = SendAncillaryBuffer::new(&mut space);
            control.push(SendAncillaryMessage::ScmRights(fds));
            rustix::net::sendmsg(&self.0, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL).map(drop)
        })
    }

    /// What a peer sent of itself with [`send_handles`](Self::send_handles).
    pub fn receive_process(&self) -> io::Result<Process> {
        self.receive_fds(1).map(|mut fds| Process(fds.remove(0)))
    }

    /// A region's file and the processes of all its ranks.
    pub fn receive_world(&self, ranks: usize) -> io::Result<(SharedFile, Vec<Process>)> {
        let mut fds = self.receive_fds(1 + ranks)?.into_iter();
        let file = SharedFile(fds.next().expect("as many as asked for"));
        Ok((file, fds.map(Process).collect()))
    }

    fn receive_fds(&self, count: usize) -> io::Result<Vec<OwnedFd>> {
        let mut received = Vec::with_capacity(count);
        while received.len() < count {
            let expected = (count - received.len()).min(MAX_FDS);
            let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut byte = [0];
            let message = retry_on_intr(|| {
                let buffers = &mut [IoSliceMut::new(&mut byte)];
                rustix::net::recvmsg(&self.0, buffers, &mut control, RecvFlags::CMSG_CLOEXEC)
            })?;
            let before = received.len();
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(fds) = message {
                    received.extend(fds);
                }
            }
            if message.bytes == 0 || received.len() - before != expected {
                let got = received.len() - before;
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("{got} of {expected} file descriptors came: raise `ulimit -n`"),
                ));
            }
        }
        Ok(received)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Rlimit, Uid};
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn a_broken_connection_is_an_error_and_no_signal() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        let caught = Arc::new(AtomicBool::new(false));
        let handler = signal_hook::flag::register(signal_hook::consts::SIGPIPE, caught.clone()).unwrap();
        let error = Connection(ours).send(&[0; 100]).unwrap_err();
        signal_hook::low_level::unregister(handler);
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        assert!(!caught.load(Ordering::Relaxed));
    }

    /// On a thread of its own: its user, if it is root, becomes one to whom limits apply.
    #[test]
    fn handles_wait_for_those_under_way() {
        let soft = rustix::process::getrlimit(Resource::Nofile);
        let limit = soft.current.map_or(1024, |limit| limit.min(1024));
        rustix::process::setrlimit(Resource::Nofile, Rlimit { current: Some(limit), ..soft }).unwrap();
        let (ours, theirs) = UnixStream::pair().map(|(a, b)| (Connection(a), Connection(b))).unwrap();
        let own = Process::current().unwrap();
        let sender = std::thread::spawn(move || {
            if rustix::process::getuid().is_root() {
                let nobody = Uid::from_raw(65534);
                rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
            }
            let handles = [&own; MAX_FDS];
            let past = Instant::now();
            let mut under_way = 0;
            let error = loop {
                match ours.send_handles(None, &handles, past) {
                    Ok(()) => under_way += 1,
                    Err(error) => break error,
                }
            };
            assert_eq!(error.raw_os_error(), Some(Errno::TOOMANYREFS.raw_os_error()));
            let reader = std::thread::spawn(move || {
                (0..=under_way).for_each(|_| drop(theirs.receive_fds(MAX_FDS).unwrap()));
            });
            ours.send_handles(None, &handles, past + Duration::from_secs(60)).unwrap();
            reader.join().unwrap();
        });
        sender.join().unwrap();
    }

    #[test]
    fn more_memory_than_there_is_is_an_error() {
        let (file, len) = (SharedFile::create().unwrap(), crate::os::memory::available().unwrap() * 2);
        let error = file.commit(0, len).unwrap_err().to_string();
        assert!(error.contains(&format!("{len} bytes")) && error.contains("can be had"), "{error}");
        assert_eq!(file.allocated(), 0);
        file.commit(0, 1 << 20).unwrap();
    }

    #[test]
    fn pages_are_allocated_whatever_signals_come() {
        use std::os::unix::thread::{JoinHandleExt, RawPthread};
        unsafe extern "C" {
            fn pthread_kill(thread: RawPthread, signal: std::ffi::c_int) -> std::ffi::c_int;
        }
        let (file, len) = (SharedFile::create().unwrap(), 64 << 20);
        file.extend_to(len).unwrap();
        let signal = signal_hook::consts::SIGURG;
        let handler = signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false))).unwrap();
        let thread = std::thread::spawn(move || file.commit(0, len));
        while !thread.is_finished() {
            // SAFETY: the thread has not been joined.
            unsafe { pthread_kill(thread.as_pthread_t(), signal) };
            std::thread::sleep(Duration::from_millis(1));
        }
        signal_hook::low_level::unregister(handler);
        thread.join().unwrap().unwrap();
    }
}
