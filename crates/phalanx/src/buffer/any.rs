//! [`AnySource`] and [`AnyTarget`]: buffers whose element type is known at run time only.

use super::loan::Loan;
use super::stream::Stream;
use super::{Source, Target};
use crate::types::dtype::{AnyElement, DType, Plain};
use crate::types::error::{Result, UsageError};
#[cfg(feature = "cuda")]
use cudarc::driver::{CudaSlice, CudaView, CudaViewMut};
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

/// Elements to read, whose type is a value: for frameworks, whose tensors have their type at run time.
///
/// Every operation takes it, as any other [`Source`]; the types of the two buffers of a call are compared before anything starts, and
/// those of the ranks as always.
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// use phalanx::{AnySource, AnyTarget, DType, ReduceOp};
///
/// /// A tensor of some framework.
/// struct Tensor {
///     bytes: Vec<u8>,
///     dtype: DType,
/// }
///
/// phalanx::try_run(2, |comm| -> phalanx::Result<()> {
///     let mut tensor = Tensor { bytes: vec![1, 2], dtype: DType::U8 };
///     let mut elements = AnyTarget::from_bytes(&mut tensor.bytes, tensor.dtype)?;
///     comm.all_reduce_in_place(&mut elements, ReduceOp::Sum)?;
///     assert_eq!(tensor.bytes, [2, 4]);
///
///     let (sent, mut received) = ([comm.rank() as f32], [0.0f32; 2]);
///     comm.all_gather(&AnySource::from(&sent[..]), &mut AnyTarget::from(&mut received[..]))?;
///     assert_eq!(received, [0.0, 1.0]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
pub struct AnySource<'a> {
    memory: Memory<'a>,
    /// Where the elements begin in the memory.
    start: usize,
    len: usize,
    dtype: DType,
}

enum Memory<'a> {
    Host(*const u8, PhantomData<&'a [u8]>),
    #[cfg(feature = "cuda")]
    Cuda(CudaView<'a, u8>),
}

/// Elements to read and write, whose type is a value; the counterpart of [`AnySource`].
pub struct AnyTarget<'a> {
    memory: MemoryMut<'a>,
    /// Where the elements begin in the memory.
    start: usize,
    len: usize,
    dtype: DType,
}

