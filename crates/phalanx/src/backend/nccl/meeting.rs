//! Before ranks do something together for the first time, they meet.
//!
//! The library connects ranks when it needs to, inside of the call, and waits there for whoever is missing, without
//! a deadline. So the ranks see first, by what they announce, that all of them have come to the call; that costs
//! microseconds, once for each kind of operation. What can still go wrong inside is the watchdog's.

use super::collective::{Part, parts};
use super::communicator::Communicator;
use crate::contract::{Blocks, Call, Direction, Operation};
use crate::control::control_channel::{AnnouncedCall, Connection, TransferCheck};
use crate::gpu::backoff::Backoff;
use crate::types::error::{Error, Result};
use std::collections::BTreeSet;
use std::time::Instant;

/// What the ranks have been through together.
#[derive(Default)]
pub(crate) struct Acquainted {
    kinds: BTreeSet<Kind>,
    /// The kind before: most programs make the same call again.
    last: Kind,
}

impl Acquainted {
    /// Whether a kind is new; from now on it is not.
    #[inline]
    fn add(&mut self, kind: Kind) -> bool {
        if kind == self.last {
            return false;
        }
        self.last = kind;
        self.kinds.insert(kind)
    }
}

/// The library chooses its way, and with it the connections, by these.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Kind {
    /// Operation, type, reduction and root, as they are announced.
    call: u64,
    /// One bit for each length in bytes that a block has, rounded to a power of two.
    lengths: u64,
}

/// Whom to wait for before the library is called.
pub(crate) enum Meeting {
    /// All, in this collective.
    All(AnnouncedCall),
    /// Single peers, each in what this rank exchanges with it.
    Peers(Vec<Awaited>),
}

/// A peer that has to come to its end of a message.
pub(crate) struct Awaited {
    subject: AnnouncedCall,
    peer: usize,
    way: Connection,
    /// What both ends say of the message, in checked mode, if they can: whoever has said it has come.
    offer: Option<TransferCheck>,
}

impl Meeting {
    /// With these peers, if there are any.
    pub(crate) fn with(peers: Vec<Awaited>) -> Option<Meeting> {
        (!peers.is_empty()).then_some(Meeting::Peers(peers))
    }

    /// What is waited for, until it is over.
    fn subject(&self) -> &AnnouncedCall {
        match self {
            Meeting::All(subject) => subject,
            Meeting::Peers(peers) => &peers[0].subject,
        }
    }
}

impl Communicator {
    /// The meeting before a collective, which is announced, if it is the first of its kind.
    #[inline(always)]
    pub(crate) fn meeting_for(
        &self,
        call: &Call<'_>,
        subject: &AnnouncedCall,
        acquainted: &mut Acquainted,
    ) -> Option<Meeting> {
        use Operation::{AllGatherV, AllToAllV, GatherV, ScatterV};
        if self.ranks == 1 {
            return None;
        }
        if matches!(call.operation, AllGatherV | AllToAllV | GatherV | ScatterV) {
            let parts = parts(call, self.rank, self.ranks);
            return Meeting::with(parts.iter().filter_map(|part| self.greet(subject, part)).collect());
        }
        let lengths = lengths(&call.blocks, call.dtype.size(), self.ranks);
        let kind = Kind { call: subject.call_word(), lengths };
        (lengths != 0 && acquainted.add(kind)).then_some(Meeting::All(*subject))
    }

    /// Tells a peer of the first message of a way between two ranks, which it has to come to.
    pub(crate) fn greet(&self, subject: &AnnouncedCall, part: &Part) -> Option<Awaited> {
        let (peer, way) = (part.peer, way(part.direction));
        let is_new = part.bytes > 0 && peer != self.rank && self.control_channel.greet(peer, way);
        is_new.then_some(Awaited { subject: *subject, peer, way, offer: None })
    }

    /// Tells a peer what this rank calls, which it compares before either enqueues it. Where that cannot be told, it is only
    /// greeted.
    pub(crate) fn offer(&self, message: &AnnouncedCall, part: &Part) -> Result<Option<Awaited>> {
        let (since, greeted) = (Instant::now(), self.greet(message, part));
        let (peer, way) = (part.peer, way(part.direction));
        let offer =
            self.control_channel.offer(message, way).map_err(|error| self.judge(message, since, error))?;
        Ok(match offer {
            Some(offer) => Some(Awaited { subject: *message, peer, way, offer: Some(offer) }),
            None => greeted,
        })
    }

    /// What the end of a meeting means for the communicator, which the subject needed.
    #[cold]
    pub(crate) fn judge(&self, subject: &AnnouncedCall, since: Instant, error: Error) -> Error {
        if !error.is_fatal() {
            return error;
        }
        let error = self.control_channel.judge_meeting(subject, since, error);
        self.fail(error)
    }

    /// Waits until all have come.
    #[cold]
    pub(crate) fn meet(&self, meeting: &mut Meeting) -> Result<()> {
        meet_all(vec![(self, meeting)])
    }

    /// Whether all have come. An error if one calls something else.
    fn is_over(&self, meeting: &mut Meeting, since: Instant) -> Result<bool> {
        match meeting {
            Meeting::All(subject) => Ok(self.control_channel.have_all_arrived(subject)),
            Meeting::Peers(peers) => {
                all_asked(peers, |awaited| self.has_come(awaited, since))?;
                Ok(peers.is_empty())
            }
        }
    }

    fn has_come(&self, awaited: &mut Awaited, since: Instant) -> Result<bool> {
        match &mut awaited.offer {
            Some(offer) => {
                self.control_channel.settle(offer).map_err(|error| self.judge(&awaited.subject, since, error))
            }
            None => Ok(self.control_channel.is_greeted_by(awaited.peer, awaited.way)),
        }
    }
}

/// Waits for the meetings of several communicators, all at once: their other ranks may come to them in another order.
pub(crate) fn meet_all(mut open: Vec<(&Communicator, &mut Meeting)>) -> Result<()> {
    let since = Instant::now();
    let mut patience = Backoff::since(since);
    let _waiting: Vec<_> = open.iter().map(|(communicator, _)| communicator.begin_wait()).collect();
    loop {
        all_asked(&mut open, |(communicator, meeting)| communicator.is_over(meeting, since))?;
        if open.is_empty() {
            return Ok(());
        }
        if patience.pause() {
            for (communicator, meeting) in &open {
                communicator.look(meeting.subject(), since)?;
            }
        }
    }
}

/// Forgets what is over. Every one is asked, also after an error: what has come and is not what it should be is why another does not.
fn all_asked<T>(open: &mut Vec<T>, mut is_over: impl FnMut(&mut T) -> Result<bool>) -> Result<()> {
    let mut outcome = Ok(());
    open.retain_mut(|one| match is_over(one) {
        Ok(is_over) => !is_over,
        Err(error) => {
            outcome = Err(error);
            false
        }
    });
    outcome
}

fn way(direction: Direction) -> Connection {
    match direction {
        Direction::Send(_) => Connection::Out,
        Direction::Recv(_) => Connection::In,
    }
}

/// The lengths of the blocks, as a set.
fn lengths(blocks: &Blocks<'_>, size: usize, ranks: usize) -> u64 {
    let bit = |len: usize| if len == 0 { 0 } else { 1 << (len * size).ilog2() };
    match blocks {
        Blocks::Equal(len) => bit(*len),
        Blocks::Each(_) => (0..ranks).fold(0, |all, rank| all | bit(blocks.len(rank))),
    }
}
