//! The NCCL backend, and with it RCCL's: ranks are GPUs, one to a thread or a process.
//!
//! How it differs from the model: operations on device memory are enqueued on a stream and complete later
//! (`sync` waits for them); on host memory, which is copied to the GPU and back, they are complete when they return.
//! Reductions are the library's: in an order of its own, and f16, bf16 and fp8 in their own precision. There
//! are no tags. Messages are matched with the collectives in one order.
//!
//! Beside the library's communicator, the ranks share two channels of the host backend: one on which they set up and
//! meet (`control`), and one on which they announce their calls (`control_channel.rs` there), by which a missing, dead
//! or differing rank is found and named, which NCCL itself does not do. Whether the ranks share memory or are on
//! several hosts is the channels' secret.
//!
//! | file | what |
//! |---|---|
//! | `library.rs`, `config.rs`, `collective_config.rs` | the loaded library, its answers, settings of communicators and of calls |
//! | `device.rs`, `runtime/` | the GPU, by way of CUDA's driver or HIP |
//! | `staging.rs` | host memory on its way to the GPU |
//! | `communicator.rs` | the C communicator, and what is known of it |
//! | `making.rs`, `waiting.rs`, `ending.rs` | how it begins, is waited for and ends |
//! | `operation.rs`, `group.rs`, `messages.rs` | an operation from its call to its end; several at once; what is posted |
//! | `meeting.rs`, `watchdog.rs`, `turn.rs` | what keeps a rank from hanging inside the library, on its GPU, or behind who does |
//! | `graphs.rs` | CUDA graphs of operations |
//! | `collective.rs` | calls of the library |
//! | `streams.rs` | events between streams, for the portable trait |
//! | `device_comm.rs` | what kernels of a program's own need of a communicator |
//! | `memory.rs`, `surface.rs`, `scaled.rs`, `one_sided.rs`, `estimate.rs`, `rccl.rs` | memory that the library knows; what only NCCL and RCCL have |

pub(crate) mod collective;
pub(crate) mod collective_config;
pub(crate) mod communicator;
pub(crate) mod config;
pub(crate) mod device;
pub(crate) mod device_comm;
pub(crate) mod ending;
pub(crate) mod graphs;
pub(crate) mod group;
pub(crate) mod library;
pub(crate) mod making;
pub(crate) mod meeting;
pub(crate) mod memory;
pub(crate) mod messages;
pub(crate) mod operation;
pub(crate) mod parameters;
pub(crate) mod runtime;
pub(crate) mod staging;
pub(crate) mod streams;
pub(crate) mod turn;
pub(crate) mod waiting;
pub(crate) mod watchdog;

pub use collective_config::CollectiveConfig;
pub use config::Config;
pub(crate) use graphs::HeldGraph;
pub use memory::{Buffer, GpuSlice, Registration};
pub(crate) use operation::Footprint;
pub use parameters::parameters;

use crate::buffer::stream::{GpuStream, Stream};
use crate::contract::hosts::HostTopology;
use crate::contract::{
    Backend, BackendKind, Blocks, Call, Departure, Operation, OperationId, Shape, StreamSyncOps, Transfer,
};
use crate::control::control_channel::{AnnouncedCall, ControlChannel};
use crate::control::host_channel::HostChannel;
use crate::os::sync::lock;
use crate::rendezvous::gpus::{Visible, settle as settle_gpu};
use crate::types::error::{Error, Result, UnsupportedError, UsageError};
use crate::types::memory::{Allocation, Space};
use communicator::Communicator;
use cudarc::driver::CudaGraph;
use device::{Device, PinnedMemory};
use library::Library;
use making::Origin;
use meeting::Meeting;
use messages::Messages;
use phalanx_sys::nccl::{Flavour, NCCL_UNIQUE_ID_BYTES, ncclUniqueId};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;
use std::time::{Duration, Instant};
use streams::Events;

