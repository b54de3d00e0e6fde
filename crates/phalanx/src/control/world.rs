//! The ranks that can share memory, and the memory they share: segments, and the heap behind `Comm::alloc`.
//!
//! A *segment* is a piece of the region, known to all ranks by its id. Thread ranks find it in a table;
//! process ranks map it from the region's file, in which space is given out once and never again (the file
//! is sparse, and the pages of a segment that is no longer used go back to the system).

use super::liveness::STOPPED;
use super::relay::Relay;
use crate::contract::hosts::HostTopology;
use crate::os::sync::{AtomicU32, AtomicU64, Ordering, lock};
use crate::os::{Mapping, Process, SharedFile, page_size};
use crate::rendezvous::store::Store;
use crate::types::MAX_RANKS;
use crate::types::error::{Error, Result};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// A piece of shared memory: how all ranks call it, and where it is in this process.
#[derive(Clone)]
pub(crate) struct Segment {
    pub id: SegmentId,
    pub memory: Arc<Mapping>,
}

/// A segment's place in the region's file (a multiple of the page size) with the logarithm of its length in the
/// lowest bits; in a world of threads, a number from a counter. Never 0.
pub(crate) type SegmentId = u64;

/// Segments start and end at multiples of this.
const GRAIN: u64 = 1 << 16;

/// The longest segment: more than a host has, and little enough for many to fit a file's offsets.
const LARGEST: u64 = 1 << 44;

/// The ranks of one region.
pub(crate) struct World {
    pub(crate) kind: Kind,
    /// Cores that the ranks have between them.
    pub(crate) cores: usize,
    /// How long a peer may be stopped before it counts as gone; if not set, until the deadline.
    pub(crate) stopped_timeout: Duration,
}

pub(crate) enum Kind {
    Threads(ThreadWorld),
    Processes(ProcessWorld),
    /// Processes that share no memory.
    Hosts(Relay),
}

/// What a rank tells all ranks of the world, whichever communicator they share.
#[derive(Default)]
#[repr(C)]
pub(crate) struct RankStatus {
    /// One more than the world rank it has been waiting for, 0 when it is not waiting.
    pub waits_for: AtomicU32,
    /// Its process.
    pub pid: AtomicU32,
}

pub(crate) struct ThreadWorld {
    standings: Box<[RankStatus]>,
    segments: Mutex<HashMap<SegmentId, Weak<Mapping>>>,
    next: std::sync::atomic::AtomicU64,
}

pub(crate) struct ProcessWorld {
    file: SharedFile,
    /// The first segment of the file: where the next one goes, and the ranks' standings.
    header: Mapping,
    /// What the ranks of the job have in common.
    job: String,
    /// Every rank's process, by world rank.
    pub processes: Vec<Process>,
    /// Segments of peers that were mapped to read from them.
    peers: Mutex<HashMap<SegmentId, Arc<Mapping>>>,
    heap: Mutex<Vec<Arena>>,
    fork: crate::os::ForkMark,
}

impl World {
    pub fn threads() -> Result<World> {
        let standings = (0..MAX_RANKS).map(|_| RankStatus::default()).collect();
        let kind = Kind::Threads(ThreadWorld { standings, segments: Mutex::default(), next: 1.into() });
        let counted = || std::thread::available_parallelism().map_or(1, usize::from);
        let cores = crate::rendezvous::environment::cores_from_environment()?.unwrap_or_else(counted);
        Ok(World { kind, cores, stopped_timeout: STOPPED })
    }

    /// The world of the processes of a job that share `file`, and `cores`. The first process to call it does so
    /// before the file's descriptor leaves it.
    pub fn processes(job: &str, file: SharedFile, processes: Vec<Process>, cores: usize) -> Result<World> {
        file.extend_to(GRAIN)?;
        let header = file.map(0, GRAIN as usize)?;
        let (peers, heap, fork) =
            (Mutex::default(), Mutex::default(), crate::os::ForkMark::of_this_process());
        let job = job.to_owned();
        let world = ProcessWorld { job, file, header, processes, peers, heap, fork };
        // The first to come finds 0; the first page is the header's own.
        let _ = world.next().compare_exchange(0, GRAIN, Ordering::AcqRel, Ordering::Acquire);
        let stopped_timeout =
            crate::rendezvous::environment::stopped_timeout_from_environment()?.unwrap_or(STOPPED);
        Ok(World { kind: Kind::Processes(world), cores, stopped_timeout })
    }

