//! The plan as a table of at most 100 characters. Lines that start with # say where it comes from.

use super::held_out::HeldOut;
use super::ranks_on;
use super::report::{Place, Report, Row};
use super::terms::Term;
use crate::perf::export::text::{comment, number};
use std::fmt::Write;

pub fn write(report: &Report) -> String {
    let mut out = Vec::new();
    for line in heads(report) {
        comment(&mut out, &line).expect("memory can be written");
    }
    let mut out = String::from_utf8(out).expect("made of texts");
    for place in &report.places {
        out += "#\n";
        out += &table(place);
    }
    out
}

fn heads(report: &Report) -> Vec<String> {
    let [first, last] = &report.days;
    let days = if first == last { first.clone() } else { format!("{first} to {last}") };
    let mut lines = vec![
        format!(
            "phalanx {} plan: {} points of {} runs ({days}), backend {}, CPU: {}",
            report.version,
            report.points.len(),
            report.runs,
            report.backend,
            report.cpu
        ),
        format!(
            "core: calls {}, copies {}, reductions {}",
            time(report, Term::Call),
            bandwidth(report, Term::Copied),
            bandwidth(report, Term::Reduced)
        ),
        level(report, "host", [Term::HostWait, Term::HostTurn, Term::HostMessage, Term::HostByte]),
        level(report, "switch", [Term::SwitchWait, Term::SwitchTurn, Term::SwitchMessage, Term::SwitchByte]),
    ];
    lines.push(error("points left out", report.held_out));
    lines.push(error("numbers of ranks left out", report.held_out_places));
    lines.extend(report.notes.iter().cloned());
    lines
}

fn level(report: &Report, name: &str, [wait, turn, message, byte]: [Term; 4]) -> String {
    if report.constant(byte).is_none() {
        return format!("{name}: in no run");
    }
    format!(
        "{name}: latency {}; of ranks that share a core, a turn {}; messages {}; bandwidth {}",
        time(report, wait),
        time(report, turn),
        time(report, message),
        bandwidth(report, byte)
    )
}

fn time(report: &Report, term: Term) -> String {
    known(report, term, |time| format!("{time:.2} us"))
}

fn bandwidth(report: &Report, term: Term) -> String {
    known(report, term, |time| format!("{:.2} GB/s", 1e-3 / time))
}

fn known(report: &Report, term: Term, text: impl Fn(f64) -> String) -> String {
    match report.constant(term) {
        None => "in no run".to_owned(),
        Some(time) if time < 1e-9 => "too small to be seen".to_owned(),
        Some(time) => text(time),
    }
}

fn error(what: &str, error: Option<HeldOut>) -> String {
    match error {
        None => format!("Error on {what}: too few points to say"),
        Some(HeldOut { points, median, p90 }) => format!(
            "Error on {what}: median {:.0} %, nine of ten within {:.0} % ({points} points)",
            median * 100.0,
            p90 * 100.0
        ),
    }
}

fn table(place: &Place) -> String {
    let mut out = format!("# {} of {} cores", ranks_on(place.ranks, place.hosts), place.cores);
    if let Some(seconds) = place.start_seconds {
        let _ = write!(out, "; start {seconds:.2} s (simulated)");
    }
    out += "\n";
    for [size, count, kind, algorithm, time, algbw, busbw, core, host, switch] in [
        ["size", "count", "type", "algorithm", "time", "algbw", "busbw", "core", "host", "switch"],
        ["(B)", "(elements)", "", "", "(us)", "(GB/s)", "(GB/s)", "(us)", "(us)", "(us)"],
    ] {
        let _ = writeln!(
            out,
            "# {size:>9} {count:>10} {kind:>6} {algorithm:>13} {time:>9} {algbw:>7} {busbw:>7} {core:>9} {host:>9} {switch:>9}"
        );
    }
    place.rows.iter().for_each(|row| line(&mut out, row));
    out
}

fn line(out: &mut String, row: &Row) {
    let Row { size, count, dtype, algorithm, .. } = row;
    let [time, core, host, switch] =
        [row.time, row.core, row.host, row.switch].map(|time| number(Some(time), 9));
    let [algbw, busbw] = [row.algbw, row.busbw].map(|bandwidth| number(bandwidth, 7));
    let _ = writeln!(
        out,
        "{size:>11} {count:>10} {dtype:>6} {algorithm:>13} {time:>9} {algbw:>7} {busbw:>7} {core:>9} {host:>9} {switch:>9}"
    );
}
