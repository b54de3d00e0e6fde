//! Before ranks do something together for the first time, they meet.
//!
//! The library connects ranks when it needs to, inside of the call, and waits there for whoever is missing, without
//! a deadline. So the ranks see first, by what they announce, that all of them have come to the call; that costs
//! microseconds, once for each kind of operation. What can still go wrong inside is the watchdog's.

use super::collective::parts;
use super::communicator::Communicator;
use crate::backend::host::{Offer, Subject, Way};
use crate::backend::{Blocks, Call, Direction, Operation, Transfer};
use crate::error::{Error, Result};
use std::collections::BTreeSet;
use std::time::Instant;

/// What the ranks have been through together.
#[derive(Default)]
pub(super) struct Acquainted {
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
pub(super) enum Meeting {
    /// All, in this collective.
    All(Subject),
    /// Single peers, in messages to or from them; in checked mode these are compared, too.
    Peers(Subject, Vec<(usize, Way)>, Vec<Offer>),
}

impl Communicator {
    /// The meeting before a collective, which is announced, if it is the first of its kind.
    #[inline(always)]
    pub(super) fn meeting_for(
        &self,
        call: &Call<'_>,
        subject: &Subject,
        acquainted: &mut Acquainted,
    ) -> Option<Meeting> {
        use Operation::{AllGatherV, AllToAllV, GatherV, ScatterV};
        if self.ranks == 1 {
            return None;
        }
        if matches!(call.operation, AllGatherV | AllToAllV | GatherV | ScatterV) {
            let parts = parts(call, self.rank, self.ranks);
            let new = self.greet(parts.iter().map(|part| (part.peer, part.direction, part.bytes)));
            return (!new.is_empty()).then_some(Meeting::Peers(*subject, new, Vec::new()));
        }
        let lengths = lengths(&call.blocks, call.dtype.size(), self.ranks);
        let kind = Kind { call: subject.call_word(), lengths };
        (lengths != 0 && acquainted.add(kind)).then_some(Meeting::All(*subject))
    }

    /// The meeting before messages, if some are the first on their way between two ranks, or are compared.
    pub(super) fn meeting_of(
        &self,
        transfers: &[Transfer],
        subject: &Subject,
        offers: Vec<Offer>,
    ) -> Option<Meeting> {
        let new = self.greet(transfers.iter().map(|t| (t.peer, t.direction, t.count * t.dtype.size())));
        (!new.is_empty() || !offers.is_empty()).then_some(Meeting::Peers(*subject, new, offers))
    }

    /// Those whom this rank greets for the first time.
    fn greet(&self, messages: impl Iterator<Item = (usize, Direction, usize)>) -> Vec<(usize, Way)> {
        let ways = messages.map(|(peer, direction, bytes)| (peer, way(direction), bytes));
        ways.filter(|(peer, way, bytes)| *bytes > 0 && *peer != self.rank && self.witness.greet(*peer, *way))
            .map(|(peer, way, _)| (peer, way))
            .collect()
    }

    /// Tells its peer of a message, to be compared before it is enqueued.
    pub(super) fn offer(&self, message: &Subject, direction: Direction) -> Result<Option<Offer>> {
        let since = Instant::now();
        self.witness.offer(message, way(direction)).map_err(|error| self.judge(message, since, error))
    }

    /// What the end of a meeting means for the communicator, which the subject needed.
    #[cold]
    pub(super) fn judge(&self, subject: &Subject, since: Instant, error: Error) -> Error {
        if !error.is_fatal() {
            return error;
        }
        let error = self.witness.judge_meeting(subject, since, error);
        self.fail(error)
    }

    /// Waits until all have come.
    #[cold]
    pub(super) fn meet(&self, meeting: &Meeting) -> Result<()> {
        match meeting {
            Meeting::All(subject) => self.wait_until(|| self.witness.have_all_arrived(subject), subject),
            Meeting::Peers(subject, peers, offers) => {
                let have_all = || peers.iter().all(|(peer, way)| self.witness.is_greeted_by(*peer, *way));
                self.wait_until(have_all, subject)?;
                self.compare_offers(subject, offers)
            }
        }
    }

    /// Waits for what the peers say of messages; an error if it is something else.
    pub(super) fn compare_offers(&self, subject: &Subject, offers: &[Offer]) -> Result<()> {
        let since = Instant::now();
        let compared = offers.iter().try_for_each(|offer| self.witness.settle(offer));
        compared.map_err(|error| self.judge(subject, since, error))
    }
}

fn way(direction: Direction) -> Way {
    match direction {
        Direction::Send(_) => Way::Out,
        Direction::Recv(_) => Way::In,
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
