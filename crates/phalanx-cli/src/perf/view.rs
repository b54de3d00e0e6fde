//! Parts of a buffer, in host or GPU memory: what operations are called with.
//!
//! A view holds bytes, so that it is one type for all element types. [`Typed`] is the view as elements.

use phalanx::cudarc::driver::{CudaView, CudaViewMut};
use phalanx::{Comm, DType, Element, Loan, Result, Source, Stream, Target};
use std::marker::PhantomData;
use std::ops::Range;

/// Elements to read.
pub struct View<'a> {
    pub memory: Memory<'a>,
    /// Bytes of an element.
    pub element: usize,
}

/// Bytes to read, a multiple of the element's size and aligned for it.
pub enum Memory<'a> {
    Host(&'a [u8]),
    Device(CudaView<'a, u8>),
}

/// Elements to read and write.
pub struct ViewMut<'a> {
    pub memory: MemoryMut<'a>,
    /// Bytes of an element.
    pub element: usize,
}

/// Bytes to read and write, a multiple of the element's size and aligned for it.
pub enum MemoryMut<'a> {
    Host(&'a mut [u8]),
    Device(CudaViewMut<'a, u8>),
}

impl ViewMut<'_> {
    /// A range of the elements.
    pub fn part(&mut self, range: Range<usize>) -> ViewMut<'_> {
        let element = self.element;
        let bytes = range.start * element..range.end * element;
        let memory = match &mut self.memory {
            MemoryMut::Host(memory) => MemoryMut::Host(&mut memory[bytes]),
            MemoryMut::Device(memory) => MemoryMut::Device(memory.slice_mut(bytes)),
        };
        ViewMut { memory, element }
    }

    /// The elements before `middle`, and the rest.
    pub fn split_at_mut(&mut self, middle: usize) -> (ViewMut<'_>, ViewMut<'_>) {
        let element = self.element;
        let (lower, upper) = match &mut self.memory {
            MemoryMut::Host(memory) => {
                let (lower, upper) = memory.split_at_mut(middle * element);
                (MemoryMut::Host(lower), MemoryMut::Host(upper))
            }
            MemoryMut::Device(memory) => {
                let (lower, upper) = memory.split_at_mut(middle * element);
                (MemoryMut::Device(lower), MemoryMut::Device(upper))
            }
        };
        (ViewMut { memory: lower, element }, ViewMut { memory: upper, element })
    }

    /// The same elements, to read.
    pub fn as_view(&self) -> View<'_> {
        let memory = match &self.memory {
            MemoryMut::Host(memory) => Memory::Host(memory),
            MemoryMut::Device(memory) => Memory::Device(memory.as_view()),
        };
        View { memory, element: self.element }
    }

    /// Copies elements from the same kind of memory; on a GPU, in the order of the communicator's operations.
    pub fn copy_from(&mut self, comm: &Comm, source: &View<'_>) -> Result<()> {
        match (&mut self.memory, &source.memory) {
            (MemoryMut::Host(target), Memory::Host(source)) => target.copy_from_slice(source),
            (MemoryMut::Device(target), Memory::Device(source)) => {
                let stream = comm.cuda_stream()?;
                stream.memcpy_dtod(source, target)?;
            }
            _ => unreachable!("a rank's buffers are all in one kind of memory"),
        }
        Ok(())
    }
}

/// A view as elements of type `T`.
pub struct Typed<V, T> {
    pub view: V,
    element: PhantomData<T>,
}

impl<'a> View<'a> {
    /// The view as elements of this type.
    pub fn elements<T: Element>(&self) -> Typed<&View<'a>, T> {
        assert_eq!(self.element, size_of::<T>());
        Typed { view: self, element: PhantomData }
    }
}

impl<'a> ViewMut<'a> {
    /// The view as elements of this type.
    pub fn elements<T: Element>(&mut self) -> Typed<&mut ViewMut<'a>, T> {
        assert_eq!(self.element, size_of::<T>());
        Typed { view: self, element: PhantomData }
    }
}

// SAFETY: the memory is that of a slice or of cudarc's view, both of which keep the contract for their bytes.
// The bytes are whole elements and aligned, and all bit patterns of an element are valid.
unsafe impl<T: Element> Source for Typed<&View<'_>, T> {
    type Elem = T;

    #[inline]
    fn dtype(&self) -> DType {
        T::DTYPE
    }

    #[inline]
    fn len(&self) -> usize {
        match &self.view.memory {
            Memory::Host(memory) => memory.len() / size_of::<T>(),
            Memory::Device(memory) => memory.len() / size_of::<T>(),
        }
    }

    #[inline]
    fn lend<'l>(&'l self, stream: &'l Stream) -> Result<Loan<'l>> {
        match &self.view.memory {
            Memory::Host(memory) => Source::lend(*memory, stream),
            Memory::Device(memory) => Source::lend(memory, stream),
        }
    }
}

// SAFETY: as above.
unsafe impl<T: Element> Source for Typed<&mut ViewMut<'_>, T> {
    type Elem = T;

    #[inline]
    fn dtype(&self) -> DType {
        T::DTYPE
    }

    #[inline]
    fn len(&self) -> usize {
        match &self.view.memory {
            MemoryMut::Host(memory) => memory.len() / size_of::<T>(),
            MemoryMut::Device(memory) => memory.len() / size_of::<T>(),
        }
    }

    #[inline]
    fn lend<'l>(&'l self, stream: &'l Stream) -> Result<Loan<'l>> {
        match &self.view.memory {
            MemoryMut::Host(memory) => Source::lend(*memory, stream),
            MemoryMut::Device(memory) => Source::lend(memory, stream),
        }
    }
}

// SAFETY: as above, and the view is borrowed exclusively.
unsafe impl<T: Element> Target for Typed<&mut ViewMut<'_>, T> {
    #[inline]
    fn lend_mut<'l>(&'l mut self, stream: &'l Stream) -> Result<Loan<'l>> {
        match &mut self.view.memory {
            MemoryMut::Host(memory) => Target::lend_mut(*memory, stream),
            MemoryMut::Device(memory) => Target::lend_mut(memory, stream),
        }
    }
}