    /// The world of the ranks that have met in a store, on several hosts; and the segment of its first channel.
    pub(crate) fn hosts(
        store: Store,
        rank: usize,
        topology: HostTopology,
        first: usize,
    ) -> Result<(World, Segment)> {
        let relay = Relay::new(store, rank, topology)?;
        let segment = relay.first_segment(first)?;
        // What they wait for takes its time: they need no core meanwhile.
        Ok((World { kind: Kind::Hosts(relay), cores: 0, stopped_timeout: STOPPED }, segment))
    }

    /// Where the ranks of the world are; `None` if all are on this host.
    pub fn topology(&self) -> Option<&HostTopology> {
        match &self.kind {
            Kind::Hosts(relay) => Some(relay.topology()),
            Kind::Threads(_) | Kind::Processes(_) => None,
        }
    }

    /// This world, now that its processes are known.
    pub fn with_processes(mut self, processes: Vec<Process>) -> World {
        if let Kind::Processes(world) = &mut self.kind {
            world.processes = processes;
        }
        self
    }

    /// Whether its ranks are threads of this process.
    #[cfg(feature = "cuda")]
    pub fn is_of_threads(&self) -> bool {
        matches!(self.kind, Kind::Threads(_))
    }

    /// What the ranks of the job have in common, if they are processes.
    pub fn job(&self) -> Option<&str> {
        match &self.kind {
            Kind::Processes(world) => Some(&world.job),
            Kind::Threads(_) | Kind::Hosts(_) => None,
        }
    }

    pub fn is_processes(&self) -> bool {
        matches!(self.kind, Kind::Processes(_))
    }

    /// What a rank of the world tells all others.
    pub(crate) fn standing(&self, world_rank: usize) -> &RankStatus {
        match &self.kind {
            Kind::Threads(world) => &world.standings[world_rank],
            Kind::Processes(world) => world.standing(world_rank),
            Kind::Hosts(relay) => relay.standing(world_rank),
        }
    }

    /// Makes a segment of at least `len` bytes, zeroed.
    pub(crate) fn create_segment(&self, len: usize) -> Result<Segment> {
        match &self.kind {
            Kind::Threads(world) => {
                let memory = Arc::new(Mapping::anonymous(len)?);
                let id = world.next.fetch_add(1, Ordering::Relaxed);
                lock(&world.segments).insert(id, Arc::downgrade(&memory));
                Ok(Segment { id, memory })
            }
            Kind::Processes(world) => world.create_segment(len),
            Kind::Hosts(relay) => relay.create_segment(len),
        }
    }

    /// Opens a segment that a peer has made; an error if none holds it any more and that can be told.
    pub(crate) fn open_segment(&self, id: SegmentId) -> Result<Segment> {
        match &self.kind {
            Kind::Threads(world) => {
                let memory = lock(&world.segments).get(&id).and_then(Weak::upgrade);
                let gone = || {
                    let why = "see the error of the rank that made it";
                    Error::system("opening a communicator's memory", std::io::ErrorKind::NotFound.into(), why)
                };
                Ok(Segment { id, memory: memory.ok_or_else(gone)? })
            }
            Kind::Processes(world) => {
                let (offset, len) = place(id);
                Ok(Segment { id, memory: Arc::new(world.file.map(offset, len as usize)?) })
            }
            Kind::Hosts(relay) => relay.open_segment(id),
        }
    }

    /// Forgets a segment. `last` says that no rank uses it any more.
    pub(crate) fn close_segment(&self, segment: &Segment, last: bool) {
        match &self.kind {
            Kind::Threads(world) => {
                if last {
                    lock(&world.segments).remove(&segment.id);
                }
            }
            Kind::Processes(world) => {
                if last {
                    let (offset, len) = place(segment.id);
                    world.file.release(offset, len);
                }
            }
            Kind::Hosts(relay) => relay.close_segment(segment.id),
        }
    }

    /// Where `len` bytes at `start` can be found by peers, if they can.
    pub(crate) fn locate(&self, start: *const u8, len: usize) -> Location {
        match &self.kind {
            Kind::Threads(_) => Location { segment: SAME_MEMORY, offset: start as u64 },
            Kind::Processes(world) => world.locate(start, len),
            Kind::Hosts(_) => Location::NOWHERE,
        }
    }

