//! The results as CSV: a line for each size and place, with what identifies it in front.
//!
//! What is not known is an empty field.

use super::Exporter;
use crate::perf::operation::{Operation, Place};
use crate::perf::reduction::RedOp;
use crate::perf::report::{RankKind, Report};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::Write;
use std::path::Path;

/// A CSV file.
pub struct Csv<W: Write> {
    writer: csv::Writer<W>,
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

impl Csv<File> {
    pub fn create(path: &Path) -> Result<Csv<File>> {
        let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Csv { writer: csv::Writer::from_writer(file) })
    }
}

impl<W: Write + Send> Exporter for Csv<W> {
    fn begin(&mut self, _report: &Report) -> Result<()> {
        // The header row comes from the fields' names, with the first line.
        Ok(())
    }

    fn row(&mut self, report: &Report) -> Result<()> {
        let Some(row) = report.rows.last() else {
            return Ok(());
        };
        for place in [Place::OutOfPlace, Place::InPlace] {
            let Some(measurement) = row.measurement(place) else {
                continue;
            };
            self.writer.serialize(Line {
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
        self.writer.flush().context("cannot write the CSV file")
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
        let mut exporter = Csv { writer: csv::Writer::from_writer(Vec::new()) };
        let mut report = samples::report(vec![samples::row(4, 1.25)]);
        exporter.begin(&report).unwrap();
        exporter.row(&report).unwrap();
        report.rows.push(samples::row(16, 2.5));
        report.rows[1].in_place = None;
        report.rows[1].redop = None;
        exporter.row(&report).unwrap();
        exporter.finish(&report).unwrap();

        let bytes = exporter.writer.into_inner().unwrap();
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
