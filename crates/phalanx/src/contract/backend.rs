//! [`Backend`]: what a backend fulfils.

use super::hosts::HostTopology;
use super::{
    BackendKind, Call, Envelope, HostMemory, OperationId, RankGrid, SharedFiles, StreamSyncOps, Transfer,
    Wanted, Window,
};
#[cfg(feature = "_gpu")]
use crate::buffer::stream::GpuStream;
use crate::buffer::stream::Stream;
use crate::os::RunInstant;
use crate::types::error::{Error, Result, UnsupportedError};
use crate::types::memory::Allocation;
use std::time::Duration;

/// How a rank leaves its communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Departure {
    Left,
    Panicked,
}

/// Nonblocking collectives, advanced by every wait and by [`Backend::progress`].
pub(crate) trait StartCollectives {
    /// Starts a collective, after those started before.
    ///
    /// # Safety
    /// As for [`Backend::collective`]; the memory stays valid, and nothing else touches it, until `wait` or a true
    /// `test` for its id has answered, or any of them failed.
    unsafe fn start(&self, call: &Call<'static>) -> Result<OperationId>;

    /// Waits for it, advancing everything.
    fn wait(&self, operation: OperationId) -> Result<()>;

    /// Advances everything; answers whether this one is complete (and its id spent).
    fn test(&self, operation: OperationId) -> Result<bool>;
}

/// One rank's end of a communicator.
pub(crate) trait Backend: std::any::Any + Send + Sync {
    fn kind(&self) -> BackendKind;
    fn rank(&self) -> usize;
    fn world_size(&self) -> usize;

    /// Tells it the communicator's name, for error messages. Once, before the first operation.
    fn set_name(&self, _name: &str) {}

    /// Tells it the name with what the program calls it. At most once.
    fn set_given_name(&self, _name: &str) {}

    /// The default stream.
    fn stream(&self) -> Stream {
        Stream::host()
    }

    /// Prepares a GPU stream for operations of this communicator. `false` if the backend does not enqueue on streams.
    #[cfg(feature = "_gpu")]
    fn adopt(&self, _stream: &GpuStream) -> Result<bool> {
        Ok(false)
    }

    /// The number of this rank's GPU in its process.
    fn gpu(&self) -> Option<usize> {
        None
    }

    /// Moves the communicator to a stream of its own, and answers it as the new default.
    fn make_portable(&self) -> Option<Result<Stream>> {
        None
    }

    /// Whether operations on device memory are enqueued on a stream, and complete later.
    fn is_stream_ordered(&self) -> bool {
        false
    }

    /// The process of a rank of this host, where the backend knows it.
    fn process_of(&self, _rank: usize) -> Option<u32> {
        None
    }

    /// Which ranks share a host. By default all do.
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

    /// The backend's nonblocking collectives. Without them a thread of the communicator carries out started collectives.
    fn start_collectives(&self) -> Option<&dyn StartCollectives> {
        None
    }

    /// The backend's own files. Without them the operating system's are used.
    fn files(&self) -> Option<&dyn SharedFiles> {
        None
    }

    /// Starts a transfer. Transfers with one peer in one direction are matched in the order of posting.
    ///
    /// # Safety
    /// The memory stays valid, is not written (send) and not touched at all (recv), until `wait` or a
    /// true `test` for its id has answered, or any of them failed.
    unsafe fn post(&self, transfer: Transfer) -> Result<OperationId>;

    /// Starts two transfers together: neither may wait for work behind the other.
    ///
    /// # Safety
    /// As for [`post`](Self::post), of each that is answered with an id.
    unsafe fn post_both(&self, transfers: [Transfer; 2]) -> [Result<OperationId>; 2] {
        // SAFETY: the caller's contract.
        transfers.map(|transfer| unsafe { self.post(transfer) })
    }

    /// Waits for a transfer, advancing all others; calls `meanwhile` repeatedly.
    fn wait(&self, operation: OperationId, meanwhile: &dyn Fn()) -> Result<()>;

    /// A transfer from its start to its end, for a record: calls `begun` as
    /// [`recorded_collective`](Self::recorded_collective) does.
    ///
    /// # Safety
    /// As for `post`.
    unsafe fn recorded_transfer(&self, transfer: Transfer, begun: &dyn Fn()) -> Result<()> {
        begun();
        // SAFETY: the caller's contract.
        let operation = unsafe { self.post(transfer) }?;
        self.wait(operation, &|| ())
    }

    /// Advances everything; answers whether this transfer is complete (and its id spent).
    fn test(&self, operation: OperationId) -> Result<bool>;

    /// A message that has come and that no posted receive matches. It stays until it is received; of one sender and tag, the first.
    fn try_probe(&self, _wanted: Wanted) -> Result<Option<Envelope>> {
        Err(self.no_probes())
    }

    /// Waits for such a message, up to the deadline.
    fn probe(&self, _wanted: Wanted) -> Result<Envelope> {
        Err(self.no_probes())
    }

    /// The error of a backend whose library knows no messages before they are received.
    fn no_probes(&self) -> Error {
        Error::from(UnsupportedError {
            what: "probing for a message, or receiving from any rank".into(),
            why: format!("the backend {} receives only what it is told to expect", self.kind()),
            remedy: "name the sender, or use a communicator on host memory or MPI".into(),
        })
    }

    /// [`test`](Self::test) for a task that has polled since `since`: gives up as a wait does, where the backend can without waiting.
    fn test_waited(&self, operation: OperationId, _since: RunInstant) -> Result<bool> {
        self.test(operation)
    }

    /// Advances transfers and started collectives; answers whether any is still under way.
    fn progress(&self) -> Result<bool>;

