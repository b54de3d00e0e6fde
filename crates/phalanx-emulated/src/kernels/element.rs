//! Element types and how they are combined (`gpu/kernels/element.cuh`): as host memory's reductions do it, in rank
//! order.

use crate::arithmetic::Wide;
use half::f16;

/// `ReductionCode` of phalanx.
pub const PROD: u32 = 1;
pub const MIN: u32 = 2;
pub const MAX: u32 = 3;
pub const AVG: u32 = 4;
pub const PRE_MUL_SUM: u32 = 5;

/// What elements are combined as.
pub trait Number: Wide {
    fn divide(self, ranks: u32) -> Self;
}

/// An element type: its size, and what its elements are combined as, in averages and otherwise.
pub trait Element {
    const SIZE: usize;
    type Acc: Number;
    type Wide: Number;
}

/// An element's bits as a number, and back.
pub trait Convert<A>: Element {
    fn up(bits: u64) -> A;
    fn down(value: A) -> u64;
}

macro_rules! numbers {
    ($($ty:ty),*) => {$(
        impl Number for $ty {
            fn divide(self, ranks: u32) -> $ty {
                self / ranks as $ty
            }
        }
    )*};
}
numbers!(f32, f64, i8, u8, i16, u16, i32, u32, i64, u64, i128);

macro_rules! floats {
    ($($name:ident: $size:literal, $acc:ty, $up:expr, $down:expr;)*) => {$(
        pub struct $name;
        impl Element for $name {
            const SIZE: usize = $size;
            type Acc = $acc;
            type Wide = $acc;
        }
        impl Convert<$acc> for $name {
            fn up(bits: u64) -> $acc {
                $up(bits)
            }
            fn down(value: $acc) -> u64 {
                $down(value)
            }
        }
    )*};
}
floats! {
    F32: 4, f32, |bits| f32::from_bits(bits as u32), |value: f32| u64::from(value.to_bits());
    F64: 8, f64, f64::from_bits, |value: f64| value.to_bits();
    F16: 2, f32, |bits| f16::from_bits(bits as u16).to_f32(), |value| u64::from(f16::from_f32(value).to_bits());
    Bf16: 2, f32, |bits| f32::from_bits((bits as u32) << 16), narrow_bf16;
    F8E4M3: 1, f32, widen_f8::<3, 7>, narrow_f8::<3, 7, 0x7e, 0x7f>;
    F8E5M2: 1, f32, widen_f8::<2, 15>, narrow_f8::<2, 15, 0x7b, 0x7e>;
}

macro_rules! integers {
    ($($name:ident: $ty:ty, $wide:ty;)*) => {$(
        pub struct $name;
        impl Element for $name {
            const SIZE: usize = size_of::<$ty>();
            type Acc = $ty;
            type Wide = $wide;
        }
        impl Convert<$ty> for $name {
            fn up(bits: u64) -> $ty {
                bits as $ty
            }
            fn down(value: $ty) -> u64 {
                value as u64 & (u64::MAX >> (64 - 8 * Self::SIZE))
            }
        }
        impl Convert<$wide> for $name {
            fn up(bits: u64) -> $wide {
                bits as $ty as $wide
            }
            fn down(value: $wide) -> u64 {
                value as u64 & (u64::MAX >> (64 - 8 * Self::SIZE))
            }
        }
    )*};
}
integers! {
    I8: i8, i32;
    U8: u8, i32;
    I16: i16, i32;
    U16: u16, i32;
    I32: i32, i64;
    U32: u32, i64;
    I64: i64, i128;
    U64: u64, i128;
}

pub fn narrow_bf16(value: f32) -> u64 {
    let bits = value.to_bits();
    let quiet = bits >> 16 | 0x40;
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    u64::from(if value.is_nan() { quiet } else { rounded })
}

/// Of so many bits of mantissa, and this bias.
fn widen_f8<const MANTISSA: u32, const BIAS: u32>(bits: u64) -> f32 {
    let (magnitude, sign) = (bits as u32 & 0x7f, (bits as u32 & 0x80) << 24);
    let scaled = f32::from_bits(magnitude << (23 - MANTISSA)) * f32::from_bits((254 - BIAS) << 23);
    let wide = match (MANTISSA, magnitude) {
        (3, 0x7f) | (2, 0x7d..) => f32::NAN.to_bits(),
        (2, 0x7c) => f32::INFINITY.to_bits(),
        _ => scaled.to_bits(),
    };
    f32::from_bits(wide | sign)
}

/// The same, with the bits of the largest number and those of NaN.
fn narrow_f8<const MANTISSA: u32, const BIAS: u32, const LARGEST: u32, const NAN: u32>(value: f32) -> u64 {
    let bits = value.to_bits();
    let (sign, magnitude) = (bits >> 24 & 0x80, bits & 0x7fff_ffff);
    let shift = 23 - MANTISSA;
    let half = (1 << (shift - 1)) - 1 + (magnitude >> shift & 1);
    let normal = magnitude.wrapping_sub((127 - BIAS) << 23).wrapping_add(half) >> shift;
    let place = (127 + 24 - BIAS - MANTISSA) << 23;
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(place)).to_bits().wrapping_sub(place);
    let finite = if magnitude < (128 - BIAS) << 23 { subnormal } else { normal };
    u64::from(sign | if magnitude > 0x7f80_0000 { NAN } else { Ord::min(finite, LARGEST) })
}

/// The elements of a step, as they are combined.
pub struct Sum<E, A> {
    values: Vec<A>,
    element: std::marker::PhantomData<E>,
}

/// The elements of a step's words.
fn elements<E: Convert<A>, A>(step: &[u64]) -> impl Iterator<Item = A> {
    let bits = 8 * E::SIZE;
    let of_word =
        move |word: u64| (0..8 / E::SIZE).map(move |n| word >> (n * bits) & (u64::MAX >> (64 - bits)));
    step.iter().flat_map(move |word| of_word(*word)).map(E::up)
}

impl<E: Convert<A>, A: Number> Sum<E, A> {
    pub fn new() -> Sum<E, A> {
        Sum { values: Vec::new(), element: std::marker::PhantomData }
    }

    /// Combines a rank's contribution; that of rank 0 is the first.
    pub fn put(&mut self, rank: usize, step: &[u64], op: u32, factor: u64) {
        let factor = E::up(factor);
        let prepare = |x: A| if op == PRE_MUL_SUM { x.mul(factor) } else { x };
        let contribution = elements::<E, A>(step).map(prepare);
        if rank == 0 {
            self.values.clear();
            self.values.extend(contribution);
            return;
        }
        for (sum, x) in self.values.iter_mut().zip(contribution) {
            *sum = match op {
                PROD => sum.mul(x),
                MIN => sum.min(x),
                MAX => sum.max(x),
                _ => sum.add(x),
            };
        }
    }

    /// Stores the result.
    pub fn finish(&self, step: &mut [u64], op: u32, ranks: u32) {
        let each = 8 / E::SIZE;
        for (word, values) in step.iter_mut().zip(self.values.chunks_exact(each)) {
            let bits = |(n, value): (usize, &A)| {
                E::down(if op == AVG { value.divide(ranks) } else { *value }) << (8 * E::SIZE * n)
            };
            *word = values.iter().enumerate().map(bits).fold(0, |word, bits| word | bits);
        }
    }
}
