//! A training loop of one's own on ranks: hand-written digits, each rank with its share of every batch. It goes on when a rank is lost.
//!
//! ```text
//! cargo run --release --example train_loop -- --ranks 4                       ranks as threads
//! phalanx launch -n 4 -- target/release/examples/train_loop                   ranks as processes
//! torchrun --nproc-per-node 4 --no-python target/release/examples/train_loop
//! phalanx launch -n 4 --keep-going -- target/release/examples/train_loop --lose-at 100
//! phalanx launch -n 4 --restarts 1 -- target/release/examples/train_loop --lose-at 100 --rebuild
//! ```
//!
//! The losses are those of one rank, up to rounding, also after a loss: each sample counts alike, whatever a rank's share is.

mod shared;

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer};
use burn::store::{ModuleRecord, RecordError};
use burn::tensor::{Bytes, Device};
use clap::Parser;
use phalanx::{Comm, ReduceOp};
use phalanx_burn::{Error, Ranks, Result};
use phalanx_train::elastic::{Model, Recovery, Trainer};
use phalanx_train::mesh::part;
use shared::{Digit, Net, Place, device, digits, tensors};
use std::process::ExitCode;
use std::time::Instant;

/// Trains a network of two layers on 1,797 hand-written digits, which are in the program.
#[derive(Parser, Clone)]
#[command(args_override_self = true)]
struct Options {
    #[command(flatten)]
    place: Place,
    /// Steps.
    #[arg(long, default_value_t = 600)]
    steps: u64,
    /// Samples of a batch, over all ranks.
    #[arg(long, default_value_t = 50)]
    batch: usize,
    /// Steps between two copies of the state in memory, to go back to.
    #[arg(long, default_value_t = 10)]
    snapshot: u64,
    /// The step in which the last rank kills its process.
    #[arg(long)]
    lose_at: Option<u64>,
    /// Whether a new process takes a lost one's place. Without it, the others go on alone.
    #[arg(long)]
    rebuild: bool,
    /// Accuracy on digits that were not trained on, in percent, below which the program fails.
    #[arg(long, default_value_t = 90.0)]
    accuracy: f64,
}

/// All that a step changes, and what it needs.
struct Training<'a> {
    options: &'a Options,
    digits: &'a [Digit],
    device: Device,
    net: Net,
    optimizer: ModuleOptimizer,
    /// `None` until the next step after a loss.
    ranks: Option<Ranks>,
    /// Whether this process has made the first step, and no rank was lost since.
    undisturbed: bool,
    /// When the last step that failed began.
    lost: Option<Instant>,
}

impl Training<'_> {
    /// The ranks of a communicator, which others have after a loss.
    fn ranks(&mut self, comm: &Comm) -> Result<Ranks> {
        if self.ranks.is_none() {
            self.ranks = comm.split(Some(0), 0)?.map(Ranks::new).transpose()?;
        }
        Ok(self.ranks.clone().expect("all ranks have the same colour"))
    }

    fn train(&mut self, ranks: &Ranks, step: u64) -> Result<()> {
        let start = step as usize * self.options.batch % self.digits.len();
        let batch = start..self.digits.len().min(start + self.options.batch);
        let mine = part(&batch, ranks.world_size(), ranks.rank());
        // A rank without samples makes the same step as the others.
        let mut own = None;
        let mut loss_sum = [0.0];
        if !mine.is_empty() {
            let (pixels, classes) = tensors(&self.digits[mine.clone()], &self.device);
            let loss =
                CrossEntropyLossConfig::new().init(&self.device).forward(self.net.forward(pixels), classes);
            loss_sum[0] = loss.clone().into_scalar::<f64>() * mine.len() as f64;
            own = Some(GradientsParams::from_grads(loss.backward(), &self.net));
        }
        if let Some(gradients) = ranks.average_by(own, mine.len() as f64, &self.net)? {
            self.net = self.optimizer.step(3e-3, self.net.clone(), gradients);
        }
        // On a GPU, a lost rank is found here, and not in a copy of the state.
        ranks.sync()?;
        if (step + 1).is_multiple_of(50) {
            ranks.comm().all_reduce_in_place(&mut loss_sum, ReduceOp::Sum)?;
            if ranks.rank() == 0 {
                println!("step {}: loss {:.4}", step + 1, loss_sum[0] / batch.len() as f64);
            }
        }
        Ok(())
    }
}

