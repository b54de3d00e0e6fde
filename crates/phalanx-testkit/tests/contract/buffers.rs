//! Where a test's buffers lie.

use phalanx::cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr};
use phalanx::{Comm, HostBuffer};
use phalanx_testkit::Number;
use std::sync::Arc;

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
    /// Vectors, whose content is on the communicator's GPU during the call ([`OnGpu`]).
    Gpu,
}

impl Memory {
    /// Those of the host.
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
            Memory::Private | Memory::Mixed | Memory::Gpu => Buffer::Private(vec![T::from_small(0); len], 0),
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

/// What is in host memory, on the communicator's GPU: a slice, or a part of one that begins behind an aligned
/// address.
pub struct OnGpu<T: Number> {
    slice: CudaSlice<T>,
    offset: usize,
}

impl<T: Number> OnGpu<T> {
    /// A copy of it; an odd number is that of a part.
    pub fn copy(comm: &Comm, content: &[T], number: usize) -> Result<OnGpu<T>, String> {
        let (stream, offset) = (comm.cuda_stream().map_err(|e| e.to_string())?, number % 2);
        let padded: Vec<T> = content.first().into_iter().take(offset).chain(content).copied().collect();
        let offset = offset.min(content.len());
        Ok(OnGpu { slice: stream.clone_htod(&padded).map_err(|e| e.to_string())?, offset })
    }

    pub fn view(&self) -> CudaView<'_, T> {
        self.slice.slice(self.offset..)
    }

    pub fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.slice.slice_mut(self.offset..)
    }

    /// Brings it back, in the order of the slice's stream.
    pub fn read(&self, content: &mut [T]) -> Result<(), String> {
        self.slice.stream().memcpy_dtoh(&self.view(), content).map_err(|e| e.to_string())?;
        self.slice.stream().synchronize().map_err(|e| e.to_string())
    }
}

/// Memory by its address, in a communicator's own: its GPU's, or the host's.
#[derive(Clone)]
pub struct Room(Option<Arc<CudaStream>>);

impl Room {
    pub fn of(comm: &Comm) -> Room {
        Room(comm.cuda_stream().ok().cloned())
    }

    pub fn is_host(&self) -> bool {
        self.0.is_none()
    }

    pub fn buffer<T: Number>(&self, mut content: Vec<T>) -> Addressed<T> {
        let on_gpu = self.0.as_ref().map(|stream| {
            let slice = stream.clone_htod(&content).expect("GPU memory");
            // Whoever uses the address is on another stream.
            stream.synchronize().expect("a copy to GPU memory");
            slice
        });
        let on_host = content.as_mut_ptr() as u64;
        let at = on_gpu.as_ref().map_or(on_host, |slice| slice.device_ptr(slice.stream()).0);
        Addressed { host: content, on_gpu, at }
    }
}

/// A buffer in a [`Room`].
pub struct Addressed<T: Number> {
    host: Vec<T>,
    /// Where the address is, if it is not the host's.
    on_gpu: Option<CudaSlice<T>>,
    at: u64,
}

impl<T: Number> Addressed<T> {
    pub fn at(&self) -> u64 {
        self.at
    }

    /// What is there, when nobody is to write to it any more.
    pub fn read(&mut self) -> &[T] {
        if let Some(slice) = &self.on_gpu {
            self.host = slice.stream().clone_dtoh(slice).expect("a copy of GPU memory");
        }
        &self.host
    }

    pub fn write(&mut self, fill: impl FnOnce(&mut [T])) {
        fill(&mut self.host);
        if let Some(slice) = &mut self.on_gpu {
            let stream = slice.stream().clone();
            stream.memcpy_htod(&self.host, slice).expect("GPU memory");
            stream.synchronize().expect("a copy to GPU memory");
        }
    }
}
