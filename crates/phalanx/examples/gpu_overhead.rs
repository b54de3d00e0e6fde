//! What phalanx adds to NCCL: CPU time of an enqueue, time of an operation, and bus bandwidth, against the bare C
//! call on the same communicator, stream and buffers, in alternating rounds.
//!
//! `cargo run --release --example gpu_overhead [RANKS] [LARGEST BYTES]`

#[path = "shared/rounds.rs"]
mod rounds;

use phalanx::cudarc::driver::{DevicePtr, DevicePtrMut};
use phalanx::{BackendKind, Comm, ReduceOp, Result};
use phalanx_sys::nccl::{Api, NCCL, ncclDataType_t, ncclResult_t, red_op};
use rounds::{Comparison, Sample};
use std::time::Instant;

/// Rounds of each kind; medians count, of the rounds' differences and ratios too.
const ROUNDS: usize = 41;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse().expect("a number"));
    let (ranks, largest) = (args.next().unwrap_or(2), args.next().unwrap_or(1 << 30));
    let run = Comm::builder().backend(BackendKind::Nccl).run(ranks, |comm| measure(&comm, largest))?;
    run.into_iter().collect()
}

fn measure(comm: &Comm, largest: usize) -> Result<()> {
    let library = Api::load(&NCCL)?;
    let all_reduce = library.ncclAllReduce.expect("every NCCL has it");
    let stream = comm.cuda_stream().expect("a communicator on a GPU").clone();
    let send = stream.alloc_zeros::<f32>(largest / 4)?;
    let mut recv = stream.alloc_zeros::<f32>(largest / 4)?;
    let handle = comm.nccl().expect("NCCL").raw_handle();
    if comm.rank() == 0 {
        println!(
            "NCCL {}, {} GPUs, all_reduce of f32",
            comm.nccl().expect("NCCL").version(),
            comm.world_size()
        );
        println!("     bytes  enqueue us: bare  phalanx  more   time us: bare  phalanx  ratio   busbw GB/s");
    }
    let mut bytes = 8;
    while bytes <= largest {
        let (count, repeats) = (bytes / 4, if bytes <= 1 << 20 { 200 } else { 10 });
        let mut bare = Vec::new();
        let mut ours = Vec::new();
        for round in 0..ROUNDS + 2 {
            // First: the library connects the ranks in the first operation, and answers that it is in progress.
            let safe = {
                let (source, mut target) = (send.slice(..count), recv.slice_mut(..count));
                timed(comm, repeats, || comm.all_reduce(&source, &mut target, ReduceOp::Sum))?
            };
            // The address as cudarc gives it: ours does that, too.
            let raw = timed(comm, repeats, || {
                let (source, _reading) = send.device_ptr(&stream);
                let (target, _writing) = recv.device_ptr_mut(&stream);
                // SAFETY: the communicator's own handle, on its own thread; buffers of the largest size.
                let answer = unsafe {
                    let (source, target) = (source as *const _, target as *mut _);
                    let stream = stream.cu_stream().cast();
                    all_reduce(source, target, count, ncclDataType_t::Float32, red_op::Sum, handle, stream)
                };
                match answer {
                    ncclResult_t::Success => Ok(()),
                    // The first operation of its kind connects the ranks.
                    ncclResult_t::InProgress => comm.nccl().expect("NCCL").async_error(),
                    error => panic!("ncclAllReduce answered {error:?}"),
                }
            })?;
            // The first rounds warm up.
            if round >= 2 {
                bare.push(raw);
                ours.push(safe);
            }
        }
        report(comm, bytes, &bare, &ours);
        bytes *= if bytes < 1 << 20 { 8 } else { 4 };
    }
    Ok(())
}

/// Times `repeats` operations: until they are enqueued, and until they are complete.
fn timed(comm: &Comm, repeats: u32, mut operation: impl FnMut() -> Result<()>) -> Result<Sample> {
    comm.barrier()?;
    let start = Instant::now();
    for _ in 0..repeats {
        operation()?;
    }
    let enqueue = start.elapsed() / repeats;
    comm.cuda_stream().expect("a GPU").synchronize()?;
    Ok(Sample { enqueue, total: start.elapsed() / repeats })
}

fn report(comm: &Comm, bytes: usize, bare: &[Sample], ours: &[Sample]) {
    if comm.rank() != 0 {
        return;
    }
    let Comparison { enqueue, more, total, ratio } = Comparison::of(bare, ours);
    let ranks = comm.world_size() as f64;
    let busbw = bytes as f64 / total[1] / 1e3 * 2.0 * (ranks - 1.0) / ranks;
    println!(
        "{bytes:>10}  {:>16.2} {:>8.2} {more:>5.2} {:>14.2} {:>8.2} {ratio:>6.3} {busbw:>12.1}",
        enqueue[0], enqueue[1], total[0], total[1]
    );
}
