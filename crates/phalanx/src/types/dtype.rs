//! Element types of buffers, as Rust types ([`Plain`], [`Element`]) and as values ([`DType`]).

pub use float8::{F8E4M3, F8E5M2};
pub use half::{bf16, f16};

use super::plain::PlainType;
use bytemuck::{AnyBitPattern, NoUninit};
use std::any::TypeId;
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
    /// Plain data of another type, such as a struct: it is moved, not reduced.
    Plain(PlainType) = 14,
}

impl DType {
    /// Every number type, in the order of their discriminants.
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
            DType::Plain(plain) => plain.size(),
        }
    }

    /// The short name: `f32`, `bf16`, `f8e4m3`, …; of other plain data the path of its type.
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
            DType::Plain(plain) => plain.name(),
        }
    }

    /// Whether it is a number, which can be reduced.
    pub const fn is_number(self) -> bool {
        !matches!(self, DType::Plain(_))
    }

    /// The number type with this short name.
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// The discriminant: the place of a number type in [`DType::ALL`], and 14 for all other plain data.
    pub const fn code(self) -> u8 {
        match self {
            DType::F32 => 0,
            DType::F64 => 1,
            DType::F16 => 2,
            DType::Bf16 => 3,
            DType::F8E4M3 => 4,
            DType::F8E5M2 => 5,
            DType::I8 => 6,
            DType::U8 => 7,
            DType::I16 => 8,
            DType::U16 => 9,
            DType::I32 => 10,
            DType::U32 => 11,
            DType::I64 => 12,
            DType::U64 => 13,
            DType::Plain(_) => PLAIN,
        }
    }

    /// A length in elements or bytes with the type's fingerprint, so that another plain type is another length. Numbers are told apart
    /// by their code.
    #[inline(always)]
    pub(crate) const fn mark(self, length: u64) -> u64 {
        match self {
            DType::Plain(plain) => length ^ (plain.fingerprint() as u64) << LENGTH_BITS,
            _ => length,
        }
    }

    /// The type and the length of a code and a marked length.
    pub(crate) fn decode(code: u8, marked: u64) -> Option<(DType, u64)> {
        match DType::ALL.get(usize::from(code)) {
            Some(dtype) => Some((*dtype, marked)),
            None if code == PLAIN => {
                let plain = PlainType::with_fingerprint((marked >> LENGTH_BITS) as u32);
                Some((DType::Plain(plain), unmarked(code, marked)))
            }
            None => None,
        }
    }
}

/// The code of all plain data that is no number.
const PLAIN: u8 = 14;

/// Bits of a marked length that are the length.
const LENGTH_BITS: u32 = 40;

/// The length in a marked length of elements with this code.
#[inline(always)]
pub(crate) const fn unmarked(code: u8, marked: u64) -> u64 {
    if code == PLAIN { marked & ((1 << LENGTH_BITS) - 1) } else { marked }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that operations can move: the fourteen [`Element`]s, and any other plain data, such as structs that are
/// [`bytemuck::Pod`], arrays, `usize` and `u128`.
///
/// It is implemented for every type that is `bytemuck::NoUninit` and `bytemuck::AnyBitPattern`: without padding, and valid
/// whatever its bytes are. `#[derive(bytemuck::Pod, bytemuck::Zeroable)]` makes a struct such a type (`cargo add bytemuck
/// --features derive`). All ranks must use the same
/// type: another one is a [`MismatchError`](crate::MismatchError), which knows a type by its name and its size.
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// #[derive(Debug, Clone, Copy, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
/// #[repr(C)]
/// struct Particle {
///     place: [f32; 3],
///     kind: u32,
/// }
///
/// phalanx::try_run(3, |comm| -> phalanx::Result<()> {
///     let own = Particle { place: [comm.rank() as f32; 3], kind: 7 };
///     let mut all = [Particle::default(); 3];
///     comm.all_gather(&[own], &mut all)?;
///     assert_eq!(all[2], Particle { place: [2.0; 3], kind: 7 });
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[diagnostic::on_unimplemented(
    message = "ranks cannot exchange elements of type `{Self}`",
    label = "not plain data",
    note = "a struct without padding: derive `bytemuck::Pod` and `bytemuck::Zeroable` for it",
    note = "bool, char and enums without fields: as `phalanx::Unchecked`, which checks what arrives",
    note = "String and str: send the bytes as u8 (`as_bytes`), and their number in a message before; or an object"
)]
#[doc(alias("MPI_Type_create_struct", "MPI_Type_contiguous"))]
pub trait Plain: ElementType + Copy + Send + Sync + 'static {
    /// This type as a value.
    fn dtype() -> DType;
}

