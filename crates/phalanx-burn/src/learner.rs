//! burn's `Learner` on ranks, unchanged: the model averages its gradients in `TrainStep::optimize`.
//!
//! ```no_run
//! # use burn::module::Module;
//! # use burn::nn::Linear;
//! # use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
//! # use burn::optim::{GradientsParams, ModuleOptimizer};
//! # use burn::tensor::Tensor;
//! # use burn::train::{RegressionOutput, TrainOutput, TrainStep};
//! # use phalanx_burn::Ranks;
//! #[derive(Module, Debug)]
//! struct Model {
//!     layer: Linear,
//!     #[module(skip)]
//!     ranks: Ranks,
//! }
//!
//! impl TrainStep for Model {
//! #   type Input = Tensor<2>;
//! #   type Output = RegressionOutput;
//! #   fn step(&self, batch: Tensor<2>) -> TrainOutput<RegressionOutput> {
//! #       let out = self.layer.forward(batch);
//! #       let loss = out.clone().square().mean();
//! #       TrainOutput::new(self, loss.backward(), RegressionOutput::new(loss, out.clone(), out))
//! #   }
//!     // Input, Output and step as ever.
//!     fn optimize(self, optim: &mut ModuleOptimizer, rate: ModuleLearningRate, gradients: GradientsParams) -> Self {
//!         // It cannot return an error. The panic says which rank is lost.
//!         let gradients = self.ranks.average(gradients, &self).unwrap_or_else(|error| panic!("{error}"));
//!         optim.step(rate, self, gradients)
//!     }
//! }
//! ```
//!
//! - The model comes from [`Ranks::broadcast`](crate::Ranks::broadcast).
//! - All ranks need equally many batches: [`Shard`](crate::Shard).
//! - What ranks decide from their own metrics differs, so rank 0 decides: [`FromRank0`].
//! - Every rank takes a folder of its own for logs of metrics.

use crate::Ranks;
use burn::train::EarlyStoppingStrategy;
use burn::train::LearnerSummary;
use burn::train::checkpoint::{Checkpoint, Checkpointer, CheckpointerError};
use burn::train::logger::{EvaluationProgressLogger, TrainingProgressLogger};
use burn::train::metric::MetricDefinition;
use burn::train::metric::store::EventStoreClient;
use burn::train::renderer::{
    EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation, MetricsRendererTraining,
};

/// What rank 0 does for all.
///
/// Of an early-stopping strategy: rank 0's decides, and the others stop with it; they panic if rank 0 is lost. Of a checkpointer: rank 0 writes
/// and deletes, and all read, from a folder that all reach.
#[derive(Debug, Clone)]
pub struct FromRank0<T> {
    inner: T,
    ranks: Ranks,
}

impl<T> FromRank0<T> {
    /// Wraps a strategy or a checkpointer; the same on all ranks.
    pub fn new(inner: T, ranks: &Ranks) -> FromRank0<T> {
        FromRank0 { inner, ranks: ranks.clone() }
    }
}

impl<T: EarlyStoppingStrategy> EarlyStoppingStrategy for FromRank0<T> {
    fn should_stop(&mut self, epoch: usize, store: &EventStoreClient) -> bool {
        let own = self.inner.should_stop(epoch, store);
        self.ranks.decide(own).unwrap_or_else(|error| panic!("{error}"))
    }
}

impl<R: Checkpoint, T: Checkpointer<R>> Checkpointer<R> for FromRank0<T> {
    fn save(&self, epoch: usize, record: R) -> Result<(), CheckpointerError> {
        if self.ranks.rank() == 0 { self.inner.save(epoch, record) } else { Ok(()) }
    }

    fn delete(&self, epoch: usize) -> Result<(), CheckpointerError> {
        if self.ranks.rank() == 0 { self.inner.delete(epoch) } else { Ok(()) }
    }

    fn restore(&self, epoch: usize) -> Result<R, CheckpointerError> {
        self.inner.restore(epoch)
    }
}

/// A renderer that shows nothing, for all ranks but 0.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl MetricsRendererTraining for Silent {
    fn update_train(&mut self, _state: MetricState) {}
    fn update_valid(&mut self, _state: MetricState) {}
    fn on_train_end(&mut self, _summary: Option<LearnerSummary>) -> Result<(), Box<dyn std::error::Error>> {
        Ok(())
    }
}

impl MetricsRendererEvaluation for Silent {
    fn update_test(&mut self, _name: EvaluationName, _state: MetricState) {}
    fn on_test_end(&mut self, _summary: Option<LearnerSummary>) -> Result<(), Box<dyn std::error::Error>> {
        Ok(())
    }
}

impl TrainingProgressLogger for Silent {
    fn start(&mut self, _epochs: usize, _first: usize, _items: Option<usize>, _label: Option<&str>) {}
    fn update_epoch(&mut self, _epoch: usize) {}
    fn start_split(&mut self, _split: &str, _items: usize) {}
    fn update_split(&mut self, _items: usize) {}
    fn end_split(&mut self) {}
    fn end(&mut self) {}
    fn log_event_training(&mut self, _event: String) {}
}

impl EvaluationProgressLogger for Silent {
    fn start_global_progress(&mut self, _tests: usize) {}
    fn start_test(&mut self, _name: &str, _items: usize) {}
    fn update_test_progress(&mut self, _items: usize) {}
    fn end_test(&mut self) {}
    fn end_global_progress(&mut self) {}
    fn log_event_evaluation(&mut self, _event: String) {}
}

impl MetricsRenderer for Silent {
    fn manual_close(&mut self) {}
    fn register_metric(&mut self, _definition: MetricDefinition) {}
}
