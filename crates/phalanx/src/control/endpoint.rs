//! One rank's end of a channel: attaching to it, publishing progress, failing it, and leaving it.
//!
//! `endpoint/wait.rs` waits for peers; `endpoint/kernel_copy.rs` reads their private memory.

mod kernel_copy;
mod wait;

pub(crate) use wait::{Peers, PendingOperation};

use super::failure::{ChannelFailure, FailureContext};
use super::flags::{Fences, Gate};
use super::layout::{Channel, LIFE_ACTIVE, LIFE_ALONE, LIFE_LEFT, LIFE_PANICKED, RECORDS, RankState};
use super::outer::Outer;
use super::relay::{Decision, RelayLink};
use super::segment::Segment;
use super::world::{Kind, World};
use crate::contract::Departure;
use crate::contract::hosts::HostTopology;
use crate::os::sync::{Ordering, fence, lock};
use crate::rendezvous::store::Store;
use crate::types::error::{Error, PeerEvent, Result, UnsupportedError};
use crate::watch::deadline;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

pub(crate) struct Endpoint {
    pub rank: usize,
    pub ranks: usize,
    pub channel: Channel,
    pub world: Arc<World>,
    pub fences: Fences,
    /// There are more ranks than cores: a rank that waits must let others run.
    pub crowded: bool,
    pub(super) segment: Segment,
    /// The world rank of each rank of this channel.
    members: Vec<usize>,
    /// The communicator's name, for error messages.
    pub name: OnceLock<String>,
    /// The name with what the program calls it, without the job's.
    pub given_name: OnceLock<String>,
    polls: u32,
    timeout: AtomicU64,
    fork: crate::os::ForkMark,
    /// Connection to ranks that share no memory.
    link: Option<RelayLink>,
    /// Held by the thread that proposes a failure for this rank.
    failing_lock: Mutex<()>,
    /// The text of an operating system's error that this rank got in the middle of an operation.
    refusal: OnceLock<String>,
    /// Set when this rank has probed kernel copy from all its peers.
    probed_kernel_copy: OnceLock<()>,
    /// The channel over several hosts of which this is the part on one.
    outer: OnceLock<Outer>,
}

/// A channel that one rank makes and all ranks of it open.
pub(crate) struct NewChannel(Segment);

impl NewChannel {
    pub fn create(world: &World, ranks: usize) -> Result<NewChannel> {
        world.create_segment(world.layout(ranks).total()).map(NewChannel)
    }

    /// What the other ranks need to open it.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    pub fn open(world: &World, id: u64) -> Result<NewChannel> {
        world.open_segment(id).map(NewChannel)
    }
}

impl Endpoint {
    /// The endpoint of a rank whose peers are on several hosts and have joined a store. It can exchange a few words, which is enough to set up
    /// another backend and to check that its ranks live.
    pub fn over(store: Store, rank: usize, topology: HostTopology, timeout: Duration) -> Result<Endpoint> {
        let ranks = topology.world_size();
        let (world, segment) = World::hosts(store, rank, topology)?;
        Ok(Endpoint::attach(Arc::new(world), NewChannel(segment), rank, (0..ranks).collect(), timeout))
    }

    /// Attaches to a channel of `members` (world ranks) as `rank`. Every rank of the channel does so once.
    pub fn attach(
        world: Arc<World>,
        channel: NewChannel,
        rank: usize,
        members: Vec<usize>,
        timeout: Duration,
    ) -> Endpoint {
        let ranks = members.len();
        let segment = channel.0;
        // SAFETY: the segment was made for a channel of this many ranks, and started as zeroes.
        let channel = unsafe { Channel::new(world.layout(ranks), segment.memory.clone()) };
        // Ranks of other channels need cores too, so the ranks of the world count.
        let crowded = members.iter().max().map_or(ranks, |last| last + 1) > world.cores;
        let fences = if crate::os::asymmetric_barriers() { Fences::Asymmetric } else { Fences::Symmetric };
        let link = match &world.kind {
            Kind::Hosts(relay) => Some(relay.open(segment.id, channel.alias(), rank, &members)),
            _ => None,
        };
        let endpoint = Endpoint {
            rank,
            ranks,
            channel,
            world,
            fences,
            crowded,
            segment,
            members,
            name: OnceLock::new(),
            given_name: OnceLock::new(),
            polls: wait::polls(crowded),
            timeout: AtomicU64::new(0),
            fork: crate::os::ForkMark::of_this_process(),
            link,
            failing_lock: Mutex::default(),
            refusal: OnceLock::new(),
            probed_kernel_copy: OnceLock::new(),
            outer: OnceLock::new(),
        };
        endpoint.set_timeout(timeout);
        let pid = std::process::id();
        endpoint.own().life.pid.store(pid, Ordering::Relaxed);
        endpoint.publish_mark();
        endpoint.own().life.state.store(LIFE_ACTIVE, Ordering::Release);
        if endpoint.link.is_some() {
            // A peer on another host that waits for this rank cannot be seen from here: assume that one does.
            endpoint.own().park.add_sleeper();
            endpoint.publish();
        }
        endpoint
    }

