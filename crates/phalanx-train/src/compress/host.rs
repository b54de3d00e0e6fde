//! The arithmetic of compression on the host.

use super::{Format, LowRank, Quantize};
use crate::Result;
use crate::device::{Host, Number};
use phalanx::F8E4M3;

impl LowRank for Host {
    fn times_thin<M: Number>(
        &self,
        [rows, columns, rank]: [usize; 3],
        transposed: bool,
        matrix: &&[M],
        thin: &&[M],
        product: &mut &mut [M],
    ) -> Result<()> {
        assert_eq!(matrix.len(), rows * columns, "numbers of the matrix");
        let mut sums = vec![0.0; product.len()];
        for row in 0..rows {
            for column in 0..columns {
                let number = matrix[row * columns + column].to_f64();
                let (from, to) = if transposed { (row, column) } else { (column, row) };
                for k in 0..rank {
                    sums[to * rank + k] += number * thin[from * rank + k].to_f64();
                }
            }
        }
        product.iter_mut().zip(sums).for_each(|(number, sum)| *number = M::from_f64(sum));
        Ok(())
    }

    fn outer_product<M: Number>(
        &self,
        [rows, columns, rank]: [usize; 3],
        left: &&[M],
        right: &&[M],
        matrix: &mut &mut [M],
    ) -> Result<()> {
        assert_eq!(matrix.len(), rows * columns, "numbers of the matrix");
        for row in 0..rows {
            for column in 0..columns {
                let terms =
                    (0..rank).map(|k| left[row * rank + k].to_f64() * right[column * rank + k].to_f64());
                matrix[row * columns + column] = M::from_f64(terms.sum());
            }
        }
        Ok(())
    }

    fn orthonormalize<M: Number>(&self, rows: usize, rank: usize, thin: &mut &mut [M]) -> Result<()> {
        let mut columns: Vec<Vec<f64>> =
            (0..rank).map(|k| (0..rows).map(|row| thin[row * rank + k].to_f64()).collect()).collect();
        let dot = |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
        for k in 0..rank {
            let (done, rest) = columns.split_at_mut(k);
            let column = &mut rest[0];
            let before = dot(column, column).sqrt();
            for other in done {
                let part = dot(other, column);
                column.iter_mut().zip(other).for_each(|(number, other)| *number -= part * *other);
            }
            let norm = dot(column, column).sqrt();
            // What is left of a column that the others span is rounding.
            let factor = if norm > before * 1e-6 { 1.0 / norm } else { 0.0 };
            column.iter_mut().for_each(|number| *number *= factor);
        }
        for (k, column) in columns.iter().enumerate() {
            column.iter().enumerate().for_each(|(row, number)| thin[row * rank + k] = M::from_f64(*number));
        }
        Ok(())
    }
}

fn code(format: Format, number: f32) -> u8 {
    match format {
        Format::Int8 => (number.round_ties_even().clamp(-127.0, 127.0) as i8).cast_unsigned(),
        Format::Fp8 => F8E4M3::from_f32(number.clamp(-448.0, 448.0)).to_bits(),
    }
}

fn number(format: Format, code: u8) -> f32 {
    match format {
        Format::Int8 => f32::from(code.cast_signed()),
        Format::Fp8 => F8E4M3::from_bits(code).to_f32(),
    }
}

impl Quantize for Host {
    type Bytes = Vec<u8>;

    fn zero_bytes(&self, len: usize) -> Result<Vec<u8>> {
        Ok(vec![0; len])
    }

    fn quantize<T: Number>(
        &self,
        format: Format,
        block: usize,
        from: &&[T],
        bytes: &mut Vec<u8>,
        scales: &mut &mut [f32],
    ) -> Result<()> {
        assert_eq!((from.len(), from.len()), (bytes.len(), scales.len() * block), "bytes and scales");
        let blocks = from.chunks_exact(block).zip(bytes.chunks_exact_mut(block));
        for ((from, bytes), scale) in blocks.zip(scales.iter_mut()) {
            let most = from.iter().map(|number| number.to_f32().abs()).fold(0.0f32, |most, number| {
                if most.is_nan() || !number.is_finite() { f32::NAN } else { number.max(most) }
            });
            *scale = most / format.greatest();
            // A number so small that its scale is 0 is 0.
            let inverse = if *scale > 0.0 { f64::from(*scale).recip() } else { 0.0 };
            for (byte, number) in bytes.iter_mut().zip(from) {
                *byte = code(format, (number.to_f64() * inverse) as f32);
            }
        }
        Ok(())
    }

    fn sum_quantized<T: Number>(
        &self,
        format: Format,
        block: usize,
        factor: f64,
        bytes: &Vec<u8>,
        scales: &&[f32],
        to: &mut &mut [T],
    ) -> Result<()> {
        assert_eq!(bytes.len(), scales.len() * block, "bytes and scales");
        let len = to.len();
        for (at, to) in to.iter_mut().enumerate() {
            let terms =
                (at..bytes.len()).step_by(len.max(1)).map(|i| scales[i / block] * number(format, bytes[i]));
            *to = T::from_f64(factor * f64::from(terms.sum::<f32>()));
        }
        Ok(())
    }
}
