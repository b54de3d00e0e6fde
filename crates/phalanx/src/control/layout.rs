//! Memory layout of a communicator's channel: the part of the region its ranks share.
//!
//! A channel holds, for n ranks:
//! - a header with the failure, and a [`RankState`] for each rank: counters, records, futex;
//! - for each rank two *slots* (small operations, and the opening of every operation);
//! - for each rank three *rings* of chunks (contributions, results of two-phase reductions, one-way data);
//! - for each ordered pair of ranks a mailbox (messages).
//!
//! **Buffer swapping.** On some processors, reading a line moves its ownership to the reader's cache, and writing it again costs several
//! times a read. Each rank therefore writes into the buffers that it last read: after one pass, two neighbours swap halves. Lines that are
//! polled stay with their writers, since polling takes them away again in any case.
//!
//! The file is sparse: pages that were never touched cost nothing.

use super::flags::{Counter, Gate, NumberedWords, Park, StampedLine, StampedPair, StampedWord};
use super::tunables::*;
use crate::os::sync::Ordering;
use crate::os::sync::{AtomicU32, AtomicU64};
use crate::os::{LINE, Mapping};
use crate::types::{MAX_HOST_RANKS, MAX_RANKS};
use std::sync::Arc;

/// Slots of a rank. With two, a slot is written again two operations later. A rank that has completed the operation in between knows that
/// every peer has completed this one.
pub(crate) const SLOTS: usize = 2;

/// The rings of a rank. Its contributions to exchanges, in which all ranks write.
pub(crate) const CONTRIBUTIONS: usize = 0;
/// Its part of the results of two-phase reductions.
pub(crate) const RESULTS: usize = 1;
/// Its data for ranks that write nothing, as in a broadcast.
pub(crate) const ONE_WAY: usize = 2;
pub(crate) const RINGS: usize = 3;

/// The queues of a mailbox: full chunks on their way to the receiver, and empty chunks on their way back.
pub(crate) const FULL: usize = 0;
pub(crate) const EMPTY: usize = 1;
const QUEUES: usize = 2;

/// Bytes of a queue of `entries` words.
fn queue_len(entries: usize) -> usize {
    (entries * size_of::<StampedWord>()).next_multiple_of(2 * LINE)
}

/// The last calls of each rank that are kept for comparison.
pub(crate) const RECORDS: usize = 16;

/// 64-bit words of a failure: see `failure.rs`.
pub(crate) const FAILURE_WORDS: usize = 16 + MAX_RANKS / 64;

/// 64-bit words of a proposal in `shrink`.
pub(crate) const PROPOSAL_WORDS: usize = 1 + MAX_RANKS / 64;

/// The state of the whole channel.
#[repr(C, align(128))]
pub(crate) struct ChannelHeader {
    /// One more than the rank whose failure counts, or 0 without a failure. Set once.
    pub failure: AtomicU32,
    /// Number of ranks that have closed the channel.
    pub closed: AtomicU32,
    /// Whether a channel made by `shrink` counts (see `shrink.rs`).
    pub confirmed: AtomicU32,
    /// The last decided round of `shrink`, and the rank whose proposal it is.
    pub decided: AtomicU64,
}

/// State that one rank publishes. This rank is the only writer of everything but `park`.
#[repr(C, align(128))]
pub(crate) struct RankState {
    /// Chunks written to each ring.
    pub published: [Counter; RINGS],
    /// Operations completed.
    pub done_operation: Counter,
    /// Chunks of each ring that this rank has read from all its peers.
    pub done_chunk: [Counter; RINGS],
    pub park: Park,
    /// Set while this rank is inside a peer's memory: one for collectives, one for messages.
    pub gates: [Gate; 2],
    pub life: Life,
    /// The last calls, by their numbers, for comparison and error messages.
    pub records: [NumberedWords; RECORDS],
    /// The last two messages, for error messages.
    pub messages: [NumberedWords; 2],
    pub failure: [AtomicU64; FAILURE_WORDS],
    /// The peers to which this rank is about to send messages, and those from which it is about to receive. For control channels.
    pub greetings: [RankSet; 2],
    pub shrink: ShrinkWords,
}

impl RankState {
    /// The words of `greetings`.
    pub fn greeting_words(&self) -> impl Iterator<Item = &AtomicU64> {
        self.greetings.iter().flat_map(|set| &set.0)
    }
}

