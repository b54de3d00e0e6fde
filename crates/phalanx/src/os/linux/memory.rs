//! Mapped memory: private pages, and an anonymous file (memfd) that processes share.

use crate::os::memory::available;
use crate::types::error::{Error, Result};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::retry_on_intr;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::Resource;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

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
pub(crate) struct SharedFile(pub(super) OwnedFd);

impl SharedFile {
    pub fn create() -> Result<SharedFile> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let sealed = rustix::fs::memfd_create("phalanx", flags).and_then(|file| {
            // A rank that shortened the file would end all others by SIGBUS.
            rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::SEAL)?;
            Ok(SharedFile(file))
        });
        sealed.map_err(|e| {
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

    /// Allocates the pages of a range, so that using them later cannot fail. More than is available is an
    /// error, before the system kills a process for it.
    pub fn commit(&self, offset: u64, len: u64) -> Result<()> {
        self.check_limit(offset + len)?;
        // Others allocate at the same time.
        const LOOK: u64 = 64 << 20;
        // A signal ends the call, and takes back what it has allocated: in steps that come to their end
        // between two signals.
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
            crate::os::log::warn!("cannot give {len} bytes of shared memory back: {e}");
        }
    }

    /// Bytes up to its end.
    pub fn len(&self) -> Result<u64> {
        let stat = rustix::fs::fstat(&self.0);
        stat.map(|stat| stat.st_size as u64)
            .map_err(|e| Error::system("fstat", e.into(), "see the system's log"))
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
    match available() {
        Some(available) if available < len => {
            Err(out_of_memory("fallocate", rustix::io::Errno::NOMEM, len, Some(available)))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    #[test]
    fn nobody_can_shorten_what_ranks_share() {
        let file = SharedFile::create().unwrap();
        file.extend_to(1 << 16).unwrap();
        assert_eq!(rustix::fs::ftruncate(&file.0, 0), Err(rustix::io::Errno::PERM));
        // A hole is no shortening, and the file grows.
        file.release(0, 1 << 16);
        file.extend_to(1 << 17).unwrap();
    }

    #[test]
    fn more_memory_than_there_is_is_an_error() {
        let (file, len) = (SharedFile::create().unwrap(), available().unwrap() * 2);
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
