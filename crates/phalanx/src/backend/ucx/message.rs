//! Messages of the user: posted sends and receives, each one of UCX's operations.

use super::UcxComm;
use super::mail::{Header, Kind, Matching};
use super::wait::Awaited;
use super::worker::{Outcome, Worker};
use crate::contract::{Direction, Envelope, OperationId, Transfer, Wanted};
use crate::control::endpoint::PendingOperation;
use crate::control::failure::ChannelFailure;
use crate::control::record::CallRecord;
use crate::os::RunInstant;
use crate::os::sync::lock;
use crate::types::dtype::DType;
use crate::types::error::{PeerEvent, Result, UsageError};
use crate::types::op::ReductionCode;
use std::collections::HashMap;

/// A posted message.
#[derive(Clone, Copy)]
struct Message {
    transfer: Transfer,
    /// Of the messages to or from that peer, from 1.
    number: u64,
}

impl Message {
    fn pending(&self) -> PendingOperation {
        (self.number, record(&self.transfer))
    }
}

/// The messages of a communicator.
pub(super) struct Messages {
    /// By operation.
    posted: HashMap<usize, Message>,
    /// Sends and receives so far, of each peer.
    numbers: Vec<[u64; 2]>,
    /// Messages so far.
    announced: u64,
    /// The last probe for any source looked at this host first.
    looked_here: bool,
}

/// How a message goes, with its number there.
enum Route {
    Network(usize),
    /// To or from a rank of this host.
    Host(OperationId),
}

impl Route {
    fn of(id: OperationId) -> Route {
        if id.0.is_multiple_of(2) { Route::Network(id.0 / 2) } else { Route::Host(OperationId(id.0 / 2)) }
    }

    fn id(self) -> OperationId {
        match self {
            Route::Network(operation) => OperationId(2 * operation),
            Route::Host(OperationId(number)) => OperationId(2 * number + 1),
        }
    }
}

impl Messages {
    pub fn new(ranks: usize) -> Messages {
        Messages { posted: HashMap::new(), numbers: vec![[0; 2]; ranks], announced: 0, looked_here: false }
    }

    fn take_turns(&mut self) -> bool {
        self.looked_here = !self.looked_here;
        self.looked_here
    }
}

/// A transfer as errors show it.
fn record(transfer: &Transfer) -> CallRecord {
    CallRecord {
        operation: transfer.operation(),
        dtype: transfer.dtype,
        reduction: ReductionCode::Sum,
        config: 0,
        root: transfer.peer as u32,
        count: transfer.count as u64,
        counts: transfer.tag.into(),
    }
}

impl UcxComm {
    /// # Safety
    /// As for [`Backend::post`](crate::contract::Backend::post).
    pub(super) unsafe fn post_message(&self, transfer: Transfer) -> Result<OperationId> {
        let Transfer { direction, peer, tag, dtype, count, .. } = transfer;
        let matching = Matching { kind: Kind::User, number: 0, tag: tag.into() };
        let bytes = count * dtype.size();
        let mut messages = lock(&self.messages);
        messages.announced += 1;
        self.endpoint.own().announce_message(messages.announced, &record(&transfer));
        let number = &mut messages.numbers[peer][usize::from(matches!(direction, Direction::Recv(_)))];
        *number += 1;
        let number = *number;
        if self.is_here(peer) {
            // SAFETY: the caller's contract.
            return unsafe { self.post_on_host(transfer) }.map(|id| Route::Host(id).id());
        }
        let operation = match direction {
            Direction::Send(data) => {
                let header = self.header(matching, dtype, bytes);
                let header = Header { order: number, ..header };
                // SAFETY: the caller's contract.
                unsafe { self.send(peer, header, data) }
            }
            // SAFETY: the caller's contract.
            Direction::Recv(target) => unsafe { self.receive(peer, matching, target, bytes) },
        };
        messages.posted.insert(operation, Message { transfer, number });
        Ok(Route::Network(operation).id())
    }

    /// A header of this rank in this communicator.
    pub(super) fn header(&self, matching: Matching, dtype: DType, bytes: usize) -> Header {
        Header {
            key: self.link.world.key,
            channel: self.link.channel,
            source: self.endpoint.rank as u32,
            kind: matching.kind as u8,
            dtype: dtype.code(),
            number: matching.number,
            tag: matching.tag,
            marked: dtype.mark(bytes as u64),
            ..Header::default()
        }
    }

    /// # Safety
    /// As for [`Worker::send`].
    pub(super) unsafe fn send(&self, peer: usize, header: Header, data: *const u8) -> usize {
        // SAFETY: the caller's contract.
        unsafe { self.link.world.worker().send(self.endpoint.members()[peer], header, data) }
    }

