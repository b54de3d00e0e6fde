//! Where a test's buffers lie.

use phalanx::{Comm, HostBuffer};
use phalanx_testkit::Number;

/// Which memory the ranks use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// Vectors.
    Private,
    /// Vectors, one element behind an aligned address.
    Odd,
    /// Memory from `Comm::alloc`.
    Shared,
    /// Even ranks send from shared memory into private memory, odd ranks the other way round.
    Mixed,
}

impl Memory {
    pub const ALL: [Memory; 4] = [Memory::Private, Memory::Odd, Memory::Shared, Memory::Mixed];

    /// A buffer for `len` elements to send from.
    pub fn send<T: Number>(self, comm: &Comm, len: usize) -> phalanx::Result<Buffer<T>> {
        self.buffer(comm, len, comm.rank().is_multiple_of(2))
    }

    /// A buffer for `len` elements to receive into, or to work on in place.
    pub fn recv<T: Number>(self, comm: &Comm, len: usize) -> phalanx::Result<Buffer<T>> {
        self.buffer(comm, len, comm.rank() % 2 == 1)
    }

    fn buffer<T: Number>(self, comm: &Comm, len: usize, shared: bool) -> phalanx::Result<Buffer<T>> {
        Ok(match self {
            Memory::Shared => Buffer::Shared(comm.alloc(len)?),
            Memory::Mixed if shared => Buffer::Shared(comm.alloc(len)?),
            Memory::Private | Memory::Mixed => Buffer::Private(vec![T::from_small(0); len], 0),
            Memory::Odd => Buffer::Private(vec![T::from_small(0); len + 1], 1),
        })
    }
}

/// Memory of one kind or the other.
pub enum Buffer<T: Number> {
    Private(Vec<T>, usize),
    Shared(HostBuffer<T>),
}

impl<T: Number> Buffer<T> {
    /// All of it.
    pub fn all(&mut self) -> &mut [T] {
        match self {
            Buffer::Private(vec, offset) => &mut vec[*offset..],
            Buffer::Shared(buffer) => &mut buffer[..],
        }
    }
}

/// Overwrites a buffer with what no correct result consists of.
pub fn poison<T: Number>(buffer: &mut [T], salt: usize) {
    buffer.fill(T::from_pattern(0xa5a5_a5a5_a5a5_a5a5 ^ salt as u64));
}

/// An error if something was written to a poisoned buffer.
pub fn still_poisoned<T: Number>(buffer: &[T], salt: usize) -> Result<(), String> {
    let poison = T::from_pattern(0xa5a5_a5a5_a5a5_a5a5 ^ salt as u64).bits();
    match buffer.iter().position(|value| value.bits() != poison) {
        None => Ok(()),
        Some(index) => Err(format!("element {index} was overwritten with {:?}", buffer[index])),
    }
}
