//! Long pseudo-random sequences in which every input and every expected output is a window.
//!
//! Rank r's input starts [`STRIDE`] × r further on than rank 0's. The combination of all ranks' inputs is
//! then a window of one combined ring, wherever rank 0 starts and however long the input is: one pass of the
//! (slow) reference serves every cell of the test matrix, and checking a cell is comparing memory.

use crate::number::Number;
use crate::random;
use crate::reference::{self, Combine};
use std::fmt;

/// Elements before the sequence repeats: a prime, so that no block or chunk size divides it.
pub const PERIOD: usize = 99_991;

/// How much further on each next rank's input starts.
pub const STRIDE: usize = 12_347;

/// An endless periodic sequence of elements.
#[derive(Debug, Clone)]
pub struct Ring<T>(Vec<T>);

impl<T: Number> Ring<T> {
    /// The sequence of a seed.
    pub fn new(seed: u64) -> Ring<T> {
        Ring(random::values(seed, PERIOD))
    }

    /// What `ranks` ranks' windows of this ring combine to, as a ring.
    pub fn combined(&self, ranks: usize, combine: &Combine<T>) -> Ring<T> {
        let inputs: Vec<Vec<T>> = (0..ranks).map(|rank| self.window(rank * STRIDE, PERIOD)).collect();
        Ring(reference::combined(&inputs, combine))
    }

    /// The `len` elements from `start` on.
    pub fn window(&self, start: usize, len: usize) -> Vec<T> {
        let mut window = Vec::with_capacity(len);
        self.pieces(start, len, |piece| {
            window.extend_from_slice(piece);
            true
        });
        window
    }

    /// Writes the elements from `start` on.
    pub fn fill(&self, buffer: &mut [T], start: usize) {
        let mut done = 0;
        self.pieces(start, buffer.len(), |piece| {
            buffer[done..done + piece.len()].copy_from_slice(piece);
            done += piece.len();
            true
        });
    }

    /// Compares with the elements from `start` on, bit for bit.
    pub fn expect_bits(&self, actual: &[T], start: usize) -> Result<(), Difference> {
        self.expect(actual, start, |a, b| a.bits() == b.bits())
    }

    /// Compares with the elements from `start` on, as results of a reduction: any NaN equals any other.
    pub fn expect_values(&self, actual: &[T], start: usize) -> Result<(), Difference> {
        self.expect(actual, start, |a, b| a.same(b))
    }

    fn expect(&self, actual: &[T], start: usize, same: fn(T, T) -> bool) -> Result<(), Difference> {
        let mut done = 0;
        let mut difference = None;
        self.pieces(start, actual.len(), |expected| {
            let piece = &actual[done..done + expected.len()];
            if bytes(piece) != bytes(expected) {
                difference = first_difference(piece, expected, same).map(|mut difference| {
                    difference.index += done;
                    difference.of = actual.len();
                    difference
                });
            }
            done += expected.len();
            difference.is_none()
        });
        difference.map_or(Ok(()), Err)
    }

    /// Calls `f` with consecutive slices that make up the window, until it answers false.
    fn pieces(&self, start: usize, mut len: usize, mut f: impl FnMut(&[T]) -> bool) {
        let mut start = start % PERIOD;
        while len > 0 {
            let piece = len.min(PERIOD - start);
            if !f(&self.0[start..start + piece]) {
                return;
            }
            len -= piece;
            start = 0;
        }
    }
}

/// Compares whole buffers, as results of a reduction.
pub fn same_values<T: Number>(actual: &[T], expected: &[T]) -> Result<(), String> {
    if actual.len() != expected.len() {
        return Err(format!("{} elements where {} are right", actual.len(), expected.len()));
    }
    first_difference(actual, expected, |a, b| a.same(b)).map_or(Ok(()), |d| Err(d.to_string()))
}

/// The bytes of a buffer: what "bit-identical" compares.
pub fn bytes<T: Number>(buffer: &[T]) -> &[u8] {
    // SAFETY: elements are initialised and have no padding; a byte has no alignment.
    unsafe { std::slice::from_raw_parts(buffer.as_ptr().cast(), size_of_val(buffer)) }
}

fn first_difference<T: Number>(actual: &[T], expected: &[T], same: fn(T, T) -> bool) -> Option<Difference> {
    let differs = |i: &usize| !same(actual[*i], expected[*i]);
    let index = (0..actual.len()).find(differs)?;
    Some(Difference {
        index,
        of: actual.len(),
        count: (index..actual.len()).filter(differs).count(),
        actual: format!("{:?} ({:#x})", actual[index], actual[index].bits()),
        expected: format!("{:?} ({:#x})", expected[index], expected[index].bits()),
    })
}

/// Where a result goes wrong.
#[derive(Debug, Clone)]
pub struct Difference {
    index: usize,
    of: usize,
    count: usize,
    actual: String,
    expected: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Difference { index, of, count, actual, expected } = self;
        write!(f, "element {index} of {of} is {actual}, expected {expected}; {count} differ nearby")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx::ReduceOp;

    #[test]
    fn a_combined_window_is_the_combination_of_the_windows() {
        let ring = Ring::<f32>::new(3);
        let sum = Combine::Op(ReduceOp::Sum);
        let start = PERIOD - 10;
        let inputs: Vec<Vec<f32>> = (0..3).map(|rank| ring.window(start + rank * STRIDE, 50)).collect();
        let expected = reference::combined(&inputs, &sum);
        ring.combined(3, &sum).expect_values(&expected, start).unwrap();
    }

    #[test]
    fn differences_are_found_across_the_seam() {
        let ring = Ring::<u16>::new(3);
        let mut window = ring.window(PERIOD - 5, 20);
        ring.expect_bits(&window, PERIOD - 5).unwrap();
        window[12] ^= 1;
        let difference = ring.expect_bits(&window, PERIOD - 5).unwrap_err();
        assert_eq!((difference.index, difference.of), (12, 20));
    }
}