    /// # Safety
    /// As for [`Worker::receive`].
    pub(super) unsafe fn receive(
        &self,
        peer: usize,
        matching: Matching,
        target: *mut u8,
        len: usize,
    ) -> usize {
        let from = (peer, self.endpoint.members()[peer]);
        // SAFETY: the caller's contract.
        unsafe { self.link.world.worker().receive(self.link.channel, from, matching, target, len) }
    }

    fn message(&self, operation: usize) -> Message {
        lock(&self.messages).posted[&operation]
    }

    /// An error for a receive from this rank itself that can never complete: no send is posted, and the thread that could post one waits.
    pub(super) fn check_self_exchange(&self, id: OperationId, transfer: &Transfer) -> Result<()> {
        let rank = self.endpoint.rank;
        let Route::Network(message) = Route::of(id) else { return Ok(()) };
        if transfer.peer != rank || !self.link.world.worker().is_waiting(message) {
            return Ok(());
        }
        self.drop_message(message);
        let operation = transfer.operation().name();
        Err(UsageError::SelfExchange { operation, rank }.into())
    }

    /// Takes a message that is over; the error if both ends differ.
    fn settle(&self, operation: usize) -> Result<()> {
        // Together: other threads look at all posted messages.
        let (Message { transfer, number }, (outcome, header)) = {
            let mut messages = lock(&self.messages);
            let message = messages.posted.remove(&operation).expect("a message is waited for once");
            (message, self.take(operation))
        };
        let Direction::Recv(_) = transfer.direction else { return Ok(()) };
        let marked = transfer.dtype.mark((transfer.count * transfer.dtype.size()) as u64);
        if outcome == Outcome::Complete && (header.dtype, header.marked) == (transfer.dtype.code(), marked) {
            return Ok(());
        }
        let dtype = DType::decode(header.dtype, header.marked).map_or(DType::U8, |(dtype, _)| dtype);
        let sent = Transfer {
            direction: Direction::Send(std::ptr::null()),
            peer: self.endpoint.rank,
            dtype,
            count: header.bytes() / dtype.size(),
            ..transfer
        };
        let (ours, theirs) = ((self.endpoint.rank, record(&transfer)), (transfer.peer, record(&sent)));
        let (lower, higher) = if ours.0 < theirs.0 { (ours, theirs) } else { (theirs, ours) };
        Err(self.endpoint.fail(&ChannelFailure::Mismatch { sequence: number, lower, higher }))
    }

    /// Gives up a message, whose buffer nothing uses afterwards.
    #[cold]
    fn drop_message(&self, operation: usize) {
        let removed = lock(&self.messages).posted.remove(&operation);
        let Some(Message { transfer, .. }) = removed else { return };
        if self.link.world.worker().forget(operation).is_err() {
            self.give_up(&mut vec![Awaited { operation, peer: transfer.peer }]);
        }
    }

    pub(super) fn wait_for_message(&self, id: OperationId, meanwhile: &dyn Fn()) -> Result<()> {
        match Route::of(id) {
            Route::Network(operation) => self.wait_on_network(operation, meanwhile),
            Route::Host(id) => self.wait_on_host(id, meanwhile),
        }
    }

    fn wait_on_network(&self, operation: usize, meanwhile: &dyn Fn()) -> Result<()> {
        let message = self.message(operation);
        let awaited = [Awaited { operation, peer: message.transfer.peer }];
        match self.await_all(&awaited, &|| message.pending(), meanwhile) {
            Ok(()) => self.settle(operation),
            Err(error) => {
                self.drop_message(operation);
                Err(error)
            }
        }
    }

    pub(super) fn test_message(&self, id: OperationId) -> Result<bool> {
        match Route::of(id) {
            Route::Network(operation) => self.test_on_network(operation),
            Route::Host(id) => self.test_on_host(id, None),
        }
    }

    fn test_on_network(&self, operation: usize) -> Result<bool> {
        self.advance_on_host()?;
        let mut worker = self.link.world.worker();
        worker.progress();
        let is_over =
            matches!(worker.outcome(operation), Some((Outcome::Complete | Outcome::WrongLength, _)));
        drop(worker);
        if is_over {
            return self.settle(operation).map(|()| true);
        }
        self.endpoint.check().map(|()| false).inspect_err(|_| self.drop_message(operation))
    }

    /// [`test_message`](Self::test_message), which looks at the peer and the deadline as a wait does.
    pub(super) fn test_message_since(&self, id: OperationId, since: RunInstant) -> Result<bool> {
        match Route::of(id) {
            Route::Network(operation) => self.test_on_network_since(operation, since),
            Route::Host(id) => self.test_on_host(id, Some(since)),
        }
    }

