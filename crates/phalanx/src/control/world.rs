//! The ranks of one region, and how they reach each other: as threads, as processes of a host, or over the store.

use super::diagnosis::WAIT_WORDS;
use super::heap::{Arena, HeapBlock, HeapPlace};
use super::layout::Layout;
use super::liveness::STOPPED;
use super::relay::Relay;
use super::segment::{GRAIN, SAME_MEMORY, Segment, SegmentId, place};
pub(crate) use super::segment::{Location, Mapped};
use crate::contract::hosts::HostTopology;
use crate::os::sync::{AtomicU32, AtomicU64, Ordering, lock};
use crate::os::{Mapping, Process, SharedFile};
use crate::rendezvous::store::Store;
use crate::types::MAX_HOST_RANKS;
use crate::types::error::{Error, Result, UnsupportedError};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// All ranks that share one region, and the memory they share.
pub(crate) struct World {
    pub(crate) kind: Kind,
    /// Cores that the ranks have together.
    pub(crate) cores: usize,
    /// How long a peer may be stopped before it counts as gone.
    pub(crate) stopped_timeout: Duration,
}

pub(crate) enum Kind {
    Threads(ThreadWorld),
    Processes(ProcessWorld),
    /// Processes that share no memory.
    Hosts(Relay),
}

/// State that a rank publishes to all ranks of the world, across communicators.
#[derive(Default)]
#[repr(C)]
pub(crate) struct RankStatus {
    /// One more than the world rank that this rank waits for, or 0 if it does not wait.
    pub waits_for: AtomicU32,
    /// Where it waits, if it does: see `diagnosis.rs`.
    pub wait: [AtomicU64; WAIT_WORDS],
}

pub(crate) struct ThreadWorld {
    statuses: Box<[RankStatus]>,
    segments: Mutex<HashMap<SegmentId, Weak<Mapping>>>,
    next: std::sync::atomic::AtomicU64,
}

pub(crate) struct ProcessWorld {
    pub(super) file: SharedFile,
    /// The first segment of the file: the offset of the next one, and the ranks' statuses.
    header: Mapping,
    /// The job's id.
    job: String,
    /// Every rank's process, by world rank.
    pub processes: Vec<Process>,
    /// Segments of peers that were mapped to read from them.
    pub(super) peers: Mutex<HashMap<SegmentId, Arc<Mapping>>>,
    pub(super) heap: Mutex<Vec<Arena>>,
    pub(super) fork: crate::os::ForkMark,
}

