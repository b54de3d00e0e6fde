//! The memory between GPUs under shuttle: lanes, credits and step numbers of FIFOs as phalanx's own kernels have them, and the slots of experts
//! (`experts.rs`).
//!
//! The emulator's model of the kernels is compiled here once more, with shuttle's atomics for the words of the memory
//! between GPUs. They are sequentially consistent: what the memory model reorders is not tried. Steps are of two words,
//! so that a schedule is short.

// What the emulator's launches use beside it.
#![allow(dead_code)]

mod warps {
    /// What the warps of a launch share.
    pub struct Grid;

    impl Grid {
        pub fn is_aborted(&self) -> bool {
            false
        }

        pub fn has_changed(&self) {}

        pub fn below(&self, _: usize) -> usize {
            0
        }
    }

    /// Lets the other ranks go on.
    pub async fn pause() {
        shuttle::thread::yield_now();
    }
}

mod element {
    pub fn narrow_bf16(value: f32) -> u64 {
        phalanx::bf16::from_f32(value).to_bits().into()
    }
}

mod words {
    pub use shuttle::sync::atomic::AtomicU64;
    use std::cell::RefCell;
    use std::collections::HashMap;

    thread_local! {
        /// The words of this schedule, by address: shuttle's threads are one.
        static WORDS: RefCell<HashMap<u64, &'static AtomicU64>> = RefCell::default();
    }

    /// A word of an inbox, which is zero at first.
    pub fn word(address: u64) -> &'static AtomicU64 {
        let new = || &*Box::leak(Box::new(AtomicU64::new(0)));
        WORDS.with_borrow_mut(|words| *words.entry(address).or_insert_with(new))
    }

    /// Begins a schedule.
    pub fn forget_all() {
        WORDS.with_borrow_mut(HashMap::clear);
    }
}

#[path = "../../../phalanx-emulated/src/kernels/exchange.rs"]
mod exchange;
#[path = "../../../phalanx-emulated/src/kernels/expert_blocks.rs"]
mod expert_blocks;
#[path = "../../../phalanx-emulated/src/kernels/lane.rs"]
mod lane;
#[path = "../../../phalanx-emulated/src/kernels/message_warps.rs"]
mod message_warps;
#[path = "../../../phalanx-emulated/src/kernels/moving.rs"]
mod moving;

mod experts;

use exchange::{Arguments, Peer};
use lane::{DEPTH, INBOX, MAX_RANKS, Protocol};
use message_warps::{MOST, Message, Part};
use phalanx_testkit::suite::cases;
use shuttle::sync::atomic::Ordering;
use shuttle::thread;
use warps::Grid;

/// Schedules of a model, as in CI.
const SCHEDULES: usize = 1000;
/// Preemptions of a PCT schedule.
const PREEMPTIONS: usize = 4;

static LL: Protocol = Protocol { lanes: 1, words: 2, has_lines: false, start: 0 };
/// A line has 15 words of data.
static LL128: Protocol = Protocol { lanes: 1, words: 15, has_lines: true, start: 0 };

/// The memory of rank `rank` begins at this address: one inbox for each peer.
fn memory(rank: usize) -> u64 {
    ((rank + 1) * MAX_RANKS * INBOX) as u64
}

/// Runs the parts of all ranks.
fn side_by_side(ranks: usize, part: impl Fn(usize) + Copy + Send + 'static) {
    let others: Vec<_> = (1..ranks).map(|rank| thread::spawn(move || part(rank))).collect();
    part(0);
    others.into_iter().for_each(|other| other.join().unwrap());
}

/// Explores schedules of a model.
fn check(model: impl Fn() + Copy + Send + Sync + 'static) {
    shuttle::check_random(model, cases(SCHEDULES));
    shuttle::check_pct(model, cases(SCHEDULES), PREEMPTIONS);
}

/// Steps that each rank sends to each other in a call.
type Call = &'static [&'static [u32]];

