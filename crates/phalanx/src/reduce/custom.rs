//! Reductions by a closure of the caller's.

use crate::types::op::CombineInOrder;
use std::marker::PhantomData;

/// Elements that are combined together, so that the compiler can use vector instructions for a simple closure.
const BLOCK: usize = 64;

/// The longest element that is combined in blocks: a block then takes 4 KiB of the stack.
const SHORT: usize = 64;

/// A closure that combines two elements of type `T`.
pub(crate) struct Custom<T, F>(F, PhantomData<fn(&T)>);

impl<T: Copy, F: Fn(&T, &T) -> T> Custom<T, F> {
    pub fn new(combine: F) -> Custom<T, F> {
        Custom(combine, PhantomData)
    }

    /// Combines elements in blocks of `N` after the first `done`; answers how many are done.
    ///
    /// # Safety
    /// As for [`CombineInOrder::combine`].
    #[inline(always)]
    unsafe fn blocks<const N: usize>(
        &self,
        targets: [&[*mut u8]; 2],
        sources: &[*const u8],
        mut done: usize,
        count: usize,
    ) -> usize {
        while count - done >= N {
            // SAFETY: the block is in bounds of the source; elements may be unaligned in raw memory.
            let block =
                |source: *const u8| unsafe { source.cast::<T>().add(done).cast::<[T; N]>().read_unaligned() };
            let mut result = block(sources[0]);
            for source in &sources[1..] {
                let next = block(*source);
                for (result, next) in result.iter_mut().zip(&next) {
                    *result = (self.0)(result, next);
                }
            }
            for target in targets.into_iter().flatten() {
                // SAFETY: the block is in bounds of the target.
                unsafe { target.cast::<T>().add(done).cast::<[T; N]>().write_unaligned(result) };
            }
            done += N;
        }
        done
    }

    /// # Safety
    /// As for [`CombineInOrder::combine`], on a processor with AVX2.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    unsafe fn blocks_with_avx2(
        &self,
        targets: [&[*mut u8]; 2],
        sources: &[*const u8],
        count: usize,
    ) -> usize {
        // SAFETY: the caller's contract.
        unsafe { self.blocks::<BLOCK>(targets, sources, 0, count) }
    }

    /// Combines whole blocks; answers how many elements are done.
    ///
    /// # Safety
    /// As for [`CombineInOrder::combine`].
    unsafe fn long(&self, targets: [&[*mut u8]; 2], sources: &[*const u8], count: usize) -> usize {
        // SAFETY: the caller's contract, and the instruction set was detected.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx2") {
                return self.blocks_with_avx2(targets, sources, count);
            }
            self.blocks::<BLOCK>(targets, sources, 0, count)
        }
    }
}

impl<T: Copy, F: Fn(&T, &T) -> T> CombineInOrder for Custom<T, F> {
    unsafe fn combine(&self, targets: [&[*mut u8]; 2], sources: &[*const u8], count: usize) {
        // SAFETY: the caller's contract.
        unsafe {
            let done = if size_of::<T>() <= SHORT { self.long(targets, sources, count) } else { 0 };
            self.blocks::<1>(targets, sources, done, count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_combined_in_order_however_many_and_long_they_are() {
        for count in [0, 1, BLOCK - 1, BLOCK, 3 * BLOCK + 5] {
            let of_rank = |rank: usize| (0..count).map(|i| [i as u32, rank as u32]).collect::<Vec<_>>();
            let [first, second, third] = [0, 1, 2].map(of_rank);
            let mut targets = [first.clone(), vec![[0; 2]; count]];
            let sources = [targets[0].as_ptr().cast(), second.as_ptr().cast(), third.as_ptr().cast()];
            let [one, other] = targets.each_mut().map(|target| target.as_mut_ptr().cast::<u8>());
            // Not commutative: the digits of the ranks, in order.
            let digits = Custom::new(|a: &[u32; 2], b: &[u32; 2]| [a[0], a[1] * 10 + b[1]]);
            // SAFETY: all have as many elements; the first target is the first source.
            unsafe { digits.combine([&[one], &[other]], &sources, count) };
            let expected: Vec<_> = (0..count).map(|i| [i as u32, 12]).collect();
            assert_eq!(targets, [expected.clone(), expected], "{count}");
        }
        let (mut target, long) = ([[0u8; 1000]; 3], [[7u8; 1000]; 3]);
        let sum = Custom::new(|a: &[u8; 1000], b: &[u8; 1000]| std::array::from_fn(|i| a[i] + b[i]));
        let source = long.as_ptr().cast();
        // SAFETY: three elements each.
        unsafe { sum.combine([&[target.as_mut_ptr().cast()], &[]], &[source, source], 3) };
        assert_eq!(target, [[14; 1000]; 3]);
    }
}
