//! The host backend: ranks are threads of one process or processes of one host, over one shared region.
//!
//! How it differs from the model: operations are complete when they return, so there is nothing but messages to
//! synchronise with; mismatched calls are always detected; a root may return before the others have
//! arrived (as MPI allows), so that its part in a mismatch may come to light in its next call.
//!
//! | file | what |
//! |---|---|
//! | `protocol.rs` | the words through which ranks talk |
//! | `layout.rs`, `world.rs` | where they lie, and the memory they lie in |
//! | `endpoint.rs` | waiting, noticing who is gone, giving up |
//! | `record.rs`, `verdict.rs`, `blame.rs` | who called what, why the communicator failed, and who is at fault |
//! | `fetch.rs` | reading the private memory of another process |
//! | `liveness.rs`, `shrink.rs` | peers that are stopped; going on without those who are gone |
//! | `collective.rs`, `reduce.rs`, `arithmetic.rs` | collectives, and what they do with elements |
//! | `collective/pairs.rs`, `collective/fetched.rs` | long all_to_alls |
//! | `collective/rounds.rs`, `grid.rs` | small all_reduces of many ranks, in rows and columns |
//! | `message.rs`, `chunks.rs` | point to point |
//! | `exchange.rs` | all_to_all_v, made of messages |
//! | `relay/` | ranks of several hosts, which share no memory: the words without the data |
//! | `witness.rs` | the words without the data, for backends whose library does not notice who is missing |

pub(in crate::backend) mod arithmetic;
mod blame;
mod chunks;
mod collective;
mod endpoint;
mod exchange;
mod fetch;
mod grid;
mod layout;
mod liveness;
mod message;
pub(crate) mod prefetch;
mod protocol;
mod record;
mod reduce;
mod relay;
mod shrink;
mod verdict;
#[cfg(feature = "cuda")]
mod witness;
mod world;

#[cfg(all(test, target_os = "linux"))]
mod tests;

pub(crate) use layout::MAX_RANKS;
pub(in crate::backend) use record::Record;
pub(crate) use reduce::{Reducer, Targets};
#[cfg(feature = "cuda")]
pub(crate) use witness::{Offer, Subject, Waiting, Way, Witness};
pub(crate) use world::World;

use crate::backend::{
    Allocation, Backend, BackendKind, Blocks, Call, Departure, Operation, Ticket, Transfer,
};
use crate::bootstrap::store::Store;
use crate::bootstrap::{Growth, HostTopology};
use crate::dtype::DType;
use crate::error::{Error, Result, UnsupportedError};
use collective::{Collective, State};
use endpoint::Endpoint;
use layout::{Channel, Layout};
use message::{Messages, Plane};
use std::cell::UnsafeCell;
use std::sync::Arc;
use std::time::Duration;
use world::Segment;

/// One rank's end of a communicator on the host.
pub(crate) struct HostComm {
    endpoint: Endpoint,
    /// Touched only inside `collective` and `split`, which one thread at a time may call.
    state: UnsafeCell<State>,
    messages: Messages,
}

// SAFETY: `state` is the only part that is not `Sync` by itself; the contract of `Backend::collective` and
// `Backend::split` says that one thread at a time uses it.
unsafe impl Sync for HostComm {}

/// A channel that one rank makes and all ranks of it open.
pub(crate) struct NewChannel(Segment);

impl NewChannel {
    pub fn create(world: &World, ranks: usize) -> Result<NewChannel> {
        world.create_segment(Layout::new(ranks).total()).map(NewChannel)
    }

    /// What the other ranks need to open it.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    pub fn open(world: &World, id: u64) -> Result<NewChannel> {
        world.open_segment(id).map(NewChannel)
    }
}

