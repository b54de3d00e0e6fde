//! Cross-entropy of logits that are split along the vocabulary.

use super::embedding::local_ids;
use crate::error::usage;
use crate::ranks::Ranks;
use candle_core::{D, DType, Result, Tensor};
use phalanx::ReduceOp;
use phalanx_train::mesh::part;

/// Settings of [`cross_entropy`].
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CrossEntropySettings {
    /// A target with this value does not count, such as that of padding.
    pub ignore_index: Option<u32>,
    /// This part of the weight is shared by all words evenly.
    pub label_smoothing: f64,
}

/// The mean loss of logits of which each rank has a part of the vocabulary, as a [`ColumnParallelLinear`](crate::ColumnParallelLinear)
/// gives them. The same on every rank; the logits are never gathered.
///
/// `logits` is `[rows, words of this rank]`, `targets` is `[rows]`, of `u32`, the same on every rank. The loss of f16 and bf16 is computed in
/// f32. If no target counts, the loss is 0.
///
/// # Errors
/// If shapes or settings do not fit, a target is not in the vocabulary, or the ranks' parts are not [the usual ones](phalanx_train::mesh::part).
pub fn cross_entropy(
    ranks: &Ranks,
    logits: &Tensor,
    targets: &Tensor,
    vocabulary: usize,
    settings: CrossEntropySettings,
) -> Result<Tensor> {
    let (rows, words) = logits.dims2()?;
    let own = part(&(0..vocabulary), ranks.world_size(), ranks.rank());
    if own.len() != words {
        return Err(usage(format!(
            "cross_entropy: rank {} has {words} words of the logits; its part of {vocabulary} words is {}",
            ranks.rank(),
            own.len()
        )));
    }
    if targets.dims() != [rows] {
        return Err(usage(format!(
            "cross_entropy: targets of shape {:?}; one for each of {rows} rows is needed",
            targets.dims()
        )));
    }
    let smoothing = settings.label_smoothing;
    if !(0.0..=1.0).contains(&smoothing) {
        return Err(usage(format!("cross_entropy: a label smoothing of {smoothing}; it is from 0 to 1")));
    }
    let ignored = |target: u32| settings.ignore_index == Some(target);
    let each = targets.to_vec1::<u32>()?;
    if let Some(target) = each.iter().find(|target| **target as usize >= vocabulary && !ignored(**target)) {
        return Err(usage(format!(
            "cross_entropy: target {target} is not in a vocabulary of {vocabulary} words"
        )));
    }
    let counts: Vec<f32> = each.iter().map(|target| if ignored(*target) { 0.0 } else { 1.0 }).collect();
    let counted: f32 = counts.iter().sum();

    let z = match logits.dtype() {
        DType::F64 => logits.clone(),
        _ => logits.to_dtype(DType::F32)?,
    };
    // Of a rank without words -∞, so that another rank's is the greatest.
    let greatest = match words {
        0 => Tensor::full(f32::NEG_INFINITY, (rows, 1), z.device())?.to_dtype(z.dtype())?,
        _ => z.detach().max_keepdim(D::Minus1)?,
    };
    let greatest = ranks.all_reduce(&greatest.detach(), ReduceOp::Max)?.detach();
    let z = z.broadcast_sub(&greatest)?;
    let (local, is_here) = local_ids(targets, &own)?;
    let of_target = match words {
        0 => z.sum(D::Minus1)?,
        _ => (z.gather(&local.unsqueeze(1)?, 1)?.squeeze(1)? * is_here.to_dtype(z.dtype())?)?,
    };
    let sums = Tensor::stack(&[z.exp()?.sum(D::Minus1)?, of_target, z.sum(D::Minus1)?], 0)?;
    let sums = ranks.reduce_from(&sums)?;
    let target = (sums.get(1)? * (1.0 - smoothing))?;
    let all = (sums.get(2)? * (smoothing / vocabulary as f64))?;
    let losses = ((sums.get(0)?.log()? - target)? - all)?;
    let counts = Tensor::new(counts, z.device())?.to_dtype(z.dtype())?;
    (losses * counts)?.sum_all()? / f64::from(counted.max(1.0))
}
