//! A warp's end of its lane in the FIFOs between GPUs (`gpu/kernels/fifo.cuh`).
//!
//! The words of slots and numbers are atomics. A volatile access of the kernel is relaxed where nothing but the word
//! counts (LL's words carry their flag), and acquires or releases where it orders others: the flag of a line that
//! arrives whole, and credits.

use super::warps::{Grid, pause};
use super::words::{AtomicU64, word};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

pub const MAX_RANKS: usize = 16;
/// Slots of a lane.
pub const DEPTH: u64 = 4;
/// Bytes of `Inbox`: what a rank's memory holds for one peer.
pub const INBOX: usize = 4_755_456;
/// Bytes of a lane's numbers: steps sent, received, known to be emptied by the peer, and the credit.
const NUMBERS: u64 = 32;
/// Bytes of a slot, in both protocols.
pub const SLOT: u64 = 1024;
/// Words of data in a line of LL128.
const LINE: usize = 15;

/// How data and flags share a slot.
#[derive(Debug)]
pub struct Protocol {
    /// Lanes of a pair.
    pub lanes: usize,
    /// Words of data in a step.
    pub words: usize,
    pub has_lines: bool,
    /// Where its FIFOs are in an inbox.
    pub start: u64,
}

/// 16 bytes: 4 of data, 4 of flag, 4 of data, 4 of flag.
pub static LL: Protocol = Protocol { lanes: 128, words: 64, has_lines: false, start: 0 };
/// Lines of 128 bytes: 120 of data and 8 of flag.
pub static LL128: Protocol =
    Protocol { lanes: 1024, words: 120, has_lines: true, start: LL.lanes as u64 * (NUMBERS + DEPTH * SLOT) };

const _: () = assert!(LL128.start + LL128.lanes as u64 * (NUMBERS + DEPTH * SLOT) == INBOX as u64);

/// The data of a step.
pub type Step = Vec<u64>;

/// The inboxes of each pair: this rank's for the peer, of those from `own` on, and the peer's for this rank.
pub fn pairs(
    own: u64,
    rank: usize,
    ranks: usize,
    remote: impl Fn(usize) -> u64,
) -> [Option<(u64, u64)>; MAX_RANKS] {
    std::array::from_fn(|peer| {
        let place = if peer < rank { peer } else { peer.saturating_sub(1) };
        (peer < ranks && peer != rank).then(|| (own + (place * INBOX) as u64, remote(peer)))
    })
}

impl Protocol {
    /// Bytes of data in a step.
    pub fn bytes(&self) -> usize {
        8 * self.words
    }

    /// A step of zeroes.
    pub fn step(&self) -> Step {
        vec![0; self.words]
    }

    fn numbers(&self, inbox: u64, lane: usize) -> [&'static AtomicU64; 4] {
        std::array::from_fn(|n| word(inbox + self.start + lane as u64 * NUMBERS + 8 * n as u64))
    }

    fn slot(&self, inbox: u64, lane: usize, step: u64) -> u64 {
        let slots = inbox + self.start + self.lanes as u64 * NUMBERS;
        slots + (lane as u64 * DEPTH + step % DEPTH) * SLOT
    }
}

/// A warp's end of its lane to and from every peer.
pub struct Lane<'a> {
    pub number: usize,
    pub protocol: &'static Protocol,
    pub is_aborted: bool,
    /// Steps sent and received in the calls before, and sent steps that the peer is known to have emptied; by peer.
    pub sent: [u64; MAX_RANKS],
    pub received: [u64; MAX_RANKS],
    pub acked: [u64; MAX_RANKS],
    /// What this rank's memory holds for each peer, and what theirs holds for this rank; `None` for itself.
    peers: [Option<(u64, u64)>; MAX_RANKS],
    grid: &'a Grid,
    /// What a flag of a message differs in; 0 for collectives.
    kind: u64,
}

