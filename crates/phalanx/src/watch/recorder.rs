//! Flight recorder: a ring of the last operations of one rank in a communicator, always on.
//!
//! # Writers and readers
//! - The thread that holds the `Comm` writes new records. `Comm` is not `Sync`, so that is one thread at a
//!   time, and counters need no atomic read-modify-write.
//! - The thread that carries the operation out writes the later fields (started, ended, state), unless the
//!   slot has been reused for a newer record.
//! - Any thread may read at any time. A record that changes meanwhile has another number, as in a sequence
//!   lock, and is skipped.

use super::clock::{Clock, Moment, Scale, Ticks};
use super::metrics::{self, Counters};
use super::ranges::Ranges;
use super::slot::{NOT_TIMED, Record, Slot, State, head};
use super::{dump, launcher};
use crate::contract::{Backend, BackendKind, Call, Operation, Transfer};
use crate::os::RunInstant;
use crate::os::sync::lock;
use crate::types::dtype::DType;
use crate::types::error::{Error, Result};
use crate::types::op::ReductionCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

/// How long the launcher's request waits for a rank inside an operation to find the failure by itself: ranks look every 50 ms.
const FINDING: Duration = Duration::from_millis(500);

/// Number of records in the ring: 64 KiB.
pub(super) const RECORDS: usize = 1024;

/// A record's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RecordId(u64);