/// One rank's end of a communicator on GPUs.
pub(crate) struct NcclComm {
    pub(crate) communicator: Arc<Communicator>,
    control: Arc<dyn HostChannel>,
    stream: GpuStream,
    pub(crate) settings: Arc<NcclSettings>,
    pub(crate) messages: Arc<Messages>,
    events: Events,
    /// The stream of the portable trait, if there is one.
    portable: Mutex<Option<GpuStream>>,
}

/// What communicators, and those split from them, are made with.
#[derive(Debug, Default)]
pub(crate) struct NcclSettings {
    pub config: Config,
    /// Whether calls are compared between the ranks before anything is enqueued.
    pub check: bool,
    /// The thread that drives all ranks, as far as is known: the one that made them (`init_all`). Where it waited for another rank,
    /// that would never come.
    pub driver: Option<ThreadId>,
}

impl NcclSettings {
    /// Of ranks that this thread makes, and will drive unless it gives them away.
    pub fn driven_here(check: bool) -> Arc<NcclSettings> {
        let driver = Some(std::thread::current().id());
        Arc::new(NcclSettings { check, driver, ..NcclSettings::default() })
    }
}

/// The handle of a stream that is another one in each thread (`CU_STREAM_PER_THREAD`, `hipStreamPerThread`).
const PER_THREAD: usize = 2;

/// The GPUs that a rank can use, or of them the one that it was told to; an error if they, or the library, cannot be used.
pub(crate) fn visible(flavour: Flavour, wanted: Option<usize>) -> Result<Visible> {
    let ids = device::ids(flavour)?;
    let library = library::load(flavour)?;
    Visible::here(ids, wanted, library.shares_gpus())
}

/// Whether so many ranks of this host can have a GPU each; an error says what is missing.
pub(crate) fn available(flavour: Flavour, ranks: usize) -> Result<()> {
    let gpus = device::count(flavour)?;
    if gpus < ranks {
        return Err(Error::from(UnsupportedError {
            what: format!("{} for {ranks} ranks of this host", flavour.search().name),
            why: format!("each needs a GPU of its own, and this process sees {gpus}"),
            remedy: format!("use fewer ranks, or look at {}", device::hidden_by(flavour)),
        }));
    }
    library::load(flavour).map(drop)
}

impl NcclComm {
    /// Makes the communicator of all ranks of a host channel, this rank on the GPU that it was told to use, or that it gets
    /// of those which the ranks of its host see. Collective.
    pub fn join(
        control: Box<dyn HostChannel>,
        flavour: Flavour,
        gpu: Option<usize>,
        settings: Arc<NcclSettings>,
    ) -> Result<NcclComm> {
        let (name, seen, topology) = (flavour.search().name, visible(flavour, gpu), control.host_topology());
        // SAFETY: nobody else uses `control` yet.
        let tell = |own: &[u8]| unsafe { control.tell_bytes(own) };
        let gpu = settle_gpu(name, seen, (control.rank(), &topology), tell)?;
        let library = library::load(flavour)?;
        // SAFETY: as above.
        let ids = unsafe { exchange_ids(&*control, library, settings.config.unique_ids.unwrap_or(1)) }?;
        let device = Device::open(flavour, gpu);
        // SAFETY: as above. A rank without a GPU must not leave the others waiting in the library.
        let agreed = unsafe { agree(&*control, device.is_ok(), "open its GPU") };
        let device = device?;
        agreed?;
        let stream = device.default_stream();
        NcclComm::assemble(control, library, device, stream, settings, &Origin::Ids(ids))
    }

