//! A warp's exchange of steps with all peers (`Exchange` and `Once` in `gpu/kernels/collectives.cu`).

use super::lane::{Lane, MAX_RANKS, Protocol, Step, pairs};
use super::warps::Grid;

/// A peer's part of a kernel's arguments.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Peer {
    /// Of this rank, in the peer's memory.
    pub inbox: u64,
    /// The block for the peer, and where the peer's goes.
    pub send: u64,
    pub recv: u64,
    pub send_bytes: u64,
    pub recv_bytes: u64,
    /// Of the blocks, in all lanes.
    pub send_steps: u32,
    pub recv_steps: u32,
}

/// A kernel's arguments.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Arguments {
    /// Of the peers, in this rank's memory.
    pub own: u64,
    pub abort: u64,
    pub rank: u32,
    pub ranks: u32,
    pub op: u32,
    /// All peers get the same block, which is this rank's contribution.
    pub same: u32,
    /// Of a pre-multiplied sum: bits, or the address of the bits.
    pub factor: u64,
    pub factor_is_address: u32,
    /// No block has more steps than there are lanes.
    pub once: u32,
    pub peers: [Peer; MAX_RANKS],
}

impl Arguments {
    pub fn rank(&self) -> usize {
        self.rank as usize
    }

    pub fn ranks(&self) -> usize {
        self.ranks as usize
    }

    /// This rank's own block.
    pub fn own_block(&self) -> &Peer {
        &self.peers[self.rank()]
    }

    /// Ranks in rank order, beginning with one.
    pub fn after(&self, rank: usize) -> usize {
        if rank + 1 == self.ranks() { 0 } else { rank + 1 }
    }

    /// The inboxes of each pair: this rank's for the peer, and the peer's for this rank.
    pub fn inboxes(&self) -> [Option<(u64, u64)>; MAX_RANKS] {
        pairs(self.own, self.rank(), self.ranks(), |peer| self.peers[peer].inbox)
    }
}

/// The steps of a block that a lane has.
pub fn steps_of(protocol: &Protocol, total: u32, lane: usize) -> u64 {
    (total as usize).saturating_sub(lane).div_ceil(protocol.lanes) as u64
}

/// Where a lane's step begins in a block, in bytes.
pub fn start_of(protocol: &Protocol, index: u64, lane: usize) -> u64 {
    (index * protocol.lanes as u64 + lane as u64) * protocol.bytes() as u64
}

/// Reads a step of a block; zeroes after the block's end.
pub fn load_step(step: &mut Step, block: u64, bytes: u64, start: u64) {
    let there = bytes.saturating_sub(start).min(8 * step.len() as u64) as usize;
    step.fill(0);
    // SAFETY: so many bytes are left in the block, which the launch has checked.
    unsafe {
        std::ptr::copy_nonoverlapping((block + start) as *const u8, step.as_mut_ptr().cast::<u8>(), there);
    }
}

/// Writes a step of a block, up to the block's end.
pub fn store_step(step: &Step, block: u64, bytes: u64, start: u64) {
    let there = bytes.saturating_sub(start).min(8 * step.len() as u64) as usize;
    // SAFETY: as above.
    unsafe { std::ptr::copy_nonoverlapping(step.as_ptr().cast::<u8>(), (block + start) as *mut u8, there) }
}

/// The exchange of long operations, step by step: a lane has several of a block.
pub struct Exchange<'a> {
    pub arguments: &'a Arguments,
    pub lane: Lane<'a>,
    /// Steps to and from each peer.
    pub sends: [u64; MAX_RANKS],
    pub receives: [u64; MAX_RANKS],
    /// Steps to and from each before these.
    pub before: u64,
    /// The peer that is sent the next step, the step's index, and its data.
    to: usize,
    index: u64,
    next: Step,
}

