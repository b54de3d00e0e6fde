//! Merges the records of a communicator's ranks, on one clock.

use super::record::{FlightRecord, Operation, State};
use std::collections::BTreeMap;

/// One communicator, as its ranks recorded it.
#[derive(Debug)]
pub struct Merged {
    pub name: String,
    pub backend: String,
    pub world_size: usize,
    pub ranks: BTreeMap<usize, FlightRecord>,
    /// The earliest time of all records, in nanoseconds.
    pub start: u64,
    /// Whether times are on the wall clocks of several hosts, which may differ.
    pub different_clocks: bool,
}

/// Merges records by communicator; of several records of a rank, the last one counts.
pub fn merge(records: Vec<FlightRecord>) -> Vec<Merged> {
    let mut communicators: BTreeMap<String, Vec<FlightRecord>> = BTreeMap::new();
    for record in records {
        communicators.entry(record.communicator.clone()).or_default().push(record);
    }
    let mut merged: Vec<Merged> = communicators.into_values().map(one).collect();
    // The whole world before communicators of some of its ranks.
    merged.sort_unstable_by(|a, b| b.world_size.cmp(&a.world_size).then_with(|| a.name.cmp(&b.name)));
    merged
}

fn one(records: Vec<FlightRecord>) -> Merged {
    let mut ranks: BTreeMap<usize, FlightRecord> = BTreeMap::new();
    // They have one name. The first record decides on the number of ranks.
    let (name, backend, world_size) =
        (records[0].communicator.clone(), records[0].backend.clone(), records[0].world_size);
    for record in records.into_iter().filter(|record| record.world_size == world_size) {
        match ranks.get(&record.rank) {
            Some(other) if other.written_unix_ns >= record.written_unix_ns => {}
            _ => {
                ranks.insert(record.rank, record);
            }
        }
    }
    let first_boot = ranks.values().next().map(|record| record.boot.clone()).unwrap_or_default();
    let different_clocks = ranks.values().any(|record| record.boot != first_boot);
    for record in ranks.values_mut() {
        // The monotonic clock, if it is the same for all, else the wall clocks.
        let shift =
            if different_clocks { record.written_unix_ns as i64 - record.written_ns as i64 } else { 0 };
        let move_to = |time: &mut u64| {
            if *time != 0 {
                *time = time.saturating_add_signed(shift);
            }
        };
        move_to(&mut record.written_ns);
        for operation in &mut record.records {
            move_to(&mut operation.enqueued_ns);
            move_to(&mut operation.started_ns);
            move_to(&mut operation.ended_ns);
        }
    }
    let times = ranks.values().flat_map(|record| {
        record.records.iter().map(|operation| operation.enqueued_ns).chain([record.written_ns])
    });
    let start = times.min().unwrap_or(0);
    Merged { name, backend, world_size, ranks, start, different_clocks }
}

impl Merged {
    /// Ranks without a record.
    pub fn absent(&self) -> Vec<usize> {
        (0..self.world_size).filter(|rank| !self.ranks.contains_key(rank)).collect()
    }

    /// Each rank's record of a collective.
    pub fn collective(&self, sequence: u64) -> BTreeMap<usize, &Operation> {
        let of = |record: &'_ FlightRecord| -> Option<usize> {
            record.records.iter().rposition(|o| !o.is_message() && o.sequence == sequence)
        };
        self.ranks.iter().filter_map(|(rank, record)| Some((*rank, &record.records[of(record)?]))).collect()
    }

    /// When the last of the records was written.
    pub fn end(&self) -> u64 {
        self.ranks.values().map(|record| record.written_ns).max().unwrap_or(self.start)
    }
}

/// A rank's last collective.
pub fn last_collective(record: &FlightRecord) -> Option<&Operation> {
    // Later calls were refused, because the communicator had failed.
    let collectives = || record.records.iter().filter(|operation| !operation.is_message());
    let failed = collectives().position(|operation| operation.state == State::Failed);
    match failed {
        Some(index) => collectives().nth(index),
        None => collectives().next_back(),
    }
}
