//! What a warp does for messages.

use super::exchange::{load_step, store_step};
use super::lane::{DEPTH, Lane, MAX_RANKS, Protocol};
use super::warps::Grid;

/// Most messages, and most parts.
pub const MOST: usize = 32;

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Message {
    pub buffer: u64,
    pub bytes: u64,
}

/// The messages to a peer, or from it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Part {
    pub remote: u64,
    pub own: u64,
    pub first: u32,
    pub count: u32,
    pub sends: u32,
    pub unused: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Arguments {
    pub abort: u64,
    pub lanes: u64,
    pub parts: [Part; MOST],
    pub messages: [Message; MOST],
}

impl Arguments {
    pub fn messages(&self, part: &Part) -> &[Message] {
        &self.messages[part.first as usize..][..part.count as usize]
    }
}

/// The steps of a message that one of so many lanes has, and where one begins.
fn steps_of(protocol: &Protocol, bytes: u64, lane: usize, lanes: u64) -> u64 {
    bytes.div_ceil(protocol.bytes() as u64).saturating_sub(lane as u64).div_ceil(lanes)
}

fn start_of(protocol: &Protocol, index: u64, lane: usize, lanes: u64) -> u64 {
    (index * lanes + lane as u64) * protocol.bytes() as u64
}

/// What a warp does: the one peer has the number 0.
pub async fn share(a: &Arguments, grid: &Grid, part: &Part, protocol: &'static Protocol, number: usize) {
    let mut pairs = [None; MAX_RANKS];
    pairs[0] = Some((part.own, part.remote));
    let mut lane = Lane::open(grid, protocol, number, pairs).of_messages();
    let mut step = protocol.step();
    let (mut nth, messages) = (0, a.messages(part));
    let rest: u64 = messages.iter().map(|message| steps_of(protocol, message.bytes, number, a.lanes)).sum();
    if part.sends == 0 {
        lane.tell(0, 0);
    }
    for message in messages {
        for i in 0..steps_of(protocol, message.bytes, number, a.lanes) {
            let start = start_of(protocol, i, number, a.lanes);
            nth += 1;
            if part.sends != 0 {
                load_step(&mut step, message.buffer, message.bytes, start);
                lane.send(0, &step, nth).await;
                if lane.is_aborted {
                    return;
                }
                continue;
            }
            if !lane.receive(0, &mut step, nth).await {
                return;
            }
            // The next call tells of the last ones.
            if nth + DEPTH <= rest {
                lane.tell(0, nth);
            }
            store_step(&step, message.buffer, message.bytes, start);
        }
    }
    if part.sends != 0 { lane.end_sends(0, nth) } else { lane.end_receives(0, nth) }
}
