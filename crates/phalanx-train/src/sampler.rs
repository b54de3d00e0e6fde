//! Which sample each rank takes in each step: shuffled, resumable, and the same in every layout.
//!
//! ```
//! use phalanx_train::sampler::Sampler;
//!
//! // Ten samples. Two ranks make three steps, then there are three ranks.
//! let mut sampler = Sampler::in_order(10);
//! for _ in 0..3 {
//!     sampler.next_batch(0, 2, 1);
//! }
//! let state = sampler.state(); // into a checkpoint
//!
//! let mut taken = Vec::new();
//! for rank in 0..3 {
//!     let mut sampler = Sampler::in_order(10);
//!     sampler.restore(&state)?;
//!     while let Some(batch) = sampler.next_batch(rank, 3, 1) {
//!         taken.extend_from_slice(batch.samples());
//!     }
//! }
//! taken.sort();
//! assert_eq!(taken, [6, 7, 8, 9]); // each once
//! # Ok::<(), phalanx_train::Error>(())
//! ```
//!
//! The order of an epoch follows from the seed and the epoch alone. A step takes the next samples of that order, as many as all ranks
//! take together, and rank r the r-th part of them. All ranks' samplers are therefore in the same state, and go on with any number of
//! ranks.
//!
//! At the end of an epoch the samples may not suffice for all ranks. What is left is divided evenly, the first ranks taking one more. A rank
//! takes part in the step also if nothing is left for it: [`Batch::padded`] has samples that are there once more and weigh 0.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The samples of one step on one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    padded: Vec<usize>,
    real: usize,
    of_all: usize,
}

impl Batch {
    /// The samples. Fewer than asked for, perhaps none, at the end of an epoch.
    pub fn samples(&self) -> &[usize] {
        &self.padded[..self.real]
    }

    /// As many samples as were asked for. Those after [`samples`](Batch::samples) are padding.
    pub fn padded(&self) -> &[usize] {
        &self.padded
    }

    /// Weights of the padded samples: 1, and 0 for padding.
    pub fn weights(&self) -> impl Iterator<Item = f64> {
        (0..self.padded.len()).map(|at| if at < self.real { 1.0 } else { 0.0 })
    }

    /// Samples of all ranks in this step, without padding. The mean of a step divides by it.
    pub fn of_all_ranks(&self) -> usize {
        self.of_all
    }
}

/// Where a sampler is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Position {
    samples: usize,
    seed: Option<u64>,
    window: usize,
    epoch: u64,
    taken: usize,
}

/// Deals out the samples 0, 1, 2, … of a data set. The same on every rank.
#[derive(Debug, Clone)]
pub struct Sampler {
    position: Position,
    lengths: Vec<u32>,
    /// The window that was sorted last.
    sorted: Option<(u64, usize, Vec<usize>)>,
}

impl Sampler {
    /// In another order in each epoch.
    pub fn shuffled(samples: usize, seed: u64) -> Sampler {
        Sampler::at(Position { samples, seed: Some(seed), window: 1, epoch: 0, taken: 0 })
    }

    /// In the order of their numbers, in each epoch.
    pub fn in_order(samples: usize) -> Sampler {
        Sampler::at(Position { samples, seed: None, window: 1, epoch: 0, taken: 0 })
    }

    /// Shuffled, and then sorted by length within each `window` samples: a step's samples have similar lengths and need little padding, if the
    /// window is several times the samples of a step. `lengths` has one for each sample.
    ///
    /// # Errors
    /// [`Error::Usage`] for a window of 0.
    pub fn by_length(lengths: Vec<u32>, window: usize, seed: u64) -> Result<Sampler> {
        if window == 0 {
            return Err(Error::usage("a window of 0 samples: give several times the samples of a step"));
        }
        let position = Position { samples: lengths.len(), seed: Some(seed), window, epoch: 0, taken: 0 };
        Ok(Sampler { lengths, ..Sampler::at(position) })
    }

    fn at(position: Position) -> Sampler {
        Sampler { position, lengths: Vec::new(), sorted: None }
    }

