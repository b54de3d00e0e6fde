//! One record of the flight recorder's ring: how it is laid out, written and read.

use super::clock::{Moment, Scale, Ticks};
use crate::contract::Operation;
use crate::types::dtype::DType;
use crate::types::op::ReductionCode;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// One record in the ring: a cache line.
#[derive(Default)]
#[repr(C, align(64))]
pub(super) struct Slot {
    /// The record's number, from 1; 0 while it is being written.
    pub number: AtomicU64,
    /// Operation, type, reduction and state in bytes; root or peer in the upper half.
    pub head: AtomicU64,
    /// The operation's number, from 1: among the collectives, or among the messages to or from that peer.
    pub sequence: AtomicU64,
    pub count: AtomicU64,
    pub enqueued: AtomicU64,
    pub started: AtomicU64,
    pub ended: AtomicU64,
    pub tag: AtomicU64,
}

const _: () = assert!(size_of::<Slot>() == 64);

impl Slot {
    #[inline(always)]
    pub fn is_not_timed(&self) -> bool {
        self.enqueued.load(Ordering::Relaxed) == NOT_TIMED
    }

    #[inline(always)]
    pub fn set_begun(&self, at: Ticks) {
        self.enqueued.store(at, Ordering::Relaxed);
        self.started.store(at, Ordering::Relaxed);
    }

    #[inline(always)]
    pub fn set_state(&self, state: State) {
        let head = self.head.load(Ordering::Relaxed) & !(0xff << STATE);
        self.head.store(head | u64::from(state as u8) << STATE, Ordering::Relaxed);
    }

    /// Writes a new record.
    #[inline(always)]
    pub fn write(&self, number: u64, head: u64, sequence: u64, count: u64, tag: u32, at: Ticks) {
        self.number.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        self.head.store(head, Ordering::Relaxed);
        self.sequence.store(sequence, Ordering::Relaxed);
        self.count.store(count, Ordering::Relaxed);
        self.set_begun(at);
        self.ended.store(0, Ordering::Relaxed);
        self.tag.store(tag.into(), Ordering::Relaxed);
        self.number.store(number, Ordering::Release);
    }

    /// A copy of the record with this number, unless the slot has another one or is being written.
    pub fn read(&self, number: u64, now: Moment, scale: &Scale) -> Option<Record> {
        if self.number.load(Ordering::Acquire) != number {
            return None;
        }
        let get = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let (head, sequence, count, tag) =
            (get(&self.head), get(&self.sequence), get(&self.count), get(&self.tag));
        let began = |word: &AtomicU64| if get(word) == NOT_TIMED { now.ticks } else { get(word) };
        let (enqueued, started, ended) = (began(&self.enqueued), began(&self.started), get(&self.ended));
        fence(Ordering::Acquire);
        if self.number.load(Ordering::Relaxed) != number {
            return None;
        }
        let state = State::ALL.into_iter().find(|state| *state as u8 == (head >> STATE) as u8)?;
        let (dtype, count) = DType::decode((head >> 8) as u8, count)?;
        Some(Record {
            number,
            operation: Operation::from_code(head as u8)?,
            dtype,
            reduction: ReductionCode::from_code((head >> 16) as u8)?,
            state,
            rank: (head >> 32) as u32,
            sequence,
            count,
            tag,
            enqueued: scale.nanos(enqueued),
            started: if state == State::Enqueued { 0 } else { scale.nanos(started) },
            ended: if ended == 0 { 0 } else { scale.nanos(ended) },
        })
    }
}

/// Start time of an operation that was opened without reading the clock, which takes a tenth of the time of
/// the shortest operations. An operation that waits sets the time then; one that never waits counts as
/// started when it ended.
pub(super) const NOT_TIMED: Ticks = 0;

/// State of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    /// Enqueued; not started yet.
    Enqueued = 1,
    Started = 2,
    Completed = 3,
    Failed = 4,
}

impl State {
    const ALL: [State; 4] = [State::Enqueued, State::Started, State::Completed, State::Failed];

    pub fn name(self) -> &'static str {
        match self {
            State::Enqueued => "enqueued",
            State::Started => "started",
            State::Completed => "completed",
            State::Failed => "failed",
        }
    }
}

/// Bit offset of the state in a record's head.
const STATE: u32 = 24;

/// A consistent copy of a record.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Record {
    pub number: u64,
    pub operation: Operation,
    pub dtype: DType,
    pub reduction: ReductionCode,
    pub state: State,
    /// The root or the peer, for operations that have one.
    pub rank: u32,
    pub sequence: u64,
    pub count: u64,
    pub tag: u64,
    /// Times in nanoseconds of the monotonic clock; 0 if that has not happened.
    pub enqueued: u64,
    pub started: u64,
    pub ended: u64,
}

impl Record {
    /// Where the rank is, as a clause of a sentence.
    pub fn describe(&self) -> String {
        let Record { operation, dtype, count, sequence, state, .. } = self;
        let call = match count {
            0 => operation.name().to_owned(),
            _ => format!("{}({dtype} × {count})", operation.name()),
        };
        match state {
            State::Completed => {
                format!("it has completed {call}, operation number {sequence}, and called nothing since")
            }
            State::Failed => format!(
                "its {call}, operation number {sequence}, has failed, and it has called nothing since"
            ),
            State::Enqueued | State::Started => format!("it is in {call}, operation number {sequence}"),
        }
    }
}

/// A record's first word.
#[inline(always)]
pub(super) fn head(
    operation: Operation,
    dtype: DType,
    reduction: ReductionCode,
    state: State,
    rank: usize,
) -> u64 {
    u64::from(operation as u8)
        | u64::from(dtype.code()) << 8
        | u64::from(reduction as u8) << 16
        | u64::from(state as u8) << STATE
        | (rank as u64) << 32
}
