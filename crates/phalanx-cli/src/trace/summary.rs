//! The summary as text: each communicator, the ranks at fault and why, and every rank's last operations.

use super::diagnosis;
use super::fold;
use super::merge::Merged;
use super::record::{FlightRecord, Operation, State};
use super::text::{self, time};
use std::fmt::Write;

/// The summary of all communicators.
pub fn write(merged: &[Merged], last: usize) -> String {
    let parts: Vec<String> = merged.iter().map(|merged| one(merged, last)).collect();
    parts.join("\n")
}

fn one(merged: &Merged, last: usize) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = header(&mut out, merged);
    let findings = diagnosis::find(merged);
    for finding in &findings {
        let _ = writeln!(out, "\n  {}\n    {}", finding.verdict(), finding.why);
    }
    let shown = fold::shown(merged, &findings);
    for (rank, record) in merged.ranks.iter().filter(|(rank, _)| shown.contains(rank)) {
        let _ = one_rank(&mut out, merged, *rank, record, last);
    }
    if fold::is_folded(merged) {
        out.push('\n');
        for group in fold::groups(merged, &shown) {
            let _ = writeln!(out, "  {group}");
        }
    }
    out
}

fn header(out: &mut String, merged: &Merged) -> std::fmt::Result {
    let Merged { name: communicator, backend, world_size, ranks, .. } = merged;
    writeln!(
        out,
        "communicator {communicator}: {world_size} ranks, backend {backend}, {} records",
        ranks.len()
    )?;
    let absent = merged.absent();
    if !absent.is_empty() {
        writeln!(out, "  no record of {}", text::ranks(&absent))?;
    }
    if merged.different_clocks {
        writeln!(out, "  the hosts' wall clocks put the times in order: do not trust small differences")?;
    }
    let errors = ranks.values().filter_map(|record| record.error.as_ref());
    if let Some(error) = errors.into_iter().next() {
        writeln!(out, "  failed: {}", error.text)?;
    }
    Ok(())
}

fn one_rank(
    out: &mut String,
    merged: &Merged,
    rank: usize,
    record: &FlightRecord,
    last: usize,
) -> std::fmt::Result {
    let FlightRecord { host, process, program, made, lost, reason, .. } = record;
    writeln!(
        out,
        "\n  rank {rank}: {program}, process {process} on {host}; operations: {made}; written on {reason}"
    )?;
    if *lost > 0 {
        writeln!(out, "    the first {lost} are no longer known")?;
    }
    let shown = record.records.len().saturating_sub(last);
    for operation in &record.records[shown..] {
        writeln!(out, "    {}", line(merged, record, operation))?;
    }
    Ok(())
}

fn line(merged: &Merged, record: &FlightRecord, operation: &Operation) -> String {
    let at = (operation.enqueued_ns.saturating_sub(merged.start)) as f64 / 1e6;
    let how = match operation.state {
        State::Completed => time(operation.ended_ns.saturating_sub(operation.started_ns)),
        State::Failed => {
            format!("FAILED after {}", time(operation.ended_ns.saturating_sub(operation.enqueued_ns)))
        }
        State::Started => {
            format!("under way since {}", time(record.written_ns.saturating_sub(operation.started_ns)))
        }
        State::Enqueued => {
            format!(
                "waiting for its turn since {}",
                time(record.written_ns.saturating_sub(operation.enqueued_ns))
            )
        }
    };
    let waited = operation.started_ns.saturating_sub(operation.enqueued_ns);
    let waited = if waited > 0 { format!(", {} after its call", time(waited)) } else { String::new() };
    format!("{at:>12.3} ms  {:>6}  {}  {how}{waited}", operation.sequence, operation.describe())
}
