//! The UCX backend: host memory of ranks on several hosts. UCX, found at run time, moves the bytes; the job's store carries what the
//! ranks agree on (`control/relay/`).
//!
//! | file | what |
//! |---|---|
//! | `world.rs` | UCX of this process, which all its communicators share: how it starts and ends |
//! | `context.rs` | the loaded library and its settings |
//! | `worker.rs` | UCX's worker and endpoints: sends, receives, and when they are over |
//! | `inbox.rs`, `mail.rs` | what takes messages; which one is for which receive |
//! | `wait.rs` | waits, and giving up on them |
//! | `choose.rs`, `tunables.rs` | which algorithm carries out a call, and the values that decide |
//! | `collective.rs`, `collective/` | the algorithms |
//! | `work.rs` | what the algorithms do, counted for `phalanx plan` |
//! | `growth.rs` | taking in new ranks |
//! | `hosts.rs` | the ranks of each host, and the channel of those of this one |
//! | `message.rs`, `host_message.rs` | messages of the user, between hosts and inside one |
//! | `window.rs` | one-sided access, as the rank that accesses sees it; memory that a host shares |
//! | `messenger.rs` | UCX for a backend that stages other memory through it |
//! | `parts.rs`, `serving.rs` | the parts that others access, and the thread that serves them |
//!
//! # Messages
//! All are UCX's active messages: a header of ours in front of the data. It has a secret of the world, since UCX's port takes messages of
//! anybody, and for collectives the fingerprint of all calls so far, so that a mismatch is seen where the first message comes.
//!
//! # Giving up
//! UCX may use a buffer until its request is over. A rank that gives up closes its channel, after which messages of peers that are
//! under way are dropped, here and there; a peer that does not take part in that loses its connection. Only then the error is returned.

mod choose;
mod collective;
mod context;
mod growth;
mod host_message;
mod hosts;
mod inbox;
mod mail;
mod message;
#[cfg(feature = "nccl")]
mod messenger;
mod parts;
mod serving;
mod tunables;
mod wait;
mod window;
mod work;
mod worker;
mod world;

#[cfg(feature = "nccl")]
pub(crate) use messenger::messenger;
pub(crate) use work::work;
pub(crate) use world::{Here, MeetHere, Meeting};

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
use crate::rendezvous::store::Store;
use crate::types::error::{Error, Result};
use crate::types::memory::Allocation;
use choose::Shape;
use collective::CollectiveState;
use hosts::Hosts;
use message::Messages;
use std::cell::UnsafeCell;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use world::UcxWorld;

/// One rank's end of a communicator over UCX.
pub(crate) struct UcxComm {
    /// The communicator's part on this host looks at it, too.
    endpoint: Arc<Endpoint>,
    link: Link,
    /// All ranks.
    everybody: Vec<usize>,
    shape: Shape,
    /// Where ranks share hosts.
    hosts: Option<Hosts>,
    /// Touched only inside `collective` and `split`, which one thread at a time may call.
    state: UnsafeCell<CollectiveState>,
    messages: Mutex<Messages>,
    /// Windows so far.
    windows: AtomicU64,
}

// SAFETY: `state` is the only part that is not `Sync` by itself; the contract of `Backend::collective` and `Backend::split` says that
// one thread at a time uses it.
unsafe impl Sync for UcxComm {}

/// The communicator's channel in the world.
struct Link {
    world: Arc<UcxWorld>,
    channel: u64,
    /// How often the connection to each rank had broken when the communicator began.
    failures: Vec<u64>,
}

impl Drop for Link {
    fn drop(&mut self) {
        if !self.world.is_copy() {
            self.world.worker().close_channel(self.channel);
        }
    }
}

impl UcxComm {
    /// The communicator of all ranks of a store. Those of a host meet under a name. `reproducible`: contributions are combined in rank
    /// order.
    pub fn over_store(
        store: Store,
        topology: HostTopology,
        meet_here: (MeetHere, &str),
        reproducible: bool,
        timeout: Duration,
    ) -> Result<UcxComm> {
        let ucx = UcxWorld::meet(&store, &topology, meet_here, reproducible, timeout)?;
        let rank = store.rank();
        let endpoint = Endpoint::over(store, rank, topology, timeout)?;
        if let Some(world) = ucx.world_here() {
            endpoint.world.set_here(world);
        }
        UcxComm::create(endpoint, ucx)
    }

    /// A communicator over a rank's place in a channel. All its ranks call it.
    fn create(endpoint: Endpoint, world: Arc<UcxWorld>) -> Result<UcxComm> {
        UcxComm::flat(endpoint, world).join_host()
    }