/// One rank's part of a call: its block for each peer says who it is from, and for whom.
fn call(protocol: &'static Protocol, calls: Call, number: u64, rank: usize) {
    let (ranks, step) = (calls.len(), protocol.words);
    let word = |from: usize, to: usize, place: usize| number << 32 | (from << 24 | to << 16 | place) as u64;
    let block = |from: usize, to: usize| -> Vec<u64> {
        (0..calls[from][to] as usize * step).map(|place| word(from, to, place)).collect()
    };
    let sent: Vec<_> = (0..ranks).map(|peer| block(rank, peer)).collect();
    let mut received: Vec<_> = (0..ranks).map(|peer| vec![0u64; block(peer, rank).len()]).collect();
    let none =
        Peer { inbox: 0, send: 0, recv: 0, send_bytes: 0, recv_bytes: 0, send_steps: 0, recv_steps: 0 };
    let mut peers = [none; MAX_RANKS];
    for (peer, to) in peers.iter_mut().enumerate().take(ranks) {
        let place = if rank < peer { rank } else { rank.saturating_sub(1) };
        *to = Peer {
            inbox: memory(peer) + (place * INBOX) as u64,
            send: sent[peer].as_ptr() as u64,
            recv: received[peer].as_mut_ptr() as u64,
            send_bytes: 8 * sent[peer].len() as u64,
            recv_bytes: 8 * received[peer].len() as u64,
            send_steps: calls[rank][peer],
            recv_steps: calls[peer][rank],
        };
    }
    let arguments = Arguments {
        own: memory(rank),
        abort: 0,
        rank: rank as u32,
        ranks: ranks as u32,
        op: 0,
        same: 0,
        factor: 0,
        factor_is_address: 0,
        steps: peers.iter().map(|peer| peer.send_steps.max(peer.recv_steps)).max().unwrap_or(0),
        peers,
    };
    shuttle::future::block_on(moving::move_blocks(&arguments, &Grid, protocol, 0));
    for (peer, received) in received.iter().enumerate() {
        assert_eq!(*received, block(peer, rank), "call {number}, from rank {peer} to {rank}");
    }
}

/// What one of two ranks does.
enum Act {
    /// A launch: the steps of the messages that it sends, and of those that it receives.
    Messages(&'static [u32], &'static [u32]),
    /// A collective between.
    Collective(Call),
}

/// Messages in each direction, by the numbers of those before. Each direction has a warp of its own.
fn messages(protocol: &'static Protocol, rank: usize, steps: [&[u32]; 2], before: [usize; 2]) {
    let words = |from: usize, number: usize, steps: u32| -> Vec<u64> {
        let word = |place: usize| (from << 24 | (number + 1) << 16 | place) as u64;
        (0..steps as usize * protocol.words).map(word).collect()
    };
    let all = |from: usize, steps: &[u32], before: usize| -> Vec<Vec<u64>> {
        steps.iter().enumerate().map(|(at, steps)| words(from, before + at, *steps)).collect()
    };
    let [sent, expected] = [(rank, steps[0], before[0]), (1 - rank, steps[1], before[1])]
        .map(|(from, steps, before)| all(from, steps, before));
    let mut received: Vec<_> = expected.iter().map(|words| vec![0u64; words.len()]).collect();
    let mut buffers = [Message { buffer: 0, bytes: 0 }; MOST];
    let addresses = sent.iter().map(|words| (words.as_ptr() as u64, words.len()));
    let addresses =
        addresses.chain(received.iter_mut().map(|words| (words.as_mut_ptr() as u64, words.len())));
    for (buffer, (start, len)) in buffers.iter_mut().zip(addresses) {
        *buffer = Message { buffer: start, bytes: 8 * len as u64 };
    }
    let part = |sends: bool| Part {
        remote: memory(1 - rank),
        own: memory(rank),
        first: if sends { 0 } else { sent.len() as u32 },
        count: if sends { sent.len() } else { expected.len() } as u32,
        sends: u32::from(sends),
        unused: 0,
    };
    let mut parts = [part(true); MOST];
    parts[1] = part(false);
    let arguments = message_warps::Arguments { abort: 0, lanes: 1, parts, messages: buffers };
    let warps = [true, false].map(|sends| {
        let part = part(sends);
        thread::spawn(move || {
            shuttle::future::block_on(message_warps::share(&arguments, &Grid, &part, protocol, 0));
        })
    });
    warps.into_iter().for_each(|warp| warp.join().unwrap());
    assert_eq!(received, expected, "rank {rank}, after {before:?}");
}

/// Two ranks, each with its acts one behind the other.
fn explore_messages(protocol: &'static Protocol, acts: [&'static [Act]; 2]) {
    let part = move |rank: usize| {
        let mut before = [0, 0];
        for (number, act) in acts[rank].iter().enumerate() {
            match act {
                Act::Messages(sends, receives) => {
                    messages(protocol, rank, [sends, receives], before);
                    before = [before[0] + sends.len(), before[1] + receives.len()];
                }
                Act::Collective(steps) => call(protocol, steps, number as u64, rank),
            }
        }
    };
    check(move || {
        words::forget_all();
        side_by_side(2, part);
    });
}

