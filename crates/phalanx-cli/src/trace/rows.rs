//! The rows of a timeline: a rank each, or a host each where there are many. A rank at fault has a row even without a record.

use super::diagnosis::Finding;
use super::fold;
use super::merge::Merged;
use super::record::Operation;
use std::collections::BTreeSet;

/// The most ranks at fault without a record that get a row.
const MAX_ABSENT: usize = 16;
/// Characters of a host's name.
const MAX_NAME: usize = 8;

/// A rank's operations. Of many ranks, a host's first rank stands for those of its host.
pub struct Row<'a> {
    pub rank: usize,
    pub name: String,
    pub operations: &'a [Operation],
    pub written_ns: u64,
    pub has_record: bool,
    pub is_at_fault: bool,
}

/// A communicator's rows, each with the last operations of its rank.
pub fn rows<'a>(merged: &'a Merged, findings: &[Finding], last: usize) -> Vec<Row<'a>> {
    let at_fault: BTreeSet<usize> = findings.iter().flat_map(|finding| &finding.ranks).copied().collect();
    let absent = merged.absent().into_iter().filter(|rank| at_fault.contains(rank)).take(MAX_ABSENT);
    let absent = absent.map(|rank| Row {
        rank,
        name: format!("rank {rank}"),
        operations: &[],
        written_ns: 0,
        has_record: false,
        is_at_fault: true,
    });
    let shown = fold::shown(merged, findings);
    let recorded = fold::rows(merged, &shown, fold::MAX_HOSTS).into_iter().map(|fold::Row { rank, host }| {
        let record = &merged.ranks[&rank];
        let shown = record.records.len().saturating_sub(last);
        let name = match host {
            None => format!("rank {rank}"),
            Some((host, ranks)) => format!("{} ×{ranks}", host.chars().take(MAX_NAME).collect::<String>()),
        };
        Row {
            rank,
            name,
            operations: &record.records[shown..],
            written_ns: record.written_ns,
            has_record: true,
            is_at_fault: at_fault.contains(&rank),
        }
    });
    let mut rows: Vec<Row<'_>> = recorded.chain(absent).collect();
    rows.sort_unstable_by_key(|row| row.rank);
    rows
}