    /// Makes the library's communicator of the ranks of `control`.
    fn assemble(
        control: Box<dyn HostChannel>,
        library: &'static Library,
        device: Device,
        stream: GpuStream,
        settings: Arc<NcclSettings>,
        origin: &Origin,
    ) -> Result<NcclComm> {
        let (rank, ranks) = (control.rank(), control.world_size());
        // SAFETY: nobody else uses `control` yet.
        let control_channel = unsafe { control.part(Some(0), rank as i64) }?.expect("everybody has a colour");
        let control: Arc<dyn HostChannel> = control.into();
        let control_channel = ControlChannel::new(control_channel, control.clone());
        let communicator =
            Arc::new(Communicator::new(library, device, control_channel, (rank, ranks), &settings.config));
        communicator.adopt(&stream)?;
        let config = settings.config.raw(library);
        // SAFETY: as above. A rank that cannot begin must not leave the others waiting in the library.
        let agreed = unsafe { agree(&*control, config.is_ok(), "make the settings") };
        let (config, ()) = (config?, agreed?);
        communicator.make(origin, config)?;
        // SAFETY: as above.
        let met = unsafe { control.collective(&Call::empty(Operation::Barrier)) };
        // One that is not looked after, or that the others do not have, is not left behind in the library.
        met.and_then(|()| watchdog::watch(&communicator)).map_err(|error| communicator.fail(error))?;
        Ok(NcclComm {
            communicator,
            control,
            stream,
            settings,
            messages: Arc::default(),
            events: Events::default(),
            portable: Mutex::default(),
        })
    }

    /// The backend behind a communicator, if it is this one.
    pub fn of(backend: &dyn Backend) -> Option<&NcclComm> {
        (backend as &dyn std::any::Any).downcast_ref()
    }

    /// A new channel in host memory between the same ranks. Collective.
    ///
    /// # Safety
    /// As for [`Backend::split`].
    pub unsafe fn host_channel(&self) -> Result<Box<dyn HostChannel>> {
        // SAFETY: the caller's contract.
        let channel = unsafe { self.control.part(Some(0), self.rank() as i64) }?;
        Ok(channel.expect("everybody has a colour"))
    }

    pub(crate) fn shape(&self) -> Shape {
        Shape { rank: self.rank(), world_size: self.world_size() }
    }

    /// The ordinal of its GPU.
    pub fn gpu(&self) -> usize {
        self.communicator.device.ordinal()
    }

    /// Keeps a stream alive on which operations will be enqueued.
    pub fn adopt(&self, stream: &GpuStream) -> Result<()> {
        let device = &self.communicator.device;
        if stream.raw().0.addr() == PER_THREAD {
            return Err(UsageError::Setting {
                name: "Comm::on".into(),
                value: "the per-thread default stream (0x2)".into(),
                expected: "a stream that is the same in every thread, since others wait for it, too: CudaContext::new_stream, \
                           or default_stream"
                    .into(),
            }
            .into());
        }
        if !device.has(stream) {
            return Err(UsageError::Memory {
                memory: format!("a stream of {}", stream.describe()),
                wanted: format!("GPU {} of {} (and its primary context)", device.ordinal(), self.kind()),
                remedy: "make the stream on the communicator's GPU (Comm::gpu)",
            }
            .into());
        }
        self.communicator.adopt(stream)
    }

    /// A stream of its own for the portable trait, so that communication runs beside what the application computes.
    pub fn make_portable(&self) -> Result<Stream> {
        let stream = self.communicator.device.new_stream()?;
        *lock(&self.portable) = Some(stream.clone());
        self.adopt(&stream)?;
        Ok(Stream::gpu(stream))
    }

    fn portable_stream(&self) -> GpuStream {
        lock(&self.portable).clone().unwrap_or_else(|| self.stream.clone())
    }

    /// Compares a call with the other ranks' before anything is enqueued: NCCL itself would hang, or answer wrong data.
    ///
    /// # Safety
    /// As for [`Backend::collective`].
    unsafe fn compare(&self, call: &Call<'_>) -> Result<()> {
        let communicator = &self.communicator;
        communicator.check()?;
        let own = AnnouncedCall::call(communicator.collectives() + 1, call);
        communicator.control_channel.announce(&own);
        let mut all = vec![[0u64; AnnouncedCall::WORDS]; communicator.ranks];
        // SAFETY: the caller's contract.
        self.meet(&own, |control| unsafe { control.tell_all(&own.words(), all.as_flattened_mut()) })?;
        communicator.control_channel.compare(&all).map_err(|mismatch| communicator.fail(mismatch))?;
        if call.operation != Operation::AllToAllV {
            return Ok(());
        }
        // SAFETY: the caller's contract.
        unsafe { self.compare_blocks(&own, call) }
    }

