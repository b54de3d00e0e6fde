//! The arithmetic of tensor parallelism on the host.

use super::{CrossEntropy, Products, Slabs};
use crate::Result;
use crate::device::{Host, Number, in_double};

impl Slabs for Host {
    fn copy_rows<T: Number>(
        &self,
        count: usize,
        len: usize,
        from: &&[T],
        from_row: usize,
        to: &mut &mut [T],
        to_row: usize,
    ) -> Result<()> {
        for row in 0..count {
            to[row * to_row..][..len].copy_from_slice(&from[row * from_row..][..len]);
        }
        Ok(())
    }
}

impl Products for Host {
    fn product<T: Number>(
        &self,
        [m, k, n]: [usize; 3],
        transposed: [bool; 2],
        a: &&[T],
        b: &&[T],
        c: &mut &mut [T],
        adds: bool,
    ) -> Result<()> {
        assert_eq!((a.len(), b.len(), c.len()), (m * k, k * n, m * n), "matrices of {m} × {k} and {k} × {n}");
        let a_at = |i: usize, l: usize| a[if transposed[0] { l * m + i } else { i * k + l }];
        let b_at = |l: usize, j: usize| b[if transposed[1] { j * k + l } else { l * n + j }];
        for i in 0..m {
            for j in 0..n {
                let before = if adds { c[i * n + j] } else { T::default() };
                c[i * n + j] = if in_double::<T>() {
                    let products = (0..k).map(|l| a_at(i, l).to_f64() * b_at(l, j).to_f64());
                    T::from_f64(before.to_f64() + products.sum::<f64>())
                } else {
                    let products = (0..k).map(|l| a_at(i, l).to_f32() * b_at(l, j).to_f32());
                    T::from_f32(before.to_f32() + products.sum::<f32>())
                };
            }
        }
        Ok(())
    }

    fn add_to_rows<T: Number>(&self, bias: &&[T], to: &mut &mut [T]) -> Result<()> {
        for row in to.chunks_exact_mut(bias.len().max(1)) {
            row.iter_mut().zip(*bias).for_each(|(to, bias)| *to = T::from_f64(to.to_f64() + bias.to_f64()));
        }
        Ok(())
    }

    fn sum_of_rows<T: Number>(&self, from: &&[T], to: &mut &mut [T]) -> Result<()> {
        let columns = to.len();
        for (column, to) in to.iter_mut().enumerate() {
            let numbers = from.iter().skip(column).step_by(columns);
            *to = if in_double::<T>() {
                T::from_f64(numbers.fold(to.to_f64(), |sum, x| sum + x.to_f64()))
            } else {
                T::from_f32(numbers.fold(to.to_f32(), |sum, x| sum + x.to_f32()))
            };
        }
        Ok(())
    }
}

/// The rows of logits; empty ones, if this rank has no words.
fn rows<T>(logits: &[T], columns: usize, count: usize) -> impl Iterator<Item = &[T]> {
    (0..count).map(move |row| &logits[row * columns..][..columns])
}

impl CrossEntropy for Host {
    fn greatest<T: Number>(&self, columns: usize, logits: &&[T], greatest: &mut &mut [f64]) -> Result<()> {
        let rows = rows(logits, columns, greatest.len());
        for (greatest, row) in greatest.iter_mut().zip(rows) {
            *greatest = row.iter().map(|z| z.to_f64()).fold(f64::NEG_INFINITY, f64::max);
        }
        Ok(())
    }

    fn sums<T: Number>(
        &self,
        columns: usize,
        logits: &&[T],
        greatest: &&[f64],
        targets: &[Option<u32>],
        sums: &mut &mut [f64],
    ) -> Result<()> {
        let rows = rows(logits, columns, targets.len()).zip(*greatest).zip(targets);
        for (sums, ((row, greatest), target)) in sums.chunks_exact_mut(3).zip(rows) {
            let shifted = || row.iter().map(|z| z.to_f64() - greatest);
            sums[0] = shifted().map(f64::exp).sum();
            sums[1] = target.map_or(0.0, |target| row[target as usize].to_f64() - greatest);
            sums[2] = shifted().sum();
        }
        Ok(())
    }

    fn gradient<T: Number>(
        &self,
        columns: usize,
        logits: &mut &mut [T],
        greatest: &&[f64],
        sums: &&[f64],
        targets: &[Option<u32>],
        [uniform, peak]: [f64; 2],
        factors: &[f64],
    ) -> Result<()> {
        for (row, factor) in factors.iter().enumerate() {
            for (column, z) in logits[row * columns..][..columns].iter_mut().enumerate() {
                let is_target = targets[row] == Some(column as u32);
                let softmax = (z.to_f64() - greatest[row]).exp() / sums[3 * row];
                *z = T::from_f64(factor * (softmax - uniform - if is_target { peak } else { 0.0 }));
            }
        }
        Ok(())
    }
}
