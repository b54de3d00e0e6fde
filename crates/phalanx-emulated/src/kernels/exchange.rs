//! A warp's exchange of steps with all peers (`Exchange` in `gpu/kernels/collectives.cu`).

use super::lane::{DEPTH, Lane, MAX_RANKS, Protocol, Step, pairs};
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
    /// All ranks get the same block.
    pub same: u32,
    /// Of a pre-multiplied sum: bits, or the address of the bits.
    pub factor: u64,
    pub factor_is_address: u32,
    /// Of the longest block.
    pub steps: u32,
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

/// An exchange in rounds: in round i, every rank sends step i + 1 to all before it receives step i from all. The kernels have another form for
/// a single step (`Once`), which is not emulated: it leaves the same numbers.
pub struct Exchange<'a> {
    pub arguments: &'a Arguments,
    pub lane: Lane<'a>,
    /// Steps to and from each peer.
    pub sends: [u64; MAX_RANKS],
    pub receives: [u64; MAX_RANKS],
    /// Steps to and from each before these.
    pub before: u64,
    /// How often the warp goes round.
    pub rounds: u64,
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
            rounds: steps_of(protocol, arguments.steps, lane),
            next: protocol.step(),
        }
    }

    /// Where the lane's step of a round begins in a block.
    pub fn start(&self, i: u64) -> u64 {
        start_of(self.lane.protocol, i, self.lane.number)
    }

    /// The other ranks, in rank order.
    pub fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.arguments.rank();
        (0..self.arguments.ranks()).filter(move |peer| *peer != rank)
    }

    /// Sends step i to the peers that get one, as the `nth` of this call.
    pub async fn send(&mut self, i: u64, nth: u64) {
        let mut to = self.arguments.rank();
        for _ in self.peers() {
            to = self.arguments.after(to);
            if i < self.sends[to] {
                let (peer, start) = (&self.arguments.peers[to], self.start(i));
                load_step(&mut self.next, peer.send, peer.send_bytes, start);
                self.lane.send(to, &self.next, nth).await;
            }
        }
    }

    /// Step i of all has arrived and been read.
    ///
    /// Where both ends send as much, that says that the peer has emptied this rank's steps but two; otherwise a credit says so.
    pub fn emptied(&mut self, i: u64) {
        for peer in self.peers() {
            let (sends, receives) = (self.sends[peer], self.receives[peer]);
            if i < receives {
                // Who has sent has begun this call, so it has emptied what was before.
                let known = if sends == receives { self.before + i.saturating_sub(1) } else { 0 };
                self.lane.learn(peer, known);
                if sends != receives && i + DEPTH < self.before + receives {
                    self.lane.tell(peer, self.before + i + 1);
                }
            }
        }
    }

    /// Every peer is known to have emptied so many steps of this call.
    pub fn learn(&mut self, count: u64) {
        self.peers().for_each(|peer| self.lane.learn(peer, count));
    }

    pub fn end(&self) {
        if self.lane.is_aborted {
            return;
        }
        for peer in self.peers() {
            let all = |steps: u64| if steps > 0 { self.before + steps } else { 0 };
            self.lane.end(peer, all(self.sends[peer]), all(self.receives[peer]));
        }
    }
}
