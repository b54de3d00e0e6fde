//! Arrival of all ranks before a call in which the library may block.
//!
//! The library connects ranks inside the first call that needs the connection, and waits there without a
//! deadline. So before the first operation of each kind, the ranks check on the control channel that all of
//! them have announced it. That costs microseconds, once for each kind. The watchdog handles what can still
//! go wrong inside the library.

use super::communicator::Communicator;
use super::parts::{Part, parts};
use crate::contract::{Blocks, Call, Direction, Operation};
use crate::control::control_channel::{AnnouncedCall, Connection, TransferCheck};
use crate::gpu::backoff::Backoff;
use crate::os::RunInstant;
use crate::types::error::{Error, Result};
use std::collections::BTreeSet;

/// Kinds of calls for which the library has connected the ranks.
#[derive(Default)]
pub(crate) struct ConnectedKinds {
    kinds: BTreeSet<CallKind>,
    /// The previous kind, checked first: most programs repeat a call.
    last: CallKind,
}

impl ConnectedKinds {
    /// Adds a kind; true if it is new.
    #[inline]
    fn add(&mut self, kind: CallKind) -> bool {
        if kind == self.last {
            return false;
        }
        self.last = kind;
        self.kinds.insert(kind)
    }
}

/// Properties of a call by which the library chooses its algorithm, and with it the connections.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct CallKind {
    /// Operation, type, reduction and root, as they are announced.
    call: u64,
    /// One bit for each length in bytes that a block has, rounded to a power of two.
    lengths: u64,
}

/// Ranks that must arrive before the library is called.
pub(crate) enum Arrival {
    /// All ranks, in this collective.
    All(AnnouncedCall),
    /// Single peers, each at its end of a message with this rank.
    Peers(Vec<AwaitedPeer>),
}

/// A peer that must arrive at its end of a message.
pub(crate) struct AwaitedPeer {
    announced: AnnouncedCall,
    peer: usize,
    connection: Connection,
    /// In checked mode, the comparison of both ends of the message. Its answer also proves arrival.
    check: Option<TransferCheck>,
}

impl Arrival {
    /// Arrival of these peers; `None` if there are none.
    pub(crate) fn with(peers: Vec<AwaitedPeer>) -> Option<Arrival> {
        (!peers.is_empty()).then_some(Arrival::Peers(peers))
    }

    /// The call that waits, for diagnosis.
    fn announced(&self) -> &AnnouncedCall {
        match self {
            Arrival::All(announced) => announced,
            Arrival::Peers(peers) => &peers[0].announced,
        }
    }
}

impl Communicator {
    /// The arrival that an announced collective needs; `None` unless it is the first of its kind.
    #[inline(always)]
    pub(crate) fn arrival_for(
        &self,
        call: &Call<'_>,
        announced: &AnnouncedCall,
        connected: &mut ConnectedKinds,
    ) -> Option<Arrival> {
        use Operation::{AllGatherV, AllToAllV, GatherV, ScatterV};
        if self.ranks == 1 {
            return None;
        }
        if matches!(call.operation, AllGatherV | AllToAllV | GatherV | ScatterV) {
            let parts = parts(call, self.rank, self.ranks);
            let is_exchange = call.operation == AllToAllV && call.config.is_none();
            let by_library = parts.iter().filter(|part| !(is_exchange && self.is_carried(part)));
            return Arrival::with(
                by_library.filter_map(|part| self.expect_first_contact(announced, part)).collect(),
            );
        }
        let lengths = lengths(&call.blocks, call.dtype.size(), self.ranks);
        let kind = CallKind { call: announced.call_word(), lengths };
        (lengths != 0 && connected.add(kind)).then_some(Arrival::All(*announced))
    }

    /// Whether an own kernel carries a message out. It needs no arrival: its peer may wait in the library for another message of the same
    /// group.
    fn is_carried(&self, #[cfg_attr(not(feature = "nccl"), expect(unused))] part: &Part) -> bool {
        #[cfg(feature = "nccl")]
        return self.direct.get().is_some_and(|direct| direct.carries(part, self.rank));
        #[cfg(not(feature = "nccl"))]
        return false;
    }

    /// Announces the first message of a connection to the peer, which must arrive at it.
    fn expect_first_contact(&self, announced: &AnnouncedCall, part: &Part) -> Option<AwaitedPeer> {
        let (peer, connection) = (part.peer, connection(part.direction));
        let is_new = part.bytes > 0 && peer != self.rank && self.control_channel.greet(peer, connection);
        is_new.then_some(AwaitedPeer { announced: *announced, peer, connection, check: None })
    }

