//! [`Context`]: this process as a PE, from initialisation to its end.

use super::control::{CollectiveCall, PeControl};
use super::device::{PeDevice, failed};
use super::init::Builder;
use super::library::{LOOK, NvshmemLibrary, within};
use super::limits::Limits;
use super::process_state::Claim;
use super::unique_id::UniqueId;
use crate::gpu::backoff::Backoff;
use crate::os::RunInstant;
use crate::types::error::{Error, Result, TimeoutError, UsageError};
use cudarc::driver::sys::{self, CUdeviceptr, CUresult};
use cudarc::driver::{CudaContext, CudaStream};
use phalanx_sys::nvshmem::version_text;
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

/// This process as a PE of NVSHMEM.
///
/// There is one at a time in a process. It stays on the thread that made it, and so does what borrows it:
/// ```compile_fail,E0277
/// # fn f(context: phalanx::nvshmem::Context) {
/// std::thread::spawn(move || context.quiet());
/// # }
/// ```
///
/// Memory borrows it, so nothing can be used after its end:
/// ```compile_fail,E0505
/// # fn f(context: phalanx::nvshmem::Context) -> phalanx::Result<()> {
/// let memory = context.alloc::<f32>(10)?;
/// context.finalize()?;
/// memory.free()
/// # }
/// ```
///
/// [`finalize`](Context::finalize) ends it, on all PEs together. Dropping it cannot do that: the library then
/// stays initialised, its memory allocated, and no other context can be made in this process. A line in the
/// log says so.
pub struct Context {
    pub(crate) library: &'static NvshmemLibrary,
    pub(crate) device: PeDevice,
    pub(crate) control: Option<PeControl>,
    pub(super) pe: usize,
    pub(super) pes: usize,
    pub(super) timeout: Cell<Duration>,
    /// Number of the last collective call, and of the last allocation.
    pub(super) steps: Cell<u64>,
    pub(super) allocations: Cell<u64>,
    pub(super) failed: OnceCell<Error>,
    /// Allocations on the heap: start and bytes.
    pub(crate) heap: RefCell<BTreeMap<CUdeviceptr, u64>>,
    /// Whether the heap grows, once known.
    pub(crate) heap_is_dynamic: OnceCell<bool>,
    /// Teams that were split off and not destroyed.
    pub(crate) teams: Cell<usize>,
    /// When the peers were last checked.
    pub(super) looked: Cell<RunInstant>,
    pub(crate) limits: Limits,
    pub(super) claim: Claim,
    pub(super) one_thread: PhantomData<*mut ()>,
}

impl Context {
    /// Settings for a new context.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Makes this process one of `pes` PEs with the same id. Without a communicator, collective calls are not
    /// compared, and only the timeout finds a missing PE.
    ///
    /// # Errors
    /// As for [`init`](Context::init).
    pub fn init_with_id(id: UniqueId, pe: usize, pes: usize) -> Result<Context> {
        Context::builder().init_with_id(id, pe, pes)
    }

    /// Finds the other PEs by the launcher's environment: `NVSHMEM_BOOTSTRAP` names the method, PMI by
    /// default (`NVSHMEM_BOOTSTRAP_PMI` chooses PMI, PMI-2 or PMIx). The library keeps the PEs that it found
    /// for every later context of the process. Otherwise as [`init_with_id`](Context::init_with_id).
    ///
    /// # Errors
    /// As for [`init`](Context::init); [`Error::LibraryNotFound`], too, if the library's plugin for that way
    /// cannot be loaded (those for PMIx in NVIDIA's wheels fit some releases of PMIx only).
    pub fn init_from_environment() -> Result<Context> {
        Context::builder().init_from_environment()
    }

    /// The number of this PE, from 0. `nvshmem_my_pe`
    pub fn my_pe(&self) -> usize {
        self.pe
    }

    /// How many PEs there are. `nvshmem_n_pes`
    pub fn n_pes(&self) -> usize {
        self.pes
    }

