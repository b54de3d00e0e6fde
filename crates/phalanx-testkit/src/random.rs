//! Values from a seed: the same on every rank, machine and run.

use crate::number::{Number, Wide};
use phalanx::DType;
use std::sync::LazyLock;

/// SplitMix64: any seed is a good one, and the n-th value needs no state but n.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// A sequence of its own for each seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.next_u64() % limit.max(1) as u64) as usize
    }
}

/// The variable that makes [`values`] such that no order of a reduction is better than another: for backends
/// whose library chooses the order.
pub const ANY_ORDER: &str = "PHALANX_TESTKIT_ANY_ORDER";

/// The variable that keeps NaN out of [`values`]: for NCCL, whose smallest and largest of a number and a NaN
/// is the number.
pub const NO_NAN: &str = "PHALANX_TESTKIT_NO_NAN";

static WITHOUT_NAN: LazyLock<bool> = LazyLock::new(|| std::env::var_os(NO_NAN).is_some());
pub(crate) static ANY_ORDER_IS_RIGHT: LazyLock<bool> =
    LazyLock::new(|| std::env::var_os(ANY_ORDER).is_some());

/// `len` values that make mistakes visible.
///
/// Integers: all bit patterns, so that sums and products wrap. Floats: mostly values of either sign near
/// one with full mantissas, so that sums round and another order of summation gives other bits; some over
/// the whole range, so that they overflow and underflow; a few zeros, NaN and infinities. With [`ANY_ORDER`],
/// mantissas are so short that sums and products of a few ranks are exact.
pub fn values<T: Number>(seed: u64, len: usize) -> Vec<T> {
    let mut random = Random::new(seed ^ u64::from(T::DTYPE.code()) << 56);
    (0..len).map(|_| value(&mut random)).collect()
}

fn value<T: Number>(random: &mut Random) -> T {
    let bits = random.next_u64();
    let class = bits >> 56;
    let Some((exponent_bits, mantissa_bits)) = layout(T::DTYPE) else {
        return T::from_pattern(if class < 64 { bits % 16 } else { bits });
    };
    let bias = (1u64 << (exponent_bits - 1)) - 1;
    let any_order = *ANY_ORDER_IS_RIGHT;
    let shortest = if any_order { mantissa_bits.saturating_sub(3) } else { 0 };
    let mantissa = (bits & ((1 << mantissa_bits) - 1)) >> shortest << shortest;
    let sign = (bits >> 55 & 1) << (exponent_bits + mantissa_bits);
    let exponent = match class {
        0 => return special(bits >> 48 & 0xff),
        1..=31 if !any_order => (bits >> 40) & ((1 << exponent_bits) - 1),
        _ => bias - 2 + (bits >> 40) % 4,
    };
    let value = T::from_pattern(sign | exponent << mantissa_bits | mantissa);
    // The whole-range class meets the reserved exponent now and then; FP8 reductions would saturate an
    // infinity, so it is not among the inputs.
    if value.is_nan() || is_infinite(value) {
        T::from_small(3)
    } else if value == T::from_small(0) {
        // Which of two zeros of different sign is the smaller one is nobody's promise.
        T::from_small(0)
    } else {
        value
    }
}

fn special<T: Number>(which: u64) -> T {
    match which % 4 {
        0 => T::from_small(0),
        1 if !*WITHOUT_NAN => T::narrow(nan::<T>()),
        2 if T::INFINITE => infinity(),
        _ => T::from_small(1),
    }
}

fn nan<T: Number>() -> T::Wide {
    // All ones is a NaN in every float format here.
    T::from_pattern(u64::MAX).widen()
}

fn infinity<T: Number>() -> T {
    let (exponent_bits, mantissa_bits) = layout(T::DTYPE).expect("only floats are infinite");
    T::from_pattern(((1 << exponent_bits) - 1) << mantissa_bits)
}

fn is_infinite<T: Number>(value: T) -> bool {
    let difference = value.widen().add(value.widen().mul(T::from_small(-1).widen()));
    // Only an infinity is not zero when subtracted from itself.
    !value.is_nan() && difference.is_nan()
}

/// Exponent and mantissa bits of a float.
fn layout(dtype: DType) -> Option<(u32, u32)> {
    match dtype {
        DType::F32 => Some((8, 23)),
        DType::F64 => Some((11, 52)),
        DType::F16 => Some((5, 10)),
        DType::Bf16 => Some((8, 7)),
        DType::F8E4M3 => Some((4, 3)),
        DType::F8E5M2 => Some((5, 2)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx::{F8E5M2, f16};

    #[test]
    fn the_same_seed_gives_the_same_values() {
        let first: Vec<u64> = values::<f32>(7, 500).iter().map(|v| v.bits()).collect();
        let again: Vec<u64> = values::<f32>(7, 500).iter().map(|v| v.bits()).collect();
        let other: Vec<u64> = values::<f32>(8, 500).iter().map(|v| v.bits()).collect();
        assert_eq!(first, again);
        assert_ne!(first, other);
    }

    #[test]
    fn the_order_of_summation_can_be_told() {
        let v = values::<f32>(1, 3000);
        let differs = |c: &&[f32]| ((c[0] + c[1]) + c[2]).to_bits() != (c[0] + (c[1] + c[2])).to_bits();
        assert!(v.chunks_exact(3).filter(differs).count() > 100);
    }

    #[test]
    fn specials_are_rare_but_there() {
        let halves = values::<f16>(1, 100_000);
        let nans = halves.iter().filter(|v| v.is_nan()).count();
        let infinities = halves.iter().filter(|v| is_infinite(**v)).count();
        assert!((20..1000).contains(&nans) && (20..1000).contains(&infinities));
        assert!(!values::<F8E5M2>(1, 100_000).iter().any(|v| is_infinite(*v)));
    }
}
