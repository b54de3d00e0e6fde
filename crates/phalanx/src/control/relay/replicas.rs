//! Replicas: this process's copies of the state of all other ranks.

use super::publisher::Published;
use super::{Content, Decision, Line, Message, OPENING, Update};
use crate::control::failure::{ChannelFailure, FailureContext};
use crate::control::flags::Stamped;
use crate::control::layout::{Channel, LIFE_ALONE, LIFE_LEFT, LIFE_PANICKED};
use crate::control::segment::SegmentId;
use crate::control::world::RankStatus;
use crate::os::sync::{AtomicU64, Ordering, lock};
use crate::rendezvous::store::{Lost, Subscriber};
use crate::types::error::PeerEvent;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex};

/// The channels of this process, and the state of their ranks.
pub(crate) struct Replicas {
    statuses: Box<[RankStatus]>,
    table: Mutex<Table>,
    /// Length of `lost`, readable without the lock.
    num_lost: AtomicUsize,
    lost: Mutex<Vec<(usize, PeerEvent)>>,
    has_ended: AtomicBool,
}

#[derive(Default)]
struct Table {
    open: HashMap<SegmentId, Arc<OpenChannel>>,
    /// Updates of channels that this rank has not opened yet.
    before_open: HashMap<SegmentId, Vec<(usize, Content)>>,
    closed: HashSet<SegmentId>,
}

/// An open channel of this process.
pub(crate) struct OpenChannel {
    pub id: SegmentId,
    pub channel: Channel,
    pub rank: usize,
    /// World ranks of the members.
    members: Vec<usize>,
    /// The other members, as ranks of the store.
    pub others: Vec<u32>,
    /// Locked while an update is sent, so that no newer one overtakes it.
    pub published: Mutex<Published>,
}

impl Replicas {
    pub fn new(ranks: usize) -> Replicas {
        Replicas {
            statuses: (0..ranks).map(|_| RankStatus::default()).collect(),
            table: Mutex::default(),
            num_lost: AtomicUsize::new(0),
            lost: Mutex::default(),
            has_ended: AtomicBool::new(false),
        }
    }

    pub fn status(&self, world_rank: usize) -> &RankStatus {
        &self.statuses[world_rank]
    }

    /// Whether the connection has ended.
    pub fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    /// The channels that are open.
    pub fn channels(&self) -> Vec<Arc<OpenChannel>> {
        lock(&self.table).open.values().cloned().collect()
    }

    /// Registers a channel and applies the updates that came before.
    pub fn open(&self, open: &Arc<OpenChannel>) {
        let mut table = lock(&self.table);
        for (from, content) in table.before_open.remove(&open.id).unwrap_or_default() {
            self.write(open, from, content);
        }
        table.open.insert(open.id, open.clone());
    }

    pub fn close(&self, id: SegmentId) {
        let mut table = lock(&self.table);
        table.before_open.remove(&id);
        if table.open.remove(&id).is_some() {
            table.closed.insert(id);
        }
    }

    /// Fails a channel in this process alone.
    pub fn fail(&self, open: &OpenChannel, failure: &ChannelFailure) {
        let _table = lock(&self.table);
        open.fail(failure);
    }

    /// Why a rank is lost, if the store reported it.
    pub fn lost(&self, world_rank: usize) -> Option<PeerEvent> {
        if self.num_lost.load(Ordering::Acquire) == 0 {
            return None;
        }
        lock(&self.lost).iter().find(|(rank, _)| *rank == world_rank).map(|(_, event)| *event)
    }

    /// Applies an update or decision of a world rank. The table is locked.
    fn write(&self, open: &OpenChannel, from: usize, content: Content) {
        let Some(rank) = open.members.iter().position(|member| *member == from) else { return };
        match content {
            Content::Update(update) if rank != open.rank => self.write_update(open, rank, &update),
            Content::Update(_) => {}
            Content::Decision(decision) => open.write_decision(rank, &decision),
        }
        open.channel.state(open.rank).park.wake();
    }

    fn write_update(&self, open: &OpenChannel, rank: usize, update: &Update) {
        let state = open.channel.state(rank);
        for (place, word) in &update.greetings {
            if let Some(target) = state.greeting_words().nth(usize::from(*place)) {
                target.store(*word, Ordering::Release);
            }
        }
        for (place, sequence, words) in &update.records {
            let Some(record) = state.records.get(usize::from(*place)) else { continue };
            record.write(*sequence, *words);
        }
        for line in &update.lines {
            let slot = open.channel.slot(rank, u64::from(line.slot));
            // SAFETY: this thread is the line's writer in this process; its rank wrote the line since all, this process's
            // rank too, were done with what it held before.
            unsafe {
                match line.line {
                    OPENING => copy_line(&slot.opening, line),
                    number => {
                        if let Some(target) = slot.lines.get(usize::from(number)) {
                            copy_line(target, line);
                        }
                    }
                }
            }
        }
        state.shrink.joined.store(update.joined, Ordering::Release);
        state.done_operation.set(update.done);
        self.statuses[open.members[rank]].waits_for.store(update.waits_for, Ordering::Release);
        state.life.pid.store(update.pid, Ordering::Release);
        state.life.state.store(update.life, Ordering::Release);
    }
}

