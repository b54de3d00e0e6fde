//! Data-parallel training: hand-written digits, each rank with its share of every batch.
//!
//! ```text
//! cargo run --release -p phalanx-candle --example train_ddp -- --ranks 4      ranks as threads
//! phalanx launch -n 4 -- target/release/examples/train_ddp                    ranks as processes
//! torchrun --nproc-per-node 4 --no-python target/release/examples/train_ddp
//! ```
//!
//! The losses are those of one rank, up to rounding: each sample counts alike, whatever a rank's share is.

mod shared;

use candle_core::{D, DType, Result, Tensor};
use candle_nn::{AdamW, Module, Optimizer, VarMap, loss, ops};
use clap::Parser;
use phalanx::ReduceOp;
use phalanx_candle::{DataParallel, Init, Ranks, Weights, part};
use std::io::Read;
use std::process::ExitCode;

/// Trains a network of two layers on 1,797 hand-written digits, which are in the program.
#[derive(Parser, Clone)]
struct Options {
    /// Ranks as threads of this process. Without it, the launcher's ranks; or one.
    #[arg(long)]
    ranks: Option<usize>,
    /// Times that the training goes over the digits.
    #[arg(long, default_value_t = 12)]
    epochs: usize,
    /// Samples of a batch, over all ranks.
    #[arg(long, default_value_t = 50)]
    batch: usize,
    /// Accuracy on digits that were not trained on, in percent, below which the program fails.
    #[arg(long, default_value_t = 90.0)]
    accuracy: f64,
}

/// Pixels and classes, `[samples, 64]` and `[samples]`.
struct Digits {
    pixels: Tensor,
    classes: Tensor,
}

impl Digits {
    fn load(ranks: &Ranks) -> Result<Digits> {
        let mut text = String::new();
        let compressed = include_bytes!("../../phalanx/examples/data/digits.csv.gz");
        flate2::read::GzDecoder::new(&compressed[..]).read_to_string(&mut text)?;
        let numbers = text.split([',', '\n']).filter(|word| !word.is_empty()).map(str::parse::<f32>);
        let numbers =
            numbers.collect::<std::result::Result<Vec<_>, _>>().map_err(candle_core::Error::wrap)?;
        let table = Tensor::from_vec(numbers, (text.lines().count(), 65), ranks.device())?;
        let classes = table.narrow(1, 64, 1)?.squeeze(1)?.to_dtype(DType::U32)?;
        Ok(Digits { pixels: (table.narrow(1, 0, 64)? / 16.0)?.contiguous()?, classes })
    }

    fn rows(&self, rows: std::ops::Range<usize>) -> Result<(Tensor, Tensor)> {
        Ok((self.pixels.narrow(0, rows.start, rows.len())?, self.classes.narrow(0, rows.start, rows.len())?))
    }
}

fn train(ranks: &Ranks, options: &Options) -> Result<()> {
    let digits = Digits::load(ranks)?;
    // The last fifth is for the test.
    let trained = digits.classes.elem_count() * 4 / 5;
    let variables = VarMap::new();
    let weights = Weights::variables(ranks, &variables, 1, DType::F32);
    let normal = |inputs: usize| Init::Normal { mean: 0.0, deviation: (1.0 / inputs as f64).sqrt() };
    let layer = |name: &str, inputs: usize, outputs: usize| -> Result<candle_nn::Linear> {
        let weights = weights.pp(name);
        let bias = weights.get(outputs, "bias", &Init::Constant(0.0))?;
        Ok(candle_nn::Linear::new(weights.get((outputs, inputs), "weight", &normal(inputs))?, Some(bias)))
    };
    let (up, down) = (layer("up", 64, 96)?, layer("down", 96, 10)?);
    let model = |pixels: &Tensor| down.forward(&up.forward(pixels)?.relu()?);

    let parallel = DataParallel::new(ranks, &variables)?;
    let mut optimizer = AdamW::new_lr(variables.all_vars(), 3e-3)?;
    for epoch in 1..=options.epochs {
        // Sum of the samples' losses on this rank.
        let mut sum = 0.0;
        for start in (0..trained).step_by(options.batch) {
            let batch = start..trained.min(start + options.batch);
            let mine = part(&batch, ranks.world_size(), ranks.rank());
            // A rank without samples makes the same step as the others.
            let mut own = None;
            if !mine.is_empty() {
                let (pixels, classes) = digits.rows(mine.clone())?;
                let loss = loss::cross_entropy(&model(&pixels)?, &classes)?;
                sum += f64::from(loss.to_scalar::<f32>()?) * mine.len() as f64;
                own = Some(loss.backward()?);
            }
            if let Some(gradients) = parallel.average(own, mine.len() as f64)? {
                optimizer.step(&gradients)?;
            }
        }
        let sum = ranks.all_reduce(&Tensor::new(sum, ranks.device())?, ReduceOp::Sum)?.to_scalar::<f64>()?;
        if ranks.rank() == 0 {
            println!("epoch {epoch}: loss {:.4}", sum / trained as f64);
        }
    }

    let (pixels, classes) = digits.rows(trained..digits.classes.elem_count())?;
    let probabilities = ops::softmax(&model(&pixels)?, D::Minus1)?;
    let right = probabilities.argmax(D::Minus1)?.eq(&classes)?.to_dtype(DType::F64)?.mean_all()?;
    let accuracy = 100.0 * right.to_scalar::<f64>()?;
    if ranks.rank() == 0 {
        println!("{accuracy:.2} % of the other digits are recognised");
    }
    if accuracy < options.accuracy {
        candle_core::bail!("{accuracy:.2} % are recognised; {} % are required", options.accuracy);
    }
    Ok(())
}

fn main() -> ExitCode {
    let options = Options::parse();
    shared::on_ranks(options.ranks, |ranks| train(ranks, &options))
}