    /// A communicator whose ranks reach each other over UCX only.
    fn flat(endpoint: Endpoint, world: Arc<UcxWorld>) -> UcxComm {
        let (channel, ranks) = (endpoint.id(), endpoint.ranks);
        let mut worker = world.worker();
        worker.mail().open(channel, ranks);
        let failures = endpoint.members().iter().map(|member| worker.failures(*member)).collect();
        drop(worker);
        let link = Link { world, channel, failures };
        let state = UnsafeCell::new(CollectiveState::new(ranks));
        UcxComm {
            endpoint: Arc::new(endpoint),
            link,
            everybody: (0..ranks).collect(),
            shape: Shape::flat(ranks),
            hosts: None,
            state,
            messages: Mutex::new(Messages::new(ranks)),
            windows: AtomicU64::new(0),
        }
    }

    /// The first steps of a communicator of survivors.
    fn begin_again(mut self) -> Result<UcxComm> {
        // Ranks that gave up on a peer may have closed their connections to it. That is over when all have come here.
        // SAFETY: nobody else has the communicator yet.
        unsafe { self.collective(&Call::empty(Operation::Barrier)) }?;
        self.link.failures = {
            let worker = self.link.world.worker();
            self.endpoint.members().iter().map(|member| worker.failures(*member)).collect()
        };
        self.join_host()
    }

    /// After a fatal error, drops what still comes for this communicator, so that no peer waits for this rank to take it.
    #[cold]
    fn closing(&self, error: Error) -> Error {
        if error.is_fatal() && !self.endpoint.is_copy() {
            self.link.world.worker().close_channel(self.link.channel);
            self.close_on_host();
        }
        error
    }
}

impl Backend for UcxComm {
    fn kind(&self) -> BackendKind {
        BackendKind::Ucx
    }

    fn rank(&self) -> usize {
        self.endpoint.rank
    }

    fn world_size(&self) -> usize {
        self.endpoint.ranks
    }

    fn process_of(&self, rank: usize) -> Option<u32> {
        // Processes of other hosts have numbers that may be those of others here.
        self.endpoint.world.process(self.endpoint.members()[rank])?;
        Some(self.endpoint.pid(rank)).filter(|process| *process != 0)
    }

    fn set_name(&self, name: &str) {
        let _ = self.endpoint.name.set(name.to_owned());
    }

    fn set_given_name(&self, name: &str) {
        let _ = self.endpoint.given_name.set(name.to_owned());
    }

    fn host_topology(&self) -> HostTopology {
        let members = self.endpoint.members();
        self.endpoint
            .world
            .topology()
            .map_or_else(|| HostTopology::one_host(members.len()), |topology| topology.of_members(members))
    }

    unsafe fn collective(&self, call: &Call<'_>) -> Result<()> {
        self.endpoint.check()?;
        // SAFETY: one thread at a time is inside, says the caller.
        let state = unsafe { &mut *self.state.get() };
        // SAFETY: the caller's contract.
        unsafe { self.carry_out(state, call) }.map_err(|error| self.closing(error))
    }

    unsafe fn post(&self, transfer: Transfer) -> Result<OperationId> {
        self.endpoint.check()?;
        // SAFETY: the caller's contract.
        unsafe { self.post_message(transfer) }.map_err(|error| self.closing(error))
    }

    unsafe fn recorded_transfer(&self, transfer: Transfer, begun: &dyn Fn()) -> Result<()> {
        begun();
        // SAFETY: the caller's contract.
        let id = unsafe { self.post(transfer) }?;
        self.check_self_exchange(id, &transfer)?;
        self.wait(id, &|| ())
    }

    fn try_probe(&self, wanted: Wanted) -> Result<Option<Envelope>> {
        self.endpoint.check()?;
        self.probe_now(wanted).map_err(|error| self.closing(error))
    }

    fn probe(&self, wanted: Wanted) -> Result<Envelope> {
        self.endpoint.check()?;
        self.wait_for_probe(wanted).map_err(|error| self.closing(error))
    }

    fn wait(&self, id: OperationId, meanwhile: &dyn Fn()) -> Result<()> {
        self.endpoint.check_owner()?;
        self.wait_for_message(id, meanwhile).map_err(|error| self.closing(error))
    }

    fn test(&self, id: OperationId) -> Result<bool> {
        self.endpoint.check_owner()?;
        self.test_message(id).map_err(|error| self.closing(error))
    }