impl Model for Training<'_> {
    fn step(&mut self, comm: &Comm, step: u64) -> Result<()> {
        let began = Instant::now();
        let ranks = self.ranks(comm)?;
        if let Some(lost) = self.lost.take()
            && ranks.rank() == 0
        {
            let (ranks, seconds) = (ranks.world_size(), lost.elapsed().as_secs_f64());
            println!("a rank was lost; {ranks} ranks go on with step {step}, {seconds:.2} s later");
        }
        if step == 0 {
            self.net = ranks.broadcast(self.net.clone())?;
            self.undisturbed = true;
        }
        let is_last = ranks.rank() + 1 == ranks.world_size();
        if is_last && self.undisturbed && self.options.lose_at == Some(step) {
            eprintln!("rank {} ends itself in step {step}", ranks.rank());
            std::process::abort();
        }
        let outcome = self.train(&ranks, step);
        if outcome.is_err() {
            (self.undisturbed, self.lost) = (false, Some(began));
        }
        outcome
    }

    fn save(&self, state: &mut Vec<u8>) -> Result<()> {
        let net = self.net.clone().into_record().into_bytes().map_err(refused)?;
        let optimizer = self.optimizer.into_bytes().map_err(refused)?;
        state.extend((net.len() as u64).to_le_bytes());
        state.extend_from_slice(&net);
        state.extend_from_slice(&optimizer);
        Ok(())
    }

    fn load(&mut self, state: &[u8]) -> Result<()> {
        let (len, rest) = state.split_first_chunk::<8>().expect("what was saved");
        let (net, optimizer) = rest.split_at(u64::from_le_bytes(*len) as usize);
        let record = |bytes: &[u8]| Bytes::from_bytes_vec(bytes.to_vec());
        let net = ModuleRecord::from_bytes(record(net)).map_err(refused)?;
        self.net = self.net.clone().load_record(net);
        self.optimizer = self.optimizer.clone().from_bytes(record(optimizer)).map_err(refused)?;
        self.ranks = None;
        Ok(())
    }
}

fn refused(error: RecordError) -> Error {
    Error::Usage(error.to_string())
}

fn train(comm: Comm, options: &Options) -> Result<()> {
    let (digits, others) = digits();
    let device = device(&comm).autodiff();
    device.seed(1);
    let net = Net::new(&device);
    let mut training = Training {
        options,
        digits: &digits,
        net,
        optimizer: AdamConfig::new().init(),
        ranks: None,
        undisturbed: false,
        lost: None,
        device,
    };
    let recovery = if options.rebuild { Recovery::Rebuild } else { Recovery::Shrink };
    let trainer = Trainer::new(recovery).snapshot_every(options.snapshot)?;
    let outcome = trainer.run(comm, &mut training, options.steps)?;
    let accuracy = training.net.accuracy(&others, &training.device);
    if outcome.comm.rank() == 0 {
        println!(
            "{accuracy:.2} % of the other digits are recognised, by {} ranks",
            outcome.comm.world_size()
        );
    }
    if accuracy < options.accuracy {
        return Err(Error::Usage(format!(
            "{accuracy:.2} % are recognised; {} % are required",
            options.accuracy
        )));
    }
    Ok(outcome.comm.finalize()?)
}

fn main() -> ExitCode {
    let options = Options::parse();
    options.place.run(|comm| train(comm, &options))
}
