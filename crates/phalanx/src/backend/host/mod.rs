//! The host backend: ranks are threads of one process or processes of one host, over one shared region.
//!
//! Operations are complete when they return, so only messages need synchronising. Mismatched calls are always detected. A root may return
//! before the others have arrived, as MPI allows: its part in a mismatch is then reported by its next call.
//!
//! | file | what |
//! |---|---|
//! | `choose.rs`, `tunables.rs` | which algorithm carries out a call, and the values that decide |
//! | `collective.rs`, `collective/` | the algorithms; `collective.rs` lists them |
//! | `growth.rs` | taking in new ranks |
//! | `grid.rs` | ranks in rows and columns |
//! | `message.rs`, `message/`, `chunks.rs` | point to point |
//! | `exchange.rs` | all_to_all_v, made of messages |
//! | `work.rs` | what the algorithms do, counted for `phalanx plan` |
//! | `window.rs` | memory that ranks access on each other's parts, or share |
//!
//! The shared memory itself, waiting, failures, and kernel copy (`process_vm_readv`) are in `control/`.

mod choose;
mod chunks;
mod collective;
mod exchange;
mod grid;
mod growth;
mod message;
mod tunables;
mod window;
mod work;

#[cfg(all(test, target_os = "linux"))]
mod relay_tests;
#[cfg(all(test, target_os = "linux"))]
mod tests;

pub(crate) use work::work;

use crate::contract::hosts::HostTopology;
use crate::contract::{
    Backend, BackendKind, Call, Departure, Direction, Envelope, HostMemory, Operation, OperationId, RankGrid,
    Transfer, Wanted, Window,
};
use crate::control::endpoint::Endpoint;
use crate::control::failure::ChannelFailure;
use crate::control::host_channel::HostChannel;
use crate::control::split::{split_among, split_by_color, split_in_grid};
use crate::os::RunInstant;
use crate::types::dtype::DType;
use crate::types::error::{Error, Result};
use crate::types::memory::Allocation;
use collective::{Collective, CollectiveState};
use message::{Messages, Plane};
use std::cell::UnsafeCell;
use std::time::Duration;

/// The tag of messages between the members of a new communicator. Those of an all_to_all_v, on the same plane, count from 1.
const MEMBERS: u32 = u32::MAX;

/// One rank's end of a communicator on the host.
pub(crate) struct HostComm {
    endpoint: Endpoint,
    /// Touched only inside `collective` and `split`, which one thread at a time may call.
    state: UnsafeCell<CollectiveState>,
    messages: Messages,
}

// SAFETY: `state` is the only part that is not `Sync` by itself; the contract of `Backend::collective` and
// `Backend::split` says that one thread at a time uses it.
unsafe impl Sync for HostComm {}

impl HostComm {
    /// A communicator over a rank's place in a channel.
    pub fn new(endpoint: Endpoint) -> HostComm {
        let state = UnsafeCell::new(CollectiveState::new(&endpoint));
        let messages = Messages::new(endpoint.rank, &endpoint.channel.layout);
        HostComm { endpoint, state, messages }
    }

    /// Closes the buffers to peers, and to this rank's other threads, which advance its messages. The channel has failed.
    fn close(&self) {
        self.endpoint.close_buffers();
        self.messages.close();
    }

    /// Closes the buffers to peers before a fatal error reaches the caller, which may then free them. A refusal of the operating system in the
    /// middle of an operation is fatal, too: the peers cannot complete it.
    #[cold]
    fn closing(&self, error: Error) -> Error {
        let error = match error {
            Error::System(_) => self.endpoint.fail_refused(&error),
            error => error,
        };
        if error.is_fatal() {
            self.endpoint.close_buffers();
        }
        error
    }
}

impl Backend for HostComm {
    fn kind(&self) -> BackendKind {
        BackendKind::Host
    }

    fn rank(&self) -> usize {
        self.endpoint.rank
    }

    fn world_size(&self) -> usize {
        self.endpoint.ranks
    }

    fn set_name(&self, name: &str) {
        let _ = self.endpoint.name.set(name.to_owned());
    }

