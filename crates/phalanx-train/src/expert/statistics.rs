//! How evenly tokens are spread over experts.

use crate::Result;
use phalanx::{Comm, ReduceOp};

/// Tokens of all ranks at each expert, in one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Statistics {
    /// Tokens that each expert got.
    pub tokens: Vec<u64>,
    /// Choices that were beyond the capacity.
    pub dropped: u64,
}

impl Statistics {
    pub(super) fn collect(comm: &Comm, counts: &[u64], dropped: u64) -> Result<Statistics> {
        let mut tokens = counts.to_vec();
        tokens.push(dropped);
        comm.all_reduce_in_place(&mut tokens, ReduceOp::Sum)?;
        let dropped = tokens.pop().unwrap_or(0);
        Ok(Statistics { tokens, dropped })
    }

    /// Tokens of the busiest expert over those of the average one: 1 is even. 1 if there are no tokens.
    pub fn imbalance(&self) -> f64 {
        let total: u64 = self.tokens.iter().sum();
        let most = self.tokens.iter().copied().max().unwrap_or(0);
        if total == 0 { 1.0 } else { most as f64 * self.tokens.len() as f64 / total as f64 }
    }

    /// Experts that got no token.
    pub fn idle(&self) -> impl Iterator<Item = usize> {
        self.tokens.iter().enumerate().filter(|(_, tokens)| **tokens == 0).map(|(expert, _)| expert)
    }

    /// The load-balancing loss of Switch Transformers (Fedus et al. 2021), n · Σ fᵢ·pᵢ: 1 where both are even. fᵢ is the part of the tokens at
    /// expert i, and pᵢ, given by the caller, the mean of the router's probability for it over the tokens of all ranks.
    ///
    /// # Panics
    /// If there are not as many probabilities as experts.
    pub fn balance_loss(&self, probabilities: &[f64]) -> f64 {
        assert_eq!(probabilities.len(), self.tokens.len(), "a probability for each expert");
        let total = self.tokens.iter().sum::<u64>().max(1) as f64;
        let sum: f64 =
            self.tokens.iter().zip(probabilities).map(|(tokens, p)| *tokens as f64 / total * p).sum();
        sum * self.tokens.len() as f64
    }
}
