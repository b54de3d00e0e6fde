//! What phalanx adds to NCCL: CPU time of an enqueue, time of an operation, and bus bandwidth, against the bare C
//! call on the same communicator, stream and buffers, and against an empty kernel's launch, in alternating rounds.
//!
//! `cargo run --release -p phalanx --example gpu_overhead [RANKS] [LARGEST BYTES] [all_reduce|all_gather|reduce_scatter|all_to_all]`
//!
//! Under `phalanx launch` its processes are the ranks.

#[path = "shared/rounds.rs"]
mod rounds;

use phalanx::cudarc::driver::{CudaView, CudaViewMut, DevicePtr, DevicePtrMut, LaunchConfig};
use phalanx::cudarc::nvrtc::Ptx;
use phalanx::{BackendKind, Comm, ReduceOp, Result};
use phalanx_sys::nccl::{Api, NCCL, ncclComm_t, ncclDataType_t, ncclResult_t, red_op};
use rounds::{Comparison, Sample};
use std::ffi::c_void;
use std::time::Instant;

/// Rounds of each kind; medians count, of the rounds' differences and ratios too.
const ROUNDS: usize = 41;
/// A kernel that does nothing.
const EMPTY: &str = ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry empty() { ret; }\n";
const F32: ncclDataType_t = ncclDataType_t::Float32;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number =
        |index: usize, default| args.get(index).map_or(default, |arg| arg.parse().expect("a number"));
    let (ranks, largest) = (number(0, 2), number(1, 1 << 30));
    let operation = Operation::named(args.get(2).map_or("all_reduce", String::as_str));
    if phalanx::choose()?.launcher.is_some() {
        return measure(&phalanx::init()?, operation, largest);
    }
    let builder = Comm::builder().backend(BackendKind::Nccl);
    builder.try_run(ranks, |comm| measure(&comm, operation, largest)).map(drop)
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Operation {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
}

impl Operation {
    fn named(name: &str) -> Operation {
        match name {
            "all_reduce" => Operation::AllReduce,
            "all_gather" => Operation::AllGather,
            "reduce_scatter" => Operation::ReduceScatter,
            "all_to_all" => Operation::AllToAll,
            _ => panic!("{name} is none of all_reduce, all_gather, reduce_scatter, all_to_all"),
        }
    }

    /// The C call's count, and the lengths of both buffers, of which the larger has about so many elements.
    fn lengths(self, elements: usize, ranks: usize) -> (usize, usize, usize) {
        let block = (elements / ranks).max(1);
        let whole = block * ranks;
        match self {
            Operation::AllReduce => (elements, elements, elements),
            Operation::AllToAll => (block, whole, whole),
            Operation::AllGather => (block, block, whole),
            Operation::ReduceScatter => (block, whole, block),
        }
    }

    fn ours(self, comm: &Comm, send: &CudaView<'_, f32>, recv: &mut CudaViewMut<'_, f32>) -> Result<()> {
        match self {
            Operation::AllReduce => comm.all_reduce(send, recv, ReduceOp::Sum),
            Operation::AllGather => comm.all_gather(send, recv),
            Operation::ReduceScatter => comm.reduce_scatter(send, recv, ReduceOp::Sum),
            Operation::AllToAll => comm.all_to_all(send, recv),
        }
    }

    /// The C call.
    ///
    /// # Safety
    /// The communicator's own thread; buffers as long as [`Operation::lengths`] says, on the stream's GPU.
    unsafe fn bare(
        self,
        library: &Api,
        (send, recv): (*const c_void, *mut c_void),
        count: usize,
        comm: ncclComm_t,
        stream: *mut c_void,
    ) -> ncclResult_t {
        const MISSING: &str = "this NCCL does not have the operation";
        // SAFETY: the caller's contract.
        unsafe {
            match self {
                Operation::AllReduce => {
                    library.ncclAllReduce.expect(MISSING)(send, recv, count, F32, red_op::Sum, comm, stream)
                }
                Operation::AllGather => {
                    library.ncclAllGather.expect(MISSING)(send, recv, count, F32, comm, stream)
                }
                Operation::ReduceScatter => library.ncclReduceScatter.expect(MISSING)(
                    send,
                    recv,
                    count,
                    F32,
                    red_op::Sum,
                    comm,
                    stream,
                ),
                Operation::AllToAll => {
                    library.ncclAlltoAll.expect(MISSING)(send, recv, count, F32, comm, stream)
                }
            }
        }
    }

