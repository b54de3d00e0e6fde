//! Reduction operations: [`ReduceOp`], [`PreMulSum`], and what all of them are for a backend.

use super::dtype::{Element, Reducible};
use std::fmt;
use std::marker::PhantomData;

/// A reduction operation. Contributions are combined element by element in rank order: `((r0 ∘ r1) ∘ r2) ∘
/// …`.
///
/// Because the order is fixed, a result is bit-identical on every rank and from run to run. Over UCX, `f32` and `f64` combine the ranks
/// of each host first, in an order that is fixed, too; [`Builder::reproducible`](crate::Builder::reproducible) keeps to the rank order.
///
/// - **Integers** wrap on overflow (two's complement). `Avg` sums in a wider integer, so the sum does
///   not overflow, and divides towards zero.
/// - **Floats**: `f32` and `f64` accumulate in their own precision; `f16`, `bf16` and both `fp8` types
///   accumulate in `f32` and are rounded (to nearest, ties to even) once, at the end. A sum beyond the
///   largest value becomes infinite in `f16`, `bf16` and `f32`; `fp8` results saturate at their largest
///   finite value, as CUDA's conversions do: ±57344 is also the `Min` or `Max` of infinities in `e5m2`.
/// - **NaN**: any NaN contribution makes `Sum`, `Prod`, `Avg`, `Min` and `Max` NaN. (NCCL's and MPI's
///   `Min` and `Max` leave this open.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum ReduceOp {
    /// The sum over the ranks.
    Sum = 0,
    /// The product over the ranks.
    Prod = 1,
    /// The smallest contribution.
    Min = 2,
    /// The largest contribution.
    Max = 3,
    /// The sum divided by the number of ranks.
    Avg = 4,
}

impl ReduceOp {
    /// Every operation.
    pub const ALL: [ReduceOp; 5] =
        [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max, ReduceOp::Avg];

    /// The short name: `sum`, `prod`, `min`, `max`, `avg`.
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Prod => "prod",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::Avg => "avg",
        }
    }

    /// The operation with this short name.
    pub fn from_name(name: &str) -> Option<ReduceOp> {
        ReduceOp::ALL.into_iter().find(|op| op.name() == name)
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Pre-multiplied sum: each rank's contribution is multiplied by that rank's factor, then summed.
///
/// The factors may differ between ranks. The product is taken in the type in which the sum is
/// accumulated (see [`ReduceOp`]); integers wrap. NCCL's `ncclRedOpCreatePreMulSum`.
///
/// ```
/// # use phalanx::{PreMulSum, Result};
/// # fn main() -> Result<()> {
/// let halves = phalanx::try_run(2, |comm| -> Result<f32> {
///     let mut x = [comm.rank() as f32 + 1.0];
///     comm.all_reduce_in_place(&mut x, PreMulSum(0.5))?;
///     Ok(x[0])
/// })?;
/// assert_eq!(halves, [1.5, 1.5]);
/// # Ok(())
/// # }
/// ```
#[doc(alias = "ncclRedOpCreatePreMulSum")]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PreMulSum<T>(pub T);

/// A combination of elements whose type it knows itself: a closure of the caller's, or of a type that is no number.
pub(crate) trait CombineInOrder {
    /// `targets[..][..][i] = sources[0][i] ∘ sources[1][i] ∘ …` for `count` elements.
    ///
    /// # Safety
    /// Every source has `count` elements of the type and every target room for them; a target overlaps no other target and no
    /// source, or is exactly one of the sources. There is a source.
    unsafe fn combine(&self, targets: [&[*mut u8]; 2], sources: &[*const u8], count: usize);
}

impl fmt::Debug for dyn CombineInOrder + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a combination")
    }
}

/// The argument of a reducing collective: a [`ReduceOp`], a [`PreMulSum`] of the buffers' type, an operation on integers
/// ([`Bitwise`](crate::Bitwise), [`Logical`](crate::Logical)), or [`Locate`](crate::Locate).
pub struct Reduction<T> {
    pub(crate) raw: RawReduction,
    /// The combination of elements that are no numbers.
    pub(crate) combine: Option<&'static (dyn CombineInOrder + Send + Sync)>,
    of: PhantomData<T>,
}

impl<T> Reduction<T> {
    /// An operation without a factor.
    pub(crate) fn of(code: ReductionCode) -> Reduction<T> {
        Reduction { raw: RawReduction { code, factor: 0 }, combine: None, of: PhantomData }
    }

