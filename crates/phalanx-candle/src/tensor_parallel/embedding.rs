//! Embeddings that are split along the vocabulary.

use crate::ranks::Ranks;
use crate::weights::{Init, Weights};
use candle_core::{Result, Tensor};
use candle_nn::Module;
use phalanx_train::mesh::part;
use std::ops::Range;

/// An embedding of which each rank has some words. Ids are the same on all ranks, and so is the result.
#[derive(Clone, Debug)]
pub struct VocabParallelEmbedding {
    embeddings: Tensor,
    words: Range<usize>,
    ranks: Ranks,
}

impl VocabParallelEmbedding {
    /// The layer with the parameter `weight`, `[vocabulary, hidden]`. The first ranks have one word more where the ranks do not divide them.
    pub fn new(vocabulary: usize, hidden: usize, weights: &Weights) -> Result<VocabParallelEmbedding> {
        let ranks = weights.ranks().clone();
        let init = Init::Normal { mean: 0.0, deviation: 1.0 };
        let embeddings = weights.split((vocabulary, hidden), "weight", 0, &init)?;
        let words = part(&(0..vocabulary), ranks.world_size(), ranks.rank());
        Ok(VocabParallelEmbedding { embeddings, words, ranks })
    }

    /// This rank's words: `[words, hidden]`. A language model may use them for its outputs, too.
    pub fn embeddings(&self) -> &Tensor {
        &self.embeddings
    }
}

impl Module for VocabParallelEmbedding {
    /// `ids` is of `u32`, of any shape; the result has the hidden dimension behind it.
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let (words, hidden) = self.embeddings.dims2()?;
        let flat = ids.flatten_all()?;
        let mut shape = ids.dims().to_vec();
        shape.push(hidden);
        let found = if words == 0 {
            Tensor::zeros((flat.elem_count(), hidden), self.embeddings.dtype(), self.embeddings.device())?
        } else {
            let (local, is_here) = local_ids(&flat, &self.words)?;
            let found = self.embeddings.index_select(&local, 0)?;
            found.broadcast_mul(&is_here.to_dtype(found.dtype())?.unsqueeze(1)?)?
        };
        self.ranks.reduce_from(&found)?.reshape(shape)
    }
}

/// Ids counted from the first of these words, and whether they are among them (1 or 0). Others are 0.
pub(super) fn local_ids(ids: &Tensor, words: &Range<usize>) -> Result<(Tensor, Tensor)> {
    let (start, end) = (words.start as u32, words.end as u32);
    let is_here = (ids.ge(start)? * ids.lt(end)?)?;
    let first = Tensor::full(start, ids.shape(), ids.device())?;
    let local = (is_here.where_cond(ids, &first)? - &first)?;
    Ok((local, is_here))
}
