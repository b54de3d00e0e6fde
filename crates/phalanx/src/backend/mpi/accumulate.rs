//! Conversion of elements to accumulators, and back.

use crate::reduce::arithmetic::{Avg, Combine, Number, PreMulSum, Prod, Sum};
use crate::reduce::bits::{Or, Truth};
use crate::types::dtype::{DType, with_element};
use crate::types::op::{ReductionCode, element_from_bits};
use phalanx_sys::mpi::Handle;
use std::ffi::{c_int, c_void};

/// How the elements of one type are accumulated.
#[derive(Clone, Copy)]
pub(crate) struct Accumulated {
    /// Bytes of an accumulator.
    pub size: usize,
    /// `target[i]` is the accumulator of `source[i]`, multiplied by the factor (its bits) if the reduction
    /// has one.
    ///
    /// # Safety
    /// `count` elements can be read, and as many accumulators written; they do not overlap.
    pub prepare: unsafe fn(target: *mut u8, source: *const u8, factor: u64, count: usize),
    /// `target[i]` is the result of the accumulator `source[i]`.
    ///
    /// # Safety
    /// `count` accumulators can be read, and as many elements written; they do not overlap, or are the same
    /// and of the same size.
    pub finish: unsafe fn(target: *mut u8, source: *const u8, ranks: usize, count: usize),
}

impl Accumulated {
    /// For one type and reduction that accumulates.
    pub fn new(dtype: DType, code: ReductionCode) -> Accumulated {
        with_element!(dtype, T => match code {
            ReductionCode::Prod => of::<T, Prod>(),
            ReductionCode::Avg => of::<T, Avg>(),
            ReductionCode::PreMulSum => of::<T, PreMulSum>(),
            _ => of::<T, Sum>(),
        })
    }

    /// For operations on the truth of integers of this size.
    pub fn of_truth(size: usize) -> Accumulated {
        match size {
            1 => of::<u8, Truth<Or>>(),
            2 => of::<u16, Truth<Or>>(),
            4 => of::<u32, Truth<Or>>(),
            _ => of::<u64, Truth<Or>>(),
        }
    }
}

fn of<T: Number, C: Combine<T>>() -> Accumulated {
    Accumulated { size: size_of::<C::Acc>(), prepare: prepare::<T, C>, finish: finish::<T, C> }
}

unsafe fn prepare<T: Number, C: Combine<T>>(target: *mut u8, source: *const u8, factor: u64, count: usize) {
    let factor = C::widen(element_from_bits::<T>(factor));
    let (target, source) = (target.cast::<C::Acc>(), source.cast::<T>());
    for i in 0..count {
        // SAFETY: the caller's contract; a caller's raw memory may be unaligned.
        unsafe {
            let x = source.add(i).read_unaligned();
            target.add(i).write_unaligned(C::prepare(C::widen(x), factor));
        }
    }
}

unsafe fn finish<T: Number, C: Combine<T>>(target: *mut u8, source: *const u8, ranks: usize, count: usize) {
    let (target, source) = (target.cast::<T>(), source.cast::<C::Acc>());
    for i in 0..count {
        // SAFETY: the caller's contract.
        unsafe { target.add(i).write_unaligned(C::finish(source.add(i).read_unaligned(), ranks)) };
    }
}

/// The sum of 128-bit integers, for MPI.
pub(crate) unsafe extern "C" fn add_i128(
    input: *mut c_void,
    inout: *mut c_void,
    len: *mut c_int,
    _: *mut Handle,
) {
    let (input, inout) = (input.cast::<i128>(), inout.cast::<i128>());
    // SAFETY: MPI gives `len` elements of the type that was made for them, which it may not align.
    unsafe {
        for i in 0..*len as usize {
            let sum = input.add(i).read_unaligned().wrapping_add(inout.add(i).read_unaligned());
            inout.add(i).write_unaligned(sum);
        }
    }
}