/// A set of ranks with one writer. Ranks are added and never removed.
#[repr(C)]
pub(crate) struct RankSet([AtomicU64; MAX_RANKS / 64]);

impl RankSet {
    /// Adds a rank; false if it was in the set.
    pub fn add(&self, rank: usize) -> bool {
        let (word, bit) = (&self.0[rank / 64], 1 << (rank % 64));
        let before = word.load(Ordering::Relaxed);
        word.store(before | bit, Ordering::Release);
        before & bit == 0
    }

    pub fn has(&self, rank: usize) -> bool {
        self.0[rank / 64].load(Ordering::Acquire) & 1 << (rank % 64) != 0
    }
}

/// One rank's part in a shrink: see `shrink.rs`.
#[repr(C, align(128))]
pub(crate) struct ShrinkWords {
    /// The round that this rank has joined.
    pub joined: AtomicU64,
    /// Its proposals in the last even and the last odd round: the new channel's id, and the set of its ranks.
    pub proposals: [[AtomicU64; PROPOSAL_WORDS]; 2],
}

/// A rank's process and whether it is alive.
#[repr(C, align(128))]
pub(crate) struct Life {
    /// One of the `LIFE_` values.
    pub state: AtomicU32,
    pub pid: AtomicU32,
    pub kernel_copy: KernelCopyWords,
}

/// Whether processes can read each other's private memory: see `endpoint/kernel_copy.rs`.
#[repr(C)]
pub(crate) struct KernelCopyWords {
    /// A random number of this process, and its address. Peers try to read it.
    pub mark: AtomicU64,
    pub mark_at: AtomicU64,
    /// 1 if this rank could read the marks of all its peers.
    pub reads_all: AtomicU32,
}

pub(crate) const LIFE_ACTIVE: u32 = 1;
pub(crate) const LIFE_LEFT: u32 = 2;
pub(crate) const LIFE_PANICKED: u32 = 3;
/// Left without taking part in the common shutdown.
pub(crate) const LIFE_ALONE: u32 = 4;

/// One rank's slot for one operation: its opening, and room for short data.
#[repr(C, align(128))]
pub(crate) struct Slot {
    pub opening: StampedPair,
    pub lines: [StampedLine; SLOT_LINES],
    bytes: Bytes,
}

/// Plain memory without a protocol of its own: stamps elsewhere say when its writer and its readers may touch it.
#[repr(C, align(64))]
struct Bytes(crate::os::sync::UnsafeCell<[u8; SLOT_BYTES]>);

/// One direction between two ranks.
#[repr(C, align(128))]
pub(crate) struct Mailbox {
    /// Number of messages that the receiver has taken. Written by the receiver.
    pub taken_messages: Counter,
    /// The messages' openings.
    slots: [StampedPair; MAIL_SLOTS],
}

impl Mailbox {
    /// The slot of message number `messages`, from 0.
    #[inline(always)]
    pub fn slot(&self, messages: u64) -> &StampedPair {
        &self.slots[messages as usize % MAIL_SLOTS]
    }
}

/// Sizes and offsets of a channel for a number of ranks: the same in every process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub ranks: usize,
    /// Chunks of each ring of a rank, and the bytes of each.
    pub ring_chunks: [usize; RINGS],
    pub chunk: [usize; RINGS],
    /// Bytes from one chunk to the next.
    stride: [usize; RINGS],
    /// Chunks for the messages of a pair of ranks, both directions together; bytes of each; and bytes of the shortest piece in which a chunk
    /// is filled.
    pub mail_chunks: usize,
    pub mail_chunk: usize,
    pub mail_piece: usize,
    mail_pieces: usize,
    states: usize,
    slots: usize,
    rings: [usize; RINGS],
    mailboxes: usize,
    mail_words: usize,
    mail_memory: usize,
    total: usize,
}

/// The owner of the memory, and the place in it, where `writer` puts its data for `reader` alone. A lap is one turn through all
/// chunks or slots. In odd laps the place is where `reader` put its data for `writer` in the lap before (buffer swapping).
#[inline(always)]
fn swapped(writer: usize, reader: usize, lap: usize) -> (usize, usize) {
    if lap % 2 == 1 { (reader, writer) } else { (writer, reader) }
}

/// Parts of different kinds begin at multiples of this.
const PAGE: usize = 4096;

