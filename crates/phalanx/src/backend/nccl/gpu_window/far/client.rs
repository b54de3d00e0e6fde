//! [`Client`]: carries out this rank's copies to and from windows of other ranks.
//!
//! A copy waits until its stream has come to it, goes in pieces, of which two are under way, and lets its stream go on when all are answered.
//! The copies of a window are made one after the other, since they are on one stream.

use super::note::{Cutter, Note, Nonce, Piece, Verdict, data_number};
use super::staging::{SLOTS, Staging, Tools};
use crate::backend::nccl::device::GpuEvent;
use crate::backend::nccl::gpu_window::remote::CopyStream;
use crate::backend::nccl::gpu_window::stale;
use crate::contract::CopyDirection;
use crate::contract::carrier::Posted;
use crate::os::RunInstant;
use crate::os::sync::lock;
use crate::types::error::{Error, Result};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};

/// A window of another rank, as the program and the service share it.
pub(super) struct Opened {
    pub copies: Arc<CopyStream>,
    pub nonce: Nonce,
    state: AtomicU8,
    /// Number of the last copy or signal. Its stream waits until the staging's word has come to it. Locked while one is enqueued.
    pub tickets: Mutex<u32>,
    /// Taken at the end.
    staging: Option<Staging>,
    /// Where the staging goes then.
    pool: Arc<Mutex<Vec<Staging>>>,
}

/// What is known of a window of another rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum State {
    /// Its rank was asked.
    Asked = 0,
    Open = 1,
    /// Its rank does not know it.
    Refused = 2,
    /// Its rank has released it: no copy begins any more.
    Released = 3,
}

impl Opened {
    pub fn new(
        copies: Arc<CopyStream>,
        nonce: Nonce,
        staging: Staging,
        pool: Arc<Mutex<Vec<Staging>>>,
    ) -> Opened {
        let state = AtomicU8::new(State::Asked as u8);
        Opened { copies, nonce, state, tickets: Mutex::new(0), staging: Some(staging), pool }
    }

    pub fn state(&self) -> State {
        match self.state.load(Ordering::Acquire) {
            0 => State::Asked,
            1 => State::Open,
            2 => State::Refused,
            _ => State::Released,
        }
    }

    fn set_state(&self, state: State) {
        self.state.store(state as u8, Ordering::Release);
    }

    pub fn staging(&self) -> &Staging {
        self.staging.as_ref().expect("there until it is dropped")
    }

    fn rank(&self) -> usize {
        self.copies.rank
    }

    /// Lets the stream go on behind a copy or signal, and all before.
    fn let_go(&self, ticket: u32) {
        self.staging().word().store(ticket, Ordering::Release);
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        lock(&self.pool).extend(self.staging.take());
    }
}

/// A copy or a signal.
pub(super) struct Job {
    pub ticket: u32,
    /// Behind what the stream does before.
    pub ready: GpuEvent,
    pub work: Work,
}

pub(super) enum Work {
    Copy {
        direction: CopyDirection,
        /// Where the caller's buffer begins.
        local: u64,
        pieces: Cutter,
    },
    Signal,
}

/// What is done in a place of the staging.
enum Step {
    Free,
    /// The GPU copies a piece there, which is to be put.
    Filling(Piece),
    /// The piece is on the network, or was given up.
    Away { number: u64, posted: Option<Posted>, verdict: Option<Verdict>, piece: Piece },
    /// The GPU copies a piece, which was got, from there.
    Emptying,
    /// The connection broke. Who is gone, or cannot be reached, is found by the service.
    Broken,
}

/// A window with its work.
struct Calling {
    opened: Arc<Opened>,
    jobs: VecDeque<Job>,
    steps: [Step; SLOTS],
    /// The number under which it, or the signal, was asked.
    asked: Option<u64>,
    /// Since when the first of the jobs moves nothing.
    since: Option<RunInstant>,
    is_closing: bool,
}

pub(super) struct Client {
    /// This rank.
    own: usize,
    windows: Vec<Calling>,
    /// What was asked so far.
    numbers: u64,
    /// Answers that nobody has taken yet, by rank and number.
    answers: HashMap<(usize, u64), Verdict>,
}

impl Client {
    pub fn new(own: usize) -> Client {
        Client { own, windows: Vec::new(), numbers: 0, answers: HashMap::new() }
    }

    /// Asks a rank that is known to open a window. `note` makes the question of its number.
    pub fn open(&mut self, opened: Arc<Opened>, note: impl FnOnce(u64) -> Note, tools: &mut Tools) {
        self.numbers += 1;
        tools.carrier.send_note(opened.rank(), note(self.numbers).to_bytes());
        let (jobs, steps) = (VecDeque::new(), [Step::Free, Step::Free]);
        let (asked, since) = (Some(self.numbers), None);
        self.windows.push(Calling { opened, jobs, steps, asked, since, is_closing: false });
    }

    fn of(&mut self, opened: &Arc<Opened>) -> Option<&mut Calling> {
        self.windows.iter_mut().find(|calling| Arc::ptr_eq(&calling.opened, opened))
    }

