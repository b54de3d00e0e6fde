//! [`Scratch`]: GPU memory for what an operation packs, sends and receives on one stream.

#[cfg(feature = "cuda")]
use super::cuda::Current;
use super::loan::Loan;
use super::stream::{GpuStream, Stream};
use super::{Source, Target};
#[cfg(feature = "rccl")]
use crate::gpu::hip;
#[cfg(feature = "cuda")]
use crate::gpu::pitched::copy_on_cuda;
#[cfg(feature = "rccl")]
use crate::gpu::pitched::copy_on_hip;
use crate::gpu::pitched::{Packing, PitchedRows};
use crate::types::dtype::{DType, Plain};
use crate::types::error::Result;
#[cfg(feature = "cuda")]
use cudarc::driver::{CudaSlice, DevicePtr};
use std::marker::PhantomData;
#[cfg(feature = "cuda")]
use std::mem::ManuallyDrop;

/// GPU memory that is used on one stream only: allocated there, and freed behind all work on it.
pub(crate) struct Scratch {
    memory: Memory,
    start: u64,
    bytes: usize,
}

enum Memory {
    #[cfg(feature = "cuda")]
    Cuda(ManuallyDrop<CudaSlice<u8>>),
    #[cfg(feature = "rccl")]
    Hip(hip::Slice<u8>),
}

#[cfg(feature = "cuda")]
impl Drop for Scratch {
    fn drop(&mut self) {
        #[cfg_attr(not(feature = "rccl"), expect(irrefutable_let_patterns))]
        if let Memory::Cuda(slice) = &mut self.memory {
            let _current = Current::enter(slice.stream().context());
            // SAFETY: it is not used again.
            unsafe { ManuallyDrop::drop(slice) };
        }
    }
}

impl Scratch {
    /// Memory of so many bytes, uninitialised.
    pub fn new(stream: &GpuStream, bytes: usize) -> Result<Scratch> {
        let len = bytes.max(1);
        match stream {
            #[cfg(feature = "cuda")]
            GpuStream::Cuda(stream) => {
                let _current = Current::enter(stream.context())?;
                // SAFETY: bytes, which are written before they are read.
                let slice = unsafe { stream.alloc::<u8>(len) }?;
                let start = slice.device_ptr(stream).0;
                Ok(Scratch { memory: Memory::Cuda(ManuallyDrop::new(slice)), start, bytes })
            }
            #[cfg(feature = "rccl")]
            GpuStream::Hip(stream) => {
                let slice = stream.allocate::<u8>(len)?;
                let start = slice.on(stream)?.as_ptr() as u64;
                Ok(Scratch { memory: Memory::Hip(slice), start, bytes })
            }
        }
    }

    /// Copies rows of an array to the memory from byte `at` on, or back, on the stream.
    ///
    /// # Safety
    /// The rows are memory of the stream's GPU, lent to this stream.
    pub unsafe fn copy(&self, rows: &PitchedRows, array: u64, at: usize, packing: Packing) -> Result<()> {
        assert!(at + rows.total() <= self.bytes, "{rows:?} at {at} of {} bytes", self.bytes);
        let addresses = (array, self.start + at as u64);
        match &self.memory {
            #[cfg(feature = "cuda")]
            Memory::Cuda(slice) => {
                let stream = slice.stream();
                let _current = Current::enter(stream.context())?;
                // SAFETY: the caller's contract; the memory lives until the stream's work is complete.
                unsafe { copy_on_cuda(stream, rows, addresses, packing) }
            }
            #[cfg(feature = "rccl")]
            // SAFETY: as above.
            Memory::Hip(slice) => unsafe { copy_on_hip(slice.stream(), rows, addresses, packing) },
        }
    }

    /// The `count` elements from byte `at` on, for one operation on the stream. Elements that one operation writes are in no other part that
    /// it uses.
    pub fn part<T: Plain>(&self, at: usize, count: usize) -> ScratchPart<'_, T> {
        assert!(
            at + count * size_of::<T>() <= self.bytes,
            "{count} elements at {at} of {} bytes",
            self.bytes
        );
        ScratchPart { start: self.start + at as u64, count, memory: PhantomData }
    }
}

/// Some elements of a [`Scratch`], as a buffer of operations on its stream.
pub(crate) struct ScratchPart<'s, T> {
    start: u64,
    count: usize,
    memory: PhantomData<&'s [T]>,
}

// SAFETY: GPU memory that is valid until the stream's work is complete. What an operation reads was packed or received on the stream
// before.
unsafe impl<T: Plain> Source for ScratchPart<'_, T> {
    type Elem = T;

    fn dtype(&self) -> DType {
        T::dtype()
    }

    fn len(&self) -> usize {
        self.count
    }

    fn lend<'a>(&'a self, _stream: &'a Stream) -> Result<Loan<'a>> {
        Ok(Loan::device(self.start))
    }
}

// SAFETY: as above; `Scratch::part` says that nothing else uses the elements meanwhile.
unsafe impl<T: Plain> Target for ScratchPart<'_, T> {
    fn lend_mut<'a>(&'a mut self, _stream: &'a Stream) -> Result<Loan<'a>> {
        Ok(Loan::device(self.start))
    }
}
