//! [`Surface`]: what NCCL and RCCL have and no other backend, for one communicator.

use crate::api::comm::Comm;
use crate::backend::nccl::NcclComm;
#[cfg(feature = "nccl")]
use crate::backend::nccl::direct::PeerMemory;
use crate::backend::nccl::memory::{Buffer, GpuSlice, Registration, best};
#[cfg(feature = "nccl")]
use crate::backend::nccl::reclaim;
use crate::buffer::stream::{GpuStream, Stream};
use crate::contract::{Backend, Blocks, Call, Operation};
use crate::types::dtype::Element;
use crate::types::error::Result;
use phalanx_sys::nccl::{NCCL_SUSPEND_MEM, mem_stat, version_text};
use std::ffi::c_void;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The features that NCCL and RCCL have and no other backend, for one communicator; part of
/// [`Nccl`](super::Nccl) and of [`Rccl`](super::rccl::Rccl). A function that the loaded library lacks is an
/// [`Error::MissingFunction`](crate::Error).
#[derive(Clone, Copy)]
pub struct Surface<'a> {
    pub(crate) comm: &'a NcclComm,
    pub(crate) stream: &'a Stream,
    /// The public communicator.
    pub(crate) front: &'a Comm,
}

/// A number about a communicator's GPU memory, in bytes (`ncclCommMemStat_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryStatistic {
    /// What suspending gives back.
    Suspendable,
    /// Whether it is suspended: 1 or 0.
    Suspended,
    /// What suspending does not give back.
    Persistent,
    /// All of it.
    Total,
}

impl<'a> Surface<'a> {
    /// The loaded library's version.
    pub fn version(&self) -> String {
        version_text(self.comm.communicator.library.version())
    }