    /// What the time is compared with, as nccl-tests has it: bytes that pass a GPU's links, for each of the larger buffer.
    fn bus_factor(self, ranks: usize) -> f64 {
        let share = (ranks - 1) as f64 / ranks as f64;
        if self == Operation::AllReduce { 2.0 * share } else { share }
    }
}

fn measure(comm: &Comm, operation: Operation, largest: usize) -> Result<()> {
    let library = Api::load(&NCCL)?;
    let ranks = comm.world_size();
    let stream = comm.cuda_stream()?.clone();
    let most = (largest / 4).max(ranks);
    let send = stream.alloc_zeros::<f32>(most)?;
    let mut recv = stream.alloc_zeros::<f32>(most)?;
    let handle = comm.nccl().expect("NCCL").raw_handle();
    if comm.rank() == 0 {
        println!("NCCL {}, {ranks} GPUs, {operation:?} of f32", comm.nccl().expect("NCCL").version());
        println!(
            "     bytes  enqueue us: bare  phalanx  more   time us: bare  phalanx  ratio   busbw GB/s   empty kernel us"
        );
    }
    let empty = stream
        .context()
        .load_module(Ptx::from_src(EMPTY))
        .and_then(|module| module.load_function("empty"))?;
    let mut bytes = 8;
    while bytes <= largest {
        let (count, sent, received) = operation.lengths(bytes / 4, ranks);
        let repeats = if bytes <= 1 << 20 { 200 } else { 10 };
        let mut bare = Vec::new();
        let mut ours = Vec::new();
        let mut launches = Vec::new();
        for round in 0..ROUNDS + 2 {
            // First: the library connects the ranks in the first operation, and answers that it is in progress.
            let safe = {
                let (source, mut target) = (send.slice(..sent), recv.slice_mut(..received));
                timed(comm, repeats, || operation.ours(comm, &source, &mut target))?
            };
            // The address as cudarc gives it: ours does that, too.
            let raw = timed(comm, repeats, || {
                let (source, _reading) = send.device_ptr(&stream);
                let (target, _writing) = recv.device_ptr_mut(&stream);
                let buffers = (source as *const c_void, target as *mut c_void);
                // SAFETY: the communicator's own handle, on its own thread; buffers of the largest size.
                let answer =
                    unsafe { operation.bare(&library, buffers, count, handle, stream.cu_stream().cast()) };
                match answer {
                    ncclResult_t::Success => Ok(()),
                    // The first operation of its kind connects the ranks.
                    ncclResult_t::InProgress => comm.nccl().expect("NCCL").async_error(),
                    error => panic!("NCCL answered {error:?}"),
                }
            })?;
            let one = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (32, 1, 1), shared_mem_bytes: 0 };
            let launch = timed(comm, repeats, || {
                // SAFETY: the kernel has no parameters and does nothing.
                unsafe { stream.launch_builder(&empty).launch(one) }.map(drop).map_err(Into::into)
            })?;
            // The first rounds warm up.
            if round >= 2 {
                launches.push(launch.enqueue);
                bare.push(raw);
                ours.push(safe);
            }
        }
        launches.sort_unstable();
        let empty = launches[launches.len() / 2].as_secs_f64() * 1e6;
        report(comm, operation, sent.max(received) * 4, &bare, &ours, empty);
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
    comm.cuda_stream()?.synchronize()?;
    Ok(Sample { enqueue, total: start.elapsed() / repeats })
}

fn report(comm: &Comm, operation: Operation, bytes: usize, bare: &[Sample], ours: &[Sample], empty: f64) {
    if comm.rank() != 0 {
        return;
    }
    let Comparison { enqueue, more, total, ratio } = Comparison::of(bare, ours);
    let busbw = bytes as f64 / total[1] / 1e3 * operation.bus_factor(comm.world_size());
    println!(
        "{bytes:>10}  {:>16.2} {:>8.2} {more:>5.2} {:>14.2} {:>8.2} {ratio:>6.3} {busbw:>12.1} {empty:>17.2}",
        enqueue[0], enqueue[1], total[0], total[1]
    );
}
