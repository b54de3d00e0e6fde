//! Times of a mixture of experts' dispatch and combine: from the routing table to the combined output, in a CUDA graph of 20.
//!
//! `cargo run --release -p phalanx --example experts [RANKS]`
//!
//! Beside it the same by NCCL: an `all_to_all_v` with each token once for every other rank that has one of its experts, and one with a row
//! of each choice back; and the same with kernels that pack the tokens, place the rows, pack the results, and add up. The lists for them, and the
//! counts, are made by the host before anything is timed.

use phalanx::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use phalanx::cudarc::driver::{CudaContext, CudaGraph, CudaSlice, CudaStream, LaunchConfig, PushKernelArg};
use phalanx::cudarc::nvrtc::compile_ptx;
use phalanx::nccl::{Config, ExpertLayout, GpuAlgorithm};
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
    println!("hidden tokens dispatch     both transfers     NCCL  ratio");
    let (own, nccl) = (world(GpuAlgorithm::Auto, ranks, own)?, world(GpuAlgorithm::Nccl, ranks, by_nccl)?);
    for (((hidden, tokens), [dispatch, both]), [transfers, nccl]) in sizes().zip(own).zip(nccl) {
        let ratio = both / nccl;
        println!(
            "{hidden:>6} {tokens:>6} {dispatch:>8.2} {both:>8.2} {transfers:>9.2} {nccl:>8.2} {ratio:>6.2}"
        );
    }
    Ok(())
}

/// Hidden sizes, and tokens.
fn sizes() -> impl Iterator<Item = (usize, usize)> {
    [4096, 7168].into_iter().flat_map(|hidden| [1, 8, 32, 128].map(|tokens| (hidden, tokens)))
}

/// Rank 0's measurements of all sizes.
fn world(
    algorithm: GpuAlgorithm,
    ranks: usize,
    measure: fn(&Comm, &Setting) -> Result<[f64; 2]>,
) -> Result<Vec<[f64; 2]>> {
    let mut config = Config::default();
    config.gpu_algorithm = Some(algorithm);
    let builder = Comm::builder().backend(BackendKind::Nccl).nccl(config);
    let mut of_ranks = builder.try_run(ranks, |comm| -> Result<Vec<_>> {
        sizes().map(|(hidden, tokens)| measure(&comm, &Setting::new(&comm, hidden, tokens)?)).collect()
    })?;
    Ok(of_ranks.swap_remove(0))
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

/// What NCCL's way needs of all routings: rows to move as (from, to), and elements to and from each rank.
#[derive(Default)]
struct Lists {
    /// Tokens to send; received tokens, and own tokens, to rows; rows to send back.
    pack: Vec<[i32; 2]>,
    place: Vec<[i32; 2]>,
    place_own: Vec<[i32; 2]>,
    pack_back: Vec<[i32; 2]>,
    /// Of each choice: its place among the rows that come back, or -1 - its own row.
    sources: Vec<i32>,
    sent: Vec<usize>,
    received: Vec<usize>,
    sent_back: Vec<usize>,
    received_back: Vec<usize>,
}

impl Lists {
    fn new(comm: &Comm, tokens: usize, hidden: usize) -> Lists {
        let (rank, ranks) = (comm.rank(), comm.world_size());
        let each = EXPERTS / ranks;
        let all: Vec<Vec<i32>> = (0..ranks).map(|rank| routing(rank, tokens)).collect();
        let choices = |from: usize, token: usize, to: usize| {
            let of_token = all[from][token * TOP_K..(token + 1) * TOP_K].iter().enumerate();
            of_token
                .filter(move |(_, expert)| **expert as usize / each == to)
                .map(|(k, expert)| (k, *expert as usize))
        };
        let mut lists = Lists { sources: vec![0; tokens * TOP_K], ..Lists::default() };
        let mut filled = vec![0; EXPERTS];
        let mut of_rank = [0; 4];
        for other in 0..ranks {
            let before = of_rank;
            for token in 0..tokens {
                if other != rank && choices(rank, token, other).next().is_some() {
                    lists.pack.push([token as i32, of_rank[0]]);
                    of_rank[0] += 1;
                }
                for (k, expert) in choices(other, token, rank) {
                    let row = (expert % each * ranks * tokens + filled[expert]) as i32;
                    filled[expert] += 1;
                    if other == rank {
                        lists.place_own.push([token as i32, row]);
                        lists.sources[token * TOP_K + k] = -1 - row;
                    } else {
                        lists.place.push([of_rank[1], row]);
                        lists.pack_back.push([row, of_rank[2]]);
                        of_rank[2] += 1;
                    }
                }
                of_rank[1] += i32::from(other != rank && choices(other, token, rank).next().is_some());
                for (k, _) in choices(rank, token, other).filter(|_| other != rank) {
                    lists.sources[token * TOP_K + k] = of_rank[3];
                    of_rank[3] += 1;
                }
            }
            let elements = |place: usize| (of_rank[place] - before[place]) as usize * hidden;
            lists.sent.push(elements(0));
            lists.received.push(elements(1));
            lists.sent_back.push(elements(2));
            lists.received_back.push(elements(3));
        }
        lists
    }
}

/// Kernels beside NCCL: a block moves a row, or adds up a part of a token's.
const SOURCE: &str = r#"
extern "C" __global__ void move_rows(const uint4* from, uint4* to, const int2* rows, int width) {
    const int2 row = rows[blockIdx.x];
    for (int i = threadIdx.x; i < width; i += blockDim.x) to[(size_t)row.y * width + i] = from[(size_t)row.x * width + i];
}
extern "C" __global__ void add_up(const uint2* returned, const uint2* own, const int* sources, const float* weights, uint2* to,
                                  int top_k, int width) {
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= width) return;
    float sum[4] = {};
    for (int k = 0; k < top_k; k++) {
        const int source = sources[blockIdx.x * top_k + k];
        const float weight = weights[blockIdx.x * top_k + k];
        const uint2 v = source >= 0 ? returned[(size_t)source * width + i] : own[(size_t)(-1 - source) * width + i];
        sum[0] += weight * __uint_as_float(v.x << 16);
        sum[1] += weight * __uint_as_float(v.x & 0xffff0000);
        sum[2] += weight * __uint_as_float(v.y << 16);
        sum[3] += weight * __uint_as_float(v.y & 0xffff0000);
    }
    unsigned bits[4];
    for (int j = 0; j < 4; j++) {
        const unsigned b = __float_as_uint(sum[j]);
        bits[j] = (b + 0x7fff + (b >> 16 & 1)) >> 16;
    }
    to[(size_t)blockIdx.x * width + i] = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
}
"#;

