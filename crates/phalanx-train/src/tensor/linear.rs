//! Linear layers whose weight is split: by outputs, or by inputs.

use super::sum;
use crate::device::{Device, Number};
use crate::{Error, Result};
use phalanx::{Comm, Reducible, Source, Target};

/// Products of row-major matrices.
pub trait Products: Device {
    /// `c = a · b`, or `c += a · b` if `adds`: of `[m, k]` and `[k, n]`. `transposed` says whether `a` is stored as `[k, m]`, and `b` as `[n, k]`.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn product<T: Number>(
        &self,
        size: [usize; 3],
        transposed: [bool; 2],
        a: &Self::View<'_, T>,
        b: &Self::View<'_, T>,
        c: &mut Self::ViewMut<'_, T>,
        adds: bool,
    ) -> Result<()>;

    /// `to[row, column] += bias[column]` for each row.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn add_to_rows<T: Number>(&self, bias: &Self::View<'_, T>, to: &mut Self::ViewMut<'_, T>) -> Result<()>;

    /// `to[column] += Σ_row from[row, column]`, in the order of the rows.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn sum_of_rows<T: Number>(&self, from: &Self::View<'_, T>, to: &mut Self::ViewMut<'_, T>) -> Result<()>;
}

/// `y = x Wᵀ + b`, of which this rank has some of the outputs: rows of W and b. The input is the same on every rank.
#[derive(Debug, Clone, PartialEq)]
pub struct ColumnParallel<B> {
    /// Inputs.
    pub inputs: usize,
    /// Outputs of this rank.
    pub outputs: usize,
    /// `[outputs, inputs]`.
    pub weight: B,
    /// `[outputs]`.
    pub bias: Option<B>,
}

/// `y = x Wᵀ + b`, of which this rank has some of the inputs: columns of W. The output is the same on every rank; the bias is added once.
#[derive(Debug, Clone, PartialEq)]
pub struct RowParallel<B> {
    /// Inputs of this rank.
    pub inputs: usize,
    /// Outputs.
    pub outputs: usize,
    /// `[outputs, inputs]`.
    pub weight: B,
    /// `[outputs]`, the same on every rank.
    pub bias: Option<B>,
}

/// Gradients of a linear layer.
#[derive(Debug)]
pub struct LinearGradients<B> {
    /// Of the input, `[rows, inputs]`.
    pub input: B,
    /// Of the weight, `[outputs, inputs]`.
    pub weight: B,
    /// Of the bias, `[outputs]`, if there is one.
    pub bias: Option<B>,
}

/// A linear layer of one rank: sizes and the bias's presence.
#[derive(Clone, Copy)]
struct Sizes {
    inputs: usize,
    outputs: usize,
}

impl Sizes {
    fn rows(self, what: &str, len: usize, each: usize) -> Result<usize> {
        if each > 0 && len.is_multiple_of(each) {
            return Ok(len / each);
        }
        Err(Error::usage(format!(
            "{len} numbers of {what} for a layer of {} inputs and {} outputs: a multiple of {each} is needed, and of 1 at least",
            self.inputs, self.outputs
        )))
    }

    /// `x Wᵀ`.
    fn forward<D: Products, T: Number>(
        self,
        device: &D,
        weight: &D::Buffer<T>,
        x: &D::View<'_, T>,
    ) -> Result<D::Buffer<T>> {
        let rows = self.rows("the input", x.len(), self.inputs)?;
        let mut y = device.alloc(rows * self.outputs)?;
        let weight = device.view(weight, 0..self.outputs * self.inputs);
        let mut to = device.view_mut(&mut y, 0..rows * self.outputs);
        device.product([rows, self.inputs, self.outputs], [false, true], x, &weight, &mut to, false)?;
        drop(to);
        Ok(y)
    }

    fn add_bias<D: Products, T: Number>(
        self,
        device: &D,
        bias: Option<&D::Buffer<T>>,
        y: &mut D::Buffer<T>,
    ) -> Result<()> {
        let Some(bias) = bias else { return Ok(()) };
        let len = y.len();
        device.add_to_rows(&device.view(bias, 0..self.outputs), &mut device.view_mut(y, 0..len))
    }

