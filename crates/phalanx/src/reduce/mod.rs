//! Reductions and copies of host memory: combines several arrays into one, in rank order.
//!
//! The kernel works on blocks of 64 elements (then 16, 4 and 1 for the rest). It combines a block of all
//! sources in registers and stores it once. It is compiled for several instruction sets, and one is chosen at
//! run time.

pub(crate) mod access;
pub(crate) mod arithmetic;
pub(crate) mod bits;
pub(crate) mod custom;
mod locate;

use crate::contract::Call;
use crate::os::float_mode::in_standard_float_mode;
use crate::os::{LINE, prefetch};
use crate::reduce::arithmetic::{Avg, Combine, Max, Min, Number, PreMulSum, Prod, Sum};
use crate::reduce::bits::{And, BitElement, Or, Truth, Xor};
use crate::types::dtype::{DType, with_element};
use crate::types::op::{CombineInOrder, ReductionCode, element_from_bits};

/// Elements per block, and per smaller block for the rest.
const BLOCK: usize = 64;
const SHORT: usize = 16;
const SHORTER: usize = 4;

/// Prefetch distance in other ranks' arrays, in bytes.
const AHEAD: usize = 1 << 10;

/// The arrays in which the result is stored: each gets all of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Targets<'a> {
    /// Targets of normal stores.
    pub through: &'a [*mut u8],
    /// Targets of streaming stores, which bypass the caches.
    pub past: &'a [*mut u8],
    /// This rank's index among the sources, if it also stores in other ranks' arrays. Then the lines of other
    /// ranks' sources and targets are prefetched. The hardware does not prefetch for stores; for own arrays
    /// it is not worth it.
    pub pusher: usize,
}

/// Value of `pusher` if all targets are this rank's own.
const NO_PUSHER: usize = usize::MAX;

