//! The buffers that are communicated: private memory of the rank, memory of the communicator, or a GPU's.
//!
//! A margin behind the end of each shows whether an operation writes past it.

use super::device::DeviceMemory;
use super::plan::Registration;
use super::view::{Memory, MemoryMut, View, ViewMut};
use phalanx::{Comm, HostBuffer, Result};
use std::hint::black_box;
use std::ops::{Deref, DerefMut, Range};

/// Elements of the margin.
pub const MARGIN: usize = 64;

/// Bytes of a cache line, to which every buffer is aligned. Two ranks' small buffers in one line would slow
/// each other down.
const LINE: usize = 64;

/// Private memory that begins at a cache line.
pub struct AlignedBytes {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl AlignedBytes {
    /// This many bytes, all 0.
    pub fn zeroed(len: usize) -> AlignedBytes {
        let memory = vec![0; len + LINE];
        let start = memory.as_ptr().align_offset(LINE);
        AlignedBytes { memory, start, len }
    }
}

impl Deref for AlignedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.start..][..self.len]
    }
}

impl DerefMut for AlignedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..][..self.len]
    }
}

/// A rank's buffer.
pub struct Buffer {
    storage: Storage,
    /// Bytes of an element.
    element: usize,
    /// Elements, without the margin.
    len: usize,
}

enum Storage {
    Private(AlignedBytes),
    Allocated(HostBuffer<u8>),
    Device(DeviceMemory),
}

impl Buffer {
    /// A buffer for `len` elements of so many bytes, and the margin: on the communicator's GPU if it has one.
    /// Collective.
    pub fn new(
        comm: &Comm,
        len: usize,
        element: usize,
        registration: Registration,
    ) -> anyhow::Result<Buffer> {
        let bytes = (len + MARGIN) * element;
        if let Ok(stream) = comm.cuda_stream() {
            let storage = Storage::Device(DeviceMemory::new(comm, stream, bytes, registration)?);
            return Ok(Buffer { storage, element, len });
        }
        let storage = match registration {
            // Aligned to 64 bytes, as HostBuffer documents.
            Registration::Local => Storage::Allocated(comm.alloc(bytes)?),
            _ => Storage::Private(AlignedBytes::zeroed(bytes)),
        };
        Ok(Buffer { storage, element, len })
    }

    /// Elements, without the margin.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The bytes of these elements.
    fn bytes(&self, elements: Range<usize>) -> Range<usize> {
        elements.start * self.element..elements.end * self.element
    }

    /// Elements to read.
    pub fn view(&self, range: Range<usize>) -> View<'_> {
        let bytes = self.bytes(range);
        let memory = match &self.storage {
            Storage::Private(memory) => Memory::Host(&memory[bytes]),
            Storage::Allocated(memory) => Memory::Host(&memory[bytes]),
            Storage::Device(memory) => Memory::Device(memory.view(bytes)),
        };
        View { memory, element: self.element }
    }

    /// Elements to write.
    pub fn view_mut(&mut self, range: Range<usize>) -> ViewMut<'_> {
        let (bytes, element) = (self.bytes(range), self.element);
        let memory = match &mut self.storage {
            Storage::Private(memory) => MemoryMut::Host(&mut memory[bytes]),
            Storage::Allocated(memory) => MemoryMut::Host(&mut memory[bytes]),
            Storage::Device(memory) => MemoryMut::Device(memory.view_mut(bytes)),
        };
        ViewMut { memory, element }
    }

    /// Sets the first `len` elements to 0.
    pub fn zero(&mut self, len: usize) -> Result<()> {
        match self.view_mut(0..len).memory {
            MemoryMut::Host(bytes) => bytes.fill(0),
            MemoryMut::Device(mut bytes) => DeviceMemory::zero(&mut bytes)?,
        }
        Ok(())
    }

    /// Writes to every cache line of the first `len` elements, like an application that computes new data.
    /// Without it, operations would find their data in caches. (On a GPU, iterations use different parts of
    /// the buffer.)
    pub fn rewrite(&mut self, len: usize) {
        if let MemoryMut::Host(bytes) = self.view_mut(0..len).memory {
            for byte in bytes.iter_mut().step_by(LINE) {
                *byte = black_box(*byte);
            }
        }
    }

    /// Calls `write` with each piece of the first `len` elements, which may reach into the margin: the index
    /// of the piece's first element, and its bytes. Bytes that `write` does not set are unspecified.
    pub fn write(&mut self, len: usize, write: &mut dyn FnMut(usize, &mut [u8])) -> Result<()> {
        let (bytes, element) = (self.bytes(0..len), self.element);
        match &mut self.storage {
            Storage::Private(memory) => write(0, &mut memory[bytes]),
            Storage::Allocated(memory) => write(0, &mut memory[bytes]),
            Storage::Device(memory) => {
                memory.write(bytes.len(), &mut |start, piece| write(start / element, piece))?;
            }
        }
        Ok(())
    }

    /// Calls `read` with each piece of the first `len` elements, as [`write`](Buffer::write).
    pub fn read(&mut self, len: usize, read: &mut dyn FnMut(usize, &[u8])) -> Result<()> {
        let (bytes, element) = (self.bytes(0..len), self.element);
        match &mut self.storage {
            Storage::Private(memory) => read(0, &memory[bytes]),
            Storage::Allocated(memory) => read(0, &memory[bytes]),
            Storage::Device(memory) => {
                memory.read(bytes.len(), &mut |start, piece| read(start / element, piece))?;
            }
        }
        Ok(())
    }
}
