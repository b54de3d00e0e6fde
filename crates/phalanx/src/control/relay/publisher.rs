//! This rank's words on their way to the others.

use super::replicas::OpenChannel;
use super::{Content, Line, Message, OPENING, Shared, Update};
use crate::control::flags::Stamped;
use crate::control::layout::{RECORDS, SLOT_LINES, SLOTS};
use crate::control::segment::SegmentId;
use crate::os::sync::{Ordering, lock};
use std::sync::Arc;

/// What the others know of this rank.
pub(crate) struct Told {
    /// Without lists.
    last: Update,
    records: [u64; RECORDS],
    greetings: Vec<u64>,
    /// Stamps; the opening's comes behind the lines'.
    lines: Vec<u64>,
}

impl Told {
    pub fn new(greetings: usize) -> Told {
        Told {
            last: Update::default(),
            records: [0; RECORDS],
            greetings: vec![0; greetings],
            lines: vec![0; SLOTS * (SLOT_LINES + 1)],
        }
    }
}

impl Shared {
    /// Tells what has changed in any channel.
    pub fn tell_changes(&self) {
        self.tell_changes_but(0);
    }

    /// The same, without a channel that is told of next.
    pub fn tell_changes_but(&self, id: SegmentId) {
        let open: Vec<Arc<OpenChannel>> = self.replicas.channels();
        open.iter().filter(|open| open.id != id).for_each(|open| self.tell(open, false));
    }

    /// Tells the others of a channel what has changed in this rank's words.
    pub fn tell(&self, open: &OpenChannel, with_slots: bool) {
        if open.others.is_empty() {
            return;
        }
        // Held until it is sent, so that nothing newer overtakes it.
        let mut told = lock(&open.told);
        let update = self.changes(open, &mut told, with_slots);
        if let Some(update) = update {
            self.send(&open.others, open.id, Content::Update(update));
        }
    }

    pub fn send(&self, to: &[u32], channel: SegmentId, content: Content) {
        let bytes = postcard::to_allocvec(&Message { channel, content }).expect("plain data");
        // An error is the end of the connection, which `bereaved` hears of.
        let _ = self.store.tell(to, &bytes);
    }

    fn changes(&self, open: &OpenChannel, told: &mut Told, with_slots: bool) -> Option<Update> {
        let state = open.channel.state(open.rank);
        // In the order of reading: who has left has written all before.
        let mut update = Update {
            life: state.life.state.load(Ordering::Acquire),
            pid: state.life.pid.load(Ordering::Acquire),
            waits_for: self.replicas.standing(self.rank).waits_for.load(Ordering::Acquire),
            done: state.done_operation.get(),
            joined: state.shrink.joined.load(Ordering::Acquire),
            ..Update::default()
        };
        let is_same = update == told.last;
        for (place, record) in state.records.iter().enumerate() {
            let sequence = record.number();
            if sequence == told.records[place] {
                continue;
            }
            // Withdrawn; or being written, and told the next time.
            let words = if sequence == 0 { Some([0; 3]) } else { record.read(sequence) };
            let Some(words) = words else { continue };
            told.records[place] = sequence;
            update.records.push((place as u8, sequence, words));
        }
        for (place, word) in state.greeting_words().enumerate() {
            let word = word.load(Ordering::Acquire);
            if std::mem::replace(&mut told.greetings[place], word) != word {
                update.greetings.push((place as u8, word));
            }
        }
        if with_slots {
            update.lines = new_lines(open, &mut told.lines);
        }
        let is_nothing =
            is_same && update.records.is_empty() && update.greetings.is_empty() && update.lines.is_empty();
        told.last = Update { records: Vec::new(), greetings: Vec::new(), lines: Vec::new(), ..update };
        (!is_nothing).then_some(update)
    }
}

/// The lines of this rank's slots that were written and not told.
fn new_lines(open: &OpenChannel, told: &mut [u64]) -> Vec<Line> {
    let Some((sequence, _)) = open.channel.state(open.rank).last_announced() else { return Vec::new() };
    let slot = open.channel.slot(open.rank, sequence);
    let place = sequence as usize % SLOTS;
    let (lines_told, told) = told[place * (SLOT_LINES + 1)..].split_at_mut(SLOT_LINES);
    let lines = slot.lines.iter().zip(0..).zip(lines_told);
    let mut new: Vec<Line> =
        lines.filter_map(|((line, number), told)| words(line, number, sequence, told)).collect();
    new.extend(words(&slot.opening, OPENING, sequence, &mut told[0]));
    new
}

/// What a line of an operation's slot says, if it was written and not told.
fn words<const PAYLOAD: usize>(
    line: &Stamped<PAYLOAD>,
    number: u16,
    sequence: u64,
    told: &mut u64,
) -> Option<Line> {
    if *told == sequence || !line.is(sequence) {
        return None;
    }
    *told = sequence;
    let mut payload = vec![0u64; PAYLOAD / 8];
    // SAFETY: stamped, and the thread that writes it is this one; both are as long.
    unsafe { line.read(payload.as_mut_ptr().cast(), PAYLOAD) };
    Some(Line { slot: (sequence as usize % SLOTS) as u8, line: number, stamp: sequence, payload })
}
