//! What communication costs in candle, measured on this machine.
//!
//! ```text
//! phalanx launch -n 2 -- target/release/examples/measure mlp            a split MLP over the whole one on one rank
//! phalanx launch -n 2 -- target/release/examples/measure all-reduce     the call through candle and through phalanx alone
//! phalanx launch -n 2 -- target/release/examples/measure gpt            a GPT whose gradients are averaged, over one alone
//! ```
//!
//! Times are medians. `docs/benchmarks/torch_gpt.py` trains the same GPT with PyTorch.

mod shared;

use candle_core::backprop::GradStore;
use candle_core::{D, DType, Result, Tensor, Var};
use candle_nn::{LayerNorm, Linear, Module, VarMap, loss, ops};
use clap::{Parser, ValueEnum};
use phalanx::ReduceOp;
use phalanx_candle::{
    AdamW, AdamWSettings, ColumnParallelLinear, DataParallel, Init, Ranks, RowParallelLinear, Settings,
    Weights,
};
use std::process::ExitCode;
use std::time::Instant;

/// Measures what communication costs in candle.
#[derive(Parser, Clone)]
struct Options {
    /// What is measured.
    what: What,
    /// Ranks as threads of this process. Without it, the launcher's ranks; or one.
    #[arg(long)]
    ranks: Option<usize>,
    /// Steps that are timed.
    #[arg(long, default_value_t = 15)]
    steps: usize,
    /// Numbers of a token between the layers (mlp 4,096, gpt 768).
    #[arg(long)]
    hidden: Option<usize>,
    /// Layers of the GPT.
    #[arg(long, default_value_t = 12)]
    layers: usize,
    /// Sequences of a rank's batch (gpt).
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Tokens of a sequence (mlp: of the batch, 4,096; gpt: 1,024).
    #[arg(long)]
    tokens: Option<usize>,
    /// bf16 in place of f32 (mlp; a GPT is always bf16 on GPUs).
    #[arg(long)]
    bf16: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum What {
    Mlp,
    AllReduce,
    Gpt,
}

fn main() -> ExitCode {
    let options = Options::parse();
    shared::on_ranks(options.ranks, |ranks| match options.what {
        What::Mlp => mlp(ranks, &options),
        What::AllReduce => all_reduce(ranks),
        What::Gpt => gpt(ranks, &options),
    })
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// The median time of a step in ms, in which all ranks start together. Two steps before do not count.
fn time(ranks: &Ranks, steps: usize, mut step: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut times = Vec::new();
    for number in 0..steps + 2 {
        ranks.device().synchronize()?;
        ranks.barrier()?;
        let start = Instant::now();
        step()?;
        ranks.device().synchronize()?;
        if number >= 2 {
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
    }
    Ok(median(times))
}

/// Forward and backward of two layers, the first four times as wide.
fn mlp(ranks: &Ranks, options: &Options) -> Result<()> {
    let (hidden, tokens) = (options.hidden.unwrap_or(4096), options.tokens.unwrap_or(4096));
    let dtype = if options.bf16 { DType::BF16 } else { DType::F32 };
    let alone = ranks.split(Some(ranks.rank() as u32), 0)?.expect("it has a colour");
    let of = |ranks: &Ranks| -> Result<f64> {
        let weights = Weights::variables(ranks, &VarMap::new(), 1, dtype);
        let up = ColumnParallelLinear::new(hidden, 4 * hidden, false, &weights.pp("up"))?;
        let down = RowParallelLinear::new(4 * hidden, hidden, false, &weights.pp("down"))?;
        let x = Var::from_tensor(&Tensor::full(0.5f32, (tokens, hidden), ranks.device())?.to_dtype(dtype)?)?;
        time(ranks, options.steps, || {
            // Rows first: a sum of all is one block's work.
            down.forward(&up.forward(&x)?.relu()?)?.sum(D::Minus1)?.sum_all()?.backward().map(drop)
        })
    };
    let (split, whole) = (of(ranks)?, of(&alone)?);
    if ranks.rank() == 0 {
        let (count, ratio) = (ranks.world_size(), split / whole);
        println!(
            "mlp {tokens} x {hidden} x {} of {dtype:?}: whole {whole:.2} ms, split among {count} ranks {split:.2} ms ({ratio:.3})",
            4 * hidden
        );
    }
    alone.finalize()
}

/// Processor time of a call that sums 4 KiB in place. Nothing is waited for between the calls.
fn all_reduce(ranks: &Ranks) -> Result<()> {
    const LEN: usize = 1024;
    const CALLS: usize = 200;
    let failed = |error: phalanx::Error| candle_core::Error::wrap(error);
    let of = |call: &mut dyn FnMut() -> Result<()>| -> Result<f64> {
        let mut times = Vec::new();
        for round in 0..60 {
            ranks.device().synchronize()?;
            ranks.barrier()?;
            let start = Instant::now();
            (0..CALLS).try_for_each(|_| call())?;
            let each = start.elapsed().as_secs_f64() * 1e6 / CALLS as f64;
            if round >= 10 {
                times.push(each);
            }
        }
        Ok(median(times))
    };
    let tensor = Tensor::zeros(LEN, DType::F32, ranks.device())?;
    let through_candle = of(&mut || ranks.all_reduce_in_place(&tensor, ReduceOp::Sum))?;
    let alone = match ranks.device() {
        #[cfg(feature = "cuda")]
        candle_core::Device::Cuda(cuda) => {
            let mut memory = cuda.alloc_zeros::<f32>(LEN)?;
            of(&mut || ranks.comm().all_reduce_in_place(&mut memory, ReduceOp::Sum).map_err(failed))?
        }
        _ => {
            let mut memory = vec![0f32; LEN];
            of(&mut || ranks.comm().all_reduce_in_place(&mut memory, ReduceOp::Sum).map_err(failed))?
        }
    };
    if ranks.rank() == 0 {
        let more = through_candle - alone;
        println!(
            "all_reduce of 4 KiB: through candle {through_candle:.2} us, phalanx alone {alone:.2} us ({more:+.2} us)"
        );
    }
    Ok(())
}

struct Block {
    norms: [LayerNorm; 2],
    /// Queries, keys and values; what attention gives back; the two of the MLP.
    layers: [Linear; 4],
}

/// The shapes of GPT-2's smallest: 124 M parameters in 12 blocks, with the embedding as the last layer.
struct Gpt {
    words: Tensor,
    places: Tensor,
    blocks: Vec<Block>,
    norm: LayerNorm,
    mask: Tensor,
}

const VOCABULARY: usize = 50_304;
/// Numbers of a head.
const HEAD: usize = 64;

impl Gpt {
    fn new(hidden: usize, options: &Options, tokens: usize, weights: &Weights) -> Result<Gpt> {
        // Which numbers they are does not change the times, and equal ones are made at once.
        let small = |scale: f64| Init::Constant(scale);
        let norm = |weights: &Weights| -> Result<LayerNorm> {
            let weight = weights.get(hidden, "weight", &Init::Constant(1.0))?;
            Ok(LayerNorm::new(weight, weights.get(hidden, "bias", &small(0.0))?, 1e-5))
        };
        let linear = |inputs: usize, outputs: usize, weights: &Weights| -> Result<Linear> {
            let weight = weights.get((outputs, inputs), "weight", &small(0.02))?;
            Ok(Linear::new(weight, Some(weights.get(outputs, "bias", &small(0.0))?)))
        };
        let block = |number: usize| -> Result<Block> {
            let weights = weights.pp("blocks").pp(number);
            let norms = [norm(&weights.pp("norm1"))?, norm(&weights.pp("norm2"))?];
            let shapes = [(hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)];
            let [a, b, c, d] =
                [0, 1, 2, 3].map(|layer| linear(shapes[layer].0, shapes[layer].1, &weights.pp(layer)));
            Ok(Block { norms, layers: [a?, b?, c?, d?] })
        };
        let later =
            |row: usize| (0..tokens).map(move |column| if column > row { f32::NEG_INFINITY } else { 0.0 });
        let mask = Tensor::from_iter((0..tokens).flat_map(later), weights.device())?;
        Ok(Gpt {
            words: weights.get((VOCABULARY, hidden), "words", &small(0.02))?,
            places: weights.get((tokens, hidden), "places", &small(0.01))?,
            blocks: (0..options.layers).map(block).collect::<Result<_>>()?,
            norm: norm(&weights.pp("norm"))?,
            mask: mask.reshape((tokens, tokens))?.to_dtype(weights.dtype())?,
        })
    }

    fn attention(&self, block: &Block, x: &Tensor) -> Result<Tensor> {
        let (batch, tokens, hidden) = x.dims3()?;
        let heads = block.layers[0].forward(x)?.reshape((batch, tokens, 3 * hidden / HEAD, HEAD))?;
        let heads = heads.transpose(1, 2)?;
        let [q, k, v] = [0, 1, 2].map(|part| {
            let count = hidden / HEAD;
            heads.narrow(1, part * count, count)?.contiguous()
        });
        let scores = (q?.matmul(&k?.t()?)? / (HEAD as f64).sqrt())?.broadcast_add(&self.mask)?;
        let y = ops::softmax(&scores, D::Minus1)?.matmul(&v?)?;
        block.layers[1].forward(&y.transpose(1, 2)?.reshape((batch, tokens, hidden))?)
    }

    /// Forward and backward of a batch.
    fn gradients(&self, words: &Tensor) -> Result<GradStore> {
        let mut x = self.words.embedding(&words.flatten_all()?)?;
        x = x.reshape((words.dim(0)?, words.dim(1)?, ()))?.broadcast_add(&self.places)?;
        for block in &self.blocks {
            x = (&x + self.attention(block, &block.norms[0].forward(&x)?)?)?;
            let inner = block.layers[2].forward(&block.norms[1].forward(&x)?)?.gelu()?;
            x = (&x + block.layers[3].forward(&inner)?)?;
        }
        let logits = self.norm.forward(&x)?.flatten_to(1)?.matmul(&self.words.t()?)?;
        loss::cross_entropy(&logits.to_dtype(DType::F32)?, &words.flatten_all()?)?.backward()
    }
}

fn gpt(ranks: &Ranks, options: &Options) -> Result<()> {
    let (hidden, tokens) = (options.hidden.unwrap_or(768), options.tokens.unwrap_or(1024));
    let dtype = if ranks.device().is_cuda() { DType::BF16 } else { DType::F32 };
    let alone = ranks.split(Some(ranks.rank() as u32), 0)?.expect("it has a colour");
    let variables = VarMap::new();
    let weights = Weights::variables(&alone, &variables, 1, dtype);
    let model = Gpt::new(hidden, options, tokens, &weights)?;
    let named: Vec<_> = variables.data().lock().expect("no panic before").clone().into_iter().collect();
    let count: usize = named.iter().map(|(_, variable)| variable.elem_count()).sum();
    let parallel = DataParallel::with(ranks, named, Settings::default())?;
    let mut optimizer = AdamW::new(&weights, AdamWSettings::default())?;
    let words = Tensor::from_iter(
        (0..options.batch * tokens).map(|word| (word * 7 % VOCABULARY) as u32),
        ranks.device(),
    )?;
    let words = words.reshape((options.batch, tokens))?;
    let mut step = |averaged: bool| {
        time(ranks, options.steps, || {
            let mut gradients = model.gradients(&words)?;
            if averaged {
                gradients = parallel.average(Some(gradients), options.batch as f64)?.expect("a batch");
            }
            optimizer.step(&gradients)
        })
    };
    let (one, several) = (step(false)?, step(true)?);
    let (one, several) = (one.min(step(false)?), several.min(step(true)?));
    // candle gives all gradients at once, so nothing of the exchange is hidden: its own time is what is exposed.
    let mut exchanges = Vec::new();
    for _ in 0..options.steps {
        let gradients = model.gradients(&words)?;
        ranks.device().synchronize()?;
        ranks.barrier()?;
        let start = Instant::now();
        let averaged = parallel.average(Some(gradients), options.batch as f64)?;
        ranks.device().synchronize()?;
        exchanges.push(start.elapsed().as_secs_f64() * 1e3);
        drop(averaged);
    }
    if ranks.rank() == 0 {
        let (exposed, ratio) = (median(exchanges), several / one);
        println!(
            "gpt of {:.1} M parameters, {dtype:?}, {} x {tokens} tokens a rank: alone {one:.2} ms, averaged over {} ranks {several:.2} ms \
             ({ratio:.3}; {exposed:.2} ms exposed)",
            count as f64 / 1e6,
            options.batch,
            ranks.world_size(),
        );
    }
    alone.finalize()
}
