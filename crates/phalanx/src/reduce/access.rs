//! Accesses to memory that other ranks access at the same time.
//!
//! None of them is a data race in Rust's sense: a few elements move as atomic words, whose size depends on the type alone, and longer ranges
//! by an instruction that the compiler does not look into. A reader may see any mixture of the words of concurrent writes.

use crate::contract::AtomicOp;
use crate::reduce::arithmetic::{Arithmetic, Number};
use crate::types::dtype::{AtomicElement, DType, with_element};
use crate::types::op::{ReductionCode, element_bits, element_from_bits};
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// Words that move one by one, also where there is a faster instruction: it takes some tens of cycles to begin.
const FEW_WORDS: usize = 16;

/// Whether there is an instruction that copies bytes.
const COPIES: bool = cfg!(all(target_arch = "x86_64", not(miri)));

/// Bytes of the words as which elements of so many bytes move. Elements follow each other from an aligned address on, so the words are aligned.
const fn word_len(size: usize) -> usize {
    match size.trailing_zeros() {
        0 => 1,
        1 => 2,
        2 => 4,
        _ => 8,
    }
}

/// Runs `$body` with `$Word` bound to the atomic type of words of so many bytes and `$Bits` to the integer.
macro_rules! with_word {
    ($len:expr, $Word:ident, $Bits:ident => $body:expr) => {
        match $len {
            1 => {
                type $Word = AtomicU8;
                type $Bits = u8;
                $body
            }
            2 => {
                type $Word = AtomicU16;
                type $Bits = u16;
                $body
            }
            4 => {
                type $Word = AtomicU32;
                type $Bits = u32;
                $body
            }
            _ => {
                type $Word = AtomicU64;
                type $Bits = u64;
                $body
            }
        }
    };
}

/// Writes `count` elements of `size` bytes, this rank's own, to shared memory.
///
/// # Safety
/// The elements are at `source`, which no other rank writes, and `target` has room for them, at a multiple of their size from an address
/// that is aligned to 64 bytes.
#[inline(always)]
pub(crate) unsafe fn write(target: *mut u8, source: *const u8, count: usize, size: usize) {
    let words = count * (size / word_len(size));
    if COPIES && words > FEW_WORDS {
        // SAFETY: the caller's contract.
        return unsafe { copy_bytes(target, source, count * size) };
    }
    with_word!(word_len(size), Word, Bits => for word in 0..words {
        // SAFETY: in bounds, says the caller. The word is aligned: its size divides that of an element. All concurrent accesses are
        // atomic and of this size, or of the instruction of `copy_bytes`.
        unsafe {
            let value = source.cast::<Bits>().add(word).read_unaligned();
            (*target.cast::<Word>().add(word)).store(value, Ordering::Relaxed);
        }
    });
}

/// Reads `count` elements of `size` bytes of shared memory.
///
/// # Safety
/// As for [`write`], with source and target exchanged.
#[inline(always)]
pub(crate) unsafe fn read(target: *mut u8, source: *const u8, count: usize, size: usize) {
    let words = count * (size / word_len(size));
    if COPIES && words > FEW_WORDS {
        // SAFETY: the caller's contract.
        return unsafe { copy_bytes(target, source, count * size) };
    }
    with_word!(word_len(size), Word, Bits => for word in 0..words {
        // SAFETY: as in `write`.
        unsafe {
            let value = (*source.cast::<Word>().add(word)).load(Ordering::Relaxed);
            target.cast::<Bits>().add(word).write_unaligned(value);
        }
    });
}

/// # Safety
/// So many bytes are at `source`, and room for them at `target`.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline(always)]
unsafe fn copy_bytes(target: *mut u8, source: *const u8, bytes: usize) {
    // SAFETY: the caller's contract; the direction flag is clear, by the calling convention.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") bytes => _,
            inout("rdi") target => _,
            inout("rsi") source => _,
            options(nostack, preserves_flags)
        );
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
unsafe fn copy_bytes(_target: *mut u8, _source: *const u8, _bytes: usize) {
    unreachable!("elements move as words")
}

/// Runs `$body` with `$word` bound to the atomic word of an element of 4 or 8 bytes, and `$Bits` to the integer.
macro_rules! on_word {
    ($place:expr, $T:ty, $word:ident, $Bits:ident => $body:expr) => {
        if const { size_of::<$T>() == 4 } {
            type $Bits = u32;
            // SAFETY: the caller's contract; all concurrent accesses are atomic and of this size, or of `copy_bytes`.
            let $word = unsafe { &*$place.cast::<AtomicU32>() };
            $body
        } else {
            type $Bits = u64;
            // SAFETY: as above.
            let $word = unsafe { &*$place.cast::<AtomicU64>() };
            $body
        }
    };
}