impl HostComm {
    /// The place of a rank among those that have met in a store, on several hosts. It can meet and tell them a few words:
    /// what another backend needs to set up and to watch.
    pub fn over(store: Store, rank: usize, topology: HostTopology, timeout: Duration) -> Result<HostComm> {
        let ranks = topology.world_size();
        let (world, segment) = World::hosts(store, rank, topology, Layout::new(ranks).total())?;
        let channel = NewChannel(segment);
        Ok(HostComm::attach(Arc::new(world), channel, rank, (0..ranks).collect(), timeout))
    }

    /// Takes `rank`'s place in a channel of `members` (as world ranks).
    pub fn attach(
        world: Arc<World>,
        channel: NewChannel,
        rank: usize,
        members: Vec<usize>,
        timeout: Duration,
    ) -> HostComm {
        let ranks = members.len();
        let segment = channel.0;
        // SAFETY: the segment was made for a channel of this many ranks, and started as zeroes.
        let channel = unsafe { Channel::new(Layout::new(ranks), segment.memory.clone()) };
        let endpoint = Endpoint::attach(world, segment, channel, rank, members, timeout);
        let state = UnsafeCell::new(State::new(&endpoint));
        let messages = Messages::new(endpoint.rank, &endpoint.channel.layout);
        HostComm { endpoint, state, messages }
    }

    /// Before an error that ends the communicator reaches the caller, who may then free the buffers. What the
    /// operating system refuses in the middle of an operation ends it, too: the peers cannot complete it.
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

    unsafe fn post(&self, transfer: Transfer) -> Result<Ticket> {
        // SAFETY: the caller's contract.
        let posted = unsafe { self.messages.post(&self.endpoint, transfer, Plane::User) };
        posted.map_err(|error| self.closing(error))
    }

    unsafe fn recorded_transfer(&self, transfer: Transfer, begun: &dyn Fn()) -> Result<()> {
        // SAFETY: the caller's contract.
        let done = unsafe { self.messages.transfer(&self.endpoint, transfer, begun) };
        done.map_err(|error| self.closing(error))
    }

    fn wait(&self, ticket: Ticket, meanwhile: &dyn Fn()) -> Result<()> {
        self.messages.wait(&self.endpoint, ticket, meanwhile).map_err(|error| self.closing(error))
    }

    fn test(&self, ticket: Ticket) -> Result<bool> {
        self.messages.test(&self.endpoint, ticket).map_err(|error| self.closing(error))
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

    fn host_topology(&self) -> HostTopology {
        let members = self.endpoint.members();
        self.endpoint
            .world
            .topology()
            .map_or_else(|| HostTopology::one_host(members.len()), |topology| topology.of_members(members))
    }

    unsafe fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Box<dyn Backend>>> {
        // SAFETY: the caller's contract.
        let part = unsafe { self.part(color, key) }?;
        Ok(part.map(|part| Box::new(part) as Box<dyn Backend>))
    }

    #[cfg(feature = "cuda")]
    unsafe fn host_channel(&self) -> Result<Option<HostComm>> {
        // SAFETY: the caller's contract.
        unsafe { self.part(Some(0), self.rank() as i64) }
    }

    fn shrink(&self) -> Result<(Box<dyn Backend>, u64)> {
        let (shrunk, round) = self.shrink_rounds()?;
        Ok((Box::new(shrunk), round))
    }

    fn check_growth(&self, joiners: usize) -> Result<()> {
        self.growing_job(joiners).map(drop)
    }

    unsafe fn grow(&self, joiners: usize) -> Result<(Box<dyn Backend>, u64)> {
        // SAFETY: the caller's contract.
        let (grown, number) = unsafe { self.grown(joiners, BackendKind::Host) }?;
        Ok((Box::new(grown), number))
    }

    fn collectives_of_split(&self) -> u64 {
        3
    }

    fn collectives_of_grow(&self) -> u64 {
        2
    }

    fn alloc(&self, bytes: usize) -> Result<Allocation> {
        let block = self.endpoint.world.alloc(bytes)?;
        Ok(Allocation { start: block.start, keep: Box::new(block) })
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
        let verdict = verdict::Verdict::Aborted { rank: self.endpoint.rank };
        self.endpoint.fail(&verdict);
        self.endpoint.close_buffers();
    }

    fn depart(&self, departure: Departure) {
        self.endpoint.depart(departure);
    }
}

impl HostComm {
    /// Whether its ranks are threads of this process.
    #[cfg(feature = "cuda")]
    pub fn is_of_threads(&self) -> bool {
        self.endpoint.world.is_of_threads()
    }

