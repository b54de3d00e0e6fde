//! Publishes changes of this rank's state to the other ranks of a channel.

use super::replicas::OpenChannel;
use super::{Content, Line, Message, OPENING, RelayShared, Update};
use crate::control::flags::Stamped;
use crate::control::layout::{RECORDS, SLOTS};
use crate::control::segment::SegmentId;
use crate::control::tunables::SLOT_LINES;
use crate::os::sync::{Ordering, lock};
use std::sync::Arc;

/// The state that was published last.
pub(crate) struct Published {
    /// All but the lists.
    last: Update,
    records: [u64; RECORDS],
    greetings: Vec<u64>,
    /// Stamps; the opening's comes behind the lines'.
    lines: Vec<u64>,
}

impl Published {
    pub fn new(greetings: usize) -> Published {
        Published {
            last: Update::default(),
            records: [0; RECORDS],
            greetings: vec![0; greetings],
            lines: vec![0; SLOTS * (SLOT_LINES + 1)],
        }
    }
}

impl RelayShared {
    /// Publishes the changes in all channels.
    pub fn publish_changes(&self) {
        self.publish_changes_except(0);
    }

    /// The same, except for one channel.
    pub fn publish_changes_except(&self, id: SegmentId) {
        let open: Vec<Arc<OpenChannel>> = self.replicas.channels();
        open.iter().filter(|open| open.id != id).for_each(|open| self.publish(open, false));
    }

    /// Publishes the changes in one channel.
    pub fn publish(&self, open: &OpenChannel, with_slots: bool) {
        if open.others.is_empty() {
            return;
        }
        // Held until the update is sent, so that no newer one overtakes it.
        let mut published = lock(&open.published);
        let update = self.changes(open, &mut published, with_slots);
        if let Some(update) = update {
            self.send(&open.others, open.id, Content::Update(update));
        }
    }

    pub fn send(&self, to: &[u32], channel: SegmentId, content: Content) {
        let bytes = postcard::to_allocvec(&Message { channel, content }).expect("plain data");
        // An error is the end of the connection, which `on_loss` reports.
        let _ = self.store.send(to, &bytes);
    }

    fn changes(&self, open: &OpenChannel, published: &mut Published, with_slots: bool) -> Option<Update> {
        let state = open.channel.state(open.rank);
        // The life state is read first: a rank that left has written everything before.
        let mut update = Update {
            life: state.life.state.load(Ordering::Acquire),
            pid: state.life.pid.load(Ordering::Acquire),
            waits_for: self.replicas.status(self.rank).waits_for.load(Ordering::Acquire),
            done: state.done_operation.get(),
            joined: state.shrink.joined.load(Ordering::Acquire),
            ..Update::default()
        };
        let is_same = update == published.last;
        for (place, record) in state.records.iter().enumerate() {
            let sequence = record.number();
            if sequence == published.records[place] {
                continue;
            }
            // 0 is withdrawn. A record that is being written is published the next time.
            let words = if sequence == 0 { Some([0; 3]) } else { record.read(sequence) };
            let Some(words) = words else { continue };
            published.records[place] = sequence;
            update.records.push((place as u8, sequence, words));
        }
        for (place, word) in state.greeting_words().enumerate() {
            let word = word.load(Ordering::Acquire);
            if std::mem::replace(&mut published.greetings[place], word) != word {
                update.greetings.push((place as u8, word));
            }
        }
        if with_slots {
            update.lines = new_lines(open, &mut published.lines);
        }
        let is_empty =
            is_same && update.records.is_empty() && update.greetings.is_empty() && update.lines.is_empty();
        published.last = Update { records: Vec::new(), greetings: Vec::new(), lines: Vec::new(), ..update };
        (!is_empty).then_some(update)
    }
}

/// The lines of this rank's slots that were written and not published.
fn new_lines(open: &OpenChannel, published: &mut [u64]) -> Vec<Line> {
    let Some((sequence, _)) = open.channel.state(open.rank).last_announced() else { return Vec::new() };
    let slot = open.channel.slot(open.rank, sequence);
    let place = sequence as usize % SLOTS;
    let (lines_published, published) = published[place * (SLOT_LINES + 1)..].split_at_mut(SLOT_LINES);
    let lines = slot.lines.iter().zip(0..).zip(lines_published);
    let mut new: Vec<Line> =
        lines.filter_map(|((line, number), published)| words(line, number, sequence, published)).collect();
    new.extend(words(&slot.opening, OPENING, sequence, &mut published[0]));
    new
}

/// A line of an operation's slot, if it was written and not published.
fn words<const PAYLOAD: usize>(
    line: &Stamped<PAYLOAD>,
    number: u16,
    sequence: u64,
    published: &mut u64,
) -> Option<Line> {
    if *published == sequence || !line.is(sequence) {
        return None;
    }
    *published = sequence;
    let mut payload = vec![0u64; PAYLOAD / 8];
    // SAFETY: stamped, and the thread that writes it is this one; both are as long.
    unsafe { line.read(payload.as_mut_ptr().cast(), PAYLOAD) };
    Some(Line { slot: (sequence as usize % SLOTS) as u8, line: number, stamp: sequence, payload })
}
