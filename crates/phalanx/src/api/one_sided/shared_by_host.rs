//! [`SharedByHost`]: memory that the ranks of a host share.

use super::window_call;
use crate::api::comm::Comm;
use crate::contract::{HostMemory, Operation};
use crate::types::dtype::Plain;
use crate::types::error::{Error, Result};
use std::marker::PhantomData;
use std::ops::{Deref, Range};
use std::{fmt, io};

/// A slice of which each host has one copy, read by all its ranks: a table that is too large for a copy in each rank.
/// [`Comm::shared_by_host`] makes and fills it; then nobody writes to it.
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// phalanx::try_run(4, |comm| -> phalanx::Result<()> {
///     let squares = comm.shared_by_host(1000, |table: &mut [u64]| {
///         table.iter_mut().enumerate().for_each(|(i, square)| *square = (i * i) as u64);
///         phalanx::Result::Ok(())
///     })?;
///     assert_eq!(squares[31], 961);
///     squares.free()
/// })?;
/// # Ok(())
/// # }
/// ```
///
/// It may outlive its communicator. On MPI only [`free`](Self::free) gives it back; dropped, it stays until the process ends.
pub struct SharedByHost<T: Plain> {
    memory: Box<dyn HostMemory>,
    len: usize,
    elements: PhantomData<T>,
}

impl Comm {
    /// Memory of `len` elements, zero at first, of which each host has one copy. On each host, `fill` is called on the first of its ranks.
    /// `MPI_Win_allocate_shared`.
    ///
    /// Collective, with the same type and length on every rank. UCX has it in jobs of several hosts only.
    ///
    /// # Errors
    /// An error of `fill` is an error on all ranks ([`SystemError`](crate::SystemError); on that rank with `fill`'s text).
    /// [`Error::Unsupported`] on NCCL and RCCL in a job of several hosts, and on UCX in one of one host.
    #[doc(alias = "MPI_Win_allocate_shared")]
    pub fn shared_by_host<T: Plain, E>(
        &self,
        len: usize,
        fill: impl FnOnce(&mut [T]) -> std::result::Result<(), E>,
    ) -> Result<SharedByHost<T>>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let of_first = |(rank, _)| if rank == 0 { Some(0..len) } else { None };
        self.filled(len, of_first, |_, part| fill(part))
    }

    /// As [`shared_by_host`](Self::shared_by_host), where each rank of a host fills a part of its own, in about equal parts and the order of
    /// the ranks. `fill` gets the part and its indices.
    pub fn shared_by_host_in_parts<T: Plain, E>(
        &self,
        len: usize,
        fill: impl FnOnce(Range<usize>, &mut [T]) -> std::result::Result<(), E>,
    ) -> Result<SharedByHost<T>>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let bound = move |rank: usize, ranks: usize| rank * (len / ranks) + rank.min(len % ranks);
        self.filled(len, |(rank, ranks)| Some(bound(rank, ranks)..bound(rank + 1, ranks)), fill)
    }

    /// `part_of` answers what a rank fills, by its number on its host and how many there are: parts that have nothing in common.
    fn filled<T: Plain, E>(
        &self,
        len: usize,
        part_of: impl FnOnce((usize, usize)) -> Option<Range<usize>>,
        fill: impl FnOnce(Range<usize>, &mut [T]) -> std::result::Result<(), E>,
    ) -> Result<SharedByHost<T>>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let call = window_call::<T>(Operation::SharedByHost, len, 1)?;
        self.requests.wait_for_collectives();
        let record = self.recorder.begin(&call);
        let limited = self.limited();
        // SAFETY: as in `run_call`.
        let memory = self.recorder.end(record, unsafe { self.backend.shared_by_host(&call) });
        drop(limited);
        self.recorder.skip(self.backend.collectives_of_window().saturating_sub(1));
        let memory = memory?;
        let start = memory.start().cast::<T>();
        assert!(start.is_aligned(), "backends align to 64 bytes");
        let outcome = part_of(memory.place()).map_or(Ok(()), |part| {
            // SAFETY: the memory has `len` elements, zeroed; this part is this rank's alone, and nobody reads it before all have met below.
            let own = unsafe { std::slice::from_raw_parts_mut(start.add(part.start), part.len()) };
            fill(part, own)
        });
        memory.synchronize()?;
        let all = self.all_gather_value(u8::from(outcome.is_ok()))?;
        memory.synchronize()?;
        let failed =
            |error| Error::system("filling memory that a host shares", error, "the communicator works on");
        outcome.map_err(|error| failed(io::Error::other(error)))?;
        if let Some(rank) = all.iter().position(|filled| *filled == 0) {
            return Err(failed(io::Error::other(format!(
                "rank {rank} could not fill its part, and says why"
            ))));
        }
        Ok(SharedByHost { memory, len, elements: PhantomData })
    }
}

impl<T: Plain> SharedByHost<T> {
    /// Frees the memory. Collective.
    pub fn free(self) -> Result<()> {
        self.memory.free()
    }
}

impl<T: Plain> Deref for SharedByHost<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: the memory has `len` elements as long as it lives; all were written before this value was there, and none is later.
        unsafe { std::slice::from_raw_parts(self.memory.start().cast(), self.len) }
    }
}

impl<T: Plain> fmt::Debug for SharedByHost<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedByHost").field("dtype", &T::dtype()).field("len", &self.len).finish()
    }
}
