//! A small GPT, trained on this crate's own source text by tensor and data parallelism together.
//!
//! ```text
//! cargo run --release -p phalanx-candle --example train_gpt -- --ranks 4 --tensor 2
//! phalanx launch -n 4 -- target/release/examples/train_gpt --tensor 2 --checkpoints gpt
//! phalanx launch -n 2 -- target/release/examples/train_gpt --checkpoints gpt      goes on from there
//! ```
//!
//! Ranks next to each other split the layers (`--tensor`), and groups of them share each batch. The losses do not depend on either number, nor
//! on a pause in between.

mod shared;

use candle_core::{D, DType, Result, Tensor};
use candle_nn::{LayerNorm, Module, VarMap, ops};
use clap::Parser;
use phalanx::ReduceOp;
use phalanx_candle::{
    AdamW, AdamWSettings, Checkpoints, ColumnParallelLinear, CrossEntropySettings, DataParallel, Init, Ranks,
    RowParallelLinear, Settings, VocabParallelEmbedding, Weights, cross_entropy, kv_heads, part,
};
use std::path::PathBuf;
use std::process::ExitCode;

const TEXT: &str = concat!(
    include_str!("../src/lib.rs"),
    include_str!("../src/ranks.rs"),
    include_str!("../src/collective.rs"),
    include_str!("../src/weights.rs"),
);
const VOCABULARY: usize = 128;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;

/// Trains a GPT that reads letters.
#[derive(Parser, Clone)]
#[command(args_override_self = true)]
struct Options {
    /// Ranks as threads of this process. Without it, the launcher's ranks; or one.
    #[arg(long)]
    ranks: Option<usize>,
    /// Ranks that split each layer.
    #[arg(long, default_value_t = 1)]
    tensor: usize,
    /// Steps in all, those before a pause included.
    #[arg(long, default_value_t = 100)]
    steps: u64,
    /// Sequences of a batch, over all ranks.
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Letters of a sequence.
    #[arg(long, default_value_t = 32)]
    length: usize,
    /// Numbers for each letter between the layers.
    #[arg(long, default_value_t = 32)]
    hidden: usize,
    /// Layers.
    #[arg(long, default_value_t = 2)]
    layers: usize,
    /// A folder for checkpoints, from which the training goes on if there are some.
    #[arg(long)]
    checkpoints: Option<PathBuf>,
    /// Steps between two checkpoints.
    #[arg(long, default_value_t = 50)]
    every: u64,
}

struct Block {
    norms: [LayerNorm; 2],
    qkv: ColumnParallelLinear,
    out: RowParallelLinear,
    up: ColumnParallelLinear,
    down: RowParallelLinear,
}

struct Gpt {
    ranks: Ranks,
    letters: VocabParallelEmbedding,
    places: Tensor,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: ColumnParallelLinear,
    size: usize,
}

fn norm(hidden: usize, weights: &Weights) -> Result<LayerNorm> {
    let weight = weights.get(hidden, "weight", &Init::Constant(1.0))?;
    Ok(LayerNorm::new(weight, weights.get(hidden, "bias", &Init::Constant(0.0))?, 1e-5))
}

impl Gpt {
    fn new(options: &Options, weights: &Weights) -> Result<Gpt> {
        let (hidden, ranks) = (options.hidden, weights.ranks().clone());
        let block = |number: usize| {
            let weights = weights.pp("blocks").pp(number);
            Ok(Block {
                norms: [norm(hidden, &weights.pp("norm1"))?, norm(hidden, &weights.pp("norm2"))?],
                qkv: ColumnParallelLinear::qkv(
                    hidden,
                    HEADS,
                    KV_HEADS,
                    hidden / HEADS,
                    true,
                    &weights.pp("qkv"),
                )?,
                out: RowParallelLinear::new(hidden, hidden, true, &weights.pp("out"))?,
                up: ColumnParallelLinear::new(hidden, 4 * hidden, true, &weights.pp("up"))?,
                down: RowParallelLinear::new(4 * hidden, hidden, true, &weights.pp("down"))?,
            })
        };
        let normal = Init::Normal { mean: 0.0, deviation: 0.1 };
        Ok(Gpt {
            letters: VocabParallelEmbedding::new(VOCABULARY, hidden, &weights.pp("letters"))?,
            places: weights.get((options.length, hidden), "places", &normal)?,
            blocks: (0..options.layers).map(block).collect::<Result<_>>()?,
            norm: norm(hidden, &weights.pp("norm"))?,
            head: ColumnParallelLinear::new(hidden, VOCABULARY, false, &weights.pp("head"))?,
            size: hidden / HEADS,
            ranks,
        })
    }

    /// This rank's part of the logits, `[sequences × letters, its words]`.
    fn logits(&self, letters: &Tensor) -> Result<Tensor> {
        let mut x = self.letters.forward(letters)?.broadcast_add(&self.places)?;
        for block in &self.blocks {
            let attended = self.attention(block, &block.norms[0].forward(&x)?)?;
            x = (x + attended)?;
            let inner = block.up.forward(&block.norms[1].forward(&x)?)?.gelu()?;
            x = (x + block.down.forward(&inner)?)?;
        }
        self.head.forward(&self.norm.forward(&x)?)?.flatten_to(1)
    }

