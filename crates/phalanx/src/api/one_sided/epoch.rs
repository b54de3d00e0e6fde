//! [`Epoch`]: the time in which all ranks access all parts of symmetric memory.

use super::{SymmetricMemory, of_memory};
use crate::api::comm::Comm;
use crate::contract::{AtomicOp, MappedParts, Operation, RemoteSlice, Window};
use crate::reduce::access;
use crate::types::dtype::{AtomicElement, Integer, Plain};
use crate::types::error::{Error, Result, UnsupportedError, UsageError};
use crate::types::op::{Reduction, ReductionCode, element_bits, element_from_bits};
use std::fmt;
use std::marker::PhantomData;

/// The time in which all ranks access all parts of a [`SymmetricMemory`]. [`SymmetricMemory::epoch`] begins it, [`end`](Self::end) ends it.
///
/// An element is named by a rank and an index in that rank's part; the own rank is one of them.
///
/// - **Puts and gets** of elements that other ranks write at the same time find, or leave, any mixture of the values. That is never
///   undefined behavior.
/// - **Atomic operations** ([`accumulate`](Self::accumulate), [`fetch_and_op`](Self::fetch_and_op) and the like) change each element in one
///   step beside those of other ranks, but not beside their puts. Integers wrap. What `Min` and `Max` make of NaN is MPI's choice there.
/// - **Completion.** When a put returns, its source can be changed; when a get returns, its result is there. Puts are complete at their
///   rank after [`flush`](Self::flush), [`fence`](Self::fence), a [`signal`](Self::signal) to that rank, or the end of the epoch.
/// - **Signals** are counted for each pair of ranks. A rank that has waited for one sees what the other put there before.
///
/// Wrong arguments are errors before anything moves: [`UsageError::Rank`], [`UsageError::Range`].
///
/// # How it ends
/// [`end`](Self::end) waits until all ranks have called it. Dropping it does the same and logs an error. If a panic drops it, the communicator
/// fails on all ranks instead, so that nobody waits for this one.
#[doc(alias("MPI_Win_fence", "MPI_Win_lock_all"))]
#[must_use = "dropping it ends the epoch, and only logs an error"]
pub struct Epoch<'m, T: Plain> {
    comm: &'m Comm,
    window: &'m (dyn Window + 'm),
    parts: Option<MappedParts>,
    len: usize,
    number: u32,
    is_open: &'m mut bool,
    elements: PhantomData<T>,
}