#[cfg(test)]
thread_local! {
    /// Makes the operations of this thread panic while their buffers are lent.
    pub(crate) static PANIC_WHEN_BEGUN: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Flight recorder of one rank's communicator: a ring of its last operations.
pub(crate) struct Recorder {
    pub(crate) backend: BackendKind,
    /// The communicator's name: the same on all its ranks, and different for every communicator.
    name: String,
    /// The name with what the program calls it.
    given_name: OnceLock<String>,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    slots: Box<[Slot]>,
    /// Number of records so far. Like the counters below, written only by the thread that holds the `Comm`.
    made: AtomicU64,
    collectives: AtomicU64,
    /// Messages to and from each peer.
    messages: Box<[[AtomicU64; 2]]>,
    /// Counters for monitoring, if they are wanted.
    pub(super) counters: Option<Counters>,
    ranges: Option<Ranges>,
    clock: Clock,
    born: Moment,
    /// Whether the failure has been reported, or is being reported by the thread that holds `writing`.
    reported: AtomicBool,
    writing: Mutex<()>,
    /// The communicator, which knows the processes of its ranks.
    members: OnceLock<Weak<dyn Backend>>,
}

impl Recorder {
    pub fn new(backend: BackendKind, name: String, rank: usize, world_size: usize) -> Arc<Recorder> {
        let clock = Clock::new();
        let recorder = Arc::new(Recorder {
            ranges: Ranges::wanted(&name),
            backend,
            name,
            given_name: OnceLock::new(),
            rank,
            world_size,
            slots: (0..RECORDS).map(|_| Slot::default()).collect(),
            made: AtomicU64::new(0),
            collectives: AtomicU64::new(0),
            messages: (0..world_size).map(|_| Default::default()).collect(),
            counters: Counters::new(),
            clock,
            born: clock.moment(),
            reported: AtomicBool::new(false),
            writing: Mutex::default(),
            members: OnceLock::new(),
        });
        super::signal::register(&recorder);
        recorder
    }

    /// The name by which the ranks know it, without the program's own.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The name in records: with the program's own behind it.
    pub fn full_name(&self) -> &str {
        self.given_name.get().unwrap_or(&self.name)
    }

    /// Adds the name that the program gives it; `false` if it has one.
    pub fn set_given_name(&self, name: &str) -> bool {
        self.given_name.set(format!("{}:{name}", self.name)).is_ok()
    }

    /// Sets the communicator that is recorded.
    pub fn set_members(&self, backend: &Arc<dyn Backend>) {
        let _ = self.members.set(Arc::downgrade(backend));
    }

    /// The process of a rank, where the communicator knows it.
    pub fn process_of(&self, rank: usize) -> Option<u32> {
        self.members.get()?.upgrade()?.process_of(rank)
    }

    /// Name for a communicator that the last recorded collective creates from this one.
    pub fn child_name(&self, what: impl std::fmt::Display) -> String {
        format!("{}/{}.{what}", self.name, self.collectives.load(Ordering::Relaxed))
    }

    /// Records a collective that starts now.
    #[inline]
    pub fn begin(&self, call: &Call<'_>) -> RecordId {
        self.collective(call, State::Started, self.clock.now())
    }

    /// Records a collective that starts now, without reading the clock: [`begun`](Self::begun) sets the time.
    #[inline]
    pub fn open(&self, call: &Call<'_>) -> RecordId {
        self.collective(call, State::Started, NOT_TIMED)
    }

    /// Records a collective that is enqueued and starts later.
    #[inline]
    pub fn enqueue(&self, call: &Call<'_>) -> RecordId {
        self.collective(call, State::Enqueued, self.clock.now())
    }

    #[inline(always)]
    fn collective(&self, call: &Call<'_>, state: State, at: Ticks) -> RecordId {
        let count = match call.blocks {
            crate::contract::Blocks::Equal(count) => count,
            crate::contract::Blocks::Each(counts) => counts.iter().sum(),
        };
        self.announce(call.operation, count * call.dtype.size());
        let sequence = next(&self.collectives, 1);
        let head = head(call.operation, call.dtype, call.reduction.code, state, call.root);
        self.write(head, sequence, call.dtype.mark(count as u64), 0, at)
    }

    /// The last record.
    pub fn last(&self) -> Option<RecordId> {
        let number = self.made.load(Ordering::Relaxed);
        (number != 0).then_some(RecordId(number))
    }

    /// Records that the last recorded collective is carried out again, without reading the clock. `false` if there is a record since.
    #[inline]
    pub fn repeat(&self, RecordId(number): RecordId) -> bool {
        self.repeat_as(number, &self.collectives)
    }

    #[inline(always)]
    fn repeat_as(&self, number: u64, sequences: &AtomicU64) -> bool {
        if self.made.load(Ordering::Relaxed) != number {
            return false;
        }
        let slot = self.slot(number);
        slot.sequence.store(next(sequences, 1), Ordering::Relaxed);
        slot.set_state(State::Started);
        if self.counters.is_some() || self.ranges.is_some() {
            self.announce_again(number, slot);
        }
        true
    }

    /// Records that the last recorded message is posted again, without reading the clock. `false` if there is a record since.
    #[inline]
    pub fn repeat_message(&self, RecordId(number): RecordId, transfer: &Transfer) -> bool {
        self.repeat_as(number, &self.messages[transfer.peer][transfer.direction.number()])
    }

    /// Marks a repeated operation as completed, at the time at which the first one was.
    #[inline]
    pub fn repeated(&self, RecordId(number): RecordId) {
        self.slot(number).set_state(State::Completed);
        if let Some(ranges) = &self.ranges {
            ranges.end(number);
        }
    }

    /// Records a message that is posted now.
    #[inline]
    pub fn begin_message(&self, transfer: &Transfer) -> RecordId {
        self.message(transfer, self.clock.now())
    }

    /// Records a message that is posted now, without reading the clock: [`begun`](Self::begun) sets the time.
    #[inline]
    pub fn open_message(&self, transfer: &Transfer) -> RecordId {
        self.message(transfer, NOT_TIMED)
    }

    #[inline(always)]
    fn message(&self, transfer: &Transfer, at: Ticks) -> RecordId {
        let (operation, direction) = (transfer.operation(), transfer.direction.number());
        self.announce(operation, transfer.count * transfer.dtype.size());
        let sequence = next(&self.messages[transfer.peer][direction], 1);
        let head = head(operation, transfer.dtype, ReductionCode::Sum, State::Started, transfer.peer);
        self.write(head, sequence, transfer.dtype.mark(transfer.count as u64), transfer.tag, at)
    }

    /// Tells those who want to know that the next record's operation is called.
    #[inline(always)]
    fn announce(&self, operation: Operation, bytes: usize) {
        if let Some(counters) = &self.counters {
            counters.called(operation, bytes as u64);
        }
        if let Some(ranges) = &self.ranges {
            ranges.begin(self.made() + 1, operation, bytes as u64);
        }
    }

    /// Tells those who want to know that this record's operation is called again.
    #[cold]
    fn announce_again(&self, number: u64, slot: &Slot) {
        let head = slot.head.load(Ordering::Relaxed);
        if let Some(counters) = &self.counters {
            counters.called_again(head as u8);
        }
        if let (Some(ranges), Some(operation)) = (&self.ranges, Operation::from_code(head as u8)) {
            let decoded = DType::decode((head >> 8) as u8, slot.count.load(Ordering::Relaxed));
            let bytes = decoded.map_or(0, |(dtype, count)| count * dtype.size() as u64);
            ranges.begin(number, operation, bytes);
        }
    }

    /// Skips collective numbers that the backend has used itself.
    pub fn skip(&self, collectives: u64) {
        next(&self.collectives, collectives);
    }

    #[inline(always)]
    fn write(&self, head: u64, sequence: u64, count: u64, tag: u32, at: Ticks) -> RecordId {
        let number = next(&self.made, 1);
        self.slot(number).write(number, head, sequence, count, tag, at);
        RecordId(number)
    }

    #[inline(always)]
    fn slot(&self, number: u64) -> &Slot {
        &self.slots[number as usize % RECORDS]
    }

    /// Sets the start time of an opened operation to now, if it is not set yet.
    pub fn begun(&self, RecordId(number): RecordId) {
        #[cfg(test)]
        assert!(!PANIC_WHEN_BEGUN.get(), "a panic inside an operation");
        let slot = self.slot(number);
        if slot.number.load(Ordering::Relaxed) == number && slot.is_not_timed() {
            slot.set_begun(self.clock.now());
        }
    }

    /// Marks an enqueued operation as started.
    pub fn start(&self, RecordId(number): RecordId) {
        let slot = self.slot(number);
        if slot.number.load(Ordering::Relaxed) == number {
            slot.started.store(self.clock.now(), Ordering::Relaxed);
            slot.set_state(State::Started);
        }
    }

    /// Marks an operation as completed or failed. If the communicator has failed, its flight record is
    /// written, once.
    #[inline]
    pub fn end<T>(&self, RecordId(number): RecordId, result: Result<T>) -> Result<T> {
        let slot = self.slot(number);
        if slot.number.load(Ordering::Relaxed) == number {
            let now = self.clock.now();
            if slot.is_not_timed() {
                slot.set_begun(now);
            }
            slot.ended.store(now, Ordering::Relaxed);
            if let Some(counters) = &self.counters {
                let [enqueued, started] =
                    [&slot.enqueued, &slot.started].map(|time| time.load(Ordering::Relaxed));
                let code = slot.head.load(Ordering::Relaxed) as u8;
                let waited = started.saturating_sub(enqueued);
                counters.ended(code, now.saturating_sub(enqueued), waited, result.is_err());
            }
            slot.set_state(if result.is_ok() { State::Completed } else { State::Failed });
        }
        if let Some(ranges) = &self.ranges {
            ranges.end(number);
        }
        if let Err(error) = &result {
            self.failed(error);
        }
        result
    }

    /// The result of what is no operation of the record, such as a probe or an access to a window. Its failure is the communicator's.
    #[inline(always)]
    pub fn noted<R>(&self, result: Result<R>) -> Result<R> {
        result.inspect_err(|error| self.failed(error))
    }

    /// Writes the flight record and tells the launcher, once, if the communicator has failed.
    #[cold]
    pub fn failed(&self, error: &Error) {
        if error.is_fatal() && self.report(&dump::Reason::Failure(error)) {
            launcher::failed(self, error);
        }
    }

    /// The same because the thread that holds the communicator panics.
    #[cold]
    pub fn panicked(&self) {
        if self.report(&dump::Reason::Panic) {
            launcher::panicked();
        }
    }

    /// Writes the flight record, unless it has been written. Returns whether it was this call.
    fn report(&self, reason: &dump::Reason<'_>) -> bool {
        let _writing = lock(&self.writing);
        let is_first = !self.reported.swap(true, Ordering::Relaxed);
        if is_first {
            dump::on_event(self, reason);
        }
        is_first
    }

    /// Writes the flight record for the launcher, which is about to end this rank, unless a failure has been recorded. A later
    /// failure replaces it.
    pub fn write_missing(&self) {
        let is_inside = || {
            let (made, now) = (self.made(), self.clock.moment());
            let last = self.slot(made).read(made, now, &Scale::between(self.born, now));
            last.is_some_and(|last| matches!(last.state, State::Enqueued | State::Started))
        };
        let since = RunInstant::now();
        while !self.reported.load(Ordering::Relaxed) && is_inside() && since.elapsed() < FINDING {
            std::thread::sleep(Duration::from_millis(5));
        }
        let _writing = lock(&self.writing);
        if !self.reported.load(Ordering::Relaxed) {
            dump::on_event(self, &dump::Reason::Request);
        }
    }

    /// What converts ticks to times.
    #[cfg(feature = "metrics")]
    pub(super) fn scale(&self) -> Scale {
        Scale::between(self.born, self.clock.moment())
    }

    /// Number of records so far.
    pub(crate) fn made(&self) -> u64 {
        self.made.load(Ordering::Relaxed)
    }

    /// Returns the records in the ring, oldest first.
    pub(crate) fn records(&self) -> Vec<Record> {
        let now = self.clock.moment();
        let scale = Scale::between(self.born, now);
        let last = self.made();
        let first = last.saturating_sub(RECORDS as u64) + 1;
        (first..=last).filter_map(|number| self.slot(number).read(number, now, &scale)).collect()
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        metrics::keep(self);
    }
}

/// Adds to a counter that has one writer.
#[inline(always)]
pub(super) fn next(counter: &AtomicU64, by: u64) -> u64 {
    let value = counter.load(Ordering::Relaxed) + by;
    counter.store(value, Ordering::Relaxed);
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::Direction;

    fn recorder() -> Arc<Recorder> {
        Recorder::new(BackendKind::Host, "test".into(), 0, 2)
    }

    #[test]
    fn a_repeated_collective_keeps_its_record_until_there_is_another() {
        let recorder = recorder();
        let call = Call::empty(crate::contract::Operation::Barrier);
        recorder.end(recorder.begin(&call), Ok(())).unwrap();
        let record = recorder.last().unwrap();
        assert!(recorder.repeat(record) && recorder.repeat(record));
        let records = recorder.records();
        assert_eq!((records.len(), records[0].sequence, records[0].state), (1, 3, State::Started));
        recorder.repeated(record);
        assert_eq!(recorder.records()[0].state, State::Completed);
        recorder.end(recorder.begin(&call), Ok(())).unwrap();
        assert!(!recorder.repeat(record));
        assert_eq!(recorder.records()[1].sequence, 4);
    }

    #[test]
    fn the_last_operations_are_remembered_in_order() {
        let recorder = recorder();
        let barrier = Call::empty(Operation::Barrier);
        for _ in 0..RECORDS + 10 {
            let id = recorder.begin(&barrier);
            recorder.end(id, Ok(())).unwrap();
        }
        let queued = recorder.enqueue(&barrier);
        let records = recorder.records();
        assert_eq!(records.len(), RECORDS);
        assert!(records.windows(2).all(|pair| pair[0].number + 1 == pair[1].number));
        let (last, done) = (&records[RECORDS - 1], &records[RECORDS - 2]);
        assert_eq!((last.state, last.started, last.ended), (State::Enqueued, 0, 0));
        assert_eq!((done.state, done.sequence), (State::Completed, RECORDS as u64 + 10));
        assert!(done.enqueued == done.started && done.started <= done.ended);
        recorder.start(queued);
        recorder.end(queued, Err::<(), _>(Error::Aborted { rank: 1 })).unwrap_err();
        assert_eq!(recorder.records().last().unwrap().state, State::Failed);
    }

    #[test]
    fn an_operation_that_ends_when_the_ring_has_come_round_harms_no_other() {
        let recorder = recorder();
        let barrier = Call::empty(Operation::Barrier);
        let old = recorder.begin(&barrier);
        for _ in 0..RECORDS {
            recorder.enqueue(&barrier);
        }
        recorder.end(old, Ok(())).unwrap();
        assert!(recorder.records().iter().all(|record| record.state == State::Enqueued));
    }

    #[test]
    fn an_operation_that_does_not_say_when_it_began_was_short() {
        let recorder = recorder();
        let barrier = Call::empty(Operation::Barrier);
        let last = || *recorder.records().last().unwrap();
        let before = crate::os::monotonic_nanos();
        let silent = recorder.open(&barrier);
        assert!(last().started >= before.saturating_sub(1_000_000));
        recorder.end(silent, Ok(())).unwrap();
        let short = last();
        assert!(short.enqueued == short.started && short.started == short.ended && short.ended != 0);

        let waiting = recorder.open(&barrier);
        recorder.begun(waiting);
        std::thread::sleep(std::time::Duration::from_millis(20));
        recorder.begun(waiting);
        recorder.end(waiting, Ok(())).unwrap();
        let long = last();
        assert!(long.enqueued == long.started && long.ended - long.started > 15_000_000);
    }

    #[test]
    fn messages_are_counted_by_peer_and_direction() {
        let recorder = recorder();
        let send = Transfer::host(Direction::Send(std::ptr::null()), 1, 7, DType::F32, 3);
        let recv = Transfer { direction: Direction::Recv(std::ptr::null_mut()), ..send };
        for transfer in [&send, &recv, &send] {
            recorder.begin_message(transfer);
        }
        let records = recorder.records();
        let sequences: Vec<u64> = records.iter().map(|record| record.sequence).collect();
        assert_eq!(sequences, [1, 1, 2]);
        assert!(records.iter().all(|r| (r.rank, r.tag, r.count, r.dtype) == (1, 7, 3, DType::F32)));
    }

    /// What an operation costs; run with `--release -- --ignored --nocapture`.
    #[test]
    #[ignore = "a measurement"]
    fn cost() {
        let recorder = recorder();
        let call = Call {
            dtype: DType::F32,
            blocks: crate::contract::Blocks::Equal(2),
            ..Call::empty(Operation::AllReduce)
        };
        let rounds = 2_000_000u32;
        for _ in 0..5 {
            let since = std::time::Instant::now();
            for _ in 0..rounds {
                let id = recorder.begin(std::hint::black_box(&call));
                let _ = std::hint::black_box(recorder.end(id, Ok(())));
            }
            println!("{:.1} ns an operation", since.elapsed().as_nanos() as f64 / f64::from(rounds));
        }
    }
}
