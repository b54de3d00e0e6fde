//! Muon: momentum, made orthogonal.

use super::{ElementWise, Optimizer, Piece};
use crate::Result;
use crate::device::{Device, Number};

/// `torch.optim.Muon`: the momentum of a matrix, made orthogonal by Newton–Schulz iterations (Jordan 2024). For
/// parameters of two dimensions; others take [`AdamW`](super::AdamW). It keeps one momentum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Muon {
    /// Length of a step; it is multiplied by √max(1, rows / columns).
    pub learning_rate: f64,
    /// Part of the momentum that stays.
    pub momentum: f64,
    /// Nesterov's momentum.
    pub nesterov: bool,
    /// Part of a parameter, times the learning rate, that a step takes away.
    pub weight_decay: f64,
    /// Newton–Schulz iterations.
    pub iterations: usize,
    /// Their coefficients.
    pub coefficients: [f64; 3],
    /// Added to the norm by which a matrix is divided at first.
    pub epsilon: f64,
}

impl Muon {
    /// With the given learning rate, and torch's defaults: momentum 0.95 as Nesterov's, weight decay 0.1, five iterations.
    pub fn new(learning_rate: f64) -> Muon {
        Muon {
            learning_rate,
            momentum: 0.95,
            nesterov: true,
            weight_decay: 0.1,
            iterations: 5,
            coefficients: [3.4445, -4.775, 2.0315],
            epsilon: 1e-7,
        }
    }
}

/// Arithmetic on whole matrices.
pub trait Matrices: Device {
    /// Makes a matrix nearly orthogonal: X ← X / (‖X‖ + epsilon), then `steps` times X ← a X + (b A + c A²) X with A = X Xᵀ. A
    /// matrix with more rows than columns is transposed for it.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn orthogonalize<M: Number>(
        &self,
        rows: usize,
        columns: usize,
        steps: usize,
        coefficients: [f64; 3],
        epsilon: f64,
        matrix: &mut Self::ViewMut<'_, M>,
    ) -> Result<()>;
}

impl<D: Matrices + ElementWise> Optimizer<D> for Muon {
    fn states(&self) -> usize {
        1
    }

    fn needs_whole_parameters(&self) -> bool {
        true
    }

    fn problem_with(&self, shape: &[usize]) -> Option<String> {
        (shape.len() != 2).then(|| {
            format!("Muon updates matrices, not a parameter of shape {shape:?}: give that one to AdamW")
        })
    }

    fn update<M: Number>(
        &self,
        device: &D,
        _step: u64,
        piece: &Piece<'_>,
        gradient: &D::View<'_, M>,
        parameters: &mut D::ViewMut<'_, M>,
        states: &mut [D::ViewMut<'_, M>],
    ) -> Result<()> {
        let ([momentum], [rows, columns]) = (states, piece.shape) else {
            panic!("Muon keeps one momentum of a matrix");
        };
        assert!(piece.is_whole(), "Muon needs whole matrices");
        let len = rows * columns;
        // momentum ← β momentum + (1 - β) gradient.
        device.scale(momentum, self.momentum)?;
        device.add(1.0 - self.momentum, gradient, momentum)?;
        let mut update = device.zeros::<M>(len)?;
        {
            let mut view = device.view_mut(&mut update, 0..len);
            device.add(if self.nesterov { self.momentum } else { 1.0 }, &D::reborrow(momentum), &mut view)?;
            if self.nesterov {
                device.add(1.0 - self.momentum, gradient, &mut view)?;
            }
            let (steps, coefficients) = (self.iterations, self.coefficients);
            device.orthogonalize(*rows, *columns, steps, coefficients, self.epsilon, &mut view)?;
        }
        let adjusted = self.learning_rate * (*rows as f64 / *columns as f64).max(1.0).sqrt();
        device.scale(parameters, 1.0 - self.learning_rate * self.weight_decay)?;
        device.add(-adjusted, &device.view(&update, 0..len), parameters)
    }
}
