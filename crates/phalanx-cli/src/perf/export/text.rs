//! The report as a table. The first columns are those of the reference benchmark, so that programs that read
//! its output read this one. They fit 100 characters; options add columns to their right.
//!
//! Lines that start with # describe the run and sum it up.

use super::Exporter;
use crate::perf::compare::Saved;
use crate::perf::operation::Place;
use crate::perf::report::{Measurement, Memory, Options, Report, Row, TimeKind};
use anyhow::Result;
use std::io::{self, Write};

/// The width of the table without the columns that options add.
const WIDTH: usize = 100;
const PLACES: [Place; 2] = [Place::OutOfPlace, Place::InPlace];

/// A line of column heads.
struct Heads {
    row: [&'static str; 5],
    /// Of each place.
    basic: [&'static str; 4],
    /// Of each place, only with `--per_iter_timing`.
    spread: [&'static str; 7],
    /// Of the columns with a value for each place.
    places: [&'static str; 2],
    unit: &'static str,
}

/// Names and units.
const HEADS: [Heads; 2] = [
    Heads {
        row: ["size", "count", "type", "redop", "root"],
        basic: ["time", "algbw", "busbw", "#wrong"],
        spread: ["p50", "p95", "p99", "min", "max", "mean", "cv"],
        places: ["out", "in"],
        unit: "",
    },
    Heads {
        row: ["(B)", "(elements)", "", "", ""],
        basic: ["(us)", "(GB/s)", "(GB/s)", ""],
        spread: ["(us)", "(us)", "(us)", "(us)", "(us)", "(us)", ""],
        places: ["", ""],
        unit: "(us)",
    },
];

/// A figure of a measurement.
type Column = fn(&Measurement) -> f64;

/// The figures of the iterations, in the order of their heads.
const SPREAD: [Column; 7] =
    [|m| m.p50, |m| m.p95, |m| m.p99, |m| m.min, |m| m.max, |m| m.mean, |m| m.variation];

/// A table on `out`.
pub struct Text<W> {
    out: W,
    saved: Option<Saved>,
}

impl<W: Write> Text<W> {
    pub fn new(out: W, saved: Option<Saved>) -> Text<W> {
        Text { out, saved }
    }

    fn column_heads(&mut self, options: &Options) -> Result<()> {
        let out = &mut self.out;
        write!(out, "# {:38}  {:^28}  {:^28}", "", "out-of-place", "in-place")?;
        if options.per_iteration {
            write!(out, "  {:^55}  {:^55}", "out-of-place", "in-place")?;
        }
        if options.cpu_time {
            write!(out, "  {:^15}", "CPU time")?;
        }
        if self.saved.is_some() {
            write!(out, "  {:^15}", "time now/saved")?;
        }
        writeln!(out)?;
        HEADS.iter().try_for_each(|heads| self.head_row(heads, options))
    }

    fn head_row(&mut self, heads: &Heads, options: &Options) -> Result<()> {
        let out = &mut self.out;
        let [size, count, dtype, redop, root] = heads.row;
        write!(out, "# {size:>8} {count:>10} {dtype:>6} {redop:>6} {root:>4}")?;
        for _ in PLACES {
            let [time, algbw, busbw, wrong] = heads.basic;
            write!(out, "  {time:>7} {algbw:>6} {busbw:>6} {wrong:>6}")?;
        }
        if options.per_iteration {
            PLACES.iter().try_for_each(|_| group(out, heads.spread.map(str::to_owned)))?;
        }
        if options.cpu_time {
            group(out, heads.places.map(|name| [name, heads.unit].concat()))?;
        }
        if self.saved.is_some() {
            group(out, heads.places.map(str::to_owned))?;
        }
        Ok(writeln!(out)?)
    }

    fn write_row(&mut self, row: &Row, options: &Options) -> Result<()> {
        let out = &mut self.out;
        let dtype = row.dtype.as_deref().unwrap_or("none");
        let redop = row.redop.map_or("none", |redop| redop.name());
        let root = row.root.map_or("-1".to_owned(), |root| root.to_string());
        write!(out, "{:>10} {:>10} {dtype:>6} {redop:>6} {root:>4}", row.size, row.count)?;
        for place in PLACES {
            let figures = row.measurement(place);
            let of = |figure: fn(&Measurement) -> Option<f64>| figures.and_then(figure);
            let wrong = figures.and_then(|m| m.wrong);
            let time = number(of(|m| Some(m.time)), 7);
            let (algbw, busbw) = (number(of(|m| m.algbw), 6), number(of(|m| m.busbw), 6));
            let wrong = wrong.map_or("N/A".to_owned(), |wrong| wrong.to_string());
            write!(out, "  {time:>7} {algbw:>6} {busbw:>6} {wrong:>6}")?;
        }
        if options.per_iteration {
            for place in PLACES {
                group(out, SPREAD.map(|column| number(row.measurement(place).map(column), 7)))?;
            }
        }
        if options.cpu_time {
            group(out, PLACES.map(|place| number(row.measurement(place).and_then(|m| m.enqueue), 7)))?;
        }
        if let Some(saved) = &self.saved {
            group(out, PLACES.map(|place| number(saved.ratio(row, place), 7)))?;
        }
        writeln!(out)?;
        out.flush()?;
        Ok(())
    }
}

/// Columns that belong together.
fn group<const N: usize>(out: &mut impl Write, columns: [String; N]) -> io::Result<()> {
    write!(out, " ")?;
    columns.iter().try_for_each(|column| write!(out, " {column:>7}"))
}

/// Writes a text as lines that start with #, wrapped at the table's width.
pub fn comment(out: &mut impl Write, text: &str) -> io::Result<()> {
    let mut line = "#".to_owned();
    for word in text.split(' ') {
        if line.len() > 1 && line.chars().count() + 1 + word.chars().count() > WIDTH {
            writeln!(out, "{line}")?;
            line = "#  ".to_owned();
        }
        line += " ";
        line += word;
    }
    writeln!(out, "{line}")
}

impl<W: Write + Send> Exporter for Text<W> {
    fn begin(&mut self, report: &Report) -> Result<()> {
        let (options, out) = (&report.options, &mut self.out);
        let mut say = |text: String| comment(out, &text);
        say(format!("phalanx {} perf {}, {}", report.version, options.operation.name(), report.date))?;
        say(format!(
            "{} ranks ({}), backend {}, {} memory, {}",
            options.ranks,
            options.ranks_are.name(),
            options.backend,
            match options.memory {
                Memory::Private => "private",
                Memory::Allocated => "communicator's",
                Memory::Gpu => "GPU",
                Memory::Registered => "registered GPU",
                Memory::Symmetric => "symmetric GPU",
            },
            if options.pinned { "pinned" } else { "not pinned" }
        ))?;
        let machine = &report.machine;
        say(format!("CPU: {}, {} cores usable", machine.cpu_name(), machine.usable_cores))?;
        options.library.iter().try_for_each(|library| say(library.clone()))?;
        for (rank, gpu) in options.gpus.iter().enumerate() {
            say(format!("Rank {rank}: GPU {}, {} at {}", gpu.number, gpu.name, gpu.pci))?;
        }
        let count = |count: Option<usize>| count.map_or("by size".to_owned(), |count| count.to_string());
        say(format!(
            "minBytes {} maxBytes {} step: {} warmup iters: {} iters: {} agg iters: {} validation: {}",
            options.min_bytes,
            options.max_bytes,
            options.step,
            count(options.warmup),
            count(options.iterations),
            options.aggregate,
            options.checks
        ))?;
        method(options).into_iter().try_for_each(&mut say)?;
        if let Some(saved) = &self.saved {
            say(format!("Compared with {} of {}", saved.path, saved.report.date))?;
            saved
                .differences(report)
                .into_iter()
                .try_for_each(|difference| say(format!("Not the same: {difference}")))?;
        }
        writeln!(self.out, "#")?;
        self.column_heads(&report.options)
    }

    fn row(&mut self, report: &Report) -> Result<()> {
        match report.rows.last() {
            Some(row) => self.write_row(row, &report.options),
            None => Ok(()),
        }
    }

    fn finish(&mut self, report: &Report) -> Result<()> {
        let wrong = match report.wrong() {
            Some(0) => "0 OK".to_owned(),
            Some(wrong) => format!("{wrong} FAILED"),
            None => "not checked".to_owned(),
        };
        let busbw = report.average_busbw().map_or("none".to_owned(), |busbw| format!("{busbw:.6}"));
        writeln!(self.out, "# {:<20} : {wrong}", "Out of bounds values")?;
        writeln!(self.out, "# {:<20} : {busbw}", "Avg bus bandwidth")?;
        self.out.flush()?;
        Ok(())
    }
}

/// The method of measurement.
fn method(options: &Options) -> Vec<String> {
    let average = options.average.words();
    let mut lines = Vec::new();
    if options.memory.is_on_gpus() && options.operation.has_data() {
        let how = match options.graph_launches {
            0 if options.blocking => "Each iteration is waited for before the next is enqueued".to_owned(),
            0 => "All iterations are enqueued, then the stream is waited for".to_owned(),
            launches => {
                format!("A CUDA graph of all iterations is launched {launches} times, then waited for")
            }
        };
        lines.push(format!("{how}; time: the average of an operation, {average}."));
        if options.per_iteration {
            let what =
                if options.graph_launches == 0 { "iteration" } else { "launch, divided by its operations" };
            lines.push(format!(
                "p50 to cv: of the times on the GPU between CUDA events around each {what}; the slowest rank counts."
            ));
        }
        return lines;
    }
    lines.push(
        "Each iteration: every rank rewrites its buffers, all meet in a barrier, then the operation is timed; the \
         slowest rank counts."
            .to_owned(),
    );
    lines.push(match options.time {
        TimeKind::Median => "time: the median of the iterations; the bandwidths follow from it.".to_owned(),
        TimeKind::LoopAverage => format!(
            "time: the average over a loop without barriers, {average}; the bandwidths follow from it."
        ),
    });
    lines
}

/// A number in `width` characters, with up to two decimals; `N/A` for none.
pub fn number(value: Option<f64>, width: usize) -> String {
    let Some(value) = value else {
        return "N/A".to_owned();
    };
    (0..=2)
        .rev()
        .map(|decimals| format!("{value:.decimals$}"))
        .find(|text| text.len() <= width)
        .unwrap_or_else(|| format!("{value:.1e}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::report::samples;

    fn table(report: &Report, saved: Option<Saved>) -> Vec<String> {
        let mut text = Text::new(Vec::new(), saved);
        text.begin(report).unwrap();
        for row in &report.rows {
            text.write_row(row, &report.options).unwrap();
        }
        text.finish(report).unwrap();
        String::from_utf8(text.out).unwrap().lines().map(str::to_owned).collect()
    }

    fn columns(line: &str) -> Vec<&str> {
        line.split_whitespace().collect()
    }

    #[test]
    fn the_first_columns_are_the_reference_benchmarks() {
        let lines = table(&samples::report(vec![samples::row(16, 2.5)]), None);
        let heads = lines.iter().find(|line| line.contains("redop")).unwrap();
        let row = lines.iter().find(|line| !line.starts_with('#')).unwrap();
        assert_eq!(
            columns(heads)[1..],
            [
                "size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong", "time",
                "algbw", "busbw", "#wrong"
            ]
        );
        assert_eq!(
            columns(row),
            ["16", "4", "f32", "sum", "-1", "2.50", "1.50", "0.25", "0", "1.25", "1.50", "0.12", "0"]
        );
        assert!(lines.contains(&"# Out of bounds values : 0 OK".to_owned()));
        assert!(lines.contains(&"# Avg bus bandwidth    : 0.187500".to_owned()));
    }

    #[test]
    fn the_table_fits_100_characters() {
        let mut report = samples::report(vec![samples::row(1 << 30, 123_456.789)]);
        report.options.max_bytes = 64 << 30;
        for on_gpus in [false, true] {
            if on_gpus {
                report.options.memory = Memory::Gpu;
                report.options.gpus = vec![samples::gpu(0), samples::gpu(1)];
            }
            for line in table(&report, None) {
                assert!(line.chars().count() <= WIDTH, "{line}");
            }
        }
    }

    #[test]
    fn heads_stand_above_their_columns() {
        let mut report = samples::report(vec![samples::row(16, 2.5)]);
        report.options.per_iteration = true;
        let saved = Saved { report: report.clone(), path: "saved.json".to_owned() };
        let lines = table(&report, Some(saved));
        let heads = lines.iter().find(|line| line.contains("redop")).unwrap();
        let row = lines.iter().find(|line| !line.starts_with('#')).unwrap();
        assert_eq!(heads.len(), row.len());
        assert_eq!(columns(heads).len(), columns(row).len() + 1);
        assert_eq!(columns(row).last(), Some(&"1.00"));
    }

    #[test]
    fn runs_on_gpus_name_them_and_show_the_cpu_time_if_asked() {
        let mut report = samples::report(vec![samples::row(16, 2.5)]);
        report.options.memory = Memory::Gpu;
        report.options.gpus = vec![samples::gpu(0), samples::gpu(1)];
        report.options.library = Some("NCCL 2.28.9 (/lib/libnccl.so.2)".to_owned());
        report.options.cpu_time = true;
        report.options.graph_launches = 7;
        report.rows[0].out_of_place.as_mut().unwrap().enqueue = Some(1.25);
        let lines = table(&report, None);
        for line in ["# Rank 1: GPU 1, Some GPU at 0000:01:00.0", "# NCCL 2.28.9 (/lib/libnccl.so.2)"] {
            assert!(lines.iter().any(|known| known == line), "{line}");
        }
        assert!(lines.iter().any(|line| line.contains("launched 7 times")));
        assert!(!lines.iter().any(|line| line.contains("rewrites its buffers")));
        let heads = lines.iter().find(|line| line.contains("redop")).unwrap();
        let row = lines.iter().find(|line| !line.starts_with('#')).unwrap();
        assert_eq!(heads.len(), row.len());
        assert_eq!(columns(row)[13..], ["1.25", "N/A"]);
    }

    #[test]
    fn wrong_elements_are_called_failed() {
        let mut report = samples::report(vec![samples::row(16, 2.5)]);
        report.rows[0].out_of_place.as_mut().unwrap().wrong = Some(7);
        assert!(table(&report, None).contains(&"# Out of bounds values : 7 FAILED".to_owned()));
    }

    #[test]
    fn what_is_not_known_is_not_0() {
        let mut report = samples::report(vec![samples::row(16, 2.5)]);
        report.rows[0].in_place = None;
        let lines = table(&report, None);
        let row = lines.iter().find(|line| !line.starts_with('#')).unwrap();
        assert_eq!(columns(row)[9..13], ["N/A"; 4]);
    }

    #[test]
    fn numbers_keep_to_their_columns() {
        assert_eq!(number(Some(0.216), 7), "0.22");
        assert_eq!(number(Some(12345.678), 7), "12345.7");
        assert_eq!(number(Some(1234567.8), 7), "1234568");
        assert_eq!(number(Some(123456789.0), 7), "1.2e8");
        assert_eq!(number(None, 7), "N/A");
    }
}