    /// A number that changes when a transfer advances; `None` where that is not known.
    fn moved(&self) -> Option<u64> {
        None
    }

    /// Between this and `end_group`, operations of stream-ordered backends are only queued, on this thread
    /// and over all communicators.
    fn start_group(&self) {}

    /// Starts what was queued, if this ends the outermost group; nothing if a communicator of the group failed meanwhile, as `queued` says.
    fn end_group(&self, _queued: &Result<()>) -> Result<()> {
        Ok(())
    }

    /// An error if the communicator has failed.
    fn check(&self) -> Result<()>;

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

    /// A communicator of these ranks, which alone call it, in this order; and a number that is unique. This rank is one of them.
    fn split_members(&self, _members: &[usize]) -> Result<(Box<dyn Backend>, u64)> {
        Err(Error::from(UnsupportedError {
            what: "split_members".into(),
            why: format!("the backend {} makes communicators with all ranks only", self.kind()),
            remedy: "use split_group, which all ranks call".into(),
        }))
    }

    /// A communicator for each group of a grid. As many splits, where the backend has no better way.
    ///
    /// # Safety
    /// As for `split`.
    unsafe fn split_grid(&self, grid: &RankGrid<'_>) -> Result<Vec<Box<dyn Backend>>> {
        let rank = self.rank();
        let part = |group: &&[usize]| {
            // SAFETY: the caller's contract.
            let part = unsafe { self.split(Some(grid.place(group, rank) as u32), 0) }?;
            Ok(part.expect("a rank with a colour"))
        };
        grid.groups.iter().map(part).collect()
    }

    /// The number of operation numbers that a [`split_grid`](Backend::split_grid) of so many groups uses up.
    fn collectives_of_split_grid(&self, groups: usize) -> u64 {
        self.collectives_of_split() * groups as u64
    }

    /// The number of operation numbers that a split uses up.
    fn collectives_of_split(&self) -> u64 {
        1
    }

    /// The number of operation numbers that [`grow`](Backend::grow) uses up.
    fn collectives_of_grow(&self) -> u64 {
        1
    }

    /// A communicator of the remaining ranks, in their order, and the number of this shrink of this communicator. Waits for
    /// them up to the deadline, which begins anew for each rank that is lost meanwhile. Where one is lost before all have the new
    /// communicator, that is shrunk in turn, and the number of that shrink follows: some ranks may have it and shrink it themselves.
    fn shrink(&self) -> Result<(Box<dyn Backend>, Vec<u64>)> {
        Err(Error::from(UnsupportedError {
            what: "shrink".into(),
            why: format!("the backend {} cannot go on without a rank", self.kind()),
            remedy: "start the job again".into(),
        }))
    }

    /// Whether the flags of all remaining ranks are set: the same answer for each of them, also on a failed communicator.
    fn agree(&self, _flag: bool) -> Result<bool> {
        Err(Error::from(UnsupportedError {
            what: "agree".into(),
            why: format!("the backend {} cannot go on without a rank", self.kind()),
            remedy: "among ranks that all work, use all_reduce with Logical::And".into(),
        }))
    }

    /// The number of operation numbers that [`agree`](Backend::agree) uses up.
    fn collectives_of_agree(&self) -> u64 {
        0
    }

    /// An error if these ranks cannot take in so many processes. Uses up no operation number.
    fn check_growth(&self, _joiners: usize) -> Result<()> {
        Err(Error::from(UnsupportedError {
            what: "grow".into(),
            why: format!("the backend {} cannot take in new ranks", self.kind()),
            remedy: "start the job again with more ranks".into(),
        }))
    }

    /// A communicator of these ranks and of so many joining processes, and a number that is unique. Collective.
    /// [`check_growth`](Backend::check_growth) allows it.
    ///
    /// # Safety
    /// As for `split`.
    unsafe fn grow(&self, _joiners: usize) -> Result<(Box<dyn Backend>, u64)> {
        unreachable!("check_growth refuses it")
    }

    /// Zeroed memory, aligned to 64 bytes: shared with the peers if the backend can.
    fn alloc(&self, bytes: usize) -> Result<Allocation>;

    /// Memory of which every rank has a part of the call's blocks, zeroed. Collective; the call is one of `Symmetric`.
    ///
    /// # Safety
    /// As for `split`.
    unsafe fn symmetric(&self, call: &Call<'_>) -> Result<Box<dyn Window + '_>>;

    /// Memory of the call's blocks, zeroed, of which each host has one copy. Collective; the call is one of `SharedByHost`.
    ///
    /// # Safety
    /// As for `split`.
    unsafe fn shared_by_host(&self, call: &Call<'_>) -> Result<Box<dyn HostMemory>>;

    /// The number of operation numbers that `symmetric` and `shared_by_host` use up.
    fn collectives_of_window(&self) -> u64 {
        1
    }

    /// GPU memory that other ranks access, if the backend has that.
    #[cfg(feature = "cuda")]
    fn gpu_windows(&self) -> Option<&dyn super::GpuWindows> {
        None
    }

    /// The deadline of a wait.
    fn timeout(&self) -> Duration;

    /// Changes the deadline of later calls.
    fn set_timeout(&self, timeout: Duration);

    /// Fails the communicator for every rank. When it returns, nobody uses buffers that this rank has lent on the host.
    fn abort(&self);

    /// [`abort`](Self::abort) for an operation that a panic has left.
    fn abandon(&self) {
        self.abort();
    }

    /// Leaves the communicator; peers that still need this rank get an error.
    fn depart(&self, departure: Departure);
}

/// The name of a communicator that has grown, in the flight records of old and new members alike.
pub(crate) fn grown_name(number: u64) -> String {
    format!("grown-{number:016x}")
}
