//! Arithmetic of element types: how each is accumulated, combined and rounded.

use crate::types::dtype::{Element, F8E4M3, F8E5M2, bf16, f16};

/// An element type, and the type in which it is accumulated.
pub(crate) trait Number: Element {
    /// Accumulates everything but averages.
    type Acc: Arithmetic;
    /// Accumulates averages: wide enough that 2⁹ contributions do not overflow.
    type Wide: Arithmetic;
    fn acc(self) -> Self::Acc;
    fn from_acc(acc: Self::Acc) -> Self;
    fn wide(self) -> Self::Wide;
    fn from_wide(wide: Self::Wide) -> Self;
}

/// What accumulators can do. Integers wrap; NaN wins in `min` and `max`.
pub(crate) trait Arithmetic: Copy + Default + PartialOrd {
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    fn div(self, ranks: usize) -> Self;
}

macro_rules! float_arithmetic {
    ($($float:ty),*) => {$(
        impl Arithmetic for $float {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self * other
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                if self < other || self.is_nan() { self } else { other }
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                if self > other || self.is_nan() { self } else { other }
            }
            #[inline(always)]
            fn div(self, ranks: usize) -> Self {
                self / ranks as $float
            }
        }
    )*};
}
float_arithmetic!(f32, f64);

macro_rules! integer_arithmetic {
    ($($int:ty),*) => {$(
        impl Arithmetic for $int {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                Ord::min(self, other)
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                Ord::max(self, other)
            }
            #[inline(always)]
            fn div(self, ranks: usize) -> Self {
                self / ranks as $int
            }
        }
    )*};
}
integer_arithmetic!(i8, u8, i16, u16, i32, u32, i64, u64, i128);

macro_rules! numbers {
    ($($ty:ty: $acc:ty, $wide:ty;)*) => {$(
        impl Number for $ty {
            type Acc = $acc;
            type Wide = $wide;
            #[inline(always)]
            fn acc(self) -> $acc {
                self as $acc
            }
            #[inline(always)]
            fn from_acc(acc: $acc) -> Self {
                acc as $ty
            }
            #[inline(always)]
            fn wide(self) -> $wide {
                self as $wide
            }
            #[inline(always)]
            fn from_wide(wide: $wide) -> Self {
                wide as $ty
            }
        }
    )*};
}
numbers! {
    f32: f32, f32;
    f64: f64, f64;
    i8: i8, i32;
    u8: u8, i32;
    i16: i16, i32;
    u16: u16, i32;
    i32: i32, i64;
    u32: u32, i64;
    i64: i64, i128;
    u64: u64, i128;
}

macro_rules! low_precision {
    ($($ty:ty, $widen:expr, $narrow:expr;)*) => {$(
        impl Number for $ty {
            type Acc = f32;
            type Wide = f32;
            #[inline(always)]
            fn acc(self) -> f32 {
                $widen(self)
            }
            #[inline(always)]
            fn from_acc(acc: f32) -> Self {
                $narrow(acc)
            }
            #[inline(always)]
            fn wide(self) -> f32 {
                $widen(self)
            }
            #[inline(always)]
            fn from_wide(wide: f32) -> Self {
                $narrow(wide)
            }
        }
    )*};
}
low_precision! {
    f16, widen_f16, narrow_f16;
    bf16, widen_bf16, narrow_bf16;
    F8E4M3, |x: F8E4M3| E4M3[usize::from(x.to_bits())], |x| F8E4M3::from_bits(narrow_f8::<3, 7, 0x7e, 0x7f>(x));
    F8E5M2, |x: F8E5M2| E5M2[usize::from(x.to_bits())], |x| F8E5M2::from_bits(narrow_f8::<2, 15, 0x7b, 0x7e>(x));
}

/// The values of all 8-bit floats.
static E4M3: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut bits = 0;
    while bits < 256 {
        table[bits] = F8E4M3::from_bits(bits as u8).to_f32();
        bits += 1;
    }
    table
};
static E5M2: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut bits = 0;
    while bits < 256 {
        table[bits] = F8E5M2::from_bits(bits as u8).to_f32();
        bits += 1;
    }
    table
};

// Own conversions, in plain arithmetic that the compiler vectorises. Those of `half` test the processor's
// features in each call, and those of `float8` go through f64. The tests compare the results with the
// crates'.

#[inline(always)]
fn widen_bf16(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

#[inline(always)]
fn narrow_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    // To nearest, ties to even; a NaN stays one, made quiet.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    bf16::from_bits(if x.is_nan() { quiet } else { rounded } as u16)
}

#[inline(always)]
fn widen_f16(x: f16) -> f32 {
    let bits = u32::from(x.to_bits());
    let sign = (bits & 0x8000) << 16;
    let magnitude = bits & 0x7fff;
    // Move exponent and mantissa to their places; multiplying by 2^112 mends the exponent's bias and makes
    // subnormals normal. Infinity and NaN keep the largest exponent.
    let scaled = f32::from_bits(magnitude << 13) * f32::from_bits(0x7780_0000);
    let special = f32::from_bits((magnitude << 13) | 0x7f80_0000).to_bits();
    // A signalling NaN is made quiet, as conversion instructions do.
    let special = if magnitude > 0x7c00 { special | 0x0040_0000 } else { special };
    let bits = if magnitude >= 0x7c00 { special } else { scaled.to_bits() };
    f32::from_bits(bits | sign)
}

#[inline(always)]
fn narrow_f16(x: f32) -> f16 {
    let bits = x.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    // Normal results: mend the bias, round to nearest even by an integer addition.
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + odd) >> 13;
    // Subnormal results: adding 0.5 puts the result's last place at the sum's last place, and the
    // addition rounds.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
    let finite = if magnitude < 113 << 23 { subnormal } else { normal };
    let large = if magnitude > 0x7f80_0000 { 0x7e00 | ((magnitude >> 13) & 0x3ff) } else { 0x7c00 };
    let result = if magnitude >= 143 << 23 { large } else { finite };
    f16::from_bits((sign | result) as u16)
}

