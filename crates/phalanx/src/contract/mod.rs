//! What a backend is to the front: an object that carries out calls that were checked before.
//!
//! # Validation is not here
//! Lengths, roots, peers and counts are checked once, in the typed front (`collective.rs`, `p2p.rs`) or
//! in the portable trait. A backend trusts its [`Call`]; what it alone can see (other ranks' calls,
//! deadlines, the operating system) it reports.

mod flow;
pub(crate) mod hosts;
mod shape;
mod stream_sync;

pub(crate) use flow::{Flow, Who};
pub(crate) use shape::Shape;
pub use stream_sync::StreamSyncOps;

#[cfg(feature = "cuda")]
use crate::buffer::collective_config::RawCollectiveConfig;
#[cfg(feature = "cuda")]
use crate::buffer::stream::GpuStream;
use crate::buffer::stream::Stream;
use crate::contract::hosts::HostTopology;
use crate::types::dtype::DType;
use crate::types::error::{Error, Result, UnsupportedError};
use crate::types::memory::{Allocation, RawStream, Space, Span};
use crate::types::op::{RawReduction, ReductionCode};
use std::time::Duration;

/// Which library carries a communicator's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BackendKind {
    /// One rank: nothing has to be moved.
    Solo,
    /// Shared memory between the threads of a process or the processes of a host.
    Host,
    /// NVIDIA's library for GPUs: each rank has one.
    Nccl,
    /// An MPI library, found at run time.
    Mpi,
    /// AMD's library for GPUs: each rank has one.
    Rccl,
    /// NVIDIA's OpenSHMEM: each rank is a process with a GPU. Only where it is asked for.
    Nvshmem,
}

impl BackendKind {
    /// The name used by `PHALANX_BACKEND`.
    pub const fn name(self) -> &'static str {
        match self {
            BackendKind::Solo => "solo",
            BackendKind::Host => "host",
            BackendKind::Nccl => "nccl",
            BackendKind::Mpi => "mpi",
            BackendKind::Rccl => "rccl",
            BackendKind::Nvshmem => "nvshmem",
        }
    }
}

impl std::fmt::Display for BackendKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Which operation a call is. The numbers travel between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Operation {
    AllReduce = 1,
    Broadcast,
    Reduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Gather,
    Scatter,
    AllGatherV,
    ReduceScatterV,
    GatherV,
    ScatterV,
    AllToAllV,
    Barrier,
    Split,
    Finalize,
    Send,
    Recv,
    Init,
    Shrink,
    Grow,
    /// Of memory that all ranks allocate together.
    Alloc,
    Suspend,
    Resume,
    WaitSignals,
    /// What kernels need of a communicator. What is asked for is in place of the root.
    DeviceComm,
}

impl Operation {
    const ALL: [(Operation, &'static str); 26] = [
        (Operation::AllReduce, "all_reduce"),
        (Operation::Broadcast, "broadcast"),
        (Operation::Reduce, "reduce"),
        (Operation::AllGather, "all_gather"),
        (Operation::ReduceScatter, "reduce_scatter"),
        (Operation::AllToAll, "all_to_all"),
        (Operation::Gather, "gather"),
        (Operation::Scatter, "scatter"),
        (Operation::AllGatherV, "all_gather_v"),
        (Operation::ReduceScatterV, "reduce_scatter_v"),
        (Operation::GatherV, "gather_v"),
        (Operation::ScatterV, "scatter_v"),
        (Operation::AllToAllV, "all_to_all_v"),
        (Operation::Barrier, "barrier"),
        (Operation::Split, "split"),
        (Operation::Finalize, "finalize"),
        (Operation::Send, "send"),
        (Operation::Recv, "recv"),
        (Operation::Init, "init"),
        (Operation::Shrink, "shrink"),
        (Operation::Grow, "grow"),
        (Operation::Alloc, "alloc"),
        (Operation::Suspend, "suspend"),
        (Operation::Resume, "resume"),
        (Operation::WaitSignals, "wait_signals"),
        (Operation::DeviceComm, "device_comm"),
    ];

    pub fn name(self) -> &'static str {
        Operation::ALL[self as usize - 1].1
    }

    pub fn from_code(code: u8) -> Option<Operation> {
        Operation::ALL.get(usize::from(code).wrapping_sub(1)).map(|(operation, _)| *operation)
    }

    /// Whether one rank is special.
    pub fn is_rooted(self) -> bool {
        use Operation::*;
        matches!(self, Broadcast | Reduce | Gather | Scatter | GatherV | ScatterV)
    }

