//! Who waited for whom in the operations that all ranks made.

use super::merge::Merged;
use super::record::{Operation, State};
use std::collections::BTreeMap;

/// A rank's part in the waiting.
#[derive(Debug, Default, Clone, Copy)]
pub struct Wait {
    /// Operations to which it came last.
    pub last: u64,
    /// Nanoseconds that the others waited for it alone in these.
    pub cost: u64,
    /// Nanoseconds that it waited for the last rank, in all operations.
    pub waited: u64,
}

/// The waiting of all ranks.
pub struct Waits {
    /// Operations of all ranks that were compared.
    pub compared: u64,
    /// Nanoseconds from the first of them to the end of the last.
    pub span: u64,
    pub ranks: BTreeMap<usize, Wait>,
}

/// `None` without a record of every rank, or without an operation that all completed.
pub fn find(merged: &Merged) -> Option<Waits> {
    if merged.ranks.len() < 2 || merged.ranks.len() < merged.world_size {
        return None;
    }
    // Clocks that differ cannot be compared. But an operation in which all wait for all ends everywhere at about one time.
    let arrival = |operation: &Operation| match merged.different_clocks {
        false => operation.enqueued_ns as i64,
        true => operation.enqueued_ns as i64 - operation.ended_ns as i64,
    };
    let is_comparable = |operation: &Operation| !merged.different_clocks || operation.waits_for_all();
    let first = merged.ranks.values().next()?;
    let mut ranks: BTreeMap<usize, Wait> = BTreeMap::new();
    let mut compared = 0;
    let mut span: Option<(u64, u64)> = None;
    let completed = first.records.iter().filter(|o| !o.is_message() && o.state == State::Completed);
    for operation in completed.filter(|o| is_comparable(o)) {
        let calls = merged.collective(operation.sequence);
        if calls.len() < merged.ranks.len() {
            continue;
        }
        compared += 1;
        let mut arrivals: Vec<(i64, usize)> = calls.iter().map(|(rank, o)| (arrival(o), *rank)).collect();
        arrivals.sort_unstable();
        let (last, before) = (arrivals[arrivals.len() - 1], arrivals[arrivals.len() - 2]);
        for (at, rank) in &arrivals {
            let wait = ranks.entry(*rank).or_default();
            wait.waited = wait.waited.saturating_add(last.0.abs_diff(*at));
        }
        let wait = ranks.entry(last.1).or_default();
        wait.last += 1;
        wait.cost = wait.cost.saturating_add(last.0.abs_diff(before.0));
        let (begin, end) = span.unwrap_or((operation.enqueued_ns, operation.ended_ns));
        span = Some((begin.min(operation.enqueued_ns), end.max(operation.ended_ns)));
    }
    let (begin, end) = span?;
    Some(Waits { compared, span: end - begin, ranks })
}
