//! Control channel for backends that move data elsewhere (NCCL, NVSHMEM): ranks announce their calls here, so that mismatches and
//! missing ranks are found, and a failure is the same on every rank.

mod transfer_check;

pub(crate) use transfer_check::TransferCheck;

use super::endpoint::Endpoint;
use super::failure::{ChannelFailure, FailureContext};
use super::host_channel::HostChannel;
use super::layout::RECORDS;
use super::liveness::Liveness;
use super::record::CallRecord;
use crate::contract::{Blocks, Call, Departure, Operation, Transfer};
use crate::os::RunInstant;
use crate::os::sync::{Ordering, lock};
use crate::types::error::{Error, MismatchError, PeerEvent, Result};
use crate::types::op::{RawReduction, ReductionCode};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A message to or from a peer that has left may still complete for this long.
const GRACE: Duration = Duration::from_secs(1);

/// One rank's end of a control channel.
pub(crate) struct ControlChannel {
    endpoint: Endpoint,
    /// Moves bytes between the ranks. Its failures become failures of this channel, so that ranks see one failure.
    host_channel: Arc<dyn HostChannel>,
    /// Held by the thread that checks the peers: a rank can propose one failure at a time.
    failing_lock: Mutex<Liveness>,
    /// Peers whose signals this rank waits for. One of them may block it although all ranks have made the same calls.
    signals: Mutex<Vec<usize>>,
}

/// Guard of a wait: when dropped, clears the rank that this one has published as awaited.
pub(crate) struct WaitGuard<'a>(&'a Endpoint);

impl Drop for WaitGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.status(self.0.rank).waits_for.store(0, Ordering::Release);
    }
}

/// Direction of the messages between two ranks. NCCL connects each direction separately.
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

/// The call or message that a rank has announced, with its number.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AnnouncedCall {
    sequence: u64,
    record: CallRecord,
}

impl AnnouncedCall {
    pub fn call(sequence: u64, call: &Call<'_>) -> AnnouncedCall {
        AnnouncedCall { sequence, record: CallRecord::of(call) }
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
        AnnouncedCall { sequence, record: CallRecord::of(&call) }
    }

    /// A wait for one rank, which needs no other: in a window.
    pub fn of_rank(sequence: u64, operation: Operation, rank: usize) -> AnnouncedCall {
        AnnouncedCall { sequence, record: CallRecord::of_rank(operation, rank) }
    }

    fn is_of_rank(&self) -> bool {
        let is_of_window = matches!(self.record.operation, Operation::OneSided | Operation::WaitSignals);
        is_of_window && self.record.counts != 0
    }

    /// A block of this all_to_all_v: a message to or from a peer.
    pub fn block(&self, message: Operation, (peer, count): (usize, usize)) -> AnnouncedCall {
        let record =
            CallRecord { root: peer as u32, count: count as u64, counts: message as u64, ..self.record };
        AnnouncedCall { record, ..*self }
    }

    /// 64-bit words of an announcement.
    pub const WORDS: usize = 4;

    /// Operation, type, reduction and root in one word.
    pub fn call_word(&self) -> u64 {
        self.record.words()[0]
    }

    pub fn words(&self) -> [u64; AnnouncedCall::WORDS] {
        let [head, count, counts] = self.record.words();
        [self.sequence, head, count, counts]
    }

    fn from_words([sequence, head, count, counts]: [u64; AnnouncedCall::WORDS]) -> Option<AnnouncedCall> {
        CallRecord::from_words([head, count, counts]).map(|record| AnnouncedCall { sequence, record })
    }

    /// The error for two ranks that call different operations under one number.
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
        let is_message = matches!(self.record.operation, Operation::Send | Operation::Recv);
        (is_message || self.is_of_rank()).then_some(self.record.root as usize)
    }
}

impl ControlChannel {
    pub fn new(channel: Box<dyn HostChannel>, host_channel: Arc<dyn HostChannel>) -> ControlChannel {
        ControlChannel {
            endpoint: channel.into_endpoint(),
            host_channel,
            failing_lock: Mutex::new(Liveness::new()),
            signals: Mutex::default(),
        }
    }

    /// Tells it the communicator's name, for error messages.
    pub fn set_name(&self, name: &str) {
        let _ = self.endpoint.name.set(name.to_owned());
    }

    /// Tells it the name with what the program calls it.
    pub fn set_given_name(&self, name: &str) {
        let _ = self.endpoint.given_name.set(name.to_owned());
    }

