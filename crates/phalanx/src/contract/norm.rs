//! What an `all_reduce_rms_norm` does with the sum.

use crate::types::dtype::DType;
use std::hash::Hash;

/// What follows the sum of an `all_reduce_rms_norm`: beside `send` and `recv`, the call has these buffers. Addresses are in GPU memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct RmsNorm {
    /// Elements of a row.
    pub hidden: usize,
    pub epsilon: f32,
    /// Rows to which the sum is added.
    pub residual: u64,
    /// One row.
    pub weight: u64,
    pub format: RowFormat,
    /// One f32 for each quantised row.
    pub scales: u64,
}

/// How the normalised rows are written. The numbers are those of `Format` in gpu/kernels/norm.cu.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum RowFormat {
    AsInput = 0,
    F8E4M3 = 1,
    I8 = 2,
}

impl RmsNorm {
    /// A fingerprint of what all ranks give alike; never 0.
    pub fn tag(&self) -> u8 {
        let words = [self.hidden as u64, u64::from(self.epsilon.to_bits()), self.format as u64];
        let mixed = words.iter().fold(0u64, |sum, word| (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        (mixed >> 56) as u8 | 1
    }

    /// All of it, for a comparison of calls.
    pub fn hash_into(&self, hasher: &mut impl std::hash::Hasher) {
        let RmsNorm { hidden, epsilon, residual, weight, format, scales } = *self;
        (hidden, epsilon.to_bits(), residual, weight, format as u32, scales).hash(hasher);
    }

    /// Bytes of the residual, and of the scales, of so many elements.
    pub fn lens(&self, dtype: DType, elements: usize) -> [usize; 2] {
        let scales =
            if self.format == RowFormat::AsInput { 0 } else { elements / self.hidden * size_of::<f32>() };
        [elements * dtype.size(), scales]
    }
}