impl<'m, T: Plain> Epoch<'m, T> {
    pub(super) fn begin(memory: &'m mut SymmetricMemory<'_, T>) -> Result<Epoch<'m, T>> {
        if memory.is_open {
            memory.comm.recorder.noted(memory.comm.backend.check())?;
            return Err(UsageError::Setting {
                name: "epoch".into(),
                value: "memory whose last epoch did not end".into(),
                expected: "an epoch that has ended: `end` it, or drop it, and do not forget it".into(),
            }
            .into());
        }
        let (comm, number) = (memory.comm, memory.number);
        // Also if this fails: another rank may have heard of all, and begun.
        memory.is_open = true;
        memory.window.set_open(true);
        comm.recorder.noted(memory.window.synchronize())?;
        comm.run_call(&of_memory(Operation::Epoch, number))?;
        comm.recorder.noted(memory.window.synchronize())?;
        Ok(Epoch {
            comm,
            window: &*memory.window,
            parts: memory.window.mapped(),
            len: memory.len,
            number,
            is_open: &mut memory.is_open,
            elements: PhantomData,
        })
    }

    /// Writes `source` to a rank's part, from index `at` on. `MPI_Put`, `shmem_put`.
    #[inline]
    #[doc(alias = "MPI_Put")]
    pub fn put(&self, source: &[T], rank: usize, at: usize) -> Result<()> {
        let to = self.check("put", rank, at, source.len(), 1)?;
        match self.place(to) {
            // SAFETY: the elements are in the rank's part, just checked, and in `source`.
            Some(place) => unsafe {
                access::write(place.cast(), source.as_ptr().cast(), to.count, size_of::<T>())
            },
            // SAFETY: as above.
            None => self.noted(unsafe { self.window.put(to, source.as_ptr().cast(), 1) })?,
        }
        Ok(())
    }

    /// Reads a rank's part, from index `at` on. `MPI_Get`, `shmem_get`.
    #[inline]
    #[doc(alias = "MPI_Get")]
    pub fn get(&self, target: &mut [T], rank: usize, at: usize) -> Result<()> {
        let from = self.check("get", rank, at, target.len(), 1)?;
        match self.place(from) {
            // SAFETY: the elements are in the rank's part, just checked, and `target` has room for them.
            Some(place) => unsafe {
                access::read(target.as_mut_ptr().cast(), place.cast(), from.count, size_of::<T>())
            },
            // SAFETY: as above.
            None => self.noted(unsafe { self.window.get(from, target.as_mut_ptr().cast(), 1) })?,
        }
        Ok(())
    }

    /// Writes every `source_stride`-th element of `source`, from the first on, to every `stride`-th of a rank's part, from index `at` on.
    /// `shmem_iput`, `MPI_Put` with a vector type.
    ///
    /// # Errors
    /// Also [`UsageError::Setting`] for a stride of 0.
    pub fn put_strided(
        &self,
        source: &[T],
        source_stride: usize,
        rank: usize,
        at: usize,
        stride: usize,
    ) -> Result<()> {
        let to = self.check_strided("put_strided", source.len(), source_stride, rank, at, stride)?;
        let Some(place) = self.place(to) else {
            // SAFETY: the elements are in the rank's part, just checked, and in `source`.
            return self.noted(unsafe { self.window.put(to, source.as_ptr().cast(), source_stride) });
        };
        let (target, source) = ((place.cast(), stride), (source.as_ptr().cast(), source_stride));
        // SAFETY: as above.
        unsafe { access::with_strides(to.count, target, source, size_of::<T>(), access::write) };
        Ok(())
    }

    /// Reads every `stride`-th element of a rank's part, from index `at` on, to every `target_stride`-th of `target`, from the first on.
    /// `shmem_iget`, `MPI_Get` with a vector type.
    ///
    /// # Errors
    /// Also [`UsageError::Setting`] for a stride of 0.
    pub fn get_strided(
        &self,
        target: &mut [T],
        target_stride: usize,
        rank: usize,
        at: usize,
        stride: usize,
    ) -> Result<()> {
        let from = self.check_strided("get_strided", target.len(), target_stride, rank, at, stride)?;
        let Some(place) = self.place(from) else {
            // SAFETY: the elements are in the rank's part, just checked, and `target` has room for them.
            return self.noted(unsafe { self.window.get(from, target.as_mut_ptr().cast(), target_stride) });
        };
        let (target, source) =
            ((target.as_mut_ptr().cast(), target_stride), (place.cast_const().cast(), stride));
        // SAFETY: as above.
        unsafe { access::with_strides(from.count, target, source, size_of::<T>(), access::read) };
        Ok(())
    }

    /// Waits until this rank's accesses to a rank's part are complete there. `MPI_Win_flush`.
    #[doc(alias = "MPI_Win_flush")]
    pub fn flush(&self, rank: usize) -> Result<()> {
        self.check("flush", rank, 0, 0, 1)?;
        let _limited = self.comm.limited();
        self.noted(self.window.flush(Some(rank)))
    }

    /// Waits until this rank's accesses to all parts are complete there: later ones come after them. `shmem_quiet`, `MPI_Win_flush_all`.
    pub fn fence(&self) -> Result<()> {
        self.noted(self.comm.backend.check())?;
        let _limited = self.comm.limited();
        self.noted(self.window.flush(None))
    }

    /// Signals to a rank that this rank's accesses to its part so far are complete.
    #[inline]
    pub fn signal(&self, rank: usize) -> Result<()> {
        self.check("signal", rank, 0, 0, 1)?;
        let _limited = self.comm.limited();
        self.noted(self.window.signal(rank))
    }

    /// Waits for `count` signals of a rank, beyond those that were waited for before. They need not come in this epoch.
    ///
    /// # Errors
    /// [`TimeoutError`](crate::TimeoutError) and [`PeerError`](crate::PeerError), as in a collective, with that rank's number;
    /// [`UsageError::SelfExchange`] for signals of this rank to itself that it has not given.
    pub fn wait_signals(&self, rank: usize, count: usize) -> Result<()> {
        self.check("wait_signals", rank, 0, 0, 1)?;
        let _limited = self.comm.limited();
        self.noted(self.window.wait_signals(rank, count as u64))
    }

    /// Ends the epoch: waits until all ranks have called it. Then all accesses are complete, and each rank has its part to itself.
    pub fn end(mut self) -> Result<()> {
        let ended = self.close();
        // Dropping would end it once more.
        std::mem::forget(self);
        ended
    }

    fn close(&mut self) -> Result<()> {
        self.fence()?;
        self.noted(self.window.synchronize())?;
        self.comm.run_call(&of_memory(Operation::EndEpoch, self.number))?;
        self.noted(self.window.synchronize())?;
        self.window.set_open(false);
        *self.is_open = false;
        Ok(())
    }

    /// The result of an access.
    #[inline(always)]
    fn noted<R>(&self, result: Result<R>) -> Result<R> {
        self.comm.recorder.noted(result)
    }

    /// The elements, if they are in a rank's part.
    #[inline(always)]
    fn check(
        &self,
        operation: &'static str,
        rank: usize,
        at: usize,
        count: usize,
        stride: usize,
    ) -> Result<RemoteSlice> {
        self.noted(self.comm.backend.check())?;
        self.comm.shape().check_rank(operation, "rank", rank)?;
        let span = if count == 0 {
            Some(0)
        } else {
            (count - 1).checked_mul(stride).and_then(|last| last.checked_add(1))
        };
        match span {
            Some(span) if at <= self.len && span <= self.len - at => {}
            span => {
                let count = span.unwrap_or(usize::MAX);
                return Err(UsageError::Range { operation, at, count, len: self.len }.into());
            }
        }
        Ok(RemoteSlice { rank, dtype: T::dtype(), at, count, stride })
    }

    fn check_strided(
        &self,
        operation: &'static str,
        len: usize,
        own_stride: usize,
        rank: usize,
        at: usize,
        stride: usize,
    ) -> Result<RemoteSlice> {
        if own_stride == 0 || stride == 0 {
            let (value, expected) = ("0".into(), "1 or more elements".into());
            return Err(UsageError::Setting { name: format!("{operation}: stride"), value, expected }.into());
        }
        self.check(operation, rank, at, len.div_ceil(own_stride), stride)
    }

    /// Where the elements are, if this process reaches them.
    #[inline(always)]
    fn place(&self, slice: RemoteSlice) -> Option<*mut T> {
        self.parts.map(|parts| parts.of(slice.rank).cast::<T>().wrapping_add(slice.at))
    }
}