    /// Makes this channel the part on one host of another. Before its first wait.
    pub fn belong_to(&self, outer: Outer) {
        let _ = self.outer.set(outer);
    }

    /// The reason for which the channel has failed.
    pub fn reason(&self) -> Option<ChannelFailure> {
        match self.channel.header().failure.load(Ordering::Acquire) {
            0 => None,
            winner => ChannelFailure::read(self.channel.state(winner as usize - 1)),
        }
    }

    /// Whether data beyond a few words can be moved.
    pub fn shares_memory(&self) -> bool {
        self.link.is_none()
    }

    #[cold]
    pub fn too_long(&self) -> Error {
        Error::from(UnsupportedError {
            what: "moving host memory between hosts".into(),
            why: "these ranks share no memory, and what they tell each other is a few words".into(),
            remedy: "use a backend that reaches other hosts".into(),
        })
    }

    /// Publishes changes now to ranks on other hosts; ranks that share memory see them anyway.
    #[inline]
    pub fn publish(&self) {
        if let Some(link) = &self.link {
            link.publish();
        }
    }

    #[inline(always)]
    pub fn own(&self) -> &RankState {
        self.channel.state(self.rank)
    }

    pub fn timeout(&self) -> Duration {
        Duration::from_nanos(self.timeout.load(Ordering::Relaxed))
    }

    /// The deadline of this thread's waits.
    pub fn deadline(&self) -> Duration {
        deadline::of(self.timeout())
    }

    pub fn set_timeout(&self, timeout: Duration) {
        let nanos = timeout.as_nanos().try_into().unwrap_or(u64::MAX);
        self.timeout.store(nanos, Ordering::Relaxed);
    }

    /// The channel's number, the same on all its ranks and of no other channel of the world.
    pub fn id(&self) -> u64 {
        self.segment.id
    }

    /// World ranks of the channel's ranks.
    pub fn members(&self) -> &[usize] {
        &self.members
    }

