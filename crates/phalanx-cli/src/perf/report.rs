//! The report of a run, which `--json` saves and `--compare` reads.
//!
//! An unknown value is null, never 0. Environment variables are left out: they may hold secrets.

use super::operation::{Operation, Place};
use super::reduction::RedOp;
use crate::machine::Machine;
use anyhow::{Context, Result, ensure};
use phalanx::{Comm, ReduceOp};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The version of the saved file's format. It changes when an older program would misread the file.
pub const FORMAT: u32 = 1;

/// The report of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub format: u32,
    /// The version of phalanx.
    pub version: String,
    /// The start of the run (UTC).
    pub date: String,
    pub machine: Machine,
    pub options: Options,
    pub rows: Vec<Row>,
}

/// The part of a saved file that every format has.
#[derive(Deserialize)]
struct Header {
    format: u64,
}

/// The options of the run, with every default filled in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Options {
    pub operation: Operation,
    pub ranks: usize,
    pub ranks_are: RankKind,
    /// The hosts that the ranks are on.
    #[serde(default)]
    pub hosts: Option<usize>,
    /// The time until rank 0 had its communicator; null for threads.
    #[serde(default)]
    pub start_seconds: Option<f64>,
    pub backend: String,
    pub min_bytes: usize,
    pub max_bytes: usize,
    pub step: String,
    /// Null if chosen for each size: the rows have the choice.
    pub iterations: Option<usize>,
    pub warmup: Option<usize>,
    pub aggregate: usize,
    pub checks: usize,
    /// What carried collectives on GPUs out, if `--algorithm` said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_algorithm: Option<String>,
    pub memory: Memory,
    /// The ranks' GPUs, if they have any, in rank order.
    #[serde(default)]
    pub gpus: Vec<RankGpu>,
    /// The library that moved the data, with version and file; null for phalanx itself.
    #[serde(default)]
    pub library: Option<String>,
    /// Launches of a CUDA graph of all iterations; 0: there was none.
    #[serde(default)]
    pub graph_launches: usize,
    /// Whether each iteration on a GPU ended before the next was enqueued.
    #[serde(default)]
    pub blocking: bool,
    /// Whether the time of the enqueueing calls is shown.
    #[serde(default)]
    pub cpu_time: bool,
    pub pinned: bool,
    /// The meaning of the rows' `time`.
    pub time: TimeKind,
    /// The kind of loop average, if `time` is one.
    #[serde(default)]
    pub average: Average,
    pub timeout_seconds: f64,
    /// Whether every iteration's time is kept.
    pub per_iteration: bool,
}

/// A rank's GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankGpu {
    /// The GPU's number in the rank's process.
    pub number: usize,
    pub name: String,
    /// The PCI address.
    pub pci: String,
}

/// The kind of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RankKind {
    Threads,
    /// Processes that this program started.
    Processes,
    /// Processes of another launcher.
    Launched,
}

impl RankKind {
    pub fn name(self) -> &'static str {
        match self {
            RankKind::Threads => "threads",
            RankKind::Processes => "processes",
            RankKind::Launched => "launched processes",
        }
    }
}

/// The memory of the buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Memory {
    Private,
    /// From `Comm::alloc`.
    Allocated,
    /// Of the ranks' GPUs.
    Gpu,
    /// Of the GPUs, registered with NCCL.
    Registered,
    /// Of the GPUs, symmetric windows.
    Symmetric,
}

impl Memory {
    pub fn is_on_gpus(self) -> bool {
        matches!(self, Memory::Gpu | Memory::Registered | Memory::Symmetric)
    }
}

/// The meaning of a reported time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TimeKind {
    Median,
    LoopAverage,
}

/// How the ranks' loop averages are combined: `-a` of the reference benchmark.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Average {
    OfRank0,
    #[default]
    Mean,
    Least,
    Greatest,
}

