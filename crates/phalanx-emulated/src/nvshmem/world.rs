//! The file that the PEs of a job share: words of each PE in each team, and a heap of each PE.

use crate::base::violation::violation;
use rustix::fs::{MemfdFlags, Mode, OFlags, ftruncate, memfd_create, open};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The largest number of PEs in a job.
pub const PES: usize = 16;
/// The largest number of teams at a time.
pub const TEAMS: usize = 32;
/// The words of a PE in a team: the number of barriers that it has reached, and the words of an exchange.
const WORDS: usize = 16;
/// Bytes before the heaps.
const HEADER: usize = ((TEAMS + 1) * PES * WORDS * 8).next_multiple_of(ALIGNMENT);
/// Bytes of addresses of a heap.
pub const HEAP: usize = 1 << 36;
/// The alignment of heaps, in bytes.
const ALIGNMENT: usize = 2 << 20;

/// The pseudo-team of all PEs for the library's own barriers and exchanges, in the place of its bootstrap.
pub const BOOTSTRAP: usize = TEAMS;

/// The words that a PE passes to the others in an exchange.
pub type Words = [u64; WORDS - 2];

/// The mapped file of a job.
pub struct World {
    start: *mut u8,
}

// SAFETY: shared memory, accessed by atomics, and by copies that the program orders.
unsafe impl Send for World {}
// SAFETY: as above.
unsafe impl Sync for World {}

/// Makes the file of a job.
pub fn create() -> OwnedFd {
    let made = memfd_create("emulated-nvshmem", MemfdFlags::CLOEXEC).map_err(std::io::Error::from);
    let grown = made.and_then(|file| {
        ftruncate(&file, (HEADER + PES * HEAP) as u64)?;
        Ok(file)
    });
    grown.unwrap_or_else(|error| {
        violation("nvshmemx_get_uniqueid", format!("cannot allocate shared memory: {error}"))
    })
}

impl World {
    /// Maps the file that another process made, by the process and its file descriptor.
    pub fn open(process: u32, number: i32) -> std::io::Result<World> {
        let file =
            open(format!("/proc/{process}/fd/{number}"), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let (len, none) = (HEADER + PES * HEAP, ProtFlags::empty());
        let (reserved, shared) =
            (MapFlags::PRIVATE | MapFlags::NORESERVE, MapFlags::SHARED | MapFlags::NORESERVE);
        // SAFETY: a new mapping, at an address that the system chooses.
        let room = unsafe { mmap_anonymous(std::ptr::null_mut(), len + ALIGNMENT, none, reserved) }?;
        let start = (room as usize).next_multiple_of(ALIGNMENT) as *mut _;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: over a part of the mapping above, which is used nowhere else.
        let start = unsafe { mmap(start, len, access, shared | MapFlags::FIXED, &file, 0) }?;
        Ok(World { start: start.cast() })
    }

    /// Maps a PE's memory into this process's view of the PE's heap.
    pub fn map(&self, pe: usize, offset: u64, len: usize, process: u64, number: u64) -> std::io::Result<()> {
        let file =
            open(format!("/proc/{process}/fd/{number}"), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: over a part of the heap that was reserved for it.
        unsafe { mmap((self.heap(pe) + offset) as *mut _, len, access, flags, &file, 0) }?;
        Ok(())
    }

    /// The first address of a PE's heap in this process.
    pub fn heap(&self, pe: usize) -> u64 {
        self.start as u64 + (HEADER + pe * HEAP) as u64
    }

    fn words(&self, team: usize, pe: usize) -> &[AtomicU64; WORDS] {
        let place = self.start.wrapping_add((team * PES + pe) * WORDS * 8);
        // SAFETY: within the header, aligned, and accessed by atomics only.
        unsafe { &*place.cast() }
    }

    /// Waits until all members of a team have reached as many barriers as this PE.
    pub fn barrier(&self, team: usize, own: usize, members: &[usize]) {
        let count = self.words(team, own)[0].fetch_add(1, Ordering::AcqRel) + 1;
        let waits = |pe: &usize| self.words(team, *pe)[0].load(Ordering::Acquire) < count;
        while members.iter().any(waits) {
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    /// Resets the words of a new team, before its first use.
    pub fn reset(&self, team: usize, own: usize) {
        self.words(team, own)[0].store(0, Ordering::Release);
    }

    /// Passes words to the members of a team and returns theirs. A barrier before and after the reads.
    pub fn exchange(&self, team: usize, own: usize, members: &[usize], mine: Words) -> Vec<Words> {
        for (word, value) in self.words(team, own)[1..].iter().zip(mine) {
            word.store(value, Ordering::Relaxed);
        }
        self.barrier(team, own, members);
        let read = |pe: &usize| std::array::from_fn(|n| self.words(team, *pe)[n + 1].load(Ordering::Relaxed));
        let all = members.iter().map(read).collect();
        self.barrier(team, own, members);
        all
    }
}

/// The process and the file descriptor of a job's file.
pub fn place(file: &OwnedFd) -> (u32, i32) {
    (std::process::id(), file.as_raw_fd())
}

/// Keeps the file open for other PEs.
pub fn keep(file: OwnedFd) {
    std::mem::forget(File::from(file));
}
