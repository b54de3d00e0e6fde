//! CUDA memory: passed to a CUDA-aware MPI, or staged through host memory.
//!
//! A buffer's stream is idle before MPI gets the buffer, and its context is current. MPI gets device memory
//! in messages, and in blocking calls in which only MPI touches it. All else is staged through host memory:
//! - reductions by our own operations and accumulators, which run on the host,
//! - non-blocking collectives, since some CUDA-aware MPIs (Open MPI) reject device memory there,
//! - the calls that `cuda_support.rs` excludes (Intel MPI).
//!
//! Ranks need not agree on this: MPI matches calls, whatever memory the buffers are in.

use super::MpiComm;
use super::collective::Scratch;
use super::cuda_support::CudaSupport;
use super::process::MpiProcess;
use super::reduction::ReductionPlan;
use super::watchdog::OperationWatch;
use crate::buffer::stream::CudaMemorySupport;
use crate::contract::{Call, Operation, Transfer};
use crate::os::RunInstant;
use crate::os::sync::lock;
use crate::types::error::{Error, Result, TimeoutError, UnsupportedError};
use crate::types::memory::Space;
use cudarc::driver::sys::{self, CUdeviceptr, CUresult};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// Admits CUDA buffers to a communicator: checks MPI's support and waits for the buffer's stream.
pub(crate) struct CudaAdmission {
    process: &'static MpiProcess,
    watch: Arc<OperationWatch>,
    rank: usize,
    /// The error of a failed communicator.
    failed: Arc<OnceLock<Error>>,
    /// The context of the last buffer.
    context: Mutex<Option<Arc<CudaContext>>>,
}

impl std::fmt::Debug for CudaAdmission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaAdmission").finish_non_exhaustive()
    }
}

impl CudaAdmission {
    pub fn new(
        process: &'static MpiProcess,
        watch: Arc<OperationWatch>,
        rank: usize,
        failed: Arc<OnceLock<Error>>,
    ) -> CudaAdmission {
        CudaAdmission { process, watch, rank, failed, context: Mutex::default() }
    }

    /// Makes the context of the message buffers current on this thread, which may be any.
    #[cold]
    pub fn enter(&self) {
        if let Some(context) = &*lock(&self.context)
            && let Err(error) = context.bind_to_thread()
        {
            crate::os::log::warn!("a GPU's context cannot be made current: {error}");
        }
    }
}

impl CudaMemorySupport for CudaAdmission {
    fn check(&self, stream: &Arc<CudaStream>) -> Result<()> {
        let Err(why) = &self.process.cuda else { return Ok(()) };
        Err(Error::from(UnsupportedError {
            what: format!("the memory of GPU {} in an operation of MPI", stream.context().ordinal()),
            why: why.clone(),
            remedy: "use an MPI that was built with CUDA; set PHALANX_MPI_CUDA=1 if this one takes CUDA memory all the \
                     same; use NCCL (PHALANX_BACKEND=nccl); or copy the buffer to host memory"
                .into(),
        }))
    }

    fn wait(&self, stream: &Arc<CudaStream>, limit: Option<Duration>) -> Result<()> {
        let context = stream.context();
        context.bind_to_thread()?;
        *lock(&self.context) = Some(context.clone());
        let since = RunInstant::now();
        loop {
            // SAFETY: a stream that its slice keeps alive; its context is current.
            match unsafe { sys::cuStreamQuery(stream.cu_stream()) } {
                CUresult::CUDA_SUCCESS => return Ok(()),
                CUresult::CUDA_ERROR_NOT_READY => {}
                error => return Err(DriverError(error).into()),
            }
            let waited = since.elapsed();
            if waited >= limit.unwrap_or_else(|| self.watch.deadline()) {
                let operation = format!("the work of GPU {} on a buffer", context.ordinal());
                let (sequence, reporter) = (self.watch.last() + 1, self.rank);
                let timeout = TimeoutError { operation, sequence, reporter, waited, missing: Vec::new() };
                return Err(self.failed.get_or_init(|| timeout.into()).clone());
            }
            if waited > Duration::from_micros(100) {
                std::thread::sleep(Duration::from_micros(20));
            }
        }
    }
}