    fn test_on_network_since(&self, operation: usize, since: RunInstant) -> Result<bool> {
        if self.test_on_network(operation)? {
            return Ok(true);
        }
        self.link.world.worker().fetch_aside();
        let message = self.message(operation);
        let pending = || message.pending();
        let reason = self.endpoint.reason_to_give_up(message.transfer.peer, &pending, since);
        match reason {
            None => Ok(false),
            // Its data may be under way: a wait looks at that.
            Some(ChannelFailure::Peer { event: PeerEvent::Left, .. }) => {
                self.wait_on_network(operation, &|| ()).map(|()| true)
            }
            Some(reason) => {
                let failure = self.endpoint.fail(&reason);
                self.drop_message(operation);
                Err(failure)
            }
        }
    }

    /// Advances all messages; answers one that is under way.
    pub(super) fn progress_messages(&self) -> Option<PendingOperation> {
        let messages = lock(&self.messages);
        let mut worker = self.link.world.worker();
        worker.progress();
        let mut posted = messages.posted.iter();
        let is_under_way = |worker: &mut Worker, operation| worker.outcome(operation).is_none();
        posted
            .find(|(operation, _)| is_under_way(&mut worker, **operation))
            .map(|(_, message)| message.pending())
    }

    /// Waits until all messages are over. Their ids stay valid.
    pub(super) fn finish_messages(&self) -> Result<()> {
        let under_way = |messages: &Messages| {
            let mut worker = self.link.world.worker();
            let open = messages.posted.iter().filter(|(operation, _)| worker.outcome(**operation).is_none());
            let awaited = |(operation, message): (&usize, &Message)| {
                (Awaited { operation: *operation, peer: message.transfer.peer }, *message)
            };
            open.map(awaited).next()
        };
        loop {
            let next = under_way(&lock(&self.messages));
            let Some((awaited, message)) = next else { return Ok(()) };
            self.await_all(&[awaited], &|| message.pending(), &|| ())?;
        }
    }

    /// Waits until UCX uses no buffer of a message, after the communicator has failed. Whoever waits for a message still finds it.
    pub(super) fn give_back_all(&self) {
        let posted = lock(&self.messages).posted.clone();
        self.let_go(|worker| {
            let is_held = |(operation, _): &(&usize, &Message)| worker.is_moving(**operation);
            posted.iter().filter(is_held).map(|(_, message)| message.transfer.peer).collect()
        });
    }

    pub(super) fn probe_now(&self, wanted: Wanted) -> Result<Option<Envelope>> {
        // Whoever was asked first the last time is asked second.
        let is_host_first = wanted.source.is_none() && lock(&self.messages).take_turns();
        let network =
            || wanted.source.is_none_or(|source| !self.is_here(source)).then(|| self.probe_network(wanted));
        if is_host_first && let Some(found) = self.probe_host(wanted)? {
            return Ok(Some(found));
        }
        match network().flatten() {
            Some(found) => Ok(Some(found)),
            None if is_host_first => Ok(None),
            None => self.probe_host(wanted),
        }
    }

    fn probe_network(&self, wanted: Wanted) -> Option<Envelope> {
        let mut worker = self.link.world.worker();
        worker.progress();
        worker.mail().probe(self.link.channel, wanted)
    }

    /// Waits for a message that no receive is for. A peer that has left can no longer send one; the others are waited for.
    pub(super) fn wait_for_probe(&self, wanted: Wanted) -> Result<Envelope> {
        let endpoint = &self.endpoint;
        let record = CallRecord::of_probe(wanted);
        let number = wanted.source.map_or(0, |source| lock(&self.messages).numbers[source][1]) + 1;
        let mut found = None;
        let ready = &mut || {
            found = self.probe_now(wanted)?;
            Ok(found.is_some())
        };
        endpoint.poll(ready, &|| endpoint.possible_senders(wanted.source), &|| (number, record))?;
        Ok(found.expect("waited for"))
    }

    /// A message of two words between members of a new communicator.
    ///
    /// # Safety
    /// The direction has room for two words, until this returns.
    pub(super) unsafe fn exchange_internal(&self, direction: Direction, peer: usize) -> Result<()> {
        let matching = Matching { kind: Kind::Internal, number: 0, tag: 0 };
        let transfer = Transfer::host(direction, peer, 0, DType::U64, 2);
        let operation = match direction {
            // SAFETY: the caller's contract.
            Direction::Send(data) => unsafe { self.send(peer, self.header(matching, DType::U64, 16), data) },
            // SAFETY: the caller's contract.
            Direction::Recv(target) => unsafe { self.receive(peer, matching, target, 16) },
        };
        let mut awaited = vec![Awaited { operation, peer }];
        let done = self.await_all(&awaited, &|| (0, record(&transfer)), &|| ());
        if let Err(error) = done {
            self.give_up(&mut awaited);
            return Err(error);
        }
        self.take(operation);
        Ok(())
    }
}
