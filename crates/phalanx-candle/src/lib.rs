//! candle's tensors on many ranks: collectives with gradients, layers that are split, data-parallel training.
//!
//! The smallest program, with two ranks as threads:
//!
//! ```
//! use candle_core::Tensor;
//! use phalanx::ReduceOp;
//! use phalanx_candle::Ranks;
//!
//! let sums = Ranks::try_run(2, |ranks| {
//!     let mine = Tensor::new(&[1.0f32, 2.0], ranks.device())?;
//!     ranks.all_reduce(&mine, ReduceOp::Sum)?.to_vec1::<f32>()
//! })?;
//! assert_eq!(sums, [[2.0, 4.0], [2.0, 4.0]]);
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! As processes, [`Ranks::init`] takes the place of [`Ranks::try_run`], and `phalanx launch -n 2 -- program` starts them.
//!
//! | what | where |
//! |---|---|
//! | collectives on tensors, in place or with gradients; messages | [`Ranks`] |
//! | layers of which each rank has a part | [`ColumnParallelLinear`], [`RowParallelLinear`], [`VocabParallelEmbedding`], [`cross_entropy`] |
//! | parameters by name, of which a rank reads its part | [`Weights`] |
//! | gradients averaged over the ranks' parts of a batch | [`DataParallel`] |
//! | checkpoints, read again by any number of ranks; an optimiser whose state is in them | [`Checkpoints`], [`AdamW`] |
//! | phalanx's error behind candle's | [`phalanx_error`] |
//!
//! With the feature `cuda`, tensors may be on GPUs.

mod adam_w;
mod checkpoint;
mod collective;
mod data_parallel;
mod error;
mod memory;
mod messages;
mod ranks;
mod tensor_parallel;
mod weights;

pub use adam_w::{AdamW, AdamWSettings};
pub use checkpoint::Checkpoints;
pub use data_parallel::{DataParallel, Settings};
pub use error::phalanx_error;
pub use phalanx_train::mesh::{Init, part};
pub use ranks::Ranks;
pub use tensor_parallel::{
    ColumnParallelLinear, CrossEntropySettings, RowParallelLinear, VocabParallelEmbedding, cross_entropy,
    kv_heads,
};
pub use weights::Weights;

/// The guide, whose programs are compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guide/candle.md")]
struct Guide;