    /// The heads of this rank, and the sum over all ranks.
    fn attention(&self, block: &Block, x: &Tensor) -> Result<Tensor> {
        let (batch, length, _) = x.dims3()?;
        let (own, kv) = (HEADS / self.ranks.world_size(), kv_heads(&self.ranks, KV_HEADS)?.len());
        // [batch, heads, letters, size]
        let heads =
            block.qkv.forward(x)?.reshape((batch, length, own + 2 * kv, self.size))?.transpose(1, 2)?;
        let q = heads.narrow(1, 0, own)?.contiguous()?;
        let spread = |x: Tensor| {
            let shape = (batch, kv, own / kv, length, self.size);
            x.unsqueeze(2)?.broadcast_as(shape)?.reshape((batch, own, length, self.size))
        };
        let (k, v) = (spread(heads.narrow(1, own, kv)?)?, spread(heads.narrow(1, own + kv, kv)?)?);
        let scores = (q.matmul(&k.t()?)? / (self.size as f64).sqrt())?;
        let later =
            |row: usize| (0..length).map(move |column| if column > row { f32::NEG_INFINITY } else { 0.0 });
        let mask = Tensor::from_iter((0..length).flat_map(later), x.device())?.reshape((length, length))?;
        let weights = ops::softmax(&scores.broadcast_add(&mask)?, D::Minus1)?;
        let y = weights.matmul(&v)?.transpose(1, 2)?.reshape((batch, length, own * self.size))?;
        block.out.forward(&y)
    }
}

/// Sequences of a step: letters, and the letters that follow.
fn sequences(
    options: &Options,
    step: u64,
    of: std::ops::Range<usize>,
    ranks: &Ranks,
) -> Result<(Tensor, Tensor)> {
    let text = TEXT.as_bytes();
    let (mut letters, mut next) = (Vec::new(), Vec::new());
    for number in of.clone() {
        let random = (step * 7919 + number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
        let start = random as usize % (text.len() - options.length - 1);
        let letter = |place: usize| u32::from(text[place].min(127));
        letters.extend((start..start + options.length).map(letter));
        next.extend((start + 1..=start + options.length).map(letter));
    }
    let shape = (of.len(), options.length);
    Ok((Tensor::from_vec(letters, shape, ranks.device())?, Tensor::new(next, ranks.device())?))
}

fn train(world: &Ranks, options: &Options) -> Result<()> {
    let tensor = options.tensor;
    if tensor == 0 || !world.world_size().is_multiple_of(tensor) {
        candle_core::bail!("--tensor {tensor}: it must divide the number of ranks, {}", world.world_size());
    }
    let grid = world.grid(&[world.world_size() / tensor, tensor])?;
    let [data, layers] = &grid[..] else { unreachable!("two dimensions") };

    let variables = VarMap::new();
    let weights = Weights::variables(layers, &variables, 1, DType::F32);
    let gpt = Gpt::new(options, &weights)?;
    let named = variables.data().lock().expect("no panic before").clone().into_iter().collect();
    let parallel = DataParallel::with(data, named, Settings::default())?;
    let mut optimizer = AdamW::new(&weights, AdamWSettings { rate: 3e-3, ..AdamWSettings::default() })?;
    let mut checkpoints =
        options.checkpoints.as_ref().map(|folder| Checkpoints::new(world, folder)).transpose()?;
    let mut begin = 0;
    if let Some(checkpoints) = &mut checkpoints {
        begin = checkpoints.load(&weights, Some(&mut optimizer))?.unwrap_or(0);
    }
    for step in begin..options.steps {
        let mine = part(&(0..options.batch), data.world_size(), data.rank());
        let (mut own, mut sum) = (None, 0.0);
        if !mine.is_empty() {
            let (letters, next) = sequences(options, step, mine.clone(), world)?;
            let logits = gpt.logits(&letters)?;
            let loss = cross_entropy(layers, &logits, &next, VOCABULARY, CrossEntropySettings::default())?;
            sum = f64::from(loss.to_scalar::<f32>()?) * mine.len() as f64;
            own = Some(loss.backward()?);
        }
        if let Some(gradients) = parallel.average(own, mine.len() as f64)? {
            optimizer.step(&gradients)?;
        }
        let sum = data.all_reduce(&Tensor::new(sum, world.device())?, ReduceOp::Sum)?.to_scalar::<f64>()?;
        if world.rank() == 0 && (step + 1).is_multiple_of(10) {
            println!("step {}: loss {:.4}", step + 1, sum / options.batch as f64);
        }
        if let Some(checkpoints) = &mut checkpoints
            && (step + 1).is_multiple_of(options.every)
        {
            checkpoints.save(step + 1, &weights, Some(&optimizer))?;
        }
    }
    checkpoints.map_or(Ok(()), |mut checkpoints| checkpoints.finish())
}

fn main() -> ExitCode {
    let options = Options::parse();
    shared::on_ranks(options.ranks, |ranks| train(ranks, &options))
}
