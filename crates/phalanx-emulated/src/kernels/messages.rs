//! Messages (`gpu/kernels/messages.cu`): each direction of each pair has warps of its own.

use super::exchange::{load_step, store_step};
use super::lane::{DEPTH, INBOX, LL, LL128, Lane, MAX_RANKS, Protocol};
use super::launch::parameter;
use super::warps::{Grid, Warp};
use crate::base::call::Code;
use crate::base::pointers::In;
use crate::base::violation::violation;
use crate::cuda::error::INVALID_VALUE;
use crate::cuda::memory::{GARBAGE, Range, When};
use crate::cuda::work::{Plain, Work};
use std::ffi::{c_uint, c_void};
use std::sync::Arc;

const FUNCTION: &str = "cuLaunchKernel";
const WARP: c_uint = 32;
/// Most threads of a block.
const THREADS: c_uint = 256;
/// Most messages, and most parts.
const MOST: usize = 32;

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Message {
    buffer: u64,
    bytes: u64,
}

/// The messages to a peer, or from it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Part {
    remote: u64,
    own: u64,
    first: u32,
    count: u32,
    sends: u32,
    unused: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Arguments {
    abort: u64,
    lanes: u64,
    parts: [Part; MOST],
    messages: [Message; MOST],
}

impl Arguments {
    fn messages(&self, part: &Part) -> &[Message] {
        &self.messages[part.first as usize..][..part.count as usize]
    }

    /// Memory that the kernel uses.
    fn check(&self, parts: usize, when: When) {
        let range = |role, address, len| Range { function: FUNCTION, role, address, len };
        range("the kernel's abort word", self.abort, 4).check(when);
        for part in &self.parts[..parts] {
            range("the kernel's inbox", part.own, INBOX).check(when);
            range("the kernel's inbox at a peer", part.remote, INBOX).check(when);
            let role =
                if part.sends == 0 { "the kernel's receive buffer" } else { "the kernel's send buffer" };
            for message in self.messages(part) {
                range(role, message.buffer, message.bytes as usize).check(when);
            }
        }
    }

    /// Fills what is received with garbage, unless it is sent, too.
    fn spoil(&self, parts: usize) {
        let ranges = |sends| {
            let wanted = self.parts[..parts].iter().filter(move |part| (part.sends != 0) == sends);
            wanted.flat_map(|part| self.messages(part)).map(|message| Range {
                function: FUNCTION,
                role: "",
                address: message.buffer,
                len: message.bytes as usize,
            })
        };
        for received in ranges(false) {
            if !ranges(true).any(|sent| received.overlaps(&sent)) {
                received.write(&vec![GARBAGE; received.len]);
            }
        }
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
async fn share(a: &Arguments, grid: &Grid, part: &Part, protocol: &'static Protocol, number: usize) {
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

/// The work of a launch, if there is such a kernel.
pub fn work(
    name: &str,
    grid: [c_uint; 3],
    threads: [c_uint; 3],
    parameters: In<*mut c_void>,
) -> Option<Result<Arc<dyn Work>, Code>> {
    let protocol = match name.strip_prefix("phalanx_messages_")? {
        "ll" => &LL,
        "ll128" => &LL128,
        _ => return None,
    };
    let parts = grid[1] as usize;
    if grid[2] != 1 || threads[1..] != [1, 1] || threads[0] > THREADS || !threads[0].is_multiple_of(WARP) {
        return Some(Err(INVALID_VALUE));
    }
    let lanes = (grid[0] * (threads[0] / WARP)) as usize;
    Some(parameter::<Arguments>(parameters.slice(1)[0]).map(|a| -> Arc<dyn Work> {
        if lanes > protocol.lanes / 2 || parts > MOST {
            violation(FUNCTION, format!("{name} on {lanes} warps for each of {parts} parts"));
        }
        a.check(parts, When::Called);
        Arc::new(Plain(move || {
            a.check(parts, When::Performed);
            a.spoil(parts);
            let shared = Grid::new(a.abort);
            let of_part = |part| {
                let (a, shared) = (&a, &shared);
                (0..lanes).map(move |lane| -> Warp<'_> { Box::pin(share(a, shared, part, protocol, lane)) })
            };
            shared.run(a.parts[..parts].iter().flat_map(of_part).collect());
        }))
    }))
}
