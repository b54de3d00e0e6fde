//! Which rank it was: from the verdict if there is one, else from what the ranks were doing when they were asked.

use super::merge::{Merged, last_collective};
use super::record::{FlightRecord, Operation, State, Verdict};
use std::collections::BTreeMap;

/// A rank that comes last has cost the others at least this share of the time before it is called slow.
const SLOW: f64 = 0.05;

/// Of so many ranks at the most it is told what each was doing.
const SAID: usize = 8;

/// A call that fails sooner, in nanoseconds, was made after the communicator had failed.
const REFUSED: u64 = 1_000_000;

/// What was found.
#[derive(Debug, PartialEq)]
pub struct Finding {
    /// The ranks at fault; empty if none is.
    pub ranks: Vec<usize>,
    /// `missing`, `different call`, `slower`, or what happened to the rank.
    pub what: String,
    /// In words.
    pub why: String,
}

/// Names the culprit, and if none is at fault, whoever is slower.
pub fn find(merged: &Merged) -> Vec<Finding> {
    let verdict = merged.ranks.values().find_map(|record| record.error.as_ref());
    let fault = match verdict {
        Some(verdict) => Some(from_verdict(merged, verdict)),
        None => different(merged, None).or_else(|| behind(merged)).or_else(|| unanswered(merged)),
    };
    fault.into_iter().chain(slower(merged)).collect()
}

fn from_verdict(merged: &Merged, verdict: &Verdict) -> Finding {
    match verdict.kind.as_str() {
        "mismatch" => different(merged, Some(verdict.sequence)).unwrap_or_else(|| Finding {
            ranks: verdict.ranks.clone(),
            what: "different call".into(),
            why: verdict.text.clone(),
        }),
        "timeout" => {
            let doing =
                verdict.ranks.iter().take(SAID).map(|rank| format!("rank {rank} {}", doing(merged, *rank)));
            Finding {
                ranks: verdict.ranks.clone(),
                what: "missing".into(),
                why: format!(
                    "the others waited in {} (operation number {}); {}",
                    verdict.operation,
                    verdict.sequence,
                    doing.collect::<Vec<_>>().join("; ")
                ),
            }
        }
        kind => Finding { ranks: verdict.ranks.clone(), what: kind.into(), why: verdict.text.clone() },
    }
}

/// What a rank was doing when its record was written.
fn doing(merged: &Merged, rank: usize) -> String {
    let Some(record) = merged.ranks.get(&rank) else {
        return "has left no record: it was killed, is stopped, or has not noticed".into();
    };
    // What is called after a failure is refused at once.
    let failed = record.records.iter().position(|operation| operation.state == State::Failed);
    let refused = failed.filter(|index| {
        let operation = &record.records[*index];
        operation.ended_ns.saturating_sub(operation.enqueued_ns) < REFUSED
    });
    if let (Some(index), Some(before)) = (refused, refused.and_then(|index| index.checked_sub(1))) {
        let (late, before) = (&record.records[index], &record.records[before]);
        return format!(
            "had completed {} (number {}), and called {} (number {}) {} later",
            before.describe(),
            before.sequence,
            late.describe(),
            late.sequence,
            time(late.enqueued_ns.saturating_sub(before.ended_ns))
        );
    }
    match failed.map(|index| &record.records[index]).or(record.records.last()) {
        None => "has made no call".into(),
        Some(last) if last.state == State::Completed => format!(
            "had completed {} (number {}) {} before its record was written, and called nothing since",
            last.describe(),
            last.sequence,
            time(record.written_ns.saturating_sub(last.ended_ns))
        ),
        Some(last) => {
            let over = if last.ended_ns == 0 { record.written_ns } else { last.ended_ns };
            format!(
                "was in {} (number {}) for {}",
                last.describe(),
                last.sequence,
                time(over.saturating_sub(last.started_ns.max(last.enqueued_ns)))
            )
        }
    }
}

/// Ranks that called something else under the same number: the fewer ones. `None` if all are alike.
fn different(merged: &Merged, sequence: Option<u64>) -> Option<Finding> {
    let sequences = match sequence {
        Some(sequence) => vec![sequence],
        None => {
            let last = |record: &FlightRecord| last_collective(record).map(|last| last.sequence);
            let common = merged.ranks.values().filter_map(last).min()?;
            (common.saturating_sub(16).max(1)..=common).collect()
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
        groups.sort_by_key(|(_, ranks)| (ranks.len(), std::cmp::Reverse(ranks[0])));
        let (_, most) = groups.last()?;
        // Half against half: nobody can say which is right.
        let even = groups[0].1.len() == most.len();
        let said = groups.iter().rev().map(|(call, ranks)| format!("{} called {call}", name(ranks)));
        let why = format!("operation number {sequence}: {}", said.collect::<Vec<_>>().join(", "));
        let few = if even { &groups[..] } else { &groups[..groups.len() - 1] };
        let mut ranks: Vec<usize> = few.iter().flat_map(|(_, ranks)| ranks).copied().collect();
        ranks.sort_unstable();
        Some(Finding { ranks, what: "different call".into(), why })
    })
}