    /// The world rank of the communicator's rank 0.
    #[cfg(feature = "cuda")]
    pub fn first_member(&self) -> usize {
        self.endpoint.members()[0]
    }

    /// [`Backend::split`], not boxed.
    ///
    /// # Safety
    /// As for [`Backend::split`].
    pub unsafe fn part(&self, color: Option<u32>, key: i64) -> Result<Option<HostComm>> {
        let ranks = self.endpoint.ranks;
        let timeout = self.timeout();
        // Who goes where.
        let own = [u64::from(color.is_some()), color.unwrap_or(0).into(), key as u64];
        let mut all = vec![[0u64; 3]; ranks];
        // SAFETY: the caller's contract.
        unsafe { self.tell_all(&own, all.as_mut_slice()) }?;
        let mut members: Vec<usize> = (0..ranks).filter(|rank| all[*rank][..2] == own[..2]).collect();
        members.sort_by_key(|rank| (all[*rank][2] as i64, *rank));
        let leader = members[0];
        // The first of each group makes its channel, and tells.
        let channel = if color.is_some() && leader == self.endpoint.rank {
            Some(NewChannel::create(&self.endpoint.world, members.len()))
        } else {
            None
        };
        let id = channel.as_ref().and_then(|made| made.as_ref().ok()).map_or(0, NewChannel::id);
        let mut ids = vec![[0u64; 1]; ranks];
        // SAFETY: as above.
        unsafe { self.tell_all(&[id], ids.as_mut_slice()) }?;
        let joined = match channel {
            _ if color.is_none() => None,
            Some(made) => Some(made),
            None if ids[leader] == [0] => Some(Err(crate::Error::from(UnsupportedError {
                what: "split".into(),
                why: format!("rank {leader} could not make the new communicator's memory"),
                remedy: "see that rank's error".into(),
            }))),
            None => Some(NewChannel::open(&self.endpoint.world, ids[leader][0])),
        };
        // Nobody leaves before all have opened the channel, or failed to.
        let opened = !matches!(joined, Some(Err(_)));
        let mut all_opened = vec![[0u64; 1]; ranks];
        // SAFETY: as above.
        unsafe { self.tell_all(&[u64::from(opened)], all_opened.as_mut_slice()) }?;
        let Some(channel) = joined.transpose()? else {
            return Ok(None);
        };
        if let Some(rank) = members.iter().find(|rank| all_opened[**rank] == [0]) {
            return Err(crate::Error::from(UnsupportedError {
                what: "split".into(),
                why: format!("rank {rank} could not open the new communicator's memory"),
                remedy: "see that rank's error".into(),
            }));
        }
        let rank = members.iter().position(|rank| *rank == self.endpoint.rank).expect("one of them");
        let world_ranks = members.iter().map(|rank| self.endpoint.members()[*rank]).collect();
        let world = self.endpoint.world.clone();
        Ok(Some(HostComm::attach(world, channel, rank, world_ranks, timeout)))
    }

    /// The job that joiners come to, if so many can.
    fn growing_job(&self, joiners: usize) -> Result<&str> {
        let Some(job) = self.endpoint.world.job() else {
            return Err(Error::from(UnsupportedError {
                what: "grow".into(),
                why: "the ranks are not processes of one host".into(),
                remedy: "start them as processes, with `phalanx launch`, on one host".into(),
            }));
        };
        let world_size = self.endpoint.ranks.saturating_add(joiners);
        if world_size > MAX_RANKS {
            return Err(crate::UsageError::WorldSize { world_size, limit: MAX_RANKS }.into());
        }
        Ok(job)
    }

