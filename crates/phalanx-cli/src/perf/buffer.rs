//! The buffers that are communicated: private memory of the rank, or memory from the communicator.
//!
//! Each has a margin behind its end, to see whether an operation writes past it.

use super::data::Value;
use phalanx::{Comm, HostBuffer};
use std::hint::black_box;

/// Elements behind the end that nobody may write.
pub const MARGIN: usize = 64;

/// Bytes of a cache line, and the alignment of every buffer.
const LINE: usize = 64;

/// A rank's buffer.
pub struct Buffer<T: Value> {
    memory: Memory<T>,
    /// The first element whose address is a multiple of a cache line.
    start: usize,
}

enum Memory<T: Value> {
    Private(Vec<T>),
    Allocated(HostBuffer<T>),
}

impl<T: Value> Buffer<T> {
    /// A buffer for `len` elements and the margin.
    pub fn new(comm: &Comm, len: usize, from_comm: bool) -> phalanx::Result<Buffer<T>> {
        let len = len + MARGIN;
        if from_comm {
            return Ok(Buffer { memory: Memory::Allocated(comm.alloc(len)?), start: 0 });
        }
        // Aligned, or two ranks' small buffers could share a cache line and slow each other down.
        let memory = vec![T::from_i64(0); len + 2 * LINE / size_of::<T>()];
        let start = memory.as_ptr().align_offset(LINE);
        Ok(Buffer { memory: Memory::Private(memory), start })
    }

    /// The first `len` elements.
    pub fn first(&self, len: usize) -> &[T] {
        let all: &[T] = match &self.memory {
            Memory::Private(memory) => memory,
            Memory::Allocated(memory) => memory,
        };
        &all[self.start..self.start + len]
    }

    /// The first `len` elements, for writing.
    pub fn first_mut(&mut self, len: usize) -> &mut [T] {
        let all: &mut [T] = match &mut self.memory {
            Memory::Private(memory) => memory,
            Memory::Allocated(memory) => memory,
        };
        &mut all[self.start..self.start + len]
    }
}

/// Rewrites a word of every cache line, as an application does that has computed new data. Without
/// it, caches flatter everybody.
pub fn rewrite<T: Value>(buffer: &mut [T]) {
    for element in buffer.iter_mut().step_by(LINE / size_of::<T>()) {
        *element = black_box(*element);
    }
}
