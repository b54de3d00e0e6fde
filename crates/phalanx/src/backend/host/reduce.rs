//! The arithmetic: many arrays combined into one, in rank order, and copies.
//!
//! A block of 64 elements at a time is taken from each source into accumulators that stay in registers,
//! and stored once. The same code is compiled for several instruction sets and chosen at run time.

use crate::dtype::{DType, Element, F8E4M3, F8E5M2, bf16, f16, with_element};
use crate::op::{ReductionCode, element_from_bits};

/// Elements per block.
const BLOCK: usize = 64;

/// An element type, and the type in which it is accumulated.
trait Number: Element {
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
trait Arithmetic: Copy + Default {
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
    F8E4M3, |x: F8E4M3| E4M3[usize::from(x.to_bits())], F8E4M3::from_f32;
    F8E5M2, |x: F8E5M2| E5M2[usize::from(x.to_bits())], F8E5M2::from_f32;
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

// The conversions of `half` ask at each call what the processor can do; these are plain arithmetic that
// the compiler vectorises. The tests compare them with `half`'s for every value.

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

/// A reduction as a type, so that the loops are compiled for each.
trait Combine<T: Number> {
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
        struct $name;
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

struct Avg;
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

struct PreMulSum;
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

/// `targets[..][i] = sources[0][i] ∘ sources[1][i] ∘ …` for `count` elements.
type Kernel =
    unsafe fn(targets: &[*mut u8], sources: &[*const u8], factors: &[u64], count: usize, streaming: bool);

/// The kernel for one type and operation.
#[derive(Clone, Copy)]
pub(crate) struct Reducer(Kernel);

impl Reducer {
    #[inline]
    pub fn new(dtype: DType, code: ReductionCode) -> Reducer {
        fn of<T: Number>(code: ReductionCode) -> Kernel {
            match code {
                ReductionCode::Sum => dispatch::<T, Sum>,
                ReductionCode::Prod => dispatch::<T, Prod>,
                ReductionCode::Min => dispatch::<T, Min>,
                ReductionCode::Max => dispatch::<T, Max>,
                ReductionCode::Avg => dispatch::<T, Avg>,
                ReductionCode::PreMulSum => dispatch::<T, PreMulSum>,
            }
        }
        Reducer(with_element!(dtype, T => of::<T>(code)))
    }

