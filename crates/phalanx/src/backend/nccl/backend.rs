//! The operations of [`Backend`] on GPUs.

use super::device::PinnedMemory;
use super::init::CommOrigin;
use super::{NcclComm, group, operation};
use crate::buffer::stream::{GpuStream, Stream};
use crate::contract::hosts::HostTopology;
use crate::contract::{
    Backend, BackendKind, Call, Departure, HostMemory, Operation, OperationId, RankGrid, StreamSyncOps,
    Transfer, Window,
};
use crate::control::control_channel::AnnouncedCall;
use crate::control::host_channel::HostChannel;
use crate::control::host_window::HostChannelWindow;
use crate::os::RunInstant;
use crate::types::error::{Error, Result, UnsupportedError};
use crate::types::memory::{Allocation, Space};
use phalanx_sys::nccl::Flavour;
use std::sync::atomic::Ordering;
use std::time::Duration;

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

    fn set_name(&self, name: &str) {
        self.communicator.control_channel.set_name(name);
    }

    fn set_given_name(&self, name: &str) {
        self.communicator.control_channel.set_given_name(name);
    }

    fn process_of(&self, rank: usize) -> Option<u32> {
        self.host_channel.process_of(rank)
    }

    fn host_topology(&self) -> HostTopology {
        self.host_channel.host_topology()
    }

    fn stream(&self) -> Stream {
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

    #[cfg(feature = "nccl")]
    fn gpu_windows(&self) -> Option<&dyn crate::contract::GpuWindows> {
        Some(self)
    }

    fn make_portable(&self) -> Option<Result<Stream>> {
        Some(NcclComm::make_portable(self))
    }

    fn check(&self) -> Result<()> {
        self.communicator.check()
    }

    unsafe fn collective(&self, call: &Call<'_>) -> Result<()> {
        let is_combined_on_host = call.is_combined_on_host();
        if is_combined_on_host {
            call.check_combined_on_host(self.kind())?;
        } else if call.spaces != [Space::Device; 2] {
            operation::check_host_memory(&self.communicator, call)?;
        }
        // SAFETY: the caller's contract.
        unsafe { self.prepare(call) }?;
        if !call.operation.is_empty_handed() && !is_combined_on_host {
            // SAFETY: the caller's contract.
            return unsafe { operation::collective(&self.communicator, call) };
        }
        // A barrier or finalize: this rank's work is complete, and all ranks arrive. Or what the ranks combine on the host.
        // SAFETY: the caller's contract.
        self.all_arrive(call, |channel| unsafe { channel.collective(call) })?;
        if call.operation == Operation::Finalize {
            self.communicator.all_leave.store(true, Ordering::Release);
        }
        Ok(())
    }

    unsafe fn post(&self, transfer: Transfer) -> Result<OperationId> {
        self.communicator.check()?;
        let [id] = self.messages.post([transfer]);
        Ok(id)
    }

    /// Both are carried out together.
    unsafe fn post_both(&self, transfers: [Transfer; 2]) -> [Result<OperationId>; 2] {
        match self.communicator.check() {
            Ok(()) => self.messages.post(transfers).map(Ok),
            Err(error) => [Err(error.clone()), Err(error)],
        }
    }

    fn wait(&self, id: OperationId, _meanwhile: &dyn Fn()) -> Result<()> {
        if !self.messages.is_complete(id) {
            // Errors are kept with each message.
            let _ = self.flush();
        }
        self.messages.settle(id)
    }

    /// Does not wait: incomplete messages are left to `progress`, except in a rank that panics, whose peers
    /// will not arrive.
    fn test(&self, id: OperationId) -> Result<bool> {
        if !self.messages.is_complete(id) {
            if !std::thread::panicking() {
                self.messages.want(id);
            }
            return Ok(false);
        }
        self.messages.settle(id).map(|()| true)
    }

    /// Carries out messages that a `test` asked for. Nothing else moves on its own: messages and collectives
    /// keep the order of calls.
    fn progress(&self) -> Result<bool> {
        if self.messages.are_wanted() {
            // Errors are kept with each message.
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

    fn end_group(&self, queued: &Result<()>) -> Result<()> {
        let flushed = self.flush();
        let ended = group::end(&self.communicator, if flushed.is_err() { &flushed } else { queued });
        flushed.and(ended)
    }

    fn sync(&self) -> Result<()> {
        self.flush()?;
        self.communicator.sync()
    }

    unsafe fn symmetric(&self, call: &Call<'_>) -> Result<Box<dyn Window + '_>> {
        self.check_shared_memory(call)?;
        // SAFETY: the caller's contract.
        unsafe { self.prepare(call) }?;
        // SAFETY: the caller's contract.
        let window = self.all_arrive(call, |channel| unsafe { channel.symmetric(call) })?;
        let fail = |rank, since, error| {
            let wait = AnnouncedCall::of_rank(self.communicator.collectives(), Operation::WaitSignals, rank);
            self.communicator.diagnose(&wait, since, error)
        };
        Ok(Box::new(HostChannelWindow { window, fail }))
    }

    unsafe fn shared_by_host(&self, call: &Call<'_>) -> Result<Box<dyn HostMemory>> {
        self.check_shared_memory(call)?;
        // SAFETY: the caller's contract.
        unsafe { self.prepare(call) }?;
        // SAFETY: the caller's contract.
        self.all_arrive(call, |channel| unsafe { channel.shared_by_host(call) })
    }

    unsafe fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Box<dyn Backend>>> {
        let (parent, call) = (&self.communicator, Call::empty(Operation::Split));
        // SAFETY: the caller's contract.
        let (announced, since) = unsafe { self.begin_split(&call) }?;
        // SAFETY: the caller's contract.
        let channel =
            self.on_host_channel(&announced, |channel| unsafe { channel.split_channel(color, key) })?;
        let named = |error| parent.own_failure(&announced, since, error);
        match channel {
            Some(channel) => Ok(Some(Box::new(self.part(channel).map_err(named)?))),
            // Before 2.18 the parts are independent.
            None if parent.library.ncclCommSplit.is_none() => Ok(None),
            None => parent.take_no_part(&announced, self.settings.config.raw(parent.library)?).map(|()| None),
        }
    }

    /// The library makes one after another: it would make the parts of a group of calls in threads side by side, all of which use the
    /// parent's connections for what their ranks tell each other.
    unsafe fn split_grid(&self, grid: &RankGrid<'_>) -> Result<Vec<Box<dyn Backend>>> {
        let (parent, call) = (&self.communicator, grid.call());
        // SAFETY: the caller's contract.
        let (announced, since) = unsafe { self.begin_split(&call) }?;
        // SAFETY: the caller's contract.
        let channels =
            self.on_host_channel(&announced, |channel| unsafe { channel.split_channel_grid(grid) })?;
        let named = |error| parent.own_failure(&announced, since, error);
        let part = |channel| Ok(Box::new(self.part(channel).map_err(named)?) as Box<dyn Backend>);
        channels.into_iter().map(part).collect()
    }

    fn collectives_of_split_grid(&self, _groups: usize) -> u64 {
        1
    }

    fn shrink(&self) -> Result<(Box<dyn Backend>, Vec<u64>)> {
        self.check_driver(Operation::Shrink)?;
        let (channel, round) = self.communicator.control_channel.shrink()?;
        let flavour = self.communicator.library.flavour();
        let part = NcclComm::join(channel, flavour, Some(self.gpu()), self.settings.clone())?;
        Ok((Box::new(part), vec![round]))
    }

    fn agree(&self, flag: bool) -> Result<bool> {
        self.communicator.control_channel.agree(flag)
    }

    fn check_growth(&self, _joiners: usize) -> Result<()> {
        self.check_driver(Operation::Grow)
    }

    unsafe fn grow(&self, joiners: usize) -> Result<(Box<dyn Backend>, u64)> {
        self.sync()?;
        let call = Call { root: joiners, ..Call::empty(Operation::Grow) };
        let (announced, _) = self.communicator.next_collective(&call, false);
        // SAFETY: the caller's contract.
        let (channel, number) = self
            .on_host_channel(&announced, |channel| unsafe { channel.grow_channel(joiners, self.kind()) })?;
        self.communicator.control_channel.complete(self.communicator.collectives());
        let flavour = self.communicator.library.flavour();
        let grown = NcclComm::join(channel, flavour, Some(self.gpu()), self.settings.clone())?;
        Ok((Box::new(grown), number))
    }

    /// Page-locked memory; operations stage it like other host memory.
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
        self.host_channel.set_timeout(timeout);
    }

    fn abort(&self) {
        // The host channel's waits fail with this and not before, so that all callers see one error.
        self.communicator.fail(Error::Aborted { rank: self.rank() });
    }

    fn depart(&self, departure: Departure) {
        if self.communicator.control_channel.is_copy() {
            return;
        }
        // A rank that panics leaves at once: its peers will not arrive at its messages.
        if departure == Departure::Left
            && let Err(error) = self.flush()
        {
            crate::os::log::error!("messages were posted and not waited for, and failed: {error}");
        }
        self.communicator.depart(departure);
        self.host_channel.depart(departure);
    }
}

impl NcclComm {
    /// An error in a job of several hosts, for a call that makes memory which the ranks share.
    fn check_shared_memory(&self, call: &Call<'_>) -> Result<()> {
        if self.host_channel.shares_memory() {
            return Ok(());
        }
        Err(Error::from(UnsupportedError {
            what: call.operation.name().into(),
            why: format!(
                "the job has several hosts, and its communicators on {} share no memory of one",
                self.kind()
            ),
            remedy: "use a communicator on the backend ucx or mpi beside this one".into(),
        }))
    }

    /// A call for which this rank's work is complete and all ranks arrive on the host channel.
    fn all_arrive<'c, R>(
        &'c self,
        call: &Call<'_>,
        operation: impl FnOnce(&'c dyn HostChannel) -> Result<R>,
    ) -> Result<R> {
        self.communicator.sync()?;
        let (announced, _) = self.communicator.next_collective(call, false);
        let answer = self.on_host_channel(&announced, operation)?;
        self.communicator.control_channel.complete(self.communicator.collectives());
        Ok(answer)
    }

    /// Announces a call that makes communicators of this one's ranks; and when it began.
    ///
    /// # Safety
    /// As for [`Backend::split`].
    pub(super) unsafe fn begin_split(&self, call: &Call<'_>) -> Result<(AnnouncedCall, RunInstant)> {
        // SAFETY: the caller's contract.
        unsafe { self.prepare(call) }?;
        self.communicator.check_awake(call.operation)?;
        let (announced, _) = self.communicator.next_collective(call, false);
        Ok((announced, RunInstant::now()))
    }

    /// The communicator of a part's channel, split off this one.
    fn part(&self, channel: Box<dyn HostChannel>) -> Result<NcclComm> {
        let parent = &self.communicator;
        if parent.library.ncclCommSplit.is_none() {
            // Before 2.18 there is no ncclCommSplit: an independent communicator.
            return NcclComm::join(
                channel,
                parent.library.flavour(),
                Some(self.gpu()),
                self.settings.clone(),
            );
        }
        // The first member's rank is unique to its part: it serves as the colour.
        let (color, key) = (Some(channel.first_member() as i32), channel.rank() as i32);
        let origin = CommOrigin::Split { parent: parent.clone(), color, key };
        let (library, device, stream) = (parent.library, parent.device, self.stream.clone());
        NcclComm::assemble(channel, library, device, stream, self.settings.clone(), &origin)
    }
}
