//! Dispatches and combines that follow each other: nobody waits before it writes, so slots must be free by then.

use crate::expert_blocks::{Arguments, Block, NUMBERS};
use crate::lane::{MAX_RANKS, Protocol, SLOT};
use crate::warps::Grid;
use crate::words;
use crate::{check, side_by_side};
use shuttle::thread;

/// A row is one step: two words, of four values each.
const ROW: usize = 16;
static LL: Protocol = Protocol { lanes: 1, words: 2, has_lines: false, start: 0 };

/// The experts that the tokens of each rank choose; each rank has one expert.
type Routing = &'static [&'static [[i32; CHOICES]]];

const CHOICES: usize = 2;
const TOKENS: usize = 2;
const NOBODY: i32 = -1;

/// What a token has in all its places: whose it is, and of which call. Twice that is a value of bf16, too.
fn value(call: usize, rank: usize, token: usize) -> u16 {
    phalanx::bf16::from_f32((call * 16 + rank * 4 + token + 1) as f32).to_bits()
}

/// Where parts of a rank's scratch begin, and its bytes.
struct Layout {
    slots: usize,
    returns: usize,
    own: usize,
    bytes: usize,
}

fn layout(ranks: usize) -> Layout {
    let slots = 2 * ranks * (1 + 1 + TOKENS * CHOICES) * 8;
    let returns = slots + 2 * (ranks - 1) * TOKENS * SLOT as usize;
    let own = returns + TOKENS * CHOICES * SLOT as usize;
    Layout { slots, returns, own, bytes: own + NUMBERS as usize + (1 + ranks) * TOKENS * CHOICES * 4 }
}

/// One rank's dispatch, and combine with experts that change nothing: each token comes back once for each of its choices.
fn call(scratch: [u64; MAX_RANKS], rank: usize, number: usize, routing: Routing, combines: bool) {
    let (ranks, tokens) = (routing.len(), routing[rank].len());
    let Layout { slots, returns, own, .. } = layout(ranks);
    let input: Vec<u16> = (0..tokens).flat_map(|token| [value(number, rank, token); ROW / 2]).collect();
    let mut rows = vec![0u16; ranks * TOKENS * ROW / 2];
    let mut output = vec![0u16; tokens * ROW / 2];
    let (mut count, weights) = (0u32, [1f32; TOKENS * CHOICES]);
    let dispatch = Arguments {
        scratch,
        abort: 0,
        input: input.as_ptr() as u64,
        scales: 0,
        routing: routing[rank].as_ptr() as u64,
        weights: weights.as_ptr() as u64,
        output: rows.as_mut_ptr() as u64,
        row_scales: 0,
        counts: (&raw mut count) as u64,
        words: 0,
        slots: slots as u64,
        returns: returns as u64,
        own: own as u64,
        rank: rank as u32,
        ranks: ranks as u32,
        experts: 1,
        max_tokens: TOKENS as u32,
        top_k: CHOICES as u32,
        tokens: tokens as u32,
        row_bytes: ROW as u32,
        scale_bytes: 0,
        index_bytes: 4,
    };
    launch(dispatch, 2, true);
    let chosen = |from: usize, token: usize| routing[from][token].contains(&(rank as i32));
    let sent = (0..ranks).flat_map(|from| (0..routing[from].len()).map(move |token| (from, token)));
    let expected: Vec<u16> = sent
        .filter(|(from, token)| chosen(*from, *token))
        .flat_map(|(from, token)| [value(number, from, token); ROW / 2])
        .collect();
    assert_eq!(count as usize, expected.len() / (ROW / 2), "call {number}, rows of rank {rank}");
    assert_eq!(rows[..expected.len()], expected, "call {number}, rows of rank {rank}");
    if !combines {
        return;
    }
    launch(
        Arguments { input: rows.as_ptr() as u64, output: output.as_mut_ptr() as u64, ..dispatch },
        1,
        false,
    );
    for (token, choices) in routing[rank].iter().enumerate() {
        let times = choices.iter().filter(|expert| **expert != NOBODY).count();
        let once = phalanx::bf16::from_bits(value(number, rank, token)).to_f32();
        let sum = phalanx::bf16::from_f32(times as f32 * once).to_bits();
        let back = &output[token * ROW / 2..(token + 1) * ROW / 2];
        assert_eq!(*back, [sum; ROW / 2], "call {number}, token {token} of rank {rank}");
    }
}

/// Its blocks run side by side.
fn launch(arguments: Arguments, blocks: usize, is_dispatch: bool) {
    let block = |number| {
        thread::spawn(move || {
            let block = Block { arguments: &arguments, grid: &Grid, protocol: &LL, number, blocks };
            match is_dispatch {
                true => shuttle::future::block_on(block.dispatch()),
                false => shuttle::future::block_on(block.combine()),
            }
        })
    };
    let blocks: Vec<_> = (0..blocks).map(block).collect();
    blocks.into_iter().for_each(|block| block.join().unwrap());
}

/// All ranks make these calls, one behind the other; with or without a combine behind each dispatch.
fn explore(calls: &'static [Routing], combines: bool) {
    let ranks = calls[0].len();
    let model = move || {
        words::forget_all();
        let mut memory: Vec<Vec<u64>> =
            (0..ranks).map(|_| vec![0; layout(ranks).bytes.div_ceil(8)]).collect();
        let mut scratch = [0; MAX_RANKS];
        for (start, memory) in scratch.iter_mut().zip(&mut memory) {
            *start = memory.as_mut_ptr() as u64;
        }
        let part = move |rank| {
            calls
                .iter()
                .enumerate()
                .for_each(|(number, routing)| call(scratch, rank, number, routing, combines));
        };
        side_by_side(ranks, part);
    };
    check(model);
}

const ACROSS: Routing = &[&[[1, NOBODY], [1, 0]], &[[0, 0], [0, 1]]];
/// Rank 0 waits for no token of rank 1, and gives it none back.
const ONE_WAY: Routing = &[&[[1, NOBODY], [NOBODY, NOBODY]], &[]];

#[test]
fn tokens_of_call_after_call_come_and_go_back() {
    explore(&[ACROSS, ACROSS, ACROSS], true);
}

#[test]
fn a_rank_that_waits_for_nothing_does_not_run_ahead() {
    explore(&[ONE_WAY, ACROSS, ONE_WAY, ONE_WAY, ACROSS], true);
}

#[test]
fn three_ranks_with_experts() {
    const ROUND: Routing = &[&[[1, 2]], &[[2, 0]], &[[0, 1]]];
    const TO_ONE: Routing = &[&[[2, 2]], &[[2, NOBODY]], &[]];
    explore(&[ROUND, TO_ONE, ROUND], true);
}

/// Without the combines between, a token may not be read yet when its sender begins the next dispatch.
#[test]
fn dispatches_follow_each_other() {
    explore(&[ACROSS, ONE_WAY, ACROSS, ACROSS], false);
}