    /// This PE's GPU and its primary context.
    pub fn cuda_context(&self) -> &Arc<CudaContext> {
        &self.device.context
    }

    /// A stream of the context's own, on which symmetric memory is known to cudarc.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.device.stream
    }

    /// The time limit of a wait on the host.
    pub fn timeout(&self) -> Duration {
        self.timeout.get()
    }

    /// Changes [`timeout`](Context::timeout) for the calls that follow.
    pub fn set_timeout(&self, timeout: Duration) {
        self.timeout.set(timeout);
        if let Some(control) = &self.control {
            control.set_timeout(timeout);
        }
    }

    /// The loaded library's version, as `major.minor.patch`.
    pub fn version(&self) -> String {
        version_text(self.library.version())
    }

    /// Waits, with the timeout, until the work on a stream is complete.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Peer`]: the work on the stream waits for a PE that is missing. Final.
    pub fn sync(&self, stream: &CudaStream) -> Result<()> {
        self.check()?;
        self.device.check(stream)?;
        self.device.enter()?;
        let mut backoff = Backoff::new();
        // Puts to a dead PE complete, too, so the peers are checked even if the stream is idle.
        if backoff.since.saturating_duration_since(self.looked.get()) > LOOK {
            self.looked.set(backoff.since);
            self.look(backoff.since).map_err(|error| self.fail(error))?;
        }
        while !self.device.is_idle(stream).map_err(|error| self.fail(error))? {
            if backoff.pause() {
                self.look(backoff.since).map_err(|error| self.fail(error))?;
                if backoff.since.elapsed() > self.timeout() {
                    return Err(self.fail(self.late("the work on a stream")));
                }
            }
        }
        Ok(())
    }

    /// Ends NVSHMEM in this process, on all PEs together. Collective. Waits for all work of the GPU, and
    /// frees memory that was not freed. Another context can be made afterwards. `nvshmemx_hostlib_finalize`
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Peer`] if a PE does not come: the library then stays as it is.
    pub fn finalize(mut self) -> Result<()> {
        let name = "nvshmemx_hostlib_finalize";
        let finalize = self.library.need(self.library.nvshmemx_hostlib_finalize, name)?;
        self.drain()?;
        // SAFETY: initialised (its status was checked), once for each initialisation; nothing borrows the
        // context.
        self.collectively(CollectiveCall::new(name, [0; 3]), move || unsafe { finalize() })?;
        // No PE leaves while another's library may wait for it.
        if let Some(control) = &self.control {
            control.agree(true, "finalize NVSHMEM").map_err(|error| self.fail(error))?;
        }
        self.claim.entered = false;
        Ok(())
    }

    /// Ends the whole job from within: the library tells the launcher's process manager, where there is one,
    /// and every process ends with this status. `nvshmem_global_exit`
    ///
    /// # Errors
    /// [`Error::MissingFunction`]. Where the library knows no process manager (bootstrap by unique id) this
    /// returns, and the program has to end the process.
    pub fn global_exit(self, status: i32) -> Result<()> {
        let exit = self.library.need(self.library.nvshmem_global_exit, "nvshmem_global_exit")?;
        // SAFETY: initialised.
        unsafe { exit(status) };
        Ok(())
    }
}

/// Used by the other files of this module.
impl Context {
    /// The final error of the context, if there was one.
    #[inline]
    pub(crate) fn check(&self) -> Result<()> {
        match self.failed.get() {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    /// Records an error after which the library cannot be used.
    #[cold]
    pub(crate) fn fail(&self, error: Error) -> Error {
        if self.failed.set(error.clone()).is_ok() {
            crate::os::log::error!(
                pe = self.pe,
                "NVSHMEM cannot be used any more: {error}; end this process, with std::process::abort if its GPU may still \
                 wait for something"
            );
        }
        self.failed.get().cloned().unwrap_or(error)
    }

    pub(crate) fn late(&self, function: &'static str) -> Error {
        let (operation, sequence, reporter) = (function.into(), self.steps.get(), self.pe);
        TimeoutError { operation, sequence, reporter, waited: self.timeout(), missing: Vec::new() }.into()
    }

    pub(crate) fn look(&self, since: RunInstant) -> Result<()> {
        self.control.as_ref().map_or(Ok(()), |control| control.look(since))
    }

    /// Prepares a call of the library: checks the context, and makes its device current.
    #[inline]
    pub(crate) fn enter(&self) -> Result<()> {
        self.check()?;
        self.device.enter()
    }

    /// The number of the next allocation, the same on all PEs.
    pub(crate) fn next_allocation(&self) -> u64 {
        self.allocations.set(self.allocations.get() + 1);
        self.allocations.get()
    }

    #[inline]
    pub(crate) fn check_pe(&self, operation: &'static str, pe: usize) -> Result<c_int> {
        if pe < self.pes {
            return Ok(pe as c_int);
        }
        Err(UsageError::Rank { operation, role: "PE", rank: pe, world_size: self.pes }.into())
    }

    /// A collective call of the library, with the timeout, after all PEs have compared it.
    pub(crate) fn collectively<R: Send + 'static>(
        &self,
        step: CollectiveCall,
        call: impl FnOnce() -> R + Send + 'static,
    ) -> Result<R> {
        self.meet(&step)?;
        self.bounded(step.describe(), call)
    }

    /// Waits until all PEs make the same call.
    pub(crate) fn meet(&self, step: &CollectiveCall) -> Result<()> {
        self.check()?;
        self.steps.set(self.steps.get() + 1);
        match &self.control {
            Some(control) => control.meet(self.steps.get(), step).map_err(|error| self.fail(error)),
            None => Ok(()),
        }
    }

    /// Whether a step succeeded on all PEs: this PE's error, else one that names a failing PE.
    pub(crate) fn together<T>(&self, mine: Result<T>, what: &str) -> Result<T> {
        let Some(control) = &self.control else { return mine };
        let agreed = control.agree(mine.is_ok(), what);
        let mine = mine?;
        agreed.map(|()| mine)
    }

    /// A call of the library that may wait for other PEs, with the timeout.
    pub(crate) fn bounded<R: Send + 'static>(
        &self,
        what: String,
        call: impl FnOnce() -> R + Send + 'static,
    ) -> Result<R> {
        self.check()?;
        let context = self.device.context.clone();
        let call = move || context.bind_to_thread().map(|()| call());
        match within("NVSHMEM", self.timeout(), |since| self.look(since), call) {
            Ok(Some(Ok(answer))) => Ok(answer),
            Ok(Some(Err(error))) => Err(self.fail(error.into())),
            Ok(None) => {
                let (sequence, reporter, waited) = (self.steps.get(), self.pe, self.timeout());
                let error = TimeoutError { operation: what, sequence, reporter, waited, missing: Vec::new() };
                Err(self.fail(error.into()))
            }
            Err(error) => Err(self.fail(error)),
        }
    }

    /// Waits, with the timeout, until the GPU has completed all its work, on every stream.
    pub(crate) fn drain(&self) -> Result<()> {
        // SAFETY: the context is current in the thread that calls it.
        match self.bounded("the work of the GPU".into(), || unsafe { sys::cuCtxSynchronize() })? {
            CUresult::CUDA_SUCCESS => Ok(()),
            error => Err(self.fail(failed("cuCtxSynchronize", error, true))),
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.claim.entered {
            crate::os::log::error!(
                pe = self.pe,
                "an NVSHMEM context was dropped and not finalized: the library stays initialised and its memory \
                 allocated; call Context::finalize on every PE"
            );
        }
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("nvshmem::Context")
            .field("version", &self.version())
            .field("my_pe", &self.pe)
            .field("n_pes", &self.pes)
            .field("gpu", &self.device.context.ordinal())
            .finish()
    }
}