    /// The epoch that is under way, from 0.
    pub fn epoch(&self) -> u64 {
        self.position.epoch
    }

    /// Samples of this epoch that no rank has taken yet.
    pub fn left(&self) -> usize {
        self.position.samples - self.position.taken
    }

    /// The samples of the next step for this rank, `batch` on each of `ranks`. `None` ends the epoch, on all ranks in the same call; the next
    /// call begins the next one. Every rank calls it with the same `ranks` and `batch`.
    ///
    /// # Panics
    /// If `rank` is not less than `ranks`, or `batch` is 0.
    pub fn next_batch(&mut self, rank: usize, ranks: usize, batch: usize) -> Option<Batch> {
        assert!(rank < ranks && batch > 0, "rank {rank} of {ranks} takes {batch} samples");
        if self.left() == 0 {
            (self.position.epoch, self.position.taken) = (self.position.epoch + 1, 0);
            return None;
        }
        let first = self.position.taken;
        let of_all = self.left().min(ranks.saturating_mul(batch));
        let (each, more) = (of_all / ranks, of_all % ranks);
        let begin = first + rank * each + rank.min(more);
        let real = each + usize::from(rank < more);
        let mut padded: Vec<usize> = (begin..begin + real).map(|at| self.sample(at)).collect();
        if real < batch {
            let padding = self.sample(first);
            padded.resize(batch, padding);
        }
        self.position.taken += of_all;
        Some(Batch { padded, real, of_all })
    }

    /// The sample at a place of this epoch's order.
    fn sample(&mut self, at: usize) -> usize {
        let Position { samples, window, epoch, .. } = self.position;
        if window <= 1 {
            return self.shuffle(at);
        }
        let begin = at / window * window;
        if self.sorted.as_ref().is_none_or(|(of, from, _)| (*of, *from) != (epoch, begin)) {
            let mut all: Vec<usize> =
                (begin..samples.min(begin + window)).map(|at| self.shuffle(at)).collect();
            all.sort_by_key(|sample| self.lengths[*sample]);
            self.sorted = Some((epoch, begin, all));
        }
        self.sorted.as_ref().map_or(at, |(_, _, all)| all[at - begin])
    }

    /// A permutation that needs no memory: a Feistel network on numbers of an even number of bits, walked until the result is a sample.
    fn shuffle(&self, at: usize) -> usize {
        let Position { samples, epoch, .. } = self.position;
        let Some(seed) = self.position.seed else { return at };
        let half = (usize::BITS - samples.saturating_sub(1).leading_zeros()).div_ceil(2).max(1);
        let mask = (1u64 << half) - 1;
        let key = mix(seed ^ mix(epoch));
        let mut number = at as u64;
        loop {
            for round in 0..ROUNDS {
                let (left, right) = (number >> half, number & mask);
                number = right << half | (left ^ mix(key ^ mix(right << 8 | round))) & mask;
            }
            if number < samples as u64 {
                return number as usize;
            }
        }
    }

    /// For a checkpoint; the same on every rank.
    pub fn state(&self) -> Value {
        serde_json::json!(self.position)
    }

    /// Goes on where another sampler was, of the same samples and seed.
    ///
    /// # Errors
    /// [`Error::Usage`] if it is the state of another data set or seed.
    pub fn restore(&mut self, state: &Value) -> Result<()> {
        let unread = |error| {
            Error::usage(format!("{state} is not a sampler's state ({error}): give what state() gave"))
        };
        let position = Position::deserialize(state).map_err(unread)?;
        let begun = |position: &Position| Position { epoch: 0, taken: 0, ..position.clone() };
        if begun(&position) != begun(&self.position) || position.taken > position.samples {
            return Err(Error::usage(format!(
                "the state is of {} samples with seed {:?} and a window of {}, and this sampler has {}, {:?} and {}: make it as \
                 it was made then",
                position.samples,
                position.seed,
                position.window,
                self.position.samples,
                self.position.seed,
                self.position.window
            )));
        }
        self.position = position;
        Ok(())
    }
}

/// Enough that neighbours are unrelated.
const ROUNDS: u64 = 6;

/// SplitMix64's.
fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