    /// Combines `count` elements of each source, in the order of the sources, and stores the result in each
    /// target. `factors[r]` are the bits of the factor of `sources[r]`. `streaming` stores past the caches.
    ///
    /// # Safety
    /// Every source has `count` elements of the reducer's type and every target room for them; a target
    /// overlaps no other target and no source, or is exactly one of the sources.
    #[inline]
    pub unsafe fn run(
        self,
        targets: &[*mut u8],
        sources: &[*const u8],
        factors: &[u64],
        count: usize,
        streaming: bool,
    ) {
        // SAFETY: the caller's contract.
        unsafe { (self.0)(targets, sources, factors, count, streaming) }
    }
}

/// Chooses the instruction set; detection is cached by the standard library.
unsafe fn dispatch<T: Number, C: Combine<T>>(
    targets: &[*mut u8],
    sources: &[*const u8],
    factors: &[u64],
    count: usize,
    streaming: bool,
) {
    // SAFETY: the caller's contract, and the instruction set was detected.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        {
            if count >= BLOCK && is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw") {
                return avx512::<T, C>(targets, sources, factors, count, streaming);
            }
            if count >= BLOCK && is_x86_feature_detected!("avx2") {
                return avx2::<T, C>(targets, sources, factors, count, streaming);
            }
        }
        body::<T, C>(targets, sources, factors, count, streaming);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn avx512<T: Number, C: Combine<T>>(
    targets: &[*mut u8],
    sources: &[*const u8],
    factors: &[u64],
    count: usize,
    streaming: bool,
) {
    // SAFETY: the caller's contract.
    unsafe { body::<T, C>(targets, sources, factors, count, streaming) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2<T: Number, C: Combine<T>>(
    targets: &[*mut u8],
    sources: &[*const u8],
    factors: &[u64],
    count: usize,
    streaming: bool,
) {
    // SAFETY: the caller's contract.
    unsafe { body::<T, C>(targets, sources, factors, count, streaming) }
}

/// # Safety
/// As for [`Reducer::run`].
#[inline(always)]
unsafe fn body<T: Number, C: Combine<T>>(
    targets: &[*mut u8],
    sources: &[*const u8],
    factors: &[u64],
    count: usize,
    streaming: bool,
) {
    let ranks = sources.len();
    let factor = |rank: usize| C::widen(element_from_bits::<T>(factors.get(rank).copied().unwrap_or(0)));
    let first = factor(0);
    let blocks = count / BLOCK;
    for block in 0..blocks {
        let offset = block * BLOCK;
        let mut acc = [C::Acc::default(); BLOCK];
        // SAFETY: the block is in bounds of the source; elements may be unaligned in a caller's raw memory.
        let x = unsafe { sources[0].cast::<T>().add(offset).cast::<[T; BLOCK]>().read_unaligned() };
        for i in 0..BLOCK {
            acc[i] = C::prepare(C::widen(x[i]), first);
        }
        for (rank, source) in sources.iter().enumerate().skip(1) {
            // SAFETY: as above.
            let x = unsafe { source.cast::<T>().add(offset).cast::<[T; BLOCK]>().read_unaligned() };
            let factor = factor(rank);
            for i in 0..BLOCK {
                acc[i] = C::combine(acc[i], C::prepare(C::widen(x[i]), factor));
            }
        }
        let result: [T; BLOCK] = std::array::from_fn(|i| C::finish(acc[i], ranks));
        // SAFETY: the block is in bounds of the targets.
        unsafe {
            for target in targets {
                let target = target.cast::<T>().add(offset);
                if streaming {
                    copy_streaming(target.cast(), result.as_ptr().cast(), size_of_val(&result));
                } else {
                    target.cast::<[T; BLOCK]>().write_unaligned(result);
                }
            }
        }
    }
    for offset in blocks * BLOCK..count {
        // SAFETY: in bounds of every source and of the target.
        unsafe {
            let x = sources[0].cast::<T>().add(offset).read_unaligned();
            let mut acc = C::prepare(C::widen(x), first);
            for (rank, source) in sources.iter().enumerate().skip(1) {
                let x = source.cast::<T>().add(offset).read_unaligned();
                acc = C::combine(acc, C::prepare(C::widen(x), factor(rank)));
            }
            for target in targets {
                target.cast::<T>().add(offset).write_unaligned(C::finish(acc, ranks));
            }
        }
    }
    if streaming {
        streaming_fence();
    }
}

/// Copies bytes; `streaming` stores past the caches.
///
/// # Safety
/// `len` bytes are readable at `source` and writable at `target`, and do not overlap.
#[inline]
pub(super) unsafe fn copy(target: *mut u8, source: *const u8, len: usize, streaming: bool) {
    // SAFETY: the caller's contract.
    unsafe {
        if streaming {
            copy_streaming(target, source, len);
            streaming_fence();
        } else {
            std::ptr::copy_nonoverlapping(source, target, len);
        }
    }
}

/// Copies up to 40 bytes.
///
/// # Safety
/// As for [`copy`].
#[inline(always)]
pub(super) unsafe fn copy_small(target: *mut u8, source: *const u8, len: usize) {
    // SAFETY: the caller's contract. The frequent lengths need no call.
    unsafe {
        match len {
            4 => target.cast::<[u8; 4]>().write(source.cast::<[u8; 4]>().read()),
            8 => target.cast::<[u8; 8]>().write(source.cast::<[u8; 8]>().read()),
            _ => std::ptr::copy_nonoverlapping(source, target, len),
        }
    }
}

/// Copies with stores that do not go through the caches. Follow with [`streaming_fence`].
///
/// # Safety
/// As for [`copy`].
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn copy_streaming(target: *mut u8, source: *const u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    // SAFETY: the head brings the target to a line's start, the body keeps in bounds. SSE2 is part of
    // x86-64.
    unsafe {
        let head = target.align_offset(64).min(len);
        std::ptr::copy_nonoverlapping(source, target, head);
        let lines = (len - head) / 64;
        for line in 0..lines {
            let at = head + line * 64;
            for part in 0..4 {
                let value = _mm_loadu_si128(source.add(at + part * 16).cast::<__m128i>());
                _mm_stream_si128(target.add(at + part * 16).cast::<__m128i>(), value);
            }
        }
        let done = head + lines * 64;
        std::ptr::copy_nonoverlapping(source.add(done), target.add(done), len - done);
    }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
unsafe fn copy_streaming(target: *mut u8, source: *const u8, len: usize) {
    // SAFETY: the caller's contract.
    unsafe { std::ptr::copy_nonoverlapping(source, target, len) }
}

/// Orders streaming stores before the flags that announce them.
#[inline(always)]
fn streaming_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_agree_with_half_for_every_value() {
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
            if x.is_nan() {
                assert!(h.is_nan() && b.is_nan(), "{bits:#x}");
            } else {
                assert_eq!(h.to_bits(), f16::from_f32_const(x).to_bits(), "f16 of {bits:#x}");
                assert_eq!(b.to_bits(), bf16::from_f32_const(x).to_bits(), "bf16 of {bits:#x}");
            }
        }
    }

    #[test]
    fn streaming_copies_everything_at_any_alignment() {
        let source: Vec<u8> = (0..1000).map(|i| (i * 7) as u8).collect();
        for start in 0..70 {
            for len in [0, 1, 63, 64, 65, 200, 640] {
                let mut target = vec![0u8; 1000];
                // SAFETY: start + len is in bounds of both.
                unsafe { copy(target.as_mut_ptr().add(start), source.as_ptr().add(3), len, true) };
                assert_eq!(target[start..start + len], source[3..3 + len]);
                assert!(target[start + len..].iter().all(|byte| *byte == 0));
            }
        }
    }

    #[test]
    fn nan_wins_and_integers_wrap() {
        let run = |code, a: &[f32], b: &[f32]| {
            let mut out = vec![0f32; a.len()];
            let sources = [a.as_ptr().cast(), b.as_ptr().cast()];
            // SAFETY: all arrays have the same length.
            unsafe {
                Reducer::new(DType::F32, code).run(&[out.as_mut_ptr().cast()], &sources, &[], a.len(), false)
            };
            out
        };
        let (nan, one) = (vec![f32::NAN; 65], vec![1.0; 65]);
        for code in [ReductionCode::Min, ReductionCode::Max, ReductionCode::Sum] {
            assert!(run(code, &nan, &one).iter().all(|x| x.is_nan()));
            assert!(run(code, &one, &nan).iter().all(|x| x.is_nan()));
        }
        let mut out = [0i8];
        let x = [100i8];
        let sources = [x.as_ptr().cast(), x.as_ptr().cast()];
        // SAFETY: one element each.
        unsafe {
            Reducer::new(DType::I8, ReductionCode::Sum).run(
                &[out.as_mut_ptr().cast()],
                &sources,
                &[],
                1,
                false,
            )
        };
        assert_eq!(out[0], -56);
        // SAFETY: one element each.
        unsafe {
            Reducer::new(DType::I8, ReductionCode::Avg).run(
                &[out.as_mut_ptr().cast()],
                &sources,
                &[],
                1,
                false,
            )
        };
        assert_eq!(out[0], 100);
    }
}
