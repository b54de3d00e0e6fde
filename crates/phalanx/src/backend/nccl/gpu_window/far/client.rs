//! [`Client`]: carries out this rank's copies to and from windows of other ranks.
//!
//! The GPU copies between the caller's buffer and the staging in a stream of the window's own ([`Lane`](super::staging::Lane)). That waits for the
//! work that the program's stream had, which then waits for it, so that the buffer may be freed behind it. Copies and signals are *jobs*. Each
//! consists of numbered steps, which are enqueued at once: the first says that the window's stream has come to the job, one for each
//! piece copies it, and the last ends the job. Before each but the first that stream waits until the service grants the step
//! ([`Words`](super::staging::Words)): of a put when the place is free, of a get when the data is there, and the last when all is answered.

use super::note::{Cutter, Nonce, Note, Piece, Verdict, data_number};
use super::staging::{Lane, SLOTS, Staging, Tools};
use crate::backend::nccl::gpu_window::record;
use crate::backend::nccl::gpu_window::remote::CopyStream;
use crate::backend::nccl::gpu_window::stale;
use crate::buffer::stream::GpuStream;
use crate::contract::CopyDirection;
use crate::contract::messenger::Posted;
use crate::os::RunInstant;
use crate::os::sync::lock;
use crate::types::error::{Error, Result};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// A window of another rank, as the program and the service share it.
pub(super) struct Opened {
    pub copies: Arc<CopyStream>,
    pub nonce: Nonce,
    state: AtomicU8,
    /// Where the memory is, if its rank is of this host. Set before the state is `Open`.
    place: OnceLock<record::Place>,
    /// Steps that were enqueued. Locked while a job is.
    pub steps: Mutex<u32>,
    /// Taken at the end.
    lane: Option<Lane>,
    /// Where the lane goes then.
    pool: Arc<Mutex<Vec<Lane>>>,
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
    pub fn new(copies: Arc<CopyStream>, nonce: Nonce, lane: Lane, pool: Arc<Mutex<Vec<Lane>>>) -> Opened {
        let state = AtomicU8::new(State::Asked as u8);
        let (place, steps) = (OnceLock::new(), Mutex::new(0));
        Opened { copies, nonce, state, place, steps, lane: Some(lane), pool }
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

    pub fn place(&self) -> Option<&record::Place> {
        self.place.get()
    }

    fn lane(&self) -> &Lane {
        self.lane.as_ref().expect("there until it is dropped")
    }

    pub fn staging(&self) -> &Staging {
        &self.lane().staging
    }

    /// Where the steps are enqueued.
    pub fn stream(&self) -> &GpuStream {
        &self.lane().stream
    }

    fn rank(&self) -> usize {
        self.copies.rank
    }

    /// Lets the stream go on up to a step.
    fn grant(&self, step: u32) {
        self.staging().words().granted.store(step, Ordering::Release);
    }

    /// Whether the stream has done a step.
    fn has_done(&self, step: u32) -> bool {
        let done = self.staging().words().done.load(Ordering::Acquire);
        // The difference counts: the numbers may wrap around.
        done.wrapping_sub(step) as i32 >= 0
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        lock(&self.pool).extend(self.lane.take());
    }
}

/// A copy or a signal.
pub(super) struct Job {
    /// Its first and its last step.
    pub steps: [u32; 2],
    pub work: Work,
}

pub(super) enum Work {
    Copy { direction: CopyDirection, pieces: Cutter },
    Signal,
}

/// What is done in a place of the staging. Steps are those of the stream.
enum Place {
    Free,
    /// The stream copies a piece there, which is to be put.
    Filling(Piece, u32),
    /// A piece is on the network.
    Away {
        number: u64,
        posted: Option<Posted>,
        verdict: Option<Verdict>,
        step: u32,
    },
    /// The stream copies a piece, which was got, from there.
    Emptying(u32),
    /// The connection broke. Who is gone, or cannot be reached, is found by the service.
    Broken,
}

/// A window with its work.
struct Calling {
    opened: Arc<Opened>,
    jobs: VecDeque<Job>,
    places: [Place; SLOTS],
    /// The next piece of the first job, and its step.
    next: (Option<Piece>, u32),
    /// The number under which the window, or the signal, was asked.
    asked: Option<u64>,
    /// Since when the first job, to which the stream has come, moves nothing.
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
        tools.messenger.send_note(opened.rank(), note(self.numbers).to_bytes());
        let (jobs, places, next) = (VecDeque::new(), [Place::Free, Place::Free], (None, 0));
        let (asked, since) = (Some(self.numbers), None);
        self.windows.push(Calling { opened, jobs, places, next, asked, since, is_closing: false });
    }

