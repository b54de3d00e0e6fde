//! Bandwidth of puts and gets to another rank's GPU, and of a list of 1,000 blocks of 64 KiB, against `cuMemcpyPeerAsync` between buffers of one
//! process, on the same two GPUs, in alternating rounds.
//!
//! `phalanx launch -n 2 -- target/release/examples/gpu_window_bandwidth [LARGEST BYTES] [ROUNDS]`; without a launcher the ranks are threads. Both
//! processes see both GPUs.

use phalanx::cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, result, sys};
use phalanx::{BackendKind, Comm, GpuBlock, RemoteGpuWindow, Result};
use std::sync::Arc;
use std::time::Instant;

/// The list.
const BLOCKS: usize = 1000;
const BLOCK: usize = 64 << 10;

fn main() -> Result<()> {
    let number =
        |nth, default| std::env::args().nth(nth).map_or(default, |arg| arg.parse().expect("a number"));
    let (largest, rounds) = (number(1, 1 << 30), number(2, 15));
    if phalanx::choose()?.launcher.is_some() {
        return measure(&phalanx::init()?, largest, rounds);
    }
    Comm::builder().backend(BackendKind::Nccl).try_run(2, |comm| measure(&comm, largest, rounds)).map(drop)
}

fn measure(comm: &Comm, largest: usize, rounds: usize) -> Result<()> {
    let len = largest.max(2 * BLOCKS * BLOCK);
    let window = comm.register_gpu(comm.alloc_gpu::<u8>(len)?)?;
    let all = comm.all_gather_object(window.descriptor())?;
    let gpus = comm.all_gather_value(comm.gpu().expect("a GPU") as u64)?;
    if comm.rank() == 0 {
        let remote = comm.open_gpu::<u8>(&all[1])?;
        let both = Both::new(comm, len, gpus[1] as usize, rounds)?;
        compare(&both, &remote, comm.alloc_gpu::<u8>(len)?, largest)?;
    }
    comm.barrier()?;
    window.release().map(drop)
}

/// Buffers of this process on both GPUs, and how often both ways are timed.
struct Both {
    rounds: usize,
    stream: Arc<CudaStream>,
    near: CudaSlice<u8>,
    far_stream: Arc<CudaStream>,
    far: CudaSlice<u8>,
}

impl Both {
    fn new(comm: &Comm, len: usize, peer: usize, rounds: usize) -> Result<Both> {
        let stream = comm.cuda_stream()?.clone();
        let far_stream = CudaContext::new(peer)?.default_stream();
        // Plain memory and peer access, without which the driver copies over the host.
        // SAFETY: so many bytes of the context that is current, for the slice alone.
        let far = unsafe { far_stream.upgrade_device_ptr(result::malloc_sync(len)?, len) };
        let near = comm.alloc_gpu(len)?;
        let other_way = [(&far_stream, &stream), (&stream, &far_stream)];
        let are_two = far_stream.context().ordinal() != stream.context().ordinal();
        for (from, to) in other_way.into_iter().filter(|_| are_two) {
            from.context().bind_to_thread()?;
            // SAFETY: contexts that are alive. It may be enabled already.
            let enabled = unsafe { sys::cuCtxEnablePeerAccess(to.context().cu_ctx(), 0) };
            if enabled != sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED {
                enabled.result()?;
            }
        }
        stream.context().bind_to_thread()?;
        Ok(Both { rounds, near, stream, far_stream, far })
    }

    /// One copy of so many bytes, from this GPU or to it.
    fn copy(&self, is_put: bool, bytes: usize) -> Result<()> {
        let near = (self.near.device_ptr(&self.stream).0, self.stream.context().cu_ctx());
        let far = (self.far.device_ptr(&self.far_stream).0, self.far_stream.context().cu_ctx());
        let (to, from) = if is_put { (far, near) } else { (near, far) };
        // SAFETY: buffers of at least so many bytes, in their contexts, alive until the stream is idle.
        let copied =
            unsafe { sys::cuMemcpyPeerAsync(to.0, to.1, from.0, from.1, bytes, self.stream.cu_stream()) };
        copied.result().map_err(Into::into)
    }
}

fn compare(
    both: &Both,
    remote: &RemoteGpuWindow<u8>,
    mut local: CudaSlice<u8>,
    largest: usize,
) -> Result<()> {
    println!("                      bytes   GB/s: cuMemcpyPeerAsync  phalanx   ratio");
    let mut sizes: Vec<usize> =
        (0..).map(|step| (64 << 10) << (2 * step)).take_while(|size| *size < largest).collect();
    sizes.push(largest);
    for bytes in sizes {
        let repeats = ((256 << 20) / bytes).clamp(4, 400);
        report("put", both, true, bytes, repeats, || remote.put(&local.slice(..bytes), 0))?;
        report("get", both, false, bytes, repeats, || remote.get(&mut local.slice_mut(..bytes), 0))?;
    }
    // Every second block of the window, to a row of blocks.
    let list: Vec<GpuBlock> = (0..BLOCKS)
        .map(|block| GpuBlock { local: block * BLOCK, remote: 2 * block * BLOCK, len: BLOCK })
        .collect();
    report("put of 1000 blocks", both, true, BLOCKS * BLOCK, 4, || remote.put_list(&local, &list))?;
    report("get of 1000 blocks", both, false, BLOCKS * BLOCK, 4, || remote.get_list(&mut local, &list))
}

/// Rounds in turns, whose medians count: copies of `cuMemcpyPeerAsync` of so many bytes, and `ours`.
fn report(
    name: &str,
    both: &Both,
    is_put: bool,
    bytes: usize,
    repeats: usize,
    mut ours: impl FnMut() -> Result<()>,
) -> Result<()> {
    let mut rounds = Vec::new();
    for round in 0..both.rounds + 2 {
        let bare = timed(both, repeats, || both.copy(is_put, bytes))?;
        let ours = timed(both, repeats, &mut ours)?;
        // The first rounds warm up.
        if round >= 2 {
            rounds.push([bare, ours]);
        }
    }
    let median = |of: fn(&[f64; 2]) -> f64| {
        let mut values: Vec<f64> = rounds.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let rate = |seconds: f64| bytes as f64 / seconds / 1e9;
    let (bare, ours, ratio) =
        (median(|round| round[0]), median(|round| round[1]), median(|round| round[0] / round[1]));
    println!("{name:<18} {bytes:>10} {:>25.1} {:>8.1} {ratio:>7.3}", rate(bare), rate(ours));
    Ok(())
}

/// Seconds of a call, over so many until all are complete.
fn timed(both: &Both, repeats: usize, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    both.stream.synchronize()?;
    let start = Instant::now();
    (0..repeats).try_for_each(|_| call())?;
    both.stream.synchronize()?;
    Ok(start.elapsed().as_secs_f64() / repeats as f64)
}