    /// Compares what each rank sends to each with what that expects. All ranks come here.
    ///
    /// # Safety
    /// As for [`Backend::collective`].
    unsafe fn compare_blocks(&self, own: &AnnouncedCall, call: &Call<'_>) -> Result<()> {
        let communicator = &self.communicator;
        let mut peers = Vec::new();
        for part in collective::parts(call, communicator.rank, communicator.ranks) {
            let count = part.bytes / call.dtype.size();
            let block = own.block(part.direction.operation(), (part.peer, count));
            peers.extend(communicator.offer(&block, &part)?);
        }
        communicator.meet(&mut Meeting::Peers(peers))?;
        // A rank whose own blocks agree learns that others' do not.
        // SAFETY: the caller's contract.
        self.meet(own, |control| unsafe { control.collective(&Call::empty(Operation::Barrier)) })
    }

    /// What comes before a collective.
    ///
    /// # Safety
    /// As for [`Backend::collective`].
    #[inline(always)]
    pub(crate) unsafe fn prepare(&self, call: &Call<'_>) -> Result<()> {
        if self.settings.driver.is_some() {
            self.check_driver(call.operation)?;
        }
        self.flush()?;
        // Whoever drives all ranks would wait for itself.
        let is_compared = self.settings.check && !self.is_driven_here();
        // SAFETY: the caller's contract.
        if is_compared { unsafe { self.compare(call) } } else { Ok(()) }
    }

    /// All ranks come to what the library does with all of them, and waits for inside without a deadline: an error says who does not.
    pub(crate) fn gather_for(&self, call: &Call<'_>) -> Result<()> {
        let communicator = &self.communicator;
        self.check_driver(call.operation)?;
        communicator.check_awake(call.operation)?;
        let (subject, _) = communicator.next_collective(call);
        // SAFETY: one thread at a time makes collective calls; a call without data.
        self.meet(&subject, |control| unsafe { control.collective(call) })
    }

    /// Whether this thread made all ranks, and would wait for itself where it waits for one.
    pub(crate) fn is_driven_here(&self) -> bool {
        let is_this_thread = |driver| driver == std::thread::current().id();
        self.settings.driver.is_some_and(is_this_thread) && self.communicator.ranks > 1
    }

    /// An error for an operation in which this thread would wait for itself. Those of a group come together.
    #[cold]
    fn check_driver(&self, operation: Operation) -> Result<()> {
        if !operation.is_queued_in_groups() {
            return self.refuse_driver(operation.name());
        }
        match self.is_driven_here() && !group::is_open() {
            true => Err(waits_for_itself(
                operation.name(),
                "put the operations of all ranks in one phalanx::group",
            )),
            false => Ok(()),
        }
    }

    /// An error for what no thread can do for all ranks, if this one would have to.
    pub fn refuse_driver(&self, what: &'static str) -> Result<()> {
        let remedy = "give each communicator to a thread of its own, or make the ranks with phalanx::run";
        if self.is_driven_here() { Err(waits_for_itself(what, remedy)) } else { Ok(()) }
    }

    /// Whether its ranks are threads of this process.
    pub fn is_of_threads(&self) -> bool {
        self.control.is_of_threads()
    }

    /// Takes a CUDA graph of operations that were captured on this communicator.
    pub fn hold(&self, graph: CudaGraph) -> Arc<HeldGraph> {
        self.communicator.hold(graph)
    }