    pub fn add(&mut self, opened: &Arc<Opened>, job: Job) {
        match self.of(opened) {
            Some(calling) => calling.jobs.push_back(job),
            None => opened.let_go(job.ticket),
        }
    }

    /// Closes a window when its work is done. Work that is left is given up.
    pub fn close(&mut self, opened: &Arc<Opened>) {
        let rank = self.own;
        let Some(calling) = self.of(opened) else { return };
        calling.is_closing = true;
        if !calling.jobs.is_empty() {
            let _ = opened.copies.failure.set(Error::Aborted { rank });
        }
    }

    pub fn take_answer(&mut self, from: usize, number: u64, verdict: Verdict) {
        self.answers.insert((from, number), verdict);
    }

    /// A rank has released its window.
    pub fn released(&self, from: usize, nonce: &Nonce) {
        let is_it = |opened: &Opened| opened.rank() == from && opened.nonce == *nonce;
        for calling in self.windows.iter().filter(|calling| is_it(&calling.opened)) {
            calling.opened.set_state(State::Released);
        }
    }

    /// The ranks that this one waits for, and since when.
    pub fn awaited(&self) -> impl Iterator<Item = (usize, RunInstant)> + '_ {
        self.windows.iter().filter_map(|calling| Some((calling.opened.rank(), calling.since?)))
    }

    pub fn is_idle(&self) -> bool {
        self.windows.is_empty()
    }

    /// Goes on; whether something has moved.
    pub fn advance(&mut self, tools: &mut Tools) -> Result<bool> {
        let Client { own, windows, numbers, answers } = self;
        let mut has_moved = false;
        for calling in &mut *windows {
            has_moved |= calling.advance(tools, numbers, answers)?;
        }
        windows.retain_mut(|calling| !calling.is_over(*own, tools));
        if windows.is_empty() {
            answers.clear();
        }
        Ok(has_moved)
    }

    /// Gives all work up, for a failure. The GPU copies nothing of it any more.
    pub fn fail(&mut self, failure: &Error, tools: &mut Tools) {
        for calling in &mut self.windows {
            let Calling { opened, jobs, steps, since, asked, .. } = calling;
            let _ = opened.copies.failure.set(failure.clone());
            for step in &mut *steps {
                match step {
                    Step::Away { posted: Some(posted), .. } if !tools.carrier.give_up(*posted) => {}
                    _ => *step = Step::Free,
                }
            }
            jobs.drain(..).for_each(|job| opened.let_go(job.ticket));
            (*since, *asked) = (None, None);
        }
    }
}

impl Calling {
    fn advance(
        &mut self,
        tools: &mut Tools,
        numbers: &mut u64,
        answers: &mut HashMap<(usize, u64), Verdict>,
    ) -> Result<bool> {
        let rank = self.opened.rank();
        if self.opened.state() == State::Asked {
            let Some(verdict) = self.asked.and_then(|number| answers.remove(&(rank, number))) else {
                return Ok(false);
            };
            self.asked = None;
            self.opened.set_state(if verdict == Verdict::Done { State::Open } else { State::Refused });
            return Ok(true);
        }
        let Some(job) = self.jobs.front_mut() else { return Ok(false) };
        if self.since.is_none() {
            if !job.ready.is_complete()? {
                return Ok(false);
            }
            self.since = Some(RunInstant::now());
        }
        let mut has_moved = false;
        let is_done = match &mut job.work {
            Work::Signal => match self.asked {
                _ if self.opened.copies.failure.get().is_some() => true,
                None => {
                    *numbers += 1;
                    self.asked = Some(*numbers);
                    let note = Note::Signal { number: *numbers, nonce: self.opened.nonce };
                    tools.carrier.send_note(rank, note.to_bytes());
                    false
                }
                Some(number) => match answers.remove(&(rank, number)) {
                    Some(verdict) => {
                        judge(&self.opened, verdict);
                        true
                    }
                    None => false,
                },
            },
            Work::Copy { direction, local, pieces } => {
                for slot in 0..SLOTS {
                    let mut copying = Copying {
                        opened: &self.opened,
                        slot,
                        direction: *direction,
                        local: *local,
                        numbers: &mut *numbers,
                        answers: &mut *answers,
                    };
                    while copying.advance(&mut self.steps[slot], pieces, tools)? {
                        has_moved = true;
                    }
                }
                self.steps.iter().all(|step| matches!(step, Step::Free))
            }
        };
        if has_moved {
            self.since = Some(RunInstant::now());
        }
        if is_done {
            self.opened.let_go(job.ticket);
            self.jobs.pop_front();
            (self.since, self.asked) = (None, None);
        }
        Ok(has_moved || is_done)
    }

