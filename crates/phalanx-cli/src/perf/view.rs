//! A part of a buffer, wherever it is: what operations are called with.
//!
//! One type for host and GPU memory, so that there is one set of calls.

use super::data::Value;
use phalanx::cudarc::driver::{CudaView, CudaViewMut};
use phalanx::{Comm, Loan, Result, Source, Stream, Target};
use std::ops::Range;

/// Elements to read.
pub enum View<'a, T: Value> {
    Host(&'a [T]),
    Device(CudaView<'a, T>),
}

/// Elements to read and write.
pub enum ViewMut<'a, T: Value> {
    Host(&'a mut [T]),
    Device(CudaViewMut<'a, T>),
}

// SAFETY: what is lent is one of the two, each of which keeps the contract itself.
unsafe impl<T: Value> Source for View<'_, T> {
    type Elem = T;

    fn len(&self) -> usize {
        match self {
            View::Host(elements) => Source::len(*elements),
            View::Device(elements) => Source::len(elements),
        }
    }

    fn lend<'l>(&'l self, lane: &'l Stream) -> Result<Loan<'l>> {
        match self {
            View::Host(elements) => Source::lend(*elements, lane),
            View::Device(elements) => Source::lend(elements, lane),
        }
    }
}

// SAFETY: as above.
unsafe impl<T: Value> Source for ViewMut<'_, T> {
    type Elem = T;

    fn len(&self) -> usize {
        match self {
            ViewMut::Host(elements) => Source::len(*elements),
            ViewMut::Device(elements) => Source::len(elements),
        }
    }

    fn lend<'l>(&'l self, lane: &'l Stream) -> Result<Loan<'l>> {
        match self {
            ViewMut::Host(elements) => Source::lend(*elements, lane),
            ViewMut::Device(elements) => Source::lend(elements, lane),
        }
    }
}

// SAFETY: as above.
unsafe impl<T: Value> Target for ViewMut<'_, T> {
    fn lend_mut<'l>(&'l mut self, lane: &'l Stream) -> Result<Loan<'l>> {
        match self {
            ViewMut::Host(elements) => Target::lend_mut(*elements, lane),
            ViewMut::Device(elements) => Target::lend_mut(elements, lane),
        }
    }
}

impl<T: Value> ViewMut<'_, T> {
    /// A part of it.
    pub fn part(&mut self, range: Range<usize>) -> ViewMut<'_, T> {
        match self {
            ViewMut::Host(elements) => ViewMut::Host(&mut elements[range]),
            ViewMut::Device(elements) => ViewMut::Device(elements.slice_mut(range)),
        }
    }

    /// What comes before `middle`, and the rest.
    pub fn split_at_mut(&mut self, middle: usize) -> (ViewMut<'_, T>, ViewMut<'_, T>) {
        match self {
            ViewMut::Host(elements) => {
                let (lower, upper) = elements.split_at_mut(middle);
                (ViewMut::Host(lower), ViewMut::Host(upper))
            }
            ViewMut::Device(elements) => {
                let (lower, upper) = elements.split_at_mut(middle);
                (ViewMut::Device(lower), ViewMut::Device(upper))
            }
        }
    }

    /// Copies elements here from the same kind of memory; on a GPU, in the order of the communicator's operations.
    pub fn copy_from(&mut self, comm: &Comm, source: &View<'_, T>) -> Result<()> {
        match (self, source) {
            (ViewMut::Host(target), View::Host(source)) => target.copy_from_slice(source),
            (ViewMut::Device(target), View::Device(source)) => {
                let stream = comm.cuda_stream().expect("a communicator with memory on its GPU has a stream");
                stream.memcpy_dtod(source, target)?;
            }
            _ => unreachable!("a rank's buffers are all in one kind of memory"),
        }
        Ok(())
    }
}
