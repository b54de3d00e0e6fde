//! Systems other than Linux: ranks are threads, and process ranks return a typed error.

use crate::types::error::{Error, Result, UnsupportedError};
use std::alloc::Layout;
use std::io;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// An error where processes of a host cannot share a region.
pub(crate) fn check_process_ranks() -> Result<()> {
    Err(unsupported())
}

/// Writes to the error stream, as far as that can be written.
pub(crate) fn write_to_stderr(text: &[u8]) {
    let _ = io::Write::write_all(&mut io::stderr(), text);
}

fn unsupported() -> Error {
    Error::from(UnsupportedError {
        what: "ranks as processes of one host".into(),
        why: format!("shared regions are implemented for Linux, this is {}", std::env::consts::OS),
        remedy: "run the ranks as threads (phalanx::run)".into(),
    })
}

/// Nanoseconds since the first call in this process.
pub(crate) fn monotonic_nanos() -> u64 {
    static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    START.get_or_init(std::time::Instant::now).elapsed().as_nanos() as u64
}

/// An error if this process cannot make files in a folder, as far as is known before it does.
pub(crate) fn check_writable(folder: &Path) -> io::Result<()> {
    let folder = folder.metadata()?;
    match (folder.is_dir(), folder.permissions().readonly()) {
        (true, false) => Ok(()),
        (true, true) => Err(io::ErrorKind::PermissionDenied.into()),
        (false, _) => Err(io::ErrorKind::NotADirectory.into()),
    }
}

/// How long this thread had no core: unknown here.
pub(crate) fn waited_for_core() -> Duration {
    Duration::ZERO
}

/// The environments of this process's ancestors: unknown here.
pub(crate) fn ancestor_environments() -> Vec<std::collections::HashMap<String, String>> {
    Vec::new()
}

/// Every process has a clock of its own.
pub(crate) fn boot_id() -> String {
    std::process::id().to_string()
}

/// Zeroed memory that starts where a page does, freed on drop. Not backed by memory until touched, as far as
/// the system's allocator can do that: it is asked for a page more and no alignment, since it would zero by
/// itself what it has to align.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
    /// What was allocated.
    memory: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a mapping is plain memory; who may touch which byte when is the users' protocol.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub fn anonymous(len: usize) -> Result<Mapping> {
        let refused = || {
            Error::system(
                "alloc",
                io::ErrorKind::OutOfMemory.into(),
                format!("the region needs {len} bytes: use fewer ranks"),
            )
        };
        let with_page = len.checked_add(page_size()).ok_or_else(refused)?;
        let layout = Layout::array::<u8>(with_page).map_err(|_| refused())?;
        // SAFETY: the layout's size is not zero.
        let memory = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).ok_or_else(refused)?;
        // SAFETY: less than the page that was added.
        let start = unsafe { memory.add(memory.align_offset(page_size())) };
        Ok(Mapping { start, len, memory, layout })
    }

    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Other processes never see this memory.
    pub fn replace_with_private(&self, _offset: usize, _len: usize) {}

    pub fn len(&self) -> usize {
        self.len
    }
}

/// Bytes of a page, or of a part of one: no page is replaced here.
pub(crate) fn page_size() -> usize {
    4096
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: allocated in `anonymous` with this layout, and owned by this value.
        unsafe { std::alloc::dealloc(self.memory.as_ptr(), self.layout) }
    }
}

/// Memory shared by processes. Not supported here: this type has no values.
#[derive(Debug)]
pub(crate) enum SharedFile {}

impl SharedFile {
    pub fn create() -> Result<SharedFile> {
        Err(unsupported())
    }
    pub fn try_clone(&self) -> Result<SharedFile> {
        match *self {}
    }
    pub fn check_limit(&self, _len: u64) -> Result<()> {
        match *self {}
    }
    pub fn extend_to(&self, _len: u64) -> Result<()> {
        match *self {}
    }
    pub fn commit(&self, _offset: u64, _len: u64) -> Result<()> {
        match *self {}
    }
    pub fn release(&self, _offset: u64, _len: u64) {
        match *self {}
    }
    pub fn len(&self) -> Result<u64> {
        match *self {}
    }
    pub fn map(&self, _offset: u64, _len: usize) -> Result<Mapping> {
        match *self {}
    }
}

