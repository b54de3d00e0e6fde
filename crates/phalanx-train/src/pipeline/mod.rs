//! Pipelines: the layers of a model are spread over ranks, and micro-batches follow one another through them.
//!
//! ```
//! use phalanx_train::device::Host;
//! use phalanx_train::pipeline::{Pipeline, Position, Schedule, Stage};
//!
//! /// Multiplies by a weight; the last stage's loss is the sum of its outputs.
//! struct Layer {
//!     weight: f64,
//!     inputs: Vec<Vec<f64>>,
//!     gradient: f64,
//! }
//!
//! impl Stage<Host, f64> for Layer {
//!     fn forward(&mut self, at: Position, input: Option<Vec<f64>>) -> phalanx_train::Result<Option<Vec<f64>>> {
//!         let input = input.unwrap_or_else(|| vec![at.micro as f64 + 1.0]);
//!         let output = input.iter().map(|x| x * self.weight).collect();
//!         self.inputs[at.micro] = input;
//!         Ok((!at.is_last).then_some(output))
//!     }
//!     fn backward(&mut self, at: Position, gradient: Option<Vec<f64>>) -> phalanx_train::Result<Option<Vec<f64>>> {
//!         let gradient = gradient.unwrap_or_else(|| vec![1.0]);
//!         let input = std::mem::take(&mut self.inputs[at.micro]);
//!         self.gradient += gradient.iter().zip(&input).map(|(g, x)| g * x).sum::<f64>();
//!         Ok((!at.is_first).then(|| gradient.iter().map(|g| g * self.weight).collect()))
//!     }
//! }
//!
//! let gradients = phalanx::try_run(2, |comm| {
//!     let pipeline = Pipeline::new(&comm, Schedule::one_forward_one_backward(2, 3)?)?;
//!     let mut layer = Layer { weight: [2.0, 5.0][comm.rank()], inputs: vec![Vec::new(); 3], gradient: 0.0 };
//!     pipeline.run(&comm, &Host, &mut layer, |_micro, _stage| 1)?;
//!     Ok::<_, phalanx_train::Error>(layer.gradient)
//! })?;
//! // Inputs 1, 2, 3: the loss is 2 · 5 · 6.
//! assert_eq!(gradients, [30.0, 12.0]);
//! # Ok::<(), phalanx_train::Error>(())
//! ```
//!
//! A [`Schedule`] says in which order a rank does its work:
//!
//! | | activations that rank r keeps | bubble, of p ranks and m micro-batches |
//! |---|---|---|
//! | [`gpipe`](Schedule::gpipe) | m | (p - 1) / (m + p - 1) |
//! | [`one_forward_one_backward`](Schedule::one_forward_one_backward) | p - r | the same |
//! | [`interleaved`](Schedule::interleaved), v chunks | more | (p - 1) / (v m + p - 1) |
//! | [`zero_bubble`](Schedule::zero_bubble) | p | about a third of 1F1B's |
//!
//! [`Schedule::timeline`] has a table and a picture of each.
//!
//! **Gradients.** The stages' functions decide what a micro-batch counts: where the loss is a mean over all samples of the batch, the last
//! stage divides its gradient by their number, whatever micro-batch they are in. [`mean_loss`] is that mean on every rank.
//! A weight that two stages share ("tied") has a gradient on each of them: [`reduce_tied_gradient`].

mod executor;
#[cfg(feature = "cuda")]
pub(crate) mod gpu;
mod schedule;
mod timeline;

pub use executor::{Channel, Messages, Pipeline, Position, Stage, mean_loss, reduce_tied_gradient};
#[cfg(feature = "cuda")]
pub use gpu::Sending;
pub use schedule::{Action, Kind, Schedule};
pub use timeline::{Costs, Timeline};
