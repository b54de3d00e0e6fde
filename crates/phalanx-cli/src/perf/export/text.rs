//! The report as a table. The first columns are those of the reference benchmark, so that programs that read
//! its output read this one.
//!
//! Lines that start with # describe the run and sum it up.

use super::Exporter;
use crate::perf::compare::Saved;
use crate::perf::operation::Place;
use crate::perf::report::{Measurement, Memory, Options, Report, Row, TimeKind};
use anyhow::Result;
use std::io::Write;

const PLACES: [Place; 2] = [Place::OutOfPlace, Place::InPlace];

/// A line of column heads.
struct Heads {
    row: [&'static str; 5],
    /// Of each place.
    basic: [&'static str; 4],
    percentiles: [&'static str; 3],
    /// Only with `--per_iter_timing`.
    spread: [&'static str; 4],
    /// Of the columns with a value for each place.
    places: [&'static str; 2],
    unit: &'static str,
}

/// Names and units.
const HEADS: [Heads; 2] = [
    Heads {
        row: ["size", "count", "type", "redop", "root"],
        basic: ["time", "algbw", "busbw", "#wrong"],
        percentiles: ["p50", "p95", "p99"],
        spread: ["min", "max", "mean", "cv"],
        places: ["out", "in"],
        unit: "",
    },
    Heads {
        row: ["(B)", "(elements)", "", "", ""],
        basic: ["(us)", "(GB/s)", "(GB/s)", ""],
        percentiles: ["(us)", "(us)", "(us)"],
        spread: ["(us)", "(us)", "(us)", ""],
        places: ["", ""],
        unit: "(us)",
    },
];

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
        write!(out, "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}", "", "", "", "", "")?;
        write!(out, "  {:^32}  {:^32}", "out-of-place", "in-place")?;
        let width = if options.per_iteration { 7 * 9 - 2 } else { 3 * 9 - 2 };
        write!(out, "    {:^width$}  {:^width$}", "out-of-place", "in-place")?;
        if options.cpu_time {
            write!(out, "    {:^16}", "CPU time")?;
        }
        if self.saved.is_some() {
            write!(out, "    {:^16}", "time now/saved")?;
        }
        writeln!(out)?;
        HEADS.iter().try_for_each(|heads| self.head_row(heads, options))
    }

    fn head_row(&mut self, heads: &Heads, options: &Options) -> Result<()> {
        let out = &mut self.out;
        let [size, count, dtype, redop, root] = heads.row;
        write!(out, "# {size:>10}  {count:>12}  {dtype:>8}  {redop:>6}  {root:>6}")?;
        for _ in PLACES {
            let [time, algbw, busbw, wrong] = heads.basic;
            write!(out, "  {time:>8}  {algbw:>6}  {busbw:>6}  {wrong:>6}")?;
        }
        write!(out, "  ")?;
        for _ in PLACES {
            heads.percentiles.iter().try_for_each(|name| write!(out, "  {name:>7}"))?;
            if options.per_iteration {
                heads.spread.iter().try_for_each(|name| write!(out, "  {name:>7}"))?;
            }
        }
        if options.cpu_time {
            write!(out, "  ")?;
            heads.places.iter().try_for_each(|name| write!(out, "  {:>7}", [name, heads.unit].concat()))?;
        }
        if self.saved.is_some() {
            write!(out, "  ")?;
            heads.places.iter().try_for_each(|name| write!(out, "  {name:>7}"))?;
        }
        Ok(writeln!(out)?)
    }

    fn write_row(&mut self, row: &Row, options: &Options) -> Result<()> {
        let out = &mut self.out;
        let dtype = row.dtype.as_deref().unwrap_or("none");
        let redop = row.redop.map_or("none", |redop| redop.name());
        let root = row.root.map_or("-1".to_owned(), |root| root.to_string());
        write!(out, "{:>12}  {:>12}  {dtype:>8}  {redop:>6}  {root:>6}", row.size, row.count)?;
        for place in PLACES {
            let figures = row.measurement(place);
            let of = |figure: fn(&Measurement) -> Option<f64>| figures.and_then(figure);
            let wrong = figures.and_then(|m| m.wrong);
            let time = number(of(|m| Some(m.time)), 8);
            let (algbw, busbw) = (number(of(|m| m.algbw), 6), number(of(|m| m.busbw), 6));
            let wrong = wrong.map_or("N/A".to_owned(), |wrong| wrong.to_string());
            write!(out, "  {time:>8}  {algbw:>6}  {busbw:>6}  {wrong:>6}")?;
        }
        write!(out, "  ")?;
        for place in PLACES {
            let figures = row.measurement(place);
            type Column = fn(&Measurement) -> f64;
            let spread: [Column; 3] = [|m| m.p50, |m| m.p95, |m| m.p99];
            let more: [Column; 4] = [|m| m.min, |m| m.max, |m| m.mean, |m| m.variation];
            let more = if options.per_iteration { &more[..] } else { &[] };
            for column in spread.iter().chain(more) {
                write!(out, "  {:>7}", number(figures.map(column), 7))?;
            }
        }
        if options.cpu_time {
            write!(out, "  ")?;
            for place in PLACES {
                write!(out, "  {:>7}", number(row.measurement(place).and_then(|m| m.enqueue), 7))?;
            }
        }
        if let Some(saved) = &self.saved {
            write!(out, "  ")?;
            for place in PLACES {
                write!(out, "  {:>7}", number(saved.ratio(row, place), 7))?;
            }
        }
        writeln!(out)?;
        out.flush()?;
        Ok(())
    }
}

impl<W: Write + Send> Exporter for Text<W> {
    fn begin(&mut self, report: &Report) -> Result<()> {
        let (options, out) = (&report.options, &mut self.out);
        writeln!(out, "# phalanx {} perf {}, {}", report.version, options.operation.name(), report.date)?;
        writeln!(
            out,
            "# {} ranks ({}), backend {}, {} memory, {}",
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
        )?;
        let machine = &report.machine;
        writeln!(out, "# CPU: {}, {} cores usable", machine.cpu_name(), machine.usable_cores)?;
        options.library.iter().try_for_each(|library| writeln!(out, "# {library}"))?;
        for (rank, gpu) in options.gpus.iter().enumerate() {
            writeln!(out, "# Rank {rank}: GPU {}, {} at {}", gpu.number, gpu.name, gpu.pci)?;
        }
        let count = |count: Option<usize>| count.map_or("by size".to_owned(), |count| count.to_string());
        writeln!(
            out,
            "# minBytes {} maxBytes {} step: {} warmup iters: {} iters: {} agg iters: {} validation: {}",
            options.min_bytes,
            options.max_bytes,
            options.step,
            count(options.warmup),
            count(options.iterations),
            options.aggregate,
            options.checks
        )?;
        write_method(out, options)?;
        if let Some(saved) = &self.saved {
            writeln!(out, "# Compared with {} of {}", saved.path, saved.report.date)?;
            for difference in saved.differences(report) {
                writeln!(out, "# Not the same: {difference}")?;
            }
        }
        writeln!(out, "#")?;
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

/// Describes the method of measurement.
fn write_method(out: &mut impl Write, options: &Options) -> Result<()> {
    if options.memory.is_on_gpus() && options.operation.has_data() {
        match options.graph_launches {
            0 if options.blocking => {
                write!(out, "# Each iteration is waited for before the next is enqueued;")?
            }
            0 => write!(out, "# All iterations are enqueued, then the stream is waited for;")?,
            launches => write!(
                out,
                "# A CUDA graph of all iterations is launched {launches} times, then waited for;"
            )?,
        }
        writeln!(out, " time: the average of an operation, {}.", options.average.words())?;
        let what =
            if options.graph_launches == 0 { "iteration" } else { "launch, divided by its operations" };
        writeln!(
            out,
            "# p50, p95, p99: of the times on the GPU between CUDA events around each {what}; the slowest rank counts."
        )?;
        return Ok(());
    }
    writeln!(
        out,
        "# Each iteration: every rank rewrites its buffers, all meet in a barrier, then the operation is \
         timed; the slowest rank counts."
    )?;
    match options.time {
        TimeKind::Median => {
            writeln!(out, "# time: the median (p50) of the iterations; the bandwidths follow from it.")?;
        }
        TimeKind::LoopAverage => writeln!(
            out,
            "# time: the average over a loop without barriers, {}; the bandwidths follow from it. p50, \
             p95, p99: of the iterations.",
            options.average.words()
        )?,
    }
    Ok(())
}

/// A number in `width` characters, with up to two decimals; `N/A` for none.
fn number(value: Option<f64>, width: usize) -> String {
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
                "algbw", "busbw", "#wrong", "p50", "p95", "p99", "p50", "p95", "p99"
            ]
        );
        assert_eq!(
            columns(row),
            [
                "16", "4", "f32", "sum", "-1", "2.50", "1.50", "0.25", "0", "1.25", "1.50", "0.12", "0",
                "2.50", "5.00", "7.50", "1.25", "2.50", "3.75"
            ]
        );
        assert!(lines.contains(&"# Out of bounds values : 0 OK".to_owned()));
        assert!(lines.contains(&"# Avg bus bandwidth    : 0.187500".to_owned()));
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
        assert_eq!(columns(row)[19..], ["1.25", "N/A"]);
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
