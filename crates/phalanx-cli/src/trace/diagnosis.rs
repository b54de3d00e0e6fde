//! Finds the ranks at fault: the ones that the communicator's failure names, or else the ones whose calls
//! differ.

use super::merge::{Merged, last_collective};
use super::record::{Failure, FlightRecord, Operation, State};
use super::text;
use super::waits::{self, Wait, Waits};
use std::collections::BTreeMap;

/// A rank is slower if the others waited this share of the time for it alone.
const SLOW_SHARE: f64 = 0.05;

/// Operations of all ranks that must be compared before a rank is called slower.
const MIN_COMPARED: u64 = 8;

/// Ranks, at most, that a finding describes one by one.
const MAX_DESCRIBED: usize = 8;

/// Operations before the last common one in which different calls are searched for.
const SEARCHED: u64 = 16;

/// A call that failed within this time, in nanoseconds, was made after the communicator had failed.
const REFUSAL: u64 = 1_000_000;

/// A reason why the others waited.
#[derive(Debug, PartialEq)]
pub struct Finding {
    /// The ranks at fault; empty if none is.
    pub ranks: Vec<usize>,
    /// `missing`, `different call`, `slower`, or what happened to the rank.
    pub what: String,
    /// The evidence, as text.
    pub why: String,
}

impl Finding {
    /// `Rank 1: missing`.
    pub fn verdict(&self) -> String {
        let ranks = text::ranks(&self.ranks);
        let mut chars = ranks.chars();
        let ranks: String =
            chars.next().map(|first| first.to_uppercase().chain(chars).collect()).unwrap_or_default();
        format!("{ranks}: {}", self.what)
    }
}

/// Finds the ranks at fault, and a rank that is slower than the others.
pub fn find(merged: &Merged) -> Vec<Finding> {
    let failure = merged.ranks.values().find_map(|record| record.error.as_ref());
    let fault = match failure {
        Some(failure) => Some(from_failure(merged, failure)),
        None => different(merged, None).or_else(|| behind(merged)).or_else(|| unanswered(merged)),
    };
    fault.into_iter().chain(slower(merged)).collect()
}

fn from_failure(merged: &Merged, failure: &Failure) -> Finding {
    match failure.kind.as_str() {
        "mismatch" => different(merged, Some(failure.sequence)).unwrap_or_else(|| Finding {
            ranks: failure.ranks.clone(),
            what: "different call".into(),
            why: failure.text.clone(),
        }),
        "timeout" => {
            let why = format!(
                "the others waited in {} (operation number {}); {}",
                failure.operation,
                failure.sequence,
                activities(merged, &failure.ranks)
            );
            Finding { ranks: failure.ranks.clone(), what: "missing".into(), why }
        }
        kind => Finding { ranks: failure.ranks.clone(), what: kind.into(), why: failure.text.clone() },
    }
}

/// The activities of the first of these ranks.
fn activities(merged: &Merged, ranks: &[usize]) -> String {
    let described = ranks.iter().take(MAX_DESCRIBED);
    described.map(|rank| format!("rank {rank} {}", activity(merged, *rank))).collect::<Vec<_>>().join("; ")
}

/// What a rank was doing when its record was written.
fn activity(merged: &Merged, rank: usize) -> String {
    let Some(record) = merged.ranks.get(&rank) else {
        return "has left no record: it was killed, is stopped, or has not noticed".into();
    };
    // A communicator that has failed refuses every call at once.
    let failed = record.records.iter().position(|operation| operation.state == State::Failed);
    let refused = failed.filter(|index| {
        let operation = &record.records[*index];
        operation.ended_ns.saturating_sub(operation.enqueued_ns) < REFUSAL
    });
    if let (Some(index), Some(before)) = (refused, refused.and_then(|index| index.checked_sub(1))) {
        let (late, before) = (&record.records[index], &record.records[before]);
        return format!(
            "had completed {} (number {}), and called {} (number {}) {} later",
            before.describe(),
            before.sequence,
            late.describe(),
            late.sequence,
            text::time(late.enqueued_ns.saturating_sub(before.ended_ns))
        );
    }
    match failed.map(|index| &record.records[index]).or(record.records.last()) {
        None => "has made no call".into(),
        Some(last) if last.state == State::Completed => format!(
            "had completed {} (number {}) {} before its record was written, and called nothing since",
            last.describe(),
            last.sequence,
            text::time(record.written_ns.saturating_sub(last.ended_ns))
        ),
        Some(last) => {
            let over = if last.ended_ns == 0 { record.written_ns } else { last.ended_ns };
            format!(
                "was in {} (number {}) for {}",
                last.describe(),
                last.sequence,
                text::time(over.saturating_sub(last.started_ns.max(last.enqueued_ns)))
            )
        }
    }
}