    pub fn reduces(self) -> bool {
        use Operation::*;
        matches!(self, AllReduce | Reduce | ReduceScatter | ReduceScatterV)
    }

    /// Whether it can be one of several operations that start together.
    #[cfg(feature = "cuda")]
    pub fn is_queued_in_groups(self) -> bool {
        !self.is_empty_handed() && self != Operation::Alloc
    }

    /// Whether the call has no data at all.
    pub fn is_empty_handed(self) -> bool {
        use Operation::*;
        let is_errand = matches!(self, Init | Shrink | Grow | Suspend | Resume | WaitSignals | DeviceComm);
        is_errand || matches!(self, Barrier | Finalize | Split)
    }
}

/// The lengths of the ranks' blocks, in elements. Blocks lie one behind the other in rank order.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Blocks<'a> {
    /// Every block has this many elements.
    Equal(usize),
    /// Rank r's block has `counts[r]` elements.
    Each(&'a [usize]),
}

impl Blocks<'_> {
    pub fn len(&self, rank: usize) -> usize {
        match self {
            Blocks::Equal(count) => *count,
            Blocks::Each(counts) => counts[rank],
        }
    }

    pub fn offset(&self, rank: usize) -> usize {
        match self {
            Blocks::Equal(count) => count * rank,
            Blocks::Each(counts) => counts[..rank].iter().sum(),
        }
    }

    pub fn longest(&self) -> usize {
        match self {
            Blocks::Equal(count) => *count,
            Blocks::Each(counts) => counts.iter().copied().max().unwrap_or(0),
        }
    }
}

/// One rank's part in a collective, checked.
///
/// What `send` and `recv` point to is given by the operation, with `blocks` as the unit:
///
/// | operation | `send` | `recv` |
/// |---|---|---|
/// | all_reduce, broadcast, reduce | one block | one block |
/// | all_gather, gather | own block | all blocks |
/// | reduce_scatter, scatter | all blocks | own block |
/// | all_to_all | all blocks | all blocks |
///
/// In place, `send` and `recv` point into the same buffer. Where a rooted operation does not use a
/// pointer on this rank it is never read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call<'a> {
    pub operation: Operation,
    pub dtype: DType,
    pub reduction: RawReduction,
    pub root: usize,
    pub send: *const u8,
    pub recv: *mut u8,
    /// Which memory `send` and `recv` are in: [`Space::Host`] unless the backend is one for GPUs.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "without GPUs all memory is the host's"))]
    pub spaces: [Space; 2],
    pub blocks: Blocks<'a>,
    /// The blocks of `recv`: the same, but for all_to_all_v, where `blocks` are those of `send`.
    pub recv_blocks: Blocks<'a>,
    /// Behind whose work the operation comes.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "without GPUs all memory is the host's"))]
    pub stream: RawStream,
    /// Where the factor of a pre-multiplied sum is: in `reduction`, or on the GPU at the address that is there, which is read when the
    /// operation is carried out.
    #[cfg(feature = "cuda")]
    pub factor_space: Space,
    /// Settings of this call.
    #[cfg(feature = "cuda")]
    pub config: Option<&'a RawCollectiveConfig>,
}

impl<'a> Call<'a> {
    /// A number for its settings that differs for nearly all that differ; 0 if it has none.
    #[inline(always)]
    pub fn config_tag(&self) -> u8 {
        #[cfg(feature = "cuda")]
        return self.config.map_or(0, RawCollectiveConfig::tag);
        #[cfg(not(feature = "cuda"))]
        return 0;
    }

    /// With the settings of a lane.
    #[inline(always)]
    pub fn configured(self, #[cfg_attr(not(feature = "cuda"), expect(unused))] lane: &'a Stream) -> Self {
        Call {
            #[cfg(feature = "cuda")]
            config: lane.config(),
            ..self
        }
    }

    /// Whether any of its memory is a GPU's.
    #[inline]
    pub fn is_on_gpu(&self) -> bool {
        #[cfg(feature = "cuda")]
        return self.spaces.contains(&Space::Device);
        #[cfg(not(feature = "cuda"))]
        return false;
    }

    /// With its buffers.
    #[inline(always)]
    pub fn with_buffers(self, send: Span, recv: Span) -> Self {
        Call { send: send.start, recv: recv.start, spaces: [send.space, recv.space], ..self }
    }

