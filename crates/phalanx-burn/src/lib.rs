//! burn's modules on many ranks: parameters from rank 0, gradients averaged, on threads, processes and hosts, CPUs and NVIDIA's GPUs.
//!
//! A training of one's own has one line more:
//!
//! ```no_run
//! # use burn::{module::Module, optim::{GradientsParams, ModuleOptimizer}, tensor::Tensor};
//! # use phalanx_burn::{Ranks, Result};
//! # fn step<M: Module>(ranks: &Ranks, model: M, loss: Tensor<1>, optimizer: &mut ModuleOptimizer) -> Result<M> {
//! let gradients = GradientsParams::from_grads(loss.backward(), &model);
//! let gradients = ranks.average(gradients, &model)?;
//! Ok(optimizer.step(0.01, model, gradients))
//! # }
//! ```
//!
//! | what | where |
//! |---|---|
//! | parameters and statistics of rank 0 | [`Ranks::broadcast`] |
//! | gradients averaged, by the number of samples if it differs | [`Ranks::average`], [`Ranks::average_by`] |
//! | the norm of all gradients together bounded | [`Ranks::clip`] |
//! | statistics of batch normalization over all ranks | [`Ranks::average_statistics`] |
//! | a rank's part of a data set | [`Shard`] |
//! | burn's `Learner` on ranks | [`learner`], with the feature `train` |
//!
//! Not offered: optimiser states split among ranks, and parts of layers on different ranks. burn's optimisers see whole parameters.

mod elements;
#[cfg(feature = "cuda")]
#[allow(unsafe_code)]
mod gpu;
mod gradients;
mod layout;
#[cfg(feature = "train")]
pub mod learner;
mod module;
mod ranks;
mod shard;

pub use phalanx_train::{Error, Result};
pub use ranks::Ranks;
pub use shard::{Shard, Uneven};

/// The guide, whose programs are compiled and run.
#[cfg(all(doctest, feature = "train"))]
#[doc = include_str!("../../../docs/guide/burn.md")]
struct Guide;
