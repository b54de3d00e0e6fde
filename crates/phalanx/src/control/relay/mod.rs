//! Relay: control state of ranks that share no memory, as on several hosts.
//!
//! Each process has a replica of every channel. A rank publishes changes of its own state over the job's store; the other processes write
//! them into their replicas. Code that reads a channel is the same in both cases: each word has one writer, so a replica is late but never
//! wrong. Three rules keep replicas in order:
//! - A rank's changes are published in the order in which they were written, over all channels; the store keeps that order.
//! - A word that announces something is read before it, and written after it.
//! - A word that several ranks may write (a failure, a step of `shrink`) takes the first value in the order of the store, which is the same
//!   everywhere, and only when it comes back from there.
//!
//! Changes that peers wait for are published at once ([`RelayLink::publish`]); a thread publishes the others (`publisher.rs`). `replicas.rs`
//! writes what other ranks publish. `growth.rs` lets new ranks in.

pub(crate) mod growth;
mod publisher;
mod replicas;

use crate::contract::hosts::HostTopology;
use crate::control::failure::ChannelFailure;
use crate::control::layout::Channel;
use crate::control::segment::{Segment, SegmentId};
use crate::control::world::{RankStatus, World};
use crate::os::sync::Ordering;
use crate::os::{Mapping, Process};
use crate::rendezvous::store::Store;
use crate::types::error::{Error, PeerEvent, Result};
use replicas::{OpenChannel, Replicas};
use serde::{Deserialize, Serialize};
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Shortest and longest interval at which a rank publishes changes that no peer waits for. It grows with the ranks, so that the store
/// forwards about this many messages a second.
const OFTEN: Duration = Duration::from_millis(20);
const SELDOM: Duration = Duration::from_secs(2);
const MESSAGES: u32 = 5000;

/// How long the store may take to forward a decision. A store that is gone is noticed sooner.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long the rank that hosts the store waits at the end for ranks that may still need it.
const LINGER: Duration = Duration::from_secs(10);

/// Line number of a slot's opening.
const OPENING: u16 = u16::MAX;

/// A message between relays.
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

/// Changes of a rank's state in a channel.
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

/// A proposal of which the first in the store's order counts.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) enum Decision {
    /// Words of a failure.
    ChannelFailure(Vec<u64>),
    /// Round of `shrink`, and the words of a proposal.
    Round(u64, Vec<u64>),
    /// Whether the channel counts.
    Outcome(u32),
}

/// The world of ranks that share no memory.
pub(crate) struct Relay {
    shared: Arc<RelayShared>,
    segments: AtomicU64,
    topology: HostTopology,
    /// The world of the ranks of this host, in the order of their ranks.
    here: OnceLock<Arc<World>>,
    /// Dropped, it ends the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    fork: crate::os::ForkMark,
}

struct RelayShared {
    /// In the world.
    rank: usize,
    store: Store,
    replicas: Arc<Replicas>,
}

/// An endpoint's connection to the other ranks.
pub(crate) struct RelayLink {
    shared: Arc<RelayShared>,
    open: Arc<OpenChannel>,
}

impl Relay {
    /// The world of the members of a store.
    pub fn new(store: Store, rank: usize, topology: HostTopology) -> Result<Relay> {
        let ranks = topology.world_size();
        let replicas = Arc::new(Replicas::new(ranks));
        store.set_subscriber(replicas.clone());
        let shared = Arc::new(RelayShared { rank, store, replicas });
        let interval = (Duration::from_secs((ranks * ranks) as u64) / MESSAGES).clamp(OFTEN, SELDOM);
        let (stop, stopped) = channel();
        let weak = Arc::downgrade(&shared);
        let publish = move || {
            while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                let Some(shared) = Weak::upgrade(&weak) else { return };
                shared.publish_changes();
            }
        };
        let thread = std::thread::Builder::new().name("phalanx-relay".into());
        let refused = "ranks of several hosts need one: raise `ulimit -u`";
        let thread =
            thread.spawn(publish).map_err(|error| Error::system("starting a thread", error, refused))?;
        // The first segment is everybody's first channel: see `first_segment`.
        let segments = AtomicU64::new(1);
        let fork = crate::os::ForkMark::of_this_process();
        let here = OnceLock::new();
        Ok(Relay { shared, segments, topology, here, stop: Some(stop), thread: Some(thread), fork })
    }

    #[cfg(feature = "nccl")]
    pub fn store(&self) -> &Store {
        &self.shared.store
    }

    pub fn topology(&self) -> &HostTopology {
        &self.topology
    }

    /// Tells it the world that the ranks of this host have beside.
    pub fn set_here(&self, world: Arc<World>) {
        let _ = self.here.set(world);
    }

    /// Whether it knows the processes of this host's ranks.
    pub fn sees_processes(&self) -> bool {
        self.here.get().is_some()
    }

    /// A rank's process, if it is of this host.
    pub fn process(&self, world_rank: usize) -> Option<&Process> {
        let host = self.topology.host_of(self.shared.rank);
        let place = self.topology.ranks_of(host).iter().position(|rank| *rank == world_rank)?;
        self.here.get()?.process(place)
    }

    pub fn status(&self, world_rank: usize) -> &RankStatus {
        self.shared.replicas.status(world_rank)
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

    /// Opens a channel as `rank`: from now on its state is published and the replicas are updated.
    pub fn open(&self, id: SegmentId, channel: Channel, rank: usize, members: &[usize]) -> RelayLink {
        let open = Arc::new(OpenChannel::new(id, channel, rank, members.to_vec()));
        self.shared.replicas.open(&open);
        RelayLink { shared: self.shared.clone(), open }
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

/// A segment's id: the rank that made it, its number there, and the logarithm of its length.
fn segment_id(rank: usize, number: u64, len: usize) -> SegmentId {
    (rank as u64 + 1) << 48 | number << 8 | u64::from(len.next_power_of_two().trailing_zeros())
}

impl RelayLink {
    /// Publishes changes at once.
    pub fn publish(&self) {
        self.shared.publish_changes();
    }

    /// [`publish`](RelayLink::publish) with this rank's slots. Called by the thread that writes them.
    #[cold]
    pub fn publish_with_slots(&self) {
        self.shared.publish_changes_except(self.open.id);
        self.shared.publish(&self.open, true);
    }

    /// Why a rank is not there any more, as the store has found.
    pub fn lost(&self, world_rank: usize) -> Option<PeerEvent> {
        self.shared.replicas.lost(world_rank)
    }

    /// Fails the channel; for this process alone, if the store is gone.
    #[cold]
    pub fn fail(&self, failure: &ChannelFailure) {
        let header = self.open.channel.header();
        let is_decided = || header.failure.load(Ordering::Acquire) != 0;
        if !self.decide(Decision::ChannelFailure(failure.words()), is_decided) {
            self.shared.replicas.fail(&self.open, failure);
        }
    }

    /// Whether the connection to the store has ended.
    pub fn has_ended(&self) -> bool {
        self.shared.replicas.has_ended()
    }

    /// Proposes a decision and waits for the first one; false if none came.
    #[cold]
    pub fn decide(&self, decision: Decision, is_decided: impl Fn() -> bool) -> bool {
        self.shared.publish_changes();
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
