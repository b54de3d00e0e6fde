//! The NVSHMEM backend: ranks are PEs, processes with one GPU each. It is for programs that use symmetric
//! memory, put and get and want the rest of phalanx beside them. Bulk collectives are faster with NCCL.
//!
//! How it differs from the model: NVSHMEM waits without limit for a missing rank, and enqueued work cannot be
//! cancelled. So the ranks join and compare each collective on the host before they enqueue any of it,
//! whatever `PHALANX_CHECK` says. If the buffers are [symmetric memory](Buffer) at the same place on all
//! ranks, the library's own collectives are then enqueued. All other memory goes through the stage, symmetric
//! memory of the backend's, piece by piece: a rank copies its piece to its stage, the ranks line up, and each
//! gets its pieces from the others' stages. There no GPU waits for another.
//!
//! Reductions are the library's, in its order, f16 and bf16 in their own precision, if it has them and the
//! ranks form a team. Averages, pre-multiplied sums, 8-bit floats, and ranks without a team are reduced on
//! the host.
//!
//! | file | what |
//! |---|---|
//! | `process.rs`, `device.rs` | what the communicators of a process share; its GPU |
//! | `join.rs` | the comparison of calls before an operation, and waits |
//! | `collective.rs` | a collective as calls of the library, or as pieces |
//! | `staging.rs` | a collective of pieces through the stage |
//! | `message.rs`, `message_steps.rs` | messages, and the steps of one |
//! | `team.rs` | the library's team for a communicator |
//! | `memory.rs` | symmetric memory as a buffer; the API that only this backend has |
//! | `pe/` | NVSHMEM's host API, safe: contexts, symmetric memory, teams, puts and gets |

mod collective;
mod device;
mod join;
mod memory;
mod message;
mod message_steps;
pub(crate) mod pe;
mod process;
mod staging;
mod team;

pub use memory::{Buffer, Nvshmem};
pub(crate) use process::available;

use crate::backend::nvshmem::pe::{Context, PeControl};
use crate::buffer::stream::{GpuStream, Stream};
use crate::contract::{
    Backend, BackendKind, Call, Departure, HostMemory, Operation, OperationId, Transfer, Window,
};
use crate::control::control_channel::{AnnouncedCall, ControlChannel};
use crate::control::host_channel::HostChannel;
use crate::control::host_window::HostChannelWindow;
use crate::os::sync::lock;
use crate::types::error::{Error, Result};
use crate::types::memory::Allocation;
use device::Pinned;
use message::NvshmemMessages;
use process::NvshmemProcess;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use team::TeamHandle;

/// One rank's end of a communicator.
pub(crate) struct NvshmemComm {
    process: Arc<NvshmemProcess>,
    /// The PEs of the ranks.
    pes: Vec<usize>,
    /// The library's team of these PEs, if there is one: PE numbers in it are the ranks.
    team: Option<TeamHandle>,
    /// The channel on which the ranks join.
    host_channel: Arc<dyn HostChannel>,
    /// The channel on which missing and dead ranks are found.
    control_channel: ControlChannel,
    messages: NvshmemMessages,
    /// Number of the last collective, and its call.
    collectives: AtomicU64,
    last: Mutex<Option<AnnouncedCall>>,
    /// SharedContext while the communicator is being failed.
    failing: Mutex<()>,
    failed: OnceLock<Error>,
}

impl NvshmemComm {
    /// The backend behind a communicator, if it is this one.
    pub fn of(backend: &dyn Backend) -> Option<&NvshmemComm> {
        (backend as &dyn std::any::Any).downcast_ref()
    }

    /// A new channel in host memory between the same ranks. Collective.
    ///
    /// # Safety
    /// As for [`Backend::split`].
    pub unsafe fn host_channel(&self) -> Result<Box<dyn HostChannel>> {
        // SAFETY: the caller's contract.
        let channel = unsafe { self.host_channel.split_channel(Some(0), self.rank() as i64) }?;
        Ok(channel.expect("everybody has a colour"))
    }

