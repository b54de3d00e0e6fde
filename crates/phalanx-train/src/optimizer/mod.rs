//! Optimizers: what makes a step of a gradient.
//!
//! ```
//! use phalanx_train::device::Host;
//! use phalanx_train::optimizer::{Optimizer, Piece, Sgd};
//!
//! let sgd = Sgd { learning_rate: 0.1, momentum: 0.9, nesterov: false, weight_decay: 0.0 };
//! let (mut parameters, mut momentum) = ([1.0f64], [0.0]);
//! for step in 1..=2 {
//!     let states = &mut [&mut momentum[..]];
//!     sgd.update(&Host, step, &Piece::whole(&[1]), &&[0.5][..], &mut &mut parameters[..], states)?;
//! }
//! // 1 - 0.1 * 0.5 - 0.1 * (0.9 * 0.5 + 0.5)
//! assert!((parameters[0] - 0.855).abs() < 1e-12);
//! # Ok::<(), phalanx_train::Error>(())
//! ```
//!
//! Names and results are those of `torch.optim`'s optimizers. [`ShardedGroup`](crate::sharding::ShardedGroup) applies them to shards.

#[cfg(feature = "cuda")]
mod gpu;
mod host;
mod muon;

pub use muon::{Matrices, Muon};

use crate::Result;
use crate::device::{Device, Number};
use std::ops::Range;

/// A part of a parameter that one update covers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece<'a> {
    /// Shape of the whole parameter.
    pub shape: &'a [usize],
    /// The elements, in row-major order.
    pub range: Range<usize>,
}

impl Piece<'_> {
    /// All of a parameter.
    pub fn whole(shape: &[usize]) -> Piece<'_> {
        Piece { shape, range: 0..shape.iter().product() }
    }

    /// Whether it is all of the parameter.
    pub fn is_whole(&self) -> bool {
        self.range == (0..self.shape.iter().product())
    }
}

/// An optimizer. On every device that can do its arithmetic.
pub trait Optimizer<D: Device> {
    /// Numbers that it keeps for each element of a parameter, each in a buffer of its own that is 0 at first.
    fn states(&self) -> usize;

    /// Whether each parameter must be in one piece, on one rank.
    fn needs_whole_parameters(&self) -> bool {
        false
    }

    /// Why a parameter of this shape cannot be updated, if it cannot.
    fn problem_with(&self, _shape: &[usize]) -> Option<String> {
        None
    }

    /// Updates one piece of a parameter. Steps count from 1. The views have the length of the piece.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn update<M: Number>(
        &self,
        device: &D,
        step: u64,
        piece: &Piece<'_>,
        gradient: &D::View<'_, M>,
        parameters: &mut D::ViewMut<'_, M>,
        states: &mut [D::ViewMut<'_, M>],
    ) -> Result<()>;
}

/// `torch.optim.AdamW`: Adam with decoupled weight decay (Loshchilov and Hutter 2019). It keeps two moments.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Length of a step.
    pub learning_rate: f64,
    /// Decay of the first and of the second moment.
    pub betas: (f64, f64),
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Part of a parameter, times the learning rate, that a step takes away.
    pub weight_decay: f64,
}

impl AdamW {
    /// With the given learning rate, and torch's defaults: betas 0.9 and 0.999, epsilon 1e-8, weight decay 0.01.
    pub fn new(learning_rate: f64) -> AdamW {
        AdamW { learning_rate, betas: (0.9, 0.999), epsilon: 1e-8, weight_decay: 0.01 }
    }

    /// What a step multiplies with: the decay of parameters, the length of the step and the root of the second moment's correction, the
    /// betas, 1 minus them, and epsilon.
    fn factors(&self, step: u64) -> [f64; 8] {
        let (beta1, beta2) = self.betas;
        let correction = |beta: f64| 1.0 - beta.powi(i32::try_from(step).unwrap_or(i32::MAX));
        let decay = 1.0 - self.learning_rate * self.weight_decay;
        let (length, root) = (self.learning_rate / correction(beta1), correction(beta2).sqrt());
        [decay, length, root, beta1, beta2, 1.0 - beta1, 1.0 - beta2, self.epsilon]
    }
}

/// `torch.optim.SGD`, without dampening. It keeps one momentum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sgd {
    /// Length of a step.
    pub learning_rate: f64,
    /// Part of the last step that goes on. 0 for none.
    pub momentum: f64,
    /// Nesterov's momentum: the gradient counts once more, ahead of the momentum.
    pub nesterov: bool,
    /// Multiple of a parameter that is added to its gradient.
    pub weight_decay: f64,
}

/// Arithmetic of the element-wise optimizers. All views have one length.
pub trait ElementWise: Device {
    /// One step of [`AdamW`].
    ///
    /// # Errors
    /// If the device refuses the work.
    fn adamw<M: Number>(
        &self,
        hyper: &AdamW,
        step: u64,
        gradient: &Self::View<'_, M>,
        parameters: &mut Self::ViewMut<'_, M>,
        first: &mut Self::ViewMut<'_, M>,
        second: &mut Self::ViewMut<'_, M>,
    ) -> Result<()>;

    /// One step of [`Sgd`].
    ///
    /// # Errors
    /// If the device refuses the work.
    fn sgd<M: Number>(
        &self,
        hyper: &Sgd,
        gradient: &Self::View<'_, M>,
        parameters: &mut Self::ViewMut<'_, M>,
        momentum: &mut Self::ViewMut<'_, M>,
    ) -> Result<()>;
}

impl<D: ElementWise> Optimizer<D> for AdamW {
    fn states(&self) -> usize {
        2
    }

    fn update<M: Number>(
        &self,
        device: &D,
        step: u64,
        _piece: &Piece<'_>,
        gradient: &D::View<'_, M>,
        parameters: &mut D::ViewMut<'_, M>,
        states: &mut [D::ViewMut<'_, M>],
    ) -> Result<()> {
        let [first, second] = states else { panic!("AdamW keeps two moments, not {}", states.len()) };
        device.adamw(self, step, gradient, parameters, first, second)
    }
}

impl<D: ElementWise> Optimizer<D> for Sgd {
    fn states(&self) -> usize {
        1
    }

    fn update<M: Number>(
        &self,
        device: &D,
        _step: u64,
        _piece: &Piece<'_>,
        gradient: &D::View<'_, M>,
        parameters: &mut D::ViewMut<'_, M>,
        states: &mut [D::ViewMut<'_, M>],
    ) -> Result<()> {
        let [momentum] = states else { panic!("SGD keeps one momentum, not {}", states.len()) };
        device.sgd(self, gradient, parameters, momentum)
    }
}
