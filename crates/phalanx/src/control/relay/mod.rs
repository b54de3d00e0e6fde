//! Ranks that share no memory, as those of several hosts: each process has its channels to itself, and what a rank writes
//! there for the others is told to them over the job's store, and written into theirs.
//!
//! All that reads these words stays as it is: a word has one writer, so that a copy of it is right, if late. Three rules keep
//! the copies in order:
//! - What a rank writes is told in the order in which it wrote it, over all channels: the store keeps it.
//! - What announces something is read before, and written after, what it announces.
//! - What several ranks may write, the first one counting (a verdict, a step of `shrink`), counts in the order of the store,
//!   which is the same everywhere, and only when it comes back from there.
//!
//! When it is told: at once if others wait for it ([`Link::tell`]); else when a thread finds it changed (`publisher.rs`). What the
//! others tell is in `replicas.rs`.

mod publisher;
mod replicas;

use crate::contract::hosts::HostTopology;
use crate::control::failure::ChannelFailure;
use crate::control::layout::Channel;
use crate::control::segment::{Segment, SegmentId};
use crate::control::world::RankStatus;
use crate::os::Mapping;
use crate::os::sync::Ordering;
use crate::rendezvous::store::Store;
use crate::types::error::{Error, PeerEvent, Result};
use replicas::{OpenChannel, Replicas};
use serde::{Deserialize, Serialize};
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often a rank tells what nobody waits for, at most and at least; in between, so that the store has this many messages
/// a second to pass on.
const OFTEN: Duration = Duration::from_millis(20);
const SELDOM: Duration = Duration::from_secs(2);
const MESSAGES: u32 = 5000;

/// How long the store may take to pass a decision on. One that does not is noticed sooner, by its silence.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long the rank that has the store waits at the end for others that may still need it.
const LINGER: Duration = Duration::from_secs(10);

/// The slot's opening among its lines.
const OPENING: u16 = u16::MAX;

/// What ranks tell each other.
#[derive(Serialize, Deserialize)]
struct Message {
    channel: SegmentId,
    content: Content,
}

#[derive(Serialize, Deserialize)]
enum Content {
    Update(Update),
    Decision(Decision),
}

/// What has changed in the words of a rank.
#[derive(Default, PartialEq, Eq, Serialize, Deserialize)]
struct Update {
    life: u32,
    pid: u32,
    waits_for: u32,
    done: u64,
    joined: u64,
    /// Place, number and words.
    records: Vec<(u8, u64, [u64; 3])>,
    greetings: Vec<(u8, u64)>,
    lines: Vec<Line>,
}

#[derive(PartialEq, Eq, Serialize, Deserialize)]
struct Line {
    slot: u8,
    line: u16,
    stamp: u64,
    /// As many words as the line, or the opening, has.
    payload: Vec<u64>,
}

/// What counts if it is the first.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) enum Decision {
    /// Why the channel has failed: the words of it.
    ChannelFailure(Vec<u64>),
    /// A proposal for a round of `shrink`: its words.
    Round(u64, Vec<u64>),
    /// Whether the channel counts.
    Outcome(u32),
}

/// The world of ranks that tell each other.
pub(crate) struct Relay {
    shared: Arc<Shared>,
    segments: AtomicU64,
    topology: HostTopology,
    /// Dropped, it ends the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    fork: crate::os::ForkMark,
}

struct Shared {
    /// In the world.
    rank: usize,
    store: Store,
    replicas: Arc<Replicas>,
}

/// An endpoint's way to the others.
pub(crate) struct Link {
    shared: Arc<Shared>,
    open: Arc<OpenChannel>,
}

