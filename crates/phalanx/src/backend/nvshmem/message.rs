//! Messages: a sender copies a part of the message to a slot of its own symmetric memory and tells the receiver where it is,
//! over a channel of the host; the receiver gets it and tells back that the slot is free.
//!
//! What is told is matched by the host backend, in the order of posting and by tags. A message is sent when all of it is in
//! slots; the receiver may come later, as long as there are slots. Nobody's GPU waits for a peer.

use super::NvshmemComm;
use super::gpu::{self, Event};
use super::meeting::Patience;
use crate::backend::host::{HostComm, Subject};
use crate::backend::{Backend, Departure, Direction, Space, Stream, Ticket, Transfer};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::sync::lock;
use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How long an end waits for the peers to fetch what was sent to them.
const ENDING: Duration = Duration::from_secs(10);

/// Where a part of a message is: what is sent ([`Subject::words`]), bytes of the part, and its slot.
type Header = [u64; Subject::WORDS + 2];

/// The messages of a communicator.
pub(super) struct Messages {
    /// Headers, and what is told back.
    headers: HostComm,
    receipts: HostComm,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: usize,
    /// In the order of posting.
    transfers: VecDeque<Moving>,
    /// What peers were told back, and may not have taken. The words are boxed, as they must stay where they are.
    returned: Vec<(Ticket, Box<Header>)>,
    /// Slots that peers have not told back yet.
    lent: Vec<(usize, Ticket, Box<u64>)>,
}

/// A transfer under way.
struct Moving {
    ticket: usize,
    transfer: Transfer,
    /// Bytes that are done.
    done: usize,
    step: Step,
}

enum Step {
    Begin,
    /// A part is copied to a slot.
    Filling {
        slot: usize,
        bytes: usize,
        filled: Event,
    },
    /// The peer is told where the part is.
    Telling {
        ticket: Ticket,
        _words: Box<Header>,
    },
    /// A header has to come.
    Expecting {
        ticket: Ticket,
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
    fn bytes(&self) -> usize {
        self.transfer.count * self.transfer.dtype.size()
    }

    /// What comes after a part.
    fn next(&self) -> Step {
        if self.done == self.bytes() { Step::Done } else { Step::Begin }
    }

    /// Messages with the same key are matched in the order of posting: one after the other.
    fn key(&self) -> (bool, usize, u32) {
        (matches!(self.transfer.direction, Direction::Send(_)), self.transfer.peer, self.transfer.tag)
    }
}

impl Messages {
    pub fn new(headers: HostComm, receipts: HostComm) -> Messages {
        Messages { headers, receipts, state: Mutex::default() }
    }

    pub fn post(&self, transfer: Transfer) -> Ticket {
        let mut state = lock(&self.state);
        let ticket = state.next;
        state.next += 1;
        state.transfers.push_back(Moving { ticket, transfer, done: 0, step: Step::Begin });
        Ticket(ticket)
    }

