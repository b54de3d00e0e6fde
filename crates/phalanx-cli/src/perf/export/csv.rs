//! The report as CSV: a line for each size and place.
//!
//! An unknown value is an empty field. An existing file is replaced when there is a row.

use super::Exporter;
use crate::file;
use crate::perf::operation::{Operation, Place};
use crate::perf::reduction::RedOp;
use crate::perf::report::{RankKind, Report};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A CSV file.
pub struct Csv {
    path: PathBuf,
    /// Opened at the first row.
    writer: Option<csv::Writer<Box<dyn Write + Send>>>,
}

/// One line. Times in microseconds, bandwidths in GB/s.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Line<'a> {
    operation: Operation,
    ranks: usize,
    ranks_are: RankKind,
    backend: &'a str,
    size: usize,
    count: usize,
    r#type: Option<&'a str>,
    redop: Option<RedOp>,
    root: Option<usize>,
    place: Place,
    time_us: f64,
    algbw_gbps: Option<f64>,
    busbw_gbps: Option<f64>,
    wrong: Option<u64>,
    iterations: usize,
    p50_us: f64,
    p95_us: f64,
    p99_us: f64,
    min_us: f64,
    max_us: f64,
    mean_us: f64,
    variation: f64,
    loop_average_us: Option<f64>,
    enqueue_us: Option<f64>,
}

impl Csv {
    pub fn new(path: &Path) -> Csv {
        Csv { path: path.to_owned(), writer: None }
    }

    fn open(&self) -> Result<csv::Writer<Box<dyn Write + Send>>> {
        let file: Box<dyn Write + Send> = if file::is_stdout(&self.path) {
            Box::new(io::stdout())
        } else {
            Box::new(File::create(&self.path).with_context(|| file::refused(&self.path))?)
        };
        // The writer makes the header from the names of the first line's fields.
        Ok(csv::Writer::from_writer(file))
    }
}

impl Exporter for Csv {
    fn begin(&mut self, _report: &Report) -> Result<()> {
        file::check_writable(&self.path)
    }

    fn row(&mut self, report: &Report) -> Result<()> {
        let Some(row) = report.rows.last() else {
            return Ok(());
        };
        let writer = match &mut self.writer {
            Some(writer) => writer,
            None => &mut *self.writer.insert(self.open()?),
        };
        for place in [Place::OutOfPlace, Place::InPlace] {
            let Some(measurement) = row.measurement(place) else {
                continue;
            };
            writer.serialize(Line {
                operation: report.options.operation,
                ranks: report.options.ranks,
                ranks_are: report.options.ranks_are,
                backend: &report.options.backend,
                size: row.size,
                count: row.count,
                r#type: row.dtype.as_deref(),
                redop: row.redop,
                root: row.root,
                place,
                time_us: measurement.time,
                algbw_gbps: measurement.algbw,
                busbw_gbps: measurement.busbw,
                wrong: measurement.wrong,
                iterations: measurement.iterations,
                p50_us: measurement.p50,
                p95_us: measurement.p95,
                p99_us: measurement.p99,
                min_us: measurement.min,
                max_us: measurement.max,
                mean_us: measurement.mean,
                variation: measurement.variation,
                loop_average_us: measurement.loop_average,
                enqueue_us: measurement.enqueue,
            })?;
        }
        writer.flush().with_context(|| file::refused(&self.path))
    }

    fn finish(&mut self, _report: &Report) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::report::samples;

    #[test]
    fn a_run_survives_csv() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.csv");
        std::fs::write(&path, "the results of before").unwrap();
        let mut exporter = Csv::new(&path);
        let mut report = samples::report(vec![samples::row(4, 1.25)]);
        exporter.begin(&report).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "the results of before");
        exporter.row(&report).unwrap();
        report.rows.push(samples::row(16, 2.5));
        report.rows[1].in_place = None;
        report.rows[1].redop = None;
        exporter.row(&report).unwrap();
        exporter.finish(&report).unwrap();

        let bytes = std::fs::read(&path).unwrap();
        let mut reader = csv::Reader::from_reader(&bytes[..]);
        assert_eq!(reader.headers().unwrap().get(0), Some("operation"));
        let records: Vec<csv::StringRecord> = reader.records().collect::<Result<_, _>>().unwrap();
        let headers = csv::StringRecord::from(
            String::from_utf8_lossy(&bytes).lines().next().unwrap().split(',').collect::<Vec<_>>(),
        );
        let lines: Vec<Line<'_>> =
            records.iter().map(|record| record.deserialize(Some(&headers)).unwrap()).collect();

        assert_eq!(lines.len(), 3);
        assert_eq!((lines[0].place, lines[0].time_us), (Place::OutOfPlace, 1.25));
        assert_eq!((lines[1].place, lines[1].time_us), (Place::InPlace, 0.625));
        assert_eq!((lines[2].size, lines[2].redop, lines[2].r#type), (16, None, Some("f32")));
        assert_eq!(lines[2].loop_average_us, None);
    }
}
