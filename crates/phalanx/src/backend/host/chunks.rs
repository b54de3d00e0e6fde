//! Chunks of memory that long messages go through, and that change hands with them.
//!
//! Each of two ranks begins with half of their chunks. A sender fills one, publishes it piece by piece, and gives it away. The receiver empties
//! it and keeps it for a message of its own: a rank writes best where it has just read, since its core owns the lines (`layout.rs`). A rank
//! that receives more than it sends gives the oldest back, so that a sender never loses more than half of its chunks for good.

use crate::control::layout::{Channel, EMPTY, FULL};
use std::collections::VecDeque;

/// The chunks of one rank, of those that it shares with a peer.
pub(crate) struct Chunks {
    rank: usize,
    peer: usize,
    /// Chunks that it has emptied, the last one last.
    warm: VecDeque<u16>,
    /// Chunks that it had from the beginning or got back.
    cold: VecDeque<u16>,
    /// Chunks that it keeps, at most.
    most: usize,
    /// Entries of the queues so far: written and read, of full chunks and of empty ones.
    written: [u64; 2],
    read: [u64; 2],
}

impl Chunks {
    /// Chunks of `rank` before its first message with `peer`, of so many that both share.
    pub fn new(rank: usize, peer: usize, chunks: usize) -> Chunks {
        let half = chunks as u16 / 2;
        let mut cold = VecDeque::with_capacity(chunks);
        cold.extend(if rank <= peer { 0..half } else { half..2 * half });
        let warm = VecDeque::with_capacity(chunks);
        Chunks { rank, peer, warm, cold, most: chunks / 4 * 3, written: [0; 2], read: [0; 2] }
    }

    /// One to fill, if there is one: it is the receiver's who finds it in the queue, or named in a message's opening.
    #[inline]
    pub fn take(&mut self, channel: &Channel) -> Option<u16> {
        let own = self.warm.pop_back().or_else(|| self.cold.pop_front());
        own.or_else(|| self.arrived(channel, EMPTY))
    }

    /// Publishes a chunk to the peer: it is full, or has one piece more.
    #[inline]
    pub fn give(&mut self, channel: &Channel, chunk: u16) {
        self.write(channel, FULL, chunk);
    }

    /// The chunk of the peer's next piece.
    #[inline]
    pub fn full(&mut self, channel: &Channel) -> Option<u16> {
        self.arrived(channel, FULL)
    }

    /// Keeps one that this rank has emptied.
    #[inline]
    pub fn keep(&mut self, channel: &Channel, chunk: u16) {
        self.warm.push_back(chunk);
        // The peer counts those that it has given back as this rank's.
        while let Some(empty) = self.arrived(channel, EMPTY) {
            self.cold.push_back(empty);
        }
        if self.warm.len() + self.cold.len() > self.most
            && let Some(oldest) = self.warm.pop_front()
        {
            self.write(channel, EMPTY, oldest);
        }
    }

    /// Entries that both ranks have written so far.
    pub fn moved(&self) -> u64 {
        self.written.iter().chain(&self.read).sum()
    }

    fn write(&mut self, channel: &Channel, queue: usize, chunk: u16) {
        self.written[queue] += 1;
        let number = self.written[queue];
        channel.mail_word(self.rank, self.peer, queue, number).put(number, chunk);
    }

    #[inline]
    fn arrived(&mut self, channel: &Channel, queue: usize) -> Option<u16> {
        let number = self.read[queue] + 1;
        let chunk = channel.mail_word(self.peer, self.rank, queue, number).get(number)?;
        self.read[queue] = number;
        Some(chunk)
    }
}