impl<'a> Targets<'a> {
    /// Targets in this rank's own arrays, with normal or `streaming` stores.
    #[inline(always)]
    pub fn new(targets: &'a [*mut u8], streaming: bool) -> Targets<'a> {
        let (through, past) = targets.split_at(if streaming { 0 } else { targets.len() });
        Targets { through, past, pusher: NO_PUSHER }
    }
}

/// `targets[..][i] = sources[0][i] ∘ sources[1][i] ∘ …` for `count` elements.
type Kernel = unsafe fn(targets: Targets<'_>, sources: &[*const u8], factors: &[u64], count: usize);

/// What combines elements: the kernel for one type and operation, or a closure of the caller's.
#[derive(Clone, Copy)]
pub(crate) enum Reducer<'a> {
    Kernel(Kernel),
    Custom(&'a dyn CombineInOrder),
}

impl<'a> Reducer<'a> {
    /// The reduction of a call.
    #[inline]
    pub fn of(call: &Call<'a>) -> Reducer<'a> {
        match call.custom {
            None => Reducer::new(call.dtype, call.reduction.code),
            Some(custom) => Reducer::Custom(custom),
        }
    }

    #[inline]
    pub fn new(dtype: DType, code: ReductionCode) -> Reducer<'static> {
        fn of<T: Number>(code: ReductionCode) -> Kernel {
            match code {
                ReductionCode::Sum => dispatch::<T, Sum>,
                ReductionCode::Prod => dispatch::<T, Prod>,
                ReductionCode::Min => dispatch::<T, Min>,
                ReductionCode::Max => dispatch::<T, Max>,
                ReductionCode::Avg => dispatch::<T, Avg>,
                ReductionCode::PreMulSum => dispatch::<T, PreMulSum>,
                _ => unreachable!("bits have kernels by size, and the others a combination"),
            }
        }
        Reducer::Kernel(match (code, dtype.size()) {
            (code, _) if code.is_of_gpus() => with_element!(dtype, T => of::<T>(code)),
            (code, 1) => of_bits::<u8>(code),
            (code, 2) => of_bits::<u16>(code),
            (code, 4) => of_bits::<u32>(code),
            (code, _) => of_bits::<u64>(code),
        })
    }

    /// Combines `count` elements of each source, in the order of the sources, and stores the result in each
    /// target. `factors[r]` are the bits of the factor of `sources[r]`. The mode of the thread's floating-point unit does not count.
    ///
    /// # Safety
    /// Every source has `count` elements of the reducer's type and every target room for them; a target
    /// overlaps no other target and no source, or is exactly one of the sources. There is a source.
    #[inline]
    pub unsafe fn run(self, targets: Targets<'_>, sources: &[*const u8], factors: &[u64], count: usize) {
        // SAFETY: the caller's contract.
        in_standard_float_mode(|| unsafe {
            match self {
                Reducer::Kernel(kernel) => kernel(targets, sources, factors, count),
                Reducer::Custom(custom) => custom.combine([targets.through, targets.past], sources, count),
            }
        })
    }
}

/// Divides floats by a number of ranks, as an average does.
///
/// # Safety
/// `values` has `count` elements of the type, `F32` or `F64`, which nothing else uses.
pub(crate) unsafe fn divide(dtype: DType, values: *mut u8, count: usize, ranks: usize) {
    in_standard_float_mode(|| match dtype {
        // SAFETY: the caller's contract; an element may lie anywhere.
        DType::F32 => unsafe {
            for place in (0..count).map(|i| values.cast::<f32>().add(i)) {
                place.write_unaligned(place.read_unaligned() / ranks as f32);
            }
        },
        // SAFETY: as above.
        DType::F64 => unsafe {
            for place in (0..count).map(|i| values.cast::<f64>().add(i)) {
                place.write_unaligned(place.read_unaligned() / ranks as f64);
            }
        },
        other => unreachable!("no averages of {other} are made of sums"),
    });
}

/// The kernel of an operation on bits, which does not ask for signs.
fn of_bits<T: BitElement>(code: ReductionCode) -> Kernel {
    match code {
        ReductionCode::BitAnd => dispatch::<T, And>,
        ReductionCode::BitOr => dispatch::<T, Or>,
        ReductionCode::BitXor => dispatch::<T, Xor>,
        ReductionCode::LogicalAnd => dispatch::<T, Truth<And>>,
        ReductionCode::LogicalOr => dispatch::<T, Truth<Or>>,
        ReductionCode::LogicalXor => dispatch::<T, Truth<Xor>>,
        _ => unreachable!("no operation on bits"),
    }
}

/// Chooses the variant: a short reduction into one target takes a direct path, without the set-up of the
/// general one.
unsafe fn dispatch<T: Number, C: Combine<T>>(
    targets: Targets<'_>,
    sources: &[*const u8],
    factors: &[u64],
    count: usize,
) {
    // SAFETY: the caller's contract.
    unsafe {
        match *targets.through {
            [target] if count < BLOCK && targets.past.is_empty() => {
                // Written out, so that the compiler sees that there is nothing else to do.
                rest::<T, C>(Targets::new(&[target], false), sources, factors, 0, count);
            }
            _ => many::<T, C>(targets, sources, factors, count),
        }
    }
}

/// Combines any number of elements into any number of targets.
///
/// # Safety
/// As for [`Reducer::run`].
#[inline(never)]
unsafe fn many<T: Number, C: Combine<T>>(
    targets: Targets<'_>,
    sources: &[*const u8],
    factors: &[u64],
    count: usize,
) {
    // SAFETY: the caller's contract.
    unsafe {
        let done = if count < BLOCK { 0 } else { long::<T, C>(targets, sources, factors, count) };
        rest::<T, C>(targets, sources, factors, done, count);
        if !targets.past.is_empty() {
            streaming_fence();
        }
    }
}

/// Combines the elements after the first `done`, with baseline instructions.
///
/// # Safety
/// As for [`Reducer::run`].
#[inline(always)]
unsafe fn rest<T: Number, C: Combine<T>>(
    targets: Targets<'_>,
    sources: &[*const u8],
    factors: &[u64],
    done: usize,
    count: usize,
) {
    // SAFETY: the caller's contract.
    unsafe {
        let done = blocks::<T, C, SHORT, 0>(targets, sources, factors, done, count);
        let done = blocks::<T, C, SHORTER, 0>(targets, sources, factors, done, count);
        blocks::<T, C, 1, 0>(targets, sources, factors, done, count);
    }
}

/// Combines all whole blocks of 64 elements and returns the number of elements done. Chooses the instruction
/// set; the standard library caches the detection.
///
/// # Safety
/// As for [`Reducer::run`].
#[inline(always)]
unsafe fn long<T: Number, C: Combine<T>>(
    targets: Targets<'_>,
    sources: &[*const u8],
    factors: &[u64],
    count: usize,
) -> usize {
    // SAFETY: the caller's contract, and the instruction set was detected.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw") {
            return avx512::<T, C>(targets, sources, factors, count);
        }
        if is_x86_feature_detected!("avx2") {
            return avx2::<T, C>(targets, sources, factors, count);
        }
        // Processors of before 2014 do all of it in shorter blocks: the long ones would be a tenth of this library's code.
        0
    }
    // SAFETY: the caller's contract.
    #[cfg(not(target_arch = "x86_64"))]
    unsafe {
        blocks::<T, C, BLOCK, 16>(targets, sources, factors, 0, count)
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn avx512<T: Number, C: Combine<T>>(
    targets: Targets<'_>,
    sources: &[*const u8],
    factors: &[u64],
    count: usize,
) -> usize {
    // SAFETY: the caller's contract.
    unsafe { blocks::<T, C, BLOCK, 64>(targets, sources, factors, 0, count) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2<T: Number, C: Combine<T>>(
    targets: Targets<'_>,
    sources: &[*const u8],
    factors: &[u64],
    count: usize,
) -> usize {
    // SAFETY: the caller's contract.
    unsafe { blocks::<T, C, BLOCK, 32>(targets, sources, factors, 0, count) }
}

/// Combines all whole blocks of `N` elements after the first `done` and returns the number of elements done.
/// `STORE` is the register width of streaming stores in bytes; 0 if a block is not a multiple of a cache
/// line.
///
/// # Safety
/// As for [`Reducer::run`].
#[inline(always)]
unsafe fn blocks<T: Number, C: Combine<T>, const N: usize, const STORE: usize>(
    targets: Targets<'_>,
    sources: &[*const u8],
    factors: &[u64],
    mut done: usize,
    count: usize,
) -> usize {
    let ahead = AHEAD / size_of::<T>();
    while count - done >= N {
        if targets.pusher != NO_PUSHER && count - done >= ahead + N {
            let others = sources.iter().enumerate().filter(|(rank, _)| *rank != targets.pusher);
            others.for_each(|(_, source)| fetch::<T, N>(*source, done + ahead));
            targets.through.iter().skip(1).for_each(|target| fetch::<T, N>(*target, done + ahead));
        }
        // SAFETY: the caller's contract; the block lies in front of `count`.
        unsafe { block::<T, C, N, STORE>(targets, sources, factors, done) };
        done += N;
    }
    done
}

/// Prefetches the lines of the `N` elements at `at`.
#[inline(always)]
fn fetch<T, const N: usize>(array: *const u8, at: usize) {
    let start = array.cast::<T>().wrapping_add(at).cast::<u8>();
    for line in 0..size_of::<[T; N]>().div_ceil(LINE) {
        prefetch(start.wrapping_add(line * LINE));
    }
}

/// Combines the `N` elements at `at`.
///
/// # Safety
/// As for [`Reducer::run`].
#[inline(always)]
unsafe fn block<T: Number, C: Combine<T>, const N: usize, const STORE: usize>(
    targets: Targets<'_>,
    sources: &[*const u8],
    factors: &[u64],
    at: usize,
) {
    let ranks = sources.len();
    let factor = |rank: usize| C::widen(element_from_bits::<T>(factors.get(rank).copied().unwrap_or(0)));
    let first = factor(0);
    let mut acc = [C::Acc::default(); N];
    // SAFETY: the block is in bounds of the source; elements may be unaligned in a caller's raw memory.
    let x = unsafe { sources[0].cast::<T>().add(at).cast::<[T; N]>().read_unaligned() };
    for i in 0..N {
        acc[i] = C::prepare(C::widen(x[i]), first);
    }
    for (rank, source) in sources.iter().enumerate().skip(1) {
        // SAFETY: as above.
        let x = unsafe { source.cast::<T>().add(at).cast::<[T; N]>().read_unaligned() };
        let factor = factor(rank);
        for i in 0..N {
            acc[i] = C::combine(acc[i], C::prepare(C::widen(x[i]), factor));
        }
    }
    let result: [T; N] = std::array::from_fn(|i| C::finish(acc[i], ranks));
    // SAFETY: the block is in bounds of the targets.
    unsafe {
        for target in targets.through {
            target.cast::<T>().add(at).cast::<[T; N]>().write_unaligned(result);
        }
        for target in targets.past {
            let target = target.cast::<T>().add(at).cast::<[T; N]>();
            if STORE > 0 && target.addr().is_multiple_of(LINE) {
                stream::<STORE>(target.cast(), (&raw const result).cast(), size_of_val(&result));
            } else {
                target.write_unaligned(result);
            }
        }
    }
}

/// Stores a block with streaming stores of the given register width. Follow with [`streaming_fence`].
///
/// # Safety
/// `len` bytes, whole lines, are readable at `source` and writable at `target`, where a line starts; there
/// are registers of that width.
#[inline(always)]
unsafe fn stream<const WIDTH: usize>(target: *mut u8, source: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    for at in (0..len).step_by(WIDTH) {
        use std::arch::x86_64::*;
        // SAFETY: the caller's contract.
        unsafe {
            let (target, source) = (target.add(at), source.add(at));
            match WIDTH {
                64 => _mm512_stream_si512(target.cast(), source.cast::<__m512i>().read_unaligned()),
                _ => _mm256_stream_si256(target.cast(), source.cast::<__m256i>().read_unaligned()),
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the caller's contract.
    unsafe {
        std::ptr::copy_nonoverlapping(source, target, len);
    }
}

/// Copies bytes; with `streaming`, by stores that bypass the caches.
///
/// # Safety
/// `len` bytes are readable at `source` and writable at `target`, and do not overlap.
#[inline]
pub(crate) unsafe fn copy(target: *mut u8, source: *const u8, len: usize, streaming: bool) {
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

/// Copies up to 128 bytes: without a call, in pieces that may overlap each other.
///
/// # Safety
/// As for [`copy`].
#[inline(always)]
pub(crate) unsafe fn copy_small(target: *mut u8, source: *const u8, len: usize) {
    debug_assert!(len <= 128);
    // SAFETY: the caller's contract; the pieces cover the bytes and nothing else.
    unsafe {
        match len {
            0 => {}
            1..4 => (0..len).for_each(|at| copy_piece::<1>(target, source, at)),
            4..8 => [0, len - 4].into_iter().for_each(|at| copy_piece::<4>(target, source, at)),
            8..16 => [0, len - 8].into_iter().for_each(|at| copy_piece::<8>(target, source, at)),
            16..32 => [0, len - 16].into_iter().for_each(|at| copy_piece::<16>(target, source, at)),
            32..64 => {
                [0, 16, len - 32, len - 16].into_iter().for_each(|at| copy_piece::<16>(target, source, at))
            }
            _ => [0, 32, len - 64, len - 32].into_iter().for_each(|at| copy_piece::<32>(target, source, at)),
        }
    }
}

/// # Safety
/// As for [`copy`], of the `N` bytes at `at`.
#[inline(always)]
unsafe fn copy_piece<const N: usize>(target: *mut u8, source: *const u8, at: usize) {
    // SAFETY: the caller's contract; arrays of bytes lie anywhere.
    unsafe { target.add(at).cast::<[u8; N]>().write(source.add(at).cast::<[u8; N]>().read()) }
}

/// Copies with stores that do not go through the caches. Follow with [`streaming_fence`].
///
/// # Safety
/// As for [`copy`].
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn copy_streaming(target: *mut u8, source: *const u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    // SAFETY: the head brings `target` to a line's start, the body keeps in bounds. SSE2 is part of x86-64.
    unsafe {
        let edge = |at: usize, len: usize| {
            std::ptr::copy_nonoverlapping(source.add(at), target.add(at), len);
        };
        let head = target.align_offset(64).min(len);
        edge(0, head);
        let lines = (len - head) / 64;
        for line in 0..lines {
            for part in 0..4 {
                let at = head + line * 64 + part * 16;
                let value = _mm_loadu_si128(source.add(at).cast::<__m128i>());
                _mm_stream_si128(target.add(at).cast::<__m128i>(), value);
            }
        }
        let done = head + lines * 64;
        edge(done, len - done);
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
    fn every_element_is_combined_once_however_many_there_are() {
        for count in [0, 1, BLOCK - 1, BLOCK, AHEAD / 4 + BLOCK, AHEAD + BLOCK + SHORT + SHORTER + 1] {
            // How many are stored through the caches, and where in a line the targets begin.
            for (through, start) in [(0, 0), (1, 0), (2, 0), (0, 1), (1, 3)] {
                let [a, b] = [3u32, 5].map(|step| (0..count as u32).map(|i| i * step).collect::<Vec<_>>());
                let mut memory = [vec![0u32; count + 2 * LINE], vec![0u32; count + 2 * LINE]];
                // In place of the first, and apart.
                let [first, apart] = memory.each_mut().map(|memory| {
                    let start = memory.as_ptr().align_offset(LINE) + start;
                    &mut memory[start..start + count]
                });
                first.copy_from_slice(&a);
                let targets: [*mut u8; 2] = [first.as_mut_ptr().cast(), apart.as_mut_ptr().cast()];
                let sources = [targets[0].cast_const(), b.as_ptr().cast()];
                let (through, past) = targets.split_at(through);
                let reducer = Reducer::new(DType::U32, ReductionCode::Sum);
                // SAFETY: all have as many elements, and the first target is the first source.
                unsafe { reducer.run(Targets { through, past, pusher: 0 }, &sources, &[], count) };
                assert!((0..count as u32).map(|i| i * 8).eq(first.iter().copied()), "{count}");
                assert_eq!(first, apart, "{count}");
            }
        }
    }

    #[test]
    fn long_copies_are_whole_at_any_alignment() {
        let source: Vec<u8> = (0..10_000).map(|i| (i * 7 % 251) as u8).collect();
        for (start, len) in [(0, 0), (1, 1), (5, 4095), (64, 4096), (3, 4097), (17, 9000)] {
            for streaming in [false, true] {
                let mut target = vec![0u8; 10_000];
                // SAFETY: start + len is in bounds of both.
                unsafe { copy(target.as_mut_ptr().add(start), source.as_ptr(), len, streaming) };
                assert_eq!(target[start..start + len], source[..len]);
                assert!(target[..start].iter().chain(&target[start + len..]).all(|byte| *byte == 0));
            }
        }
    }

    #[test]
    fn small_copies_are_as_long_as_they_should() {
        let source: Vec<u8> = (1..=140).collect();
        for len in 0..=128 {
            let mut target = [0u8; 140];
            // SAFETY: in bounds of both.
            unsafe { copy_small(target.as_mut_ptr().add(3), source.as_ptr().add(1), len) };
            assert_eq!(target[3..3 + len], source[1..1 + len]);
            assert!(target[..3].iter().chain(&target[3 + len..]).all(|byte| *byte == 0));
        }
    }

    #[test]
    fn nan_wins_and_integers_wrap() {
        let run = |code, a: &[f32], b: &[f32]| {
            let mut out = vec![0f32; a.len()];
            let sources = [a.as_ptr().cast(), b.as_ptr().cast()];
            // SAFETY: all arrays have the same length.
            unsafe {
                let targets = [out.as_mut_ptr().cast()];
                Reducer::new(DType::F32, code).run(Targets::new(&targets, false), &sources, &[], a.len())
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
                Targets::new(&[out.as_mut_ptr().cast()], false),
                &sources,
                &[],
                1,
            )
        };
        assert_eq!(out[0], -56);
        // SAFETY: one element each.
        unsafe {
            Reducer::new(DType::I8, ReductionCode::Avg).run(
                Targets::new(&[out.as_mut_ptr().cast()], false),
                &sources,
                &[],
                1,
            )
        };
        assert_eq!(out[0], 100);
    }
}
