//! The heap behind `Comm::alloc`: arenas of shared memory from which a rank gives out blocks that its peers can map.

use super::segment::{Location, Segment, SegmentId, place};
use super::world::{Kind, ProcessWorld, World};
use crate::os::sync::lock;
use crate::os::{Mapping, page_size};
use crate::types::error::Result;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Bytes of the first arena; each further one is twice as long, up to 64 times this.
const FIRST_ARENA: usize = 1 << 20;

impl ProcessWorld {
    pub(super) fn locate(&self, start: *const u8, len: usize) -> Location {
        if len == 0 {
            // It may begin where its segment ends.
            return Location::NOWHERE;
        }
        let start = start as usize;
        for arena in lock(&self.heap).iter() {
            if let Some(offset) = arena.offset_of(start, len) {
                if arena.withdrawn.iter().any(|(o, l)| offset < o + l && *o < offset + len) {
                    break;
                }
                return Location { segment: arena.segment.id, offset: offset as u64 };
            }
        }
        Location::NOWHERE
    }

    /// The range must be whole pages of one block: pages can be replaced, and their other blocks stay.
    pub(super) fn can_withdraw(&self, start: *const u8, len: usize) -> bool {
        lock(&self.heap).iter().any(|arena| {
            let offset = arena.offset_of(start as usize, len);
            offset.is_some_and(|offset| is_withdrawable(&arena.used, offset, len, page_size()))
        })
    }

    pub(super) fn withdraw(&self, start: *const u8, len: usize) {
        for arena in lock(&self.heap).iter_mut() {
            if let Some(offset) = arena.offset_of(start as usize, len) {
                let len = len.next_multiple_of(page_size());
                arena.segment.memory.replace_with_private(offset, len);
                arena.withdrawn.push((offset, len));
            }
        }
    }

    pub(super) fn alloc(&self, requested: usize) -> Result<(*mut u8, usize, SegmentId)> {
        let len = block_len(requested);
        let mut heap = lock(&self.heap);
        for arena in heap.iter_mut() {
            if arena.has_room(len) && self.commit(arena).is_ok() {
                let offset = arena.take(len).expect("it has room");
                arena.used.insert(offset, requested);
                let start = arena.start(offset);
                // SAFETY: `take` gave these bytes of the arena to this call alone.
                unsafe { std::ptr::write_bytes(start, 0, len) };
                return Ok((start, offset, arena.segment.id));
            }
        }
        // Arenas double, so that peers map a handful of them and not one per buffer.
        let arena_len = len.max(FIRST_ARENA << heap.len().min(6));
        // With little memory left, one for this block alone.
        let mut arena = match self.new_arena(arena_len) {
            Err(_) if arena_len > len => self.new_arena(len)?,
            arena => arena?,
        };
        let offset = arena.take(len).expect("a new arena holds what it was made for");
        arena.used.insert(offset, requested);
        let given = (arena.start(offset), offset, arena.segment.id);
        heap.push(arena);
        Ok(given)
    }

    fn new_arena(&self, len: usize) -> Result<Arena> {
        let mut arena = Arena {
            segment: self.create_segment(len)?,
            len,
            committed: false,
            free: BTreeMap::from([(0, len)]),
            used: BTreeMap::new(),
            withdrawn: Vec::new(),
        };
        self.commit(&mut arena)?;
        Ok(arena)
    }

    fn free(&self, arena_id: SegmentId, offset: usize, len: usize) {
        if self.fork.is_copy() {
            // The process before fork still uses it.
            return;
        }
        let mut heap = lock(&self.heap);
        let index =
            heap.iter().position(|arena| arena.segment.id == arena_id).expect("an arena outlives its blocks");
        let arena = &mut heap[index];
        arena.used.remove(&offset);
        if arena.withdrawn.iter().any(|(o, l)| offset < o + l && *o < offset + block_len(len)) {
            // Private now: not to be given out as shared.
            return;
        }
        arena.give(offset, block_len(len));
        if arena.is_empty() {
            // The pages go back; the place stays, so that peers need not map another one next time.
            self.file.release(place(arena.segment.id).0, arena.len as u64);
            arena.committed = false;
        }
    }

    /// Allocates the arena's pages, so that a lack of memory is an error here and not a signal later.
    fn commit(&self, arena: &mut Arena) -> Result<()> {
        if !arena.committed {
            let (offset, len) = (place(arena.segment.id).0, arena.len as u64);
            // Nothing uses the arena: what was allocated of it goes back.
            self.file.commit(offset, len).inspect_err(|_| self.file.release(offset, len))?;
            arena.committed = true;
        }
        Ok(())
    }
}