impl<'a> Lane<'a> {
    pub fn begin(
        grid: &'a Grid,
        protocol: &'static Protocol,
        number: usize,
        peers: [Option<(u64, u64)>; MAX_RANKS],
    ) -> Lane<'a> {
        let lane = Lane::open(grid, protocol, number, peers);
        // What the calls before have emptied.
        (0..MAX_RANKS).for_each(|peer| lane.tell(peer, 0));
        lane
    }

    /// Reads the numbers.
    pub fn open(
        grid: &'a Grid,
        protocol: &'static Protocol,
        number: usize,
        peers: [Option<(u64, u64)>; MAX_RANKS],
    ) -> Lane<'a> {
        let none = [0; MAX_RANKS];
        let (sent, received, acked) = (none, none, none);
        let mut lane =
            Lane { number, protocol, is_aborted: false, sent, received, acked, peers, grid, kind: 0 };
        for (peer, (own, _)) in peers.iter().enumerate().filter_map(|(n, peer)| Some((n, (*peer)?))) {
            let [sent, received, acked, credit] = protocol.numbers(own, number);
            (lane.sent[peer], lane.received[peer]) = (sent.load(Relaxed), received.load(Relaxed));
            lane.acked[peer] = acked.load(Relaxed).max(credit.load(Acquire));
        }
        lane
    }

    /// The same for messages, whose flags differ in a bit.
    pub fn of_messages(self) -> Lane<'a> {
        Lane { kind: 1 << 63, ..self }
    }

    /// So many steps were sent to a peer, in a call of that direction only.
    pub fn end_sends(&self, peer: usize, sends: u64) {
        let Some((own, _)) = self.peers[peer] else { return };
        let [sent, _, acked, _] = self.protocol.numbers(own, self.number);
        sent.store(self.sent[peer] + sends, Relaxed);
        acked.store(self.acked[peer], Relaxed);
    }

    /// The same for what was received.
    pub fn end_receives(&self, peer: usize, receives: u64) {
        let Some((own, _)) = self.peers[peer] else { return };
        self.protocol.numbers(own, self.number)[1].store(self.received[peer] + receives, Relaxed);
    }

    /// So many steps were sent to a peer, and received from it.
    pub fn end(&self, peer: usize, sends: u64, receives: u64) {
        let Some((own, _)) = self.peers[peer] else { return };
        let [sent, received, acked, _] = self.protocol.numbers(own, self.number);
        sent.store(self.sent[peer] + sends, Relaxed);
        received.store(self.received[peer] + receives, Relaxed);
        acked.store(self.acked[peer], Relaxed);
    }

    /// Sends a peer the `nth` step of this call, counted from 1.
    pub async fn send(&mut self, to: usize, data: &Step, nth: u64) {
        let Some((_, remote)) = self.peers[to] else { return };
        let step = self.sent[to] + nth;
        if self.acked[to] + DEPTH < step {
            self.wait_for_credit(to, step - DEPTH).await;
        }
        let slot = self.protocol.slot(remote, self.number, step);
        self.protocol.put(self.grid, slot, data, step ^ self.kind);
        self.grid.has_changed();
    }

    /// Receives a peer's `nth` step of this call, counted from 1; false if the call is aborted.
    pub async fn receive(&mut self, from: usize, data: &mut Step, nth: u64) -> bool {
        let Some((own, _)) = self.peers[from] else { return false };
        let step = self.received[from] + nth;
        let slot = self.protocol.slot(own, self.number, step);
        while !self.protocol.get(slot, data, step ^ self.kind) {
            if self.look_for_abort() {
                return false;
            }
            pause().await;
        }
        self.grid.has_changed();
        true
    }

    /// The peer is known to have emptied so many of this call's steps, and all before.
    pub fn learn(&mut self, peer: usize, count: u64) {
        self.acked[peer] = self.acked[peer].max(self.sent[peer] + count);
    }

    /// Tells a peer that so many of its steps in this call have been emptied.
    pub fn tell(&self, peer: usize, count: u64) {
        let Some((_, remote)) = self.peers[peer] else { return };
        self.protocol.numbers(remote, self.number)[3].store(self.received[peer] + count, Release);
    }

    async fn wait_for_credit(&mut self, to: usize, needed: u64) {
        let Some((own, _)) = self.peers[to] else { return };
        loop {
            let told = self.protocol.numbers(own, self.number)[3].load(Acquire);
            self.acked[to] = self.acked[to].max(told);
            if self.acked[to] >= needed || self.look_for_abort() {
                return;
            }
            pause().await;
        }
    }

    fn look_for_abort(&mut self) -> bool {
        self.is_aborted |= self.grid.is_aborted();
        self.is_aborted
    }
}

/// The 32 bits that LL has of a flag: the highest one, too.
fn short(flag: u64) -> u64 {
    flag & 0xffff_ffff ^ flag >> 63 << 31
}

impl Protocol {
    /// Fills a slot. Its parts become visible in an order that changes.
    pub fn put(&self, grid: &Grid, slot: u64, data: &Step, flag: u64) {
        if self.has_lines {
            let lines = self.words / LINE;
            let first = grid.below(lines);
            for line in (first..lines).chain(0..first) {
                let start = slot + 128 * line as u64;
                for (n, value) in data[line * LINE..(line + 1) * LINE].iter().enumerate() {
                    word(start + 8 * n as u64).store(*value, Relaxed);
                }
                // A line arrives whole.
                word(start + 8 * LINE as u64).store(flag, Release);
            }
            return;
        }
        let flag = short(flag) << 32;
        let first = grid.below(data.len());
        for n in (first..data.len()).chain(0..first) {
            let (low, high) = (data[n] & 0xffff_ffff, data[n] >> 32);
            word(slot + 16 * n as u64 + 8).store(high | flag, Relaxed);
            word(slot + 16 * n as u64).store(low | flag, Relaxed);
        }
    }

    /// Reads a slot; false if it does not hold the step with this flag yet.
    pub fn get(&self, slot: u64, data: &mut Step, flag: u64) -> bool {
        if self.has_lines {
            return data.chunks_exact_mut(LINE).enumerate().all(|(line, words)| {
                let start = slot + 128 * line as u64;
                let is_there = word(start + 8 * LINE as u64).load(Acquire) == flag;
                let read = |n: usize| word(start + 8 * n as u64).load(Relaxed);
                words.iter_mut().enumerate().for_each(|(n, value)| *value = read(n));
                is_there
            });
        }
        data.iter_mut().enumerate().all(|(n, value)| {
            let (low, high) =
                (word(slot + 16 * n as u64).load(Acquire), word(slot + 16 * n as u64 + 8).load(Acquire));
            *value = low & 0xffff_ffff | high << 32;
            [low, high].iter().all(|half| half >> 32 == short(flag))
        })
    }
}