    fn backward<D: Products, T: Number>(
        self,
        device: &D,
        weight: &D::Buffer<T>,
        has_bias: bool,
        x: &D::View<'_, T>,
        gradient: &D::View<'_, T>,
    ) -> Result<LinearGradients<D::Buffer<T>>> {
        let Sizes { inputs, outputs } = self;
        let rows = self.rows("the gradient", gradient.len(), outputs)?;
        if x.len() != rows * inputs {
            return Err(Error::usage(format!(
                "{} numbers of the input and a gradient of {rows} rows: {} are needed",
                x.len(),
                rows * inputs
            )));
        }
        let (mut of_x, mut of_weight) = (device.alloc(rows * inputs)?, device.alloc(outputs * inputs)?);
        let weight = device.view(weight, 0..outputs * inputs);
        let mut to = device.view_mut(&mut of_x, 0..rows * inputs);
        device.product([rows, outputs, inputs], [false, false], gradient, &weight, &mut to, false)?;
        drop(to);
        let mut to = device.view_mut(&mut of_weight, 0..outputs * inputs);
        device.product([outputs, rows, inputs], [true, false], gradient, x, &mut to, false)?;
        drop(to);
        let mut bias = None;
        if has_bias {
            let of_bias = bias.insert(device.zeros(outputs)?);
            device.sum_of_rows(gradient, &mut device.view_mut(of_bias, 0..outputs))?;
        }
        Ok(LinearGradients { input: of_x, weight: of_weight, bias })
    }
}

impl<B: Target<Elem: Reducible>> ColumnParallel<B> {
    fn sizes(&self) -> Sizes {
        Sizes { inputs: self.inputs, outputs: self.outputs }
    }

    /// `[rows, inputs]` → this rank's `[rows, outputs]`. No rank is asked.
    ///
    /// # Errors
    /// [`Error::Usage`] if the input is of no whole rows. Errors of the device.
    pub fn forward<D: Products<Buffer<T> = B>, T: Number>(
        &self,
        device: &D,
        x: &D::View<'_, T>,
    ) -> Result<B> {
        let mut y = self.sizes().forward(device, &self.weight, x)?;
        self.sizes().add_bias::<D, T>(device, self.bias.as_ref(), &mut y)?;
        Ok(y)
    }

    /// Gradients, from that of this rank's outputs. Collective: the gradient of the input is summed over the ranks.
    ///
    /// # Errors
    /// As [`forward`](ColumnParallel::forward); errors of `comm`.
    pub fn backward<D: Products<Buffer<T> = B>, T: Number>(
        &self,
        comm: &Comm,
        device: &D,
        x: &D::View<'_, T>,
        gradient: &D::View<'_, T>,
    ) -> Result<LinearGradients<B>> {
        let mut gradients = self.backward_unsummed(device, x, gradient)?;
        sum(comm, &mut gradients.input)?;
        Ok(gradients)
    }

    /// The same without the sum, for sequence parallelism: [`scatter_sum`](super::scatter_sum) follows. No rank is asked.
    ///
    /// # Errors
    /// As [`forward`](ColumnParallel::forward).
    pub fn backward_unsummed<D: Products<Buffer<T> = B>, T: Number>(
        &self,
        device: &D,
        x: &D::View<'_, T>,
        gradient: &D::View<'_, T>,
    ) -> Result<LinearGradients<B>> {
        self.sizes().backward(device, &self.weight, self.bias.is_some(), x, gradient)
    }
}

impl<B: Target<Elem: Reducible>> RowParallel<B> {
    fn sizes(&self) -> Sizes {
        Sizes { inputs: self.inputs, outputs: self.outputs }
    }

    /// This rank's `[rows, inputs]` → `[rows, outputs]`, the same on every rank. Collective.
    ///
    /// # Errors
    /// [`Error::Usage`] if the input is of no whole rows. Errors of `comm` and of the device.
    pub fn forward<D: Products<Buffer<T> = B>, T: Number>(
        &self,
        comm: &Comm,
        device: &D,
        x: &D::View<'_, T>,
    ) -> Result<B> {
        let mut y = self.forward_unsummed(device, x)?;
        sum(comm, &mut y)?;
        self.sizes().add_bias::<D, T>(device, self.bias.as_ref(), &mut y)?;
        Ok(y)
    }

    /// This rank's summand, without the bias, for sequence parallelism: [`scatter_sum`](super::scatter_sum) follows, and then
    /// [`add_bias`](RowParallel::add_bias). No rank is asked.
    ///
    /// # Errors
    /// As [`forward`](RowParallel::forward).
    pub fn forward_unsummed<D: Products<Buffer<T> = B>, T: Number>(
        &self,
        device: &D,
        x: &D::View<'_, T>,
    ) -> Result<B> {
        self.sizes().forward(device, &self.weight, x)
    }

    /// Adds the bias to rows of outputs.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn add_bias<D: Products<Buffer<T> = B>, T: Number>(&self, device: &D, y: &mut B) -> Result<()> {
        self.sizes().add_bias::<D, T>(device, self.bias.as_ref(), y)
    }

    /// Gradients, from that of the outputs, which is the same on every rank. So is that of the bias: it is counted once. No rank is asked.
    ///
    /// # Errors
    /// As [`forward`](RowParallel::forward).
    pub fn backward<D: Products<Buffer<T> = B>, T: Number>(
        &self,
        device: &D,
        x: &D::View<'_, T>,
        gradient: &D::View<'_, T>,
    ) -> Result<LinearGradients<B>> {
        self.sizes().backward(device, &self.weight, self.bias.is_some(), x, gradient)
    }
}