/// Rounds to an 8-bit float with the given number of mantissa bits, exponent bias, bits of the largest number
/// (to which larger values saturate) and bits of NaN.
#[inline(always)]
fn narrow_f8<const MANTISSA: u32, const BIAS: u32, const LARGEST: u32, const NAN: u32>(x: f32) -> u8 {
    let bits = x.to_bits();
    let sign = (bits >> 24) & 0x80;
    let magnitude = bits & 0x7fff_ffff;
    // As in `narrow_f16`.
    let shift = 23 - MANTISSA;
    let odd = (magnitude >> shift) & 1;
    let half = (1 << (shift - 1)) - 1 + odd;
    let normal = magnitude.wrapping_sub((127 - BIAS) << 23).wrapping_add(half) >> shift;
    let place = (127 + 24 - BIAS - MANTISSA) << 23;
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(place)).to_bits().wrapping_sub(place);
    let finite = if magnitude < (128 - BIAS) << 23 { subnormal } else { normal };
    let result = if magnitude > 0x7f80_0000 { NAN } else { Ord::min(finite, LARGEST) };
    (sign | result) as u8
}

/// A reduction as a type, so that the loops are compiled for each.
pub(crate) trait Combine<T: Number> {
    type Acc: Arithmetic;
    fn widen(x: T) -> Self::Acc;
    /// What a contribution becomes before it is combined.
    #[inline(always)]
    fn prepare(x: Self::Acc, _factor: Self::Acc) -> Self::Acc {
        x
    }
    fn combine(acc: Self::Acc, x: Self::Acc) -> Self::Acc;
    fn finish(acc: Self::Acc, ranks: usize) -> T;
}

macro_rules! combine {
    ($($name:ident: $method:ident;)*) => {$(
        pub(crate) struct $name;
        impl<T: Number> Combine<T> for $name {
            type Acc = T::Acc;
            #[inline(always)]
            fn widen(x: T) -> T::Acc {
                x.acc()
            }
            #[inline(always)]
            fn combine(acc: T::Acc, x: T::Acc) -> T::Acc {
                acc.$method(x)
            }
            #[inline(always)]
            fn finish(acc: T::Acc, _ranks: usize) -> T {
                T::from_acc(acc)
            }
        }
    )*};
}
combine! { Sum: add; Prod: mul; Min: min; Max: max; }

pub(crate) struct Avg;
impl<T: Number> Combine<T> for Avg {
    type Acc = T::Wide;
    #[inline(always)]
    fn widen(x: T) -> T::Wide {
        x.wide()
    }
    #[inline(always)]
    fn combine(acc: T::Wide, x: T::Wide) -> T::Wide {
        acc.add(x)
    }
    #[inline(always)]
    fn finish(acc: T::Wide, ranks: usize) -> T {
        T::from_wide(acc.div(ranks))
    }
}

pub(crate) struct PreMulSum;
impl<T: Number> Combine<T> for PreMulSum {
    type Acc = T::Acc;
    #[inline(always)]
    fn widen(x: T) -> T::Acc {
        x.acc()
    }
    #[inline(always)]
    fn prepare(x: T::Acc, factor: T::Acc) -> T::Acc {
        x.mul(factor)
    }
    #[inline(always)]
    fn combine(acc: T::Acc, x: T::Acc) -> T::Acc {
        acc.add(x)
    }
    #[inline(always)]
    fn finish(acc: T::Acc, _ranks: usize) -> T {
        T::from_acc(acc)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_agree_with_those_of_the_crates() {
        for bits in 0..=u16::MAX {
            let (h, b) = (f16::from_bits(bits), bf16::from_bits(bits));
            assert_eq!(widen_f16(h).to_bits(), h.to_f32_const().to_bits(), "f16 {bits:#x}");
            assert_eq!(widen_bf16(b).is_nan(), b.is_nan());
            if !b.is_nan() {
                assert_eq!(widen_bf16(b).to_bits(), b.to_f32().to_bits(), "bf16 {bits:#x}");
            }
        }
        // Values around every representable one, and every exponent.
        for bits in (0..=u32::MAX).step_by(997).chain((0..=u16::MAX).flat_map(|bits| {
            let center = f16::from_bits(bits).to_f32_const().to_bits();
            let wide = u32::from(bits) << 16;
            [center.wrapping_sub(1), center, center + 1, center ^ 0x1000, wide, wide + 0x7fff, wide + 0x8001]
        })) {
            let x = f32::from_bits(bits);
            let (h, b) = (narrow_f16(x), narrow_bf16(x));
            let (e4m3, e5m2): (F8E4M3, F8E5M2) = (Number::from_acc(x), Number::from_acc(x));
            assert_eq!(e4m3.is_nan(), x.is_nan());
            assert_eq!(e5m2.is_nan(), x.is_nan());
            if x.is_nan() {
                assert!(h.is_nan() && b.is_nan(), "{bits:#x}");
            } else {
                assert_eq!(e4m3.to_bits(), F8E4M3::from_f32(x).to_bits(), "e4m3 of {bits:#x}");
                assert_eq!(e5m2.to_bits(), F8E5M2::from_f32(x).to_bits(), "e5m2 of {bits:#x}");
                assert_eq!(h.to_bits(), f16::from_f32_const(x).to_bits(), "f16 of {bits:#x}");
                assert_eq!(b.to_bits(), bf16::from_f32_const(x).to_bits(), "bf16 of {bits:#x}");
            }
        }
    }
}