    fn set_given_name(&self, name: &str) {
        let _ = self.endpoint.given_name.set(name.to_owned());
    }

    unsafe fn collective(&self, call: &Call<'_>) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.recorded_collective(call, &|| ()) }
    }

    unsafe fn recorded_collective(&self, call: &Call<'_>, begun: &dyn Fn()) -> Result<()> {
        // SAFETY: one thread at a time is inside, says the caller.
        let state = unsafe { &mut *self.state.get() };
        // SAFETY: the caller's contract.
        let result = unsafe { Collective::run(&self.endpoint, state, call, begun) };
        if result.is_ok() && call.operation == Operation::AllToAllV {
            // SAFETY: the caller's contract; the ranks have agreed on the call.
            return unsafe { self.all_to_all_v(call) }.map_err(|error| self.closing(error));
        }
        result.map_err(|error| self.closing(error))
    }

    unsafe fn post(&self, transfer: Transfer) -> Result<OperationId> {
        // SAFETY: the caller's contract.
        let posted = unsafe { self.messages.post(&self.endpoint, transfer, Plane::User) };
        posted.map_err(|error| self.closing(error))
    }

    unsafe fn recorded_transfer(&self, transfer: Transfer, begun: &dyn Fn()) -> Result<()> {
        // SAFETY: the caller's contract.
        let done = unsafe { self.messages.transfer(&self.endpoint, transfer, begun) };
        done.map_err(|error| self.closing(error))
    }

    fn try_probe(&self, wanted: Wanted) -> Result<Option<Envelope>> {
        self.messages.try_probe(&self.endpoint, wanted).map_err(|error| self.closing(error))
    }

    fn probe(&self, wanted: Wanted) -> Result<Envelope> {
        self.messages.probe(&self.endpoint, wanted).map_err(|error| self.closing(error))
    }

    fn wait(&self, id: OperationId, meanwhile: &dyn Fn()) -> Result<()> {
        self.messages.wait(&self.endpoint, id, meanwhile).map_err(|error| self.closing(error))
    }

    fn test(&self, id: OperationId) -> Result<bool> {
        self.messages.test(&self.endpoint, id).map_err(|error| self.closing(error))
    }

    fn test_waited(&self, id: OperationId, since: RunInstant) -> Result<bool> {
        self.messages.test_waited(&self.endpoint, id, since).map_err(|error| self.closing(error))
    }

    fn progress(&self) -> Result<bool> {
        self.messages.progress(&self.endpoint).map_err(|error| self.closing(error))
    }

    fn moved(&self) -> Option<u64> {
        Some(self.messages.moved())
    }

    fn check(&self) -> Result<()> {
        self.endpoint.check()
    }

    fn sync(&self) -> Result<()> {
        self.messages.finish(&self.endpoint).map_err(|error| self.closing(error))?;
        self.check()
    }

    fn process_of(&self, rank: usize) -> Option<u32> {
        // 0: it has not joined.
        self.endpoint.world.is_processes().then(|| self.endpoint.pid(rank)).filter(|process| *process != 0)
    }

    fn host_topology(&self) -> HostTopology {
        let members = self.endpoint.members();
        self.endpoint
            .world
            .topology()
            .map_or_else(|| HostTopology::one_host(members.len()), |topology| topology.of_members(members))
    }

    unsafe fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Box<dyn Backend>>> {
        // SAFETY: the caller's contract.
        let part = unsafe { self.split_channel(color, key) }?;
        Ok(part.map(|part| part as Box<dyn Backend>))
    }

    fn split_members(&self, members: &[usize]) -> Result<(Box<dyn Backend>, u64)> {
        let (part, number) = split_among(self, members).map_err(|error| self.closing(error))?;
        Ok((part, number))
    }

    unsafe fn split_grid(&self, grid: &RankGrid<'_>) -> Result<Vec<Box<dyn Backend>>> {
        // SAFETY: the caller's contract.
        let parts = unsafe { split_in_grid(self, grid) }?;
        Ok(parts.into_iter().map(|part| part as Box<dyn Backend>).collect())
    }

