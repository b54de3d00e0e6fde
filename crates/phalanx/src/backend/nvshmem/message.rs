//! Messages: a sender copies a part to a slot of its symmetric memory and sends a header over a host channel;
//! the receiver gets the part and sends a receipt, which frees the slot.
//!
//! Headers are matched by the host backend, in the order of posting and by tags. A message is sent when all
//! of it is in slots, so the receiver may come later while slots are free. No GPU waits for a peer.

use super::NvshmemComm;
use super::device::StreamEvent;
use crate::contract::{Backend, Departure, Direction, OperationId, Transfer};
use crate::control::control_channel::AnnouncedCall;
use crate::control::host_channel::HostChannel;
use crate::gpu::backoff::Backoff;
use crate::os::RunInstant;
use crate::os::sync::lock;
use crate::types::dtype::DType;
use crate::types::error::{Error, Result};
use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Duration;

/// Time for peers to fetch sent messages before this process leaves.
const ENDING: Duration = Duration::from_secs(10);

/// Header of a part: the announced call ([`AnnouncedCall::words`]), bytes of the part, and its slot.
pub(crate) type PartHeader = [u64; AnnouncedCall::WORDS + 2];

/// The messages of a communicator.
pub(crate) struct NvshmemMessages {
    /// Channel of the headers, and channel of the receipts.
    pub headers: Box<dyn HostChannel>,
    pub receipts: Box<dyn HostChannel>,
    state: Mutex<MessageState>,
}

#[derive(Default)]
pub(crate) struct MessageState {
    pub next: usize,
    /// In the order of posting.
    pub transfers: VecDeque<MovingTransfer>,
    /// Receipts that peers may not have taken. The words are boxed: their address must not change.
    pub returned: Vec<(OperationId, Box<PartHeader>)>,
    /// Slots whose receipt has not arrived.
    pub awaiting_receipt: Vec<(usize, OperationId, Box<u64>)>,
}

/// A transfer under way.
pub(crate) struct MovingTransfer {
    pub id: usize,
    pub transfer: Transfer,
    /// Bytes that are done.
    pub done: usize,
    pub step: TransferStep,
}

pub(crate) enum TransferStep {
    Begin,
    /// A part is copied to a slot.
    Filling {
        slot: usize,
        bytes: usize,
        filled: StreamEvent,
    },
    /// The header of a part is being sent.
    SendingHeader {
        id: OperationId,
        _words: Box<PartHeader>,
    },
    /// Waits for a header.
    AwaitingHeader {
        id: OperationId,
        header: Box<PartHeader>,
    },
    /// A header has arrived.
    HeaderArrived {
        header: Box<PartHeader>,
    },
    /// A part is copied from the peer's slot.
    Fetching {
        slot: usize,
        bytes: usize,
        theirs: u64,
        fetched: StreamEvent,
    },
    Done,
}

impl MovingTransfer {
    pub fn bytes(&self) -> usize {
        self.transfer.count * self.transfer.dtype.size()
    }

    /// The step after a part.
    pub fn next(&self) -> TransferStep {
        if self.done == self.bytes() { TransferStep::Done } else { TransferStep::Begin }
    }

    /// Transfers with the same key are matched one after the other, in the order of posting.
    fn key(&self) -> (bool, usize, u32) {
        (matches!(self.transfer.direction, Direction::Send(_)), self.transfer.peer, self.transfer.tag)
    }
}

impl NvshmemMessages {
    pub fn new(headers: Box<dyn HostChannel>, receipts: Box<dyn HostChannel>) -> NvshmemMessages {
        NvshmemMessages { headers, receipts, state: Mutex::default() }
    }

    pub fn post(&self, transfer: Transfer) -> OperationId {
        let mut state = lock(&self.state);
        let id = state.next;
        state.next += 1;
        state.transfers.push_back(MovingTransfer { id, transfer, done: 0, step: TransferStep::Begin });
        OperationId(id)
    }

    pub fn is_under_way(&self, id: OperationId) -> bool {
        lock(&self.state).transfers.iter().any(|moving| moving.id == id.0)
    }

    /// The oldest transfer under way.
    fn oldest(&self) -> Option<OperationId> {
        lock(&self.state).transfers.front().map(|moving| OperationId(moving.id))
    }

    pub fn depart(&self, departure: Departure) {
        self.headers.depart(departure);
        self.receipts.depart(departure);
    }

    /// Whether a peer has not yet fetched a message or taken a receipt.
    fn has_sent(&self) -> bool {
        let state = lock(&self.state);
        !state.awaiting_receipt.is_empty()
            || !state.returned.is_empty()
            || state.transfers.iter().any(|moving| matches!(moving.transfer.direction, Direction::Send(_)))
    }

    fn announced(&self, id: OperationId) -> Option<AnnouncedCall> {
        let state = lock(&self.state);
        let moving = state.transfers.iter().find(|moving| moving.id == id.0)?;
        Some(AnnouncedCall::message(moving.id as u64 + 1, &moving.transfer))
    }
}

impl MessageState {
    /// Drops receipts that peers have taken, and frees the slots whose receipt has arrived.
    fn settle(&mut self, receipts: &dyn HostChannel, free: impl Fn(usize)) -> Result<()> {
        let mut failed = None;
        let mut is_done = |id| {
            receipts.test(id).unwrap_or_else(|error| {
                failed = Some(error);
                false
            })
        };
        self.returned.retain(|(id, _)| !is_done(*id));
        self.awaiting_receipt.retain(|(slot, id, _)| {
            let is_back = is_done(*id);
            if is_back {
                free(*slot);
            }
            !is_back
        });
        failed.map_or(Ok(()), Err)
    }
}