    /// Whether [`withdraw`](Self::withdraw) could take this memory, and nothing else, away from peers.
    pub(crate) fn can_withdraw(&self, start: *const u8, len: usize) -> bool {
        match &self.kind {
            // Thread ranks wait until no peer is inside instead.
            Kind::Threads(_) => true,
            Kind::Processes(world) => world.can_withdraw(start, len),
            Kind::Hosts(_) => false,
        }
    }

    /// Puts private memory in the place of a block whose peers may still write to it, although this rank has
    /// given up on them. Its contents are lost; what peers write later, nobody sees.
    #[cold]
    pub(crate) fn withdraw(&self, start: *const u8, len: usize) {
        if let Kind::Processes(world) = &self.kind {
            world.withdraw(start, len);
        }
    }

    /// The address, in this process, of what a peer has located. `mapped` is the segment of which it was the last time.
    #[inline]
    pub(crate) fn resolve(&self, location: Location, mapped: &mut Mapped) -> Result<*const u8> {
        match &self.kind {
            Kind::Threads(_) => return Ok(location.offset as *const u8),
            Kind::Processes(world) if mapped.id != location.segment => {
                *mapped = world.map(location.segment)?
            }
            Kind::Processes(_) => {}
            Kind::Hosts(_) => unreachable!("nothing was located"),
        }
        assert!(location.offset < mapped.len as u64, "a peer's location lies in its segment");
        Ok(mapped.start.wrapping_add(location.offset as usize))
    }

    /// Zeroed memory for `Comm::alloc`.
    pub(crate) fn alloc(self: &Arc<World>, len: usize) -> Result<HeapBlock> {
        let (start, offset, arena) = match &self.kind {
            Kind::Threads(_) | Kind::Hosts(_) => {
                let memory = Mapping::anonymous(len.max(1))?;
                return Ok(HeapBlock { start: memory.as_ptr(), place: Place::Own(memory) });
            }
            Kind::Processes(world) => world.alloc(len)?,
        };
        Ok(HeapBlock { start, place: Place::Heap { world: self.clone(), arena, offset, len } })
    }
}

/// Where a buffer lies, in words that mean the same to every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Location {
    /// The segment, [`SAME_MEMORY`], [`OTHER_PROCESS`], or [`PRIVATE`].
    pub segment: SegmentId,
    /// Offset in the segment, or address.
    pub offset: u64,
}

/// Peers cannot reach it.
pub(crate) const PRIVATE: SegmentId = 0;
/// All ranks share one address space.
pub(crate) const SAME_MEMORY: SegmentId = u64::MAX;
/// It is the private memory of a process; peers can have the kernel copy it.
pub(crate) const OTHER_PROCESS: SegmentId = u64::MAX - 1;

impl Location {
    pub const NOWHERE: Location = Location { segment: PRIVATE, offset: 0 };

    /// Memory of this process that the kernel copies for peers.
    pub fn to_fetch(start: *const u8) -> Location {
        Location { segment: OTHER_PROCESS, offset: start as u64 }
    }

    pub fn is_to_fetch(self) -> bool {
        self.segment == OTHER_PROCESS
    }

    /// Whether peers can read it where it lies.
    pub fn is_readable(self) -> bool {
        self.segment != PRIVATE && !self.is_to_fetch()
    }
}

/// A peer's segment that this process has mapped, or none. Who keeps the one that it used last need not look for it the next time, which
/// takes a lock. It is of use as long as there is the world that mapped it.
#[derive(Clone, Copy)]
pub(crate) struct Mapped {
    id: SegmentId,
    start: *const u8,
    len: usize,
}

impl Mapped {
    pub const NONE: Mapped = Mapped { id: PRIVATE, start: std::ptr::null(), len: 0 };
}

// SAFETY: an address and no more; who reads there says why that may be read.
unsafe impl Send for Mapped {}

/// The place and length of a segment of the file.
fn place(id: SegmentId) -> (u64, u64) {
    (id & !(GRAIN - 1), 1 << (id & (GRAIN - 1)))
}

impl ProcessWorld {
    fn next(&self) -> &AtomicU64 {
        // SAFETY: the header's first word is an atomic for every process; the mapping lives as long as self.
        unsafe { &*self.header.as_ptr().cast::<AtomicU64>() }
    }

