//! What communication adds to a step of training on GPUs, with replicated or with sharded parameters.
//! `docs/benchmarks/torch_training.py` does the same with PyTorch.
//!
//! ```text
//! cargo build --release -p phalanx-train --example gpu_step
//! phalanx launch -n 2 -- target/release/examples/gpu_step --mode ddp
//! phalanx launch -n 2 -- target/release/examples/gpu_step --mode shard
//! ```
//!
//! The network has the matrices of GPT-2 with 124 M parameters, and only the products with them: no nonlinearity, norm, bias or residual. Each
//! token attends to itself alone, so that the values are the output of attention. The gradient of the logits is given. Activations
//! and gradients are bf16. With `--precision mixed` (default) the master weights, AdamW's moments and the sums of gradients are f32, with
//! `--precision bf16` they are bf16, too.
//!
//! - `ddp`: gradient buckets of 25 MiB, sent while the backward goes on. Without communication, gradients go to memory of their own.
//! - `shard`: a `ShardedGroup` for each block. Its parameters are gathered while the block before is computed, freed after it, and
//!   gathered anew for the backward. Without communication, the parameters stay, and the own part of the own gradient counts.
//!
//! Rounds with and without communication take turns. A round's steps are enqueued without a wait between them. Exposed communication is
//! the median of the rounds' differences. Memory is that of rank 0's GPU after the rounds with communication: the pool returns nothing.
//!
//! Times: `docs/benchmarks/training.md`.

mod network;
mod training;

use network::{Layer, Network};
use phalanx::cudarc::driver::{result::mem_get_info, sys};
use phalanx::{Comm, bf16};
use phalanx_train::device::Gpu;
use std::time::Instant;
use training::{Replicated, Sharded, Training};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const HELP: &str = "\
gpu_step --mode ddp|shard [--precision mixed|bf16] [--width 768] [--blocks 12] [--vocabulary 50304] [--rows 8192] [--rounds 15] [--steps 10]

--rows is the number of tokens of a rank in a step, --steps that of steps in a round.";

#[derive(Debug, Clone, Default)]
struct Options {
    mode: String,
    precision: String,
    width: usize,
    blocks: usize,
    vocabulary: usize,
    rows: usize,
    rounds: usize,
    steps: usize,
}

fn options() -> Result<Options> {
    let sizes = Options { width: 768, blocks: 12, vocabulary: 50304, rows: 8192, ..Options::default() };
    let mut options = Options { precision: "mixed".into(), rounds: 15, steps: 10, ..sizes };
    let mut args = std::env::args().skip(1);
    while let Some(name) = args.next() {
        if name == "--help" {
            println!("{HELP}");
            std::process::exit(0);
        }
        let value = args.next().ok_or_else(|| format!("{name} takes a value\n{HELP}"))?;
        let number = match name.as_str() {
            "--mode" => {
                options.mode = value;
                continue;
            }
            "--precision" => {
                options.precision = value;
                continue;
            }
            "--width" => &mut options.width,
            "--blocks" => &mut options.blocks,
            "--vocabulary" => &mut options.vocabulary,
            "--rows" => &mut options.rows,
            "--rounds" => &mut options.rounds,
            "--steps" => &mut options.steps,
            _ => return Err(format!("{name} is no option\n{HELP}").into()),
        };
        *number = value.parse().map_err(|error| format!("{name} {value}: {error}"))?;
        if *number == 0 {
            return Err(format!("{name} 0: at least 1").into());
        }
    }
    Ok(options)
}

fn main() -> Result<()> {
    let options = options()?;
    let comm = phalanx::init()?;
    let gpu = Gpu::new(comm.cuda_stream()?)?;
    let network = Network::new(&gpu, &options, comm.rank())?;
    match (options.mode.as_str(), options.precision.as_str()) {
        ("ddp", "mixed") => measure(&comm, &options, &mut Replicated::<f32>::new(&comm, network)?),
        ("ddp", "bf16") => measure(&comm, &options, &mut Replicated::<bf16>::new(&comm, network)?),
        ("shard", "mixed") => measure(&comm, &options, &mut Sharded::<f32>::new(&comm, network)?),
        ("shard", "bf16") => measure(&comm, &options, &mut Sharded::<bf16>::new(&comm, network)?),
        (mode, precision) => Err(format!("--mode {mode:?} --precision {precision:?}\n{HELP}").into()),
    }
}

fn measure(comm: &Comm, options: &Options, training: &mut dyn Training) -> Result<()> {
    // Milliseconds of a step.
    let mut round = |communicates: bool| -> Result<f64> {
        comm.sync()?;
        training.network().gpu.stream().synchronize()?;
        comm.barrier()?;
        let start = Instant::now();
        (0..options.steps).try_for_each(|_| training.step(comm, communicates))?;
        comm.sync()?;
        training.network().gpu.stream().synchronize()?;
        Ok(start.elapsed().as_secs_f64() * 1e3 / options.steps as f64)
    };
    // Connects, agrees on the order of gradients, and fills the memory pool.
    (0..3).try_for_each(|_| round(true).map(drop))?;
    let (free, total) = mem_get_info()?;
    let allocated = most_allocated()?;
    (0..2).try_for_each(|_| round(false).map(drop))?;
    let rounds =
        (0..options.rounds).map(|_| Ok([round(true)?, round(false)?])).collect::<Result<Vec<_>>>()?;
    let quantile = |of: &dyn Fn(&[f64; 2]) -> f64, at: f64| {
        let mut values: Vec<f64> = rounds.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values[((values.len() - 1) as f64 * at).round() as usize]
    };
    let exposed = |at| quantile(&|[with, without]| with - without, at);
    if comm.rank() == 0 {
        println!(
            "phalanx {} {}, {} ranks, {:.1} M parameters: step {:.3} ms, without communication {:.3} ms, exposed {:.3} ms (quartiles {:.3} to {:.3}), GPU memory {} MiB, of it allocated at most {} MiB",
            options.mode,
            options.precision,
            comm.world_size(),
            training.network().layers().map(Layer::len).sum::<usize>() as f64 / 1e6,
            quantile(&|[with, _]| *with, 0.5),
            quantile(&|[_, without]| *without, 0.5),
            exposed(0.5),
            exposed(0.25),
            exposed(0.75),
            (total - free) >> 20,
            allocated >> 20,
        );
    }
    Ok(())
}

/// The most bytes that were allocated from the GPU's memory pool at a time.
fn most_allocated() -> Result<u64> {
    let (mut device, mut pool, mut bytes) = (0, std::ptr::null_mut(), 0u64);
    let most = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH;
    // SAFETY: out-pointers on the stack; the attribute is of 64 bits.
    unsafe {
        sys::cuCtxGetDevice(&raw mut device).result()?;
        sys::cuDeviceGetDefaultMemPool(&raw mut pool, device).result()?;
        sys::cuMemPoolGetAttribute(pool, most, (&raw mut bytes).cast()).result()?;
    }
    Ok(bytes)
}
