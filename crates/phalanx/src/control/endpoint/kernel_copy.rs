//! Kernel copy: reading a peer's private memory with `process_vm_readv` ("cross-memory attach"). The kernel copies once, from process to
//! process.
//!
//! Not every system allows that (Yama's `ptrace_scope`, seccomp, containers with PID namespaces of their own). Each rank therefore probes it:
//! it reads a mark from the memory of every peer, and publishes whether it could. Kernel copy is used after all ranks could.

use super::Endpoint;
use crate::control::tunables::KERNEL_COPY_STEP;
use crate::os;
use crate::os::sync::Ordering;
use crate::types::error::{Error, Result};
use std::sync::OnceLock;

/// A number that no other process has; 0 if there is none.
fn own_mark() -> &'static u64 {
    static MARK: OnceLock<u64> = OnceLock::new();
    MARK.get_or_init(|| getrandom::u64().unwrap_or(0))
}

impl Endpoint {
    /// Publishes this process's mark. Must come before the rank's state becomes active, since peers read the mark from then on.
    pub(super) fn publish_mark(&self) {
        if self.world.is_processes() {
            let words = &self.own().life.kernel_copy;
            words.mark.store(*own_mark(), Ordering::Relaxed);
            words.mark_at.store(std::ptr::from_ref(own_mark()) as u64, Ordering::Relaxed);
        }
    }

    /// Tries to read the marks of all peers, and publishes whether it could read all. Only the first call does.
    pub fn probe_kernel_copy(&self) {
        self.probed_kernel_copy.get_or_init(|| {
            let reads_all = self.world.is_processes() && self.peers().all(|peer| self.reads_mark(peer));
            crate::os::log::debug!(
                rank = self.rank,
                reads_all,
                "probed process_vm_readv from the other processes"
            );
            self.own().life.kernel_copy.reads_all.store(reads_all.into(), Ordering::Release);
        });
    }

    #[cfg(all(test, target_os = "linux"))]
    pub fn has_probed_kernel_copy(&self) -> bool {
        self.probed_kernel_copy.get().is_some()
    }

    fn reads_mark(&self, peer: usize) -> bool {
        let words = &self.channel.state(peer).life.kernel_copy;
        let (mark, at) = (words.mark.load(Ordering::Relaxed), words.mark_at.load(Ordering::Relaxed));
        let mut seen = [0; 8];
        // SAFETY: `seen` has room for a word.
        let read = unsafe { os::read_process(self.pid(peer), at, seen.as_mut_ptr(), seen.len()) };
        mark != 0 && read.is_ok() && u64::from_ne_bytes(seen) == mark
    }

    /// Whether every rank has published that it can read the private memory of every other.
    pub fn can_all_kernel_copy(&self) -> bool {
        (0..self.ranks)
            .all(|rank| self.channel.state(rank).life.kernel_copy.reads_all.load(Ordering::Acquire) == 1)
    }

    /// Whether peers can read this memory of this process; `len` is not 0. The kernel does not copy the memory of devices, such as a driver's
    /// pinned buffers.
    pub fn is_kernel_copyable(&self, start: *const u8, len: usize) -> bool {
        let own = std::process::id();
        let is_read = |at: usize| {
            let mut byte = 0;
            // SAFETY: there is room for a byte.
            unsafe { os::read_process(own, start as u64 + at as u64, &mut byte, 1) }.is_ok()
        };
        // Memory with a readable first and last byte is taken for one allocation.
        self.can_all_kernel_copy() && is_read(0) && is_read(len - 1)
    }

    /// Copies bytes from an address in a peer's process to `target`.
    ///
    /// # Safety
    /// `len` bytes are writable at `target`.
    pub unsafe fn kernel_copy(&self, peer: usize, source: u64, target: *mut u8, len: usize) -> Result<()> {
        for start in (0..len).step_by(KERNEL_COPY_STEP) {
            let step = (len - start).min(KERNEL_COPY_STEP);
            let mut read = Ok(());
            self.inside(0, || {
                // SAFETY: the caller's contract, for a part of it.
                read = unsafe {
                    os::read_process(self.pid(peer), source + start as u64, target.add(start), step)
                };
            })?;
            match read {
                Ok(()) => {}
                // The process is ending: the wait reports the rank.
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => return self.wait(peer, || false),
                Err(e) => {
                    return Err(Error::system(
                        "process_vm_readv",
                        e,
                        format!(
                            "{step} bytes of rank {peer}'s buffer cannot be read from this process, although its first could: \
                             memory in parts that are a device's or a shorter file's has to be copied first, and a process that \
                             hides from others (`PR_SET_DUMPABLE`) must do so before its first all_to_all"
                        ),
                    ));
                }
            }
        }
        Ok(())
    }
}