    /// Makes each rank of a host channel a PE, on its GPU. Collective.
    pub fn join(host: Box<dyn HostChannel>, gpu: Option<usize>, name: &str) -> Result<NvshmemComm> {
        let topology = host.host_topology();
        // SAFETY: nobody else uses the channel yet.
        let channel = || unsafe { host.split_channel(Some(0), host.rank() as i64) };
        let (host_channel, watch_channel) = (channel()?, channel()?);
        let (host_channel, watch_channel) = host_channel.zip(watch_channel).expect("everybody has a colour");
        let control = PeControl::over(host_channel, watch_channel, format!("{name}/nvshmem"));
        let builder = Context::builder().timeout(host.timeout());
        let builder = gpu.into_iter().fold(builder, |builder, gpu| builder.gpu(gpu));
        let process = NvshmemProcess::new(builder.init_between(control, &topology)?)?;
        NvshmemComm::assemble(host, Arc::new(process), Some(TeamHandle::WORLD))
    }

    /// The communicator of the ranks of `channel`, which are PEs already. Collective.
    fn assemble(
        channel: Box<dyn HostChannel>,
        process: Arc<NvshmemProcess>,
        team: Option<TeamHandle>,
    ) -> Result<NvshmemComm> {
        let (rank, ranks) = (channel.rank(), channel.world_size());
        let part = || {
            // SAFETY: nobody else uses `channel` yet.
            let part = unsafe { channel.split_channel(Some(0), rank as i64) }?;
            Ok::<_, Error>(part.expect("everybody has a colour"))
        };
        let (control_channel, messages) = (part()?, NvshmemMessages::new(part()?, part()?));
        let mut all = vec![[0u64; 2]; ranks];
        let own = [process.pe as u64, u64::from(team.is_some())];
        // SAFETY: as above.
        unsafe { channel.all_gather_words(&own, all.as_flattened_mut()) }?;
        let pes: Vec<usize> = all.iter().map(|[pe, _]| *pe as usize).collect();
        let host_channel: Arc<dyn HostChannel> = channel.into();
        Ok(NvshmemComm {
            team: team.filter(|_| all.iter().all(|[_, has_team]| *has_team == 1)),
            control_channel: ControlChannel::new(control_channel, host_channel.clone()),
            process,
            pes,
            host_channel,
            messages,
            collectives: AtomicU64::new(0),
            last: Mutex::default(),
            failing: Mutex::default(),
            failed: OnceLock::new(),
        })
    }

    /// The number of its GPU.
    pub fn gpu(&self) -> usize {
        self.process.gpu()
    }

    /// Keeps a stream alive on which operations will be enqueued.
    pub fn adopt(&self, stream: &GpuStream) -> Result<()> {
        self.process.adopt(stream)
    }

    /// The error of a failed communicator, which every call returns.
    #[inline]
    fn check(&self) -> Result<()> {
        match self.failed.get() {
            Some(error) => Err(error.clone()),
            None => self.control_channel.check().map_err(|failure| self.fail(failure)),
        }
    }

    /// Fails the communicator for all ranks. Enqueued work stays on the GPU: the library cannot cancel it.
    #[cold]
    fn fail(&self, error: Error) -> Error {
        let error = match error {
            Error::Library(mut error) => {
                error.fatal = true;
                Error::Library(error)
            }
            error => error,
        };
        let _failing = lock(&self.failing);
        if self.failed.get().is_none() {
            self.process.is_broken.store(true, Ordering::Relaxed);
            self.control_channel.give_up();
        }
        self.failed.get_or_init(|| error).clone()
    }
}

impl Backend for NvshmemComm {
    fn kind(&self) -> BackendKind {
        BackendKind::Nvshmem
    }

    fn check(&self) -> Result<()> {
        NvshmemComm::check(self)
    }

    fn rank(&self) -> usize {
        self.host_channel.rank()
    }

    fn agree(&self, flag: bool) -> Result<bool> {
        self.control_channel.agree(flag)
    }

    fn set_name(&self, name: &str) {
        self.control_channel.set_name(name);
    }

    fn set_given_name(&self, name: &str) {
        self.control_channel.set_given_name(name);
    }

