//! Random numbers by the place of an element.

use super::{Block, Layout};
use crate::device::Number;

/// How a parameter begins.
///
/// An element's number follows from the seed, the parameter's name and the element's index in the whole parameter (Philox 4×32-10,
/// Salmon et al. 2011, with the seed as key). So all ranks begin with the same model on every mesh, and two parameters with different
/// numbers. Numbers are computed in f64 and rounded to the parameter's type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// Every element is this.
    Constant(f64),
    /// Between two bounds, equally likely. The upper bound itself is not among the f64 numbers, but may come of rounding.
    Uniform {
        /// The lower bound.
        low: f64,
        /// The upper bound.
        high: f64,
    },
    /// Normally distributed.
    Normal {
        /// The mean.
        mean: f64,
        /// The standard deviation.
        deviation: f64,
    },
}

impl Init {
    /// The elements of a rank's block, in its order.
    ///
    /// ```
    /// use phalanx_train::mesh::{Axis, Init, Layout, MeshShape, Placement};
    ///
    /// let layout = Layout::replicated(&[4, 3]).with(Axis::Tensor, Placement::Split(0));
    /// let normal = Init::Normal { mean: 0.0, deviation: 0.02 };
    /// let of = |ranks: usize, rank: usize| {
    ///     let mesh = MeshShape::new(&[(Axis::Tensor, ranks)])?;
    ///     Ok::<_, phalanx_train::Error>(normal.fill::<f32>(7, "up.weight", &layout, &layout.block(&mesh, rank)?))
    /// };
    /// assert_eq!(of(1, 0)?, [of(2, 0)?, of(2, 1)?].concat());
    /// # Ok::<(), phalanx_train::Error>(())
    /// ```
    pub fn fill<T: Number>(&self, seed: u64, name: &str, layout: &Layout, block: &Block) -> Vec<T> {
        let of_name = hash(name);
        let number = |index| T::from_f64(self.number(seed, of_name, index as u64));
        block.indices(&layout.shape).map(number).collect()
    }

    fn number(&self, seed: u64, name: u64, index: u64) -> f64 {
        let words = || philox([low(index), high(index), low(name), high(name)], [low(seed), high(seed)]);
        match *self {
            Init::Constant(value) => value,
            Init::Uniform { low, high } => low + (high - low) * unit(words()[0], words()[1]),
            Init::Normal { mean, deviation } => {
                let [a, b, c, d] = words();
                // Box and Muller; 1 - u is never 0.
                let radius = (-2.0 * (1.0 - unit(a, b)).ln()).sqrt();
                mean + deviation * radius * (std::f64::consts::TAU * unit(c, d)).cos()
            }
        }
    }
}

fn low(word: u64) -> u32 {
    word as u32
}

fn high(word: u64) -> u32 {
    (word >> 32) as u32
}

/// 53 random bits as a number from 0 up to, but not including, 1.
fn unit(a: u32, b: u32) -> f64 {
    let bits = (u64::from(a) << 32 | u64::from(b)) >> 11;
    bits as f64 / (1u64 << 53) as f64
}

/// FNV-1a.
fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Philox 4×32 with ten rounds.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let products = [0xd251_1f53 * u64::from(counter[0]), 0xcd9e_8d57 * u64::from(counter[2])];
        counter = [
            high(products[1]) ^ counter[1] ^ key[0],
            low(products[1]),
            high(products[0]) ^ counter[3] ^ key[1],
            low(products[0]),
        ];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::philox;

    #[test]
    fn philox_gives_the_known_answers() {
        // From the test vectors of Random123.
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
    }
}
