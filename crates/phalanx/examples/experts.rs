//! Times of a mixture of experts' dispatch and combine: from the routing table to the combined output, in a CUDA graph of 20.
//!
//! `cargo run --release -p phalanx --example experts [RANKS]`
//!
//! Beside it the same rows by NCCL: an `all_to_all_v` with each token once for every other rank that has one of its experts, and one with a
//! row of each choice back. NCCL is given the counts by the host, and packs, places and adds up nothing.

use phalanx::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use phalanx::cudarc::driver::{CudaContext, CudaGraph, CudaSlice, CudaStream};
use phalanx::nccl::ExpertLayout;
use phalanx::{BackendKind, Comm, DType, Result, bf16};
use std::sync::Arc;
use std::time::Instant;

const EXPERTS: usize = 64;
const TOP_K: usize = 8;
/// Layers in a graph, launches of it in a round, and rounds, of which the median counts.
const LAYERS: usize = 20;
const LAUNCHES: usize = 25;
const ROUNDS: usize = 9;

fn main() -> Result<()> {
    let ranks = std::env::args().nth(1).map_or(2, |arg| arg.parse().expect("a number of ranks"));
    println!("{ranks} ranks, top {TOP_K} of {EXPERTS} experts, bf16; microseconds of a dispatch and combine");
    println!("{:>7} {:>7} {:>9} {:>9} {:>9} {:>6}", "hidden", "tokens", "dispatch", "both", "NCCL", "ratio");
    let run = Comm::builder().backend(BackendKind::Nccl).run(ranks, |comm| -> Result<()> {
        for hidden in [4096, 7168] {
            for tokens in [1, 8, 32, 128] {
                let [dispatch, both, nccl] = measure(&comm, hidden, tokens)?;
                if comm.rank() == 0 {
                    let ratio = both / nccl;
                    println!("{hidden:>7} {tokens:>7} {dispatch:>9.2} {both:>9.2} {nccl:>9.2} {ratio:>6.2}");
                }
            }
        }
        Ok(())
    })?;
    run.into_iter().collect()
}

/// A rank's routing: different experts for each token, the same on every rank that asks.
fn routing(rank: usize, tokens: usize) -> Vec<i32> {
    let mut state = 0x9e37_79b9 * (rank as u64 + 1);
    let mut below = |limit: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % limit
    };
    let mut chosen = Vec::new();
    for _ in 0..tokens {
        let mut experts: Vec<i32> = (0..EXPERTS as i32).collect();
        chosen.extend((0..TOP_K).map(|_| experts.swap_remove(below(experts.len()))));
    }
    chosen
}

/// Numbers to and from each rank: of tokens that have experts there, and of choices. None stay on a rank.
fn counts(comm: &Comm, tokens: usize) -> [[Vec<usize>; 2]; 2] {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let each = EXPERTS / ranks;
    let count = |from: usize, to: usize, of_tokens: bool| {
        let there = |choices: &[i32]| choices.iter().filter(|expert| **expert as usize / each == to).count();
        let number = |choices: &[i32]| if of_tokens { there(choices).min(1) } else { there(choices) };
        if from == to { 0 } else { routing(from, tokens).chunks(TOP_K).map(number).sum() }
    };
    [true, false].map(|of_tokens| {
        let sent = (0..ranks).map(|to| count(rank, to, of_tokens)).collect();
        [sent, (0..ranks).map(|from| count(from, rank, of_tokens)).collect()]
    })
}