    /// A call without data.
    #[inline(always)]
    pub fn empty(operation: Operation) -> Call<'static> {
        Call {
            operation,
            dtype: DType::U8,
            reduction: RawReduction { code: ReductionCode::Sum, factor: 0 },
            root: 0,
            send: std::ptr::null(),
            recv: std::ptr::null_mut(),
            spaces: [Space::Host; 2],
            blocks: Blocks::Equal(0),
            recv_blocks: Blocks::Equal(0),
            stream: RawStream::NONE,
            #[cfg(feature = "cuda")]
            factor_space: Space::Host,
            #[cfg(feature = "cuda")]
            config: None,
        }
    }
}

/// Which way a message goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Send(*const u8),
    Recv(*mut u8),
}

impl Direction {
    /// What the call is called.
    pub fn operation(self) -> Operation {
        match self {
            Direction::Send(_) => Operation::Send,
            Direction::Recv(_) => Operation::Recv,
        }
    }
}

/// One message to or from a peer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Transfer {
    pub direction: Direction,
    pub peer: usize,
    pub tag: u32,
    pub dtype: DType,
    /// Elements.
    pub count: usize,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "without GPUs all memory is the host's"))]
    pub space: Space,
    /// Behind whose work it comes.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "without GPUs all memory is the host's"))]
    pub stream: RawStream,
}

impl Transfer {
    /// What it is called.
    pub fn operation(&self) -> Operation {
        self.direction.operation()
    }

    /// A message between buffers in host memory.
    pub fn host(direction: Direction, peer: usize, tag: u32, dtype: DType, count: usize) -> Transfer {
        Transfer { direction, peer, tag, dtype, count, space: Space::Host, stream: RawStream::NONE }
    }
}

// SAFETY: a transfer is a description; the contract of `Backend::post` says how long its memory lives,
// whichever thread looks at it.
unsafe impl Send for Transfer {}

/// A posted transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OperationId(pub usize);

/// How a communicator ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Departure {
    Left,
    Panicked,
}

/// Collectives that go on meanwhile, moved along by every wait and by [`Backend::progress`].
pub(crate) trait StartCollectives {
    /// Starts a collective, behind those that were started before.
    ///
    /// # Safety
    /// As for [`Backend::collective`]; the memory stays valid, and is touched by nobody else, until `wait` or a true
    /// `test` for the ticket has answered, or any of them failed.
    unsafe fn start(&self, call: &Call<'static>) -> Result<OperationId>;

    /// Waits for it, moving everything along.
    fn wait(&self, ticket: OperationId) -> Result<()>;

    /// Moves everything along; whether this one is done (and its ticket spent).
    fn test(&self, ticket: OperationId) -> Result<bool>;
}

/// One rank's end of a communicator.
pub(crate) trait Backend: std::any::Any + Send + Sync {
    fn kind(&self) -> BackendKind;
    fn rank(&self) -> usize;
    fn world_size(&self) -> usize;

    /// The lane on which operations run unless another is named.
    fn lane(&self) -> Stream {
        Stream::host()
    }

    /// Prepares a GPU stream for operations of this communicator. `false` if the backend does not enqueue on streams.
    #[cfg(feature = "cuda")]
    fn adopt(&self, _stream: &GpuStream) -> Result<bool> {
        Ok(false)
    }

    /// The number of this rank's GPU in its process.
    #[cfg(feature = "cuda")]
    fn gpu(&self) -> Option<usize> {
        None
    }

    /// Moves the communicator to a stream of its own, and answers it as the new default.
    #[cfg(feature = "cuda")]
    fn make_portable(&self) -> Option<Result<Stream>> {
        None
    }

    /// Whether operations on device memory are enqueued on a stream, and complete later.
    fn is_stream_ordered(&self) -> bool {
        false
    }

    /// Who shares a host. Unless a backend says otherwise, all do.
    fn host_topology(&self) -> HostTopology {
        HostTopology::one_host(self.world_size())
    }