/// What a rank has before a layer.
struct Setting {
    hidden: usize,
    tokens: usize,
    /// Tracks nothing, so that its memory can be captured.
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    values: Vec<bf16>,
    input: CudaSlice<bf16>,
    weights: CudaSlice<f32>,
}

impl Setting {
    fn new(comm: &Comm, hidden: usize, tokens: usize) -> Result<Setting> {
        let context = CudaContext::new(comm.nccl().expect("NCCL").context().ordinal())?;
        // SAFETY: every slice of this context is used on the one stream.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream()?;
        let values: Vec<bf16> =
            (0..tokens * hidden).map(|i| bf16::from_f32((i % 97) as f32 / 16.0)).collect();
        let input = stream.clone_htod(&values)?;
        let weights = stream.clone_htod(&vec![0.125f32; tokens * TOP_K])?;
        Ok(Setting { hidden, tokens, context, stream, values, input, weights })
    }
}

/// Microseconds of a dispatch and of a whole layer by phalanx's kernels.
fn own(comm: &Comm, setting: &Setting) -> Result<[f64; 2]> {
    let Setting { hidden, tokens, stream, values, input, weights, .. } = setting;
    let layout = ExpertLayout {
        experts: EXPERTS,
        max_tokens: *tokens,
        top_k: TOP_K,
        hidden: *hidden,
        dtype: DType::Bf16,
        scales: 0,
    };
    let mut experts = comm.nccl().expect("NCCL").experts(&layout)?;
    let chosen = stream.clone_htod(&routing(comm.rank(), *tokens))?;
    let mut rows = stream.alloc_zeros::<bf16>(experts.rows() * hidden)?;
    let mut of_each = stream.alloc_zeros::<i32>(experts.local().len())?;
    let mut output = stream.alloc_zeros::<bf16>(tokens * hidden)?;
    let dispatch = capture(stream, || experts.dispatch(stream, input, &chosen, &mut rows, &mut of_each))?;
    let both = capture(stream, || {
        experts.dispatch(stream, input, &chosen, &mut rows, &mut of_each)?;
        // The experts' kernels would be here.
        experts.combine(stream, &rows, weights, &mut output)
    })?;
    let times = medians(comm, stream, [&dispatch, &both])?;
    drop((dispatch, both));
    // Experts that change nothing, and weights whose sum is 1.
    assert_eq!(stream.clone_dtoh(&output)?, *values, "the combined output is the input");
    experts.free()?;
    Ok(times)
}

