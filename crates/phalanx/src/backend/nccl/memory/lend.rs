//! Lending a buffer to operations: later users of the memory come behind earlier ones, whichever streams they
//! use.

use super::buffer::{Buffer, Owner};
use super::registration::free;
use super::slice::GpuSlice;
use crate::backend::nccl::communicator::ENDING;
use crate::backend::nccl::reclaim;
use crate::buffer::loan::Loan;
use crate::buffer::stream::{GpuStream, Stream};
use crate::buffer::{Source, Target};
use crate::os::sync::lock;
use crate::types::dtype::{DType, Element};
use crate::types::error::Result;
use std::mem::ManuallyDrop;
use std::sync::{Mutex, PoisonError};

/// Without the lock, which an exclusive borrow does not need.
pub(super) fn readers(readers: &mut Mutex<Vec<GpuStream>>) -> &mut Vec<GpuStream> {
    readers.get_mut().unwrap_or_else(PoisonError::into_inner)
}

impl<T: Element, S: GpuSlice<T>> Buffer<T, S> {
    /// Waits until neither streams nor the library use the memory. False if peers still may.
    pub(super) fn release(&mut self) -> Result<bool> {
        self.communicator.check_owner()?;
        self.wait_for_users()?;
        self.number.map_or(Ok(true), |number| self.communicator.end_registration(number))
    }

    /// Records that an operation reads the memory on a stream other than the slice's own. Costs an
    /// uncontended lock.
    #[inline(never)]
    fn keep_reader(&self, stream: &GpuStream) {
        self.communicator.device.remember(&mut lock(&self.readers), stream);
    }

    /// Orders a writing operation, and later users, behind the operations that read.
    #[cold]
    fn put_behind_readers(&mut self, on: &Stream) -> Result<()> {
        let readers = readers(&mut self.readers);
        match on.gpu_stream() {
            Some(stream) => {
                let remedy = "let nccl::Graph capture the operation, or sync before the capture";
                let device = self.communicator.device;
                device.refuse_captured(stream.raw(), "a buffer that is read on other streams", remedy)?;
                let mut others = readers.iter().filter(|reader| reader.raw() != stream.raw());
                others.try_for_each(|reader| device.join(stream, reader))?;
            }
            // On the host it begins when the slice's own stream has done its work.
            None => drop(self.slice.gather_users(readers)?),
        }
        readers.clear();
        Ok(())
    }

    /// Waits until the streams have done what they were given with this memory.
    fn wait_for_users(&mut self) -> Result<()> {
        let device = self.communicator.device;
        let _current = device.enter();
        let stream = self.slice.gather_users(readers(&mut self.readers))?;
        device.wait_idle(stream.raw(), ENDING)
    }
}

// SAFETY: device memory of `len` elements, borrowed; the slice orders later users.
unsafe impl<T: Element, S: GpuSlice<T>> Source for Buffer<T, S> {
    type Elem = T;

    fn dtype(&self) -> DType {
        T::DTYPE
    }

    fn len(&self) -> usize {
        self.slice.len()
    }

    fn lend<'a>(&'a self, on: &'a Stream) -> Result<Loan<'a>> {
        let loan = self.slice.lend(on)?;
        if let Some(stream) = on.gpu_stream()
            && !self.slice.is_on(stream)
        {
            self.keep_reader(stream);
        }
        Ok(loan.registered(self.number))
    }
}

// SAFETY: as above, and `&mut self` is exclusive.
unsafe impl<T: Element, S: GpuSlice<T>> Target for Buffer<T, S> {
    fn lend_mut<'a>(&'a mut self, on: &'a Stream) -> Result<Loan<'a>> {
        if !readers(&mut self.readers).is_empty() {
            self.put_behind_readers(on)?;
        }
        Ok(self.slice.lend_mut(on)?.registered(self.number))
    }
}

impl<T: Element, S: GpuSlice<T>> Drop for Buffer<T, S> {
    fn drop(&mut self) {
        let is_free = match self.release() {
            Ok(is_free) => is_free,
            Err(error) => {
                crate::os::log::error!(
                    rank = self.communicator.rank,
                    "GPU memory is leaked: it may be in use, or is still registered ({error})"
                );
                return;
            }
        };
        let communicator = &self.communicator;
        let _current = communicator.device.enter();
        // SAFETY: taken once.
        let slice = unsafe { ManuallyDrop::take(&mut self.slice) };
        if self.owner == Owner::Program {
            return drop(slice);
        }
        slice.forget();
        match is_free {
            true => {
                // SAFETY: deregistered, not in use; freed once.
                unsafe { free(communicator.library, &communicator.device, self.start) };
                reclaim::wait();
            }
            false => communicator.leave_to_peers(self.start),
        }
    }
}
