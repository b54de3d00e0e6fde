//! The records as one page of HTML that needs nothing else: a timeline that zooms, the verdict, and who waited for whom.

use super::diagnosis;
use super::merge::Merged;
use super::record::{FlightRecord, Operation, State};
use super::rows::{Row, rows};
use super::waits;
use anyhow::Result;
use serde::Serialize;

/// The page without its data, which take the place of this word.
const TEMPLATE: &str = include_str!("page.html");
const PLACE: &str = "PHALANX_DATA";

#[derive(Serialize)]
struct Page<'a> {
    version: &'a str,
    summary: &'a str,
    communicators: Vec<Communicator<'a>>,
}

#[derive(Serialize)]
struct Communicator<'a> {
    name: &'a str,
    ranks: usize,
    backend: &'a str,
    /// Ranks at fault and why.
    findings: Vec<(String, String)>,
    rows: Vec<Line<'a>>,
    /// Operations that were compared, and each rank's part in the waiting.
    compared: u64,
    waits: Vec<Waiting>,
}

/// A row of the timeline.
#[derive(Serialize)]
struct Line<'a> {
    name: String,
    place: String,
    fault: bool,
    record: bool,
    bars: Vec<Bar<'a>>,
}

/// An operation. Times are in microseconds since the communicator's first.
#[derive(Serialize)]
struct Bar<'a> {
    name: &'a str,
    call: String,
    number: u64,
    state: &'static str,
    message: bool,
    called: f64,
    begin: f64,
    end: f64,
}

/// Times are in milliseconds.
#[derive(Serialize)]
struct Waiting {
    rank: usize,
    last: u64,
    cost: f64,
    waited: f64,
}

/// Writes the page.
pub fn write(merged: &[Merged], summary: &str) -> Result<String> {
    let communicators = merged.iter().map(communicator).collect();
    let page = Page { version: env!("CARGO_PKG_VERSION"), summary, communicators };
    // Nothing in a name may end the script.
    let data = serde_json::to_string(&page)?.replace('<', "\\u003c");
    Ok(TEMPLATE.replace(PLACE, &data))
}

fn communicator(merged: &Merged) -> Communicator<'_> {
    let findings = diagnosis::find(merged);
    let rows = rows(merged, &findings, usize::MAX).into_iter().map(|row| line(merged, row)).collect();
    let waits = waits::find(merged);
    let compared = waits.as_ref().map_or(0, |waits| waits.compared);
    let millis = |nanos: u64| nanos as f64 / 1e6;
    let waits = waits.into_iter().flat_map(|waits| waits.ranks).map(|(rank, wait)| Waiting {
        rank,
        last: wait.last,
        cost: millis(wait.cost),
        waited: millis(wait.waited),
    });
    Communicator {
        name: &merged.name,
        ranks: merged.world_size,
        backend: &merged.backend,
        findings: findings.iter().map(|finding| (finding.verdict(), finding.why.clone())).collect(),
        rows,
        compared,
        waits: waits.collect(),
    }
}

fn line<'a>(merged: &'a Merged, row: Row<'a>) -> Line<'a> {
    let place =
        |record: &FlightRecord| format!("{}, process {} on {}", record.program, record.process, record.host);
    Line {
        name: row.name,
        place: merged.ranks.get(&row.rank).map(place).unwrap_or_default(),
        fault: row.is_at_fault,
        record: row.has_record,
        bars: row.operations.iter().map(|operation| bar(merged, operation, row.written_ns)).collect(),
    }
}

fn bar<'a>(merged: &Merged, operation: &'a Operation, written_ns: u64) -> Bar<'a> {
    let micros = |time: u64| time.saturating_sub(merged.start) as f64 / 1e3;
    let begin = if operation.started_ns == 0 { operation.enqueued_ns } else { operation.started_ns };
    let end = if operation.ended_ns == 0 { written_ns } else { operation.ended_ns };
    Bar {
        name: &operation.operation,
        call: operation.describe(),
        number: operation.sequence,
        state: match operation.state {
            State::Completed => "completed",
            State::Failed => "failed",
            State::Started => "not over",
            State::Enqueued => "not begun",
        },
        message: operation.is_message(),
        called: micros(operation.enqueued_ns),
        begin: micros(begin),
        end: micros(end.max(begin)),
    }
}