    pub fn is_under_way(&self, ticket: Ticket) -> bool {
        lock(&self.state).transfers.iter().any(|moving| moving.ticket == ticket.0)
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

    fn subject(&self, ticket: Ticket) -> Option<Subject> {
        let state = lock(&self.state);
        let moving = state.transfers.iter().find(|moving| moving.ticket == ticket.0)?;
        Some(Subject::message(moving.ticket as u64 + 1, &moving.transfer))
    }
}

impl State {
    /// Forgets what has arrived, and frees the slots that were told back.
    fn settle(&mut self, receipts: &HostComm, free: impl Fn(usize)) -> Result<()> {
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

/// Tells a peer. The words are kept until the ticket is settled.
fn tell(channel: &HostComm, peer: usize, tag: u32, words: &Header, len: usize) -> Result<Ticket> {
    let transfer = Transfer::host(Direction::Send(words.as_ptr().cast()), peer, tag, DType::U64, len);
    // SAFETY: the words are boxed, and kept by the caller.
    unsafe { channel.post(transfer) }
}

impl NvshmemComm {
    /// Tells peers what they may wait for, before this rank waits for something else.
    pub(super) fn drive_what_is_left(&self) -> Result<()> {
        if self.messages.has_sent() { self.drive().map(drop) } else { Ok(()) }
    }

    /// Moves all transfers along; whether any is still under way.
    pub(super) fn drive(&self) -> Result<bool> {
        self.check()?;
        let since = Instant::now();
        let mut state = lock(&self.messages.state);
        let subject = state.transfers.front().map(|m| Subject::message(m.ticket as u64 + 1, &m.transfer));
        let driven = self.drive_all(&mut state);
        let is_busy = !state.transfers.is_empty();
        drop(state);
        driven.map(|()| is_busy).map_err(|error| match subject {
            Some(subject) if error.is_fatal() => {
                self.fail(self.witness.judge_meeting(&subject, since, error))
            }
            _ => self.fail(error),
        })
    }

    fn drive_all(&self, state: &mut State) -> Result<()> {
        state.settle(&self.messages.receipts, |slot| self.process.free(slot))?;
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

    /// Takes as many steps as it can without waiting.
    fn advance(&self, state: &mut State, moving: &mut Moving) -> Result<()> {
        loop {
            let step = std::mem::replace(&mut moving.step, Step::Begin);
            let next = match moving.transfer.direction {
                Direction::Send(source) => self.advance_send(state, moving, source, step)?,
                Direction::Recv(target) => self.advance_recv(state, moving, target, step)?,
            };
            let is_over = !next.1 || matches!(next.0, Step::Done);
            moving.step = next.0;
            if is_over {
                return Ok(());
            }
        }
    }

    /// The next step, and whether it is another.
    fn advance_send(
        &self,
        state: &mut State,
        moving: &mut Moving,
        source: *const u8,
        step: Step,
    ) -> Result<(Step, bool)> {
        let Transfer { peer, space, .. } = moving.transfer;
        let process = &self.process;
        match step {
            Step::Begin if moving.bytes() == 0 => Ok((self.tell_part(moving, 0, 0)?, true)),
            Step::Begin => {
                let Some(slot) = process.take_outgoing() else { return Ok((Step::Begin, false)) };
                let bytes = (moving.bytes() - moving.done).min(process.slot);
                let stream = self.stream_or_own(moving.transfer.stream);
                // SAFETY: the contract of `post`: the source has so many bytes; the slot is this transfer's.
                let filled =
                    unsafe { self.fill(slot, source.wrapping_add(moving.done), space, bytes, stream) };
                match filled {
                    Ok(filled) => Ok((Step::Filling { slot, bytes, filled }, true)),
                    Err(error) => {
                        process.free(slot);
                        Err(error)
                    }
                }
            }
            Step::Filling { slot, bytes, filled } => {
                process.device.enter()?;
                if !filled.is_past()? {
                    return Ok((Step::Filling { slot, bytes, filled }, false));
                }
                let mut receipt = Box::new(0u64);
                let direction = Direction::Recv((&raw mut *receipt).cast());
                let told_back = Transfer::host(direction, peer, slot as u32, DType::U64, 1);
                // SAFETY: the word is boxed, and kept until the ticket is settled.
                let ticket = unsafe { self.messages.receipts.post(told_back) }?;
                state.lent.push((slot, ticket, receipt));
                let telling = self.tell_part(moving, bytes, slot)?;
                moving.done += bytes;
                Ok((telling, true))
            }
            Step::Telling { ticket, .. } if self.messages.headers.test(ticket)? => Ok((moving.next(), true)),
            step => Ok((step, false)),
        }
    }

    /// Tells the receiver where a part is.
    fn tell_part(&self, moving: &Moving, bytes: usize, slot: usize) -> Result<Step> {
        let mut header = Box::new([0; Subject::WORDS + 2]);
        let subject = Subject::message(moving.ticket as u64 + 1, &moving.transfer);
        header[..Subject::WORDS].copy_from_slice(&subject.words());
        header[Subject::WORDS..].copy_from_slice(&[bytes as u64, slot as u64]);
        let len = header.len();
        let Transfer { peer, tag, .. } = moving.transfer;
        let ticket = tell(&self.messages.headers, peer, tag, &header, len)?;
        Ok(Step::Telling { ticket, _words: header })
    }

    fn advance_recv(
        &self,
        state: &mut State,
        moving: &mut Moving,
        target: *mut u8,
        step: Step,
    ) -> Result<(Step, bool)> {
        let Transfer { peer, tag, space, .. } = moving.transfer;
        let process = &self.process;
        match step {
            Step::Begin => {
                let mut header: Box<Header> = Box::default();
                let direction = Direction::Recv(header.as_mut_ptr().cast());
                let told = Transfer::host(direction, peer, tag, DType::U64, header.len());
                // SAFETY: the words are boxed, and kept until the ticket is settled.
                let ticket = unsafe { self.messages.headers.post(told) }?;
                Ok((Step::Expecting { ticket, header }, true))
            }
            Step::Expecting { ticket, header } => match self.messages.headers.test(ticket)? {
                true => self.compare(moving, &header).map(|()| (Step::Told { header }, true)),
                false => Ok((Step::Expecting { ticket, header }, false)),
            },
            Step::Told { header } => {
                let (bytes, theirs) = (header[Subject::WORDS] as usize, header[Subject::WORDS + 1]);
                if bytes == 0 {
                    return Ok((Step::Done, true));
                }
                let Some(slot) = process.take_incoming() else {
                    return Ok((Step::Told { header }, false));
                };
                let stream = self.stream_or_own(moving.transfer.stream);
                // SAFETY: the contract of `post`; the header was compared; the slot is this transfer's.
                let fetched = unsafe {
                    self.get_part(
                        slot,
                        theirs as usize,
                        peer,
                        (target.wrapping_add(moving.done), space),
                        bytes,
                        stream,
                    )
                };
                match fetched {
                    Ok(fetched) => Ok((Step::Fetching { slot, bytes, theirs, fetched }, true)),
                    Err(error) => {
                        process.free(slot);
                        Err(error)
                    }
                }
            }
            Step::Fetching { slot, bytes, theirs, fetched } => {
                process.device.enter()?;
                if !fetched.is_past()? {
                    return Ok((Step::Fetching { slot, bytes, theirs, fetched }, false));
                }
                if space == Space::Host {
                    // SAFETY: the contract of `post`; the copy to pinned memory is complete.
                    unsafe {
                        let target = target.wrapping_add(moving.done);
                        std::ptr::copy_nonoverlapping(
                            process.slot_on_host(slot)?.cast_const(),
                            target,
                            bytes,
                        );
                    }
                }
                process.free(slot);
                // The peer takes it when it comes by; this rank need not wait for that.
                let words: Box<Header> = Box::default();
                let ticket = tell(&self.messages.receipts, peer, theirs as u32, &words, 1)?;
                state.returned.push((ticket, words));
                moving.done += bytes;
                Ok((moving.next(), true))
            }
            step => Ok((step, false)),
        }
    }

    /// Whether what comes is what this rank expects.
    fn compare(&self, moving: &Moving, header: &Header) -> Result<()> {
        let theirs: [u64; Subject::WORDS] = std::array::from_fn(|n| header[n]);
        let own = Subject::message(moving.ticket as u64 + 1, &moving.transfer).words();
        // The type is the second byte; the length in elements the next word.
        let same = (theirs[1] >> 8 & 0xff, theirs[2]) == (own[1] >> 8 & 0xff, own[2]);
        let fits = header[Subject::WORDS] as usize <= (moving.bytes() - moving.done).min(self.process.slot);
        if same && fits {
            return Ok(());
        }
        Err(self.differing((moving.transfer.peer, &theirs), (self.rank(), &own)))
    }

    /// The verdict on two ranks of which one gives so many elements and the other expects another number.
    pub(super) fn unequal(
        &self,
        dtype: DType,
        (from, given): (usize, u64),
        (to, expected): (usize, u64),
    ) -> Error {
        let part = |direction, peer, count: u64| {
            Subject::message(0, &Transfer::host(direction, peer, 0, dtype, count as usize)).words()
        };
        let sent = part(Direction::Send(std::ptr::null()), to, given);
        let received = part(Direction::Recv(std::ptr::null_mut()), from, expected);
        self.differing((from, &sent), (to, &received))
    }

    fn differing(
        &self,
        one: (usize, &[u64; Subject::WORDS]),
        other: (usize, &[u64; Subject::WORDS]),
    ) -> Error {
        if one.0 <= other.0 { self.witness.differ(one, other) } else { self.witness.differ(other, one) }
    }

    /// Copies a part to a slot, behind the stream's work.
    ///
    /// # Safety
    /// `source` is readable for so many bytes, no more than a slot has; the slot is not in use.
    unsafe fn fill(
        &self,
        slot: usize,
        source: *const u8,
        space: Space,
        bytes: usize,
        stream: Stream,
    ) -> Result<Event> {
        let process = &self.process;
        process.device.enter()?;
        // SAFETY: the caller's contract; pinned memory mirrors the slots.
        unsafe {
            if space == Space::Device {
                gpu::copy(process.slot_at(slot), source, bytes, stream)?;
            } else {
                let pinned = process.slot_on_host(slot)?;
                std::ptr::copy_nonoverlapping(source, pinned, bytes);
                gpu::copy(process.slot_at(slot), pinned, bytes, stream)?;
            }
        }
        Event::behind(stream)
    }

    /// Gets a part from a peer's slot, behind the stream's work: device memory is there then, host memory in the mirror.
    ///
    /// # Safety
    /// The target takes so many bytes; the peer's slot holds them; the slot here is not in use.
    unsafe fn get_part(
        &self,
        slot: usize,
        theirs: usize,
        peer: usize,
        (target, space): (*mut u8, Space),
        bytes: usize,
        stream: Stream,
    ) -> Result<Event> {
        let process = &self.process;
        let name = "nvshmemx_getmem_on_stream";
        let get = process.library.need(process.library.nvshmemx_getmem_on_stream, name)?;
        let ours = process.slot_at(slot);
        {
            let _turn = process.enter()?;
            let (source, pe) = (process.slot_at(theirs).cast_const(), self.pes[peer] as i32);
            // SAFETY: initialised; symmetric memory of so many bytes at both ends, a PE that exists.
            unsafe { get(ours.cast(), source.cast(), bytes, pe, stream.0) };
        }
        let to = if space == Space::Device { target } else { process.slot_on_host(slot)? };
        // SAFETY: the caller's contract; pinned memory mirrors the slots.
        unsafe { gpu::copy(to, ours, bytes, stream) }?;
        Event::behind(stream)
    }

    /// Waits for a transfer, with the deadline.
    pub(super) fn wait_for_message(&self, ticket: Ticket, meanwhile: &dyn Fn()) -> Result<()> {
        let mut patience = Patience::new();
        let _waiting = self.witness.waiting();
        loop {
            self.drive()?;
            let Some(subject) = self.messages.subject(ticket) else { return Ok(()) };
            meanwhile();
            if patience.pause() {
                self.look(&subject, patience.since)?;
            }
        }
    }

    /// Waits, for a while, until the peers have fetched what was sent to them: it goes with this process.
    pub(super) fn settle_messages(&self) {
        let since = Instant::now();
        while self.messages.has_sent() && self.check().is_ok() {
            if since.elapsed() > ENDING || self.witness.has_casualties() || self.drive().is_err() {
                tracing::error!(rank = self.rank(), "messages were sent that their peers did not come for");
                return;
            }
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}
