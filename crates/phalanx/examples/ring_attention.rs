//! Attention over a sequence that is split over the ranks. Each rank has its queries and a block of keys and values; the
//! blocks go round the ring (a send and a receive in a group), while the GPU attends to the block that is there.
//!
//! ```text
//! cargo run --release -p phalanx --example ring_attention -- 2
//! phalanx launch -n 2 -- target/release/examples/ring_attention
//! ```

#[path = "shared/gpu.rs"]
mod gpu;
#[path = "shared/kernels.rs"]
mod kernels;
#[path = "shared/timeline.rs"]
mod timeline;

use cudarc::driver::{CudaFunction, CudaSlice, CudaStream, LaunchConfig, PushKernelArg};
use gpu::Result;
use phalanx::Comm;
use std::process::ExitCode;
use std::sync::Arc;
use timeline::{Timeline, mark};

const HEADS: usize = 32;
/// Positions of a rank: a multiple of `THREADS`.
const POSITIONS: usize = 1024;
/// Numbers of a head at a position; the kernel's `DIM`.
const DIM: usize = 64;
const THREADS: usize = 128;
const BLOCK: usize = HEADS * POSITIONS * DIM;

/// Combines a block of keys and values with what the blocks before have given. One thread to a query; `top` is the
/// largest score so far, `sum` the sum of the weights, both relative to it.
const KERNEL: &str = r#"
#define DIM 64
#define TILE 32
extern "C" __global__ void attend(const float *queries, const float *block, float *result, float *top, float *sum,
                                  int positions) {
    __shared__ float keys[TILE][DIM], values[TILE][DIM];
    size_t head = (size_t)blockIdx.y * positions;
    size_t row = head + blockIdx.x * blockDim.x + threadIdx.x;
    const float *all_values = block + (size_t)gridDim.y * positions * DIM;
    float query[DIM], out[DIM], largest = top[row], total = sum[row];
    for (int d = 0; d < DIM; d++) {
        query[d] = queries[row * DIM + d] * rsqrtf(DIM);
        out[d] = result[row * DIM + d];
    }
    for (int first = 0; first < positions; first += TILE) {
        for (int i = threadIdx.x; i < TILE * DIM; i += blockDim.x) {
            keys[i / DIM][i % DIM] = block[(head + first) * DIM + i];
            values[i / DIM][i % DIM] = all_values[(head + first) * DIM + i];
        }
        __syncthreads();
        for (int j = 0; j < TILE; j++) {
            float score = 0;
            for (int d = 0; d < DIM; d++) score += query[d] * keys[j][d];
            float higher = fmaxf(largest, score), shrink = expf(largest - higher), weight = expf(score - higher);
            total = total * shrink + weight;
            for (int d = 0; d < DIM; d++) out[d] = out[d] * shrink + weight * values[j][d];
            largest = higher;
        }
        __syncthreads();
    }
    for (int d = 0; d < DIM; d++) result[row * DIM + d] = out[d];
    top[row] = largest;
    sum[row] = total;
}
"#;

fn main() -> ExitCode {
    gpu::on_ranks("ring_attention", one_rank)
}

/// A number of a rank's queries (0), keys (1) or values (2), from -1 to 1.
fn number(rank: usize, which: usize, index: usize) -> f32 {
    let hash = (rank * 3 + which + 1).wrapping_mul(0x9e37_79b9).wrapping_add(index.wrapping_mul(0x85eb_ca6b));
    let hash = (hash ^ (hash >> 15)).wrapping_mul(0x2c1b_3c6d);
    ((hash >> 8) & 0xffff) as f32 / 32768.0 - 1.0
}

fn numbers(rank: usize, which: usize) -> impl Iterator<Item = f32> {
    (0..BLOCK).map(move |index| number(rank, which, index))
}