impl MpiComm {
    /// A collective on CUDA memory.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective).
    #[cold]
    pub(crate) unsafe fn collective_on_cuda(&self, call: &Call<'_>) -> Result<()> {
        if self.can_give(call) {
            // SAFETY: the caller's contract, and nobody but MPI touches the memory.
            unsafe { self.collective_on_host(call) }?;
            return settle_copies();
        }
        let [sent, received] = call.flow().used(self.rank, self.ranks);
        let (mut send, mut recv) = (Scratch::default(), Scratch::default());
        let mut staged = *call;
        if call.spaces[0] == Space::Device && sent > 0 {
            let copy = send.bytes(sent);
            // SAFETY: so many bytes of the GPU's memory, whose work is complete, and room for them.
            unsafe {
                result::memcpy_dtoh_sync(std::slice::from_raw_parts_mut(copy, sent), address(call.send))?;
            }
            staged.send = copy;
        }
        if call.spaces[1] == Space::Device {
            staged.recv = recv.bytes(received);
        }
        staged.spaces = [Space::Host; 2];
        // SAFETY: the same call on memory of the same size, send and receive buffer apart.
        unsafe { self.collective_on_host(&staged) }?;
        if call.spaces[1] == Space::Device && received > 0 {
            // SAFETY: the result, and the GPU's memory for it, of which no one else makes use.
            unsafe { upload(std::slice::from_raw_parts(staged.recv, received), call.recv) }?;
        }
        Ok(())
    }

    /// Whether only MPI touches the memory of a call, so that it can be device memory.
    fn can_give(&self, call: &Call<'_>) -> bool {
        use Operation::*;
        if self.is_polled() {
            return false;
        }
        let is_root = call.root == self.rank;
        let in_place = call.send == call.recv.cast_const();
        let is_whole = || !self.is_large(call);
        if call.operation.reduces() && self.process.cuda != Ok(CudaSupport::AllCalls) {
            return false;
        }
        match call.operation {
            AllReduce => self.is_of_mpi(call),
            Reduce => self.is_of_mpi(call) && !(is_root && in_place),
            ReduceScatter | ReduceScatterV => {
                let all = call.flow().send_len(self.rank, self.ranks);
                let inside = (call.send.addr()..call.send.addr() + all).contains(&call.recv.addr());
                is_whole() && self.is_of_mpi(call) && !inside
            }
            Broadcast => !is_root || in_place,
            AllGather | AllGatherV => is_whole(),
            AllToAll => is_whole() || !in_place,
            AllToAllV => !in_place,
            _ => true,
        }
    }

    /// Whether MPI's own operation does the reduction.
    fn is_of_mpi(&self, call: &Call<'_>) -> bool {
        let constants = &self.process.mpi.constants;
        let plan = self.process.plans[usize::from(call.dtype.code())][call.reduction.code as usize];
        matches!(plan, ReductionPlan::Direct { op, .. } if op == constants.sum || op == constants.prod)
    }

    /// Whether a matched message is first received in host memory.
    pub(crate) fn receives_aside(&self, transfer: &Transfer) -> bool {
        transfer.space == Space::Device && self.process.cuda != Ok(CudaSupport::AllCalls)
    }
}

/// Copies to a GPU, and waits for the copy.
///
/// # Safety
/// So many bytes of a GPU's memory are there, and nobody uses them; its context is current.
pub(crate) unsafe fn upload(bytes: &[u8], target: *mut u8) -> Result<()> {
    // SAFETY: the caller's contract.
    unsafe { result::memcpy_htod_sync(address(target), bytes) }?;
    settle_copies()
}

/// Waits until copies to a GPU have arrived. A "synchronous" copy may return while data is still on its way
/// on the default stream, for which the buffer's stream does not wait. Intel MPI copies in this way, too.
pub(crate) fn settle_copies() -> Result<()> {
    // SAFETY: null is the default stream of the context, which is current.
    Ok(unsafe { result::stream::synchronize(std::ptr::null_mut()) }?)
}

fn address(pointer: *const u8) -> CUdeviceptr {
    pointer.addr() as CUdeviceptr
}