impl<'a> Exchange<'a> {
    pub fn new(
        arguments: &'a Arguments,
        grid: &'a Grid,
        protocol: &'static Protocol,
        lane: usize,
    ) -> Exchange<'a> {
        let inboxes = arguments.inboxes();
        let steps = |peer: usize, total: u32| inboxes[peer].map_or(0, |_| steps_of(protocol, total, lane));
        Exchange {
            arguments,
            lane: Lane::begin(grid, protocol, lane, inboxes),
            sends: std::array::from_fn(|peer| steps(peer, arguments.peers[peer].send_steps)),
            receives: std::array::from_fn(|peer| steps(peer, arguments.peers[peer].recv_steps)),
            before: 0,
            to: arguments.rank(),
            index: 0,
            next: protocol.step(),
        }
    }

    /// How often the warp goes round.
    pub fn rounds(&self) -> u64 {
        self.sends.iter().chain(&self.receives).copied().max().unwrap_or(0)
    }

    /// Goes to the next step to be sent, and reads its data.
    fn advance(&mut self) {
        self.to = self.arguments.after(self.to);
        if self.to == self.arguments.rank() {
            self.to = self.arguments.after(self.to);
        }
        let peer = &self.arguments.peers[self.to];
        let start = start_of(self.lane.protocol, self.index, self.lane.number);
        load_step(&mut self.next, peer.send, peer.send_bytes, start);
    }

    /// Reads the data of the first step.
    pub fn prepare(&mut self) {
        self.index = 0;
        self.advance();
    }

    /// Sends every peer the step with this index, if it has one.
    pub async fn send(&mut self, i: u64) {
        for d in 1..self.arguments.ranks() {
            if i < self.sends[self.to] {
                self.lane.send(self.to, &self.next, self.before + i + 1).await;
            }
            self.index = if d + 1 == self.arguments.ranks() { i + 1 } else { i };
            self.advance();
        }
    }

    /// Receives a peer's step with this index.
    ///
    /// Where both ends send as much, its arrival says that the peer has emptied this rank's steps but two; otherwise a
    /// credit says so.
    pub async fn receive(&mut self, peer: usize, i: u64, data: &mut Step) -> bool {
        if !self.lane.receive(peer, data, self.before + i + 1).await {
            return false;
        }
        let expected = self.receives[peer];
        if expected == self.sends[peer] {
            self.lane.learn(peer, self.before + i.saturating_sub(1));
        } else if i + super::lane::DEPTH < expected + self.before {
            self.lane.tell(peer, self.before + i + 1);
        }
        true
    }

    pub fn end(&self) {
        if self.lane.is_aborted {
            return;
        }
        for peer in 0..self.arguments.ranks() {
            let all = |steps: u64| if steps > 0 { self.before + steps } else { 0 };
            self.lane.end(peer, all(self.sends[peer]), all(self.receives[peer]));
        }
    }
}

/// The exchange of short operations, where every lane has at most one step of a block.
pub struct Once<'a> {
    pub arguments: &'a Arguments,
    pub lane: Lane<'a>,
    /// Where the lane's step begins in a block.
    pub start: u64,
}

impl<'a> Once<'a> {
    /// Returns the first step that is sent, too.
    pub fn new(
        arguments: &'a Arguments,
        grid: &'a Grid,
        protocol: &'static Protocol,
        lane: usize,
    ) -> (Once<'a>, Step) {
        let (start, rank) = (start_of(protocol, 0, lane), arguments.rank());
        let first = &arguments.peers[if arguments.same != 0 { rank } else { arguments.after(rank) }];
        let mut step = protocol.step();
        load_step(&mut step, first.send, first.send_bytes, start);
        let lane = Lane::begin(grid, protocol, lane, arguments.inboxes());
        (Once { arguments, lane, start }, step)
    }

    /// Whether the lane has a step of a block.
    pub fn has(&self, steps: u32) -> bool {
        self.lane.number < steps as usize
    }

    /// Sends every peer its step, the first of which is in `step`.
    pub async fn send(&mut self, step: &mut Step) {
        let mut to = self.arguments.after(self.arguments.rank());
        for d in 1..self.arguments.ranks() {
            let peer = &self.arguments.peers[to];
            if d > 1 && self.arguments.same == 0 {
                load_step(step, peer.send, peer.send_bytes, self.start);
            }
            if self.has(peer.send_steps) {
                self.lane.send(to, step, 1).await;
            }
            to = self.arguments.after(to);
        }
    }

    pub fn end(&mut self) {
        for (number, peer) in self.arguments.peers.iter().enumerate().take(self.arguments.ranks()) {
            let (sends, receives) = (self.has(peer.send_steps), self.has(peer.recv_steps));
            // A peer that has sent has begun this call, so it has emptied what was before.
            if receives {
                self.lane.learn(number, 0);
            }
            if !self.lane.is_aborted {
                self.lane.end(number, u64::from(sends), u64::from(receives));
            }
        }
    }
}
