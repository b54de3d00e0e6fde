//! Where everything lies in a communicator's channel: the part of the region its ranks share.
//!
//! A channel holds, for n ranks:
//! - a header with the verdict, and a [`RankState`] for each rank: its counters, its records, its sleep;
//! - for each rank two *slots* (small operations, and the opening of every operation);
//! - for each rank two *rings* of chunks (contributions, and results of two-phase reductions);
//! - for each ordered pair of ranks a mailbox (messages).
//!
//! The file is sparse: pages that were never touched cost nothing.

use super::protocol::{Counter, Gate, LINE, NumberedWords, Park, StampedLine};
use crate::os::Mapping;
#[cfg(feature = "cuda")]
use crate::sync::Ordering;
use crate::sync::{AtomicU32, AtomicU64};
use std::sync::Arc;

/// The most ranks of one region.
pub(crate) const MAX_RANKS: usize = 512;

/// Slots of a rank. With two, an operation's slot is written again two operations later, and a rank that
/// has completed the one in between has heard that every peer completed this one.
pub(super) const SLOTS: usize = 2;

/// Stamped lines of a slot behind its opening line.
pub(super) const SLOT_LINES: usize = 144;

/// Plain bytes of a slot behind its lines.
pub(super) const SLOT_BYTES: usize = 8 << 10;

/// A block travels in stamped lines if it needs no more than this. They spare the reader a second wait, but
/// a reader that polls lines takes them away from the writer: with more, plain bytes and one stamp win.
pub(super) const FEW_LINES: usize = 9;

/// Bytes of a ring, among few ranks. Its reader takes a copy of every line into its core's cache, from which the writer has to
/// take it back when its turn comes again; in a ring larger than that cache it finds the line in the one that both share.
const RING_BYTES: usize = 2 << 20;

/// All rings of a kind together, and the rings of a rank's mailboxes: each shrinks as the ranks grow.
const RINGS_BYTES: usize = 64 << 20;
const MAIL_RINGS_BYTES: usize = 8 << 20;

/// The fewest chunks of a ring, and of a mailbox's: with fewer, its writer waits for its readers.
const FEWEST_CHUNKS: usize = 8;
const FEWEST_MAIL_CHUNKS: usize = 4;

/// Message slots of a mailbox: a sender looks how many are free when it has filled them, since looking takes the word away from the
/// receiver.
pub(super) const MAIL_SLOTS: usize = 16;

/// Remembered calls of each rank.
pub(super) const RECORDS: usize = 16;

/// Words of a verdict: see `verdict.rs`.
pub(super) const VERDICT_WORDS: usize = 16 + MAX_RANKS / 64;

/// Words of a proposal.
pub(super) const PROPOSAL_WORDS: usize = 1 + MAX_RANKS / 64;

/// What the whole channel shares.
#[repr(C, align(128))]
pub(super) struct ChannelHeader {
    /// 0, or one more than the rank whose verdict counts. Set once.
    pub verdict: AtomicU32,
    /// Ranks that have had the channel open and have closed it.
    pub closed: AtomicU32,
    /// Of a channel made by `shrink`: whether it counts (see `shrink.rs`).
    pub confirmed: AtomicU32,
    /// The last round of `shrink` that is decided, and by whom.
    pub decided: AtomicU64,
}

/// What one rank tells about itself. Everything has this rank as its only writer, but `park`.
#[repr(C, align(128))]
pub(super) struct RankState {
    /// Chunks written to each ring.
    pub published: [Counter; 2],
    /// Operations completed.
    pub done_operation: Counter,
    /// Chunks of each ring that this rank has read from everyone.
    pub done_chunk: [Counter; 2],
    pub park: Park,
    /// Inside a peer's memory: from a collective, from a message.
    pub gates: [Gate; 2],
    pub life: Life,
    /// Its calls, as it announces them, by their number: for comparison and for error messages.
    pub records: [NumberedWords; RECORDS],
    /// Messages, as far as errors tell of them: the last and the one before.
    pub messages: [NumberedWords; 2],
    pub verdict: [AtomicU64; VERDICT_WORDS],
    /// Of a witness: the peers to whom, and from whom, this rank is about to move messages.
    pub greetings: [RankSet; 2],
    pub shrink: ShrinkWords,
}