    /// Whether the window is closed, and nothing of it is under way.
    fn is_over(&mut self, own: usize, tools: &mut Tools) -> bool {
        if self.opened.state() == State::Refused {
            return true;
        }
        if !self.is_closing || !self.jobs.is_empty() {
            return false;
        }
        // What was given up.
        for step in &mut self.steps {
            if let Step::Away { posted: Some(posted), .. } = step
                && tools.carrier.outcome(*posted).is_none()
            {
                return false;
            }
            *step = Step::Free;
        }
        // Of its own window the rank is told where it closes it.
        if self.opened.rank() != own {
            let note = Note::Close { nonce: self.opened.nonce };
            tools.carrier.send_note(self.opened.rank(), note.to_bytes());
        }
        true
    }
}

/// Keeps the error of what was not done.
fn judge(opened: &Opened, verdict: Verdict) {
    let why = match verdict {
        Verdict::Done => return,
        Verdict::Nothing => "that rank has released it",
        Verdict::Outside => "a copy went beyond the memory that is registered",
    };
    let _ = opened.copies.failure.set(stale(opened.rank(), why));
}

/// A copy in one place of the staging.
struct Copying<'a> {
    opened: &'a Opened,
    slot: usize,
    direction: CopyDirection,
    local: u64,
    numbers: &'a mut u64,
    answers: &'a mut HashMap<(usize, u64), Verdict>,
}

impl Copying<'_> {
    fn advance(&mut self, step: &mut Step, pieces: &mut Cutter, tools: &mut Tools) -> Result<bool> {
        let event = &self.opened.staging().events[self.slot];
        match step {
            Step::Free => {
                if self.opened.copies.failure.get().is_some() {
                    return Ok(false);
                }
                let Some(piece) = pieces.next() else { return Ok(false) };
                if self.direction == CopyDirection::Get {
                    *step = self.ask(piece, tools);
                    return Ok(true);
                }
                // SAFETY: the piece's parts are of the buffer, which is lent to the stream, and that waits; the place is free.
                let copied = unsafe { self.copy(&piece, CopyDirection::Get, tools) };
                *step = Step::Filling(piece);
                copied?;
            }
            Step::Filling(piece) => {
                if !event.is_complete()? {
                    return Ok(false);
                }
                let piece = std::mem::take(piece);
                *step = self.ask(piece, tools);
            }
            Step::Away { number, posted, verdict, piece } => {
                *verdict = verdict.or_else(|| self.answers.remove(&(self.opened.rank(), *number)));
                let is_refused = verdict.is_some_and(|verdict| verdict != Verdict::Done);
                if let Some(receive) = *posted
                    && is_refused
                    && self.direction == CopyDirection::Get
                    && tools.carrier.give_up(receive)
                {
                    *posted = None;
                }
                if let Some(over) = posted.map(|posted| tools.carrier.outcome(posted)) {
                    match over {
                        Some(true) => *posted = None,
                        Some(false) => {
                            *step = Step::Broken;
                            return Ok(false);
                        }
                        None => {}
                    }
                }
                let (None, Some(verdict)) = (*posted, *verdict) else { return Ok(false) };
                if verdict != Verdict::Done || self.direction == CopyDirection::Put {
                    judge(self.opened, verdict);
                    *step = Step::Free;
                    return Ok(true);
                }
                let piece = std::mem::take(piece);
                *step = Step::Emptying;
                // SAFETY: as above; the place's data has come, and nothing else is done in it until the event is complete.
                unsafe { self.copy(&piece, CopyDirection::Put, tools) }?;
            }
            Step::Emptying => {
                if !event.is_complete()? {
                    return Ok(false);
                }
                *step = Step::Free;
            }
            Step::Broken => return Ok(false),
        }
        Ok(true)
    }

    /// Asks the window's rank to take or give a piece.
    fn ask(&mut self, piece: Piece, tools: &mut Tools) -> Step {
        *self.numbers += 1;
        let (number, nonce, rank) = (*self.numbers, self.opened.nonce, self.opened.rank());
        let (ranges, start) = (piece.ranges.clone(), self.opened.staging().start(self.slot));
        let is_put = self.direction == CopyDirection::Put;
        let data = data_number(number, is_put);
        let posted = match is_put {
            true => {
                tools.carrier.send_note(rank, Note::Put { number, nonce, ranges }.to_bytes());
                // SAFETY: the place of so many bytes is this piece's until the send is over.
                unsafe { tools.carrier.send(rank, data, start, piece.bytes) }
            }
            false => {
                // SAFETY: as above.
                let posted = unsafe { tools.carrier.receive(rank, data, start, piece.bytes) };
                tools.carrier.send_note(rank, Note::Get { number, nonce, ranges }.to_bytes());
                posted
            }
        };
        Step::Away { number, posted: Some(posted), verdict: None, piece }
    }

    /// # Safety
    /// That of [`Tools::copy`].
    unsafe fn copy(&self, piece: &Piece, direction: CopyDirection, tools: &Tools) -> Result<()> {
        let place = (self.opened.staging(), self.slot);
        let lens = piece.ranges.iter().map(|(_, len)| *len as usize);
        let parts = piece.places.iter().map(|place| self.local + *place as u64).zip(lens);
        // SAFETY: the caller's contract.
        unsafe { tools.copy(direction, place, parts) }
    }
}
