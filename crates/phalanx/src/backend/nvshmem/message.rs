//! Messages: a sender copies a part of the message to a slot of its own symmetric memory and tells the receiver where it is,
//! over a channel of the host; the receiver gets it and tells back that the slot is free.
//!
//! What is told is matched by the host backend, in the order of posting and by tags. A message is sent when all of it is in
//! slots; the receiver may come later, as long as there are slots. Nobody's GPU waits for a peer.

use super::NvshmemComm;
use super::gpu::Event;
use crate::contract::{Backend, Departure, Direction, OperationId, Transfer};
use crate::control::control_channel::AnnouncedCall;
use crate::control::host_channel::HostChannel;
use crate::gpu::backoff::Backoff;
use crate::os::sync::lock;
use crate::types::dtype::DType;
use crate::types::error::{Error, Result};
use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How long an end waits for the peers to fetch what was sent to them.
const ENDING: Duration = Duration::from_secs(10);

/// Where a part of a message is: what is sent ([`AnnouncedCall::words`]), bytes of the part, and its slot.
pub(crate) type Header = [u64; AnnouncedCall::WORDS + 2];

/// The messages of a communicator.
pub(crate) struct Messages {
    /// Headers, and what is told back.
    pub headers: Box<dyn HostChannel>,
    pub receipts: Box<dyn HostChannel>,
    state: Mutex<State>,
}

#[derive(Default)]
pub(crate) struct State {
    pub next: usize,
    /// In the order of posting.
    pub transfers: VecDeque<Moving>,
    /// What peers were told back, and may not have taken. The words are boxed, as they must stay where they are.
    pub returned: Vec<(OperationId, Box<Header>)>,
    /// Slots that peers have not told back yet.
    pub lent: Vec<(usize, OperationId, Box<u64>)>,
}

/// A transfer under way.
pub(crate) struct Moving {
    pub ticket: usize,
    pub transfer: Transfer,
    /// Bytes that are done.
    pub done: usize,
    pub step: Step,
}

pub(crate) enum Step {
    Begin,
    /// A part is copied to a slot.
    Filling {
        slot: usize,
        bytes: usize,
        filled: Event,
    },
    /// The peer is told where the part is.
    Telling {
        ticket: OperationId,
        _words: Box<Header>,
    },
    /// A header has to come.
    Expecting {
        ticket: OperationId,
        header: Box<Header>,
    },
    /// It has come.
    Told {
        header: Box<Header>,
    },
    /// A part is copied from the peer's slot.
    Fetching {
        slot: usize,
        bytes: usize,
        theirs: u64,
        fetched: Event,
    },
    Done,
}

impl Moving {
    pub fn bytes(&self) -> usize {
        self.transfer.count * self.transfer.dtype.size()
    }

    /// What comes after a part.
    pub fn next(&self) -> Step {
        if self.done == self.bytes() { Step::Done } else { Step::Begin }
    }

    /// Messages with the same key are matched in the order of posting: one after the other.
    fn key(&self) -> (bool, usize, u32) {
        (matches!(self.transfer.direction, Direction::Send(_)), self.transfer.peer, self.transfer.tag)
    }
}

impl Messages {
    pub fn new(headers: Box<dyn HostChannel>, receipts: Box<dyn HostChannel>) -> Messages {
        Messages { headers, receipts, state: Mutex::default() }
    }

    pub fn post(&self, transfer: Transfer) -> OperationId {
        let mut state = lock(&self.state);
        let ticket = state.next;
        state.next += 1;
        state.transfers.push_back(Moving { ticket, transfer, done: 0, step: Step::Begin });
        OperationId(ticket)
    }

    pub fn is_under_way(&self, ticket: OperationId) -> bool {
        lock(&self.state).transfers.iter().any(|moving| moving.ticket == ticket.0)
    }

    /// The transfer that was posted first, of those under way.
    fn oldest(&self) -> Option<OperationId> {
        lock(&self.state).transfers.front().map(|moving| OperationId(moving.ticket))
    }

    pub fn depart(&self, departure: Departure) {
        self.headers.depart(departure);
        self.receipts.depart(departure);
    }

    /// Whether something was sent, or told back, that its peer has not taken.
    fn has_sent(&self) -> bool {
        let state = lock(&self.state);
        !state.lent.is_empty()
            || !state.returned.is_empty()
            || state.transfers.iter().any(|moving| matches!(moving.transfer.direction, Direction::Send(_)))
    }

    fn subject(&self, ticket: OperationId) -> Option<AnnouncedCall> {
        let state = lock(&self.state);
        let moving = state.transfers.iter().find(|moving| moving.ticket == ticket.0)?;
        Some(AnnouncedCall::message(moving.ticket as u64 + 1, &moving.transfer))
    }
}

