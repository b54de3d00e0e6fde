//! A KV cache that goes from a rank that reads prompts (prefill) to one that continues them (decode), as engines that serve models split
//! the work. The prefill rank keeps its cache open; the decode rank fetches the blocks of a prompt, and says when they may be used again.
//!
//! `phalanx launch -n 2 -- target/debug/examples/kv_cache [PROMPTS]`, two GPUs of a host; without a launcher the ranks are threads.

use phalanx::cudarc::driver::CudaSlice;
use phalanx::{BackendKind, Comm, GpuBlock, GpuDescriptor, Result};
use serde::{Deserialize, Serialize};

/// The cache: blocks of tokens. A real one has a key and a value of each layer for each token.
const BLOCKS: usize = 64;
const TOKENS: usize = 16;
const NUMBERS: usize = 256;
/// Numbers of a block.
const BLOCK: usize = TOKENS * NUMBERS;
/// Blocks of a prompt.
const LENGTH: usize = 12;

const PREFILL: usize = 0;
const DECODE: usize = 1;

/// What the prefill rank says of a prompt whose blocks are ready.
#[derive(Debug, Serialize, Deserialize)]
struct Handover {
    prompt: usize,
    /// Where its tokens are, in the order of the text.
    blocks: Vec<usize>,
}

fn main() -> Result<()> {
    let prompts = std::env::args().nth(1).map_or(20, |prompts| prompts.parse().expect("a number of prompts"));
    if phalanx::choose()?.launcher.is_some() {
        return serve(&phalanx::init()?, prompts);
    }
    Comm::builder().backend(BackendKind::Nccl).try_run(2, |comm| serve(&comm, prompts)).map(drop)
}

fn serve(comm: &Comm, prompts: usize) -> Result<()> {
    match comm.rank() {
        PREFILL => prefill(comm, prompts),
        DECODE => decode(comm, prompts),
        rank => panic!("two ranks are needed, this is rank {rank}"),
    }
}

/// What the model computes for a token.
fn number(prompt: usize, token: usize, index: usize) -> f32 {
    ((prompt * 31 + token * 7 + index) % 1000) as f32
}

/// Fills blocks with the prompts' tokens, and hands them over.
fn prefill(comm: &Comm, prompts: usize) -> Result<()> {
    let stream = comm.cuda_stream()?;
    // Memory that another process can open.
    let mut cache = comm.register_gpu(comm.alloc_gpu::<f32>(BLOCKS * BLOCK)?)?;
    comm.send_object(cache.descriptor(), DECODE)?;
    let mut free: Vec<usize> = (0..BLOCKS).collect();
    let mut handed_over: Vec<Vec<usize>> = Vec::new();
    for prompt in 0..prompts {
        if free.len() < LENGTH {
            // The oldest prompt's blocks are free when the decode rank has fetched them.
            cache.wait_signals(DECODE, 1)?;
            free.extend(handed_over.remove(0));
        }
        // From both ends: a cache in use has holes.
        let blocks: Vec<usize> = (0..LENGTH)
            .map(|number| if number % 2 == 0 { free.remove(0) } else { free.pop().expect("enough are free") })
            .collect();
        for (place, block) in blocks.iter().enumerate() {
            let numbers: Vec<f32> =
                (0..BLOCK).map(|at| number(prompt, place * TOKENS + at / NUMBERS, at % NUMBERS)).collect();
            let first = block * BLOCK;
            stream.memcpy_htod(&numbers, &mut cache.slice_mut(first..first + BLOCK))?;
        }
        // The decode rank copies whenever it likes: the blocks must be written before it hears of them.
        stream.synchronize()?;
        comm.send_object(&Handover { prompt, blocks: blocks.clone() }, DECODE)?;
        handed_over.push(blocks);
    }
    // From the release on, nothing more can be fetched: not before all has been.
    cache.wait_signals(DECODE, handed_over.len() as u64)?;
    cache.release()?;
    println!("prefill: {prompts} prompts in a cache of {BLOCKS} blocks");
    Ok(())
}

/// Fetches the blocks of each prompt into its own cache, and looks at the tokens.
fn decode(comm: &Comm, prompts: usize) -> Result<()> {
    let stream = comm.cuda_stream()?;
    let descriptor: GpuDescriptor = comm.recv_object(PREFILL)?;
    let remote = comm.open_gpu::<f32>(&descriptor)?;
    let mut own: CudaSlice<f32> = stream.alloc_zeros(LENGTH * BLOCK)?;
    for _ in 0..prompts {
        let Handover { prompt, blocks } = comm.recv_object(PREFILL)?;
        let places = blocks.iter().enumerate();
        let list: Vec<GpuBlock> = places
            .map(|(place, block)| GpuBlock { local: place * BLOCK, remote: block * BLOCK, len: BLOCK })
            .collect();
        remote.get_list(&mut own, &list)?;
        // Behind the copies, on the same stream: the prefill rank may write the blocks again.
        remote.signal()?;
        // What continues the prompt would be a kernel on this stream.
        let numbers = stream.clone_dtoh(&own)?;
        let is_right = |(at, value): (usize, &f32)| *value == number(prompt, at / NUMBERS, at % NUMBERS);
        assert!(numbers.iter().enumerate().all(is_right), "prompt {prompt} is not what was handed over");
    }
    println!("decode: {prompts} prompts of {} tokens are right", LENGTH * TOKENS);
    Ok(())
}