/// Changes an element in one step; what it was.
///
/// # Safety
/// The element is there, aligned to its size.
#[allow(clippy::useless_conversion, reason = "of 4-byte words it is one")]
#[inline(always)]
pub(crate) unsafe fn fetch_and_op<T: AtomicElement>(place: *mut T, value: T, op: AtomicOp) -> T {
    let bits = element_bits(value);
    let is_integer = const { !matches!(T::DTYPE, DType::F32 | DType::F64) };
    let old = on_word!(place, T, word, Bits => {
        let bits = bits as Bits;
        u64::from(match op {
            AtomicOp::Load => word.load(Ordering::Acquire),
            AtomicOp::Replace => word.swap(bits, Ordering::AcqRel),
            AtomicOp::Combine(ReductionCode::Sum) if is_integer => word.fetch_add(bits, Ordering::AcqRel),
            AtomicOp::Combine(ReductionCode::BitAnd) => word.fetch_and(bits, Ordering::AcqRel),
            AtomicOp::Combine(ReductionCode::BitOr) => word.fetch_or(bits, Ordering::AcqRel),
            AtomicOp::Combine(ReductionCode::BitXor) => word.fetch_xor(bits, Ordering::AcqRel),
            AtomicOp::Combine(code) => {
                let combined = |old: Bits| {
                    let new = combine(code, element_from_bits::<T>(u64::from(old)), value);
                    Some(element_bits(new) as Bits)
                };
                let changed = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, combined);
                changed.expect("each value has a new one")
            }
        })
    });
    element_from_bits(old)
}

/// Sets an element if it has these bits, in one step; what it was.
///
/// # Safety
/// As for [`fetch_and_op`].
#[allow(clippy::useless_conversion, reason = "of 4-byte words it is one")]
#[inline(always)]
pub(crate) unsafe fn compare_and_swap<T: AtomicElement>(place: *mut T, expected: T, value: T) -> T {
    let (expected, value) = (element_bits(expected), element_bits(value));
    let old = on_word!(place, T, word, Bits => {
        let swapped =
            word.compare_exchange(expected as Bits, value as Bits, Ordering::AcqRel, Ordering::Acquire);
        u64::from(swapped.unwrap_or_else(|old| old))
    });
    element_from_bits(old)
}

/// Moves `count` elements of `size` bytes, each `stride`-th of the source, to places with another stride. `moved` moves elements that follow
/// each other: [`write()`], [`read`].
///
/// # Safety
/// As for `moved`, of each element.
#[inline(always)]
pub(crate) unsafe fn with_strides(
    count: usize,
    (target, target_stride): (*mut u8, usize),
    (source, source_stride): (*const u8, usize),
    size: usize,
    moved: unsafe fn(*mut u8, *const u8, usize, usize),
) {
    if target_stride == 1 && source_stride == 1 {
        // SAFETY: the caller's contract.
        return unsafe { moved(target, source, count, size) };
    }
    for index in 0..count {
        let target = target.wrapping_add(index * target_stride * size);
        // SAFETY: as above.
        unsafe { moved(target, source.wrapping_add(index * source_stride * size), 1, size) };
    }
}

/// Runs `$body` with `$T` bound to the Rust type of elements that change in one step.
macro_rules! with_atomic {
    ($dtype:expr, $T:ident => $body:expr) => {
        with_atomic!(@ $dtype, $T => $body; I32 i32, U32 u32, I64 i64, U64 u64, F32 f32, F64 f64)
    };
    (@ $dtype:expr, $T:ident => $body:expr; $($name:ident $Element:ty),*) => {
        match $dtype {
            $(DType::$name => {
                type $T = $Element;
                $body
            })*
            other => unreachable!("{other} has no operation in one step"),
        }
    };
}

/// [`fetch_and_op`] of an element whose type is known at run time, with its bits.
///
/// # Safety
/// As for [`fetch_and_op`]; the type is an [`AtomicElement`].
pub(crate) unsafe fn fetch_and_op_of(dtype: DType, place: *mut u8, value: u64, op: AtomicOp) -> u64 {
    with_atomic!(dtype, T => {
        // SAFETY: the caller's contract.
        element_bits(unsafe { fetch_and_op(place.cast::<T>(), element_from_bits(value), op) })
    })
}

/// [`compare_and_swap`] of an element whose type is known at run time, with its bits.
///
/// # Safety
/// As for [`fetch_and_op_of`].
pub(crate) unsafe fn compare_and_swap_of(dtype: DType, place: *mut u8, expected: u64, value: u64) -> u64 {
    with_atomic!(dtype, T => {
        let [expected, value] = [expected, value].map(element_from_bits::<T>);
        // SAFETY: the caller's contract.
        element_bits(unsafe { compare_and_swap(place.cast::<T>(), expected, value) })
    })
}