/// Ranks that have not called what others are waiting in.
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
    let said = missing.iter().take(SAID).map(|rank| format!("rank {rank} {}", doing(merged, *rank)));
    let since = merged.end().saturating_sub(waiting.enqueued_ns);
    let why = format!(
        "others have been waiting in {} (operation number {sequence}) for {}; {}",
        waiting.describe(),
        time(since),
        said.collect::<Vec<_>>().join("; ")
    );
    Some(Finding { ranks: missing, what: "missing".into(), why })
}

/// Ranks that others wait for a message from, or wait to be received by.
fn unanswered(merged: &Merged) -> Option<Finding> {
    let mut ranks = Vec::new();
    let mut said = Vec::new();
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
                said.push(format!(
                    "rank {rank} waits in {} (number {} between the two), and rank {peer} {}",
                    operation.describe(),
                    operation.sequence,
                    doing(merged, peer)
                ));
            }
        }
    }
    ranks.sort_unstable();
    ranks.dedup();
    said.truncate(SAID);
    let waits = |rank: &usize| {
        merged.ranks.get(rank).is_some_and(|record| record.records.iter().any(Operation::is_under_way))
    };
    // If somebody does something else it is that rank that holds the others up.
    let (waiting, others): (Vec<usize>, Vec<usize>) = ranks.into_iter().partition(waits);
    let (ranks, what) = match others.is_empty() {
        true => (waiting, "waiting for each other"),
        false => (others, "missing"),
    };
    (!ranks.is_empty()).then(|| Finding { ranks, what: what.into(), why: said.join("; ") })
}

/// The rank that comes last most often, if that takes a good part of the time.
fn slower(merged: &Merged) -> Option<Finding> {
    if merged.ranks.len() < 2 || merged.ranks.len() < merged.world_size || merged.different_clocks {
        return None;
    }
    let first = merged.ranks.values().next()?;
    let mut cost: BTreeMap<usize, (u64, u64)> = BTreeMap::new();
    let mut compared = 0u64;
    let mut span: Option<(u64, u64)> = None;
    for operation in first.records.iter().filter(|o| !o.is_message() && o.state == State::Completed) {
        let calls = merged.collective(operation.sequence);
        if calls.len() < merged.ranks.len() {
            continue;
        }
        compared += 1;
        let mut arrivals: Vec<(u64, usize)> = calls.iter().map(|(rank, o)| (o.enqueued_ns, *rank)).collect();
        arrivals.sort_unstable();
        let (last, before) = (arrivals[arrivals.len() - 1], arrivals[arrivals.len() - 2]);
        let entry = cost.entry(last.1).or_default();
        entry.0 += 1;
        entry.1 = entry.1.saturating_add(last.0 - before.0);
        let (begin, end) = span.unwrap_or((arrivals[0].0, last.0));
        span = Some((begin.min(arrivals[0].0), end.max(last.0)));
    }
    let (rank, (times, cost)) = cost.into_iter().max_by_key(|(_, (_, cost))| *cost)?;
    let (begin, end) = span?;
    let share = cost as f64 / (end - begin).max(1) as f64;
    (compared >= 8 && share >= SLOW).then(|| Finding {
        ranks: vec![rank],
        what: "slower".into(),
        why: format!(
            "rank {rank} came last to {times} of {compared} operations, and the others waited {} of {} for it alone",
            time(cost),
            time(end - begin)
        ),
    })
}

/// `rank 3`, `ranks 1, 2 and 5`.
pub fn name(ranks: &[usize]) -> String {
    let numbers: Vec<String> = ranks.iter().take(12).map(ToString::to_string).collect();
    match numbers.as_slice() {
        [] => "no rank".into(),
        [one] => format!("rank {one}"),
        _ if ranks.len() > numbers.len() => {
            format!("ranks {}, … ({} in all)", numbers.join(", "), ranks.len())
        }
        [others @ .., last] => format!("ranks {} and {last}", others.join(", ")),
    }
}

/// A time in its best unit.
pub fn time(nanos: u64) -> String {
    match nanos {
        0..1_000 => format!("{nanos} ns"),
        1_000..1_000_000 => format!("{:.1} µs", nanos as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", nanos as f64 / 1e6),
        _ => format!("{:.1} s", nanos as f64 / 1e9),
    }
}
