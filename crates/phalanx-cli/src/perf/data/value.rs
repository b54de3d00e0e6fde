//! The fourteen element types with what the check needs: exact conversions, and distances in ulps.
//!
//! [`with_value`] turns a type that is known at run time into a type parameter.

use phalanx::{Element, F8E4M3, F8E5M2, bf16, f16};

/// An element type of the library, with what the check needs.
pub trait Value: Element {
    /// Every whole number from 0 to this one is exact in the type.
    const EXACT: i64;
    /// Whether negative numbers exist.
    const SIGNED: bool;
    /// Whether fractions exist.
    const FLOAT: bool;
    /// The three together.
    const NUMBERS: Numbers = Numbers { exact: Self::EXACT, signed: Self::SIGNED, float: Self::FLOAT };
    /// The distance of a mean from the exact one that is tolerated, in steps between neighbouring values.
    /// Types of 8 bits have so few values that two steps would let nearly anything pass.
    const MEAN_TOLERANCE: u64;

    /// The value of a whole number, which must be exact.
    fn from_i64(number: i64) -> Self;
    /// The nearest value.
    fn from_f64(number: f64) -> Self;
    /// The nearest value of an exact result.
    fn from_exact(result: Exact) -> Self {
        match result {
            Exact::Whole(number) => Self::from_i64(number),
            Exact::Fraction(number) => Self::from_f64(number),
        }
    }
    /// The sum of two values; integers wrap around.
    fn add(self, other: Self) -> Self;
    /// The number itself, where it is exact.
    #[cfg(test)]
    fn to_f64(self) -> f64;
    /// The number of steps between two values; more than any tolerance if one is not a number.
    fn steps_to(self, other: Self) -> u64;
}

/// The numbers of an element type, for code that is not generic.
#[derive(Debug, Clone, Copy)]
pub struct Numbers {
    /// [`Value::EXACT`]
    pub exact: i64,
    /// [`Value::SIGNED`]
    pub signed: bool,
    /// [`Value::FLOAT`]
    pub float: bool,
}

/// An exact result of a reduction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Exact {
    Whole(i64),
    Fraction(f64),
}

/// Bytes as elements. They must be aligned and whole elements.
pub fn elements<T: Value>(bytes: &[u8]) -> &[T] {
    // SAFETY: all bit patterns of an element are valid, and it has no padding.
    let (before, elements, after) = unsafe { bytes.align_to() };
    assert!(before.is_empty() && after.is_empty());
    elements
}

/// Bytes as elements to write. They must be aligned and whole elements.
pub fn elements_mut<T: Value>(bytes: &mut [u8]) -> &mut [T] {
    // SAFETY: all bit patterns of an element are valid, and it has no padding: its bytes are initialised,
    // too.
    let (before, elements, after) = unsafe { bytes.align_to_mut() };
    assert!(before.is_empty() && after.is_empty());
    elements
}

macro_rules! integers {
    ($($ty:ident),*) => {$(
        impl Value for $ty {
            // Beyond 2^53 the tests could not check a sum in f64.
            const EXACT: i64 = if size_of::<$ty>() < 8 { $ty::MAX as i64 } else { 1 << 53 };
            const SIGNED: bool = $ty::MIN != 0;
            const FLOAT: bool = false;
            const MEAN_TOLERANCE: u64 = 0;

            fn from_i64(number: i64) -> Self {
                number as $ty
            }
            fn from_f64(number: f64) -> Self {
                number as $ty
            }
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[cfg(test)]
            fn to_f64(self) -> f64 {
                self as f64
            }
            fn steps_to(self, other: Self) -> u64 {
                self.abs_diff(other).into()
            }
        }
    )*};
}
integers!(i8, u8, i16, u16, i32, u32, i64, u64);