impl Layout {
    pub fn new(ranks: usize) -> Layout {
        debug_assert!((1..=MAX_HOST_RANKS).contains(&ranks));
        let power = ranks.next_power_of_two();
        let piece = power * CHUNK_PER_RANK;
        let exchanged =
            if ranks <= 2 { EXCHANGE_CHUNK[1] } else { piece.clamp(EXCHANGE_CHUNK[0], EXCHANGE_CHUNK[1]) };
        let exchanged_chunks = (EXCHANGE_RING / exchanged).clamp(FEWEST_CHUNKS, MOST_CHUNKS);
        let one_way = piece.clamp(ONE_WAY_CHUNK[0], ONE_WAY_CHUNK[1]);
        let one_way_chunks = (ONE_WAY_RINGS / power).clamp(MOST_CHUNKS * one_way, ONE_WAY_RING) / one_way;
        let ring_chunks = [exchanged_chunks, exchanged_chunks, one_way_chunks];
        let chunk = [exchanged, exchanged, one_way];
        let stride = [exchanged + CHUNK_GAP, exchanged + CHUNK_GAP, one_way];
        let mail_piece = (MAIL_PIECES / power).clamp(MAIL_PIECE[0], MAIL_PIECE[1]);
        let mail_chunk = (MAIL_CHUNKS / power).clamp(mail_piece, MAIL_CHUNK);
        let mail_chunks =
            2 * (MAILBOXES / power).clamp(FEWEST_MAIL_CHUNKS * mail_chunk, ONE_WAY_RING) / mail_chunk;
        let states = size_of::<ChannelHeader>().next_multiple_of(PAGE);
        let slots = (states + ranks * size_of::<RankState>()).next_multiple_of(PAGE);
        let mut mailboxes = (slots + ranks * SLOTS * size_of::<Slot>()).next_multiple_of(PAGE);
        let rings = std::array::from_fn(|ring| {
            let start = mailboxes;
            mailboxes += ranks * ring_chunks[ring] * stride[ring];
            start
        });
        let mail_pieces = mail_chunks * (mail_chunk / mail_piece);
        let mail_words = (mailboxes + ranks * ranks * size_of::<Mailbox>()).next_multiple_of(PAGE);
        let mail_memory =
            (mail_words + ranks * ranks * QUEUES * queue_len(mail_pieces)).next_multiple_of(PAGE);
        let total = mail_memory + ranks * ranks * mail_chunks / 2 * mail_chunk;
        Layout {
            ranks,
            ring_chunks,
            chunk,
            stride,
            mail_chunks,
            mail_chunk,
            mail_piece,
            mail_pieces,
            states,
            slots,
            rings,
            mailboxes,
            mail_words,
            mail_memory,
            total,
        }
    }

    /// The layout among ranks that share no memory: states and slots, of which each process has a copy. Rings and mailboxes move data.
    pub fn without_data(ranks: usize) -> Layout {
        debug_assert!((1..=MAX_RANKS).contains(&ranks));
        let states = size_of::<ChannelHeader>().next_multiple_of(PAGE);
        let slots = (states + ranks * size_of::<RankState>()).next_multiple_of(PAGE);
        let total = (slots + ranks * SLOTS * size_of::<Slot>()).next_multiple_of(PAGE);
        Layout {
            ranks,
            ring_chunks: [0; RINGS],
            chunk: [0; RINGS],
            stride: [0; RINGS],
            mail_chunks: 0,
            mail_chunk: 0,
            mail_piece: 0,
            mail_pieces: 0,
            states,
            slots,
            rings: [total; RINGS],
            mailboxes: total,
            mail_words: total,
            mail_memory: total,
            total,
        }
    }

    /// The rank whose memory `rank` writes to in a lap, from 0: in odd laps its neighbour's (buffer swapping).
    #[inline(always)]
    fn owner(&self, rank: usize, lap: usize) -> usize {
        let neighbour = rank ^ 1;
        if lap % 2 == 1 && neighbour < self.ranks { neighbour } else { rank }
    }

    /// Bytes of the channel.
    pub fn total(&self) -> usize {
        self.total
    }
}

/// A mapped channel: typed access to its parts.
pub(crate) struct Channel {
    pub layout: Layout,
    memory: Arc<Mapping>,
}

