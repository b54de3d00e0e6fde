//! What burn's `Learner` gets on ranks.

use crate::{Case, Pair, assert_same_bits, param, values, widest};
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::store::ModuleRecord;
use burn::tensor::{DType, Device, Tensor};
use burn::train::checkpoint::{Checkpointer, FileCheckpointer};
use burn::train::logger::InMemoryMetricLogger;
use burn::train::metric::LossMetric;
use burn::train::metric::store::EventStoreClient;
use burn::train::{
    EarlyStoppingStrategy, InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput,
    TrainStep,
};
use phalanx_burn::learner::{FromRank0, Silent};
use phalanx_burn::{Ranks, Result, Shard, Uneven};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub const CASES: &[Case] =
    &[("learner/early_stopping", early_stopping), ("learner/checkpoints", checkpoints)];

#[derive(Module, Debug)]
struct Model {
    layer: Linear,
    #[module(skip)]
    ranks: Ranks,
}

impl TrainStep for Model {
    type Input = Tensor<2>;
    type Output = RegressionOutput;

    fn step(&self, batch: Tensor<2>) -> TrainOutput<RegressionOutput> {
        let output = InferenceStep::step(self, batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }

    fn optimize(
        self,
        optim: &mut ModuleOptimizer,
        rate: ModuleLearningRate,
        gradients: GradientsParams,
    ) -> Self {
        let gradients = self.ranks.average(gradients, &self).unwrap_or_else(|error| panic!("{error}"));
        optim.step(rate, self, gradients)
    }
}

impl InferenceStep for Model {
    type Input = Tensor<2>;
    type Output = RegressionOutput;

    fn step(&self, batch: Tensor<2>) -> RegressionOutput {
        let out = self.layer.forward(batch.clone());
        RegressionOutput::new((out.clone() - batch.clone()).square().mean(), out, batch)
    }
}

struct Batches;

impl Batcher<f64, Tensor<2>> for Batches {
    fn batch(&self, items: Vec<f64>, device: &Device) -> Tensor<2> {
        crate::tensor(items.clone(), [items.len(), 1], DType::F32, device)
    }
}

/// Stops after an epoch; counts the epochs.
#[derive(Clone)]
struct After {
    last: usize,
    epochs: Arc<AtomicUsize>,
}

impl EarlyStoppingStrategy for After {
    fn should_stop(&mut self, epoch: usize, _store: &EventStoreClient) -> bool {
        self.epochs.store(epoch, Ordering::Relaxed);
        epoch >= self.last
    }
}

/// Ranks that would stop after different epochs stop with rank 0, with the same model.
fn early_stopping(ranks: &Ranks) -> Result<()> {
    let loader = |rank: &Ranks| {
        let samples = Shard::new(InMemDataset::new(crate::numbers(1, 11)), rank, Uneven::Pad);
        DataLoaderBuilder::new(Batches).batch_size(2).build(samples)
    };
    let after = After { last: 3 + 2 * ranks.rank() % 3, epochs: Arc::default() };
    let training = SupervisedTraining::new(".", loader(ranks), loader(ranks))
        .with_application_logger(None)
        .with_metric_logger(InMemoryMetricLogger::new())
        .metrics((LossMetric::new(),))
        .renderer(Box::new(Silent))
        .num_epochs(6)
        .early_stopping(FromRank0::new(after.clone(), ranks));
    let layer = LinearConfig::new(1, 1).init(&ranks.device().autodiff());
    let model = ranks.broadcast(Model { layer, ranks: ranks.clone() })?;
    let trained = training.launch(Learner::new(model, SgdConfig::new().init(), 0.1)).model;
    assert_eq!(after.epochs.load(Ordering::Relaxed), 3);
    assert_same_bits(ranks, &values(&trained.layer.weight.val()));
    Ok(())
}

/// Rank 0 writes, and all read.
fn checkpoints(ranks: &Ranks) -> Result<()> {
    let mut name = [0u64];
    let own = tempfile::tempdir().expect("a folder");
    if ranks.rank() == 0 {
        name = [u64::from(std::process::id())];
    }
    ranks.comm().broadcast_in_place(&mut name, 0)?;
    let folder = std::env::temp_dir().join(format!("phalanx-burn-{}-{}", name[0], ranks.world_size()));
    let pair = Pair { first: param(vec![ranks.rank() as f64; 2], [2], widest()), ..Pair::new() };
    // Only rank 0's folder is the one that is read afterwards.
    let written = if ranks.rank() == 0 { folder.clone() } else { own.path().to_owned() };
    let writer = FromRank0::new(FileCheckpointer::new(&written, "model"), ranks);
    let write = |epoch| Checkpointer::<ModuleRecord>::save(&writer, epoch, pair.clone().into_record());
    [1, 2].into_iter().try_for_each(write).expect("it is saved");
    Checkpointer::<ModuleRecord>::delete(&writer, 1).expect("it is deleted");
    ranks.barrier()?;
    assert_eq!(std::fs::read_dir(own.path()).expect("a folder").count(), 0);
    let reader = FromRank0::new(FileCheckpointer::new(&folder, "model"), ranks);
    let record: ModuleRecord = reader.restore(2).expect("it was saved");
    assert_eq!(values(&pair.load_record(record).first.val()), [0.0; 2]);
    assert!(Checkpointer::<ModuleRecord>::restore(&reader, 1).is_err());
    ranks.barrier()?;
    if ranks.rank() == 0 {
        std::fs::remove_dir_all(&folder).expect("it is removed");
    }
    Ok(())
}