macro_rules! floats {
    ($($ty:ident: $bits:ident, $digits:expr, $tolerance:expr, $from:expr, $to:expr;)*) => {$(
        impl Value for $ty {
            const EXACT: i64 = 1 << $digits;
            const SIGNED: bool = true;
            const FLOAT: bool = true;
            const MEAN_TOLERANCE: u64 = $tolerance;

            fn from_i64(number: i64) -> Self {
                Self::from_f64(number as f64)
            }
            fn from_f64(number: f64) -> Self {
                $from(number)
            }
            #[inline]
            fn add(self, other: Self) -> Self {
                // A sum in f64 is rounded as one in the type: f64 has more than twice its digits.
                $from($to(self) + $to(other))
            }
            #[cfg(test)]
            fn to_f64(self) -> f64 {
                $to(self)
            }
            fn steps_to(self, other: Self) -> u64 {
                if self != self || other != other {
                    return u64::MAX;
                }
                // Sign and magnitude become one scale on which neighbours differ by 1.
                let place = |value: Self| {
                    let bits = value.to_bits();
                    let magnitude = i128::from(bits & ($bits::MAX >> 1));
                    if bits > $bits::MAX >> 1 { -magnitude } else { magnitude }
                };
                u64::try_from((place(self) - place(other)).unsigned_abs()).unwrap_or(u64::MAX)
            }
        }
    )*};
}
floats! {
    f32: u32, 24, 2, |x| x as f32, f64::from;
    f64: u64, 53, 2, |x| x, |x| x;
    f16: u16, 11, 2, f16::from_f64, f64::from;
    bf16: u16, 8, 2, bf16::from_f64, f64::from;
    F8E4M3: u8, 4, 0, F8E4M3::from_f64, |x| F8E4M3::to_f64(&x);
    F8E5M2: u8, 3, 0, F8E5M2::from_f64, |x| F8E5M2::to_f64(&x);
}

/// Runs `$body` with `$T` standing for the Rust type of a `DType`.
macro_rules! with_value {
    ($dtype:expr, $T:ident => $body:expr) => {{
        use phalanx::DType;
        match $dtype {
            DType::F32 => {
                type $T = f32;
                $body
            }
            DType::F64 => {
                type $T = f64;
                $body
            }
            DType::F16 => {
                type $T = phalanx::f16;
                $body
            }
            DType::Bf16 => {
                type $T = phalanx::bf16;
                $body
            }
            DType::F8E4M3 => {
                type $T = phalanx::F8E4M3;
                $body
            }
            DType::F8E5M2 => {
                type $T = phalanx::F8E5M2;
                $body
            }
            DType::I8 => {
                type $T = i8;
                $body
            }
            DType::U8 => {
                type $T = u8;
                $body
            }
            DType::I16 => {
                type $T = i16;
                $body
            }
            DType::U16 => {
                type $T = u16;
                $body
            }
            DType::I32 => {
                type $T = i32;
                $body
            }
            DType::U32 => {
                type $T = u32;
                $body
            }
            DType::I64 => {
                type $T = i64;
                $body
            }
            DType::U64 => {
                type $T = u64;
                $body
            }
            other => unreachable!("{other} is a type of a newer library than this program knows"),
        }
    }};
}
pub(crate) use with_value;

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx::DType;

    #[test]
    fn every_type_of_the_library_is_known() {
        for dtype in DType::ALL {
            assert_eq!(with_value!(dtype, T => <T as Element>::DTYPE), dtype);
        }
    }

    #[test]
    fn whole_numbers_up_to_the_limit_are_exact() {
        for dtype in DType::ALL {
            with_value!(dtype, T => {
                for number in (0..=300).chain([T::EXACT]).filter(|&number| number <= T::EXACT) {
                    assert_eq!(T::from_i64(number).to_f64(), number as f64, "{dtype}");
                    if T::SIGNED {
                        assert_eq!(T::from_i64(-number).to_f64(), -number as f64, "{dtype}");
                    }
                }
            });
        }
    }

    #[test]
    fn steps_count_neighbours() {
        assert_eq!(1.0f32.steps_to(f32::from_bits(1.0f32.to_bits() + 2)), 2);
        assert_eq!((-0.0f64).steps_to(0.0), 0);
        assert_eq!(f16::from_bits(1).steps_to(f16::from_bits(0x8001)), 2);
        assert_eq!(F8E5M2::from_i64(-1).steps_to(F8E5M2::from_i64(-1)), 0);
        assert_eq!(f32::NAN.steps_to(1.0), u64::MAX);
        assert_eq!((-3i8).steps_to(4), 7);
    }
}