    /// Launches a CUDA graph of operations that were captured on this communicator.
    pub fn launch<'a, 'env: 'a>(
        &self,
        graph: &HeldGraph,
        calls: impl Iterator<Item = &'a Call<'env>>,
        transfers: impl Iterator<Item = &'a Transfer>,
    ) -> Result<()> {
        self.flush()?;
        self.communicator.check_awake(Operation::Barrier)?;
        for transfer in transfers {
            self.communicator.next_message(transfer);
        }
        for call in calls {
            self.communicator.next_collective(call);
        }
        self.communicator.launch(graph)
    }

    /// A meeting of the ranks, which an operation needs.
    fn meet<R>(
        &self,
        subject: &AnnouncedCall,
        meeting: impl FnOnce(&dyn HostChannel) -> Result<R>,
    ) -> Result<R> {
        let since = Instant::now();
        meeting(&*self.control).map_err(|error| self.communicator.judge(subject, since, error))
    }

    /// Carries the messages out that were posted, or waits for the thread that does.
    #[inline(always)]
    pub fn flush(&self) -> Result<()> {
        if self.messages.are_pending() { self.flush_messages() } else { Ok(()) }
    }

    #[cold]
    fn flush_messages(&self) -> Result<()> {
        self.communicator.check_owner()?;
        let _carrying = self.messages.carry();
        let (transfers, tickets) = self.messages.take();
        let Some(first) = transfers.first() else { return Ok(()) };
        let result = self.check_driver(first.operation()).and_then(|()| {
            // SAFETY: the contract of `post`: the memory is valid until its ticket is settled, which `wait` and `test` do when it
            // is complete: when `_carrying` is dropped, or the group ends that this thread has open.
            unsafe { operation::messages(&self.communicator, &transfers, self.settings.check) }
        });
        match &result {
            Err(error) => self.messages.fail(tickets, error),
            Ok(()) if group::is_open() => self.messages.leave_to_group(tickets),
            Ok(()) => {}
        }
        result
    }
}

/// An error for buffers in host memory where only those of the GPU will do.
pub(crate) fn check_on_device(spaces: &[Space], wanted: &str, remedy: &'static str) -> Result<()> {
    if spaces.iter().all(|space| *space == Space::Device) {
        return Ok(());
    }
    Err(UsageError::Memory { memory: "host memory".into(), wanted: wanted.into(), remedy }.into())
}

#[cold]
fn waits_for_itself(what: &str, remedy: &str) -> Error {
    Error::from(UnsupportedError {
        what: format!("{what} on the thread that called init_all"),
        why: "it waits for the other ranks, which are this thread's to drive".into(),
        remedy: remedy.into(),
    })
}

/// Unique ids of so many ranks, evenly spread, for all. Collective.
///
/// # Safety
/// As for [`Backend::collective`].
unsafe fn exchange_ids(
    control: &dyn HostChannel,
    library: &Library,
    count: usize,
) -> Result<Vec<ncclUniqueId>> {
    let ranks = control.world_size();
    if !(1..=ranks).contains(&count) {
        let expected = format!("1 to the number of ranks, {ranks}");
        return Err(
            UsageError::Setting { name: "unique_ids".into(), value: count.to_string(), expected }.into()
        );
    }
    let mut ids = vec![ncclUniqueId { internal: [0; NCCL_UNIQUE_ID_BYTES] }; count];
    let mut made: Result<()> = Ok(());
    for (number, id) in ids.iter_mut().enumerate() {
        let root = number * ranks / count;
        if control.rank() == root {
            let get = library.need(library.ncclGetUniqueId, "ncclGetUniqueId")?;
            // SAFETY: an out-pointer that is valid, written during the call.
            let result = unsafe { get(&raw mut *id) };
            if result != phalanx_sys::nccl::ncclResult_t::Success {
                made = Err(library.error(result, "ncclGetUniqueId").into());
            }
        }
        let start = id.internal.as_mut_ptr();
        let blocks = Blocks::Equal(NCCL_UNIQUE_ID_BYTES);
        let call = Call { send: start, recv: start, blocks, root, ..Call::empty(Operation::Broadcast) };
        // Told also if it could not be made: the others wait for it.
        // SAFETY: the caller's contract; the id's bytes are valid, in place.
        unsafe { control.collective(&call) }?;
    }
    made.map(|()| ids)
}

