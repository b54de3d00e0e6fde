//! Element types of buffers, as Rust types ([`Element`]) and as values ([`DType`]).

pub use float8::{F8E4M3, F8E5M2};
pub use half::{bf16, f16};

use std::fmt;

/// The type of a buffer's elements, as a value.
///
/// The names are those of NCCL's `ncclDataType_t` and of Rust.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
#[repr(u8)]
pub enum DType {
    /// IEEE 754 binary32.
    F32 = 0,
    /// IEEE 754 binary64.
    F64 = 1,
    /// IEEE 754 binary16.
    F16 = 2,
    /// bfloat16: the upper half of a binary32.
    Bf16 = 3,
    /// 8-bit float with 4 exponent and 3 mantissa bits; has NaN, no infinity, largest value 448.
    F8E4M3 = 4,
    /// 8-bit float with 5 exponent and 2 mantissa bits; largest finite value 57,344.
    F8E5M2 = 5,
    /// Signed 8-bit integer.
    I8 = 6,
    /// Unsigned 8-bit integer.
    U8 = 7,
    /// Signed 16-bit integer.
    I16 = 8,
    /// Unsigned 16-bit integer.
    U16 = 9,
    /// Signed 32-bit integer.
    I32 = 10,
    /// Unsigned 32-bit integer.
    U32 = 11,
    /// Signed 64-bit integer.
    I64 = 12,
    /// Unsigned 64-bit integer.
    U64 = 13,
}

impl DType {
    /// Every element type, in the order of their discriminants.
    pub const ALL: [DType; 14] = [
        DType::F32,
        DType::F64,
        DType::F16,
        DType::Bf16,
        DType::F8E4M3,
        DType::F8E5M2,
        DType::I8,
        DType::U8,
        DType::I16,
        DType::U16,
        DType::I32,
        DType::U32,
        DType::I64,
        DType::U64,
    ];

    /// Size of one element in bytes.
    pub const fn size(self) -> usize {
        match self {
            DType::F8E4M3 | DType::F8E5M2 | DType::I8 | DType::U8 => 1,
            DType::F16 | DType::Bf16 | DType::I16 | DType::U16 => 2,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F64 | DType::I64 | DType::U64 => 8,
        }
    }

    /// The short name: `f32`, `bf16`, `f8e4m3`, …
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::F8E4M3 => "f8e4m3",
            DType::F8E5M2 => "f8e5m2",
            DType::I8 => "i8",
            DType::U8 => "u8",
            DType::I16 => "i16",
            DType::U16 => "u16",
            DType::I32 => "i32",
            DType::U32 => "u32",
            DType::I64 => "i64",
            DType::U64 => "u64",
        }
    }

    /// The type with this short name.
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    pub(crate) fn from_code(code: u8) -> Option<DType> {
        DType::ALL.get(usize::from(code)).copied()
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that buffers may have as elements: the fourteen types of [`DType`].
///
/// Sealed, since every backend must be able to move and reduce it. An element has no padding and every bit
/// pattern is a valid value, so received bytes are always valid elements.
#[diagnostic::on_unimplemented(
    message = "ranks cannot exchange elements of type `{Self}`",
    label = "not one of f32, f64, f16, bf16, F8E4M3, F8E5M2, i8 to i64 and u8 to u64",
    note = "usize and isize have another size on other machines: send u64 or i64",
    note = "bool: send `u8::from(flag)`, and compare what arrives with 0",
    note = "String, str and char: send the bytes as u8 (`as_bytes`), and their number in a message before",
    note = "a struct: send each field in a buffer of its own, or its bytes as u8 (as `bytemuck` or `serde` give them)"
)]
pub trait Element: ElementType + Copy + Send + Sync + fmt::Debug + PartialEq + 'static {
    /// This type as a value.
    const DTYPE: DType;
}

/// What a buffer's elements are: an [`Element`], or [`AnyElement`] where only a [`DType`] value says it. Sealed.
pub trait ElementType: sealed::Sealed + 'static {}

/// Stands for the elements of a buffer whose type is known at run time only, such as
/// [`AnySource`](crate::AnySource).
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum AnyElement {}

impl sealed::Sealed for AnyElement {}
impl ElementType for AnyElement {}

macro_rules! elements {
    ($($ty:ty => $dtype:ident),* $(,)?) => {$(
        impl sealed::Sealed for $ty {}
        impl ElementType for $ty {}
        impl Element for $ty {
            const DTYPE: DType = DType::$dtype;
        }
        const _: () = assert!(size_of::<$ty>() == DType::$dtype.size());
    )*};
}

elements! {
    f32 => F32, f64 => F64, f16 => F16, bf16 => Bf16, F8E4M3 => F8E4M3, F8E5M2 => F8E5M2,
    i8 => I8, u8 => U8, i16 => I16, u16 => U16, i32 => I32, u32 => U32, i64 => I64, u64 => U64,
}

/// Runs `$body` with `$T` bound to the Rust type of a [`DType`] value.
macro_rules! with_element {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::DType::F64 => {
                type $T = f64;
                $body
            }
            $crate::DType::F16 => {
                type $T = $crate::f16;
                $body
            }
            $crate::DType::Bf16 => {
                type $T = $crate::bf16;
                $body
            }
            $crate::DType::F8E4M3 => {
                type $T = $crate::F8E4M3;
                $body
            }
            $crate::DType::F8E5M2 => {
                type $T = $crate::F8E5M2;
                $body
            }
            $crate::DType::I8 => {
                type $T = i8;
                $body
            }
            $crate::DType::U8 => {
                type $T = u8;
                $body
            }
            $crate::DType::I16 => {
                type $T = i16;
                $body
            }
            $crate::DType::U16 => {
                type $T = u16;
                $body
            }
            $crate::DType::I32 => {
                type $T = i32;
                $body
            }
            $crate::DType::U32 => {
                type $T = u32;
                $body
            }
            $crate::DType::I64 => {
                type $T = i64;
                $body
            }
            $crate::DType::U64 => {
                type $T = u64;
                $body
            }
        }
    };
}
pub(crate) use with_element;