impl World {
    pub fn threads() -> Result<World> {
        let statuses = (0..MAX_HOST_RANKS).map(|_| RankStatus::default()).collect();
        let kind = Kind::Threads(ThreadWorld { statuses, segments: Mutex::default(), next: 1.into() });
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

    /// The world of ranks on several hosts, which have joined a store; and the segment of its first channel.
    pub(crate) fn hosts(store: Store, rank: usize, topology: HostTopology) -> Result<(World, Segment)> {
        let first = Layout::without_data(topology.world_size()).total();
        let relay = Relay::new(store, rank, topology)?;
        let segment = relay.first_segment(first)?;
        // Waits over the network are long: ranks yield their cores at once.
        Ok((World { kind: Kind::Hosts(relay), cores: 0, stopped_timeout: STOPPED }, segment))
    }

    /// The layout of a channel of so many of its ranks.
    pub fn layout(&self, ranks: usize) -> Layout {
        match &self.kind {
            Kind::Hosts(_) => Layout::without_data(ranks),
            Kind::Threads(_) | Kind::Processes(_) => Layout::new(ranks),
        }
    }

    /// The ranks as those of several hosts, or an error: they grow over the job's store.
    pub fn on_hosts(&self) -> Result<&Relay> {
        match &self.kind {
            Kind::Hosts(relay) => Ok(relay),
            Kind::Threads(_) | Kind::Processes(_) => Err(Error::from(UnsupportedError {
                what: "grow".into(),
                why: "the job began as one process, which others cannot find".into(),
                remedy: "start two ranks or more as processes, with `phalanx launch`".into(),
            })),
        }
    }

    /// Where the ranks of the world are; `None` if all are on this host.
    pub fn topology(&self) -> Option<&HostTopology> {
        match &self.kind {
            Kind::Hosts(relay) => Some(relay.topology()),
            Kind::Threads(_) | Kind::Processes(_) => None,
        }
    }

    /// The store that ranks of several hosts have joined.
    #[cfg(feature = "nccl")]
    pub fn store(&self) -> Option<&Store> {
        match &self.kind {
            Kind::Hosts(relay) => Some(relay.store()),
            Kind::Threads(_) | Kind::Processes(_) => None,
        }
    }

    /// This world with the handles of its processes.
    pub fn with_processes(mut self, processes: Vec<Process>) -> World {
        if let Kind::Processes(world) = &mut self.kind {
            world.processes = processes;
        }
        self
    }

    /// Whether its ranks are threads of this process.
    pub fn is_of_threads(&self) -> bool {
        matches!(self.kind, Kind::Threads(_))
    }

    /// The job's id, if the ranks are processes.
    pub fn job(&self) -> Option<&str> {
        match &self.kind {
            Kind::Processes(world) => Some(&world.job),
            Kind::Threads(_) | Kind::Hosts(_) => None,
        }
    }

    pub fn is_processes(&self) -> bool {
        matches!(self.kind, Kind::Processes(_))
    }

    /// Whether [`process`](Self::process) knows the ranks of this host.
    pub fn sees_processes(&self) -> bool {
        match &self.kind {
            Kind::Processes(_) => true,
            Kind::Hosts(relay) => relay.sees_processes(),
            Kind::Threads(_) => false,
        }
    }

    /// Tells a world of ranks on several hosts which world those of this host have beside.
    pub fn set_here(&self, here: Arc<World>) {
        if let Kind::Hosts(relay) = &self.kind {
            relay.set_here(here);
        }
    }

    /// A rank's process, if it is one of this host.
    pub fn process(&self, world_rank: usize) -> Option<&Process> {
        match &self.kind {
            Kind::Processes(world) => world.processes.get(world_rank),
            Kind::Hosts(relay) => relay.process(world_rank),
            Kind::Threads(_) => None,
        }
    }

    /// A rank's published status.
    pub(crate) fn status(&self, world_rank: usize) -> &RankStatus {
        match &self.kind {
            Kind::Threads(world) => &world.statuses[world_rank],
            Kind::Processes(world) => world.status(world_rank),
            Kind::Hosts(relay) => relay.status(world_rank),
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

    /// Opens a segment that a peer created; an error if it is known to be closed.
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

    /// Opens a segment of at least `len` bytes by an id that may be any number. `None` if there can be none with it; what it
    /// holds may be of something else.
    pub(crate) fn find_segment(&self, id: SegmentId, len: usize) -> Option<Segment> {
        match &self.kind {
            Kind::Threads(world) => {
                let memory = lock(&world.segments).get(&id).and_then(Weak::upgrade)?;
                (memory.len() >= len).then_some(Segment { id, memory })
            }
            Kind::Processes(world) => world.find_segment(id, len),
            Kind::Hosts(_) => None,
        }
    }

    /// Closes a segment. `last`: no rank uses it any more.
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

    /// Allocates the pages of a range of a segment, so that using them later cannot fail.
    pub(crate) fn commit(&self, segment: &Segment, start: usize, len: usize) -> Result<()> {
        match &self.kind {
            Kind::Processes(world) => world.file.commit(place(segment.id).0 + start as u64, len as u64),
            // The system's allocator promises as much as it wants.
            Kind::Threads(_) | Kind::Hosts(_) => Ok(()),
        }
    }

    /// The location of `len` bytes at `start` for peers, if they can reach them.
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
    /// given up on them. Its contents are lost; later writes of peers go to the old pages.
    #[cold]
    pub(crate) fn withdraw(&self, start: *const u8, len: usize) {
        if let Kind::Processes(world) = &self.kind {
            world.withdraw(start, len);
        }
    }

    /// The address in this process of `len` bytes at a peer's location. `mapped` caches the segment that was used last.
    #[inline]
    pub(crate) fn resolve(&self, location: Location, len: usize, mapped: &mut Mapped) -> Result<*const u8> {
        match &self.kind {
            Kind::Threads(_) => return Ok(location.offset as *const u8),
            Kind::Processes(world) if mapped.id != location.segment => {
                *mapped = world.map(location.segment)?
            }
            Kind::Processes(_) => {}
            Kind::Hosts(_) => unreachable!("nothing was located"),
        }
        let end = location.offset.saturating_add(len as u64);
        assert!(end <= mapped.len as u64, "a peer's buffer lies in its segment");
        Ok(mapped.start.wrapping_add(location.offset as usize))
    }

    /// Zeroed memory for `Comm::alloc`.
    pub(crate) fn alloc(self: &Arc<World>, len: usize) -> Result<HeapBlock> {
        let (start, offset, arena) = match &self.kind {
            Kind::Threads(_) | Kind::Hosts(_) => {
                let memory = Mapping::anonymous(len.max(1))?;
                return Ok(HeapBlock { start: memory.as_ptr(), place: HeapPlace::Own(memory) });
            }
            Kind::Processes(world) => world.alloc(len)?,
        };
        Ok(HeapBlock { start, place: HeapPlace::Heap { world: self.clone(), arena, offset, len } })
    }
}

impl ProcessWorld {
    pub(super) fn next(&self) -> &AtomicU64 {
        // SAFETY: the header's first word is an atomic for every process; the mapping lives as long as self.
        unsafe { &*self.header.as_ptr().cast::<AtomicU64>() }
    }

    fn status(&self, world_rank: usize) -> &RankStatus {
        assert!(world_rank < MAX_HOST_RANKS);
        // SAFETY: at STATUSES is an array of MAX_HOST_RANKS statuses, for every process, of which
        // zeroes are valid; the mapping lives as long as self.
        unsafe { &*self.header.as_ptr().add(STATUSES).cast::<RankStatus>().add(world_rank) }
    }
}

/// Offset of the statuses in the header; before them is the offset of the next segment.
const STATUSES: usize = 4096;

const _: () = assert!(STATUSES + MAX_HOST_RANKS * size_of::<RankStatus>() <= GRAIN as usize);
