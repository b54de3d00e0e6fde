//! `all_reduce_rms_norm` as one kernel, and as NCCL's all_reduce with a kernel behind it: µs of a call in a CUDA graph of 20, bf16.
//!
//! `cargo run --release -p phalanx --example fused_norm [RANKS]`

use phalanx::cudarc::driver::sys::{CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};
use phalanx::cudarc::driver::{CudaSlice, CudaStream};
use phalanx::nccl::{Config, GpuAlgorithm};
use phalanx::{BackendKind, Comm, F8E4M3, ReduceOp, Result, Source, Target, bf16};
use std::sync::Arc;

const HIDDEN: [usize; 4] = [1024, 4096, 8192, 16_384];
const TOKENS: [usize; 5] = [1, 8, 32, 64, 128];
/// Calls in a graph, and launches of it that are timed.
const CALLS: usize = 20;
const LAUNCHES: usize = 20;

fn main() -> Result<()> {
    let ranks = std::env::args().nth(1).map_or(2, |ranks| ranks.parse().expect("a number of ranks"));
    let times = |algorithm| -> Result<Vec<Times>> {
        let mut config = Config::default();
        config.gpu_algorithm = Some(algorithm);
        Ok(Comm::builder().backend(BackendKind::Nccl).nccl(config).try_run(ranks, measure)?.swap_remove(0))
    };
    let (fused, two) = (times(GpuAlgorithm::Auto)?, times(GpuAlgorithm::Nccl)?);
    println!("hidden tokens  NCCL + norm     fused (ratio)   to f8e4m3 (ratio)");
    for (at, (fused, two)) in fused.iter().zip(&two).enumerate() {
        let (hidden, tokens) = (HIDDEN[at / TOKENS.len()], TOKENS[at % TOKENS.len()]);
        let ratio = |new: f64, old: f64| format!("{new:9.2} ({:.2})", new / old);
        let (normed, quantised) = (ratio(fused.normed, two.normed), ratio(fused.quantised, two.quantised));
        println!("{hidden:6} {tokens:6} {:12.2} {normed} {quantised}", two.normed);
    }
    Ok(())
}

/// µs of a call.
struct Times {
    normed: f64,
    quantised: f64,
}

fn measure(comm: Comm) -> Result<Vec<Times>> {
    let nccl = comm.nccl().expect("NCCL");
    // SAFETY: all work is on one stream.
    unsafe { nccl.context().disable_event_tracking() };
    let stream = nccl.context().new_stream()?;
    let mut times = Vec::new();
    for (hidden, tokens) in HIDDEN.iter().flat_map(|hidden| TOKENS.map(|tokens| (*hidden, tokens))) {
        let len = hidden * tokens;
        let weight = stream.clone_htod(&vec![bf16::ONE; hidden])?;
        let mut residual = stream.alloc_zeros::<bf16>(len)?;
        let (plain, mut output) = (stream.alloc_zeros::<bf16>(len)?, stream.alloc_zeros::<bf16>(len)?);
        let mut both = normed(&comm, &stream, &plain, &mut residual, &weight, &mut output)?;
        // NCCL may be faster between windows.
        let on_stream = comm.on(&stream)?;
        let on_stream = on_stream.nccl().expect("NCCL");
        let (window, mut output) = (on_stream.alloc::<bf16>(len)?, on_stream.alloc::<bf16>(len)?);
        both = both.min(normed(&comm, &stream, &window, &mut residual, &weight, &mut output)?);
        let mut bytes = stream.clone_htod(&vec![F8E4M3::from_f32(0.0); len])?;
        let mut scales = stream.alloc_zeros::<f32>(tokens)?;
        let quantised = timed(&comm, &stream, || {
            let nccl = comm.on(&stream)?;
            let nccl = nccl.nccl().expect("NCCL");
            nccl.all_reduce_rms_norm_quantized(&plain, &mut residual, &weight, 1e-6, &mut bytes, &mut scales)
        })?;
        times.push(Times { normed: both, quantised });
    }
    comm.finalize()?;
    Ok(times)
}

fn normed<S, R>(
    comm: &Comm,
    stream: &Arc<CudaStream>,
    input: &S,
    residual: &mut CudaSlice<bf16>,
    weight: &CudaSlice<bf16>,
    output: &mut R,
) -> Result<f64>
where
    S: Source<Elem = bf16>,
    R: Target<Elem = bf16>,
{
    timed(comm, stream, || {
        let comm = comm.on(stream)?;
        comm.nccl().expect("NCCL").all_reduce_rms_norm(input, residual, weight, 1e-6, output)
    })
}

/// µs of a call, in a graph; the mean of all ranks.
fn timed(comm: &Comm, stream: &Arc<CudaStream>, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    call()?;
    comm.on(stream)?.sync()?;
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    let called = (0..CALLS).try_for_each(|_| call());
    let graph = stream.end_capture(CUgraphInstantiate_flags(0));
    called?;
    let graph = graph?.expect("calls");
    graph.upload()?;
    graph.launch()?;
    stream.synchronize()?;
    comm.barrier()?;
    let event = || stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
    let (start, end) = (event()?, event()?);
    start.record(stream)?;
    (0..LAUNCHES).try_for_each(|_| graph.launch())?;
    end.record(stream)?;
    stream.synchronize()?;
    let mut time = [f64::from(start.elapsed_ms(&end)?) * 1e3 / (CALLS * LAUNCHES) as f64];
    comm.all_reduce_in_place(&mut time, ReduceOp::Avg)?;
    Ok(time[0])
}
