//! A launch's parameters, and the memory that they point to.

use super::number::Number;
use crate::base::call::Code;
use crate::base::pointers::In;
use crate::cuda::memory::Range;
use crate::kernels::launch::parameter;
use std::ffi::c_void;
use std::marker::PhantomData;

/// Threads of a block.
pub const THREADS: usize = 256;

/// The parameters of a launch, and its grid.
pub struct Parameters {
    given: In<*mut c_void>,
    pub blocks: usize,
}

impl Parameters {
    pub fn new(given: In<*mut c_void>, blocks: usize) -> Parameters {
        Parameters { given, blocks }
    }

    /// A parameter that is passed by value. A kernel has at least so many.
    pub fn value<V: Copy>(&self, index: usize) -> Result<V, Code> {
        parameter(self.given.slice(index + 1)[index])
    }

    /// A buffer of so many elements.
    pub fn buffer<T: Number>(&self, index: usize, len: usize) -> Result<Buffer<T>, Code> {
        Ok(Buffer::given(self.value(index)?, len))
    }
}

/// A buffer of a kernel.
#[derive(Clone, Copy)]
pub struct Buffer<T> {
    range: Range,
    of: PhantomData<T>,
}

impl<T: Number> Buffer<T> {
    /// So many elements at an address, checked as far as they can be at the call.
    pub fn given(address: u64, len: usize) -> Buffer<T> {
        Buffer { range: Range::given("a kernel", "a buffer", address, len * T::SIZE), of: PhantomData }
    }

    /// Nothing of it is written but what `change` changes.
    pub fn change(&self, change: impl FnOnce(&mut [T])) {
        let mut numbers = self.read();
        change(&mut numbers);
        self.write(&numbers);
    }

    /// A part of it, or of what is behind it if its length is not known.
    pub fn part(&self, start: usize, len: usize) -> Buffer<T> {
        Buffer { range: self.range.part(start * T::SIZE, len * T::SIZE), of: PhantomData }
    }

    pub fn read(&self) -> Vec<T> {
        self.range.read().chunks_exact(T::SIZE).map(T::read).collect()
    }

    pub fn write(&self, numbers: &[T]) {
        let mut bytes = vec![0; numbers.len() * T::SIZE];
        bytes.chunks_exact_mut(T::SIZE).zip(numbers).for_each(|(bytes, number)| number.write(bytes));
        self.range.write(&bytes);
    }
}

/// The sum of what the threads of a block have added up, each of every 256th number.
pub fn sum_of_columns(numbers: impl Iterator<Item = f64>) -> f64 {
    let mut sums = vec![0.0; THREADS];
    numbers.enumerate().for_each(|(at, number)| sums[at % THREADS] += number);
    block_sum(sums)
}

/// The sum over a block's threads, in the block's order.
pub fn block_sum(mut sums: Vec<f64>) -> f64 {
    let mut half = THREADS / 2;
    while half > 0 {
        for thread in 0..half {
            sums[thread] += sums[thread + half];
        }
        half /= 2;
    }
    sums[0]
}
