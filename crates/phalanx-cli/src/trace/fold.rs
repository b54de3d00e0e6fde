//! A communicator of many ranks, by hosts: who is shown one by one, and what the others have in common.

use super::diagnosis::Finding;
use super::merge::Merged;
use super::record::{FlightRecord, State};
use std::collections::{BTreeMap, BTreeSet};

/// With more records than this, only ranks at fault are shown one by one.
pub const MANY: usize = 64;
/// The most ranks at fault that are.
const MAX_AT_FAULT: usize = 16;
/// The most hosts that have a row of the picture.
pub const MAX_HOSTS: usize = 48;
/// The most groups of ranks that are told.
const MAX_GROUPS: usize = 16;

/// Whether a communicator is shown by hosts.
pub fn is_folded(merged: &Merged) -> bool {
    merged.ranks.len() > MANY
}

/// The ranks that are shown one by one.
pub fn shown(merged: &Merged, findings: &[Finding]) -> BTreeSet<usize> {
    match is_folded(merged) {
        false => merged.ranks.keys().copied().collect(),
        true => findings.iter().flat_map(|finding| &finding.ranks).copied().take(MAX_AT_FAULT).collect(),
    }
}

/// Whom a row of a timeline is for.
pub struct Row<'a> {
    /// The rank whose operations it has.
    pub rank: usize,
    /// The host whose ranks it stands for, and their number. `None`: the rank alone.
    pub host: Option<(&'a str, usize)>,
}

/// The rows of a timeline, in the order of ranks: of many ranks, the first of a host stands for those of its host that are not shown.
/// The first `max_hosts` hosts have one.
pub fn rows<'a>(merged: &'a Merged, shown: &BTreeSet<usize>, max_hosts: usize) -> Vec<Row<'a>> {
    let hosts = hosts(merged, shown).into_iter().take(max_hosts);
    let hosts = hosts.map(|(host, ranks)| Row { rank: ranks[0], host: Some((host, ranks.len())) });
    let alone = shown.iter().filter(|rank| merged.ranks.contains_key(rank));
    let alone = alone.map(|rank| Row { rank: *rank, host: None });
    let mut rows: Vec<Row<'_>> = alone.chain(hosts).collect();
    rows.sort_unstable_by_key(|row| row.rank);
    rows
}

/// The ranks of each host, without those that are shown, in the order of their first ranks.
fn hosts<'a>(merged: &'a Merged, shown: &BTreeSet<usize>) -> Vec<(&'a str, Vec<usize>)> {
    let mut hosts: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (rank, record) in merged.ranks.iter().filter(|(rank, _)| !shown.contains(rank)) {
        hosts.entry(&record.host).or_default().push(*rank);
    }
    let mut hosts: Vec<_> = hosts.into_iter().collect();
    hosts.sort_unstable_by_key(|(_, ranks)| ranks[0]);
    hosts
}

/// What ranks that did the same have in common, the largest group first: a line for each.
pub fn groups(merged: &Merged, shown: &BTreeSet<usize>) -> Vec<String> {
    let mut groups: BTreeMap<String, Vec<&FlightRecord>> = BTreeMap::new();
    for (_, record) in merged.ranks.iter().filter(|(rank, _)| !shown.contains(rank)) {
        groups.entry(last(record)).or_default().push(record);
    }
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by_key(|(_, records)| std::cmp::Reverse(records.len()));
    let more = groups.len().saturating_sub(MAX_GROUPS);
    let lines = groups.iter().take(MAX_GROUPS).map(|(last, records)| {
        let hosts: BTreeSet<&str> = records.iter().map(|record| record.host.as_str()).collect();
        let some: Vec<&str> = hosts.iter().take(3).copied().collect();
        let dots = if hosts.len() > some.len() { ", …" } else { "" };
        let (ranks, number) = (records.len(), hosts.len());
        format!("{ranks} ranks on {number} hosts ({}{dots}): {last}", some.join(", "))
    });
    lines.chain((more > 0).then(|| format!("and {more} smaller groups"))).collect()
}

fn last(record: &FlightRecord) -> String {
    let made = record.made;
    let Some(last) = record.records.last() else {
        return format!("operations: {made}");
    };
    let state = match last.state {
        State::Enqueued => "waiting for its turn",
        State::Started => "under way",
        State::Completed => "completed",
        State::Failed => "FAILED",
    };
    format!("operations: {made}, the last {} {state}", last.describe())
}
