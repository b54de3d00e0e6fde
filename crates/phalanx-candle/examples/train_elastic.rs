//! Data-parallel training that loses a rank, goes on with the others, takes a new one in, and says what that cost.
//!
//! ```text
//! phalanx launch -n 3 --keep-going -- target/release/examples/train_elastic --checkpoints /tmp/elastic --lose-at 47 --grow-at 80
//! ```
//!
//! The losses are those of a training that loses nobody, up to rounding. Ranks are processes of one machine; `phalanx launch --restarts` can
//! start the new one, too.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Linear, Module, VarMap, loss};
use clap::Parser;
use phalanx::ReduceOp;
use phalanx_candle::{
    AdamW, AdamWSettings, Checkpoints, DataParallel, Init, Ranks, Weights, part, phalanx_error,
};
use std::ops::Range;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode};
use std::time::Instant;

/// Trains a network of two layers on numbers, and goes on when a rank is lost.
#[derive(Parser, Clone)]
struct Options {
    /// A folder for checkpoints, which all ranks reach.
    #[arg(long)]
    checkpoints: PathBuf,
    /// Steps.
    #[arg(long, default_value_t = 120)]
    steps: u64,
    /// Samples of a batch, over all ranks.
    #[arg(long, default_value_t = 64)]
    batch: usize,
    /// Steps between two checkpoints.
    #[arg(long, default_value_t = 10)]
    every: u64,
    /// The step in which the last rank kills its process.
    #[arg(long)]
    lose_at: Option<u64>,
    /// The step before which a new rank takes the lost one's place.
    #[arg(long)]
    grow_at: Option<u64>,
    /// This process is the new rank. The example starts it so.
    #[arg(long, hide = true)]
    join: bool,
}

/// Why a training stopped.
enum End {
    Complete,
    /// It waits for a new rank.
    Grow,
}

/// A process with its ranks, which change.
struct Trainer<'a> {
    options: &'a Options,
    ranks: Ranks,
    /// The number of ranks at the start.
    size: usize,
    /// The step that is under way, and when it began.
    step: (u64, Instant),
    /// What has happened to the ranks, until the training goes on.
    change: Option<&'static str>,
    newcomer: Option<Child>,
}

/// Inputs and what they give: 256 samples, again and again.
fn samples(step: u64, rows: Range<usize>, device: &Device) -> Result<(Tensor, Tensor)> {
    let number = |row: usize, column: usize| (((step as usize * 64 + row) % 256) * (column + 2)) as f32;
    let x = rows.clone().flat_map(|row| (0..8).map(move |column| number(row, column).sin()));
    let x = Tensor::from_iter(x, device)?.reshape((rows.len(), 8))?;
    let y = x.sum_keepdim(1)?.sin()?;
    Ok((x, y))
}

