//! Cross-entropy of logits that are split along the vocabulary.

use crate::device::{Device, Number};
use crate::mesh::layout::part;
use crate::{Error, Result};
use phalanx::{Comm, ReduceOp, Source};

/// The pieces of a cross-entropy that a device computes. Logits are `[rows, columns]`, this rank's part of the vocabulary; `targets` has for each row
/// the column of its target, `None` if another rank has it.
pub trait CrossEntropy: Device {
    /// The greatest logit of each row; -∞ without columns.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn greatest<T: Number>(
        &self,
        columns: usize,
        logits: &Self::View<'_, T>,
        greatest: &mut Self::ViewMut<'_, f64>,
    ) -> Result<()>;

    /// For each row `Σ exp(z - greatest)`, `z - greatest` of the target (0 if it is not here), and `Σ (z - greatest)`: three numbers a row.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn sums<T: Number>(
        &self,
        columns: usize,
        logits: &Self::View<'_, T>,
        greatest: &Self::View<'_, f64>,
        targets: &[Option<u32>],
        sums: &mut Self::ViewMut<'_, f64>,
    ) -> Result<()>;

    /// `z ← factors[row] * (exp(z - greatest) / Σ - parts[0] - parts[1] if it is the target)`.
    ///
    /// # Errors
    /// If the device refuses the work.
    #[allow(clippy::too_many_arguments)]
    fn gradient<T: Number>(
        &self,
        columns: usize,
        logits: &mut Self::ViewMut<'_, T>,
        greatest: &Self::View<'_, f64>,
        sums: &Self::View<'_, f64>,
        targets: &[Option<u32>],
        parts: [f64; 2],
        factors: &[f64],
    ) -> Result<()>;
}

/// Cross-entropy with label smoothing, of logits of which each rank has some columns. Forward keeps two numbers a row; the whole row is
/// nowhere.
#[derive(Debug)]
pub struct VocabularyParallel<D: Device> {
    device: D,
    columns: usize,
    vocabulary: usize,
    smoothing: f64,
    greatest: D::Buffer<f64>,
    sums: D::Buffer<f64>,
    targets: Vec<Option<u32>>,
    /// Rows that count.
    counted: Vec<bool>,
    /// Loss of each row; 0 where it does not count.
    losses: Vec<f64>,
}

impl<D: CrossEntropy> VocabularyParallel<D> {
    /// Losses of the rows. `logits` is this rank's `[rows, columns]`, its part of a vocabulary of `vocabulary`; `targets`, the same on every rank, has
    /// the target of each row, or `None` for a row that does not count. With a smoothing of α, the target has 1 - α of the weight, and all
    /// words share α evenly. Collective.
    ///
    /// # Errors
    /// [`Error::Usage`] if lengths do not fit, a target is not in the vocabulary, or the smoothing is not between 0 and 1. Errors of `comm` and
    /// of the device.
    pub fn forward<T: Number>(
        comm: &Comm,
        device: &D,
        vocabulary: usize,
        logits: &D::View<'_, T>,
        targets: &[Option<u32>],
        smoothing: f64,
    ) -> Result<VocabularyParallel<D>> {
        let (rows, own) = (targets.len(), part(&(0..vocabulary), comm.world_size(), comm.rank()));
        if logits.len() != rows * own.len() {
            return Err(Error::usage(format!(
                "{} logits for {rows} rows and words {own:?} of {vocabulary}: {} are needed",
                logits.len(),
                rows * own.len()
            )));
        }
        if !(0.0..=1.0).contains(&smoothing) {
            return Err(Error::usage(format!("a label smoothing of {smoothing}: 0 to 1 are possible")));
        }
        let wrong = |target: &&u32| **target as usize >= vocabulary;
        if let Some(target) = targets.iter().flatten().find(wrong) {
            return Err(Error::usage(format!(
                "target {target} of a vocabulary of {vocabulary}: None for rows that do not count"
            )));
        }
        let here = |target: &Option<u32>| {
            target.filter(|word| own.contains(&(*word as usize))).map(|word| word - own.start as u32)
        };
        let local: Vec<Option<u32>> = targets.iter().map(here).collect();

        let columns = own.len();
        let (mut greatest, mut sums) = (device.alloc::<f64>(rows)?, device.alloc::<f64>(3 * rows)?);
        device.greatest(columns, logits, &mut device.view_mut(&mut greatest, 0..rows))?;
        comm.all_reduce_in_place(&mut greatest, ReduceOp::Max)?;
        let view = device.view(&greatest, 0..rows);
        device.sums(columns, logits, &view, &local, &mut device.view_mut(&mut sums, 0..3 * rows))?;
        drop(view);
        comm.all_reduce_in_place(&mut sums, ReduceOp::Sum)?;

        let numbers = device.download(&device.view(&sums, 0..3 * rows))?;
        let loss = |(sums, target): (&[f64], &Option<u32>)| match target {
            None => 0.0,
            Some(_) => sums[0].ln() - (1.0 - smoothing) * sums[1] - smoothing / vocabulary as f64 * sums[2],
        };
        Ok(VocabularyParallel {
            losses: numbers.chunks_exact(3).zip(targets).map(loss).collect(),
            counted: targets.iter().map(Option::is_some).collect(),
            device: device.clone(),
            columns,
            vocabulary,
            smoothing,
            greatest,
            sums,
            targets: local,
        })
    }

    /// The loss of each row, the same on every rank; 0 where it does not count.
    pub fn losses(&self) -> &[f64] {
        &self.losses
    }

    /// The mean over the rows that count; 0 if none does.
    pub fn mean(&self) -> f64 {
        let counted = self.counted.iter().filter(|counts| **counts).count();
        self.losses.iter().sum::<f64>() / counted.max(1) as f64
    }

    /// Replaces the logits by their gradient, where `factors` is that of each row's loss: 1 / rows that count, for a mean. No rank is asked.
    ///
    /// # Errors
    /// [`Error::Usage`] if lengths do not fit. Errors of the device.
    pub fn backward<T: Number>(&self, logits: &mut D::ViewMut<'_, T>, factors: &[f64]) -> Result<()> {
        let rows = self.targets.len();
        if logits.len() != rows * self.columns || factors.len() != rows {
            return Err(Error::usage(format!(
                "{} logits and {} factors for {rows} rows of {}: those of the forward",
                logits.len(),
                factors.len(),
                self.columns
            )));
        }
        let factors =
            self.counted.iter().zip(factors).map(|(counts, factor)| if *counts { *factor } else { 0.0 });
        let factors: Vec<f64> = factors.collect();
        let parts = [self.smoothing / self.vocabulary as f64, 1.0 - self.smoothing];
        let (greatest, sums) =
            (self.device.view(&self.greatest, 0..rows), self.device.view(&self.sums, 0..3 * rows));
        self.device.gradient(self.columns, logits, &greatest, &sums, &self.targets, parts, &factors)
    }
}