/// [`fetch_and_op`] of contiguous elements, one after the other, whose old values nobody needs.
///
/// # Safety
/// As for [`fetch_and_op_of`]; so many elements are at `source`, aligned or not.
pub(crate) unsafe fn accumulate_of(
    dtype: DType,
    place: *mut u8,
    source: *const u8,
    count: usize,
    op: AtomicOp,
) {
    with_atomic!(dtype, T => for index in 0..count {
        // SAFETY: the caller's contract.
        unsafe {
            let value = source.cast::<T>().add(index).read_unaligned();
            fetch_and_op(place.cast::<T>().add(index), value, op);
        }
    });
}

/// The sum, product, minimum or maximum of two numbers.
fn combine<T: AtomicElement>(code: ReductionCode, old: T, value: T) -> T {
    fn of<N: Number>(code: ReductionCode, old: N, value: N) -> N {
        let (old, value) = (old.acc(), value.acc());
        N::from_acc(match code {
            ReductionCode::Sum => old.add(value),
            ReductionCode::Prod => old.mul(value),
            ReductionCode::Min => old.min(value),
            ReductionCode::Max => old.max(value),
            code => unreachable!("{} is no operation on single elements", code.name()),
        })
    }
    with_element!(T::DTYPE, N => {
        let [old, value] = [old, value].map(|value| element_from_bits::<N>(element_bits(value)));
        element_from_bits(element_bits(of(code, old, value)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C, align(64))]
    struct Aligned<T>([T; 64]);

    fn moves<T: Copy + PartialEq + std::fmt::Debug>(value: impl Fn(u8) -> T) {
        for (len, at) in [(0, 3), (1, 0), (1, 5), (2, 1), (17, 1), (40, 7), (64, 0)] {
            let own: Vec<T> = (0..len).map(|i| value(i as u8 + 1)).collect();
            let mut shared = Aligned([value(0); 64]);
            let mut back = vec![value(0); len];
            // SAFETY: so many elements, inside the arrays.
            unsafe {
                let place = shared.0.as_mut_ptr().add(at).cast();
                write(place, own.as_ptr().cast(), len, size_of::<T>());
                read(back.as_mut_ptr().cast(), place, len, size_of::<T>());
            }
            assert_eq!(back, own);
            let rest = shared.0[..at].iter().chain(&shared.0[at + len..]);
            assert!(rest.into_iter().all(|other| *other == value(0)), "{len} elements at {at}");
        }
    }

    #[test]
    fn elements_of_every_size_move() {
        moves(|i| i);
        moves(u16::from);
        moves(f32::from);
        moves(f64::from);
        moves(|i| [i; 3]);
        moves(|i| [u16::from(i); 5]);
        moves(|i| [u64::from(i); 3]);
        moves(u128::from);
    }

    #[test]
    fn elements_change_in_one_step() {
        use ReductionCode::*;
        fn all<T: AtomicElement>(start: T, value: T, expected: [(ReductionCode, T); 4]) {
            for (code, result) in expected {
                let mut place = start;
                // SAFETY: an element of this function's own.
                let old = unsafe { fetch_and_op(&raw mut place, value, AtomicOp::Combine(code)) };
                assert_eq!((old, place), (start, result), "{}", code.name());
            }
            let mut place = start;
            // SAFETY: as above.
            unsafe {
                assert_eq!(fetch_and_op(&raw mut place, value, AtomicOp::Load), start);
                assert_eq!(fetch_and_op(&raw mut place, value, AtomicOp::Replace), start);
                assert_eq!(compare_and_swap(&raw mut place, start, start), value);
                assert_eq!(compare_and_swap(&raw mut place, value, start), value);
            }
            assert_eq!(place, start);
        }
        all(7i32, -3, [(Sum, 4), (Prod, -21), (Min, -3), (Max, 7)]);
        all(u64::MAX, 2, [(Sum, 1), (Prod, u64::MAX - 1), (Min, 2), (Max, u64::MAX)]);
        all(0.5f32, -2.0, [(Sum, -1.5), (Prod, -1.0), (Min, -2.0), (Max, 0.5)]);
        all(0.5f64, -2.0, [(Sum, -1.5), (Prod, -1.0), (Min, -2.0), (Max, 0.5)]);
        all(0b1100u32, 0b1010, [(BitAnd, 0b1000), (BitOr, 0b1110), (BitXor, 0b0110), (Sum, 22)]);
    }
}