    fn world_size(&self) -> usize {
        self.pes.len()
    }

    fn stream(&self) -> Stream {
        Stream::gpu(GpuStream::Cuda(self.process.device.stream.clone()))
    }

    fn adopt(&self, stream: &GpuStream) -> Result<bool> {
        NvshmemComm::adopt(self, stream).map(|()| true)
    }

    fn gpu(&self) -> Option<usize> {
        Some(NvshmemComm::gpu(self))
    }

    unsafe fn collective(&self, call: &Call<'_>) -> Result<()> {
        match call.operation {
            Operation::Barrier => {
                // Waits for collectives only: a peer may send after the barrier.
                self.wait_for_last_collective()?;
                self.join_call(call).map(drop)
            }
            operation if operation.is_of_window() => self.join_call(call).map(drop),
            Operation::Finalize => self.finalize(call),
            _ if call.is_combined_on_host() => {
                call.check_combined_on_host(self.kind())?;
                self.wait_for_last_collective()?;
                self.join_call(call)?;
                // SAFETY: the caller's contract.
                self.on_host_channel(|channel| unsafe { channel.collective(call) })
            }
            // SAFETY: the caller's contract.
            _ => unsafe { self.operate(call) },
        }
    }

    unsafe fn post(&self, transfer: Transfer) -> Result<OperationId> {
        self.check()?;
        Ok(self.messages.post(transfer))
    }

    fn wait(&self, id: OperationId, meanwhile: &dyn Fn()) -> Result<()> {
        self.wait_for_message(id, meanwhile)
    }

    fn test(&self, id: OperationId) -> Result<bool> {
        // When this returns, also with an error, no other thread is inside a step.
        self.progress_messages()?;
        Ok(!self.messages.is_under_way(id))
    }

    fn progress(&self) -> Result<bool> {
        self.progress_messages()
    }

    fn sync(&self) -> Result<()> {
        self.finish_messages()?;
        self.wait_for_last_collective()
    }

    unsafe fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Box<dyn Backend>>> {
        self.join_call(&Call::empty(Operation::Split))?;
        let team = self.split_team(color, key).map_err(|error| self.fail(error))?;
        // SAFETY: the caller's contract; one thread at a time is in a collective.
        let part = self.on_host_channel(|channel| unsafe { channel.split_channel(color, key) })?;
        let Some(control) = part else { return Ok(None) };
        Ok(Some(Box::new(NvshmemComm::assemble(control, self.process.clone(), team)?)))
    }

    unsafe fn symmetric(&self, call: &Call<'_>) -> Result<Box<dyn Window + '_>> {
        self.join_call(call)?;
        // SAFETY: the caller's contract.
        let window = self.on_host_channel(|channel| unsafe { channel.symmetric(call) })?;
        let fail = |rank, since, error| {
            let number = self.collectives.load(Ordering::Relaxed);
            self.diagnose(&AnnouncedCall::of_rank(number, Operation::WaitSignals, rank), since, error)
        };
        Ok(Box::new(HostChannelWindow { window, fail }))
    }

    unsafe fn shared_by_host(&self, call: &Call<'_>) -> Result<Box<dyn HostMemory>> {
        self.join_call(call)?;
        // SAFETY: the caller's contract.
        self.on_host_channel(|channel| unsafe { channel.shared_by_host(call) })
    }

    /// Page-locked memory.
    fn alloc(&self, bytes: usize) -> Result<Allocation> {
        let memory = Pinned::new(&self.process.device, bytes)?;
        Ok(Allocation { start: memory.start, keep: Box::new(memory) })
    }

    fn timeout(&self) -> Duration {
        self.control_channel.timeout()
    }

    fn set_timeout(&self, timeout: Duration) {
        self.control_channel.set_timeout(timeout);
        self.host_channel.set_timeout(timeout);
    }

    fn abort(&self) {
        self.fail(Error::Aborted { rank: self.rank() });
    }

    fn depart(&self, departure: Departure) {
        if departure == Departure::Left {
            self.settle_messages();
        }
        self.control_channel.depart(departure);
        self.messages.depart(departure);
    }
}