    fn shrink(&self) -> Result<(Box<dyn Backend>, Vec<u64>)> {
        let (shrunk, round) = self.endpoint.shrink()?;
        Ok((Box::new(HostComm::new(shrunk)), vec![round]))
    }

    fn agree(&self, flag: bool) -> Result<bool> {
        self.endpoint.agree(flag)
    }

    fn check_growth(&self, joiners: usize) -> Result<()> {
        self.check_joiners(joiners)
    }

    unsafe fn grow(&self, joiners: usize) -> Result<(Box<dyn Backend>, u64)> {
        // SAFETY: the caller's contract.
        let (grown, number) = unsafe { self.grow_channel(joiners, BackendKind::Host) }?;
        Ok((grown, number))
    }

    fn collectives_of_split(&self) -> u64 {
        3
    }

    fn collectives_of_split_grid(&self, _groups: usize) -> u64 {
        2
    }

    fn collectives_of_grow(&self) -> u64 {
        2
    }

    fn alloc(&self, bytes: usize) -> Result<Allocation> {
        let block = self.endpoint.world.alloc(bytes)?;
        Ok(Allocation { start: block.start, keep: Box::new(block) })
    }

    unsafe fn symmetric(&self, call: &Call<'_>) -> Result<Box<dyn Window + '_>> {
        // SAFETY: the caller's contract.
        let window = unsafe { self.window(call) }?;
        Ok(Box::new(window))
    }

    unsafe fn shared_by_host(&self, call: &Call<'_>) -> Result<Box<dyn HostMemory>> {
        // SAFETY: the caller's contract.
        let memory = unsafe { self.host_memory(call) }?;
        Ok(Box::new(memory))
    }

    fn collectives_of_window(&self) -> u64 {
        3
    }

    fn timeout(&self) -> Duration {
        self.endpoint.timeout()
    }

    fn set_timeout(&self, timeout: Duration) {
        self.endpoint.set_timeout(timeout);
    }

    fn abort(&self) {
        if self.endpoint.is_copy() {
            return;
        }
        self.endpoint.fail(&ChannelFailure::Aborted { rank: self.endpoint.rank });
        self.close();
    }

    fn abandon(&self) {
        if self.endpoint.is_copy() {
            return;
        }
        self.endpoint.fail_panicked();
        self.close();
    }

    fn depart(&self, departure: Departure) {
        self.endpoint.depart(departure);
    }
}

impl HostChannel for HostComm {
    fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    fn into_endpoint(self: Box<Self>) -> Endpoint {
        self.endpoint
    }

    fn over(&self, endpoint: Endpoint) -> Result<Box<dyn HostChannel>> {
        Ok(Box::new(HostComm::new(endpoint)))
    }

    unsafe fn set_history(&self, history: u64) {
        // SAFETY: one thread at a time is inside, says the caller.
        unsafe { &mut *self.state.get() }.set_history(history);
    }

    unsafe fn split_channel(&self, color: Option<u32>, key: i64) -> Result<Option<Box<dyn HostChannel>>> {
        // SAFETY: the caller's contract.
        unsafe { split_by_color(self, color, key) }
    }

    unsafe fn split_channel_grid(&self, grid: &RankGrid<'_>) -> Result<Vec<Box<dyn HostChannel>>> {
        // SAFETY: the caller's contract.
        unsafe { split_in_grid(self, grid) }
    }

    unsafe fn exchange_words(&self, direction: Direction, rank: usize) -> Result<()> {
        let transfer = Transfer::host(direction, rank, MEMBERS, DType::U64, 2);
        // SAFETY: the caller's contract; it is waited for.
        let id = unsafe { self.messages.post(&self.endpoint, transfer, Plane::Internal) }?;
        self.messages.wait(&self.endpoint, id, &|| ())
    }

    unsafe fn grow_channel(
        &self,
        joiners: usize,
        backend: BackendKind,
    ) -> Result<(Box<dyn HostChannel>, u64)> {
        // SAFETY: the caller's contract.
        let (grown, number) = unsafe { self.grow_with(joiners, backend) }?;
        Ok((Box::new(grown), number))
    }
}