/// Microseconds of NCCL's transfers, and of a whole layer with them.
fn by_nccl(comm: &Comm, setting: &Setting) -> Result<[f64; 2]> {
    let Setting { context, stream, values, input, weights, .. } = setting;
    let (hidden, tokens, on) = (setting.hidden, setting.tokens, comm.on(stream)?);
    let lists = Lists::new(comm, tokens, hidden);
    let len = |counts: &[usize]| counts.iter().sum::<usize>();
    let buffer = |counts: &[usize]| stream.alloc_zeros::<bf16>(len(counts).max(hidden));
    let (mut sent, mut received) = (buffer(&lists.sent)?, buffer(&lists.received)?);
    let (mut results, mut returned) = (buffer(&lists.sent_back)?, buffer(&lists.received_back)?);
    let mut there = || -> Result<()> {
        let (from, mut to) = (sent.slice(..len(&lists.sent)), received.slice_mut(..len(&lists.received)));
        on.all_to_all_v(&from, &lists.sent, &mut to, &lists.received)?;
        let (from, mut to) =
            (results.slice(..len(&lists.sent_back)), returned.slice_mut(..len(&lists.received_back)));
        on.all_to_all_v(&from, &lists.sent_back, &mut to, &lists.received_back)
    };
    there()?;
    on.sync()?;
    let transfers = capture(stream, there)?;

    let module = context.load_module(compile_ptx(SOURCE).expect("NVRTC compiles the kernels"))?;
    let (move_rows, add_up) = (module.load_function("move_rows")?, module.load_function("add_up")?);
    let upload = |rows: &[[i32; 2]]| {
        stream.clone_htod(if rows.is_empty() { &[0, 0][..] } else { rows.as_flattened() })
    };
    let (pack, place) = (upload(&lists.pack)?, upload(&lists.place)?);
    let (place_own, pack_back) = (upload(&lists.place_own)?, upload(&lists.pack_back)?);
    let sources = stream.clone_htod(&lists.sources)?;
    let mut placed = stream.alloc_zeros::<bf16>(EXPERTS * tokens * hidden)?;
    let mut summed = stream.alloc_zeros::<bf16>(tokens * hidden)?;
    let width = (hidden / 8) as i32;
    let moved = |from: &CudaSlice<bf16>,
                 to: &mut CudaSlice<bf16>,
                 rows: &CudaSlice<i32>,
                 count: usize|
     -> Result<()> {
        let config =
            LaunchConfig { grid_dim: (count as u32, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
        if count > 0 {
            // SAFETY: the kernel's parameters; the lists name rows of these buffers.
            unsafe {
                stream.launch_builder(&move_rows).arg(from).arg(to).arg(rows).arg(&width).launch(config)
            }?;
        }
        Ok(())
    };
    let nccl = capture(stream, || -> Result<()> {
        moved(input, &mut sent, &pack, lists.pack.len())?;
        let (from, mut to) = (sent.slice(..len(&lists.sent)), received.slice_mut(..len(&lists.received)));
        on.all_to_all_v(&from, &lists.sent, &mut to, &lists.received)?;
        moved(&received, &mut placed, &place, lists.place.len())?;
        moved(input, &mut placed, &place_own, lists.place_own.len())?;
        moved(&placed, &mut results, &pack_back, lists.pack_back.len())?;
        let (from, mut to) =
            (results.slice(..len(&lists.sent_back)), returned.slice_mut(..len(&lists.received_back)));
        on.all_to_all_v(&from, &lists.sent_back, &mut to, &lists.received_back)?;
        let (top_k, width) = (TOP_K as i32, (hidden / 4) as i32);
        let grid_dim = (tokens as u32, (hidden as u32 / 4).div_ceil(256), 1);
        let config = LaunchConfig { grid_dim, block_dim: (256, 1, 1), shared_mem_bytes: 0 };
        let mut launch = stream.launch_builder(&add_up);
        launch
            .arg(&returned)
            .arg(&placed)
            .arg(&sources)
            .arg(weights)
            .arg(&mut summed)
            .arg(&top_k)
            .arg(&width);
        // SAFETY: the kernel's parameters; the sources name rows of these buffers.
        unsafe { launch.launch(config) }?;
        Ok(())
    })?;

    let times = medians(comm, stream, [&transfers, &nccl])?;
    drop((transfers, nccl));
    assert_eq!(stream.clone_dtoh(&summed)?, *values, "the combined output is the input");
    Ok(times)
}

/// The median of the graphs' rounds, which alternate.
fn medians(comm: &Comm, stream: &Arc<CudaStream>, graphs: [&CudaGraph; 2]) -> Result<[f64; 2]> {
    let mut times = [const { Vec::new() }; 2];
    for _ in 0..ROUNDS {
        for (graph, times) in graphs.into_iter().zip(&mut times) {
            times.push(time(comm, stream, graph)?);
        }
    }
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