impl Average {
    /// Replaces this rank's figures by those of all ranks. Collective.
    pub fn of_ranks(self, comm: &Comm, figures: &mut [f64]) -> phalanx::Result<()> {
        match self {
            Average::OfRank0 => comm.broadcast_in_place(figures, 0),
            Average::Mean => comm.all_reduce_in_place(figures, ReduceOp::Avg),
            Average::Least => comm.all_reduce_in_place(figures, ReduceOp::Min),
            Average::Greatest => comm.all_reduce_in_place(figures, ReduceOp::Max),
        }
    }

    pub fn words(self) -> &'static str {
        match self {
            Average::OfRank0 => "rank 0's",
            Average::Mean => "the mean of all ranks",
            Average::Least => "the least of all ranks",
            Average::Greatest => "the greatest of all ranks",
        }
    }
}

/// The results of one size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Bytes of the larger buffer of a rank.
    pub size: usize,
    /// Elements of a block or of the message.
    pub count: usize,
    /// Null where nothing is moved.
    #[serde(rename = "type")]
    pub dtype: Option<String>,
    pub redop: Option<RedOp>,
    pub root: Option<usize>,
    pub out_of_place: Option<Measurement>,
    pub in_place: Option<Measurement>,
}

/// The figures of a size in one place. Times are in microseconds, bandwidths in GB/s (1e9 bytes).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// The median or the loop average, as the options say.
    pub time: f64,
    pub algbw: Option<f64>,
    pub busbw: Option<f64>,
    /// Wrong elements over all ranks; null if nothing was checked.
    pub wrong: Option<u64>,
    pub iterations: usize,
    pub p50: f64,
    pub p95: f64,
    pub p99: f64,
    pub min: f64,
    pub max: f64,
    pub mean: f64,
    /// Standard deviation divided by the mean.
    pub variation: f64,
    pub loop_average: Option<f64>,
    /// The time of the call that enqueued an operation on a GPU; null on the host.
    #[serde(default)]
    pub enqueue: Option<f64>,
    /// The time of every iteration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub times: Option<Vec<f64>>,
}

impl Row {
    pub fn measurement(&self, place: Place) -> Option<&Measurement> {
        match place {
            Place::OutOfPlace => self.out_of_place.as_ref(),
            Place::InPlace => self.in_place.as_ref(),
        }
    }

    pub fn measurements(&self) -> impl Iterator<Item = &Measurement> {
        self.out_of_place.iter().chain(&self.in_place)
    }

    /// Whether two rows are of the same size, type, reduction and root.
    pub fn matches(&self, other: &Row) -> bool {
        let key = |row: &Row| (row.size, row.dtype.clone(), row.redop, row.root);
        key(self) == key(other)
    }
}

impl Report {
    /// Reads a saved run.
    pub fn load(path: &Path) -> Result<Report> {
        let shown = path.display();
        let text = std::fs::read(path).with_context(|| format!("cannot read {shown}"))?;
        let Header { format } = serde_json::from_slice(&text)
            .ok()
            .with_context(|| format!("{shown} is no run saved with `phalanx perf --json`"))?;
        ensure!(
            format == u64::from(FORMAT),
            "{shown} has format {format}; this program reads format {FORMAT}"
        );
        serde_json::from_slice(&text).with_context(|| format!("{shown} is damaged"))
    }

    /// Wrong elements in all rows; `None` if nothing was checked.
    pub fn wrong(&self) -> Option<u64> {
        let checked = self.rows.iter().flat_map(Row::measurements).filter_map(|m| m.wrong);
        checked.reduce(|sum, wrong| sum + wrong)
    }

    /// The mean bus bandwidth of all rows, in and out of place.
    pub fn average_busbw(&self) -> Option<f64> {
        let (mut sum, mut count) = (0.0, 0);
        for busbw in self.rows.iter().flat_map(Row::measurements).filter_map(|m| m.busbw) {
            sum += busbw;
            count += 1;
        }
        (count > 0).then(|| sum / f64::from(count))
    }
}

#[cfg(test)]
pub mod samples {
    //! A small report for tests.

    use super::*;