// The message of `Plain` says more than one about `NoUninit`.
#[diagnostic::do_not_recommend]
impl<T: NoUninit + AnyBitPattern + Send + Sync> Plain for T {
    #[inline(always)]
    fn dtype() -> DType {
        of_number::<T>().unwrap_or_else(|| DType::Plain(PlainType::of::<T>()))
    }
}

/// A Rust type that every backend can reduce, too: one of the fourteen numbers of [`DType`].
///
/// Sealed. An element has no padding and every bit pattern is a valid value, so received bytes are always valid elements.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no number that ranks can combine",
    label = "not one of f32, f64, f16, bf16, F8E4M3, F8E5M2, i8 to i64 and u8 to u64",
    note = "usize and isize have another size on other machines: use u64 or i64"
)]
pub trait Element: Plain + Reducible + fmt::Debug + PartialEq {
    /// This type as a value.
    const DTYPE: DType;
}

/// What a buffer's elements are: [`Plain`] data, or [`AnyElement`] where only a [`DType`] value says it. Sealed.
#[diagnostic::on_unimplemented(
    message = "ranks cannot exchange elements of type `{Self}`",
    label = "not plain data",
    note = "a struct without padding: derive `bytemuck::Pod` and `bytemuck::Zeroable` for it"
)]
pub trait ElementType: sealed::Sealed + 'static {}

/// What a reduction combines: an [`Element`], or [`AnyElement`], whose type is compared at run time. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no number that ranks can combine",
    label = "not one of f32, f64, f16, bf16, F8E4M3, F8E5M2, i8 to i64 and u8 to u64",
    note = "usize and isize have another size on other machines: use u64 or i64",
    note = "a struct: reduce its fields in buffers of their own"
)]
pub trait Reducible: ElementType {}

/// A number that has bits to combine: i8 to i64 and u8 to u64. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no integer whose bits ranks can combine",
    label = "not one of i8 to i64 and u8 to u64",
    note = "bool: reduce `u8::from(flag)` by `phalanx::Logical`"
)]
pub trait Integer: Element {}

/// A number of 4 or 8 bytes, which ranks can change in one step: [`Epoch::fetch_and_op`](crate::Epoch::fetch_and_op). Sealed.
#[diagnostic::on_unimplemented(
    message = "ranks cannot change a `{Self}` in one step",
    label = "not one of i32, u32, i64, u64, f32 and f64"
)]
pub trait AtomicElement: Element {}

/// Stands for the elements of a buffer whose type is known at run time only, such as
/// [`AnySource`](crate::AnySource).
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum AnyElement {}

impl sealed::Sealed for AnyElement {}
impl ElementType for AnyElement {}
impl Reducible for AnyElement {}

#[diagnostic::do_not_recommend]
impl<T: NoUninit + AnyBitPattern + Send + Sync> sealed::Sealed for T {}
#[diagnostic::do_not_recommend]
impl<T: NoUninit + AnyBitPattern + Send + Sync> ElementType for T {}

macro_rules! elements {
    ($($ty:ty => $dtype:ident),* $(,)?) => {
        /// The number type that `T` is. The compiler knows the answer.
        #[inline(always)]
        fn of_number<T: 'static>() -> Option<DType> {
            let own = TypeId::of::<T>();
            $(if own == TypeId::of::<$ty>() {
                return Some(DType::$dtype);
            })*
            None
        }

        $(
            impl Reducible for $ty {}
            impl Element for $ty {
                const DTYPE: DType = DType::$dtype;
            }
            const _: () = assert!(size_of::<$ty>() == DType::$dtype.size());
        )*
    };
}

elements! {
    f32 => F32, f64 => F64, f16 => F16, bf16 => Bf16, F8E4M3 => F8E4M3, F8E5M2 => F8E5M2,
    i8 => I8, u8 => U8, i16 => I16, u16 => U16, i32 => I32, u32 => U32, i64 => I64, u64 => U64,
}

macro_rules! integers {
    ($($ty:ty)*) => { $(impl Integer for $ty {})* };
}
integers! { i8 u8 i16 u16 i32 u32 i64 u64 }

macro_rules! atomics {
    ($($ty:ty)*) => { $(impl AtomicElement for $ty {})* };
}
atomics! { i32 u32 i64 u64 f32 f64 }

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
            $crate::DType::Plain(_) => unreachable!("plain data is moved only: `api` has checked it"),
        }
    };
}
pub(crate) use with_element;
