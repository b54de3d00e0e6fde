//! Sums of rows with what follows them (`gpu/kernels/norm.cu`). A block is an `async` function: its warps go on in turn.

use super::element::{Bf16, Convert, Element, F8E4M3, F16, Sum};
use super::exchange::{load_step, store_step};
use super::lane::{INBOX, LL128, Lane, MAX_RANKS, Step, pairs};
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
/// Threads of a warp, and most warps of a block.
const WARP: usize = 32;
const MAX_WARPS: usize = 18;
/// Words of data in a line, for which the squares are summed.
const LINE: usize = 60;

/// A kernel's arguments.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Arguments {
    inboxes: [u64; MAX_RANKS],
    own: u64,
    abort: u64,
    input: u64,
    residual: u64,
    weight: u64,
    output: u64,
    scales: u64,
    rank: u32,
    ranks: u32,
    rows: u32,
    hidden: u32,
    epsilon: f32,
    format: u32,
}

const AS_INPUT: u32 = 0;
const F8E4M3_ROWS: u32 = 1;

impl Arguments {
    /// Bytes of a row.
    fn bytes(&self) -> u64 {
        u64::from(self.hidden) * 2
    }

    /// The inboxes of each pair: this rank's for the peer, and the peer's for this rank.
    fn pairs(&self) -> [Option<(u64, u64)>; MAX_RANKS] {
        pairs(self.own, self.rank as usize, self.ranks as usize, |peer| self.inboxes[peer])
    }

    /// Memory that the kernel uses.
    fn ranges(&self) -> Vec<Range> {
        let range = |role, address, len| Range { function: FUNCTION, role, address, len };
        let all = self.rows as usize * self.bytes() as usize;
        let output = if self.format == AS_INPUT { all } else { all / 2 };
        let mut ranges = vec![
            range("the kernel's input", self.input, all),
            range("the kernel's residual", self.residual, all),
            range("the kernel's weight", self.weight, self.bytes() as usize),
            range("the kernel's output", self.output, output),
        ];
        if self.format != AS_INPUT {
            ranges.push(range("the kernel's scales", self.scales, 4 * self.rows as usize));
        }
        if self.ranks > 1 {
            ranges.push(range("the kernel's abort word", self.abort, 4));
            ranges.push(range("the kernel's inboxes", self.own, (self.ranks as usize - 1) * INBOX));
            for (_, remote) in self.pairs().into_iter().flatten() {
                ranges.push(range("the kernel's inbox at a peer", remote, INBOX));
            }
        }
        ranges
    }

    fn check(&self, when: When) {
        self.ranges().into_iter().filter(|range| range.len > 0).for_each(|range| range.check(when));
    }
}

/// The sum over a warp's threads, in the order of its shuffles.
fn sum_of_warp(mut of_threads: [f32; WARP]) -> f32 {
    for distance in [16, 8, 4, 2, 1] {
        let before = of_threads;
        for (thread, sum) in of_threads.iter_mut().enumerate() {
            *sum = before[thread] + before[thread ^ distance];
        }
    }
    of_threads[0]
}

/// The thread that has a word of a line.
fn thread_of(word: usize) -> usize {
    word / 15 * 8 + word % 15 / 2
}

/// The elements of a row.
fn numbers<E: Convert<f32>>(words: &[u64]) -> Vec<f32> {
    let of_word = |word: &u64| (0..4).map(|n| E::up(word >> (16 * n) & 0xffff)).collect::<Vec<_>>();
    words.iter().flat_map(of_word).collect()
}

fn words<E: Convert<f32>>(numbers: &[f32]) -> Vec<u64> {
    let bits = |four: &[f32]| four.iter().rev().fold(0, |word, x| word << 16 | E::down(*x));
    numbers.chunks(4).map(bits).collect()
}

/// Of a row whose steps are in `row`: adds the residual, and writes both outputs.
fn normalise<E: Convert<f32>>(a: &Arguments, number: u32, sum: &[u64]) {
    let bytes = a.bytes();
    let start = u64::from(number) * bytes;
    let (mut residual, mut weight) = (vec![0; sum.len()], vec![0; sum.len()]);
    load_step(&mut residual, a.residual + start, bytes, 0);
    load_step(&mut weight, a.weight, bytes, 0);
    let both = numbers::<E>(sum).into_iter().zip(numbers::<E>(&residual)).map(|(x, y)| x + y);
    let residual = words::<E>(&both.collect::<Vec<f32>>());
    store_step(&residual, a.residual + start, bytes, 0);
    let kept = numbers::<E>(&residual);
    let lines: Vec<f32> = kept
        .chunks(4 * LINE)
        .map(|line| {
            let mut of_threads = [0.0f32; WARP];
            for (word, four) in line.chunks(4).enumerate() {
                four.iter().for_each(|x| of_threads[thread_of(word)] += x * x);
            }
            sum_of_warp(of_threads)
        })
        .collect();
    let mut of_threads = [0.0f32; WARP];
    lines.iter().enumerate().for_each(|(line, sum)| of_threads[line % WARP] += sum);
    let scale = 1.0 / (sum_of_warp(of_threads) / a.hidden as f32 + a.epsilon).sqrt();
    let mut y: Vec<f32> =
        kept.iter().zip(numbers::<E>(&weight)).map(|(x, weight)| x * scale * weight).collect();
    y.truncate(a.hidden as usize);
    if a.format == AS_INPUT {
        y.resize(4 * sum.len(), 0.0);
        return store_step(&words::<E>(&y), a.output + start, bytes, 0);
    }
    let most = y.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let unit = match a.format {
        _ if most == 0.0 => 1.0,
        F8E4M3_ROWS => most / 448.0,
        _ => most / 127.0,
    };
    let reciprocal = 1.0 / unit;
    let quantise = |y: &f32| match a.format {
        F8E4M3_ROWS => <F8E4M3 as Convert<f32>>::down(y * reciprocal) as u8,
        _ => (y * reciprocal).round_ties_even().clamp(-127.0, 127.0) as i8 as u8,
    };
    let row: Vec<u8> = y.iter().map(quantise).collect();
    let range = |address, len| Range { function: FUNCTION, role: "", address, len };
    range(a.output + start / 2, row.len()).write(&row);
    range(a.scales + 4 * u64::from(number), 4).write(&unit.to_ne_bytes());
}