    /// [`Backend::grow`], not boxed: all ranks meet again, with the joiners, in a region of their own. Those are told the backend.
    ///
    /// # Safety
    /// As for [`Backend::split`].
    pub unsafe fn grown(&self, joiners: usize, backend: BackendKind) -> Result<(HostComm, u64)> {
        self.endpoint.check()?;
        let job = self.growing_job(joiners)?;
        let (rank, members) = (self.endpoint.rank, self.endpoint.ranks);
        // So that nobody meets those of an earlier attempt.
        let own = [getrandom::u64().map_err(|e| {
            Error::system("getrandom", std::io::Error::other(e), "each meeting needs a number of its own")
        })?];
        let mut all = vec![[0u64; 1]; members];
        let call = Call { root: joiners, ..Call::empty(Operation::Grow) };
        // SAFETY: the caller's contract.
        unsafe { self.tell_all_in(call, &own, all.as_mut_slice()) }?;
        let growth = Growth { job: job.to_owned(), backend, number: all[0][0], rank, members, joiners };
        let grown = growth.meet(crate::watch::deadline::of(self.timeout())).map(|met| {
            let ranks = (0..members + joiners).collect();
            (HostComm::attach(met.world, met.channel, rank, ranks, self.timeout()), met.number)
        });
        // A joiner may have died when some members had met it already: all go on in the new world, or none.
        // SAFETY: the caller's contract.
        unsafe { self.tell_all_in(call, &[u64::from(grown.is_ok())], all.as_mut_slice()) }?;
        let (grown, number) = grown?;
        if let Some(other) = all.iter().position(|met| *met == [0]) {
            return Err(Error::bootstrap(
                format!("rank {other} has not met the joiners"),
                "see its error; this communicator works on, and can grow again",
            ));
        }
        Ok((grown, number))
    }

    /// An all_gather of a few words, as a step of `split` or of another backend's set-up.
    ///
    /// # Safety
    /// As for [`Backend::collective`].
    pub unsafe fn tell_all<const N: usize>(&self, own: &[u64; N], all: &mut [[u64; N]]) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.tell_all_in(Call::empty(Operation::Split), own, all) }
    }

    /// Gives bytes and gets everybody's, in rank order, as a step of another backend's set-up.
    ///
    /// # Safety
    /// As for [`Backend::collective`].
    #[cfg(feature = "cuda")]
    pub unsafe fn tell_bytes(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let ranks = self.endpoint.ranks;
        let mut lens = vec![[0u64; 1]; ranks];
        // SAFETY: the caller's contract.
        unsafe { self.tell_all(&[own.len() as u64], lens.as_mut_slice()) }?;
        let longest = lens.iter().map(|[len]| *len as usize).max().unwrap_or(0);
        let mut send = own.to_vec();
        send.resize(longest, 0);
        let mut all = vec![0u8; longest * ranks];
        let call = Call {
            send: send.as_ptr(),
            recv: all.as_mut_ptr(),
            blocks: Blocks::Equal(longest),
            ..Call::empty(Operation::Split)
        };
        // SAFETY: the caller's contract; one block of the longest, and room for one from each rank.
        unsafe { self.collective(&call) }?;
        let of_rank = |(rank, [len]): (usize, &[u64; 1])| all[rank * longest..][..*len as usize].to_vec();
        Ok(lens.iter().enumerate().map(of_rank).collect())
    }

    /// The same as a step of this call.
    unsafe fn tell_all_in<const N: usize>(
        &self,
        call: Call<'_>,
        own: &[u64; N],
        all: &mut [[u64; N]],
    ) -> Result<()> {
        let call = Call {
            dtype: DType::U64,
            send: own.as_ptr().cast(),
            recv: all.as_mut_ptr().cast(),
            blocks: Blocks::Equal(N),
            ..call
        };
        // SAFETY: the caller's contract; one block of N words, and room for one from each rank.
        unsafe { self.collective(&call) }
    }
}
