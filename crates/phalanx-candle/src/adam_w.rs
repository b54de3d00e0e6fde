//! [`AdamW`]: the optimiser, with its state where a checkpoint finds it.

use crate::weights::Weights;
use candle_core::backprop::GradStore;
use candle_core::{DType, Result, Tensor, Var};

/// Settings of [`AdamW`]; the defaults are those of candle-nn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWSettings {
    /// Learning rate.
    pub rate: f64,
    /// How much of the mean of the gradients stays in each step.
    pub beta1: f64,
    /// How much of the mean of their squares stays.
    pub beta2: f64,
    /// Added to the root of the squares.
    pub epsilon: f64,
    /// The part of a parameter that each step takes away, times the rate.
    pub decay: f64,
}

impl Default for AdamWSettings {
    fn default() -> AdamWSettings {
        AdamWSettings { rate: 1e-3, beta1: 0.9, beta2: 0.999, epsilon: 1e-8, decay: 0.01 }
    }
}

/// AdamW (Loshchilov and Hutter 2019) for the variables of [`Weights`].
///
/// It is candle-nn's, but for this: the moments of candle-nn's optimisers cannot be read from outside, so a training that goes on from
/// a checkpoint would begin with none. These are saved by [`Checkpoints`](crate::Checkpoints). Moments of f16 and bf16 are in f32.
#[derive(Debug)]
pub struct AdamW {
    parameters: Vec<Parameter>,
    settings: AdamWSettings,
    steps: u64,
}

#[derive(Debug)]
pub(crate) struct Parameter {
    pub name: String,
    pub variable: Var,
    /// The means of the gradients and of their squares.
    pub moments: [Var; 2],
}

impl AdamW {
    /// For all variables that the layers have made so far.
    pub fn new(weights: &Weights, settings: AdamWSettings) -> Result<AdamW> {
        let parameter = |(name, variable, _): (String, Var, _)| {
            let dtype = if variable.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
            let zeros = || Var::zeros(variable.shape(), dtype, variable.device());
            Ok(Parameter { name, moments: [zeros()?, zeros()?], variable })
        };
        let parameters = weights.placed().into_iter().map(parameter).collect::<Result<_>>()?;
        Ok(AdamW { parameters, settings, steps: 0 })
    }

    /// Makes a step. Variables without a gradient stay as they are.
    pub fn step(&mut self, gradients: &GradStore) -> Result<()> {
        self.steps += 1;
        let AdamWSettings { rate, beta1, beta2, epsilon, decay } = self.settings;
        let correction = |beta: f64| 1.0 - beta.powf(self.steps as f64);
        for Parameter { variable, moments: [mean, squares], .. } in &self.parameters {
            let Some(gradient) = gradients.get(variable) else { continue };
            let gradient = gradient.to_dtype(mean.dtype())?;
            mean.set(&((mean.as_tensor() * beta1)? + (&gradient * (1.0 - beta1))?)?)?;
            squares.set(&((squares.as_tensor() * beta2)? + (gradient.sqr()? * (1.0 - beta2))?)?)?;
            let direction = (mean.as_tensor() / correction(beta1))?;
            let length = ((squares.as_tensor() / correction(beta2))?.sqrt()? + epsilon)?;
            let value = (variable.to_dtype(mean.dtype())? * (1.0 - rate * decay))?;
            let value: Tensor = (value - ((direction / length)? * rate)?)?;
            variable.set(&value.to_dtype(variable.dtype())?)?;
        }
        Ok(())
    }

    /// Changes the learning rate.
    pub fn set_rate(&mut self, rate: f64) {
        self.settings.rate = rate;
    }

    /// Steps so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    pub(crate) fn set_steps(&mut self, steps: u64) {
        self.steps = steps;
    }

    pub(crate) fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }
}
