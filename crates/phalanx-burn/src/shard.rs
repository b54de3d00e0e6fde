//! [`Shard`]: a rank's part of a data set.

use crate::Ranks;
use burn::data::dataset::Dataset;
use std::error::Error;

/// What happens to samples at the end that do not suffice for all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Uneven {
    /// They are left out.
    Drop,
    /// The first samples are there once more, on the ranks that would have one sample less.
    Pad,
}

/// Every n-th sample of a data set of n ranks, as many on each rank: all ranks then have equally many batches, as burn's `Learner` needs it.
///
/// A `DataLoader` that shuffles it shuffles the rank's part. A `ShuffledDataset` inside it, with the same seed on all ranks, shuffles the whole.
///
/// ```
/// use burn::data::dataset::{Dataset, InMemDataset};
/// use phalanx_burn::{Ranks, Shard, Uneven};
///
/// let parts = Ranks::try_run(2, |ranks| {
///     let all = InMemDataset::new(vec![10, 11, 12, 13, 14]);
///     Ok(Shard::new(all, &ranks, Uneven::Pad).iter().map(|sample| sample.expect("in memory")).collect::<Vec<i32>>())
/// })?;
/// assert_eq!(parts, [[10, 12, 14], [11, 13, 10]]);
/// # Ok::<(), phalanx_burn::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Shard<D> {
    dataset: D,
    rank: usize,
    ranks: usize,
    uneven: Uneven,
}

impl<D> Shard<D> {
    /// This rank's part.
    pub fn new(dataset: D, ranks: &Ranks, uneven: Uneven) -> Shard<D> {
        Shard { dataset, rank: ranks.rank(), ranks: ranks.world_size(), uneven }
    }
}

impl<D, I, E> Dataset<I, E> for Shard<D>
where
    D: Dataset<I, E>,
    E: Error + Send + Sync + 'static,
{
    fn get(&self, index: usize) -> Result<I, E> {
        assert!(index < self.len(), "sample {index} of {}", self.len());
        self.dataset.get((index * self.ranks + self.rank) % self.dataset.len())
    }

    fn len(&self) -> usize {
        match self.uneven {
            Uneven::Drop => self.dataset.len() / self.ranks,
            Uneven::Pad => self.dataset.len().div_ceil(self.ranks),
        }
    }
}
