//! Every element type with what the reference needs: its bits, and the type it is accumulated in.

use crate::minifloat;
use phalanx::cudarc::driver::DeviceRepr;
use phalanx::{Element, F8E4M3, F8E5M2, bf16, f16};

/// An [`Element`] that the reference can calculate with.
pub trait Number: Element + DeviceRepr {
    /// The type in which contributions are combined, as `phalanx::ReduceOp` documents it.
    type Wide: Wide;
    /// Whether there are infinities that survive a reduction.
    const INFINITE: bool;
    /// The bit pattern, zero-extended.
    fn bits(self) -> u64;
    /// The value of a bit pattern; upper bits are ignored.
    fn from_pattern(bits: u64) -> Self;
    /// The value in the accumulator's type: exact.
    fn widen(self) -> Self::Wide;
    /// Back: rounded once (floats) or modulo 2^bits (integers).
    fn narrow(wide: Self::Wide) -> Self;
    /// The nearest value to a small number.
    fn from_small(value: i32) -> Self;

    /// Whether this is a NaN.
    fn is_nan(self) -> bool {
        self.widen().is_nan()
    }

    /// Whether two values are the same bits, or both a NaN: whose payload survives is not promised.
    fn same(self, other: Self) -> bool {
        self.bits() == other.bits() || (self.is_nan() && other.is_nan())
    }
}

/// An accumulator.
pub trait Wide: Copy {
    /// The sum.
    fn add(self, other: Self) -> Self;
    /// The product.
    fn mul(self, other: Self) -> Self;
    /// The smaller one; NaN if either is.
    fn min(self, other: Self) -> Self;
    /// The larger one; NaN if either is.
    fn max(self, other: Self) -> Self;
    /// Divided by a number of ranks; integers round towards zero.
    fn divide(self, ranks: usize) -> Self;
    /// Whether this is a NaN.
    fn is_nan(self) -> bool;
}

impl Wide for i128 {
    // Products of many 64-bit values exceed even this type; its lower bits stay right when it wraps.
    fn add(self, other: i128) -> i128 {
        self.wrapping_add(other)
    }
    fn mul(self, other: i128) -> i128 {
        self.wrapping_mul(other)
    }
    fn min(self, other: i128) -> i128 {
        Ord::min(self, other)
    }
    fn max(self, other: i128) -> i128 {
        Ord::max(self, other)
    }
    fn divide(self, ranks: usize) -> i128 {
        self / ranks as i128
    }
    fn is_nan(self) -> bool {
        false
    }
}

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
                if self.is_nan() || other.is_nan() { $ty::NAN } else { $ty::min(self, other) }
            }
            fn max(self, other: $ty) -> $ty {
                if self.is_nan() || other.is_nan() { $ty::NAN } else { $ty::max(self, other) }
            }
            fn divide(self, ranks: usize) -> $ty {
                self / ranks as $ty
            }
            fn is_nan(self) -> bool {
                $ty::is_nan(self)
            }
        }
    )*};
}
wide_floats!(f32, f64);

macro_rules! integers {
    ($($ty:ident),*) => {$(
        impl Number for $ty {
            type Wide = i128;
            const INFINITE: bool = false;
            fn bits(self) -> u64 {
                // Through the unsigned type of the same size, so that the sign is not extended.
                self as u64 & (u64::MAX >> (64 - $ty::BITS))
            }
            fn from_pattern(bits: u64) -> $ty {
                bits as $ty
            }
            fn widen(self) -> i128 {
                i128::from(self)
            }
            fn narrow(wide: i128) -> $ty {
                wide as $ty
            }
            fn from_small(value: i32) -> $ty {
                value as $ty
            }
        }
    )*};
}
integers!(i8, u8, i16, u16, i32, u32, i64, u64);

macro_rules! floats {
    ($($ty:ident: $bits:ident),*) => {$(
        impl Number for $ty {
            type Wide = $ty;
            const INFINITE: bool = true;
            fn bits(self) -> u64 {
                self.to_bits().into()
            }
            fn from_pattern(bits: u64) -> $ty {
                $ty::from_bits(bits as $bits)
            }
            fn widen(self) -> $ty {
                self
            }
            fn narrow(wide: $ty) -> $ty {
                wide
            }
            fn from_small(value: i32) -> $ty {
                value as $ty
            }
        }
    )*};
}
floats!(f32: u32, f64: u64);

macro_rules! small_floats {
    ($($ty:ident: $bits:ident, $format:ident, $infinite:literal);*) => {$(
        impl Number for $ty {
            type Wide = f32;
            const INFINITE: bool = $infinite;
            fn bits(self) -> u64 {
                self.to_bits().into()
            }
            fn from_pattern(bits: u64) -> $ty {
                $ty::from_bits(bits as $bits)
            }
            fn widen(self) -> f32 {
                minifloat::$format.decode(self.to_bits().into())
            }
            fn narrow(wide: f32) -> $ty {
                $ty::from_bits(minifloat::$format.encode(wide) as $bits)
            }
            fn from_small(value: i32) -> $ty {
                $ty::narrow(value as f32)
            }
        }
    )*};
}
small_floats!(f16: u16, F16, true; bf16: u16, BF16, true; F8E4M3: u8, E4M3, false; F8E5M2: u8, E5M2, false);

/// Runs `$body` with `$T` bound to the Rust type of a `phalanx::DType`.
#[macro_export]
macro_rules! with_number {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            phalanx::DType::F32 => {
                type $T = f32;
                $body
            }
            phalanx::DType::F64 => {
                type $T = f64;
                $body
            }
            phalanx::DType::F16 => {
                type $T = phalanx::f16;
                $body
            }
            phalanx::DType::Bf16 => {
                type $T = phalanx::bf16;
                $body
            }
            phalanx::DType::F8E4M3 => {
                type $T = phalanx::F8E4M3;
                $body
            }
            phalanx::DType::F8E5M2 => {
                type $T = phalanx::F8E5M2;
                $body
            }
            phalanx::DType::I8 => {
                type $T = i8;
                $body
            }
            phalanx::DType::U8 => {
                type $T = u8;
                $body
            }
            phalanx::DType::I16 => {
                type $T = i16;
                $body
            }
            phalanx::DType::U16 => {
                type $T = u16;
                $body
            }
            phalanx::DType::I32 => {
                type $T = i32;
                $body
            }
            phalanx::DType::U32 => {
                type $T = u32;
                $body
            }
            phalanx::DType::I64 => {
                type $T = i64;
                $body
            }
            phalanx::DType::U64 => {
                type $T = u64;
                $body
            }
            other => panic!("the testkit does not know the element type {other}"),
        }
    };
}
