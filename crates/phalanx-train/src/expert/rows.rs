//! Arithmetic on rows of a matrix, of which the routing says which.

use crate::Result;
use crate::device::{Device, Host, Number, in_double};

/// What moving and combining tokens takes, on a device. Matrices are flat, a row after the other; `width` is a row's length.
pub trait Rows: Device {
    /// `to[i] = factors[i] * from[rows[i]]`, for every row `i` of `to`. Without factors, a copy.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn gather_rows<T: Number>(
        &self,
        width: usize,
        rows: &[u32],
        factors: Option<&[f64]>,
        from: &Self::View<'_, T>,
        to: &mut Self::ViewMut<'_, T>,
    ) -> Result<()>;

    /// `to[i] = Σ_j factors[i, j] * from[rows[i, j]]` over the `of_each` rows of each `i`, in the order of `j`; without
    /// factors, they are 1. [`NO_ROW`] adds nothing. The sum is in f64 for f64, else in f32, and rounded once.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn sum_rows<T: Number>(
        &self,
        width: usize,
        of_each: usize,
        rows: &[u32],
        factors: Option<&[f64]>,
        from: &Self::View<'_, T>,
        to: &mut Self::ViewMut<'_, T>,
    ) -> Result<()>;

    /// `Σ_c a[a_rows[i], c] * b[b_rows[i], c]` for each `i`, 0 where a row is [`NO_ROW`]. It waits for the result.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn dot_rows<T: Number>(
        &self,
        width: usize,
        a_rows: &[u32],
        a: &Self::View<'_, T>,
        b_rows: &[u32],
        b: &Self::View<'_, T>,
    ) -> Result<Vec<f64>>;
}

/// No row at all.
pub const NO_ROW: u32 = u32::MAX;

fn row<T>(matrix: &[T], width: usize, row: u32) -> &[T] {
    &matrix[row as usize * width..][..width]
}

impl Rows for Host {
    fn gather_rows<T: Number>(
        &self,
        width: usize,
        rows: &[u32],
        factors: Option<&[f64]>,
        from: &&[T],
        to: &mut &mut [T],
    ) -> Result<()> {
        assert_eq!(to.len(), rows.len() * width, "rows of the target");
        for (i, to) in to.chunks_exact_mut(width.max(1)).enumerate() {
            let from = row(from, width, rows[i]);
            match factors {
                None => to.copy_from_slice(from),
                Some(factors) => {
                    for (to, from) in to.iter_mut().zip(from) {
                        *to = T::from_f64(factors[i] * from.to_f64());
                    }
                }
            }
        }
        Ok(())
    }

    fn sum_rows<T: Number>(
        &self,
        width: usize,
        of_each: usize,
        rows: &[u32],
        factors: Option<&[f64]>,
        from: &&[T],
        to: &mut &mut [T],
    ) -> Result<()> {
        assert_eq!(to.len() * of_each, rows.len() * width, "rows of the target");
        for (i, to) in to.chunks_exact_mut(width.max(1)).enumerate() {
            let parts = (i * of_each..(i + 1) * of_each).filter(|part| rows[*part] != NO_ROW);
            let parts = parts.map(|part| (factors.map_or(1.0, |f| f[part]), row(from, width, rows[part])));
            for (column, to) in to.iter_mut().enumerate() {
                *to = if in_double::<T>() {
                    T::from_f64(
                        parts.clone().fold(0.0, |sum, (factor, row)| sum + factor * row[column].to_f64()),
                    )
                } else {
                    T::from_f32(
                        parts
                            .clone()
                            .fold(0.0, |sum, (factor, row)| sum + factor as f32 * row[column].to_f32()),
                    )
                };
            }
        }
        Ok(())
    }

    fn dot_rows<T: Number>(
        &self,
        width: usize,
        a_rows: &[u32],
        a: &&[T],
        b_rows: &[u32],
        b: &&[T],
    ) -> Result<Vec<f64>> {
        let dot = |(a_row, b_row): (&u32, &u32)| match (*a_row, *b_row) {
            (NO_ROW, _) | (_, NO_ROW) => 0.0,
            (a_row, b_row) => {
                let columns = row(a, width, a_row).iter().zip(row(b, width, b_row));
                columns.map(|(a, b)| a.to_f64() * b.to_f64()).sum()
            }
        };
        Ok(a_rows.iter().zip(b_rows).map(dot).collect())
    }
}