/// The minority of ranks that made a different call with the same sequence number: this one, or any of the
/// last common ones.
fn different(merged: &Merged, sequence: Option<u64>) -> Option<Finding> {
    let sequences = match sequence {
        Some(sequence) => vec![sequence],
        None => {
            let last = |record: &FlightRecord| last_collective(record).map(|last| last.sequence);
            let common = merged.ranks.values().filter_map(last).min()?;
            (common.saturating_sub(SEARCHED).max(1)..=common).collect()
        }
    };
    sequences.into_iter().find_map(|sequence| {
        let calls = merged.collective(sequence);
        let mut groups: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for (rank, operation) in &calls {
            groups.entry(operation.signature()).or_default().push(*rank);
        }
        if groups.len() < 2 {
            return None;
        }
        let mut groups: Vec<(String, Vec<usize>)> = groups.into_iter().collect();
        groups.sort_unstable_by_key(|(_, ranks)| (ranks.len(), std::cmp::Reverse(ranks[0])));
        let (_, most) = groups.last()?;
        // Of two groups of the same size, either may be wrong.
        let is_tie = groups[0].1.len() == most.len();
        let calls = groups.iter().rev().map(|(call, ranks)| format!("{} called {call}", text::ranks(ranks)));
        let why = format!("operation number {sequence}: {}", calls.collect::<Vec<_>>().join(", "));
        let minority = if is_tie { &groups[..] } else { &groups[..groups.len() - 1] };
        let mut ranks: Vec<usize> = minority.iter().flat_map(|(_, ranks)| ranks).copied().collect();
        ranks.sort_unstable();
        Some(Finding { ranks, what: "different call".into(), why })
    })
}

/// Ranks that have not made the call in which others wait.
fn behind(merged: &Merged) -> Option<Finding> {
    let begun = |record: &FlightRecord| {
        let collectives = record.records.iter().filter(|o| !o.is_message() && o.state != State::Enqueued);
        collectives.map(|operation| operation.sequence).max()
    };
    let started = |record: &'_ FlightRecord| -> Option<usize> {
        record.records.iter().rposition(|o| !o.is_message() && o.state == State::Started)
    };
    let waiting = merged
        .ranks
        .values()
        .filter_map(|record| Some(&record.records[started(record)?]))
        .max_by_key(|operation| operation.sequence)?;
    let sequence = waiting.sequence;
    let reached = |record: &FlightRecord| begun(record) >= Some(sequence);
    let mut missing = merged.absent();
    missing.extend(merged.ranks.iter().filter(|(_, record)| !reached(record)).map(|(rank, _)| *rank));
    missing.sort_unstable();
    if missing.is_empty() {
        return None;
    }
    let since = merged.end().saturating_sub(waiting.enqueued_ns);
    let why = format!(
        "others have been waiting in {} (operation number {sequence}) for {}; {}",
        waiting.describe(),
        text::time(since),
        activities(merged, &missing)
    );
    Some(Finding { ranks: missing, what: "missing".into(), why })
}

/// Ranks that have not posted the counterpart of another rank's send or receive.
fn unanswered(merged: &Merged) -> Option<Finding> {
    let mut ranks = Vec::new();
    let mut waits = Vec::new();
    for (rank, record) in &merged.ranks {
        for operation in record.records.iter().filter(|o| o.is_message() && o.is_under_way()) {
            let peer = operation.peer?;
            let counterpart = if operation.operation == "send" { "recv" } else { "send" };
            let posted = merged.ranks.get(&peer).is_some_and(|other| {
                other.records.iter().any(|o| {
                    o.operation == counterpart && o.peer == Some(*rank) && o.sequence >= operation.sequence
                })
            });
            if !posted {
                ranks.push(peer);
                waits.push(format!(
                    "rank {rank} waits in {} (number {} between the two), and rank {peer} {}",
                    operation.describe(),
                    operation.sequence,
                    activity(merged, peer)
                ));
            }
        }
    }
    ranks.sort_unstable();
    ranks.dedup();
    waits.truncate(MAX_DESCRIBED);
    let is_waiting = |rank: &usize| {
        merged.ranks.get(rank).is_some_and(|record| record.records.iter().any(Operation::is_under_way))
    };
    // A rank that waits for nothing itself is the one that holds the others up.
    let (waiting, others): (Vec<usize>, Vec<usize>) = ranks.into_iter().partition(is_waiting);
    let (ranks, what) = match others.is_empty() {
        true => (waiting, "waiting for each other"),
        false => (others, "missing"),
    };
    (!ranks.is_empty()).then(|| Finding { ranks, what: what.into(), why: waits.join("; ") })
}

/// The rank that cost the others most time by coming last, if that is a good part of the whole.
fn slower(merged: &Merged) -> Option<Finding> {
    let Waits { compared, span, ranks } = waits::find(merged)?;
    let (rank, Wait { last, cost, .. }) = ranks.into_iter().max_by_key(|(_, wait)| wait.cost)?;
    let share = cost as f64 / span.max(1) as f64;
    (compared >= MIN_COMPARED && share >= SLOW_SHARE).then(|| Finding {
        ranks: vec![rank],
        what: "slower".into(),
        why: format!(
            "rank {rank} came last to {last} of {compared} operations, and the others waited {} of {} for it alone",
            text::time(cost),
            text::time(span)
        ),
    })
}
