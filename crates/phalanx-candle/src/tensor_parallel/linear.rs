//! Linear layers that are split by columns (outputs) or rows (inputs).

use crate::error::{failed_training, usage};
use crate::ranks::Ranks;
use crate::weights::{Init, Weights};
use candle_core::{Result, Tensor};
use candle_nn::{Linear, Module};
use phalanx_train::mesh::{Axis, copies_of_heads, part};

/// The first values of candle-nn's linear layers, but normally distributed.
fn init(inputs: usize) -> Init {
    Init::Normal { mean: 0.0, deviation: (1.0 / (3.0 * inputs as f64)).sqrt() }
}

/// A linear layer of which each rank computes some outputs. All ranks have the whole input.
///
/// A [`RowParallelLinear`] behind it takes the outputs as they are, so that the pair exchanges once:
///
/// ```
/// use candle_core::{DType, Tensor};
/// use candle_nn::{Module, VarMap};
/// use phalanx_candle::{ColumnParallelLinear, Ranks, RowParallelLinear, Weights};
///
/// let outputs = Ranks::try_run(2, |ranks| {
///     let weights = Weights::variables(&ranks, &VarMap::new(), 7, DType::F64);
///     let up = ColumnParallelLinear::new(4, 16, true, &weights.pp("up"))?;
///     let down = RowParallelLinear::new(16, 4, true, &weights.pp("down"))?;
///     let x = Tensor::ones((3, 4), DType::F64, ranks.device())?;
///     down.forward(&up.forward(&x)?.gelu()?)
/// })?;
/// assert_eq!(outputs[0].dims(), [3, 4]);
/// assert_eq!(outputs[0].to_vec2::<f64>()?, outputs[1].to_vec2::<f64>()?);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ColumnParallelLinear {
    linear: Linear,
    ranks: Ranks,
    /// Outputs of all ranks, if the layer gathers them.
    gathered: Option<usize>,
}

impl ColumnParallelLinear {
    /// The layer with the parameters `weight`, `[outputs, inputs]`, and `bias`, `[outputs]`. The first ranks have one output more where the
    /// ranks do not divide them.
    pub fn new(
        inputs: usize,
        outputs: usize,
        has_bias: bool,
        weights: &Weights,
    ) -> Result<ColumnParallelLinear> {
        let ranks = weights.ranks();
        let rows = part(&(0..outputs), ranks.world_size(), ranks.rank());
        ColumnParallelLinear::of_rows(inputs, outputs, &[rows], has_bias, weights)
    }

    /// The layer with several matrices in one parameter, such as gate and up: `outputs` of each, one below the other. Each matrix is split by
    /// itself, so this rank's outputs are its part of the first, then of the second, and so on.
    pub fn fused(
        inputs: usize,
        outputs: &[usize],
        has_bias: bool,
        weights: &Weights,
    ) -> Result<ColumnParallelLinear> {
        let ranks = weights.ranks();
        let mut start = 0;
        let rows = |len: &usize| {
            let whole = start..start + len;
            start = whole.end;
            part(&whole, ranks.world_size(), ranks.rank())
        };
        let rows: Vec<_> = outputs.iter().map(rows).collect();
        ColumnParallelLinear::of_rows(inputs, start, &rows, has_bias, weights)
    }

    /// The layer with queries, keys and values in one parameter, of so many heads of `head` numbers. With fewer heads of keys and values than
    /// ranks, several ranks have the same one ([`kv_heads`]).
    ///
    /// # Errors
    /// If the ranks do not divide the heads of queries, or neither number divides the other for those of keys and values.
    pub fn qkv(
        inputs: usize,
        heads: usize,
        kv: usize,
        head: usize,
        has_bias: bool,
        weights: &Weights,
    ) -> Result<ColumnParallelLinear> {
        let ranks = weights.ranks();
        if !heads.is_multiple_of(ranks.world_size()) {
            return Err(usage(format!(
                "{} ranks cannot share {heads} heads evenly; use a number of ranks that divides it",
                ranks.world_size()
            )));
        }
        let queries = part(&(0..heads), ranks.world_size(), ranks.rank());
        let own = kv_heads(ranks, kv)?;
        let place =
            |start: usize, of: &std::ops::Range<usize>| (start + of.start) * head..(start + of.end) * head;
        let rows = [place(0, &queries), place(heads, &own), place(heads + kv, &own)];
        ColumnParallelLinear::of_rows(inputs, (heads + 2 * kv) * head, &rows, has_bias, weights)
    }

    fn of_rows(
        inputs: usize,
        outputs: usize,
        rows: &[std::ops::Range<usize>],
        has_bias: bool,
        weights: &Weights,
    ) -> Result<ColumnParallelLinear> {
        let weight = weights.several_rows((outputs, inputs), "weight", rows, &init(inputs))?;
        let bias = has_bias.then(|| weights.several_rows(outputs, "bias", rows, &Init::Constant(0.0)));
        let linear = Linear::new(weight, bias.transpose()?);
        Ok(ColumnParallelLinear { linear, ranks: weights.ranks().clone(), gathered: None })
    }

    /// The same layer, which gathers the outputs of all ranks.
    ///
    /// Only of a layer by [`new`](ColumnParallelLinear::new), with so many outputs in all.
    #[must_use]
    pub fn gathering(self, outputs: usize) -> ColumnParallelLinear {
        ColumnParallelLinear { gathered: Some(outputs), ..self }
    }

    /// This rank's part of the parameters.
    pub fn linear(&self) -> &Linear {
        &self.linear
    }
}

impl Module for ColumnParallelLinear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.linear.forward(&self.ranks.copy_to(x)?)?;
        match self.gathered {
            Some(outputs) => self.ranks.gather_from(&y, candle_core::D::Minus1, outputs),
            None => Ok(y),
        }
    }
}

/// Which heads of keys and values this rank has: its part, or one that it shares with other ranks if there are fewer heads than ranks.
///
/// # Errors
/// If neither number divides the other; the error lists the numbers of ranks that fit.
pub fn kv_heads(ranks: &Ranks, heads: usize) -> Result<std::ops::Range<usize>> {
    let (rank, size) = (ranks.rank(), ranks.world_size());
    let copies = copies_of_heads(Axis::Tensor, size, heads).map_err(failed_training)?;
    Ok(part(&(0..heads), size / copies, rank / copies))
}

/// A linear layer of which each rank has some inputs. The sum over the ranks is the output, the same on all.
#[derive(Clone, Debug)]
pub struct RowParallelLinear {
    linear: Linear,
    bias: Option<Tensor>,
    ranks: Ranks,
}

impl RowParallelLinear {
    /// The layer with the parameters `weight`, `[outputs, inputs]`, of which a rank has its columns, and `bias`, `[outputs]`, which all ranks
    /// have, and which is added once, behind the sum.
    pub fn new(
        inputs: usize,
        outputs: usize,
        has_bias: bool,
        weights: &Weights,
    ) -> Result<RowParallelLinear> {
        let weight = weights.split((outputs, inputs), "weight", 1, &init(inputs))?;
        let bias = has_bias.then(|| weights.get(outputs, "bias", &Init::Constant(0.0))).transpose()?;
        Ok(RowParallelLinear { linear: Linear::new(weight, None), bias, ranks: weights.ranks().clone() })
    }

    /// This rank's part of the weight.
    pub fn linear(&self) -> &Linear {
        &self.linear
    }
}

impl Module for RowParallelLinear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let sum = self.ranks.reduce_from(&self.linear.forward(x)?)?;
        match &self.bias {
            Some(bias) => sum.broadcast_add(bias),
            None => Ok(sum),
        }
    }
}