/// Whether all ranks could do something; an error that names the first that could not.
///
/// # Safety
/// As for [`Backend::collective`].
unsafe fn agree(control: &dyn HostChannel, could: bool, what: &str) -> Result<()> {
    let mut all = vec![[0u64; 1]; control.world_size()];
    // SAFETY: the caller's contract.
    unsafe { control.tell_all(&[u64::from(could)], all.as_flattened_mut()) }?;
    match all.iter().position(|could| *could == [0]) {
        None => Ok(()),
        Some(rank) => Err(Error::from(UnsupportedError {
            what: "the communicator of GPUs".into(),
            why: format!("rank {rank} could not {what}"),
            remedy: "see that rank's error".into(),
        })),
    }
}

impl Backend for NcclComm {
    fn kind(&self) -> BackendKind {
        match self.communicator.library.flavour() {
            Flavour::Nccl => BackendKind::Nccl,
            Flavour::Rccl => BackendKind::Rccl,
        }
    }

    fn rank(&self) -> usize {
        self.communicator.rank
    }

    fn world_size(&self) -> usize {
        self.communicator.ranks
    }

    fn host_topology(&self) -> HostTopology {
        self.control.host_topology()
    }

    fn lane(&self) -> Stream {
        Stream::gpu(self.stream.clone())
    }

    fn is_stream_ordered(&self) -> bool {
        true
    }

    fn adopt(&self, stream: &GpuStream) -> Result<bool> {
        NcclComm::adopt(self, stream).map(|()| true)
    }

    fn gpu(&self) -> Option<usize> {
        Some(NcclComm::gpu(self))
    }

    fn make_portable(&self) -> Option<Result<Stream>> {
        Some(NcclComm::make_portable(self))
    }

    unsafe fn collective(&self, call: &Call<'_>) -> Result<()> {
        if call.spaces != [Space::Device; 2] {
            operation::check_host_memory(&self.communicator, call)?;
        }
        // SAFETY: the caller's contract.
        unsafe { self.prepare(call) }?;
        if !call.operation.is_empty_handed() {
            // SAFETY: the caller's contract.
            return unsafe { operation::collective(&self.communicator, call) };
        }
        // A barrier, or the end: everybody's work is complete, and everybody has come.
        self.communicator.sync()?;
        let (subject, _) = self.communicator.next_collective(call);
        // SAFETY: the caller's contract.
        self.meet(&subject, |control| unsafe { control.collective(call) })?;
        self.communicator.control_channel.complete(self.communicator.collectives());
        if call.operation == Operation::Finalize {
            self.communicator.all_leave.store(true, Ordering::Release);
        }
        Ok(())
    }

    unsafe fn post(&self, transfer: Transfer) -> Result<OperationId> {
        self.communicator.check()?;
        let [ticket] = self.messages.post([transfer]);
        Ok(ticket)
    }

    /// Whoever takes one to carry it out takes the other, too.
    unsafe fn post_both(&self, transfers: [Transfer; 2]) -> [Result<OperationId>; 2] {
        match self.communicator.check() {
            Ok(()) => self.messages.post(transfers).map(Ok),
            Err(error) => [Err(error.clone()), Err(error)],
        }
    }

    fn wait(&self, ticket: OperationId, _meanwhile: &dyn Fn()) -> Result<()> {
        if !self.messages.is_complete(ticket) {
            // What fails is kept for each.
            let _ = self.flush();
        }
        self.messages.settle(ticket)
    }

    /// Does not wait: what is not complete is left to `progress`, but for the peers of a rank that panics, who do not come.
    fn test(&self, ticket: OperationId) -> Result<bool> {
        if !self.messages.is_complete(ticket) {
            if !std::thread::panicking() {
                self.messages.want(ticket);
            }
            return Ok(false);
        }
        self.messages.settle(ticket).map(|()| true)
    }

    /// Nothing moves on its own, since the order of messages and collectives is that of the rank's calls; but what somebody asks for is
    /// carried out, as if that were a wait.
    fn progress(&self) -> Result<bool> {
        if self.messages.are_wanted() {
            // What fails is kept for each.
            let _ = self.flush();
        }
        self.communicator.check().map(|()| false)
    }

    fn stream_sync(&self) -> Option<&dyn StreamSyncOps> {
        Some(self)
    }