/// # Safety
/// As for [`Stamped::write`].
unsafe fn copy_line<const PAYLOAD: usize>(target: &Stamped<PAYLOAD>, line: &Line) {
    if size_of_val(&*line.payload) == PAYLOAD {
        // SAFETY: the caller's contract; as many bytes.
        unsafe { target.write(line.stamp, line.payload.as_ptr().cast(), PAYLOAD) };
    }
}

impl OpenChannel {
    pub fn new(id: SegmentId, channel: Channel, rank: usize, members: Vec<usize>) -> OpenChannel {
        let own = members[rank];
        let others = members.iter().filter(|member| **member != own).map(|member| *member as u32).collect();
        let published = Mutex::new(Published::new(channel.state(rank).greeting_words().count()));
        OpenChannel { id, channel, rank, members, others, published }
    }

    /// All members, as ranks of the store.
    pub fn everybody(&self) -> Vec<u32> {
        self.members.iter().map(|member| *member as u32).collect()
    }

    /// The first decision counts. They come in the same order everywhere.
    fn write_decision(&self, rank: usize, decision: &Decision) {
        let (header, state) = (self.channel.header(), self.channel.state(rank));
        let put = |target: &[AtomicU64], words: &[u64]| {
            target.iter().zip(words).for_each(|(target, word)| target.store(*word, Ordering::Relaxed));
        };
        match decision {
            Decision::ChannelFailure(words) => {
                if header.failure.load(Ordering::Acquire) == 0 {
                    put(&state.failure, words);
                    header.failure.store(rank as u32 + 1, Ordering::Release);
                }
            }
            Decision::Round(round, words) => {
                if header.decided.load(Ordering::Acquire) >> 16 < *round {
                    put(&state.shrink.proposals[*round as usize % 2], words);
                    header.decided.store(round << 16 | (rank as u64 + 1), Ordering::Release);
                }
            }
            Decision::Outcome(outcome) => {
                let (old, new) = (Ordering::AcqRel, Ordering::Acquire);
                let _ = header.confirmed.compare_exchange(0, *outcome, old, new);
            }
        }
    }
}

impl Subscriber for Replicas {
    fn on_message(&self, from: usize, value: &[u8]) {
        let Ok(Message { channel, content }) = postcard::from_bytes(value) else {
            crate::os::log::warn!(
                "rank {from} tells what cannot be understood: use one version of phalanx in all processes"
            );
            return;
        };
        let mut table = lock(&self.table);
        if let Some(open) = table.open.get(&channel) {
            self.write(open, from, content);
        } else if !table.closed.contains(&channel) {
            table.before_open.entry(channel).or_default().push((from, content));
        }
    }

    fn on_loss(&self, lost: &[Lost], has_ended: bool) {
        *lock(&self.lost) = lost.iter().map(|lost| (lost.rank, lost.event)).collect();
        self.num_lost.store(lost.len(), Ordering::Release);
        self.has_ended.store(has_ended, Ordering::Release);
        for open in lock(&self.table).open.values() {
            if has_ended {
                open.fail_of(lost);
            }
            open.channel.state(open.rank).park.wake();
        }
    }
}

impl OpenChannel {
    /// Fails the channel in this process. The table is locked.
    fn fail(&self, failure: &ChannelFailure) {
        if self.channel.header().failure.load(Ordering::Acquire) == 0 {
            failure.propose(self.channel.header(), self.channel.state(self.rank), self.rank);
        }
    }

    /// Fails the channel after the connection to the store has ended, naming a lost member.
    fn fail_of(&self, lost: &[Lost]) {
        let is_here = |rank: &usize| {
            let life = self.channel.state(*rank).life.state.load(Ordering::Acquire);
            ![LIFE_LEFT, LIFE_ALONE, LIFE_PANICKED].contains(&life)
        };
        let culprit = lost.iter().find_map(|lost| {
            let rank = self.members.iter().position(|member| *member == lost.rank).filter(is_here)?;
            Some((rank, lost.event))
        });
        if let Some((rank, event)) = culprit {
            let context = FailureContext::of_last(self.channel.state(self.rank), self.rank);
            self.fail(&ChannelFailure::Peer { rank, event, context });
        }
    }
}