impl RankState {
    /// The words of `greetings`.
    pub fn greeting_words(&self) -> impl Iterator<Item = &AtomicU64> {
        self.greetings.iter().flat_map(|set| &set.0)
    }
}

/// A set of ranks that only grows, and has one writer.
#[repr(C)]
pub(super) struct RankSet([AtomicU64; MAX_RANKS / 64]);

#[cfg(feature = "cuda")]
impl RankSet {
    /// False if it was there.
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

/// One rank's part in the agreement on who goes on: see `shrink.rs`.
#[repr(C, align(128))]
pub(super) struct ShrinkWords {
    /// The round this rank has come to.
    pub joined: AtomicU64,
    /// What it proposed in the last round with an even and with an odd number: the new channel's id, and the set
    /// of its ranks.
    pub proposals: [[AtomicU64; PROPOSAL_WORDS]; 2],
}

/// Who a rank is and whether it is there.
#[repr(C, align(128))]
pub(super) struct Life {
    /// One of the `LIFE_` values.
    pub state: AtomicU32,
    pub pid: AtomicU32,
}

pub(super) const LIFE_ACTIVE: u32 = 1;
pub(super) const LIFE_LEFT: u32 = 2;
pub(super) const LIFE_PANICKED: u32 = 3;
/// Left, and not there for what ends all together.
pub(super) const LIFE_ALONE: u32 = 4;

/// One rank's part of one small operation: the line that opens it, and where its data goes.
#[repr(C, align(64))]
pub(super) struct Slot {
    pub opening: StampedLine,
    pub lines: [StampedLine; SLOT_LINES],
    bytes: Bytes,
}

/// Plain memory between its writer and its readers, which know from a stamp when they may touch it.
#[repr(C, align(64))]
struct Bytes(crate::sync::UnsafeCell<[u8; SLOT_BYTES]>);

impl Slot {
    /// Address of the plain bytes.
    pub fn bytes(&self) -> *mut u8 {
        self.bytes.0.with_mut(|bytes| bytes.cast())
    }
}

/// A message's opening, and where the data of a short one goes.
#[repr(C, align(64))]
pub(super) struct MailSlot {
    pub opening: StampedLine,
    pub lines: [StampedLine; FEW_LINES],
}

/// One direction between two ranks.
#[repr(C, align(128))]
pub(super) struct Mailbox {
    /// Messages the receiver has taken. Written by the receiver.
    pub taken_messages: Counter,
    /// Chunks the receiver has taken. Written by the receiver.
    pub taken_chunks: Counter,
    /// Chunks the sender has written, as of the last message that needed more than one.
    pub sent_chunks: Counter,
    pub slots: [MailSlot; MAIL_SLOTS],
}

/// Sizes and offsets of a channel for a number of ranks: the same in every process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    pub ranks: usize,
    /// Chunks of a rank's ring, and the bytes of each.
    pub ring_chunks: usize,
    pub chunk: usize,
    /// The same of a mailbox's ring.
    pub mail_chunks: usize,
    pub mail_chunk: usize,
    states: usize,
    slots: usize,
    rings: usize,
    mailboxes: usize,
    mail_rings: usize,
    total: usize,
}

/// Offsets of parts that are not of the same kind keep to pages.
const PAGE: usize = 4096;

impl Layout {
    pub fn new(ranks: usize) -> Layout {
        debug_assert!((1..=MAX_RANKS).contains(&ranks));
        let power = ranks.next_power_of_two();
        // Steps of a scattering operation move chunk/n bytes to each peer: keep that from getting small.
        let chunk = (power * 2048).clamp(32 << 10, 128 << 10);
        let ring_chunks = (RINGS_BYTES / power).clamp(FEWEST_CHUNKS * chunk, RING_BYTES) / chunk;
        // Mailboxes are n².
        let mail_chunk = ((1 << 20) / power).clamp(4 << 10, 16 << 10);
        let mail_chunks =
            (MAIL_RINGS_BYTES / power).clamp(FEWEST_MAIL_CHUNKS * mail_chunk, RING_BYTES) / mail_chunk;
        let states = size_of::<ChannelHeader>().next_multiple_of(PAGE);
        let slots = (states + ranks * size_of::<RankState>()).next_multiple_of(PAGE);
        let rings = (slots + ranks * SLOTS * size_of::<Slot>()).next_multiple_of(PAGE);
        let mailboxes = rings + ranks * 2 * ring_chunks * chunk;
        let mail_rings = (mailboxes + ranks * ranks * size_of::<Mailbox>()).next_multiple_of(PAGE);
        let total = mail_rings + ranks * ranks * mail_chunks * mail_chunk;
        Layout {
            ranks,
            ring_chunks,
            chunk,
            mail_chunks,
            mail_chunk,
            states,
            slots,
            rings,
            mailboxes,
            mail_rings,
            total,
        }
    }