impl State {
    /// Forgets what has arrived, and frees the slots that were told back.
    fn settle(&mut self, receipts: &dyn HostChannel, free: impl Fn(usize)) -> Result<()> {
        let mut failed = None;
        let mut is_done = |ticket| {
            receipts.test(ticket).unwrap_or_else(|error| {
                failed = Some(error);
                false
            })
        };
        self.returned.retain(|(ticket, _)| !is_done(*ticket));
        self.lent.retain(|(slot, ticket, _)| {
            let is_back = is_done(*ticket);
            if is_back {
                free(*slot);
            }
            !is_back
        });
        failed.map_or(Ok(()), Err)
    }
}

impl NvshmemComm {
    /// Tells peers what they may wait for, before this rank waits for something else.
    pub(crate) fn drive_what_is_left(&self) -> Result<()> {
        if self.messages.has_sent() { self.drive().map(drop) } else { Ok(()) }
    }

    /// Moves all transfers along; whether any is still under way.
    pub(crate) fn drive(&self) -> Result<bool> {
        let since = Instant::now();
        let mut state = lock(&self.messages.state);
        // Whoever is told of a failure frees its buffers: nobody touches them from then on.
        self.check()?;
        let subject =
            state.transfers.front().map(|m| AnnouncedCall::message(m.ticket as u64 + 1, &m.transfer));
        let driven = self.drive_all(&mut state);
        let is_busy = !state.transfers.is_empty();
        drop(state);
        driven.map(|()| is_busy).map_err(|error| {
            let error = match subject {
                Some(subject) if error.is_fatal() => {
                    self.control_channel.judge_meeting(&subject, since, error)
                }
                _ => error,
            };
            let error = self.fail(error);
            // Another thread may be in the middle of a step.
            drop(lock(&self.messages.state));
            error
        })
    }

    fn drive_all(&self, state: &mut State) -> Result<()> {
        state.settle(&*self.messages.receipts, |slot| self.process.free(slot))?;
        let mut transfers = std::mem::take(&mut state.transfers);
        let mut driven = Ok(());
        let mut seen = Vec::with_capacity(transfers.len());
        for moving in &mut transfers {
            let key = moving.key();
            if seen.contains(&key) {
                continue;
            }
            driven = self.advance(state, moving);
            if driven.is_err() {
                break;
            }
            if !matches!(moving.step, Step::Done) {
                seen.push(key);
            }
        }
        transfers.retain(|moving| !matches!(moving.step, Step::Done));
        state.transfers = transfers;
        driven
    }

    /// Whether what comes is what this rank expects.
    pub(crate) fn compare(&self, moving: &Moving, header: &Header) -> Result<()> {
        let theirs: [u64; AnnouncedCall::WORDS] = std::array::from_fn(|n| header[n]);
        let own = AnnouncedCall::message(moving.ticket as u64 + 1, &moving.transfer).words();
        // The type is the second byte; the length in elements the next word.
        let same = (theirs[1] >> 8 & 0xff, theirs[2]) == (own[1] >> 8 & 0xff, own[2]);
        let fits =
            header[AnnouncedCall::WORDS] as usize <= (moving.bytes() - moving.done).min(self.process.slot);
        if same && fits {
            return Ok(());
        }
        Err(self.differing((moving.transfer.peer, &theirs), (self.rank(), &own)))
    }

    /// The verdict on two ranks of which one gives so many elements and the other expects another number.
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
    pub(crate) fn wait_for_message(&self, ticket: OperationId, meanwhile: &dyn Fn()) -> Result<()> {
        let waited = self.await_message(ticket, meanwhile);
        if waited.is_err() {
            // Another thread may be in the middle of a step.
            drop(lock(&self.messages.state));
        }
        waited
    }

    fn await_message(&self, ticket: OperationId, meanwhile: &dyn Fn()) -> Result<()> {
        let mut patience = Backoff::new();
        let _waiting = self.control_channel.waiting();
        loop {
            self.drive()?;
            let Some(subject) = self.messages.subject(ticket) else { return Ok(()) };
            meanwhile();
            if patience.pause() {
                self.look(&subject, patience.since)?;
            }
        }
    }

    /// Waits until all transfers are done, with the deadline.
    pub(crate) fn finish_messages(&self) -> Result<()> {
        // Before the lock: another thread may hold it half-way in a process that fork has copied.
        self.check()?;
        while let Some(ticket) = self.messages.oldest() {
            self.wait_for_message(ticket, &|| ())?;
        }
        Ok(())
    }

    /// Waits, for a while, until the peers have fetched what was sent to them: it goes with this process.
    pub(crate) fn settle_messages(&self) {
        let since = Instant::now();
        while self.messages.has_sent() && self.check().is_ok() {
            if since.elapsed() > ENDING || self.control_channel.has_casualties() || self.drive().is_err() {
                tracing::error!(rank = self.rank(), "messages were sent that their peers did not come for");
                return;
            }
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}