    /// The other ranks, from the next one on, so that not all ranks begin with the same peer.
    #[inline(always)]
    pub fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, ranks) = (self.rank, self.ranks);
        (rank + 1..ranks).chain(0..rank)
    }

    /// Wakes peers that sleep. Called after a store that peers may wait for.
    #[inline(always)]
    pub fn announce_progress(&self) {
        if self.own().park.has_sleepers(self.fences) {
            self.publish_progress();
        }
    }

    #[cold]
    fn publish_progress(&self) {
        match &self.link {
            Some(link) => link.publish_with_slots(),
            None => self.wake_peers(),
        }
    }

    #[cold]
    fn wake_peers(&self) {
        for peer in self.peers() {
            self.channel.state(peer).park.wake();
        }
    }

    /// Whether the channel has failed.
    #[inline(always)]
    pub fn has_failed(&self) -> bool {
        self.channel.header().failure.load(Ordering::Acquire) != 0
    }

    /// An error if the channel has failed, or if this process is a forked copy.
    #[inline(always)]
    pub fn check(&self) -> Result<()> {
        if self.has_failed() | self.fork.is_copy() { Err(self.refusal()) } else { Ok(()) }
    }

    #[cold]
    fn refusal(&self) -> Error {
        if self.fork.is_copy() { Error::forked() } else { self.failure() }
    }

    /// Whether this process is a copy, made by fork, of the process that has the rank. A copy must not touch shared memory.
    pub fn is_copy(&self) -> bool {
        self.fork.is_copy()
    }

    /// An error in such a copy.
    #[inline(always)]
    pub fn check_owner(&self) -> Result<()> {
        if self.is_copy() { Err(Error::forked()) } else { Ok(()) }
    }

    /// The ranks that the channel's failure names as gone or missing; none without a failure.
    pub fn lost(&self) -> Vec<usize> {
        self.reason().map_or(Vec::new(), |failure| failure.lost().to_vec())
    }

    /// Fails the channel after the operating system refused this rank something in the middle of an operation.
    #[cold]
    pub fn fail_refused(&self, error: &Error) -> Error {
        crate::os::log::error!(rank = self.rank, "{error}");
        self.refusal.get_or_init(|| error.to_string());
        let context = FailureContext::of_last(self.own(), self.rank);
        self.fail(&ChannelFailure::Peer { rank: self.rank, event: PeerEvent::Refused, context })
    }

    /// Fails the channel since a panic has left this rank's last operation.
    #[cold]
    pub fn fail_panicked(&self) {
        let context = FailureContext::of_last(self.own(), self.rank);
        self.fail(&ChannelFailure::Peer { rank: self.rank, event: PeerEvent::Panicked, context });
    }

    #[cold]
    fn failure(&self) -> Error {
        let winner = self.channel.header().failure.load(Ordering::Acquire) as usize - 1;
        let failure = ChannelFailure::read(self.channel.state(winner))
            .map_or(Error::Aborted { rank: winner }, |v| {
                v.into_error(&self.of_communicator(), |rank| self.last_seen(rank))
            });
        match failure {
            Error::Peer(mut peer) if peer.event == PeerEvent::Refused && peer.rank == self.rank => {
                // The failure in shared memory has no room for the text.
                peer.refusal = self.refusal.get().cloned();
                Error::Peer(peer)
            }
            failure => failure,
        }
    }

    /// Fails the channel for all ranks. Returns the failure that counts, which is another rank's if that was first.
    #[cold]
    pub fn fail(&self, failure: &ChannelFailure) -> Error {
        if self.is_copy() {
            return Error::forked();
        }
        let failing_lock = lock(&self.failing_lock);
        if !self.has_failed() {
            match &self.link {
                Some(link) => link.fail(failure),
                None => failure.propose(self.channel.header(), self.own(), self.rank),
            }
            // A part's numbers of ranks are its own: the whole communicator says what is wrong.
            if self.outer.get().is_none() {
                crate::os::log::error!(rank = self.rank, "the communicator has failed: {}", self.failure());
            }
        }
        drop(failing_lock);
        self.wake_peers();
        self.failure()
    }

    /// Fails the channel for a reason that a wait has found: with its outer channel, for which the reason is, if it has one.
    #[cold]
    pub fn give_up(&self, reason: &ChannelFailure) -> Error {
        let Some(outer) = self.outer.get() else { return self.fail(reason) };
        let error = outer.endpoint.fail(reason);
        self.follow_outer();
        error
    }

    /// Fails the part of a channel that has failed.
    #[cold]
    pub fn follow_outer(&self) {
        if !self.has_failed() {
            ChannelFailure::Aborted { rank: self.rank }.propose(self.channel.header(), self.own(), self.rank);
        }
        self.wake_peers();
    }

    /// An error if the outer channel, if there is one, has failed.
    fn check_outer(&self) -> Result<()> {
        self.outer.get().map_or(Ok(()), Outer::look).inspect_err(|_| self.follow_outer())
    }

    /// Waits until no peer is inside this rank's memory. Called between the failure and the return of its error, after which the caller may
    /// free its buffers. A peer that enters later sees the failure and leaves. Process ranks do not need it: they map only memory of the
    /// region, which outlives this rank.
    #[cold]
    pub fn close_buffers(&self) {
        if self.world.is_processes() {
            return;
        }
        self.fences.slow_side();
        for peer in self.peers() {
            for gate in &self.channel.state(peer).gates {
                while gate.is_inside() {
                    std::thread::yield_now();
                }
            }
        }
    }

    /// Does `work` on a peer's memory, inside one of this rank's gates. An error if the channel has failed meanwhile: the peer may have used
    /// the memory for something else by then.
    #[inline(always)]
    pub fn inside(&self, gate: usize, work: impl FnOnce()) -> Result<()> {
        let gate = &self.own().gates[gate];
        if gate.enter(self.fences, || self.has_failed()) {
            let inside = Inside(gate);
            work();
            drop(inside);
            // The check below must not be read before the peer's memory.
            fence(Ordering::Acquire);
        }
        self.check()
    }

    /// Whether a rank that left will miss the common shutdown: it published that, or its process has ended.
    pub fn is_alone(&self, rank: usize) -> bool {
        match self.channel.state(rank).life.state.load(Ordering::Acquire) {
            LIFE_ALONE => true,
            LIFE_LEFT => self.has_exited(rank),
            _ => false,
        }
    }

    /// Whether a rank's process has ended, where that can be seen.
    pub fn has_exited(&self, rank: usize) -> bool {
        matches!(&self.world.kind, Kind::Processes(world) if world.processes[self.members[rank]].has_exited())
    }

    /// Leaves without taking part in the common shutdown.
    pub fn depart_alone(&self) {
        if !self.is_copy() {
            self.own().life.state.store(LIFE_ALONE, Ordering::Release);
            self.announce_progress();
        }
    }

    /// How a peer is gone, if it is: it left, panicked, died, or cannot be reached.
    pub fn gone(&self, rank: usize) -> Option<PeerEvent> {
        match self.channel.state(rank).life.state.load(Ordering::Acquire) {
            LIFE_LEFT | LIFE_ALONE => Some(PeerEvent::Left),
            LIFE_PANICKED => Some(PeerEvent::Panicked),
            _ if self.has_exited(rank) => Some(PeerEvent::Died),
            _ => self.link.as_ref()?.lost(self.members[rank]),
        }
    }

    /// An error if the channel has failed, or a peer is lost, which no operation may have told yet. A peer that has left has done its part.
    pub fn check_peers_live(&self) -> Result<()> {
        self.check()?;
        let lost = |rank: &usize| self.gone(*rank).is_some_and(|event| event != PeerEvent::Left);
        match self.peers().find(lost) {
            None => Ok(()),
            Some(rank) => Err(Error::bootstrap(
                format!("rank {rank} of the communicator is lost"),
                "shrink the communicator, or rebuild it",
            )),
        }
    }

    /// The mismatch, if this rank and `peer` announced different calls under the same number.
    pub fn compare_records(&self, peer: usize, sequence: u64) -> Option<ChannelFailure> {
        let own = self.own().announced(sequence)?;
        let theirs = self.channel.state(peer).announced(sequence)?;
        (own != theirs).then(|| {
            let (own, theirs) = ((self.rank, own), (peer, theirs));
            let (lower, higher) = if self.rank < peer { (own, theirs) } else { (theirs, own) };
            ChannelFailure::Mismatch { sequence, lower, higher }
        })
    }

    /// Fails the channel after `peer`'s history turned out to differ from this rank's. The error names the first call that differs.
    #[cold]
    pub fn fail_mismatch(&self, peer: usize, sequence: u64) -> Error {
        let first = sequence.saturating_sub(RECORDS as u64 - 1).max(1);
        let failure = (first..=sequence).find_map(|s| self.compare_records(peer, s));
        match failure {
            Some(failure) => self.fail(&failure),
            // The call that differed is older than all records: name the present one.
            None => {
                let own = self.own().announced(sequence).expect("announced by this call");
                let (low, high) = (self.rank.min(peer), self.rank.max(peer));
                self.fail(&ChannelFailure::Mismatch { sequence, lower: (low, own), higher: (high, own) })
            }
        }
    }

    /// Makes this rank's proposal the decision of a round of `shrink`, unless another proposal was first.
    pub fn decide_round(&self, round: u64, words: &[AtomicU64]) {
        let header = &self.channel.header().decided;
        let last = header.load(Ordering::Acquire);
        if last >> 16 >= round {
            return;
        }
        if let Some(link) = &self.link {
            let words = words.iter().map(|word| word.load(Ordering::Relaxed)).collect();
            link.decide(Decision::Round(round, words), || header.load(Ordering::Acquire) >> 16 >= round);
            return;
        }
        let winner = round << 16 | (self.rank as u64 + 1);
        let _ = header.compare_exchange(last, winner, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Decides whether a channel made by `shrink` counts, unless that is decided.
    pub fn decide_outcome(&self, open: u32, outcome: u32) {
        let state = &self.channel.header().confirmed;
        if let Some(link) = &self.link {
            link.decide(Decision::Outcome(outcome), || state.load(Ordering::Acquire) != open);
            return;
        }
        let _ = state.compare_exchange(open, outcome, Ordering::AcqRel, Ordering::Acquire);
    }

    /// An error if the connection to the store is lost, over which the ranks of several hosts agree.
    pub fn check_connected(&self) -> Result<()> {
        if self.link.as_ref().is_none_or(|link| !link.has_ended()) {
            return Ok(());
        }
        Err(Error::from(UnsupportedError {
            what: "shrink".into(),
            why: "the job's store is gone, with the process that had it, or this process is cut off from it"
                .into(),
            remedy: "start the job again; with `phalanx launch` the store outlives every rank".into(),
        }))
    }

    pub fn depart(&self, departure: Departure) {
        if self.is_copy() {
            return;
        }
        let state = match departure {
            Departure::Left => LIFE_LEFT,
            Departure::Panicked => LIFE_PANICKED,
        };
        self.own().life.state.store(state, Ordering::Release);
        self.announce_progress();
    }
}

/// Leaves a gate when dropped, also by a panic: the owner of the memory waits for it.
struct Inside<'a>(&'a Gate);

impl Drop for Inside<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if self.is_copy() {
            return;
        }
        if self.own().life.state.load(Ordering::Relaxed) == LIFE_ACTIVE {
            // Set-up failed: this tells the peers.
            self.depart(Departure::Left);
        }
        // Counts the ranks that have closed the channel: a late one still finds the state of the others.
        let last = self.channel.header().closed.fetch_add(1, Ordering::AcqRel) as usize + 1 == self.ranks;
        self.world.close_segment(&self.segment, last);
    }
}
