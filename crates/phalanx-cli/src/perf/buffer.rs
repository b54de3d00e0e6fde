//! The buffers that are communicated: private memory of the rank, memory from the communicator, or a GPU's.
//!
//! Each has a margin behind its end, to see whether an operation writes past it.

use super::data::Value;
use super::device::DeviceMemory;
use super::plan::Registration;
use super::view::{View, ViewMut};
use phalanx::{Comm, HostBuffer, Result};
use std::hint::black_box;
use std::ops::Range;

/// Elements behind the end that nobody may write.
pub const MARGIN: usize = 64;

/// Bytes of a cache line, and the alignment of every buffer.
const LINE: usize = 64;

/// A rank's buffer.
pub struct Buffer<T: Value> {
    memory: Memory<T>,
    /// The first element whose address is a multiple of a cache line.
    start: usize,
    /// Elements, without the margin.
    len: usize,
}

enum Memory<T: Value> {
    Private(Vec<T>),
    Allocated(HostBuffer<T>),
    Device(DeviceMemory<T>),
}

impl<T: Value> Buffer<T> {
    /// A buffer for `len` elements and the margin: on the communicator's GPU if it has one. Collective.
    pub fn new(comm: &Comm, len: usize, registration: Registration) -> anyhow::Result<Buffer<T>> {
        let with_margin = len + MARGIN;
        if let Some(stream) = comm.cuda_stream() {
            let memory = Memory::Device(DeviceMemory::new(comm, stream, with_margin, registration)?);
            return Ok(Buffer { memory, start: 0, len });
        }
        if registration == Registration::Local {
            return Ok(Buffer { memory: Memory::Allocated(comm.alloc(with_margin)?), start: 0, len });
        }
        // Aligned, or two ranks' small buffers could share a cache line and slow each other down.
        let memory = vec![T::from_i64(0); with_margin + 2 * LINE / size_of::<T>()];
        let start = memory.as_ptr().align_offset(LINE);
        Ok(Buffer { memory: Memory::Private(memory), start, len })
    }

    /// Elements, without the margin.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Elements to read.
    pub fn view(&self, range: Range<usize>) -> View<'_, T> {
        let at = self.start + range.start..self.start + range.end;
        match &self.memory {
            Memory::Private(memory) => View::Host(&memory[at]),
            Memory::Allocated(memory) => View::Host(&memory[at]),
            Memory::Device(memory) => View::Device(memory.view(at)),
        }
    }

    /// Elements to write.
    pub fn view_mut(&mut self, range: Range<usize>) -> ViewMut<'_, T> {
        let at = self.start + range.start..self.start + range.end;
        match &mut self.memory {
            Memory::Private(memory) => ViewMut::Host(&mut memory[at]),
            Memory::Allocated(memory) => ViewMut::Host(&mut memory[at]),
            Memory::Device(memory) => ViewMut::Device(memory.view_mut(at)),
        }
    }

    /// Makes the first `len` elements 0.
    pub fn zero(&mut self, len: usize) -> Result<()> {
        match self.view_mut(0..len) {
            ViewMut::Host(elements) => elements.fill(T::from_i64(0)),
            ViewMut::Device(mut elements) => DeviceMemory::zero(&mut elements)?,
        }
        Ok(())
    }

    /// Rewrites a word of every cache line of the first `len` elements, as an application does that has computed
    /// new data. Without it, caches flatter everybody. (On a GPU iterations use different parts of the buffer.)
    pub fn rewrite(&mut self, len: usize) {
        if let ViewMut::Host(elements) = self.view_mut(0..len) {
            for element in elements.iter_mut().step_by(LINE / size_of::<T>()) {
                *element = black_box(*element);
            }
        }
    }

    /// Has the first `len` elements written, which may reach into the margin, piece by piece: `write` gets the index
    /// of a piece's first element, and the piece. What it leaves out is unspecified.
    pub fn write(&mut self, len: usize, mut write: impl FnMut(usize, &mut [T])) -> Result<()> {
        let at = self.start..self.start + len;
        match &mut self.memory {
            Memory::Private(memory) => write(0, &mut memory[at]),
            Memory::Allocated(memory) => write(0, &mut memory[at]),
            Memory::Device(memory) => memory.write(len, write)?,
        }
        Ok(())
    }

    /// Has the first `len` elements read, as [`write`](Buffer::write) has them written.
    pub fn read(&mut self, len: usize, mut read: impl FnMut(usize, &[T])) -> Result<()> {
        let at = self.start..self.start + len;
        match &mut self.memory {
            Memory::Private(memory) => read(0, &memory[at]),
            Memory::Allocated(memory) => read(0, &memory[at]),
            Memory::Device(memory) => memory.read(len, read)?,
        }
        Ok(())
    }
}
