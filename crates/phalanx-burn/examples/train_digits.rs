//! burn's `Learner` on ranks: hand-written digits, each rank with its part of the data set.
//!
//! ```text
//! cargo run --release --features train --example train_digits -- --ranks 4    ranks as threads
//! phalanx launch -n 4 -- target/release/examples/train_digits                 ranks as processes
//! torchrun --nproc-per-node 4 --no-python target/release/examples/train_digits
//! ```
//!
//! Only `optimize`, the shards and the lines with `FromRank0` and `Silent` are for ranks.

mod shared;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor};
use burn::train::checkpoint::FileCheckpointer;
use burn::train::logger::InMemoryMetricLogger;
use burn::train::metric::store::{Aggregate, Direction, Split};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ClassificationOutput, InferenceStep, Learner, MetricEarlyStoppingStrategy, StoppingCondition,
    SupervisedTraining, TrainOutput, TrainStep,
};
use clap::Parser;
use phalanx_burn::learner::{FromRank0, Silent};
use phalanx_burn::{Error, Ranks, Result, Shard, Uneven};
use shared::{Digit, Net, Place, digits, tensors};
use std::path::PathBuf;
use std::process::ExitCode;

/// Trains a network of two layers on 1,797 hand-written digits, which are in the program.
#[derive(Parser, Clone)]
#[command(args_override_self = true)]
struct Options {
    #[command(flatten)]
    place: Place,
    /// Times that the training goes over the digits, at most.
    #[arg(long, default_value_t = 20)]
    epochs: usize,
    /// Samples of a rank's batch.
    #[arg(long, default_value_t = 16)]
    batch: usize,
    /// A folder for checkpoints, which all ranks reach.
    #[arg(long)]
    checkpoints: Option<PathBuf>,
    /// The epoch whose checkpoint the training goes on from.
    #[arg(long, requires = "checkpoints")]
    resume: Option<usize>,
    /// Whether rank 0 shows the progress.
    #[arg(long)]
    progress: bool,
    /// Accuracy on digits that were not trained on, in percent, below which the program fails.
    #[arg(long, default_value_t = 90.0)]
    accuracy: f64,
}

#[derive(Module, Debug)]
struct Model {
    net: Net,
    #[module(skip)]
    ranks: Ranks,
}

#[derive(Clone, Debug)]
struct Batch {
    pixels: Tensor<2>,
    classes: Tensor<1, Int>,
}

struct Batches;

impl Batcher<Digit, Batch> for Batches {
    fn batch(&self, items: Vec<Digit>, device: &Device) -> Batch {
        let (pixels, classes) = tensors(&items, device);
        Batch { pixels, classes }
    }
}

impl Model {
    fn classify(&self, batch: Batch) -> ClassificationOutput {
        let output = self.net.forward(batch.pixels);
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        ClassificationOutput::new(loss.forward(output.clone(), batch.classes.clone()), output, batch.classes)
    }
}

impl TrainStep for Model {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }

    fn optimize(
        self,
        optim: &mut ModuleOptimizer,
        rate: ModuleLearningRate,
        gradients: GradientsParams,
    ) -> Self {
        // It cannot return an error. The panic says which rank is lost.
        let gradients = self.ranks.average(gradients, &self).unwrap_or_else(|error| panic!("{error}"));
        optim.step(rate, self, gradients)
    }
}

impl InferenceStep for Model {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> ClassificationOutput {
        self.classify(batch)
    }
}

fn train(ranks: Ranks, options: &Options) -> Result<()> {
    let (trained, others) = digits();
    let shard = |digits: &[Digit], uneven| Shard::new(InMemDataset::new(digits.to_vec()), &ranks, uneven);
    let loader = DataLoaderBuilder::new(Batches).batch_size(options.batch).shuffle(7);
    let train_loader = loader.build(shard(&trained, Uneven::Drop));
    let valid_loader = DataLoaderBuilder::new(Batches).batch_size(100).build(shard(&others, Uneven::Pad));

    let stopping = MetricEarlyStoppingStrategy::new(
        &LossMetric::new(),
        Aggregate::Mean,
        Direction::Lowest,
        Split::Valid,
        StoppingCondition::NoImprovementSince { n_epochs: 3 },
    );
    let mut training = SupervisedTraining::new(".", train_loader, valid_loader)
        .with_application_logger(None)
        .with_metric_logger(InMemoryMetricLogger::new())
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .num_epochs(options.epochs)
        .early_stopping(FromRank0::new(stopping, &ranks));
    if !options.progress || ranks.rank() != 0 {
        training = training.renderer(Box::new(Silent));
    }
    if let Some(folder) = &options.checkpoints {
        let file = |name| FromRank0::new(FileCheckpointer::new(folder, name), &ranks);
        training = training.with_custom_checkpointers(file("model"), file("optim"), file("scheduler"));
    }
    if let Some(epoch) = options.resume {
        training = training.checkpoint(epoch);
    }

    let device = ranks.device().autodiff();
    device.seed(1);
    let model = ranks.broadcast(Model { net: Net::new(&device), ranks: ranks.clone() })?;
    let result = training.launch(Learner::new(model, AdamConfig::new().init(), 3e-3));
    let accuracy = result.model.net.accuracy(&others, &ranks.device());
    if ranks.rank() == 0 {
        println!("{accuracy:.2} % of the other digits are recognised");
    }
    if accuracy < options.accuracy {
        return Err(Error::Usage(format!(
            "{accuracy:.2} % are recognised; {} % are required",
            options.accuracy
        )));
    }
    ranks.finalize()
}

fn main() -> ExitCode {
    let options = Options::parse();
    options.place.run(|comm| train(Ranks::new(comm)?, &options))
}
