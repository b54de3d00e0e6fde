//! One-sided access: memory of which every rank has a part ([`SymmetricMemory`]), and memory that the ranks of a host share
//! ([`SharedByHost`](shared_by_host::SharedByHost)).

pub(crate) mod epoch;
pub(crate) mod shared_by_host;

use super::comm::Comm;
use crate::contract::{Blocks, Call, Operation, Window};
use crate::reduce::access;
use crate::types::dtype::Plain;
use crate::types::error::{Result, UsageError};
use epoch::Epoch;
use std::cell::OnceCell;
use std::fmt;
use std::marker::PhantomData;

/// Memory of which every rank has a part of the same length, and which the ranks access without each other's doing. [`Comm::symmetric`]
/// makes it.
///
/// A rank's own part is a slice of its own ([`local`](Self::local), [`local_mut`](Self::local_mut)), except in an [`Epoch`]: while one is
/// open, all ranks read and write all parts, by its methods alone. An epoch begins and ends on all ranks together, so no rank reads by a
/// reference what another writes.
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// phalanx::try_run(3, |comm| -> phalanx::Result<()> {
///     let (rank, ranks) = (comm.rank(), comm.world_size());
///     let mut counts = comm.symmetric::<u64>(ranks)?;
///     let epoch = counts.epoch()?;
///     for other in 0..ranks {
///         epoch.put(&[10 * rank as u64], other, rank)?;
///     }
///     epoch.end()?;
///     assert_eq!(counts.local(), [0, 10, 20]);
///     counts.free()
/// })?;
/// # Ok(())
/// # }
/// ```
///
/// # After a failure
/// Once an epoch could not begin or end on this rank, another rank may still write to its part. From then on, `local` is a copy of what the
/// part held when it was asked for first.
///
/// # How it ends
/// [`free`](Self::free) is collective. Dropping it frees it, too, except on MPI: there it stays until the process ends.
pub struct SymmetricMemory<'c, T: Plain> {
    comm: &'c Comm,
    window: Box<dyn Window + 'c>,
    len: usize,
    /// The number of the memory among those of the communicator.
    number: u32,
    /// Whether other ranks may access this rank's part: in an epoch, and after one that did not end well.
    is_open: bool,
    /// The copy that `local` is after a failure.
    copy: OnceCell<Vec<T>>,
    elements: PhantomData<T>,
}

impl Comm {
    /// Allocates `len` zeros on every rank, which all ranks can access: put, get, strided, atomic operations, signals.
    ///
    /// It is host memory on all backends. Collective, with the same type and length on every rank. Inside a host the ranks load and store
    /// directly. To other hosts UCX sends messages, which a thread of those processes carries out in epochs; MPI has `MPI_Win_allocate`, in one
    /// passive epoch from its beginning to its end. `shmem_calloc`.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) on NCCL and RCCL in a job of several hosts;
    /// [`MismatchError`](crate::MismatchError) if the ranks ask for different memory. What one rank cannot allocate is an error on all.
    #[doc(alias("MPI_Win_allocate", "MPI_Win_create"))]
    pub fn symmetric<T: Plain>(&self, len: usize) -> Result<SymmetricMemory<'_, T>> {
        let call = window_call::<T>(Operation::Symmetric, len, self.world_size())?;
        self.requests.wait_for_collectives();
        let record = self.recorder.begin(&call);
        let limited = self.limited();
        // SAFETY: as in `run_call`.
        let window = self.recorder.end(record, unsafe { self.backend.symmetric(&call) });
        drop(limited);
        self.recorder.skip(self.backend.collectives_of_window().saturating_sub(1));
        let (window, number) = (window?, self.next_memory());
        assert!(window.own().cast::<T>().is_aligned(), "backends align to 64 bytes");
        let copy = OnceCell::new();
        Ok(SymmetricMemory { comm: self, window, len, number, is_open: false, copy, elements: PhantomData })
    }
}

/// A call for `len` elements of each of some ranks.
fn window_call<T: Plain>(operation: Operation, len: usize, ranks: usize) -> Result<Call<'static>> {
    const { assert!(align_of::<T>() <= 64, "memory that ranks share is aligned to 64 bytes") };
    // Half of the address space: each part is rounded up, and there are the signals.
    let most = isize::MAX as usize / 2 / ranks;
    let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| *bytes <= most);
    bytes.ok_or_else(|| UsageError::Overflow {
        operation: operation.name(),
        what: "the length in bytes",
        value: format!("{len} × {}", size_of::<T>()),
        limit: most.to_string(),
    })?;
    Ok(Call { dtype: T::dtype(), blocks: Blocks::Equal(len), ..Call::empty(operation) })
}

impl<T: Plain> SymmetricMemory<'_, T> {
    /// Elements of each rank's part.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the parts have no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// This rank's own part.
    pub fn local(&self) -> &[T] {
        if self.is_open {
            return self.copy.get_or_init(|| self.copied());
        }
        // SAFETY: the window has so many elements here, as long as it lives, and no rank accesses them outside an epoch.
        unsafe { std::slice::from_raw_parts(self.own(), self.len) }
    }

    /// This rank's own part, to be written.
    pub fn local_mut(&mut self) -> &mut [T] {
        if self.is_open {
            self.copy.get_or_init(|| self.copied());
            return self.copy.get_mut().expect("it was just made");
        }
        // SAFETY: as in `local`; this rank has no other reference to them.
        unsafe { std::slice::from_raw_parts_mut(self.own(), self.len) }
    }

    fn own(&self) -> *mut T {
        self.window.own().cast()
    }

    /// A copy of this rank's part, which other ranks may access.
    #[cold]
    fn copied(&self) -> Vec<T> {
        let mut copy: Vec<T> = Vec::with_capacity(self.len);
        // SAFETY: so many elements are here, aligned as the window is; the vector has room for them, and they are set.
        unsafe {
            access::read(copy.as_mut_ptr().cast(), self.own().cast(), self.len, size_of::<T>());
            copy.set_len(self.len);
        }
        copy
    }

    /// Begins an epoch: all ranks can access all parts until its end.
    ///
    /// Collective: it returns when all ranks have called it, so what they wrote to their own parts before is there.
    pub fn epoch(&mut self) -> Result<Epoch<'_, T>> {
        Epoch::begin(self)
    }

    /// Frees the memory. Collective.
    pub fn free(self) -> Result<()> {
        self.comm.run_call(&of_memory(Operation::Free, self.number))?;
        self.comm.recorder.noted(self.window.free())
    }
}

/// A call that concerns the memory with this number.
fn of_memory(operation: Operation, number: u32) -> Call<'static> {
    Call { root: number as usize, ..Call::empty(operation) }
}

impl<T: Plain> fmt::Debug for SymmetricMemory<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SymmetricMemory").field("dtype", &T::dtype()).field("len", &self.len).finish()
    }
}
