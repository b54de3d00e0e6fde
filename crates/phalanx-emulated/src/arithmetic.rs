//! Element types, and reductions: contributions combined element by element, in rank order.
//!
//! Integers wrap, also in averages. Small floats are combined as `f32` and rounded once. A NaN in one
//! contribution makes the result a NaN. NCCL's own order and rounding differ from this, within its promises.

use float8::{F8E4M3, F8E5M2};
use half::{bf16, f16};

/// An element type, in the order of `ncclDataType_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataType {
    I8,
    U8,
    I32,
    U32,
    I64,
    U64,
    F16,
    F32,
    F64,
    Bf16,
    F8E4M3,
    F8E5M2,
}

impl DataType {
    /// The type's `ncclDataType_t`.
    pub fn code(self) -> u64 {
        self as u64
    }

    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            DataType::I8 | DataType::U8 | DataType::F8E4M3 | DataType::F8E5M2 => 1,
            DataType::F16 | DataType::Bf16 => 2,
            DataType::I32 | DataType::U32 | DataType::F32 => 4,
            DataType::I64 | DataType::U64 | DataType::F64 => 8,
        }
    }
}

/// How contributions are combined (`ncclRedOp_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Combine {
    Sum,
    Prod,
    Max,
    Min,
    Avg,
    /// The sum of each contribution times its rank's factor.
    PreMulSum,
}

/// One rank's contribution: its elements, and the bytes of its factor.
#[derive(Debug)]
pub struct Contribution<'a> {
    pub bytes: &'a [u8],
    pub factor: [u8; 8],
}

/// Combines the contributions of all ranks.
pub fn combine(dtype: DataType, how: Combine, contributions: &[Contribution<'_>]) -> Vec<u8> {
    match dtype {
        DataType::I8 => fold::<i8>(how, contributions),
        DataType::U8 => fold::<u8>(how, contributions),
        DataType::I32 => fold::<i32>(how, contributions),
        DataType::U32 => fold::<u32>(how, contributions),
        DataType::I64 => fold::<i64>(how, contributions),
        DataType::U64 => fold::<u64>(how, contributions),
        DataType::F16 => fold::<f16>(how, contributions),
        DataType::F32 => fold::<f32>(how, contributions),
        DataType::F64 => fold::<f64>(how, contributions),
        DataType::Bf16 => fold::<bf16>(how, contributions),
        DataType::F8E4M3 => fold::<F8E4M3>(how, contributions),
        DataType::F8E5M2 => fold::<F8E5M2>(how, contributions),
    }
}

fn fold<T: Number>(how: Combine, contributions: &[Contribution<'_>]) -> Vec<u8> {
    let load = |contribution: &Contribution<'_>| -> Vec<T::Wide> {
        let factor = T::load(&contribution.factor[..size_of::<T>()]);
        let widen = |bytes: &[u8]| {
            let element = T::load(bytes);
            if how == Combine::PreMulSum { element.mul(factor) } else { element }
        };
        contribution.bytes.chunks_exact(size_of::<T>()).map(widen).collect()
    };
    let Some((first, others)) = contributions.split_first() else { return Vec::new() };
    let mut result = load(first);
    for other in others {
        for (sum, next) in result.iter_mut().zip(load(other)) {
            *sum = match how {
                Combine::Sum | Combine::Avg | Combine::PreMulSum => sum.add(next),
                Combine::Prod => sum.mul(next),
                Combine::Max => sum.max(next),
                Combine::Min => sum.min(next),
            };
        }
    }
    let ranks = contributions.len();
    let narrow = |value: T::Wide| T::store(if how == Combine::Avg { T::divide(value, ranks) } else { value });
    result.into_iter().flat_map(narrow).collect()
}

/// An element, and the type in which elements are combined.
trait Number {
    type Wide: Wide;
    fn load(bytes: &[u8]) -> Self::Wide;
    fn store(wide: Self::Wide) -> impl Iterator<Item = u8>;
    fn divide(sum: Self::Wide, ranks: usize) -> Self::Wide;
}

/// What elements are combined as: integers wrap, and what is not a number wins.
pub trait Wide: Copy {
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
}

macro_rules! integers {
    ($($ty:ident),*) => {$(
        impl Number for $ty {
            type Wide = $ty;
            fn load(bytes: &[u8]) -> $ty {
                $ty::from_ne_bytes(bytes.try_into().expect("one element"))
            }
            fn store(wide: $ty) -> impl Iterator<Item = u8> {
                wide.to_ne_bytes().into_iter()
            }
            fn divide(sum: $ty, ranks: usize) -> $ty {
                // If the type cannot hold the number of ranks, every average is 0.
                $ty::try_from(ranks).map_or(0, |ranks| sum / ranks)
            }
        }
    )*};
}
integers!(i8, u8, i32, u32, i64, u64);

macro_rules! wide_integers {
    ($($ty:ident),*) => {$(
        impl Wide for $ty {
            fn add(self, other: $ty) -> $ty {
                self.wrapping_add(other)
            }
            fn mul(self, other: $ty) -> $ty {
                self.wrapping_mul(other)
            }
            fn min(self, other: $ty) -> $ty {
                Ord::min(self, other)
            }
            fn max(self, other: $ty) -> $ty {
                Ord::max(self, other)
            }
        }
    )*};
}
wide_integers!(i8, u8, i16, u16, i32, u32, i64, u64, i128);

macro_rules! wide_floats {
    ($($ty:ident),*) => {$(
        impl Wide for $ty {
            fn add(self, other: $ty) -> $ty {
                self + other
            }
            fn mul(self, other: $ty) -> $ty {
                self * other
            }
            fn min(self, other: $ty) -> $ty {
                if self < other || self.is_nan() { self } else { other }
            }
            fn max(self, other: $ty) -> $ty {
                if self > other || self.is_nan() { self } else { other }
            }
        }
    )*};
}
wide_floats!(f32, f64);

macro_rules! floats {
    ($($ty:ident: $wide:ident, $load:expr, $store:expr;)*) => {$(
        impl Number for $ty {
            type Wide = $wide;
            fn load(bytes: &[u8]) -> $wide {
                $load(bytes.try_into().expect("one element"))
            }
            fn store(wide: $wide) -> impl Iterator<Item = u8> {
                $store(wide).into_iter()
            }
            fn divide(sum: $wide, ranks: usize) -> $wide {
                sum / ranks as $wide
            }
        }
    )*};
}
floats! {
    f32: f32, f32::from_ne_bytes, f32::to_ne_bytes;
    f64: f64, f64::from_ne_bytes, f64::to_ne_bytes;
    f16: f32, |bytes| f16::from_ne_bytes(bytes).to_f32(), |wide| f16::from_f32(wide).to_ne_bytes();
    bf16: f32, |bytes| bf16::from_ne_bytes(bytes).to_f32(), |wide| bf16::from_f32(wide).to_ne_bytes();
    F8E4M3: f32, |[bits]: [u8; 1]| F8E4M3::from_bits(bits).to_f32(), |wide| [F8E4M3::from_f32(wide).to_bits()];
    F8E5M2: f32, |[bits]: [u8; 1]| F8E5M2::from_bits(bits).to_f32(), |wide| [F8E5M2::from_f32(wide).to_bits()];
}