    /// The loaded library's file.
    pub fn library(&self) -> &'static Path {
        self.comm.communicator.library.path()
    }

    /// The C handle (`ncclComm_t`), for calls that phalanx does not have. It is valid until the communicator
    /// ends or fails; whoever uses it keeps NCCL's rules: one thread at a time, the same order of calls on
    /// every rank.
    pub fn raw_handle(&self) -> *mut c_void {
        // Nobody knows what the program captures with it.
        self.comm.communicator.is_captured.store(true, Ordering::Release);
        self.comm.communicator.handle()
    }

    /// A communicator of a `ncclComm_t` that the program made itself: a duplicate of it (`ncclCommSplit`, 2.18), which leaves it alone.
    ///
    /// The given one has this communicator's ranks, in the same order and on the same GPUs. Collective over them. What the program calls
    /// with its own communicator is not ordered against phalanx's operations: let one end before the other begins, as NCCL demands of two
    /// communicators of one GPU.
    ///
    /// # Safety
    /// `handle` is a communicator of the library that phalanx has loaded ([`library`](Surface::library)). It is alive, and no thread calls
    /// anything with it meanwhile.
    ///
    /// # Errors
    /// [`UsageError::Setting`](crate::UsageError::Setting) on a rank whose handle is null, or has another rank, number of ranks or GPU; the
    /// other ranks are told which one. [`Error::MissingFunction`](crate::Error) before NCCL 2.18.
    pub unsafe fn adopt(&self, handle: *mut c_void) -> Result<Comm> {
        // SAFETY: the caller's contract; `Comm` is not `Sync`, so no other thread is inside.
        let adopted = self
            .front
            .recorded(&Call::empty(Operation::Split), || unsafe { self.comm.duplicate_of(handle) })?;
        Ok(Comm::new(Arc::new(adopted), self.front.recorder.child_name("adopted")))
    }

    /// Whether an error was noticed since the last look, without waiting (`ncclCommGetAsyncError`). An error
    /// ends the communicator, on all ranks.
    pub fn async_error(&self) -> Result<()> {
        self.comm.communicator.look_for_error()
    }

    /// The library's account of its last error (`ncclGetLastError`, 2.13), of whichever communicator and
    /// thread of this process; empty if there was none. A [`LibraryError`](crate::LibraryError) has it in its
    /// text.
    ///
    /// # Errors
    /// [`Error::MissingFunction`](crate::Error) if the library is too old for it.
    pub fn last_error(&self) -> Result<String> {
        self.comm.communicator.library.last_error()
    }

    pub(crate) fn best_buffer<T: Element, S: GpuSlice<T>>(&self, len: usize) -> Result<Buffer<T, S>> {
        self.buffer(len, best(&self.comm.communicator, !self.comm.is_driven_here()))
    }

    pub(crate) fn buffer<T: Element, S: GpuSlice<T>>(
        &self,
        len: usize,
        registration: Registration,
    ) -> Result<Buffer<T, S>> {
        let arrive = || {
            let blocks = Blocks::Equal(len);
            self.gather(&Call { dtype: T::DTYPE, blocks, ..Call::empty(Operation::Alloc) })
        };
        Buffer::new(&self.comm.communicator, self.stream(), len, registration, arrive)
    }

    pub(crate) fn registered<T: Element, S: GpuSlice<T>>(&self, slice: S) -> Result<Buffer<T, S>> {
        let start = slice.lend(self.stream)?.span().start;
        Buffer::of_slice(&self.comm.communicator, slice, start)
    }

    /// Carries out started collectives and posted messages before other work is enqueued.
    pub(crate) fn prepare(&self) -> Result<()> {
        self.front.requests().wait_for_collectives();
        self.comm.flush()
    }

    /// [`prepare`](Surface::prepare) for a collective, which is compared as those of the front are.
    ///
    /// # Safety
    /// As for [`Backend::collective`].
    pub(crate) unsafe fn prepare_collective(&self, call: &Call<'_>) -> Result<()> {
        self.front.requests().wait_for_collectives();
        // SAFETY: the caller's contract.
        unsafe { self.comm.prepare(call) }
    }

    /// Waits until all ranks arrive at a collective call of the library.
    pub(crate) fn gather(&self, call: &Call<'_>) -> Result<()> {
        self.prepare()?;
        self.front.recorded(call, || self.comm.gather_for(call))
    }

    /// Gives memory back that the kernels of all ranks reach, by its number among the communicator's. Waits for the communicator's work, and for
    /// all ranks.
    #[cfg(feature = "nccl")]
    pub(crate) fn free_peer_memory(&self, memory: &Arc<PeerMemory>, number: u32) -> Result<()> {
        let communicator = &self.comm.communicator;
        let device = communicator.device;
        self.prepare()?;
        self.comm.sync()?;
        {
            let _current = device.enter();
            memory.close();
        }
        self.gather(&Call { root: number as usize, ..Call::empty(Operation::Free) })?;
        if let Some(direct) = communicator.direct.get() {
            direct.release(memory);
        }
        memory.free();
        reclaim::wait();
        Ok(())
    }

    fn stream(&self) -> &'a GpuStream {
        self.stream.gpu_stream().expect("a communicator of GPUs has a stream")
    }

    /// Frees GPU memory that the communicator does not need while it is not used (`ncclCommSuspend`, 2.29.7).
    /// Collective; no operation until [`resume`](Surface::resume).
    pub fn suspend(&self) -> Result<()> {
        let communicator = &self.comm.communicator;
        let suspend = communicator.library.need(communicator.library.ncclCommSuspend, "ncclCommSuspend")?;
        self.comm.refuse_driver("suspend")?;
        self.prepare()?;
        self.comm.sync()?;
        self.gather(&Call::empty(Operation::Suspend))?;
        // SAFETY: a usable communicator with no work under way.
        communicator.call("ncclCommSuspend", |comm| unsafe { suspend(comm, NCCL_SUSPEND_MEM) })?;
        communicator.is_suspended.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Takes the memory back (`ncclCommResume`, 2.29.7). Collective.
    pub fn resume(&self) -> Result<()> {
        let communicator = &self.comm.communicator;
        let resume = communicator.library.need(communicator.library.ncclCommResume, "ncclCommResume")?;
        self.gather(&Call::empty(Operation::Resume))?;
        // SAFETY: a usable communicator.
        communicator.call("ncclCommResume", |comm| unsafe { resume(comm) })?;
        communicator.is_suspended.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// How much GPU memory the communicator has (`ncclCommMemStats`, 2.29.7).
    pub fn memory(&self, statistic: MemoryStatistic) -> Result<u64> {
        let communicator = &self.comm.communicator;
        let name = "ncclCommMemStats";
        let stats = communicator.library.need(communicator.library.ncclCommMemStats, name)?;
        let statistic = match statistic {
            MemoryStatistic::Suspendable => mem_stat::GpuMemSuspend,
            MemoryStatistic::Suspended => mem_stat::GpuMemSuspended,
            MemoryStatistic::Persistent => mem_stat::GpuMemPersist,
            MemoryStatistic::Total => mem_stat::GpuMemTotal,
        };
        let mut value = 0;
        // SAFETY: a usable communicator; the out-pointer is written during the call.
        communicator.call(name, |comm| unsafe { stats(comm, statistic, &raw mut value) })?;
        Ok(value)
    }
}

impl std::fmt::Debug for Surface<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Surface").field("version", &self.version()).field("library", &self.library()).finish()
    }
}