/// Sleeps for a short time, since there is no futex; the caller polls again.
pub(crate) fn futex_wait(word: &AtomicU32, expected: u32, timeout: Duration) {
    if word.load(Ordering::Acquire) == expected {
        std::thread::sleep(timeout.min(Duration::from_micros(100)));
    }
}

/// Does nothing: sleepers poll by themselves.
pub(crate) fn futex_wake(_word: &AtomicU32) {}

/// Barriers here order this thread only, so every rank needs full fences.
pub(crate) fn asymmetric_barriers() -> bool {
    false
}

/// A full memory barrier on this thread.
pub(crate) fn heavy_barrier() {
    std::sync::atomic::fence(Ordering::SeqCst);
}

/// A process to watch. Not supported here.
#[derive(Debug)]
pub(crate) enum Process {}

impl Process {
    pub fn current() -> Result<Process> {
        Err(unsupported())
    }
    pub fn try_clone(&self) -> Result<Process> {
        match *self {}
    }
    pub fn has_exited(&self) -> bool {
        match *self {}
    }
    pub fn id(&self) -> Option<u32> {
        match *self {}
    }
    pub fn halt(&self) -> Option<Halt> {
        match *self {}
    }
}

/// Reading another process's memory is not supported here.
///
/// # Safety
/// None: nothing is written.
pub(crate) unsafe fn read_process(_pid: u32, _source: u64, _target: *mut u8, _len: usize) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Why a process does not run, although it is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(dead_code, reason = "what is not known is never told")]
pub(crate) enum Halt {
    Stopped,
    Traced,
}

/// Forks cannot be detected here.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ForkMark;

impl ForkMark {
    pub fn of_this_process() -> ForkMark {
        ForkMark
    }

    pub fn is_copy(self) -> bool {
        false
    }
}

/// The cores this thread may use, as a bit set.
pub(crate) type CpuSet = [u64; 128];

/// The cores this thread may use: unknown here.
pub(crate) fn usable_cpus() -> CpuSet {
    [0; 128]
}

/// The numbers of the cores that this thread may use: unknown here.
pub fn usable_cores() -> Vec<usize> {
    Vec::new()
}

/// Lets this thread run on one core only: not supported here.
pub fn run_on(_cores: &[usize]) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Writes to a socket.
#[cfg(unix)]
pub(crate) fn write_socket(mut stream: &std::os::unix::net::UnixStream, bytes: &[u8]) -> io::Result<usize> {
    io::Write::write(&mut stream, bytes)
}

/// The user this process runs as: unknown here.
pub(crate) fn user_id() -> u32 {
    0
}

/// The address of a rendezvous. Not supported here: this type has no values.
pub(crate) enum Address {}

impl Address {
    pub fn new(_name: &str) -> io::Result<Address> {
        Err(io::ErrorKind::Unsupported.into())
    }
    pub fn listen(&self) -> io::Result<Listener> {
        match *self {}
    }
    pub fn connect(&self) -> io::Result<LocalConnection> {
        match *self {}
    }
}

pub(crate) enum Listener {}

impl Listener {
    pub fn accept(&self, _timeout: Duration) -> io::Result<Option<LocalConnection>> {
        match *self {}
    }
}

/// The process at the other end of a connection.
pub(crate) struct PeerProcess {
    pub user: u32,
    pub process: Option<u32>,
}

/// A connection that carries handles between processes.
pub(crate) enum LocalConnection {}

impl LocalConnection {
    pub fn peer(&self) -> io::Result<PeerProcess> {
        match *self {}
    }
    pub fn set_timeout(&self, _timeout: Duration) -> io::Result<()> {
        match *self {}
    }
    pub fn send(&self, _bytes: &[u8]) -> io::Result<()> {
        match *self {}
    }
    pub fn send_handles(
        &self,
        _file: Option<&SharedFile>,
        _processes: &[&Process],
        _deadline: Instant,
    ) -> io::Result<()> {
        match *self {}
    }
    pub fn receive(&self, _bytes: &mut [u8]) -> io::Result<()> {
        match *self {}
    }
    pub fn receive_process(&self) -> io::Result<Process> {
        match *self {}
    }
    pub fn receive_world(&self, _ranks: usize) -> io::Result<(SharedFile, Vec<Process>)> {
        match *self {}
    }
}
