//! [`Server`]: carries out what other ranks ask of this rank's windows.

use super::note::{Nonce, Note, Range, Verdict, bytes_of, data_number};
use super::part::{Part, Parts};
use super::staging::{SLOTS, Staging, Tools, Way, copy};
use crate::backend::nccl::device::{GpuDevice, GpuEvent};
use crate::contract::CopyDirection;
use crate::contract::messenger::Posted;
use crate::types::error::Result;
use std::collections::VecDeque;
use std::sync::Arc;

/// Stagings for pieces of others: two ranks at once have two pieces under way.
const STAGINGS: usize = 2;

/// A piece that a rank has asked for.
pub(super) struct Asked {
    from: usize,
    number: u64,
    nonce: Nonce,
    direction: CopyDirection,
    ranges: Vec<Range>,
    bytes: usize,
}

impl Asked {
    fn way(&self) -> Way {
        match self.direction {
            CopyDirection::Put => Way::ToGpu,
            CopyDirection::Get => Way::ToHost,
        }
    }

    fn parts(&self, part: &Part) -> impl Iterator<Item = (u64, usize)> + use<'_> {
        let start = part.start;
        self.ranges.iter().map(move |(offset, len)| (start + offset, *len as usize))
    }
}

/// What is done in a place of a staging.
enum Step {
    Free,
    /// The data of a put comes.
    Coming(Asked, Posted),
    /// The GPU copies.
    Copying(Asked, Arc<Part>),
    /// The data of a get, or what was given up, for this rank.
    Going(usize, Posted),
}

pub(super) struct Server {
    stagings: Vec<Staging>,
    /// Behind the copies from and to each place.
    events: Vec<GpuEvent>,
    steps: Vec<Step>,
    asked: VecDeque<Asked>,
}

impl Server {
    pub fn new(device: &GpuDevice) -> Result<Server> {
        let stagings = (0..STAGINGS).map(|_| Staging::new(device)).collect::<Result<_>>()?;
        let events = (0..STAGINGS * SLOTS).map(|_| GpuEvent::new(device)).collect::<Result<_>>()?;
        let steps = (0..STAGINGS * SLOTS).map(|_| Step::Free).collect();
        Ok(Server { stagings, events, steps, asked: VecDeque::new() })
    }

    /// A rank asks for a piece.
    pub fn ask(
        &mut self,
        (from, number): (usize, u64),
        nonce: Nonce,
        direction: CopyDirection,
        ranges: Vec<Range>,
        tools: &mut Tools,
    ) {
        match bytes_of(&ranges) {
            Some(bytes) => self.asked.push_back(Asked { from, number, nonce, direction, ranges, bytes }),
            // No rank that counts as we do asks for so much. The data, if it comes, is for no receive.
            None => answer(tools, from, number, Verdict::Outside),
        }
    }

    /// Whether nothing is under way.
    pub fn is_idle(&self) -> bool {
        self.asked.is_empty() && self.steps.iter().all(|step| matches!(step, Step::Free))
    }

    /// Goes on; whether something has moved.
    pub fn advance(&mut self, parts: &Parts, tools: &mut Tools) -> Result<bool> {
        let mut has_moved = false;
        for place in 0..self.steps.len() {
            while self.advance_place(place, parts, tools)? {
                has_moved = true;
            }
        }
        Ok(has_moved)
    }

    fn advance_place(&mut self, place: usize, parts: &Parts, tools: &mut Tools) -> Result<bool> {
        let start = self.start(place);
        match std::mem::replace(&mut self.steps[place], Step::Free) {
            Step::Free => {
                let Some(asked) = self.asked.pop_front() else { return Ok(false) };
                if asked.direction == CopyDirection::Get {
                    return self.begin(place, asked, parts, tools).map(|()| true);
                }
                // The data is taken in any case: its rank waits until it has gone.
                let number = data_number(asked.number, true);
                // SAFETY: the place has room for a piece, and nothing else is done in it until the receive is over.
                let posted = unsafe { tools.messenger.receive(asked.from, number, start, asked.bytes) };
                self.steps[place] = Step::Coming(asked, posted);
            }
            Step::Coming(asked, posted) => match tools.messenger.outcome(posted) {
                None => {
                    self.steps[place] = Step::Coming(asked, posted);
                    return Ok(false);
                }
                Some(true) => self.begin(place, asked, parts, tools)?,
                // The connection broke; the rank that asked sees that, too.
                Some(false) => {}
            },
            Step::Copying(asked, part) => {
                if !self.events[place].is_complete()? {
                    self.steps[place] = Step::Copying(asked, part);
                    return Ok(false);
                }
                part.end_piece(asked.from);
                answer(tools, asked.from, asked.number, Verdict::Done);
                if asked.direction == CopyDirection::Get {
                    let number = data_number(asked.number, false);
                    // SAFETY: as above: until the send is over.
                    let posted = unsafe { tools.messenger.send(asked.from, number, start, asked.bytes) };
                    self.steps[place] = Step::Going(asked.from, posted);
                }
            }
            Step::Going(to, posted) => {
                if tools.messenger.outcome(posted).is_none() {
                    self.steps[place] = Step::Going(to, posted);
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Where a place is.
    fn start(&self, place: usize) -> *mut u8 {
        self.stagings[place / SLOTS].start(place % SLOTS)
    }

    /// Lets the GPU copy a piece, if the rank has the window open.
    fn begin(&mut self, place: usize, asked: Asked, parts: &Parts, tools: &mut Tools) -> Result<()> {
        match parts.begin_piece(&asked.nonce, asked.from, &asked.ranges) {
            Ok(part) => {
                let way = asked.way();
                let (stream, start) = (tools.stream(way), self.start(place));
                // SAFETY: the ranges lie in the window, just checked, which stays until `end_piece`; no more bytes than a piece has.
                let copied = unsafe { copy(&tools.device, stream, way, start, asked.parts(&part)) };
                self.steps[place] = Step::Copying(asked, part);
                copied.and_then(|()| self.events[place].record(stream))
            }
            Err(verdict) => {
                answer(tools, asked.from, asked.number, verdict);
                Ok(())
            }
        }
    }

    /// Gives up what is done for ranks that are lost.
    pub fn give_up(&mut self, is_lost: impl Fn(usize) -> bool, tools: &mut Tools) {
        self.asked.retain(|asked| !is_lost(asked.from));
        for step in &mut self.steps {
            let (rank, posted) = match step {
                Step::Coming(asked, posted) => (asked.from, *posted),
                Step::Going(rank, posted) => (*rank, *posted),
                Step::Free | Step::Copying(..) => continue,
            };
            if is_lost(rank) {
                *step = if tools.messenger.give_up(posted) { Step::Free } else { Step::Going(rank, posted) };
            }
        }
    }

    /// After a failure: no piece is copied any more that goes a way whose stream has no work.
    pub fn end_pieces(&mut self, is_idle: impl Fn(Way) -> bool) {
        for step in &mut self.steps {
            if let Step::Copying(asked, part) = step
                && is_idle(asked.way())
            {
                part.end_piece(asked.from);
                *step = Step::Free;
            }
        }
    }
}

/// Tells a rank what has become of what it asked.
pub(super) fn answer(tools: &mut Tools, to: usize, number: u64, verdict: Verdict) {
    tools.messenger.send_note(to, Note::Answer { number, verdict }.to_bytes());
}