impl Channel {
    /// # Safety
    /// The mapping starts with a channel of this layout: zeroes, or memory that other ranks use as such a channel. All parts are valid when
    /// zero.
    pub unsafe fn new(layout: Layout, memory: Arc<Mapping>) -> Channel {
        assert!(memory.len() >= layout.total, "a channel needs {} bytes", layout.total);
        assert_eq!(memory.as_ptr() as usize % PAGE, 0, "a channel starts at a page");
        Channel { layout, memory }
    }

    /// A second handle of the same channel.
    pub fn alias(&self) -> Channel {
        Channel { layout: self.layout, memory: self.memory.clone() }
    }

    /// # Safety
    /// A value of type `T`, made of atomics and of memory under their protocol, lies at `offset`.
    #[inline(always)]
    unsafe fn at<T>(&self, offset: usize) -> &T {
        debug_assert!(offset + size_of::<T>() <= self.layout.total);
        // SAFETY: in bounds by `Layout`, aligned because parts start at pages and are arrays; the mapping
        // lives as long as `self`.
        unsafe { &*self.memory.as_ptr().add(offset).cast::<T>() }
    }

    #[inline(always)]
    pub fn header(&self) -> &ChannelHeader {
        // SAFETY: the header lies at the start.
        unsafe { self.at(0) }
    }

    #[inline(always)]
    pub fn state(&self, rank: usize) -> &RankState {
        debug_assert!(rank < self.layout.ranks);
        // SAFETY: `states` is an array of one state per rank.
        unsafe { self.at(self.layout.states + rank * size_of::<RankState>()) }
    }

    #[inline(always)]
    pub fn slot(&self, rank: usize, sequence: u64) -> &Slot {
        debug_assert!(rank < self.layout.ranks);
        let index = rank * SLOTS + (sequence as usize % SLOTS);
        // SAFETY: `slots` is an array of SLOTS slots per rank.
        unsafe { self.at(self.layout.slots + index * size_of::<Slot>()) }
    }

    /// Address of the plain bytes in a slot that `writer` fills for all its readers. The slot's opening says when readers may touch them, and
    /// the readers' `done_operation` when the writer may.
    #[inline(always)]
    pub fn slot_bytes(&self, writer: usize, sequence: u64) -> *mut u8 {
        let owner = self.layout.owner(writer, sequence as usize / SLOTS);
        self.bytes_of(owner, sequence)
    }

    /// Address of the piece of these bytes, `bytes` long, that `writer` fills for `reader` alone.
    #[inline(always)]
    pub fn slot_piece(&self, writer: usize, reader: usize, sequence: u64, bytes: usize) -> *mut u8 {
        debug_assert!(self.layout.ranks * bytes <= SLOT_BYTES);
        let (owner, place) = swapped(writer, reader, sequence as usize / SLOTS);
        self.bytes_of(owner, sequence).wrapping_add(place * bytes)
    }

    #[inline(always)]
    fn bytes_of(&self, owner: usize, sequence: u64) -> *mut u8 {
        self.slot(owner, sequence).bytes.0.with_mut(|bytes| bytes.cast())
    }

    /// Address of a chunk that `writer` fills for all its readers. Its `published` says when readers may touch it, and their `done_chunk` when
    /// the writer may.
    #[inline(always)]
    pub fn ring_chunk(&self, writer: usize, ring: usize, number: u64) -> *mut u8 {
        let owner = self.layout.owner(writer, self.lap(ring, number));
        self.chunk_of(owner, ring, number)
    }

    /// Address of the piece of a chunk, `bytes` long, that `writer` fills for `reader` alone. The two swap pieces after each lap.
    #[inline(always)]
    pub fn ring_piece(
        &self,
        writer: usize,
        reader: usize,
        ring: usize,
        number: u64,
        bytes: usize,
    ) -> *mut u8 {
        debug_assert!(reader < self.layout.ranks && self.layout.ranks * bytes <= self.layout.chunk[ring]);
        let (owner, place) = swapped(writer, reader, self.lap(ring, number));
        self.chunk_of(owner, ring, number).wrapping_add(place * bytes)
    }

    /// How often all chunks of a ring were used before chunk `number`. Rings with one writer are not swapped: always 0.
    #[inline(always)]
    fn lap(&self, ring: usize, number: u64) -> usize {
        if ring == ONE_WAY { 0 } else { number as usize / self.layout.ring_chunks[ring] }
    }