    fn standing(&self, world_rank: usize) -> &RankStatus {
        assert!(world_rank < MAX_RANKS);
        // SAFETY: at STANDINGS is an array of MAX_RANKS standings, for every process, of which
        // zeroes are valid; the mapping lives as long as self.
        unsafe { &*self.header.as_ptr().add(STANDINGS).cast::<RankStatus>().add(world_rank) }
    }

    fn create_segment(&self, len: usize) -> Result<Segment> {
        if len as u64 > LARGEST {
            return Err(Error::system(
                "memfd",
                std::io::ErrorKind::OutOfMemory.into(),
                format!("{len} bytes of shared memory were asked for, {LARGEST} are the most at once"),
            ));
        }
        let len = (len as u64).max(GRAIN).next_power_of_two();
        // Before it takes a place, which is given out once.
        self.file.check_limit(self.next().load(Ordering::Relaxed) + len)?;
        let offset = self.next().fetch_add(len, Ordering::Relaxed);
        let mapped = self.file.extend_to(offset + len).and_then(|()| self.file.map(offset, len as usize));
        let memory = Arc::new(mapped.inspect_err(|_| self.file.release(offset, len))?);
        Ok(Segment { id: offset | u64::from(len.trailing_zeros()), memory })
    }

    fn locate(&self, start: *const u8, len: usize) -> Location {
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
    fn can_withdraw(&self, start: *const u8, len: usize) -> bool {
        lock(&self.heap).iter().any(|arena| {
            arena.offset_of(start as usize, len).is_some_and(|offset| {
                let end = offset + len;
                let in_block = arena.used.range(..=offset).next_back().map(|(o, l)| o + l);
                offset.is_multiple_of(page_size())
                    && (end.is_multiple_of(page_size()) || in_block == Some(end))
            })
        })
    }

    fn withdraw(&self, start: *const u8, len: usize) {
        for arena in lock(&self.heap).iter_mut() {
            if let Some(offset) = arena.offset_of(start as usize, len) {
                let len = len.next_multiple_of(page_size());
                arena.segment.memory.replace_with_private(offset, len);
                arena.withdrawn.push((offset, len));
            }
        }
    }

    /// Where a segment of a peer's is in this process, for as long as the world.
    fn map(&self, segment: SegmentId) -> Result<Mapped> {
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

    fn alloc(&self, requested: usize) -> Result<(*mut u8, usize, SegmentId)> {
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

/// Bytes of the first arena; each further one is twice as long, up to 64 times this.
const FIRST_ARENA: usize = 1 << 20;

/// Where the standings are in the header; before them is the counter of places.
const STANDINGS: usize = 4096;

const _: () = assert!(STANDINGS + MAX_RANKS * size_of::<RankStatus>() <= GRAIN as usize);

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
struct Arena {
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
    place: Place,
}

// SAFETY: the block is plain memory that this value owns.
unsafe impl Send for HeapBlock {}
// SAFETY: as above; a shared reference gives no access to it.
unsafe impl Sync for HeapBlock {}

enum Place {
    /// Thread ranks: memory of its own.
    Own(#[expect(dead_code, reason = "held for its drop")] Mapping),
    /// Process ranks: a block of the heap.
    Heap { world: Arc<World>, arena: SegmentId, offset: usize, len: usize },
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Place::Heap { world, arena, offset, len } = self
            && let Kind::Processes(world) = &world.kind
        {
            world.free(*arena, *offset, *len);
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

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
        let seen = world.resolve(location, &mut mapped).unwrap();
        assert_ne!(seen, inside.cast_const(), "a peer has its own mapping");
        // SAFETY: mapped, and written above.
        assert_eq!(unsafe { seen.read() }, 42);
        let next = Location { offset: location.offset + 1, ..location };
        assert_eq!(world.resolve(next, &mut mapped).unwrap(), seen.wrapping_add(1));
        let large = world.alloc(8 << 20).unwrap();
        // SAFETY: the block is longer.
        unsafe { large.start.write(43) };
        let elsewhere = world.locate(large.start, 1);
        assert_ne!(elsewhere.segment, location.segment, "an arena of its own");
        // SAFETY: mapped, and written above.
        assert_eq!(unsafe { world.resolve(elsewhere, &mut mapped).unwrap().read() }, 43);
        let private = [0u8; 16];
        assert_eq!(world.locate(private.as_ptr(), 16), Location::NOWHERE);
    }
}