    fn test_waited(&self, id: OperationId, since: RunInstant) -> Result<bool> {
        self.endpoint.check_owner()?;
        self.test_message_since(id, since).map_err(|error| self.closing(error))
    }

    fn progress(&self) -> Result<bool> {
        self.endpoint.check_owner()?;
        let is_moving_here = self.advance_on_host()?;
        Ok(self.progress_messages().is_some() || is_moving_here)
    }

    fn check(&self) -> Result<()> {
        self.endpoint.check()
    }

    fn sync(&self) -> Result<()> {
        self.endpoint.check_owner()?;
        self.finish_messages().map_err(|error| self.closing(error))?;
        self.finish_on_host().map_err(|error| self.closing(error))?;
        self.check()
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
        let parts = unsafe { self.split_channel_grid(grid) }?;
        Ok(parts.into_iter().map(|part| part as Box<dyn Backend>).collect())
    }

    fn collectives_of_split(&self) -> u64 {
        3
    }

    fn collectives_of_split_grid(&self, _groups: usize) -> u64 {
        2
    }

    fn shrink(&self) -> Result<(Box<dyn Backend>, Vec<u64>)> {
        let (mut endpoint, round) = self.endpoint.shrink()?;
        let mut rounds = vec![round];
        loop {
            let shrunk = UcxComm::flat(endpoint, self.link.world.clone());
            let channel = shrunk.endpoint.clone();
            match shrunk.begin_again() {
                // A rank was lost before all had come: the others go on without it.
                Err(error) if error.is_fatal() => {
                    let (next, round) = channel.shrink()?;
                    endpoint = next;
                    rounds.push(round);
                }
                begun => return Ok((Box::new(begun?), rounds)),
            }
        }
    }

    fn agree(&self, flag: bool) -> Result<bool> {
        self.endpoint.agree(flag)
    }

    fn check_growth(&self, joiners: usize) -> Result<()> {
        self.endpoint.world.on_hosts()?.check_growth(self.endpoint.ranks, joiners)
    }

    unsafe fn grow(&self, joiners: usize) -> Result<(Box<dyn Backend>, u64)> {
        // SAFETY: the caller's contract.
        let (grown, number) = unsafe { self.grow_with(joiners) }?;
        Ok((Box::new(grown), number))
    }

    fn alloc(&self, bytes: usize) -> Result<Allocation> {
        // UCX does not get to know it: over TCP there is nothing to register (ucp_mem_map takes 1 µs for 64 MiB), and elsewhere UCX keeps the
        // registrations that it makes.
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
        unsafe { self.host_memory(call) }
    }

    fn collectives_of_window(&self) -> u64 {
        2
    }

    fn timeout(&self) -> Duration {
        self.endpoint.timeout()
    }

    fn set_timeout(&self, timeout: Duration) {
        self.endpoint.set_timeout(timeout);
        if let Some(part) = self.hosts.as_ref().and_then(|hosts| hosts.channel.as_ref()) {
            part.set_timeout(timeout);
        }
    }

    fn abort(&self) {
        if self.endpoint.is_copy() {
            return;
        }
        self.endpoint.fail(&ChannelFailure::Aborted { rank: self.endpoint.rank });
        self.close_on_host();
        self.give_back_all();
    }

    fn abandon(&self) {
        if self.endpoint.is_copy() {
            return;
        }
        self.endpoint.fail_panicked();
        self.close_on_host();
        self.give_back_all();
    }

    fn depart(&self, departure: Departure) {
        if !self.endpoint.is_copy() {
            self.flush();
        }
        self.endpoint.depart(departure);
    }
}

impl HostChannel for UcxComm {
    fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    fn into_endpoint(self: Box<Self>) -> Endpoint {
        let UcxComm { endpoint, hosts, .. } = *self;
        drop(hosts);
        Arc::into_inner(endpoint).expect("only its part on this host had it, too")
    }

    fn over(&self, endpoint: Endpoint) -> Result<Box<dyn HostChannel>> {
        Ok(Box::new(UcxComm::create(endpoint, self.link.world.clone())?))
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
        // SAFETY: the caller's contract.
        unsafe { self.exchange_internal(direction, rank) }
    }

    unsafe fn grow_channel(
        &self,
        joiners: usize,
        _backend: BackendKind,
    ) -> Result<(Box<dyn HostChannel>, u64)> {
        // SAFETY: the caller's contract.
        let (grown, number) = unsafe { self.grow_with(joiners) }?;
        Ok((Box::new(grown), number))
    }
}