    /// An operation on elements that are no numbers.
    pub(crate) fn by(
        code: ReductionCode,
        combine: &'static (dyn CombineInOrder + Send + Sync),
    ) -> Reduction<T> {
        Reduction { combine: Some(combine), ..Reduction::of(code) }
    }
}

// By hand, since a derived one would ask that of `T`.
impl<T> Clone for Reduction<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Reduction<T> {}

impl<T> fmt::Debug for Reduction<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.raw.fmt(f)
    }
}

impl<T> PartialEq for Reduction<T> {
    fn eq(&self, other: &Self) -> bool {
        self.raw == other.raw
    }
}

impl<T: Reducible> From<ReduceOp> for Reduction<T> {
    fn from(op: ReduceOp) -> Self {
        Reduction::of(RawReduction::from(op).code)
    }
}

impl<T: Element> From<PreMulSum<T>> for Reduction<T> {
    fn from(PreMulSum(factor): PreMulSum<T>) -> Self {
        let raw = RawReduction { code: ReductionCode::PreMulSum, factor: element_bits(factor) };
        Reduction { raw, ..Reduction::of(ReductionCode::PreMulSum) }
    }
}

/// A reduction without its type parameter: what a backend gets and what travels between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RawReduction {
    pub code: ReductionCode,
    /// Bits of the pre-multiplication factor, zero-extended; 0 for every other operation.
    pub factor: u64,
}

/// A reduction without its factor, as one byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum ReductionCode {
    Sum = 0,
    Prod,
    Min,
    Max,
    Avg,
    PreMulSum,
    BitAnd,
    BitOr,
    BitXor,
    LogicalAnd,
    LogicalOr,
    LogicalXor,
    /// With a combination, which `Call` holds; so are the next two.
    LocateMin,
    LocateMax,
    /// A closure of the caller's.
    Custom,
}

impl ReductionCode {
    const ALL: [(ReductionCode, &'static str); 15] = [
        (ReductionCode::Sum, "sum"),
        (ReductionCode::Prod, "prod"),
        (ReductionCode::Min, "min"),
        (ReductionCode::Max, "max"),
        (ReductionCode::Avg, "avg"),
        (ReductionCode::PreMulSum, "pre-mul-sum"),
        (ReductionCode::BitAnd, "bitwise and"),
        (ReductionCode::BitOr, "bitwise or"),
        (ReductionCode::BitXor, "bitwise xor"),
        (ReductionCode::LogicalAnd, "logical and"),
        (ReductionCode::LogicalOr, "logical or"),
        (ReductionCode::LogicalXor, "logical xor"),
        (ReductionCode::LocateMin, "locate min"),
        (ReductionCode::LocateMax, "locate max"),
        (ReductionCode::Custom, "custom"),
    ];

    pub fn name(self) -> &'static str {
        ReductionCode::ALL[self as usize].1
    }

    pub fn from_code(code: u8) -> Option<ReductionCode> {
        ReductionCode::ALL.get(usize::from(code)).map(|(code, _)| *code)
    }

    /// Whether the libraries of GPUs have it.
    #[inline(always)]
    pub fn is_of_gpus(self) -> bool {
        self as u8 <= ReductionCode::PreMulSum as u8
    }
}

impl From<ReduceOp> for RawReduction {
    fn from(op: ReduceOp) -> Self {
        let code = match op {
            ReduceOp::Sum => ReductionCode::Sum,
            ReduceOp::Prod => ReductionCode::Prod,
            ReduceOp::Min => ReductionCode::Min,
            ReduceOp::Max => ReductionCode::Max,
            ReduceOp::Avg => ReductionCode::Avg,
        };
        RawReduction { code, factor: 0 }
    }
}

/// The bytes of an element, zero-extended to 64 bits.
pub(crate) fn element_bits<T: Element>(value: T) -> u64 {
    let mut bytes = [0u8; 8];
    // SAFETY: an `Element` has at most 8 bytes and no padding; source and target are distinct.
    unsafe {
        std::ptr::copy_nonoverlapping(
            std::ptr::from_ref(&value).cast::<u8>(),
            bytes.as_mut_ptr(),
            size_of::<T>(),
        );
    }
    u64::from_ne_bytes(bytes)
}

/// The inverse of [`element_bits`].
pub(crate) fn element_from_bits<T: Element>(bits: u64) -> T {
    const { assert!(size_of::<T>() <= 8) };
    let bytes = bits.to_ne_bytes();
    // SAFETY: every bit pattern of an `Element` is a valid value, and 8 bytes hold one.
    unsafe { bytes.as_ptr().cast::<T>().read_unaligned() }
}
