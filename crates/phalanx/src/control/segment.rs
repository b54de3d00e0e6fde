//! Segments: pieces of the region, each known to all ranks by its id; and locations of buffers in them.
//!
//! Thread ranks find a segment in a table. Process ranks map it from the region's file. The file is sparse: its offsets are
//! given out once and never again, and the pages of a closed segment go back to the system.

use super::world::ProcessWorld;
use crate::os::Mapping;
use crate::os::sync::{Ordering, lock};
use crate::types::error::{Error, Result};
use std::sync::Arc;

/// A piece of shared memory: its id, the same for all ranks, and its mapping in this process.
#[derive(Clone)]
pub(crate) struct Segment {
    pub id: SegmentId,
    pub memory: Arc<Mapping>,
}

/// A segment's place in the region's file (a multiple of the page size) with the logarithm of its length in the
/// lowest bits; in a world of threads, a number from a counter. Never 0.
pub(crate) type SegmentId = u64;

/// Segments start and end at multiples of this.
pub(super) const GRAIN: u64 = 1 << 16;

/// The longest segment in bytes (16 TiB): more than a host has, and many fit a file's offsets.
const LARGEST: u64 = 1 << 44;

/// Where a buffer lies, in numbers that mean the same to every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Location {
    /// The segment, [`SAME_MEMORY`], [`OTHER_PROCESS`], or [`PRIVATE`].
    pub segment: SegmentId,
    /// Offset in the segment, or address.
    pub offset: u64,
}

/// Peers cannot reach the buffer.
pub(crate) const PRIVATE: SegmentId = 0;
/// All ranks share one address space.
pub(crate) const SAME_MEMORY: SegmentId = u64::MAX;
/// The buffer is private memory of a process, which the kernel can copy to peers.
pub(crate) const OTHER_PROCESS: SegmentId = u64::MAX - 1;

impl Location {
    pub const NOWHERE: Location = Location { segment: PRIVATE, offset: 0 };

    /// Private memory of this process, which the kernel copies to peers.
    pub fn kernel_copied(start: *const u8) -> Location {
        Location { segment: OTHER_PROCESS, offset: start as u64 }
    }

    pub fn is_kernel_copied(self) -> bool {
        self.segment == OTHER_PROCESS
    }

    /// Whether peers can read it where it lies.
    pub fn is_readable(self) -> bool {
        self.segment != PRIVATE && !self.is_kernel_copied()
    }
}

/// A peer's segment that this process has mapped, or none. Keeping the one used last saves a lookup, which
/// takes a lock. Valid as long as the world that mapped it.
#[derive(Clone, Copy)]
pub(crate) struct Mapped {
    pub(super) id: SegmentId,
    pub(super) start: *const u8,
    pub(super) len: usize,
}

impl Mapped {
    pub const NONE: Mapped = Mapped { id: PRIVATE, start: std::ptr::null(), len: 0 };
}

// SAFETY: only an address; each read of it has a reason of its own.
unsafe impl Send for Mapped {}

/// The place and length of a segment of the file.
pub(super) fn place(id: SegmentId) -> (u64, u64) {
    (id & !(GRAIN - 1), 1 << (id & (GRAIN - 1)))
}

/// Bytes of the file that a segment of so many takes.
fn file_len(len: usize) -> u64 {
    (len as u64).max(GRAIN).next_power_of_two()
}

impl ProcessWorld {
    pub(super) fn create_segment(&self, len: usize) -> Result<Segment> {
        if len as u64 > LARGEST {
            return Err(Error::system(
                "memfd",
                std::io::ErrorKind::OutOfMemory.into(),
                format!("{len} bytes of shared memory were asked for, {LARGEST} are the most at once"),
            ));
        }
        let len = file_len(len);
        // Checked before an offset is taken: offsets are used once.
        self.file.check_limit(self.next().load(Ordering::Relaxed) + len)?;
        let offset = self.next().fetch_add(len, Ordering::Relaxed);
        let mapped = self.file.extend_to(offset + len).and_then(|()| self.file.map(offset, len as usize));
        let memory = Arc::new(mapped.inspect_err(|_| self.file.release(offset, len))?);
        Ok(Segment { id: offset | u64::from(len.trailing_zeros()), memory })
    }

    /// [`World::find_segment`](super::world::World::find_segment).
    pub(super) fn find_segment(&self, id: SegmentId, len: usize) -> Option<Segment> {
        // The lowest bits are a logarithm: a place that `create_segment` gives out, and not the world's own.
        if id & (GRAIN - 1) != u64::from(file_len(len).trailing_zeros()) || id < GRAIN {
            return None;
        }
        let (offset, len) = place(id);
        // What is behind the end of the file must not be touched.
        self.file.len().ok().filter(|end| offset.checked_add(len).is_some_and(|last| last <= *end))?;
        let memory = Arc::new(self.file.map(offset, len as usize).ok()?);
        Some(Segment { id, memory })
    }

    /// Maps a peer's segment, for as long as the world lives.
    pub(super) fn map(&self, segment: SegmentId) -> Result<Mapped> {
        let mut peers = lock(&self.peers);
        let memory = match peers.get(&segment) {
            Some(memory) => memory,
            None => {
                let (offset, len) = place(segment);
                let memory = Arc::new(self.file.map(offset, len as usize)?);
                peers.entry(segment).or_insert(memory)
            }
        };
        Ok(Mapped { id: segment, start: memory.as_ptr(), len: memory.len() })
    }
}