    fn of(&mut self, opened: &Arc<Opened>) -> Option<&mut Calling> {
        self.windows.iter_mut().find(|calling| Arc::ptr_eq(&calling.opened, opened))
    }

    pub fn add(&mut self, opened: &Arc<Opened>, job: Job) {
        match self.of(opened) {
            Some(calling) => calling.jobs.push_back(job),
            None => opened.grant(job.steps[1]),
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

    /// A window is open.
    pub fn opened(&mut self, from: usize, number: u64, place: Option<record::Place>) {
        let is_it = |calling: &&Calling| calling.opened.rank() == from && calling.asked == Some(number);
        let asked = self.windows.iter().filter(is_it).find(|calling| calling.opened.state() == State::Asked);
        if let (Some(calling), Some(place)) = (asked, place) {
            let _ = calling.opened.place.set(place);
        }
        self.take_answer(from, number, Verdict::Done);
    }

    /// A rank has released its window.
    pub fn released(&self, from: usize, nonce: &Nonce) {
        let is_it = |opened: &Opened| opened.rank() == from && opened.nonce == *nonce;
        // A window that its rank has not said to be open gets an answer of its own.
        let is_open = |calling: &&Calling| match (calling.opened.state(), calling.asked) {
            (State::Open, _) => true,
            (State::Asked, Some(number)) => self.answers.get(&(from, number)) == Some(&Verdict::Done),
            _ => false,
        };
        for calling in self.windows.iter().filter(|calling| is_it(&calling.opened)).filter(is_open) {
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

    /// Gives all work up, for a failure.
    pub fn fail(&mut self, failure: &Error, tools: &mut Tools) {
        for calling in &mut self.windows {
            let Calling { opened, jobs, places, since, asked, .. } = calling;
            let _ = opened.copies.failure.set(failure.clone());
            for place in &mut *places {
                match place {
                    Place::Away { posted: Some(posted), .. } if !tools.messenger.give_up(*posted) => {}
                    _ => *place = Place::Free,
                }
            }
            jobs.drain(..).for_each(|job| opened.grant(job.steps[1]));
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
            if !self.opened.has_done(job.steps[0]) {
                return Ok(false);
            }
            self.since = Some(RunInstant::now());
            if let Work::Copy { pieces, .. } = &mut job.work {
                self.next = (pieces.next(), job.steps[0].wrapping_add(1));
            }
        }
        let mut has_moved = false;
        let is_done = match &mut job.work {
            Work::Signal => match self.asked {
                _ if self.opened.copies.failure.get().is_some() => true,
                None => {
                    *numbers += 1;
                    self.asked = Some(*numbers);
                    let note = Note::Signal { number: *numbers, nonce: self.opened.nonce };
                    tools.messenger.send_note(rank, note.to_bytes());
                    false
                }
                Some(number) => answers.remove(&(rank, number)).is_some_and(|verdict| {
                    judge(&self.opened, verdict);
                    true
                }),
            },
            Work::Copy { direction, pieces } => {
                let is_put = *direction == CopyDirection::Put;
                let mut copying = Copying {
                    opened: &self.opened,
                    is_put,
                    next: &mut self.next,
                    pieces,
                    numbers: &mut *numbers,
                    answers: &mut *answers,
                    tools,
                };
                while (0..SLOTS).any(|slot| copying.advance(&mut self.places, slot)) {
                    has_moved = true;
                }
                let is_over = self.next.0.is_none() || self.opened.copies.failure.get().is_some();
                is_over && self.places.iter().all(|place| matches!(place, Place::Free))
            }
        };
        if has_moved {
            self.since = Some(RunInstant::now());
        }
        if is_done {
            self.opened.grant(job.steps[1]);
            self.jobs.pop_front();
            (self.since, self.asked) = (None, None);
        }
        Ok(has_moved || is_done)
    }

    /// Whether the window is closed, and nothing of it is under way: on the network, nor on the stream.
    fn is_over(&mut self, own: usize, tools: &mut Tools) -> bool {
        if self.opened.state() == State::Refused {
            return true;
        }
        // Nobody enqueues any more, who might hold the lock for long.
        if !self.is_closing || !self.jobs.is_empty() || !self.opened.has_done(*lock(&self.opened.steps)) {
            return false;
        }
        // What was given up.
        for place in &mut self.places {
            if let Place::Away { posted: Some(posted), .. } = place
                && tools.messenger.outcome(*posted).is_none()
            {
                return false;
            }
            *place = Place::Free;
        }
        // Of its own window the rank is told where it closes it.
        if self.opened.rank() != own {
            let note = Note::Close { nonce: self.opened.nonce };
            tools.messenger.send_note(self.opened.rank(), note.to_bytes());
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

/// The first job of a window, which is a copy.
struct Copying<'a> {
    opened: &'a Opened,
    is_put: bool,
    next: &'a mut (Option<Piece>, u32),
    pieces: &'a mut Cutter,
    numbers: &'a mut u64,
    answers: &'a mut HashMap<(usize, u64), Verdict>,
    tools: &'a mut Tools,
}

impl Copying<'_> {
    /// Goes on in a place; whether something has moved.
    fn advance(&mut self, places: &mut [Place; SLOTS], slot: usize) -> bool {
        // The stream takes the pieces in their order.
        let steps = places.each_ref().map(Place::step);
        // The numbers may wrap around.
        let is_first = |step: u32| steps.iter().flatten().all(|other| other.wrapping_sub(step) as i32 >= 0);
        let after = match &mut places[slot] {
            Place::Free => {
                // Pieces alternate between the places.
                let is_turn = self.next.1 as usize % SLOTS == slot;
                if !is_turn || self.opened.copies.failure.get().is_some() {
                    return false;
                }
                let Some(piece) = self.next.0.take() else { return false };
                let step = self.next.1;
                *self.next = (self.pieces.next(), step.wrapping_add(1));
                match self.is_put {
                    true => {
                        self.opened.grant(step);
                        Place::Filling(piece, step)
                    }
                    false => self.ask(&piece, slot, step),
                }
            }
            Place::Filling(piece, step) if self.opened.has_done(*step) => {
                match self.opened.copies.failure.get() {
                    Some(_) => Place::Free,
                    None => self.ask(piece, slot, *step),
                }
            }
            Place::Away { number, posted, verdict, step } => {
                *verdict = verdict.or_else(|| self.answers.remove(&(self.opened.rank(), *number)));
                let is_refused = verdict.is_some_and(|verdict| verdict != Verdict::Done);
                if let Some(receive) = *posted
                    && is_refused
                    && !self.is_put
                    && self.tools.messenger.give_up(receive)
                {
                    *posted = None;
                }
                match posted.map(|posted| self.tools.messenger.outcome(posted)) {
                    None => {}
                    Some(None) => return false,
                    Some(Some(true)) => *posted = None,
                    Some(Some(false)) => {
                        places[slot] = Place::Broken;
                        return false;
                    }
                }
                match *verdict {
                    None => return false,
                    Some(Verdict::Done) if !self.is_put => {
                        let step = *step;
                        if !is_first(step) {
                            return false;
                        }
                        self.opened.grant(step);
                        Place::Emptying(step)
                    }
                    Some(verdict) => {
                        judge(self.opened, verdict);
                        Place::Free
                    }
                }
            }
            Place::Emptying(step) if self.opened.has_done(*step) => Place::Free,
            Place::Filling(..) | Place::Emptying(_) | Place::Broken => return false,
        };
        places[slot] = after;
        true
    }

    /// Asks the window's rank to take or give a piece.
    fn ask(&mut self, piece: &Piece, slot: usize, step: u32) -> Place {
        *self.numbers += 1;
        let (number, nonce, rank) = (*self.numbers, self.opened.nonce, self.opened.rank());
        let (ranges, start) = (piece.ranges.clone(), self.opened.staging().start(slot));
        let (data, messenger) = (data_number(number, self.is_put), &mut self.tools.messenger);
        let posted = match self.is_put {
            true => {
                messenger.send_note(rank, Note::Put { number, nonce, ranges }.to_bytes());
                // SAFETY: the place of so many bytes is this piece's until the send is over: the stream waits before it uses it again.
                unsafe { messenger.send(rank, data, start, piece.bytes) }
            }
            false => {
                // SAFETY: as above, until the receive is over.
                let posted = unsafe { messenger.receive(rank, data, start, piece.bytes) };
                messenger.send_note(rank, Note::Get { number, nonce, ranges }.to_bytes());
                posted
            }
        };
        Place::Away { number, posted: Some(posted), verdict: None, step }
    }
}

impl Place {
    /// The step of a piece to which the stream has not come yet.
    fn step(&self) -> Option<u32> {
        match self {
            Place::Away { step, .. } => Some(*step),
            _ => None,
        }
    }
}