/// Whether a range is all that lies in its pages. `used` are the blocks of its arena: offset and length.
fn is_withdrawable(used: &BTreeMap<usize, usize>, offset: usize, len: usize, page: usize) -> bool {
    let end = offset + len;
    let next_page = end.next_multiple_of(page);
    let ends_block = used.range(..=offset).next_back().is_some_and(|(start, len)| start + len == end);
    let is_alone = end == next_page || ends_block && used.range(end..next_page).next().is_none();
    offset.is_multiple_of(page) && is_alone
}

/// Smaller blocks keep to cache lines (two, since the hardware fetches pairs).
fn block_len(len: usize) -> usize {
    len.max(1).next_multiple_of(block_align(len))
}

/// Blocks from four pages on are whole pages: they are what memory can be replaced by.
fn block_align(len: usize) -> usize {
    let page = page_size();
    if len >= 4 * page { page } else { 128 }
}

/// A segment from which this rank gives out blocks. First fit; neighbours are joined when freed.
pub(super) struct Arena {
    segment: Segment,
    /// How much of the segment it has, whose length is a power of two: what is behind is never used.
    len: usize,
    /// Whether its pages are allocated.
    committed: bool,
    /// Free ranges: offset and length.
    free: BTreeMap<usize, usize>,
    /// Blocks given out: offset and the length that was asked for.
    used: BTreeMap<usize, usize>,
    /// Ranges that peers no longer see: offset and length.
    withdrawn: Vec<(usize, usize)>,
}

impl Arena {
    fn start(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.segment.memory.len());
        // SAFETY: in bounds of the arena's mapping.
        unsafe { self.segment.memory.as_ptr().add(offset) }
    }

    /// Where a range of memory lies in the arena, if it does.
    fn offset_of(&self, start: usize, len: usize) -> Option<usize> {
        let base = self.segment.memory.as_ptr() as usize;
        let inside = start >= base && start + len <= base + self.segment.memory.len();
        inside.then(|| start - base)
    }

    /// The first free range with room for an aligned block: its offset and length, and the block's offset.
    fn find(&self, len: usize) -> Option<(usize, usize, usize)> {
        self.free.iter().find_map(|(&offset, &free)| {
            let start = offset.next_multiple_of(block_align(len));
            (start + len <= offset + free).then_some((offset, free, start))
        })
    }

    fn has_room(&self, len: usize) -> bool {
        self.find(len).is_some()
    }

    fn take(&mut self, len: usize) -> Option<usize> {
        let (offset, free, start) = self.find(len)?;
        self.free.remove(&offset);
        if start > offset {
            self.free.insert(offset, start - offset);
        }
        if offset + free > start + len {
            self.free.insert(start + len, offset + free - start - len);
        }
        Some(start)
    }

    fn give(&mut self, mut offset: usize, mut len: usize) {
        if let Some(next) = self.free.remove(&(offset + len)) {
            len += next;
        }
        if let Some((before, before_len)) = self.free.range(..offset).next_back().map(|(o, l)| (*o, *l))
            && before + before_len == offset
        {
            self.free.remove(&before);
            offset = before;
            len += before_len;
        }
        self.free.insert(offset, len);
    }

    fn is_empty(&self) -> bool {
        self.free.get(&0) == Some(&self.len)
    }
}

/// Memory from [`World::alloc`], given back on drop.
pub(crate) struct HeapBlock {
    pub start: *mut u8,
    #[expect(dead_code, reason = "held for its drop")]
    pub(super) place: HeapPlace,
}

// SAFETY: the block is plain memory that this value owns.
unsafe impl Send for HeapBlock {}
// SAFETY: as above; a shared reference gives no access to it.
unsafe impl Sync for HeapBlock {}