    pub fn measurement(time: f64) -> Measurement {
        Measurement {
            time,
            algbw: Some(1.5),
            busbw: Some(time / 10.0),
            wrong: Some(0),
            iterations: 100,
            p50: time,
            p95: time * 2.0,
            p99: time * 3.0,
            min: time / 2.0,
            max: time * 4.0,
            mean: time * 1.1,
            variation: 0.25,
            loop_average: None,
            enqueue: None,
            times: None,
        }
    }

    pub fn gpu(number: usize) -> RankGpu {
        RankGpu { number, name: "Some GPU".to_owned(), pci: format!("0000:{number:02}:00.0") }
    }

    pub fn row(size: usize, time: f64) -> Row {
        Row {
            size,
            count: size / 4,
            dtype: Some("f32".to_owned()),
            redop: Some(RedOp::Sum),
            root: None,
            out_of_place: Some(measurement(time)),
            in_place: Some(measurement(time * 0.5)),
        }
    }

    pub fn report(rows: Vec<Row>) -> Report {
        Report {
            format: FORMAT,
            version: "0.1.0".to_owned(),
            date: "2026-01-01T00:00:00Z".to_owned(),
            machine: Machine {
                cpu: Some("Some CPU, with a comma".to_owned()),
                usable_cores: 2,
                os: None,
                kernel: None,
                memory: Some(1 << 30),
            },
            options: Options {
                operation: Operation::AllReduce,
                ranks: 2,
                ranks_are: RankKind::Threads,
                hosts: Some(1),
                start_seconds: None,
                backend: "host".to_owned(),
                min_bytes: 4,
                max_bytes: 64,
                step: "4(factor)".to_owned(),
                iterations: None,
                warmup: None,
                aggregate: 1,
                checks: 1,
                gpu_algorithm: None,
                memory: Memory::Private,
                gpus: Vec::new(),
                library: None,
                graph_launches: 0,
                blocking: false,
                cpu_time: false,
                pinned: false,
                time: TimeKind::Median,
                average: Average::default(),
                timeout_seconds: 300.0,
                per_iteration: false,
            },
            rows,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_survives_json() {
        let mut report = samples::report(vec![samples::row(4, 1.25), samples::row(16, 2.5)]);
        report.options.gpus = vec![samples::gpu(3)];
        report.rows[1].in_place = None;
        report.rows[0].out_of_place.as_mut().unwrap().times = Some(vec![1.0, 1.5]);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), serde_json::to_string(&report).unwrap()).unwrap();
        assert_eq!(Report::load(file.path()).unwrap(), report);
    }

    #[test]
    fn a_run_of_a_version_without_gpus_can_be_read() {
        let mut report = samples::report(vec![samples::row(4, 1.25)]);
        let mut json = serde_json::to_value(&report).unwrap();
        let options = json["options"].as_object_mut().unwrap();
        report.options.hosts = None;
        for later in ["hosts", "start_seconds", "gpus", "library", "graph_launches", "blocking", "cpu_time"] {
            options.remove(later).unwrap();
        }
        json["rows"][0]["in_place"].as_object_mut().unwrap().remove("enqueue").unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), json.to_string()).unwrap();
        assert_eq!(Report::load(file.path()).unwrap(), report);
    }

    #[test]
    fn other_files_are_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = |text: &str| {
            std::fs::write(file.path(), text).unwrap();
            Report::load(file.path()).unwrap_err().to_string()
        };
        assert!(error("{}").contains("no run saved"));
        assert!(error("no json").contains("no run saved"));
        assert!(error(r#"{"format": 99}"#).contains("format 99"));
        assert!(error(r#"{"format": 1}"#).contains("damaged"));
    }

    #[test]
    fn totals_go_over_both_places() {
        let mut report = samples::report(vec![samples::row(4, 10.0)]);
        assert_eq!(report.average_busbw(), Some(0.75));
        assert_eq!(report.wrong(), Some(0));
        report.rows[0].in_place.as_mut().unwrap().wrong = Some(3);
        assert_eq!(report.wrong(), Some(3));
        assert_eq!(samples::report(Vec::new()).wrong(), None);
        assert_eq!(samples::report(Vec::new()).average_busbw(), None);
    }
}
