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
//! When it is told: at once if others wait for it ([`Link::tell`]); else when a thread finds it changed.

use super::layout::{Channel, LIFE_LEFT, LIFE_PANICKED, RECORDS, SLOT_LINES, SLOTS};
use super::protocol::LINE_PAYLOAD;
use super::verdict::{Context, Verdict};
use super::world::{Segment, SegmentId, Standing};
use crate::bootstrap::HostTopology;
use crate::bootstrap::store::{Audience, Lost, Store};
use crate::error::{Error, PeerEvent, Result};
use crate::os::Mapping;
use crate::sync::{Ordering, fence, lock};
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
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
    payload: [u64; LINE_PAYLOAD / 8],
}

/// What counts if it is the first.
#[derive(Clone, Serialize, Deserialize)]
pub(super) enum Decision {
    /// Why the channel has failed: the words of it.
    Verdict(Vec<u64>),
    /// A proposal for a round of `shrink`: its words.
    Round(u64, Vec<u64>),
    /// Whether the channel counts.
    Outcome(u32),
}

/// The world of ranks that tell each other.
pub(super) struct Relay {
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
    copies: Arc<Copies>,
}

/// The copies of what the others wrote: this process's channels, and what is known of the ranks.
struct Copies {
    standings: Box<[Standing]>,
    table: Mutex<Table>,
    /// How many are in the list: looking is cheap.
    num_lost: AtomicUsize,
    lost: Mutex<Vec<(usize, PeerEvent)>>,
    has_ended: AtomicBool,
}

#[derive(Default)]
struct Table {
    open: HashMap<SegmentId, Arc<Open>>,
    /// What was told of channels that this rank has not opened yet.
    early: HashMap<SegmentId, Vec<(usize, Content)>>,
    closed: HashSet<SegmentId>,
}

/// A channel of this process.
struct Open {
    id: SegmentId,
    channel: Channel,
    rank: usize,
    members: Vec<usize>,
    /// The other members, as the store knows them.
    others: Vec<u32>,
    told: Mutex<ToldState>,
}

/// What the others know of this rank.
struct ToldState {
    /// Without lists.
    last: Update,
    records: [u64; RECORDS],
    greetings: Vec<u64>,
    /// Stamps; the opening's comes behind the lines'.
    lines: Vec<u64>,
}

/// An endpoint's way to the others.
pub(super) struct Link {
    shared: Arc<Shared>,
    open: Arc<Open>,
}