    /// Announces a message to the peer, if it needs its arrival.
    pub(crate) fn expect_peer(&self, message: &AnnouncedCall, part: &Part) -> Option<AwaitedPeer> {
        if self.is_carried(part) { None } else { self.expect_first_contact(message, part) }
    }

    /// Announces a message to the peer, for comparison before either end enqueues it.
    ///
    /// Between hosts, and for a message to itself, only the first contact is announced.
    pub(crate) fn expect_checked(&self, message: &AnnouncedCall, part: &Part) -> Result<Option<AwaitedPeer>> {
        let (since, first_contact) = (RunInstant::now(), self.expect_peer(message, part));
        let (peer, connection) = (part.peer, connection(part.direction));
        let check = self
            .control_channel
            .start_transfer_check(message, connection)
            .map_err(|error| self.diagnose(message, since, error))?;
        Ok(match check {
            Some(check) => Some(AwaitedPeer { announced: *message, peer, connection, check: Some(check) }),
            None => first_contact,
        })
    }

    /// Turns an error of a wait into the communicator's failure, with the missing ranks named.
    #[cold]
    pub(crate) fn diagnose(&self, announced: &AnnouncedCall, since: RunInstant, error: Error) -> Error {
        if !error.is_fatal() {
            return error;
        }
        let error = self.control_channel.fail_after_exchange(announced, since, error);
        self.fail(error)
    }

    /// For an error of a part that was being made: this communicator's own failure, if a lost rank is the reason.
    #[cold]
    pub(crate) fn own_failure(&self, announced: &AnnouncedCall, since: RunInstant, of_part: Error) -> Error {
        if !of_part.is_fatal() {
            return of_part;
        }
        match self.control_channel.check_peers(announced, since) {
            Ok(()) => of_part,
            Err(failure) => self.fail(failure),
        }
    }

    /// Waits until all have arrived.
    #[cold]
    pub(crate) fn wait_for_arrival(&self, arrival: &mut Arrival) -> Result<()> {
        wait_for_arrivals(vec![(self, arrival)])
    }

    /// Whether all have arrived. An error if a rank calls something else.
    fn is_complete(&self, arrival: &mut Arrival, since: RunInstant) -> Result<bool> {
        match arrival {
            Arrival::All(announced) => Ok(self.control_channel.have_all_arrived(announced)),
            Arrival::Peers(peers) => {
                retain_incomplete(peers, |awaited| self.has_arrived(awaited, since))?;
                Ok(peers.is_empty())
            }
        }
    }

    fn has_arrived(&self, awaited: &mut AwaitedPeer, since: RunInstant) -> Result<bool> {
        match &mut awaited.check {
            Some(check) => self
                .control_channel
                .test_transfer_check(check)
                .map_err(|error| self.diagnose(&awaited.announced, since, error)),
            None => Ok(self.control_channel.is_greeted_by(awaited.peer, awaited.connection)),
        }
    }
}

/// Waits for arrivals in several communicators at once: other ranks may reach them in another order.
pub(crate) fn wait_for_arrivals(mut open: Vec<(&Communicator, &mut Arrival)>) -> Result<()> {
    let since = RunInstant::now();
    let mut backoff = Backoff::since(since);
    let _waiting: Vec<_> = open.iter().map(|(communicator, _)| communicator.begin_wait()).collect();
    loop {
        retain_incomplete(&mut open, |(communicator, arrival)| communicator.is_complete(arrival, since))?;
        if open.is_empty() {
            return Ok(());
        }
        if backoff.pause() {
            for (communicator, arrival) in &open {
                communicator.look(arrival.announced(), since)?;
            }
        }
    }
}

/// Removes the complete ones. All are checked even after an error: one rank's mismatch may be why another
/// does not arrive.
fn retain_incomplete<T>(
    open: &mut Vec<T>,
    mut is_complete: impl FnMut(&mut T) -> Result<bool>,
) -> Result<()> {
    let mut outcome = Ok(());
    open.retain_mut(|one| match is_complete(one) {
        Ok(is_complete) => !is_complete,
        Err(error) => {
            outcome = Err(error);
            false
        }
    });
    outcome
}

fn connection(direction: Direction) -> Connection {
    match direction {
        Direction::Send(_) => Connection::Out,
        Direction::Recv(_) => Connection::In,
    }
}

/// The set of block lengths, one bit for each power of two.
fn lengths(blocks: &Blocks<'_>, size: usize, ranks: usize) -> u64 {
    let bit = |len: usize| if len == 0 { 0 } else { 1 << (len * size).ilog2() };
    match blocks {
        Blocks::Equal(len) => bit(*len),
        Blocks::Each(_) => (0..ranks).fold(0, |all, rank| all | bit(blocks.len(rank))),
    }
}