    fn start_group(&self) {
        group::start(&self.communicator, &self.messages);
    }

    fn end_group(&self) -> Result<()> {
        let flushed = self.flush();
        flushed.and(group::end(&self.communicator))
    }

    fn sync(&self) -> Result<()> {
        self.flush()?;
        self.communicator.sync()
    }

    unsafe fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Box<dyn Backend>>> {
        let (parent, call) = (&self.communicator, Call::empty(Operation::Split));
        // SAFETY: the caller's contract.
        unsafe { self.prepare(&call) }?;
        parent.check_awake(call.operation)?;
        let (subject, _) = parent.next_collective(&call);
        // SAFETY: the caller's contract.
        let control = self.meet(&subject, |control| unsafe { control.part(color, key) })?;
        if parent.library.ncclCommSplit.is_none() {
            // Before 2.18: a communicator like any other.
            let (flavour, settings) = (parent.library.flavour(), self.settings.clone());
            let join = |control| NcclComm::join(control, flavour, Some(self.gpu()), settings);
            return Ok(control.map(join).transpose()?.map(|part| Box::new(part) as _));
        }
        let Some(control) = control else {
            return parent.take_no_part(&subject, self.settings.config.raw(parent.library)?).map(|()| None);
        };
        // The first member is in no other part: its rank is the colour.
        let (color, key) = (Some(control.first_member() as i32), control.rank() as i32);
        let origin = Origin::Split { parent: parent.clone(), color, key };
        let (library, device, stream) = (parent.library, parent.device, self.stream.clone());
        let part = NcclComm::assemble(control, library, device, stream, self.settings.clone(), &origin)?;
        Ok(Some(Box::new(part)))
    }

    fn shrink(&self) -> Result<(Box<dyn Backend>, u64)> {
        self.check_driver(Operation::Shrink)?;
        let (control, round) = self.communicator.control_channel.shrink()?;
        let flavour = self.communicator.library.flavour();
        let part = NcclComm::join(control, flavour, Some(self.gpu()), self.settings.clone())?;
        Ok((Box::new(part), round))
    }

    fn check_growth(&self, _joiners: usize) -> Result<()> {
        self.check_driver(Operation::Grow)
    }

    unsafe fn grow(&self, joiners: usize) -> Result<(Box<dyn Backend>, u64)> {
        self.sync()?;
        let call = Call { root: joiners, ..Call::empty(Operation::Grow) };
        let (subject, _) = self.communicator.next_collective(&call);
        // SAFETY: the caller's contract.
        let (control, number) =
            self.meet(&subject, |control| unsafe { control.grown(joiners, self.kind()) })?;
        self.communicator.control_channel.complete(self.communicator.collectives());
        let flavour = self.communicator.library.flavour();
        let grown = NcclComm::join(control, flavour, Some(self.gpu()), self.settings.clone())?;
        Ok((Box::new(grown), number))
    }

    /// Page-locked memory, staged like any of the host.
    fn alloc(&self, bytes: usize) -> Result<Allocation> {
        let device = &self.communicator.device;
        let _current = device.enter();
        let memory = PinnedMemory::new(device, bytes)?;
        Ok(Allocation { start: memory.start(), keep: Box::new(memory) })
    }

    fn timeout(&self) -> Duration {
        self.communicator.control_channel.timeout()
    }

    fn set_timeout(&self, timeout: Duration) {
        self.communicator.control_channel.set_timeout(timeout);
        self.control.set_timeout(timeout);
    }

    fn abort(&self) {
        // With it the meetings fail, not before: there is one verdict.
        self.communicator.fail(Error::Aborted { rank: self.rank() });
    }

    fn depart(&self, departure: Departure) {
        if self.communicator.control_channel.is_copy() {
            return;
        }
        // A rank that panics tells the others at once: they do not come to its messages.
        if departure == Departure::Left
            && let Err(error) = self.flush()
        {
            tracing::error!("messages were posted and not waited for, and failed: {error}");
        }
        self.communicator.depart(departure);
        self.control.depart(departure);
    }
}
