//! What the PEs of a job share: a file with a page of words for each team, and a heap for each PE.

use crate::violation::violation;
use rustix::fs::{MemfdFlags, Mode, OFlags, ftruncate, memfd_create, open};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Most PEs of a job, and most teams at a time.
pub const PES: usize = 16;
pub const TEAMS: usize = 32;
/// The words of a PE in a team: how many barriers it has come to, and what it says in this one.
const WORDS: usize = 16;
const HEADER: usize = ((TEAMS + 1) * PES * WORDS * 8).next_multiple_of(ALIGNMENT);
/// Addresses of a heap.
pub const HEAP: usize = 1 << 36;
/// What heaps start at a multiple of.
const ALIGNMENT: usize = 2 << 20;

/// The team on which the library itself meets, as over its bootstrap.
pub const BOOTSTRAP: usize = TEAMS;

/// What a PE says to the others of a team.
pub type Words = [u64; WORDS - 2];

/// The mapped file.
pub struct World {
    start: *mut u8,
}

// SAFETY: shared memory, used through atomics and by copies that the callers order.
unsafe impl Send for World {}
// SAFETY: as above.
unsafe impl Sync for World {}

/// A new file for a job, to be found by its process and number.
pub fn create() -> OwnedFd {
    let made = memfd_create("emulated-nvshmem", MemfdFlags::CLOEXEC).map_err(std::io::Error::from);
    let grown = made.and_then(|file| {
        ftruncate(&file, (HEADER + PES * HEAP) as u64)?;
        Ok(file)
    });
    grown.unwrap_or_else(|error| violation("nvshmemx_get_uniqueid", format!("no memory to share: {error}")))
}

impl World {
    /// Maps the file of a process that made an id.
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
        // SAFETY: over a part of the mapping above, which nobody else knows of.
        let start = unsafe { mmap(start, len, access, shared | MapFlags::FIXED, &file, 0) }?;
        Ok(World { start: start.cast() })
    }

    /// Maps a PE's memory into its heap, as this process sees that.
    pub fn map(&self, pe: usize, offset: u64, len: usize, process: u64, number: u64) -> std::io::Result<()> {
        let file =
            open(format!("/proc/{process}/fd/{number}"), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: over a part of the heap that was given out for it.
        unsafe { mmap((self.heap(pe) + offset) as *mut _, len, access, flags, &file, 0) }?;
        Ok(())
    }

    /// The first address of a PE's heap in this process.
    pub fn heap(&self, pe: usize) -> u64 {
        self.start as u64 + (HEADER + pe * HEAP) as u64
    }

    fn words(&self, team: usize, pe: usize) -> &[AtomicU64; WORDS] {
        let place = self.start.wrapping_add((team * PES + pe) * WORDS * 8);
        // SAFETY: within the header, aligned, and never anything but atomics.
        unsafe { &*place.cast() }
    }

    /// Waits until all members of a team have come as often as this PE.
    pub fn barrier(&self, team: usize, own: usize, members: &[usize]) {
        let count = self.words(team, own)[0].fetch_add(1, Ordering::AcqRel) + 1;
        let waits = |pe: &usize| self.words(team, *pe)[0].load(Ordering::Acquire) < count;
        while members.iter().any(waits) {
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    /// A team starts anew; nobody uses it yet.
    pub fn reset(&self, team: usize, own: usize) {
        self.words(team, own)[0].store(0, Ordering::Release);
    }

    /// Tells the members of a team something and hears what they say. A barrier before and behind.
    pub fn exchange(&self, team: usize, own: usize, members: &[usize], say: Words) -> Vec<Words> {
        for (word, value) in self.words(team, own)[1..].iter().zip(say) {
            word.store(value, Ordering::Relaxed);
        }
        self.barrier(team, own, members);
        let hear = |pe: &usize| std::array::from_fn(|n| self.words(team, *pe)[n + 1].load(Ordering::Relaxed));
        let heard = members.iter().map(hear).collect();
        self.barrier(team, own, members);
        heard
    }
}

/// Where a job's file is, for the bytes of a unique id.
pub fn place(file: &OwnedFd) -> (u32, i32) {
    (std::process::id(), file.as_raw_fd())
}

/// Keeps the file of an id that this process made, for those who come later.
pub fn keep(file: OwnedFd) {
    std::mem::forget(File::from(file));
}
