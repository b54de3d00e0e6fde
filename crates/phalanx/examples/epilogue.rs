//! A sum with an epilogue of one's own, in one kernel: `gelu(sum + bias)` of f32, against an all_reduce and a kernel behind it.
//!
//! `phalanx launch -n 2 -- target/release/examples/epilogue [ROWS] [COLUMNS]`

use phalanx::cudarc::driver::{CudaSlice, LaunchConfig};
use phalanx::jit::{Module, Program, peers, reads, value, writes};
use phalanx::nccl::Peers;
use phalanx::{Comm, ReduceOp, Result};
use std::time::Instant;

const SOURCE: &str = include_str!("kernels/epilogue.cu");
/// The kernel behind an all_reduce.
const BEHIND: &str = r#"
extern "C" __global__ void bias_gelu(const float* sum, const float* bias, float* out, long long n, int columns) {
    for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        const float x = sum[i] + bias[i % columns];
        out[i] = 0.5f * x * (1 + erff(x * 0.70710678f));
    }
}
"#;
/// So that both round alike.
const EXACT: &str = "--fmad=false";
const CALLS: u32 = 1000;

fn main() -> Result<()> {
    let args: Vec<usize> = std::env::args().skip(1).map(|arg| arg.parse().expect("a number")).collect();
    let (rows, columns) = (args.first().copied().unwrap_or(8), args.get(1).copied().unwrap_or(4096));
    let comm = phalanx::init()?;
    let nccl = comm.nccl().expect("ranks with GPUs");
    let ways = nccl.peers()?;
    let gpu = nccl.context();

    let (protocol, step, most) = if ways.has_ll128() { ("Ll128", 960, 1024) } else { ("Ll", 512, 128) };
    let image =
        Program::new("epilogue.cu", SOURCE).define("PROTOCOL", protocol).option(EXACT).compile_for(gpu)?;
    let fused = Module::load(gpu, &image)?.kernel("sum_bias_gelu")?;
    let behind = Module::load(gpu, &Program::new("behind.cu", BEHIND).option(EXACT).compile_for(gpu)?)?
        .kernel("bias_gelu")?;
    // A warp for each step, as far as there are lanes. All blocks run at once.
    let n = rows * columns;
    let warps = (n * 4).div_ceil(step).clamp(1, most);
    let config = LaunchConfig {
        grid_dim: (warps.div_ceil(4) as u32, 1, 1),
        block_dim: (128, 1, 1),
        shared_mem_bytes: 0,
    };

    let stream = comm.cuda_stream()?.clone();
    let value_of = |i: usize, rank: usize| ((i * 7 + rank * 3) % 64) as f32 / 16.0 - 2.0;
    let partial = stream.clone_htod(&(0..n).map(|i| value_of(i, comm.rank())).collect::<Vec<_>>())?;
    let bias = stream.clone_htod(&(0..columns).map(|i| i as f32 / columns as f32).collect::<Vec<_>>())?;
    let (mut sum, mut expected) = (stream.alloc_zeros::<f32>(n)?, stream.alloc_zeros::<f32>(n)?);
    let mut out = stream.alloc_zeros::<f32>(n)?;

    let (len, width) = (n as i64, columns as i32);
    let two = |sum: &mut CudaSlice<f32>, out: &mut CudaSlice<f32>| -> Result<()> {
        comm.all_reduce(&partial, sum, ReduceOp::Sum)?;
        let arguments = [reads(sum), reads(&bias), writes(out), value(&len), value(&width)];
        // SAFETY: the kernel's parameters; it stays within n values and one row of the bias.
        unsafe { behind.launch(&stream, LaunchConfig::for_num_elems(n as u32), arguments) }
    };
    let one = |ways: &Peers<'_>, out: &mut CudaSlice<f32>| -> Result<()> {
        let arguments = [peers(ways), reads(&partial), reads(&bias), writes(out), value(&len), value(&width)];
        // SAFETY: the kernel's parameters; it stays within n values and one row of the bias, and all ranks launch it alike.
        unsafe { fused.launch(&stream, config, arguments) }
    };
    let both = time(&comm, &ways, || two(&mut sum, &mut expected))?;
    let alone = time(&comm, &ways, || one(&ways, &mut out))?;
    assert_eq!(stream.clone_dtoh(&out)?, stream.clone_dtoh(&expected)?, "the same bits");
    if comm.rank() == 0 {
        println!("{rows} rows of {columns}: all_reduce and a kernel {both:.1} us, one kernel {alone:.1} us");
    }
    ways.free()?;
    comm.finalize()
}

/// µs of a call, after some that are not counted.
fn time(comm: &Comm, ways: &Peers<'_>, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    // Each waits for its own work.
    let sync = || ways.sync().and_then(|()| comm.sync());
    (0..10).try_for_each(|_| call())?;
    sync()?;
    comm.barrier()?;
    let began = Instant::now();
    (0..CALLS).try_for_each(|_| call())?;
    sync()?;
    Ok(began.elapsed().as_secs_f64() * 1e6 / f64::from(CALLS))
}