impl Relay {
    /// The world of the members of a store.
    pub fn new(store: Store, rank: usize, topology: HostTopology) -> Result<Relay> {
        let ranks = topology.world_size();
        let copies = Arc::new(Copies {
            standings: (0..ranks).map(|_| Standing::default()).collect(),
            table: Mutex::default(),
            num_lost: AtomicUsize::new(0),
            lost: Mutex::default(),
            has_ended: AtomicBool::new(false),
        });
        store.set_audience(copies.clone());
        let shared = Arc::new(Shared { rank, store, copies });
        let interval = (Duration::from_secs((ranks * ranks) as u64) / MESSAGES).clamp(OFTEN, SELDOM);
        let (stop, stopped) = channel();
        let of_thread = Arc::downgrade(&shared);
        let tell = move || {
            while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                let Some(shared) = Weak::upgrade(&of_thread) else { return };
                shared.tell_changes();
            }
        };
        let thread =
            std::thread::Builder::new().name("phalanx-relay".into()).spawn(tell).map_err(|error| {
                Error::system(
                    "starting a thread",
                    error,
                    "ranks of several hosts need one: raise `ulimit -u`",
                )
            })?;
        // The first segment is everybody's first channel: see `first_segment`.
        let segments = AtomicU64::new(1);
        let fork = crate::os::ForkMark::of_this_process();
        Ok(Relay { shared, segments, topology, stop: Some(stop), thread: Some(thread), fork })
    }

    pub fn topology(&self) -> &HostTopology {
        &self.topology
    }

    pub fn standing(&self, world_rank: usize) -> &Standing {
        &self.shared.copies.standings[world_rank]
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
        let mut table = lock(&self.shared.copies.table);
        table.early.remove(&id);
        if table.open.remove(&id).is_some() {
            table.closed.insert(id);
        }
    }

    /// Takes `rank`'s place in a channel: from now on its words are told, and those of the others come.
    pub fn open(&self, id: SegmentId, channel: Channel, rank: usize, members: &[usize]) -> Link {
        let others =
            members.iter().filter(|member| **member != self.shared.rank).map(|m| *m as u32).collect();
        let greetings = channel.state(rank).greeting_words().count();
        let told = ToldState {
            last: Update::default(),
            records: [0; RECORDS],
            greetings: vec![0; greetings],
            lines: vec![0; SLOTS * (SLOT_LINES + 1)],
        };
        let members = members.to_vec();
        let open = Arc::new(Open { id, channel, rank, members, others, told: Mutex::new(told) });
        let mut table = lock(&self.shared.copies.table);
        for (from, content) in table.early.remove(&id).unwrap_or_default() {
            self.shared.copies.write(&open, from, content);
        }
        table.open.insert(id, open.clone());
        drop(table);
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
        // What others hear in a slot comes after what they could know before.
        self.shared.tell_changes();
        self.shared.tell(&self.open, true);
    }

    /// Why a rank is not there any more, as the store has found.
    pub fn lost(&self, world_rank: usize) -> Option<PeerEvent> {
        self.shared.copies.lost(world_rank)
    }

    /// Fails the channel; if there is nobody to ask, for this process alone.
    #[cold]
    pub fn fail(&self, verdict: &Verdict) {
        let header = self.open.channel.header();
        let is_decided = || header.verdict.load(Ordering::Acquire) != 0;
        if !self.decide(Decision::Verdict(verdict.words()), is_decided) {
            let _table = lock(&self.shared.copies.table);
            self.open.fail(verdict);
        }
    }

    /// Whether there is nothing over which ranks could tell anything.
    pub fn has_ended(&self) -> bool {
        self.shared.copies.has_ended.load(Ordering::Acquire)
    }

    /// Makes a decision, unless another one is first; false if that could not be found out.
    #[cold]
    pub fn decide(&self, decision: Decision, is_decided: impl Fn() -> bool) -> bool {
        self.shared.tell_changes();
        let everybody: Vec<u32> = self.open.members.iter().map(|member| *member as u32).collect();
        self.shared.send(&everybody, self.open.id, Content::Decision(decision));
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

impl Shared {
    fn tell_changes(&self) {
        let open: Vec<Arc<Open>> = lock(&self.copies.table).open.values().cloned().collect();
        for open in open {
            self.tell(&open, false);
        }
    }

    /// Tells the others of a channel what has changed in this rank's words.
    fn tell(&self, open: &Open, with_slots: bool) {
        if open.others.is_empty() {
            return;
        }
        // Held until it is sent, so that nothing newer overtakes it.
        let mut told = lock(&open.told);
        let update = self.changes(open, &mut told, with_slots);
        if let Some(update) = update {
            self.send(&open.others, open.id, Content::Update(update));
        }
    }

    fn send(&self, to: &[u32], channel: SegmentId, content: Content) {
        let bytes = postcard::to_allocvec(&Message { channel, content }).expect("plain data");
        // An error is the end of the connection, which `bereaved` hears of.
        let _ = self.store.tell(to, &bytes);
    }

    fn changes(&self, open: &Open, told: &mut ToldState, with_slots: bool) -> Option<Update> {
        let state = open.channel.state(open.rank);
        // In the order of reading: who has left has written all before.
        let mut update = Update {
            life: state.life.state.load(Ordering::Acquire),
            pid: state.life.pid.load(Ordering::Acquire),
            waits_for: self.copies.standings[self.rank].waits_for.load(Ordering::Acquire),
            done: state.done_operation.get(),
            joined: state.shrink.joined.load(Ordering::Acquire),
            ..Update::default()
        };
        let is_same = update == told.last;
        for (place, record) in state.records.iter().enumerate() {
            let sequence = record.sequence.load(Ordering::Acquire);
            if sequence == told.records[place] {
                continue;
            }
            let words = std::array::from_fn(|i| record.words[i].load(Ordering::Acquire));
            // Announced in order: once its neighbour has been, this place may be written to again.
            let next = &state.records[(place + RECORDS - 1) % RECORDS];
            if sequence != 0 && next.sequence.load(Ordering::Acquire) > sequence {
                continue;
            }
            told.records[place] = sequence;
            update.records.push((place as u8, sequence, words));
        }
        for (place, word) in state.greeting_words().enumerate() {
            let word = word.load(Ordering::Acquire);
            if std::mem::replace(&mut told.greetings[place], word) != word {
                update.greetings.push((place as u8, word));
            }
        }
        if with_slots {
            update.lines = new_lines(open, &mut told.lines);
        }
        let is_nothing =
            is_same && update.records.is_empty() && update.greetings.is_empty() && update.lines.is_empty();
        told.last = Update { records: Vec::new(), greetings: Vec::new(), lines: Vec::new(), ..update };
        (!is_nothing).then_some(update)
    }
}

/// The lines of this rank's slots that were written and not told.
fn new_lines(open: &Open, told: &mut [u64]) -> Vec<Line> {
    let Some((sequence, _)) = open.channel.state(open.rank).last_announced() else { return Vec::new() };
    let slot = open.channel.slot(open.rank, sequence);
    let place = sequence as usize % SLOTS;
    let told = &mut told[place * (SLOT_LINES + 1)..];
    let lines = slot.lines.iter().zip(0..).chain([(&slot.opening, OPENING)]);
    let mut new = Vec::new();
    for ((line, number), told) in lines.zip(told) {
        if *told != sequence && line.is(sequence) {
            *told = sequence;
            let mut payload = [0u64; LINE_PAYLOAD / 8];
            // SAFETY: stamped, and the thread that writes it is this one; both are 56 bytes.
            unsafe { line.read(payload.as_mut_ptr().cast(), LINE_PAYLOAD) };
            new.push(Line { slot: place as u8, line: number, stamp: sequence, payload });
        }
    }
    new
}

impl Copies {
    fn lost(&self, world_rank: usize) -> Option<PeerEvent> {
        if self.num_lost.load(Ordering::Acquire) == 0 {
            return None;
        }
        lock(&self.lost).iter().find(|(rank, _)| *rank == world_rank).map(|(_, event)| *event)
    }

    /// Writes what a rank of the world has told into the copies. The table is locked.
    fn write(&self, open: &Open, from: usize, content: Content) {
        let Some(rank) = open.members.iter().position(|member| *member == from) else { return };
        match content {
            Content::Update(update) if rank != open.rank => self.write_update(open, rank, &update),
            Content::Update(_) => {}
            Content::Decision(decision) => open.write_decision(rank, &decision),
        }
        open.channel.state(open.rank).park.wake();
    }

    fn write_update(&self, open: &Open, rank: usize, update: &Update) {
        let state = open.channel.state(rank);
        for line in &update.lines {
            let slot = open.channel.slot(rank, u64::from(line.slot));
            let target = match line.line {
                OPENING => &slot.opening,
                number => match slot.lines.get(usize::from(number)) {
                    Some(line) => line,
                    None => continue,
                },
            };
            // SAFETY: this thread is the line's writer in this process; its rank wrote the line since all, this process's
            // rank too, were done with what it held before. Both are 56 bytes.
            unsafe { target.write(line.stamp, line.payload.as_ptr().cast(), LINE_PAYLOAD) };
        }
        for (place, word) in &update.greetings {
            if let Some(target) = state.greeting_words().nth(usize::from(*place)) {
                target.store(*word, Ordering::Release);
            }
        }
        for (place, sequence, words) in &update.records {
            let Some(record) = state.records.get(usize::from(*place)) else { continue };
            // Nobody shall take new words for those of the old number.
            record.sequence.store(0, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            for (target, word) in record.words.iter().zip(words) {
                target.store(*word, Ordering::Relaxed);
            }
            record.sequence.store(*sequence, Ordering::Release);
        }
        state.shrink.joined.store(update.joined, Ordering::Release);
        state.done_operation.set(update.done);
        self.standings[open.members[rank]].waits_for.store(update.waits_for, Ordering::Release);
        state.life.pid.store(update.pid, Ordering::Release);
        state.life.state.store(update.life, Ordering::Release);
    }
}

impl Open {
    /// The first decision counts. They come in the same order everywhere.
    fn write_decision(&self, rank: usize, decision: &Decision) {
        let (header, state) = (self.channel.header(), self.channel.state(rank));
        let put = |target: &[AtomicU64], words: &[u64]| {
            target.iter().zip(words).for_each(|(target, word)| target.store(*word, Ordering::Relaxed));
        };
        match decision {
            Decision::Verdict(words) => {
                if header.verdict.load(Ordering::Acquire) == 0 {
                    put(&state.verdict, words);
                    header.verdict.store(rank as u32 + 1, Ordering::Release);
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

impl Audience for Copies {
    fn told(&self, from: usize, value: &[u8]) {
        let Ok(Message { channel, content }) = postcard::from_bytes(value) else {
            tracing::warn!(
                "rank {from} tells what cannot be understood: use one version of phalanx in all processes"
            );
            return;
        };
        let mut table = lock(&self.table);
        if let Some(open) = table.open.get(&channel) {
            self.write(open, from, content);
        } else if !table.closed.contains(&channel) {
            table.early.entry(channel).or_default().push((from, content));
        }
    }

    fn bereaved(&self, lost: &[Lost], has_ended: bool) {
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

impl Open {
    /// Fails the channel in this process. The table is locked.
    fn fail(&self, verdict: &Verdict) {
        if self.channel.header().verdict.load(Ordering::Acquire) == 0 {
            verdict.propose(self.channel.header(), self.channel.state(self.rank), self.rank);
        }
    }

    /// The store is gone, and with it whoever had it, or else this process is cut off: nobody can be asked.
    fn fail_of(&self, lost: &[Lost]) {
        let is_here = |rank: &usize| {
            let life = self.channel.state(*rank).life.state.load(Ordering::Acquire);
            life != LIFE_LEFT && life != LIFE_PANICKED
        };
        let culprit = lost.iter().find_map(|lost| {
            let rank = self.members.iter().position(|member| *member == lost.rank).filter(is_here)?;
            Some((rank, lost.event))
        });
        if let Some((rank, event)) = culprit {
            let context = Context::of_last(self.channel.state(self.rank), self.rank);
            self.fail(&Verdict::Peer { rank, event, context });
        }
    }
}

#[cfg(test)]
mod tests;
