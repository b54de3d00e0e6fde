//! The timeline in Chrome's trace format, which Perfetto reads: a process for each rank, a thread for each
//! communicator. Messages overlap, and are asynchronous events. Of many ranks, a host's first rank stands for those of its host.

use super::merge::Merged;
use super::record::{Operation, State};
use super::{diagnosis, fold};
use serde_json::{Value, json};

/// The events of a timeline as text: each is a few hundred bytes as a [`Value`], and there may be a hundred thousand.
struct Events(Vec<u8>);

impl Events {
    fn new() -> Events {
        Events(br#"{"displayTimeUnit":"ns","traceEvents":["#.to_vec())
    }

    fn push(&mut self, event: Value) {
        if self.0.last() != Some(&b'[') {
            self.0.push(b',');
        }
        self.0.extend_from_slice(event.to_string().as_bytes());
    }

    fn end(mut self) -> Vec<u8> {
        self.0.extend_from_slice(b"]}");
        self.0
    }
}

/// All communicators in one timeline, as JSON.
pub fn export(merged: &[Merged]) -> Vec<u8> {
    let start = merged.iter().map(|merged| merged.start).min().unwrap_or(0);
    let mut events = Events::new();
    for (thread, merged) in merged.iter().enumerate() {
        let end = merged.end();
        let shown = fold::shown(merged, &diagnosis::find(merged));
        for fold::Row { rank, host } in fold::rows(merged, &shown, usize::MAX) {
            let record = &merged.ranks[&rank];
            // The process tells rank 0 of one communicator from rank 0 of another.
            let id = process_id(record.process, rank);
            let label = format!("{}, process {} on {}", record.program, record.process, record.host);
            let process_name = match host {
                None => format!("rank {rank}"),
                Some((host, ranks)) => format!("{ranks} ranks on {host}: rank {rank}"),
            };
            if thread == 0 {
                events.push(
                    json!({"ph": "M", "name": "process_name", "pid": id, "args": {"name": process_name}}),
                );
                events
                    .push(json!({"ph": "M", "name": "process_labels", "pid": id, "args": {"labels": label}}));
                events.push(
                    json!({"ph": "M", "name": "process_sort_index", "pid": id, "args": {"sort_index": rank}}),
                );
            }
            let name = format!("{} (rank {rank})", merged.name);
            events.push(
                json!({"ph": "M", "name": "thread_name", "pid": id, "tid": thread, "args": {"name": name}}),
            );
            for (number, operation) in record.records.iter().enumerate() {
                let event_id = format!("{}.{rank}.{number}", merged.name);
                add(&mut events, operation, id, thread, &event_id, start, end);
            }
        }
    }
    events.end()
}

/// Combines process and rank: thread ranks share a process id, and ranks of different hosts may.
fn process_id(process: u32, rank: usize) -> u64 {
    u64::from(process) << 20 | rank as u64
}

fn add(
    events: &mut Events,
    operation: &Operation,
    id: u64,
    thread: usize,
    event_id: &str,
    start: u64,
    end: u64,
) {
    let micros = |time: u64| time.saturating_sub(start) as f64 / 1000.0;
    let begin = if operation.started_ns == 0 { operation.enqueued_ns } else { operation.started_ns };
    let over = if operation.ended_ns == 0 { end.max(begin) } else { operation.ended_ns.max(begin) };
    let name = match operation.state {
        State::Completed => operation.operation.clone(),
        State::Failed => format!("{} (failed)", operation.operation),
        State::Started => format!("{} (not over)", operation.operation),
        State::Enqueued => format!("{} (not begun)", operation.operation),
    };
    let args = json!({
        "call": operation.describe(),
        "number": operation.sequence,
        "tag": operation.tag,
        "waited_us": begin.saturating_sub(operation.enqueued_ns) as f64 / 1000.0,
    });
    if operation.is_message() {
        events.push(json!({"ph": "b", "cat": "message", "name": name, "pid": id, "tid": thread, "id": event_id, "ts": micros(begin), "args": args}));
        events.push(json!({"ph": "e", "cat": "message", "name": name, "pid": id, "tid": thread, "id": event_id, "ts": micros(over)}));
    } else {
        let duration = (over - begin) as f64 / 1000.0;
        events.push(json!({"ph": "X", "cat": "collective", "name": name, "pid": id, "tid": thread, "ts": micros(begin), "dur": duration, "args": args}));
    }
}