pub(super) enum HeapPlace {
    /// Thread ranks: memory of its own.
    Own(#[expect(dead_code, reason = "held for its drop")] Mapping),
    /// Process ranks: a block of the heap.
    Heap { world: Arc<World>, arena: SegmentId, offset: usize, len: usize },
}

impl Drop for HeapPlace {
    fn drop(&mut self) {
        if let HeapPlace::Heap { world, arena, offset, len } = self
            && let Kind::Processes(world) = &world.kind
        {
            world.free(*arena, *offset, *len);
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::control::segment::Mapped;
    use crate::os::SharedFile;

    fn world() -> Arc<World> {
        Arc::new(World::processes("job", SharedFile::create().unwrap(), Vec::new(), 1).unwrap())
    }

    #[test]
    fn blocks_are_zeroed_distinct_and_reused() {
        let world = world();
        let a = world.alloc(1000).unwrap();
        let b = world.alloc(1000).unwrap();
        assert!(a.start.addr().abs_diff(b.start.addr()) >= 1000);
        // SAFETY: the block has 1000 bytes.
        unsafe { a.start.write_bytes(7, 1000) };
        let first = a.start;
        drop(a);
        let c = world.alloc(900).unwrap();
        assert_eq!(c.start, first, "the freed block is given out again");
        // SAFETY: the block has 900 bytes.
        let bytes = unsafe { std::slice::from_raw_parts(c.start, 900) };
        assert!(bytes.iter().all(|byte| *byte == 0), "and is zero again");
    }

    #[test]
    fn freed_arenas_are_used_again() {
        let world = world();
        let blocks: Vec<_> = (0..100).map(|i| world.alloc(i * 100_000).unwrap()).collect();
        let Kind::Processes(processes) = &world.kind else { unreachable!() };
        let arenas = lock(&processes.heap).len();
        assert!(arenas > 1);
        drop(blocks);
        assert!(lock(&processes.heap).iter().all(|arena| arena.is_empty() && !arena.committed));
        let _again: Vec<_> = (0..100).map(|i| world.alloc(i * 100_000).unwrap()).collect();
        assert_eq!(lock(&processes.heap).len(), arenas);
    }

    #[test]
    fn pages_are_taken_from_peers_only_if_no_other_block_lies_in_them() {
        // Three blocks one behind the other, as in an arena whose pages are 64 KiB.
        let page = 64 << 10;
        let used = BTreeMap::from([(0, 100 << 10), (100 << 10, 8 << 10), (128 << 10, 70 << 10)]);
        assert!(!is_withdrawable(&used, 0, 100 << 10, page), "the second block begins in its last page");
        assert!(is_withdrawable(&used, 0, 64 << 10, page));
        assert!(!is_withdrawable(&used, 100 << 10, 8 << 10, page));
        assert!(is_withdrawable(&used, 128 << 10, 70 << 10, page));
        assert!(!is_withdrawable(&used, 128 << 10, 69 << 10, page), "the block goes on");
    }

    #[test]
    fn a_large_block_takes_the_memory_that_it_needs() {
        let world = world();
        let Kind::Processes(processes) = &world.kind else { unreachable!() };
        let taken = || processes.file.allocated();
        let (before, len) = (taken(), 65 << 20);
        let block = world.alloc(len).unwrap();
        assert!((len as u64..(66 << 20)).contains(&(taken() - before)), "{} bytes", taken() - before);
        drop(block);
        // The file's last page is there by its length.
        assert!(taken() - before <= page_size() as u64, "{} bytes", taken() - before);
    }

    #[test]
    fn locations_are_found_by_peers() {
        let world = world();
        let block = world.alloc(1 << 20).unwrap();
        // SAFETY: the block is longer.
        let inside = unsafe { block.start.add(4096) };
        // SAFETY: in bounds.
        unsafe { inside.write(42) };
        let location = world.locate(inside, 100);
        assert!(location.is_readable());
        let mut mapped = Mapped::NONE;
        let seen = world.resolve(location, 100, &mut mapped).unwrap();
        assert_ne!(seen, inside.cast_const(), "a peer has its own mapping");
        // SAFETY: mapped, and written above.
        assert_eq!(unsafe { seen.read() }, 42);
        let next = Location { offset: location.offset + 1, ..location };
        assert_eq!(world.resolve(next, 99, &mut mapped).unwrap(), seen.wrapping_add(1));
        let large = world.alloc(8 << 20).unwrap();
        // SAFETY: the block is longer.
        unsafe { large.start.write(43) };
        let elsewhere = world.locate(large.start, 1);
        assert_ne!(elsewhere.segment, location.segment, "an arena of its own");
        // SAFETY: mapped, and written above.
        assert_eq!(unsafe { world.resolve(elsewhere, 1, &mut mapped).unwrap().read() }, 43);
        let private = [0u8; 16];
        assert_eq!(world.locate(private.as_ptr(), 16), Location::NOWHERE);
    }
}