enum MemoryMut<'a> {
    Host(*mut u8, PhantomData<&'a mut [u8]>),
    #[cfg(feature = "cuda")]
    Cuda(CudaViewMut<'a, u8>),
}

// SAFETY: a borrowed slice of elements, which are `Sync`; or cudarc's view.
unsafe impl Send for AnySource<'_> {}
// SAFETY: as above.
unsafe impl Sync for AnySource<'_> {}
// SAFETY: an exclusively borrowed slice of elements, which are `Send`; or cudarc's view.
unsafe impl Send for AnyTarget<'_> {}
// SAFETY: as above; a shared reference gives read access only.
unsafe impl Sync for AnyTarget<'_> {}

/// Moves the start of some elements, and shortens them.
fn narrow(start: &mut usize, len: &mut usize, range: Range<usize>) {
    assert!(range.start <= range.end && range.end <= *len, "elements {range:?} of {len}");
    (*start, *len) = (*start + range.start, range.len());
}

/// The number of elements in some bytes, if they are whole and aligned.
fn elements(bytes: &[u8], dtype: DType) -> Result<usize> {
    let refuse = |value: String, expected: String| {
        Err(UsageError::Setting { name: format!("bytes of {dtype}"), value, expected }.into())
    };
    // Plain data is copied, at any address.
    let (size, align) = (dtype.size(), if dtype.is_number() { dtype.size() } else { 1 });
    if !bytes.len().is_multiple_of(size) {
        return refuse(format!("{} bytes", bytes.len()), format!("a multiple of {size}"));
    }
    if !bytes.is_empty() && !bytes.as_ptr().addr().is_multiple_of(align) {
        return refuse(
            format!("at {:p}", bytes.as_ptr()),
            format!("an address that is a multiple of {align}"),
        );
    }
    Ok(bytes.len() / size)
}

impl<'a> AnySource<'a> {
    /// Some of the elements.
    ///
    /// # Panics
    /// If there are not as many.
    #[must_use]
    pub fn part(mut self, range: Range<usize>) -> AnySource<'a> {
        narrow(&mut self.start, &mut self.len, range);
        self
    }

    /// The elements in these bytes.
    ///
    /// # Errors
    /// [`UsageError::Setting`] if the bytes are no whole elements, or not aligned to one.
    pub fn from_bytes(bytes: &'a [u8], dtype: DType) -> Result<AnySource<'a>> {
        let len = elements(bytes, dtype)?;
        Ok(AnySource { memory: Memory::Host(bytes.as_ptr(), PhantomData), start: 0, len, dtype })
    }
}

impl<'a> AnyTarget<'a> {
    /// Some of the elements.
    ///
    /// # Panics
    /// If there are not as many.
    #[must_use]
    pub fn part(mut self, range: Range<usize>) -> AnyTarget<'a> {
        narrow(&mut self.start, &mut self.len, range);
        self
    }

    /// The elements in these bytes.
    ///
    /// # Errors
    /// As for [`AnySource::from_bytes`].
    pub fn from_bytes(bytes: &'a mut [u8], dtype: DType) -> Result<AnyTarget<'a>> {
        let len = elements(bytes, dtype)?;
        Ok(AnyTarget { memory: MemoryMut::Host(bytes.as_mut_ptr(), PhantomData), start: 0, len, dtype })
    }
}

impl<'a, T: Plain> From<&'a [T]> for AnySource<'a> {
    fn from(slice: &'a [T]) -> AnySource<'a> {
        let memory = Memory::Host(slice.as_ptr().cast(), PhantomData);
        AnySource { memory, start: 0, len: slice.len(), dtype: T::dtype() }
    }
}

impl<'a, T: Plain> From<&'a mut [T]> for AnyTarget<'a> {
    fn from(slice: &'a mut [T]) -> AnyTarget<'a> {
        let memory = MemoryMut::Host(slice.as_mut_ptr().cast(), PhantomData);
        AnyTarget { memory, start: 0, len: slice.len(), dtype: T::dtype() }
    }
}

#[cfg(feature = "cuda")]
impl<'a, T: Plain> From<CudaView<'a, T>> for AnySource<'a> {
    fn from(view: CudaView<'a, T>) -> AnySource<'a> {
        use cudarc::driver::DeviceSlice;
        let len = DeviceSlice::len(&view);
        // SAFETY: an element is so many bytes, of which each bit pattern is valid.
        let bytes = unsafe { view.transmute::<u8>(len * size_of::<T>()) };
        AnySource { memory: Memory::Cuda(bytes.expect("of the same size")), start: 0, len, dtype: T::dtype() }
    }
}

#[cfg(feature = "cuda")]
impl<'a, T: Plain> From<&'a CudaSlice<T>> for AnySource<'a> {
    fn from(slice: &'a CudaSlice<T>) -> AnySource<'a> {
        AnySource::from(slice.as_view())
    }
}

#[cfg(feature = "cuda")]
impl<'a, T: Plain> From<&'a mut CudaSlice<T>> for AnyTarget<'a> {
    fn from(slice: &'a mut CudaSlice<T>) -> AnyTarget<'a> {
        let len = cudarc::driver::DeviceSlice::len(slice);
        // SAFETY: an element is so many bytes, and each bit pattern of them is an element.
        let bytes = unsafe { slice.transmute_mut::<u8>(len * size_of::<T>()) };
        AnyTarget {
            memory: MemoryMut::Cuda(bytes.expect("of the same size")),
            start: 0,
            len,
            dtype: T::dtype(),
        }
    }
}

#[cfg(feature = "cuda")]
impl<'a, T: Plain> From<&'a mut CudaViewMut<'_, T>> for AnyTarget<'a> {
    fn from(view: &'a mut CudaViewMut<'_, T>) -> AnyTarget<'a> {
        let len = cudarc::driver::DeviceSlice::len(view);
        // SAFETY: as above.
        let bytes = unsafe { view.transmute_mut::<u8>(len * size_of::<T>()) };
        AnyTarget {
            memory: MemoryMut::Cuda(bytes.expect("of the same size")),
            start: 0,
            len,
            dtype: T::dtype(),
        }
    }
}

// SAFETY: `len` elements of `dtype`, borrowed: by a slice on the host, or by cudarc's view.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "host memory needs no stream"))]
unsafe impl Source for AnySource<'_> {
    type Elem = AnyElement;

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn len(&self) -> usize {
        self.len
    }

    fn lend<'l>(&'l self, stream: &'l Stream) -> Result<Loan<'l>> {
        let loan = match &self.memory {
            Memory::Host(start, _) => Loan::host(start.cast_mut()),
            #[cfg(feature = "cuda")]
            Memory::Cuda(view) => view.lend(stream)?,
        };
        Ok(loan.at(self.start * self.dtype.size()))
    }
}

// SAFETY: as above.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "host memory needs no stream"))]
unsafe impl Source for AnyTarget<'_> {
    type Elem = AnyElement;

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn len(&self) -> usize {
        self.len
    }

    fn lend<'l>(&'l self, stream: &'l Stream) -> Result<Loan<'l>> {
        let loan = match &self.memory {
            MemoryMut::Host(start, _) => Loan::host(*start),
            #[cfg(feature = "cuda")]
            MemoryMut::Cuda(view) => view.lend(stream)?,
        };
        Ok(loan.at(self.start * self.dtype.size()))
    }
}

// SAFETY: as above, and the borrow is exclusive.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "host memory needs no stream"))]
unsafe impl Target for AnyTarget<'_> {
    fn lend_mut<'l>(&'l mut self, stream: &'l Stream) -> Result<Loan<'l>> {
        let loan = match &mut self.memory {
            MemoryMut::Host(start, _) => Loan::host(*start),
            #[cfg(feature = "cuda")]
            MemoryMut::Cuda(view) => view.lend_mut(stream)?,
        };
        Ok(loan.at(self.start * self.dtype.size()))
    }
}

impl fmt::Debug for AnySource<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnySource").field("dtype", &self.dtype).field("len", &self.len).finish()
    }
}

impl fmt::Debug for AnyTarget<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnyTarget").field("dtype", &self.dtype).field("len", &self.len).finish()
    }
}
