//! Compares a run with a saved one.
//!
//! Rows are matched by size, type, reduction and root. A row without a match has no ratio.

use super::operation::{Operation, Place};
use super::report::{Report, Row};
use anyhow::{Result, ensure};
use std::path::Path;

/// A run saved with `--json`.
#[derive(Debug, Clone)]
pub struct Saved {
    pub report: Report,
    pub path: String,
}

impl Saved {
    /// Reads a saved run of this operation.
    pub fn load(path: &Path, operation: Operation) -> Result<Saved> {
        let report = Report::load(path)?;
        let theirs = report.options.operation;
        ensure!(
            theirs == operation,
            "{} is a run of {}, which {} cannot be compared with",
            path.display(),
            theirs.name(),
            operation.name()
        );
        Ok(Saved { report, path: path.display().to_string() })
    }

    /// The time now divided by the saved time; below 1 is faster now.
    pub fn ratio(&self, row: &Row, place: Place) -> Option<f64> {
        let now = row.measurement(place)?.time;
        let then = self.report.rows.iter().find(|saved| saved.matches(row))?.measurement(place)?.time;
        (then > 0.0).then(|| now / then)
    }

    /// Differences between the runs that may explain a ratio.
    pub fn differences(&self, now: &Report) -> Vec<String> {
        let then = &self.report;
        let mut differences = Vec::new();
        let mut differs = |what: &str, then: String, now: String| {
            if then != now {
                differences.push(format!("{what}: {then} then, {now} now"));
            }
        };
        differs("CPU", then.machine.cpu_name().to_owned(), now.machine.cpu_name().to_owned());
        differs("ranks", then.options.ranks.to_string(), now.options.ranks.to_string());
        let kind = |report: &Report| report.options.ranks_are.name().to_owned();
        differs("ranks are", kind(then), kind(now));
        differs("backend", then.options.backend.clone(), now.options.backend.clone());
        let memory = |report: &Report| format!("{:?}", report.options.memory).to_lowercase();
        differs("memory", memory(then), memory(now));
        // By name: it does not matter which of a machine's GPUs they are.
        let gpus = |report: &Report| {
            let mut names: Vec<&str> = report.options.gpus.iter().map(|gpu| &*gpu.name).collect();
            names.dedup();
            if names.is_empty() { "none".to_owned() } else { names.join(", ") }
        };
        differs("GPUs", gpus(then), gpus(now));
        let library = |report: &Report| report.options.library.clone().unwrap_or("none".to_owned());
        differs("library", library(then), library(now));
        let graphs = |report: &Report| report.options.graph_launches.to_string();
        differs("graph launches", graphs(then), graphs(now));
        let blocking = |report: &Report| if report.options.blocking { "yes" } else { "no" }.to_owned();
        differs("waited for each", blocking(then), blocking(now));
        let pinned = |report: &Report| if report.options.pinned { "yes" } else { "no" }.to_owned();
        differs("pinned", pinned(then), pinned(now));
        let time = |report: &Report| format!("{:?}", report.options.time).to_lowercase();
        differs("time is", time(then), time(now));
        differences
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::report::samples;

    fn saved() -> Saved {
        let report = samples::report(vec![samples::row(4, 2.0), samples::row(16, 8.0)]);
        Saved { report, path: "saved.json".to_owned() }
    }

    #[test]
    fn the_ratio_is_now_to_then() {
        assert_eq!(saved().ratio(&samples::row(4, 1.0), Place::OutOfPlace), Some(0.5));
        assert_eq!(saved().ratio(&samples::row(16, 12.0), Place::InPlace), Some(1.5));
    }

    #[test]
    fn what_was_not_measured_has_no_ratio() {
        assert_eq!(saved().ratio(&samples::row(64, 1.0), Place::OutOfPlace), None);
        let mut other_type = samples::row(4, 1.0);
        other_type.dtype = Some("f64".to_owned());
        assert_eq!(saved().ratio(&other_type, Place::OutOfPlace), None);
    }

    #[test]
    fn differences_of_the_runs_are_named() {
        let mut now = saved().report;
        assert_eq!(saved().differences(&now), [""; 0]);
        now.options.ranks = 4;
        now.options.pinned = true;
        assert_eq!(saved().differences(&now), ["ranks: 2 then, 4 now", "pinned: no then, yes now"]);
    }

    #[test]
    fn another_operation_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), serde_json::to_string(&saved().report).unwrap()).unwrap();
        assert!(Saved::load(file.path(), Operation::AllReduce).is_ok());
        let error = Saved::load(file.path(), Operation::Reduce).unwrap_err().to_string();
        assert!(error.contains("all_reduce") && error.contains("reduce"), "{error}");
    }
}