impl Trainer<'_> {
    /// Goes on from the newest checkpoint, until the end or the next change. Everything but the ranks is made anew.
    fn train(&mut self) -> Result<End> {
        let (ranks, options) = (&self.ranks, self.options);
        let variables = VarMap::new();
        let weights = Weights::variables(ranks, &variables, 1, DType::F32);
        let layer = |name: &str, inputs: usize, outputs: usize| -> Result<Linear> {
            let init = Init::Normal { mean: 0.0, deviation: (1.0 / inputs as f64).sqrt() };
            let weights = weights.pp(name);
            let bias = weights.get(outputs, "bias", &Init::Constant(0.0))?;
            Ok(Linear::new(weights.get((outputs, inputs), "weight", &init)?, Some(bias)))
        };
        let (up, down) = (layer("up", 8, 64)?, layer("down", 64, 1)?);
        let parallel = DataParallel::new(ranks, &variables)?;
        let settings = AdamWSettings { rate: 3e-3, ..AdamWSettings::default() };
        let mut optimizer = AdamW::new(&weights, settings)?;
        let mut checkpoints = Checkpoints::new(ranks, &options.checkpoints)?;
        let begin = checkpoints.load(&weights, Some(&mut optimizer))?.unwrap_or(0);
        if let Some(what) = self.change.take()
            && ranks.rank() == 0
        {
            let (step, began) = self.step;
            let (count, seconds, again) = (ranks.world_size(), began.elapsed().as_secs_f64(), step - begin);
            println!("{what}: {count} ranks go on, {seconds:.2} s later; {again} steps are made again");
        }

        for step in begin..options.steps {
            self.step = (step, Instant::now());
            let is_complete = ranks.world_size() == self.size;
            if !is_complete && options.grow_at.is_some_and(|at| step >= at) {
                if !step.is_multiple_of(options.every) {
                    checkpoints.save(step, &weights, Some(&optimizer))?;
                }
                checkpoints.finish()?;
                return Ok(End::Grow);
            }
            if is_complete && options.lose_at == Some(step) && ranks.rank() + 1 == self.size {
                eprintln!("rank {} ends itself in step {step}", ranks.rank());
                std::process::abort();
            }
            let mine = part(&(0..options.batch), ranks.world_size(), ranks.rank());
            let (x, y) = samples(step, mine.clone(), ranks.device())?;
            let loss = loss::mse(&down.forward(&up.forward(&x)?.tanh()?)?, &y)?;
            let sum = (loss.to_dtype(DType::F64)? * mine.len() as f64)?;
            let gradients = parallel.average(Some(loss.backward()?), mine.len() as f64)?;
            optimizer.step(&gradients.expect("there are batches"))?;
            if (step + 1).is_multiple_of(options.every) {
                let sum = ranks.all_reduce(&sum, ReduceOp::Sum)?.to_scalar::<f64>()?;
                if ranks.rank() == 0 {
                    println!("step {}: loss {:.4}", step + 1, sum / options.batch as f64);
                }
                checkpoints.save(step + 1, &weights, Some(&optimizer))?;
            }
        }
        checkpoints.finish()?;
        Ok(End::Complete)
    }

    /// Trains to the end, through all changes.
    fn run(mut self) -> Result<()> {
        loop {
            match self.train() {
                Ok(End::Complete) => break,
                Ok(End::Grow) => {
                    if self.ranks.rank() == 0 {
                        let own = std::env::current_exe()?;
                        let started =
                            Command::new(own).args(std::env::args().skip(1)).arg("--join").spawn()?;
                        self.newcomer = Some(started);
                    }
                    self.go_on("a new rank has come", |comm| comm.grow(1))?;
                }
                Err(error) if phalanx_error(&error).is_some_and(phalanx::Error::is_fatal) => {
                    eprintln!("rank {}: {error}", self.ranks.rank());
                    self.go_on("a rank was lost", phalanx::Comm::shrink)?;
                }
                Err(error) => return Err(error),
            }
        }
        self.ranks.finalize()?;
        match self.newcomer.map(|mut newcomer| newcomer.wait()).transpose()? {
            Some(status) if !status.success() => candle_core::bail!("the new rank failed: {status}"),
            _ => Ok(()),
        }
    }

    /// Changes the ranks.
    fn go_on(
        &mut self,
        what: &'static str,
        change: impl FnOnce(&phalanx::Comm) -> phalanx::Result<phalanx::Comm>,
    ) -> Result<()> {
        let comm = self.ranks.comm().with(change).map_err(candle_core::Error::wrap)?;
        self.ranks = Ranks::new(comm)?;
        self.change = Some(what);
        Ok(())
    }
}

fn main() -> ExitCode {
    let options = Options::parse();
    let run = || {
        let comm = if options.join { phalanx::join() } else { phalanx::init() };
        let ranks = Ranks::new(comm.map_err(candle_core::Error::wrap)?)?;
        let (size, step) = (ranks.world_size(), (0, Instant::now()));
        Trainer { options: &options, ranks, size, step, change: None, newcomer: None }.run()
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