    /// Bytes of the channel.
    pub fn total(&self) -> usize {
        self.total
    }
}

/// A mapped channel: typed access to its parts.
pub(super) struct Channel {
    pub layout: Layout,
    memory: Arc<Mapping>,
}

impl Channel {
    /// # Safety
    /// The mapping starts with a channel of this layout: fresh zeroes, or memory that other ranks use as
    /// one. All parts are valid when zero.
    pub unsafe fn new(layout: Layout, memory: Arc<Mapping>) -> Channel {
        assert!(memory.len() >= layout.total, "a channel needs {} bytes", layout.total);
        assert_eq!(memory.as_ptr() as usize % PAGE, 0, "a channel starts at a page");
        Channel { layout, memory }
    }

    /// The same channel once more.
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

    /// Address of a ring's chunk. Who may touch it when is told by `published` and `done_chunk`.
    #[inline(always)]
    pub fn ring_chunk(&self, rank: usize, ring: usize, number: u64) -> *mut u8 {
        debug_assert!(rank < self.layout.ranks && ring < 2);
        let Layout { ring_chunks, chunk, rings, .. } = self.layout;
        let index = (rank * 2 + ring) * ring_chunks + (number as usize % ring_chunks);
        // SAFETY: `rings` is an array of 2 × `ring_chunks` chunks per rank.
        unsafe { self.memory.as_ptr().add(rings + index * chunk) }
    }

    #[inline(always)]
    pub fn mailbox(&self, from: usize, to: usize) -> &Mailbox {
        debug_assert!(from < self.layout.ranks && to < self.layout.ranks);
        let index = from * self.layout.ranks + to;
        // SAFETY: `mailboxes` is an array of n × n mailboxes.
        unsafe { self.at(self.layout.mailboxes + index * size_of::<Mailbox>()) }
    }

    /// Address of a mailbox ring's chunk. Who may touch it when is told by the mailbox's counters.
    #[inline(always)]
    pub fn mail_chunk(&self, from: usize, to: usize, number: u64) -> *mut u8 {
        debug_assert!(from < self.layout.ranks && to < self.layout.ranks);
        let Layout { ranks, mail_chunks, mail_chunk, mail_rings, .. } = self.layout;
        let index = (from * ranks + to) * mail_chunks + (number as usize % mail_chunks);
        // SAFETY: `mail_rings` is an array of `mail_chunks` chunks per pair.
        unsafe { self.memory.as_ptr().add(mail_rings + index * mail_chunk) }
    }
}

const _: () = assert!(size_of::<StampedLine>() == LINE);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_do_not_overlap() {
        for ranks in [1, 2, 3, 7, 16, 64, MAX_RANKS] {
            let layout = Layout::new(ranks);
            assert!(layout.states >= size_of::<ChannelHeader>());
            assert!(layout.slots >= layout.states + ranks * size_of::<RankState>());
            assert!(layout.rings >= layout.slots + ranks * SLOTS * size_of::<Slot>());
            assert!(layout.mailboxes >= layout.rings + ranks * 2 * layout.ring_chunks * layout.chunk);
            assert!(layout.mail_rings >= layout.mailboxes + ranks * ranks * size_of::<Mailbox>());
            assert_eq!(layout.chunk % (64 * ranks.next_power_of_two()), 0);
            assert!(layout.ring_chunks >= FEWEST_CHUNKS && layout.mail_chunks >= FEWEST_MAIL_CHUNKS);
        }
    }
}