    /// Takes part in a collective. Complete when it returns; on device memory, enqueued.
    ///
    /// # Safety
    /// The call was checked, its memory is valid as its table says, and no other thread is inside
    /// `collective` or `split` of this object.
    unsafe fn collective(&self, call: &Call<'_>) -> Result<()>;

    /// [`collective`](Self::collective) for a record: calls `begun` before it waits or moves more than a few KiB (the first call
    /// counts), and perhaps not at all if it does neither.
    ///
    /// # Safety
    /// As for `collective`.
    unsafe fn recorded_collective(&self, call: &Call<'_>, begun: &dyn Fn()) -> Result<()> {
        begun();
        // SAFETY: the caller's contract.
        unsafe { self.collective(call) }
    }

    /// Collectives that go on meanwhile by themselves. Without, those that are started have a thread of the communicator.
    fn start_collectives(&self) -> Option<&dyn StartCollectives> {
        None
    }

    /// Starts a transfer. Transfers with one peer in one direction are matched in the order of posting.
    ///
    /// # Safety
    /// The memory stays valid, is not written (send) and not touched at all (recv), until `wait` or a
    /// true `test` for the ticket has answered, or any of them failed.
    unsafe fn post(&self, transfer: Transfer) -> Result<OperationId>;

    /// Starts two transfers, of which neither can wait for what comes behind the other.
    ///
    /// # Safety
    /// As for [`post`](Self::post), of each that is answered with a ticket.
    unsafe fn post_both(&self, transfers: [Transfer; 2]) -> [Result<OperationId>; 2] {
        // SAFETY: the caller's contract.
        transfers.map(|transfer| unsafe { self.post(transfer) })
    }

    /// Waits for a transfer, moving all others along; calls `meanwhile` again and again.
    fn wait(&self, ticket: OperationId, meanwhile: &dyn Fn()) -> Result<()>;

    /// A transfer from its start to its end, for a record: calls `begun` as
    /// [`recorded_collective`](Self::recorded_collective) does.
    ///
    /// # Safety
    /// As for `post`.
    unsafe fn recorded_transfer(&self, transfer: Transfer, begun: &dyn Fn()) -> Result<()> {
        begun();
        // SAFETY: the caller's contract.
        let ticket = unsafe { self.post(transfer) }?;
        self.wait(ticket, &|| ())
    }

    /// Moves everything along; whether this transfer is done (and its ticket spent).
    fn test(&self, ticket: OperationId) -> Result<bool>;

    /// Moves transfers and started collectives along; whether any is still under way.
    fn progress(&self) -> Result<bool>;

    /// A number that is another one when a transfer has moved; `None` where that is not known.
    fn moved(&self) -> Option<u64> {
        None
    }

    /// Between this and `end_group`, operations of stream-ordered backends are only queued, on this thread
    /// and over all communicators.
    fn start_group(&self) {}

    /// Starts what was queued, if this ends the outermost group.
    fn end_group(&self) -> Result<()> {
        Ok(())
    }

    /// An error if the communicator has failed.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Waits until this rank's work is complete.
    fn sync(&self) -> Result<()> {
        Ok(())
    }

    /// Events and streams, if there are any.
    fn stream_sync(&self) -> Option<&dyn StreamSyncOps> {
        None
    }

    /// A communicator of the ranks with the same colour, ordered by key and then by rank.
    ///
    /// # Safety
    /// No other thread is inside `collective` or `split` of this object.
    unsafe fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Box<dyn Backend>>>;

    /// How many of the communicator's operation numbers a split takes.
    fn collectives_of_split(&self) -> u64 {
        1
    }

    /// The same of [`grow`](Backend::grow).
    fn collectives_of_grow(&self) -> u64 {
        1
    }

    /// A communicator of those ranks that are still there, in their order, and the number of this shrinking of
    /// this communicator. Waits for them no longer than the deadline, for each rank that is lost meanwhile.
    fn shrink(&self) -> Result<(Box<dyn Backend>, u64)> {
        Err(Error::from(UnsupportedError {
            what: "shrink".into(),
            why: format!("the backend {} cannot go on without a rank", self.kind()),
            remedy: "start the job again".into(),
        }))
    }

    /// An error if these ranks cannot take in so many processes: before anything is counted.
    fn check_growth(&self, _joiners: usize) -> Result<()> {
        Err(Error::from(UnsupportedError {
            what: "grow".into(),
            why: format!("the backend {} cannot take in new ranks", self.kind()),
            remedy: "start the job again with more ranks".into(),
        }))
    }

    /// A communicator of these ranks and of so many processes that come in, and a number that no other has. Collective.
    /// [`check_growth`](Backend::check_growth) allows it.
    ///
    /// # Safety
    /// As for `split`.
    unsafe fn grow(&self, _joiners: usize) -> Result<(Box<dyn Backend>, u64)> {
        unreachable!("check_growth refuses it")
    }

    /// Zeroed memory that is as near to the peers as the backend has it, aligned to 64 bytes.
    fn alloc(&self, bytes: usize) -> Result<Allocation>;

    /// How long a wait may take.
    fn timeout(&self) -> Duration;

    /// Changes it for the calls that follow.
    fn set_timeout(&self, timeout: Duration);

    /// Fails the communicator for every rank.
    fn abort(&self);

    /// The last word of this rank: peers that still need it are told.
    fn depart(&self, departure: Departure);
}

/// The name of a communicator that has grown, in the flight records of old and new members alike.
pub(crate) fn grown_name(number: u64) -> String {
    format!("grown-{number:016x}")
}