    /// Address of a chunk in a rank's memory.
    #[inline(always)]
    pub fn chunk_of(&self, owner: usize, ring: usize, number: u64) -> *mut u8 {
        debug_assert!(owner < self.layout.ranks && ring < RINGS);
        let (chunks, stride) = (self.layout.ring_chunks[ring], self.layout.stride[ring]);
        let index = owner * chunks + number as usize % chunks;
        // SAFETY: at each of `rings` is an array of that ring's chunks per rank.
        unsafe { self.memory.as_ptr().add(self.layout.rings[ring] + index * stride) }
    }

    #[inline(always)]
    pub fn mailbox(&self, from: usize, to: usize) -> &Mailbox {
        debug_assert!(from < self.layout.ranks && to < self.layout.ranks);
        let index = from * self.layout.ranks + to;
        // SAFETY: `mailboxes` is an array of n × n mailboxes.
        unsafe { self.at(self.layout.mailboxes + index * size_of::<Mailbox>()) }
    }

    /// A word of one of a mailbox's queues.
    #[inline(always)]
    pub fn mail_word(&self, from: usize, to: usize, queue: usize, number: u64) -> &StampedWord {
        debug_assert!(from < self.layout.ranks && to < self.layout.ranks && queue < QUEUES);
        let Layout { ranks, mail_pieces, mail_words, .. } = self.layout;
        let queue = (from * ranks + to) * QUEUES + queue;
        let place = number as usize % mail_pieces * size_of::<StampedWord>();
        // SAFETY: `mail_words` is an array of QUEUES queues per pair, each of a word for every piece of a chunk.
        unsafe { self.at(mail_words + queue * queue_len(mail_pieces) + place) }
    }

    /// Address of one of the chunks that two ranks share for messages. Each chunk is in the hands of one of them: see `chunks.rs` of the host
    /// backend.
    #[inline(always)]
    pub fn mail_chunk(&self, one: usize, other: usize, chunk: u16) -> *mut u8 {
        debug_assert!(one < self.layout.ranks && other < self.layout.ranks);
        let Layout { ranks, mail_chunks, mail_chunk, mail_memory, .. } = self.layout;
        let (low, high) = (one.min(other), one.max(other));
        let (chunk, half) = (usize::from(chunk), mail_chunks / 2);
        let (first, second) = (low * ranks + high, high * ranks + low);
        let index = if chunk < half { first * half + chunk } else { second * half + chunk - half };
        // SAFETY: `mail_memory` is an array of half the chunks of a pair for each order of its ranks.
        unsafe { self.memory.as_ptr().add(mail_memory + index * mail_chunk) }
    }
}

const _: () = assert!(size_of::<StampedLine>() == LINE && size_of::<StampedPair>() == 2 * LINE);
const _: () = assert!(std::mem::offset_of!(Slot, opening) % (2 * LINE) == 0);
const _: () = assert!(std::mem::offset_of!(Mailbox, slots) % (2 * LINE) == 0);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_do_not_overlap() {
        for ranks in [1, 2, 3, 7, 16, 64, MAX_HOST_RANKS] {
            let layout = Layout::new(ranks);
            assert!(layout.states >= size_of::<ChannelHeader>());
            assert!(layout.slots >= layout.states + ranks * size_of::<RankState>());
            assert!(layout.rings[0] >= layout.slots + ranks * SLOTS * size_of::<Slot>());
            let ends = [layout.rings[1], layout.rings[2], layout.mailboxes];
            for (ring, end) in ends.into_iter().enumerate() {
                assert!(end >= layout.rings[ring] + ranks * layout.ring_chunks[ring] * layout.stride[ring]);
            }
            assert!(layout.mail_words >= layout.mailboxes + ranks * ranks * size_of::<Mailbox>());
            let words = ranks * ranks * QUEUES * layout.mail_pieces * size_of::<StampedWord>();
            assert!(layout.mail_memory >= layout.mail_words + words);
            assert!(layout.chunk.iter().all(|chunk| chunk % (64 * ranks.next_power_of_two()) == 0));
            assert!(layout.ring_chunks.iter().all(|chunks| *chunks >= FEWEST_CHUNKS));
            assert!(layout.mail_chunks >= 2 * FEWEST_MAIL_CHUNKS);
        }
    }
}
