//! A channel on which nothing is moved: the ranks of another backend's communicator tell each other here what
//! they call, see who is gone, and give up together, with one verdict.

mod transfer_check;

pub(crate) use transfer_check::TransferCheck;

use super::endpoint::Endpoint;
use super::failure::{ChannelFailure, Context};
use super::host_channel::HostChannel;
use super::layout::RECORDS;
use super::liveness::Liveness;
use super::record::Record;
use crate::contract::{Blocks, Call, Departure, Operation, Transfer};
use crate::os::sync::{Ordering, lock};
use crate::types::error::{Error, MismatchError, PeerEvent, Result};
use crate::types::op::{RawReduction, ReductionCode};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A peer that left may have done its part of what this rank still waits for; after this time it has not.
const GRACE: Duration = Duration::from_secs(1);

/// One rank's end of it.
pub(crate) struct ControlChannel {
    endpoint: Endpoint,
    /// Where the ranks meet: it fails with this channel, and its failures are judged here, so that there is one verdict.
    meetings: Arc<dyn HostChannel>,
    /// Held by whoever looks for a reason to give up: a rank has one place for its verdict.
    judging: Mutex<Liveness>,
    /// Whose signals this rank has asked for since its work was complete: all ranks may have made the same calls, and one of
    /// these be who holds it up.
    signals: Mutex<Vec<usize>>,
}

/// As long as it lives, the rank waits: others that wait for it find out for whom.
pub(crate) struct Waiting<'a>(&'a Endpoint);

impl Drop for Waiting<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.standing(self.0.rank).waits_for.store(0, Ordering::Release);
    }
}

/// Which way messages go between two ranks: each way is a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Connection {
    Out,
    In,
}

impl Connection {
    /// The same connection as the peer sees it.
    fn reverse(self) -> Connection {
        match self {
            Connection::Out => Connection::In,
            Connection::In => Connection::Out,
        }
    }
}

/// What a rank waits in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AnnouncedCall {
    sequence: u64,
    record: Record,
}

impl AnnouncedCall {
    pub fn call(sequence: u64, call: &Call<'_>) -> AnnouncedCall {
        AnnouncedCall { sequence, record: Record::of(call) }
    }

    /// A message; `sequence` counts this rank's messages.
    pub fn message(sequence: u64, transfer: &Transfer) -> AnnouncedCall {
        let call = Call {
            root: transfer.peer,
            dtype: transfer.dtype,
            reduction: RawReduction { code: ReductionCode::Sum, factor: 0 },
            blocks: Blocks::Equal(transfer.count),
            ..Call::empty(transfer.operation())
        };
        AnnouncedCall { sequence, record: Record::of(&call) }
    }

    /// A block of this all_to_all_v: a message to or from a peer.
    pub fn block(&self, message: Operation, (peer, count): (usize, usize)) -> AnnouncedCall {
        let record = Record { root: peer as u32, count: count as u64, counts: message as u64, ..self.record };
        AnnouncedCall { record, ..*self }
    }

    /// How many words a subject has on its way to the other ranks.
    pub const WORDS: usize = 4;

    /// What is called, with type, reduction and root, in one word.
    pub fn call_word(&self) -> u64 {
        self.record.words()[0]
    }

    pub fn words(&self) -> [u64; AnnouncedCall::WORDS] {
        let [head, count, counts] = self.record.words();
        [self.sequence, head, count, counts]
    }

    fn from_words([sequence, head, count, counts]: [u64; AnnouncedCall::WORDS]) -> Option<AnnouncedCall> {
        Record::from_words([head, count, counts]).map(|record| AnnouncedCall { sequence, record })
    }

    /// The error for what two ranks call under one number.
    pub fn mismatch(
        lower: (usize, &[u64; AnnouncedCall::WORDS]),
        higher: (usize, &[u64; AnnouncedCall::WORDS]),
    ) -> Error {
        let text = |words| {
            AnnouncedCall::from_words(words).map_or("an unknown call".into(), |s| s.record.to_string())
        };
        MismatchError {
            rank: higher.0,
            theirs: text(*higher.1),
            other_rank: lower.0,
            ours: text(*lower.1),
            sequence: lower.1[0],
        }
        .into()
    }

    /// The operation with its arguments, and its number.
    pub fn describe(&self) -> (String, u64) {
        (self.record.to_string(), self.sequence)
    }

    fn peer(&self) -> Option<usize> {
        matches!(self.record.operation, Operation::Send | Operation::Recv)
            .then_some(self.record.root as usize)
    }
}

impl ControlChannel {
    pub fn new(channel: Box<dyn HostChannel>, meetings: Arc<dyn HostChannel>) -> ControlChannel {
        ControlChannel {
            endpoint: channel.into_endpoint(),
            meetings,
            judging: Mutex::new(Liveness::new()),
            signals: Mutex::default(),
        }
    }

    /// Says what this rank calls, before it does anything else. Collectives are numbered from 1, by all ranks alike.
    #[inline]
    pub fn announce(&self, subject: &AnnouncedCall) {
        self.endpoint.own().announce(subject.sequence, &subject.record);
    }