/// Operations on single elements, each of which is changed in one step.
impl<T: AtomicElement> Epoch<'_, T> {
    /// Combines `source` with a rank's part, element by element, from index `at` on. `MPI_Accumulate`.
    ///
    /// # Errors
    /// Also [`Error::Unsupported`] for a reduction other than sum, product, minimum, maximum and those of bits.
    #[doc(alias = "MPI_Accumulate")]
    pub fn accumulate(
        &self,
        source: &[T],
        rank: usize,
        at: usize,
        op: impl Into<Reduction<T>>,
    ) -> Result<()> {
        let op = atomic_op("accumulate", op.into())?;
        let to = self.check("accumulate", rank, at, source.len(), 1)?;
        let Some(place) = self.place(to) else {
            // SAFETY: the elements are in the rank's part, just checked, and in `source`.
            return self.noted(unsafe { self.window.accumulate(to, source.as_ptr().cast(), op) });
        };
        for (index, value) in source.iter().enumerate() {
            // SAFETY: as above.
            unsafe { access::fetch_and_op(place.add(index), *value, op) };
        }
        Ok(())
    }

    /// Combines `value` with an element of a rank's part. What the element was before. `MPI_Fetch_and_op`, `shmem_atomic_fetch_add`.
    ///
    /// # Errors
    /// As for [`accumulate`](Self::accumulate).
    #[inline]
    #[doc(alias = "MPI_Fetch_and_op")]
    pub fn fetch_and_op(&self, value: T, rank: usize, at: usize, op: impl Into<Reduction<T>>) -> Result<T> {
        self.change("fetch_and_op", value, rank, at, atomic_op("fetch_and_op", op.into())?)
    }

    /// An element of a rank's part, read in one step. `shmem_atomic_fetch`.
    #[inline]
    pub fn fetch(&self, rank: usize, at: usize) -> Result<T> {
        self.change("fetch", element_from_bits(0), rank, at, AtomicOp::Load)
    }

    /// Sets an element of a rank's part. What it was before. `shmem_atomic_swap`.
    #[inline]
    pub fn swap(&self, value: T, rank: usize, at: usize) -> Result<T> {
        self.change("swap", value, rank, at, AtomicOp::Replace)
    }

    /// Sets an element of a rank's part if it is `expected`. What it was before: `expected`, if it was set. `MPI_Compare_and_swap`.
    #[inline]
    #[doc(alias = "MPI_Compare_and_swap")]
    pub fn compare_and_swap(&self, expected: T, value: T, rank: usize, at: usize) -> Result<T>
    where
        T: Integer,
    {
        let slice = self.check("compare_and_swap", rank, at, 1, 1)?;
        // SAFETY: the element is in the rank's part, just checked.
        unsafe {
            match self.place(slice) {
                Some(place) => Ok(access::compare_and_swap(place, expected, value)),
                None => {
                    let (expected, value) = (element_bits(expected), element_bits(value));
                    self.noted(self.window.compare_and_swap(slice, expected, value)).map(element_from_bits)
                }
            }
        }
    }

    #[inline(always)]
    fn change(&self, operation: &'static str, value: T, rank: usize, at: usize, op: AtomicOp) -> Result<T> {
        let slice = self.check(operation, rank, at, 1, 1)?;
        // SAFETY: the element is in the rank's part, just checked.
        unsafe {
            match self.place(slice) {
                Some(place) => Ok(access::fetch_and_op(place, value, op)),
                None => {
                    let before = self.window.fetch_and_op(slice, element_bits(value), op);
                    self.noted(before).map(element_from_bits)
                }
            }
        }
    }
}

#[inline(always)]
fn atomic_op<T>(operation: &'static str, op: Reduction<T>) -> Result<AtomicOp> {
    use ReductionCode::*;
    match op.raw.code {
        code @ (Sum | Prod | Min | Max | BitAnd | BitOr | BitXor) => Ok(AtomicOp::Combine(code)),
        code => Err(unsupported(operation, code)),
    }
}

#[cold]
fn unsupported(operation: &'static str, code: ReductionCode) -> Error {
    Error::from(UnsupportedError {
        what: format!("{operation} by {}", code.name()),
        why: "an element is combined with one other at a time".into(),
        remedy: "use Sum, Prod, Min, Max, or Bitwise of integers".into(),
    })
}

impl<T: Plain> Drop for Epoch<'_, T> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The others would wait for this rank, and it may wait for them.
            return self.comm.backend.abandon();
        }
        if let Err(error) = self.close() {
            crate::os::log::error!(rank = self.comm.rank(), "an epoch was dropped, and did not end: {error}");
        }
    }
}

impl<T: Plain> fmt::Debug for Epoch<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Epoch").field("dtype", &T::dtype()).field("len", &self.len).finish()
    }
}