/// One block's rows, with `warps` warps.
async fn block<E: Convert<f32> + Element>(
    a: &Arguments,
    grid: &Grid,
    number: u32,
    blocks: u32,
    warps: usize,
) {
    let bytes = a.bytes();
    let steps = bytes.div_ceil(LL128.bytes() as u64) as usize;
    let is_alone = a.ranks == 1;
    let pairs = a.pairs();
    let begin = |warp: usize| Lane::begin(grid, &LL128, number as usize * warps + warp, pairs);
    let mut lanes: Vec<Lane<'_>> = if is_alone { Vec::new() } else { (0..warps).map(begin).collect() };
    let of_warp = |warp: usize| steps.saturating_sub(warp).div_ceil(warps) as u64;
    let (rank, most) = (a.rank as usize, steps.div_ceil(warps));
    let peers = || (1..a.ranks as usize).map(|d| (rank + d) % a.ranks as usize);
    let rows: Vec<u32> = (number..a.rows).step_by(blocks as usize).collect();
    let load = |row: u32, step: usize| {
        let mut data: Step = LL128.step();
        let start = u64::from(row) * bytes;
        load_step(&mut data, a.input + start, bytes, (step * LL128.bytes()) as u64);
        data
    };
    // The rows that were sent.
    let mut sent = 0;
    for (index, row) in rows.iter().enumerate() {
        // With more steps than one, a lane has no slots for two rows.
        let ahead = if most == 1 { index + 2 } else { index + 1 };
        while !is_alone && sent < rows.len().min(ahead) {
            for step in 0..steps {
                let (lane, nth) = (&mut lanes[step % warps], sent as u64 * of_warp(step % warps));
                let data = load(rows[sent], step);
                for peer in peers() {
                    lane.send(peer, &data, nth + (step / warps) as u64 + 1).await;
                }
            }
            sent += 1;
        }
        let mut all = Vec::with_capacity(steps * LL128.words);
        for step in 0..steps {
            let mine = load(*row, step);
            let mut data = mine.clone();
            if !is_alone {
                let (lane, nth) = (&mut lanes[step % warps], index as u64 * of_warp(step % warps));
                let mut sum = Sum::<E, f32>::new();
                for from in 0..a.ranks as usize {
                    data.clone_from(&mine);
                    if from != rank && !lane.receive(from, &mut data, nth + (step / warps) as u64 + 1).await {
                        return;
                    }
                    sum.put(from, &data, 0, 0);
                }
                sum.finish(&mut data, 0, a.ranks);
            }
            all.extend(data);
        }
        normalise::<E>(a, *row, &all);
        let behind = usize::from(most == 1);
        for (warp, lane) in lanes.iter_mut().enumerate() {
            peers().for_each(|peer| lane.learn(peer, index.saturating_sub(behind) as u64 * of_warp(warp)));
        }
        if lanes.iter().any(|lane| lane.is_aborted) {
            return;
        }
    }
    for (warp, lane) in lanes.iter().enumerate() {
        let count = rows.len() as u64 * of_warp(warp);
        peers().for_each(|peer| lane.end(peer, count, count));
    }
}

/// The work of a launch, if there is such a kernel.
pub fn work(
    name: &str,
    grid: [c_uint; 3],
    threads: [c_uint; 3],
    parameters: In<*mut c_void>,
) -> Option<Result<Arc<dyn Work>, Code>> {
    let name = name.strip_prefix("phalanx_")?;
    let (sums, element) = match name.strip_prefix("all_reduce_norm_") {
        Some(element) => (true, element),
        None => (false, name.strip_prefix("norm_")?),
    };
    let is_bf16 = match element {
        "bf16" => true,
        "f16" => false,
        _ => return None,
    };
    let (blocks, warps) = (grid[0], threads[0] as usize / WARP);
    if grid[1..] != [1, 1] || threads[1..] != [1, 1] || !(1..=MAX_WARPS).contains(&warps) {
        return Some(Err(INVALID_VALUE));
    }
    Some(parameter::<Arguments>(parameters.slice(1)[0]).map(|a| -> Arc<dyn Work> {
        if blocks as usize * warps > LL128.lanes || sums != (a.ranks > 1) || a.ranks as usize > MAX_RANKS {
            violation(
                FUNCTION,
                format!("{name} on {blocks} blocks of {warps} warps, with {} ranks", a.ranks),
            );
        }
        a.check(When::Called);
        Arc::new(Plain(move || {
            a.check(When::Performed);
            // The output's garbage exposes programs that read it before the kernel has ended.
            let [input, _, _, output] = a.ranges()[..4] else { unreachable!("there are four at least") };
            if !output.overlaps(&input) {
                output.write(&vec![GARBAGE; output.len]);
            }
            let shared = Grid::new(a.abort);
            let of_block = |number| -> Warp<'_> {
                match is_bf16 {
                    true => Box::pin(block::<Bf16>(&a, &shared, number, blocks, warps)),
                    false => Box::pin(block::<F16>(&a, &shared, number, blocks, warps)),
                }
            };
            shared.run((0..blocks).map(of_block).collect());
        }))
    }))
}