    /// Takes back what was announced: its number is free again.
    pub fn withdraw(&self, subject: &AnnouncedCall) {
        self.endpoint.own().withdraw(subject.sequence);
        self.endpoint.tell();
    }

    /// Says that a collective, and all before it, is complete.
    pub fn complete(&self, sequence: u64) {
        self.endpoint.own().done_operation.set(sequence);
    }

    /// Whether this process is a copy, made by fork, of the one that has the rank.
    pub fn is_copy(&self) -> bool {
        self.endpoint.is_copy()
    }

    /// The verdict, if there is one.
    #[inline]
    pub fn check(&self) -> Result<()> {
        self.endpoint.check()
    }

    /// A wait begins, in which the rank [tells](ControlChannel::tell_wait) for whom.
    #[inline]
    pub fn waiting(&self) -> Waiting<'_> {
        Waiting(&self.endpoint)
    }

    /// This rank's work goes on when signals of these peers have come.
    pub fn expect_signals(&self, peers: impl Iterator<Item = usize>) {
        let mut signals = lock(&self.signals);
        for peer in peers {
            if !signals.contains(&peer) {
                signals.push(peer);
            }
        }
    }

    /// All work of this rank is complete.
    pub fn have_signals(&self) {
        lock(&self.signals).clear();
    }

    /// Lets ranks that share no memory know at once what this one has announced.
    pub fn tell(&self) {
        self.endpoint.tell();
    }

    /// Tells the others whom this rank waits for.
    pub fn tell_wait(&self, subject: &AnnouncedCall) {
        let endpoint = &self.endpoint;
        let awaited = match subject.peer() {
            Some(peer) => Some(peer),
            None => {
                let absent = endpoint.peers().find(|rank| !self.has_arrived(*rank, subject));
                absent.or_else(|| lock(&self.signals).first().copied())
            }
        };
        if let Some(rank) = awaited {
            let awaited = endpoint.members()[rank] as u32 + 1;
            endpoint.standing(endpoint.rank).waits_for.store(awaited, Ordering::Release);
        }
    }

    /// The verdict on a meeting that failed, which the subject needed.
    #[cold]
    pub fn judge_meeting(&self, subject: &AnnouncedCall, since: Instant, error: Error) -> Error {
        if let Err(verdict) = self.look(subject, since) {
            return verdict;
        }
        let endpoint = &self.endpoint;
        let (sequence, record) = (subject.sequence, subject.record);
        let context = Context { reporter: endpoint.rank, sequence, record, waited: since.elapsed() };
        // Seen there first; the ranks have the same numbers here.
        let verdict = match &error {
            Error::Peer(peer) => ChannelFailure::Peer { rank: peer.rank, event: peer.event, context },
            Error::Timeout(timeout) => ChannelFailure::Timeout {
                missing: timeout.missing.iter().map(|rank| rank.rank).collect(),
                context,
            },
            _ => return error,
        };
        let _judging = lock(&self.judging);
        endpoint.fail(&verdict)
    }

    /// Looks for a reason to give up waiting for work that was enqueued; if there is one, gives up for all
    /// ranks and answers the verdict.
    pub fn look(&self, subject: &AnnouncedCall, since: Instant) -> Result<()> {
        let endpoint = &self.endpoint;
        let mut liveness = lock(&self.judging);
        endpoint.check()?;
        let waited = since.elapsed();
        let context = || Context {
            reporter: endpoint.rank,
            sequence: subject.sequence,
            record: subject.record,
            waited,
        };
        let awaited: Vec<usize> = match subject.peer() {
            Some(peer) => vec![peer],
            None => endpoint.peers().collect(),
        };
        if subject.peer().is_none() {
            let first = subject.sequence.saturating_sub(RECORDS as u64 - 1).max(1);
            for sequence in first..=subject.sequence {
                if let Some(mismatch) = endpoint.peers().find_map(|p| endpoint.compare_records(p, sequence)) {
                    return Err(endpoint.fail(&mismatch));
                }
            }
        }
        for &rank in &awaited {
            match endpoint.gone(rank) {
                Some(PeerEvent::Left) if self.may_have_done(rank, subject, waited) => {}
                Some(event) => {
                    return Err(endpoint.fail(&ChannelFailure::Peer { rank, event, context: context() }));
                }
                None => {}
            }
        }
        // Also one that has enqueued its part: what carries the data may be a thread of its process.
        if let Some(rank) = liveness.look(endpoint, &awaited) {
            let event = PeerEvent::Stopped;
            return Err(endpoint.fail(&ChannelFailure::Peer { rank, event, context: context() }));
        }
        if waited >= endpoint.deadline() {
            let signals = lock(&self.signals);
            let is_for_signals = subject.record.operation == Operation::WaitSignals && !signals.is_empty();
            let suspects = if is_for_signals { &*signals } else { &awaited };
            let missing = endpoint.missing(suspects, subject.sequence, &subject.record);
            return Err(endpoint.fail(&ChannelFailure::Timeout { missing, context: context() }));
        }
        Ok(())
    }

    /// Whether a peer that left may have done its part: nobody leaves before what it called is complete. What has no number
    /// needs all to be there.
    fn may_have_done(&self, rank: usize, subject: &AnnouncedCall, waited: Duration) -> bool {
        match subject.peer() {
            Some(_) => waited < GRACE,
            None => subject.sequence > 0 && self.has_arrived(rank, subject),
        }
    }

    fn has_arrived(&self, rank: usize, subject: &AnnouncedCall) -> bool {
        self.endpoint.channel.state(rank).has_come_to(subject.sequence)
    }

    /// Whether all ranks have announced a collective, or a later one.
    pub fn have_all_arrived(&self, subject: &AnnouncedCall) -> bool {
        self.endpoint.peers().all(|rank| self.has_arrived(rank, subject))
    }

    /// Tells a peer that this rank is about to exchange messages with it, this way; false if it was told before.
    pub fn greet(&self, peer: usize, way: Connection) -> bool {
        self.endpoint.own().greetings[way as usize].add(peer)
    }

    /// Whether a peer has said the same, for the other end of the way.
    pub fn is_greeted_by(&self, peer: usize, way: Connection) -> bool {
        let endpoint = &self.endpoint;
        endpoint.channel.state(peer).greetings[way.reverse() as usize].has(endpoint.rank)
    }

    /// Whether there may be a reason to give up, for work that nobody waits for: it costs little to ask.
    pub fn suspects(&self, subject: &AnnouncedCall, since: Instant) -> bool {
        let endpoint = &self.endpoint;
        let is_late = since.elapsed() >= endpoint.timeout();
        endpoint.peers().any(|rank| match endpoint.gone(rank) {
            Some(PeerEvent::Left) => !self.may_have_done(rank, subject, since.elapsed()),
            Some(_) => true,
            None => is_late && subject.peer().is_none() && !self.has_arrived(rank, subject),
        })
    }

    /// Whether a peer has ended without leaving.
    pub fn has_casualties(&self) -> bool {
        let endpoint = &self.endpoint;
        endpoint.peers().any(|rank| endpoint.gone(rank).is_some_and(|event| event != PeerEvent::Left))
    }

    /// Whether all other ranks have left, each after what it called was complete, and are there for what ends them together.
    pub fn have_all_left(&self) -> bool {
        let endpoint = &self.endpoint;
        endpoint.peers().all(|rank| endpoint.gone(rank) == Some(PeerEvent::Left))
    }

    /// Whether a rank is not there for what ends all together: it has left without, or its process is over.
    pub fn is_one_missing(&self) -> bool {
        let endpoint = &self.endpoint;
        endpoint.peers().any(|rank| endpoint.is_alone(rank)) || self.has_casualties()
    }

    /// This rank leaves, and is not there for what ends all together.
    pub fn depart_alone(&self) {
        self.endpoint.depart_alone();
    }

    /// The verdict on what the ranks call under one number, told in their order, if it is not the same.
    pub fn compare(&self, calls: &[[u64; AnnouncedCall::WORDS]]) -> Result<()> {
        match calls.iter().position(|theirs| *theirs != calls[0]) {
            None => Ok(()),
            Some(rank) => Err(self.differ((0, &calls[0]), (rank, &calls[rank]))),
        }
    }

    /// The verdict on two ranks that call different things under one number; all ranks find the same two.
    pub fn differ(
        &self,
        lower: (usize, &[u64; AnnouncedCall::WORDS]),
        higher: (usize, &[u64; AnnouncedCall::WORDS]),
    ) -> Error {
        match (AnnouncedCall::from_words(*lower.1), AnnouncedCall::from_words(*higher.1)) {
            (Some(low), Some(high)) => self.reject((lower.0, low), (higher.0, high)),
            _ => AnnouncedCall::mismatch(lower, higher),
        }
    }

    fn reject(&self, lower: (usize, AnnouncedCall), higher: (usize, AnnouncedCall)) -> Error {
        let _judging = lock(&self.judging);
        self.endpoint.fail(&ChannelFailure::Mismatch {
            sequence: lower.1.sequence,
            lower: (lower.0, lower.1.record),
            higher: (higher.0, higher.1.record),
        })
    }

    /// Gives up for all ranks, because this one failed; answers the verdict that holds.
    pub fn give_up(&self) -> Error {
        if self.is_copy() {
            // Another thread may have held the lock when the copy was made.
            return Error::forked();
        }
        let _judging = lock(&self.judging);
        let endpoint = &self.endpoint;
        let verdict = endpoint.fail(&ChannelFailure::Aborted { rank: endpoint.rank });
        self.meetings.abort();
        verdict
    }

    /// The channel of those who are still there, and the number of this shrinking.
    pub fn shrink(&self) -> Result<(Box<dyn HostChannel>, u64)> {
        let (endpoint, number) = self.endpoint.shrink()?;
        Ok((self.meetings.over(endpoint), number))
    }

    pub fn timeout(&self) -> Duration {
        self.endpoint.timeout()
    }

    pub fn set_timeout(&self, timeout: Duration) {
        self.endpoint.set_timeout(timeout);
    }

    pub fn depart(&self, departure: Departure) {
        self.endpoint.depart(departure);
        self.meetings.depart(departure);
    }
}