/// Microseconds of a dispatch and of a whole layer by phalanx's kernels, and of a layer by NCCL.
fn measure(comm: &Comm, hidden: usize, tokens: usize) -> Result<[f64; 3]> {
    let layout = ExpertLayout {
        experts: EXPERTS,
        max_tokens: tokens,
        top_k: TOP_K,
        hidden,
        dtype: DType::Bf16,
        scales: 0,
    };
    let nccl = comm.nccl().expect("NCCL");
    let mut experts = nccl.experts(&layout)?;
    // A context that tracks nothing, whose memory can be captured.
    let context = CudaContext::new(nccl.context().ordinal())?;
    // SAFETY: every slice of this context is used on the one stream.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream()?;
    let on = comm.on(&stream)?;

    let values: Vec<bf16> = (0..tokens * hidden).map(|i| bf16::from_f32((i % 97) as f32 / 16.0)).collect();
    let input = stream.clone_htod(&values)?;
    let chosen = stream.clone_htod(&routing(comm.rank(), tokens))?;
    let weights = stream.clone_htod(&vec![0.125f32; tokens * TOP_K])?;
    let mut rows = stream.alloc_zeros::<bf16>(experts.rows() * hidden)?;
    let mut of_each = stream.alloc_zeros::<i32>(experts.local().len())?;
    let mut output = stream.alloc_zeros::<bf16>(tokens * hidden)?;
    let dispatch = capture(&stream, || experts.dispatch(&stream, &input, &chosen, &mut rows, &mut of_each))?;
    let both = capture(&stream, || {
        experts.dispatch(&stream, &input, &chosen, &mut rows, &mut of_each)?;
        // The experts' kernels would be here.
        experts.combine(&stream, &rows, &weights, &mut output)
    })?;

    let [[tokens_to, tokens_from], [choices_from, choices_to]] = counts(comm, tokens);
    let of_values = |counts: &[usize]| counts.iter().map(|count| count * hidden).collect::<Vec<_>>();
    let [to, from, back, here] =
        [tokens_to, tokens_from, choices_to, choices_from].map(|counts| of_values(&counts));
    let buffer = |counts: &[usize]| -> Result<CudaSlice<bf16>> {
        Ok(stream.alloc_zeros(counts.iter().sum::<usize>().max(1))?)
    };
    let (sent, mut received) = (buffer(&to)?, buffer(&from)?);
    let (results, mut returned) = (buffer(&back)?, buffer(&here)?);
    let len = |counts: &[usize]| counts.iter().sum::<usize>();
    let mut layer = || -> Result<()> {
        on.all_to_all_v(&sent.slice(..len(&to)), &to, &mut received.slice_mut(..len(&from)), &from)?;
        on.all_to_all_v(&results.slice(..len(&back)), &back, &mut returned.slice_mut(..len(&here)), &here)
    };
    layer()?;
    on.sync()?;
    let nccl = capture(&stream, layer)?;

    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (graph, times) in [&dispatch, &both, &nccl].into_iter().zip(&mut times) {
            times.push(time(comm, &stream, graph)?);
        }
    }
    drop((dispatch, both, nccl));
    // Experts that change nothing, and weights whose sum is 1.
    assert_eq!(stream.clone_dtoh(&output)?, values, "the combined output is the input");
    experts.free()?;
    Ok(times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[ROUNDS / 2]
    }))
}

fn capture(stream: &Arc<CudaStream>, mut layer: impl FnMut() -> Result<()>) -> Result<CudaGraph> {
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    let captured = (0..LAYERS).try_for_each(|_| layer());
    // Also if a call failed: a stream that is captured can do nothing else.
    let graph = stream.end_capture(CUgraphInstantiate_flags(0))?;
    captured?;
    let graph = graph.expect("a graph of kernels");
    graph.upload()?;
    Ok(graph)
}

/// Microseconds of a layer in a graph.
fn time(comm: &Comm, stream: &CudaStream, graph: &CudaGraph) -> Result<f64> {
    graph.launch()?;
    stream.synchronize()?;
    comm.barrier()?;
    let since = Instant::now();
    for _ in 0..LAUNCHES {
        graph.launch()?;
    }
    stream.synchronize()?;
    Ok(since.elapsed().as_secs_f64() * 1e6 / (LAUNCHES * LAYERS) as f64)
}