impl Relay {
    /// The world of the members of a store.
    pub fn new(store: Store, rank: usize, topology: HostTopology) -> Result<Relay> {
        let ranks = topology.world_size();
        let replicas = Arc::new(Replicas::new(ranks));
        store.set_audience(replicas.clone());
        let shared = Arc::new(Shared { rank, store, replicas });
        let interval = (Duration::from_secs((ranks * ranks) as u64) / MESSAGES).clamp(OFTEN, SELDOM);
        let (stop, stopped) = channel();
        let of_thread = Arc::downgrade(&shared);
        let tell = move || {
            while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                let Some(shared) = Weak::upgrade(&of_thread) else { return };
                shared.tell_changes();
            }
        };
        let thread = std::thread::Builder::new().name("phalanx-relay".into());
        let refused = "ranks of several hosts need one: raise `ulimit -u`";
        let thread =
            thread.spawn(tell).map_err(|error| Error::system("starting a thread", error, refused))?;
        // The first segment is everybody's first channel: see `first_segment`.
        let segments = AtomicU64::new(1);
        let fork = crate::os::ForkMark::of_this_process();
        Ok(Relay { shared, segments, topology, stop: Some(stop), thread: Some(thread), fork })
    }

    pub fn topology(&self) -> &HostTopology {
        &self.topology
    }

    pub fn standing(&self, world_rank: usize) -> &RankStatus {
        self.shared.replicas.standing(world_rank)
    }

    /// The segment of the channel with which the world begins.
    pub fn first_segment(&self, len: usize) -> Result<Segment> {
        self.open_segment(segment_id(0, 0, len))
    }

    /// A segment that no other rank has made.
    pub fn create_segment(&self, len: usize) -> Result<Segment> {
        let number = self.segments.fetch_add(1, Ordering::Relaxed);
        self.open_segment(segment_id(self.shared.rank, number, len))
    }

    /// This process's copy of a segment.
    pub fn open_segment(&self, id: SegmentId) -> Result<Segment> {
        Ok(Segment { id, memory: Arc::new(Mapping::anonymous(1 << (id & 0xff))?) })
    }

    pub fn close_segment(&self, id: SegmentId) {
        self.shared.replicas.close(id);
    }

    /// Takes `rank`'s place in a channel: from now on its words are told, and those of the others come.
    pub fn open(&self, id: SegmentId, channel: Channel, rank: usize, members: &[usize]) -> Link {
        let open = Arc::new(OpenChannel::new(id, channel, rank, members.to_vec()));
        self.shared.replicas.open(&open);
        Link { shared: self.shared.clone(), open }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let thread = self.thread.take();
        if self.fork.is_copy() {
            // The thread, and the connection, are the parent's.
            return std::mem::forget(thread);
        }
        self.stop = None;
        if let Some(thread) = thread {
            let _ = thread.join();
        }
        self.shared.store.finish(LINGER);
    }
}

/// Who made a segment, its number among those, and the logarithm of its length.
fn segment_id(rank: usize, number: u64, len: usize) -> SegmentId {
    (rank as u64 + 1) << 48 | number << 8 | u64::from(len.next_power_of_two().trailing_zeros())
}

impl Link {
    /// Tells the others at once what has changed.
    pub fn tell(&self) {
        self.shared.tell_changes();
    }

    /// The same, with this rank's slots. Called by the thread that writes them.
    #[cold]
    pub fn tell_with_slots(&self) {
        self.shared.tell_changes_but(self.open.id);
        self.shared.tell(&self.open, true);
    }

    /// Why a rank is not there any more, as the store has found.
    pub fn lost(&self, world_rank: usize) -> Option<PeerEvent> {
        self.shared.replicas.lost(world_rank)
    }

    /// Fails the channel; if there is nobody to ask, for this process alone.
    #[cold]
    pub fn fail(&self, verdict: &ChannelFailure) {
        let header = self.open.channel.header();
        let is_decided = || header.verdict.load(Ordering::Acquire) != 0;
        if !self.decide(Decision::ChannelFailure(verdict.words()), is_decided) {
            self.shared.replicas.fail(&self.open, verdict);
        }
    }

    /// Whether there is nothing over which ranks could tell anything.
    pub fn has_ended(&self) -> bool {
        self.shared.replicas.has_ended()
    }

    /// Makes a decision, unless another one is first; false if that could not be found out.
    #[cold]
    pub fn decide(&self, decision: Decision, is_decided: impl Fn() -> bool) -> bool {
        self.shared.tell_changes();
        self.shared.send(&self.open.everybody(), self.open.id, Content::Decision(decision));
        let since = Instant::now();
        while !is_decided() {
            if self.has_ended() || since.elapsed() > PATIENCE {
                return is_decided();
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        true
    }
}