    /// The channel's number, the same on all ranks.
    #[cfg(feature = "nccl")]
    pub fn id(&self) -> u64 {
        self.endpoint.id()
    }

    /// Announces a call, before anything of it is done. Collectives are numbered from 1, by all ranks alike.
    #[inline]
    pub fn announce(&self, announced: &AnnouncedCall) {
        self.endpoint.own().announce(announced.sequence, &announced.record);
    }

    /// Withdraws an announcement: its number is free again.
    pub fn withdraw(&self, announced: &AnnouncedCall) {
        self.endpoint.own().withdraw(announced.sequence);
        self.endpoint.publish();
    }

    /// Publishes that a collective, and all before it, are complete.
    pub fn complete(&self, sequence: u64) {
        self.endpoint.own().done_operation.set(sequence);
    }

    /// Whether this process is a copy, made by fork, of the one that has the rank.
    pub fn is_copy(&self) -> bool {
        self.endpoint.is_copy()
    }

    /// The channel's failure, if it has failed.
    #[inline]
    pub fn check(&self) -> Result<()> {
        self.endpoint.check()
    }

    /// Begins a wait; [`publish_awaited_rank`](ControlChannel::publish_awaited_rank) publishes which rank it is for.
    #[inline]
    pub fn waiting(&self) -> WaitGuard<'_> {
        WaitGuard(&self.endpoint)
    }

    /// Records that this rank's work needs signals of these peers.
    pub fn expect_signals(&self, peers: impl Iterator<Item = usize>) {
        let mut signals = lock(&self.signals);
        for peer in peers {
            if !signals.contains(&peer) {
                signals.push(peer);
            }
        }
    }

    /// Clears the expected signals: all work of this rank is complete.
    pub fn have_signals(&self) {
        lock(&self.signals).clear();
    }

    /// Publishes announcements now to ranks on other hosts; ranks that share memory see them anyway.
    pub fn publish(&self) {
        self.endpoint.publish();
    }

    /// Publishes the rank that this one waits for: the peer of a message, a rank that has not arrived, or one whose signal is needed. Errors
    /// follow the chain of these ranks to the one that blocks.
    pub fn publish_awaited_rank(&self, announced: &AnnouncedCall) {
        let endpoint = &self.endpoint;
        let awaited = match announced.peer() {
            Some(peer) => Some(peer),
            None => {
                let absent = endpoint.peers().find(|rank| !self.has_arrived(*rank, announced));
                absent.or_else(|| lock(&self.signals).first().copied())
            }
        };
        if let Some(rank) = awaited {
            let awaited = endpoint.members()[rank] as u32 + 1;
            endpoint.publish_wait((announced.sequence, announced.record));
            endpoint.status(endpoint.rank).waits_for.store(awaited, Ordering::Release);
        }
    }

    /// Fails the channel for all ranks after an exchange on the host channel, which the announced call needed, has failed with `error`.
    /// Returns the failure that counts.
    #[cold]
    pub fn fail_after_exchange(&self, announced: &AnnouncedCall, since: RunInstant, error: Error) -> Error {
        if let Err(failure) = self.check_peers(announced, since) {
            return failure;
        }
        let endpoint = &self.endpoint;
        let (sequence, record) = (announced.sequence, announced.record);
        let context = FailureContext { reporter: endpoint.rank, sequence, record, waited: since.elapsed() };
        // The host channel failed first. Its ranks have the same numbers as this channel's.
        let failure = match &error {
            Error::Peer(peer) => ChannelFailure::Peer { rank: peer.rank, event: peer.event, context },
            Error::Timeout(timeout) => ChannelFailure::Timeout {
                missing: timeout.missing.iter().map(|rank| rank.rank).collect(),
                context,
            },
            _ => return error,
        };
        let _failing = lock(&self.failing_lock);
        endpoint.fail(&failure)
    }

    /// Checks the peers of enqueued work that this rank has waited for since `since`. Fails the channel for all ranks, and returns the failure,
    /// if a peer has called something else, has left, died or stopped, or if the deadline has passed.
    pub fn check_peers(&self, announced: &AnnouncedCall, since: RunInstant) -> Result<()> {
        let endpoint = &self.endpoint;
        let mut liveness = lock(&self.failing_lock);
        endpoint.check()?;
        let waited = since.elapsed();
        let context = || FailureContext {
            reporter: endpoint.rank,
            sequence: announced.sequence,
            record: announced.record,
            waited,
        };
        let awaited: Vec<usize> = match announced.peer() {
            Some(peer) => vec![peer],
            None => endpoint.peers().collect(),
        };
        if announced.peer().is_none() {
            let first = announced.sequence.saturating_sub(RECORDS as u64 - 1).max(1);
            for sequence in first..=announced.sequence {
                if let Some(mismatch) = endpoint.peers().find_map(|p| endpoint.compare_records(p, sequence)) {
                    return Err(endpoint.fail(&mismatch));
                }
            }
        }
        for &rank in &awaited {
            match endpoint.gone(rank) {
                Some(PeerEvent::Left) if self.may_have_done(rank, announced, waited) => {}
                Some(event) => {
                    return Err(endpoint.fail(&ChannelFailure::Peer { rank, event, context: context() }));
                }
                None => {}
            }
        }
        // A rank that has enqueued its part counts too: a thread of its process may move the data.
        if let Some(rank) = liveness.find_stopped(endpoint, &awaited) {
            let event = PeerEvent::Stopped;
            return Err(endpoint.fail(&ChannelFailure::Peer { rank, event, context: context() }));
        }
        if waited >= endpoint.deadline() {
            let signals = lock(&self.signals);
            let is_for_signals = announced.record.operation == Operation::WaitSignals && !signals.is_empty();
            let suspects = if is_for_signals { &*signals } else { &awaited };
            let missing = match announced.is_of_rank() {
                true => endpoint.ends_of_chains(suspects),
                false => endpoint.missing(suspects, announced.sequence, &announced.record),
            };
            return Err(endpoint.fail(&ChannelFailure::Timeout { missing, context: context() }));
        }
        Ok(())
    }

    /// Fails the channel for all ranks, since nothing reaches a rank that lives. Returns the failure that counts.
    #[cfg(feature = "nccl")]
    #[cold]
    pub fn fail_unreachable(&self, rank: usize, announced: &AnnouncedCall, waited: Duration) -> Error {
        let _failing = lock(&self.failing_lock);
        let (endpoint, AnnouncedCall { sequence, record }) = (&self.endpoint, *announced);
        let context = FailureContext { reporter: endpoint.rank, sequence, record, waited };
        endpoint.fail(&ChannelFailure::Peer { rank, event: PeerEvent::Unreachable, context })
    }

    /// Whether a peer that left may have done its part, since ranks leave after their calls are complete. A call without a number needs all
    /// ranks to stay.
    fn may_have_done(&self, rank: usize, announced: &AnnouncedCall, waited: Duration) -> bool {
        match announced.peer() {
            Some(_) => waited < GRACE,
            None => announced.sequence > 0 && self.has_arrived(rank, announced),
        }
    }

    fn has_arrived(&self, rank: usize, announced: &AnnouncedCall) -> bool {
        self.endpoint.channel.state(rank).has_come_to(announced.sequence)
    }

    /// Whether all ranks have announced a collective, or a later one.
    pub fn have_all_arrived(&self, announced: &AnnouncedCall) -> bool {
        self.endpoint.peers().all(|rank| self.has_arrived(rank, announced))
    }

    /// Publishes that this rank is about to use a connection with a peer; false if that was published before.
    pub fn greet(&self, peer: usize, way: Connection) -> bool {
        self.endpoint.own().greetings[way as usize].add(peer)
    }

    /// Whether the peer has published that it is about to use its end of the connection.
    pub fn is_greeted_by(&self, peer: usize, way: Connection) -> bool {
        let endpoint = &self.endpoint;
        endpoint.channel.state(peer).greetings[way.reverse() as usize].has(endpoint.rank)
    }

    /// Publishes that nothing of this rank reaches the peers' GPU memory any more. Its own place among the connections,
    /// of which there is none with itself, says so.
    pub fn publish_detached(&self) {
        self.greet(self.endpoint.rank, Connection::Out);
    }

    /// Whether nothing reaches GPU memory between the ranks any more: every rank has said so, or its process has ended.
    pub fn are_all_detached(&self) -> bool {
        let endpoint = &self.endpoint;
        let has_said = |rank| endpoint.channel.state(rank).greetings[Connection::Out as usize].has(rank);
        let is_over = |rank| has_said(rank) || endpoint.gone(rank) == Some(PeerEvent::Died);
        has_said(endpoint.rank) && endpoint.peers().all(is_over)
    }

    /// Whether the ranks are threads of this process.
    pub fn is_of_threads(&self) -> bool {
        self.endpoint.world.is_of_threads()
    }

    /// A cheap form of [`check_peers`](ControlChannel::check_peers) for work that no thread waits for: whether there may be a reason to fail.
    pub fn suspects(&self, announced: &AnnouncedCall, since: RunInstant) -> bool {
        let endpoint = &self.endpoint;
        let is_late = since.elapsed() >= endpoint.timeout();
        endpoint.peers().any(|rank| match endpoint.gone(rank) {
            Some(PeerEvent::Left) => !self.may_have_done(rank, announced, since.elapsed()),
            Some(_) => true,
            None => is_late && announced.peer().is_none() && !self.has_arrived(rank, announced),
        })
    }

    /// Whether a rank runs on this rank's host.
    #[cfg(feature = "nccl")]
    pub fn shares_host_with(&self, rank: usize) -> bool {
        let (endpoint, members) = (&self.endpoint, self.endpoint.members());
        let topology = endpoint.world.topology();
        topology.is_none_or(|topology| topology.same_host(members[endpoint.rank], members[rank]))
    }

    /// Whether a rank's process has ended, however it left the communicator.
    pub fn has_exited(&self, rank: usize) -> bool {
        let endpoint = &self.endpoint;
        rank != endpoint.rank && (endpoint.has_exited(rank) || endpoint.gone(rank) == Some(PeerEvent::Died))
    }

    /// Whether a rank has left the communicator in order.
    #[cfg(feature = "nccl")]
    pub fn has_left(&self, rank: usize) -> bool {
        self.endpoint.gone(rank) == Some(PeerEvent::Left)
    }

    /// Whether a peer has ended without leaving.
    pub fn has_casualties(&self) -> bool {
        let endpoint = &self.endpoint;
        endpoint.peers().any(|rank| endpoint.gone(rank).is_some_and(|event| event != PeerEvent::Left))
    }

    /// Whether all other ranks have left after completing their calls, and take part in the common shutdown.
    pub fn have_all_left(&self) -> bool {
        let endpoint = &self.endpoint;
        endpoint.peers().all(|rank| endpoint.gone(rank) == Some(PeerEvent::Left))
    }

    /// Whether a rank will miss the common shutdown: it left alone, or its process has ended.
    pub fn is_one_missing(&self) -> bool {
        let endpoint = &self.endpoint;
        endpoint.peers().any(|rank| endpoint.is_alone(rank)) || self.has_casualties()
    }

    /// Leaves without taking part in the common shutdown.
    pub fn depart_alone(&self) {
        self.endpoint.depart_alone();
    }

    /// Fails with a mismatch unless all ranks made the same call under one number; `calls` is in rank order.
    pub fn compare(&self, calls: &[[u64; AnnouncedCall::WORDS]]) -> Result<()> {
        match calls.iter().position(|theirs| *theirs != calls[0]) {
            None => Ok(()),
            Some(rank) => Err(self.differ((0, &calls[0]), (rank, &calls[rank]))),
        }
    }

    /// Fails with the mismatch of two ranks; all ranks find the same two.
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
        let _failing = lock(&self.failing_lock);
        self.endpoint.fail(&ChannelFailure::Mismatch {
            sequence: lower.1.sequence,
            lower: (lower.0, lower.1.record),
            higher: (higher.0, higher.1.record),
        })
    }

    /// Aborts the channel for all ranks; returns the failure that counts.
    pub fn give_up(&self) -> Error {
        if self.is_copy() {
            // Another thread may have held the lock when the copy was made.
            return Error::forked();
        }
        let _failing = lock(&self.failing_lock);
        let endpoint = &self.endpoint;
        let failure = endpoint.fail(&ChannelFailure::Aborted { rank: endpoint.rank });
        self.host_channel.abort();
        failure
    }

    /// A host channel of the surviving ranks, and the number of this shrink.
    pub fn shrink(&self) -> Result<(Box<dyn HostChannel>, u64)> {
        let (endpoint, number) = self.endpoint.shrink()?;
        Ok((self.host_channel.over(endpoint)?, number))
    }

    /// Whether the flags of all surviving ranks are set.
    pub fn agree(&self, flag: bool) -> Result<bool> {
        self.endpoint.agree(flag)
    }

    pub fn timeout(&self) -> Duration {
        self.endpoint.timeout()
    }

    pub fn set_timeout(&self, timeout: Duration) {
        self.endpoint.set_timeout(timeout);
    }

    pub fn depart(&self, departure: Departure) {
        self.endpoint.depart(departure);
        self.host_channel.depart(departure);
    }
}