impl NvshmemComm {
    /// Advances sent messages, which peers may wait for, before this rank waits for something else.
    pub(crate) fn advance_sent(&self) -> Result<()> {
        if self.messages.has_sent() { self.progress_messages().map(drop) } else { Ok(()) }
    }

    /// Advances all transfers; `true` if any is under way.
    pub(crate) fn progress_messages(&self) -> Result<bool> {
        let since = RunInstant::now();
        let mut state = lock(&self.messages.state);
        // A caller that sees a failure frees its buffers: they are not touched from then on.
        self.check()?;
        let announced = state.transfers.front().map(|m| AnnouncedCall::message(m.id as u64 + 1, &m.transfer));
        let outcome = self.advance_all(&mut state);
        let is_busy = !state.transfers.is_empty();
        drop(state);
        outcome.map(|()| is_busy).map_err(|error| {
            let error = match announced {
                Some(announced) if error.is_fatal() => {
                    self.control_channel.fail_after_exchange(&announced, since, error)
                }
                _ => error,
            };
            let error = self.fail(error);
            // Another thread may be in the middle of a step.
            drop(lock(&self.messages.state));
            error
        })
    }

    fn advance_all(&self, state: &mut MessageState) -> Result<()> {
        state.settle(&*self.messages.receipts, |slot| self.process.free(slot))?;
        let mut transfers = std::mem::take(&mut state.transfers);
        let mut outcome = Ok(());
        let mut seen = Vec::with_capacity(transfers.len());
        for moving in &mut transfers {
            let key = moving.key();
            if seen.contains(&key) {
                continue;
            }
            outcome = self.advance(state, moving);
            if outcome.is_err() {
                break;
            }
            if !matches!(moving.step, TransferStep::Done) {
                seen.push(key);
            }
        }
        transfers.retain(|moving| !matches!(moving.step, TransferStep::Done));
        state.transfers = transfers;
        outcome
    }

    /// Checks a header against the receive.
    pub(crate) fn compare(&self, moving: &MovingTransfer, header: &PartHeader) -> Result<()> {
        let theirs: [u64; AnnouncedCall::WORDS] = std::array::from_fn(|n| header[n]);
        let own = AnnouncedCall::message(moving.id as u64 + 1, &moving.transfer).words();
        // The type's code is the second byte; the number of elements, with the type's fingerprint, the next word.
        let same = (theirs[1] >> 8 & 0xff, theirs[2]) == (own[1] >> 8 & 0xff, own[2]);
        let fits =
            header[AnnouncedCall::WORDS] as usize <= (moving.bytes() - moving.done).min(self.process.slot);
        if same && fits {
            return Ok(());
        }
        Err(self.differing((moving.transfer.peer, &theirs), (self.rank(), &own)))
    }

    /// The error for two ranks of which one sends another number of elements than the other expects.
    pub(crate) fn unequal(
        &self,
        dtype: DType,
        (from, given): (usize, u64),
        (to, expected): (usize, u64),
    ) -> Error {
        let part = |direction, peer, count: u64| {
            AnnouncedCall::message(0, &Transfer::host(direction, peer, 0, dtype, count as usize)).words()
        };
        let sent = part(Direction::Send(std::ptr::null()), to, given);
        let received = part(Direction::Recv(std::ptr::null_mut()), from, expected);
        self.differing((from, &sent), (to, &received))
    }

    fn differing(
        &self,
        one: (usize, &[u64; AnnouncedCall::WORDS]),
        other: (usize, &[u64; AnnouncedCall::WORDS]),
    ) -> Error {
        if one.0 <= other.0 {
            self.control_channel.differ(one, other)
        } else {
            self.control_channel.differ(other, one)
        }
    }

    /// Waits for a transfer, with the deadline.
    pub(crate) fn wait_for_message(&self, id: OperationId, meanwhile: &dyn Fn()) -> Result<()> {
        let waited = self.await_message(id, meanwhile);
        if waited.is_err() {
            // Another thread may be in the middle of a step.
            drop(lock(&self.messages.state));
        }
        waited
    }

    fn await_message(&self, id: OperationId, meanwhile: &dyn Fn()) -> Result<()> {
        let mut backoff = Backoff::new();
        let _waiting = self.control_channel.waiting();
        loop {
            self.progress_messages()?;
            let Some(announced) = self.messages.announced(id) else { return Ok(()) };
            meanwhile();
            if backoff.pause() {
                self.check_peers(&announced, backoff.since)?;
            }
        }
    }

    /// Waits until all transfers are done, with the deadline.
    pub(crate) fn finish_messages(&self) -> Result<()> {
        // Before the lock: in a forked process it may be held for ever.
        self.check()?;
        while let Some(id) = self.messages.oldest() {
            self.wait_for_message(id, &|| ())?;
        }
        Ok(())
    }

    /// Waits, for at most [`ENDING`], until the peers have fetched their messages: the slots go with this
    /// process.
    pub(crate) fn settle_messages(&self) {
        let since = RunInstant::now();
        while self.messages.has_sent() && self.check().is_ok() {
            if since.elapsed() > ENDING
                || self.control_channel.has_casualties()
                || self.progress_messages().is_err()
            {
                crate::os::log::error!(
                    rank = self.rank(),
                    "messages were sent that their peers did not come for"
                );
                return;
            }
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}