/// Sets an inbox as it is after so many steps of its pair, both ways.
fn begin_after(protocol: &Protocol, inbox: u64, steps: u64) {
    // Sent, received, acknowledged, and the credit.
    (0..4).for_each(|number| words::word(inbox + 8 * number).store(steps, Ordering::SeqCst));
    let last = (1..=DEPTH).map(|back| steps.saturating_sub(DEPTH - back)).filter(|step| *step > 0);
    for step in last {
        let slot = inbox + 32 + step % DEPTH * 1024;
        if protocol.has_lines {
            words::word(slot + 120).store(step, Ordering::SeqCst);
        } else {
            let flag = u64::from(step as u32) << 32;
            (0..4).for_each(|place| words::word(slot + 8 * place).store(flag, Ordering::SeqCst));
        }
    }
}

/// Ranks that make calls one behind the other, after so many steps of each pair.
fn explore(protocol: &'static Protocol, calls: &'static [Call], before: u64) {
    let model = move || {
        words::forget_all();
        let ranks = calls[0].len();
        for inbox in
            (0..ranks).flat_map(|rank| (0..ranks - 1).map(move |place| memory(rank) + (place * INBOX) as u64))
        {
            begin_after(protocol, inbox, before);
        }
        let part = move |rank: usize| {
            for (number, steps) in calls.iter().enumerate() {
                call(protocol, steps, number as u64, rank);
            }
        };
        side_by_side(ranks, part);
    };
    check(model);
}

/// More steps than slots in one direction, as in a broadcast: credits.
const ONE_WAY: Call = &[&[0, 6], &[0, 0]];
const OTHER_WAY: Call = &[&[0, 0], &[6, 0]];
/// As many both ways: what arrives is the credit.
const BOTH_WAYS: Call = &[&[0, 6], &[6, 0]];
const UNEVEN: Call = &[&[0, 2], &[6, 0]];
/// At most one step of a lane.
const SHORT: Call = &[&[0, 1], &[1, 0]];
const SHORT_ONE_WAY: Call = &[&[0, 1], &[0, 0]];

#[test]
fn credits_let_a_sender_go_on() {
    explore(&LL, &[ONE_WAY, ONE_WAY], 0);
    explore(&LL128, &[ONE_WAY, OTHER_WAY], 0);
}

#[test]
fn what_arrives_is_the_credit_of_an_exchange() {
    explore(&LL, &[BOTH_WAYS, BOTH_WAYS], 0);
    explore(&LL, &[UNEVEN, BOTH_WAYS, ONE_WAY], 0);
}

#[test]
fn short_calls_follow_each_other() {
    let calls: &[_] = &[SHORT, SHORT_ONE_WAY, SHORT, SHORT, SHORT_ONE_WAY];
    explore(&LL, calls, 0);
    explore(&LL, &[SHORT_ONE_WAY; 6], 0);
    explore(&LL, &[SHORT, ONE_WAY, SHORT, OTHER_WAY], 0);
}

#[test]
fn flags_of_ll_wrap() {
    let before = (1 << 32) - 3;
    explore(&LL, &[BOTH_WAYS, ONE_WAY], before);
    explore(&LL128, &[BOTH_WAYS], before);
}

#[test]
fn three_ranks_exchange() {
    const ALL: Call = &[&[0, 5, 5], &[5, 0, 5], &[5, 5, 0]];
    const FROM_ONE: Call = &[&[0, 0, 0], &[5, 0, 5], &[0, 0, 0]];
    explore(&LL, &[ALL, FROM_ONE], 0);
}

#[test]
fn messages_of_a_group_meet_messages_one_by_one() {
    const GROUP: &[Act] = &[Act::Messages(&[2, 6], &[5, 1])];
    const ONE_BY_ONE: &[Act] = &[
        Act::Messages(&[], &[2]),
        Act::Messages(&[], &[6]),
        Act::Messages(&[5], &[]),
        Act::Messages(&[1], &[]),
    ];
    const OTHER_GROUP: &[Act] = &[Act::Messages(&[5, 1], &[2, 6])];
    explore_messages(&LL, [GROUP, ONE_BY_ONE]);
    explore_messages(&LL128, [GROUP, OTHER_GROUP]);
}

#[test]
fn messages_and_collectives_follow_each_other() {
    const FIRST: &[Act] = &[
        Act::Messages(&[6], &[]),
        Act::Collective(BOTH_WAYS),
        Act::Messages(&[1], &[6]),
        Act::Collective(ONE_WAY),
    ];
    const SECOND: &[Act] = &[
        Act::Messages(&[], &[6]),
        Act::Collective(BOTH_WAYS),
        Act::Messages(&[6], &[1]),
        Act::Collective(ONE_WAY),
    ];
    explore_messages(&LL, [FIRST, SECOND]);
    explore_messages(&LL128, [FIRST, SECOND]);
}