fn one_rank(comm: Comm) -> Result<()> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let context = comm.cuda_stream()?.context().clone();
    let (compute, exchange) = (context.new_stream()?, context.new_stream()?);
    let attend = kernels::compile(&context, KERNEL)?.load_function("attend")?;
    let queries = compute.clone_htod(&numbers(rank, 0).collect::<Vec<_>>())?;
    let own: Vec<f32> = numbers(rank, 1).chain(numbers(rank, 2)).collect();
    let mut attention = Attention { attend, queries, state: State::new(&compute)?, compute };

    let ring = comm.on(&exchange)?;
    let (right, left) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let mut timeline = None;
    // The first round connects the ranks.
    for _ in 0..2 {
        attention.state = State::new(&attention.compute)?;
        let mut here = attention.compute.clone_htod(&own)?;
        let mut next = attention.compute.alloc_zeros::<f32>(own.len())?;
        comm.barrier()?;
        let mut times = Timeline::start(&attention.compute)?;
        for step in 0..ranks {
            // What the block that comes overwrites, the step before has used.
            exchange.join(&attention.compute)?;
            if step + 1 < ranks {
                // Before the kernel: what comes on this stream after a read waits for who read the same before, too.
                let begin = mark(&exchange)?;
                ring.group(|ring| {
                    ring.send(&here, right)?;
                    ring.recv(&mut next, left)
                })?;
                times.add("exchanging", begin, mark(&exchange)?);
            }
            let begin = mark(&attention.compute)?;
            attention.to(&here)?;
            times.add("attending", begin, mark(&attention.compute)?);
            attention.compute.join(&exchange)?;
            std::mem::swap(&mut here, &mut next);
        }
        ring.sync()?;
        attention.compute.synchronize()?;
        timeline = Some(times);
    }
    let error = attention.largest_error(rank, ranks)?;
    if error > 1e-4 {
        return Err(format!("rank {rank}: the result is off by {error}").into());
    }
    if let (0, Some(times)) = (rank, timeline) {
        times.print(&["attending", "exchanging"])?;
        let overlap = times.overlap("attending", "exchanging")?;
        println!("{overlap:.2} ms of the exchange were behind the attention; largest error {error:.1e}");
    }
    Ok(())
}

/// What the blocks so far have given.
struct State {
    result: CudaSlice<f32>,
    top: CudaSlice<f32>,
    sum: CudaSlice<f32>,
}

impl State {
    fn new(stream: &Arc<CudaStream>) -> Result<State> {
        let rows = HEADS * POSITIONS;
        Ok(State {
            result: stream.alloc_zeros(rows * DIM)?,
            top: stream.clone_htod(&vec![-1e30; rows])?,
            sum: stream.alloc_zeros(rows)?,
        })
    }
}

struct Attention {
    attend: CudaFunction,
    compute: Arc<CudaStream>,
    queries: CudaSlice<f32>,
    state: State,
}

impl Attention {
    /// Attends to a block of keys and, behind them, values.
    fn to(&mut self, block: &CudaSlice<f32>) -> Result<()> {
        let grid_dim = ((POSITIONS / THREADS) as u32, HEADS as u32, 1);
        let config = LaunchConfig { grid_dim, block_dim: (THREADS as u32, 1, 1), shared_mem_bytes: 0 };
        let positions = POSITIONS as i32;
        let mut launch = self.compute.launch_builder(&self.attend);
        launch.arg(&self.queries).arg(block).arg(&mut self.state.result);
        launch.arg(&mut self.state.top).arg(&mut self.state.sum).arg(&positions);
        // SAFETY: the arguments are those of the kernel; a thread for each row of the buffers, whose lengths follow
        // from the same constants.
        unsafe { launch.launch(config) }?;
        Ok(())
    }

    /// Against plain attention over the whole sequence, for some rows.
    fn largest_error(&self, rank: usize, ranks: usize) -> Result<f64> {
        let result = self.compute.clone_dtoh(&self.state.result)?;
        let sum = self.compute.clone_dtoh(&self.state.sum)?;
        let mut largest = 0f64;
        for (head, position) in [(0, 0), (HEADS / 2, 77), (HEADS - 1, POSITIONS - 1)] {
            let row = head * POSITIONS + position;
            for (d, expected) in plain(rank, ranks, head, position).into_iter().enumerate() {
                let ours = f64::from(result[row * DIM + d]) / f64::from(sum[row]);
                largest = largest.max((ours - expected).abs());
            }
        }
        Ok(largest)
    }
}

/// One row of attention, in double precision.
fn plain(rank: usize, ranks: usize, head: usize, position: usize) -> [f64; DIM] {
    let at = |rank, which, position: usize, d| {
        f64::from(number(rank, which, (head * POSITIONS + position) * DIM + d))
    };
    let (mut sum, mut row) = (0.0, [0.0; DIM]);
    for (other, key) in (0..ranks).flat_map(|other| (0..POSITIONS).map(move |key| (other, key))) {
        let score: f64 = (0..DIM).map(|d| at(rank, 0, position, d) * at(other, 1, key, d)).sum();
        let weight = (score / (DIM as f64).sqrt()).exp();
        sum += weight;
        for (d, element) in row.iter_mut().enumerate() {
            *element += weight * at(other, 2, key, d);
        }
    }
    row.map(|element| element / sum)
}
