//! The results as a picture: time and bus bandwidth against size, with logarithmic axes, and how far the iterations differ.
//!
//! It is drawn at the end of the run. An interrupted run leaves no picture.

use super::Exporter;
use crate::file;
use crate::perf::compare::Saved;
use crate::perf::operation::Place;
use crate::perf::report::{Measurement, Report, Row};
use crate::picture::{self, Area, BLUE, DrawError, FONT, Format, GREEN, ORANGE, PURPLE, SKY_BLUE, VERMILION};
use crate::size;
use anyhow::{Context, Result};
use plotters::prelude::*;
use std::path::{Path, PathBuf};

const PIXELS: (u32, u32) = (1500, 900);
/// Left edge of the legend, and the height of one of its lines, in pixels.
const LEGEND: (u32, u32) = (1080, 24);
const TEXT_SIZE: u32 = 18;
const COLORS: [RGBColor; 7] = [BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY_BLUE, BLACK];

/// A picture file.
pub struct Plot {
    path: PathBuf,
    saved: Option<Saved>,
}

impl Plot {
    pub fn new(path: &Path, saved: Option<Saved>) -> Plot {
        Plot { path: path.to_owned(), saved }
    }

    fn draw(&self, report: &Report) -> Result<()> {
        let saved = self.saved.as_ref().map(|saved| &saved.report);
        let series = series_of(report, saved);
        // The options allow two extensions only.
        let is_png = self.path.extension().is_some_and(|extension| extension == "png");
        let format = if is_png { Format::Png } else { Format::Svg };
        let picture = picture::draw(format, PIXELS, &|area| paint(area, report, &series))?;
        file::write(&self.path, &picture)
    }
}

impl Exporter for Plot {
    fn begin(&mut self, _report: &Report) -> Result<()> {
        file::check_writable(&self.path)
    }

    fn row(&mut self, _report: &Report) -> Result<()> {
        Ok(())
    }

    fn finish(&mut self, report: &Report) -> Result<()> {
        self.draw(report).with_context(|| format!("cannot draw {}", self.path.display()))
    }
}

/// A line of the plot.
struct Series {
    name: String,
    style: ShapeStyle,
    /// Hollow for a saved run.
    points_style: ShapeStyle,
    /// In microseconds.
    times: Vec<Point>,
    /// Bus bandwidths in GB/s.
    bandwidths: Vec<Point>,
}

/// A figure of a size.
struct Point {
    bytes: f64,
    value: f64,
    /// Those of the fastest iteration and of the 95th percentile. A loop's average has none.
    spread: Option<[f64; 2]>,
}

/// A diagram: its name, and the points of a line in it.
type Panel = (&'static str, fn(&Series) -> &[Point]);

const PANELS: [Panel; 2] =
    [("time (µs)", |series| &series.times), ("bus bandwidth (GB/s)", |series| &series.bandwidths)];

fn paint(area: &Area<'_>, report: &Report, series: &[Series]) -> Result<(), DrawError> {
    // A single rank has no bus bandwidth.
    let has_points = |panel: &&Panel| series.iter().any(|series| !panel.1(series).is_empty());
    let panels: Vec<&Panel> = PANELS.iter().filter(has_points).collect();

    let area = area.margin(10, 0, 0, 0).titled(&title(report), (FONT, TEXT_SIZE + 6))?;
    let area = area.titled(&caption(report, series), (FONT, TEXT_SIZE))?;
    let (diagrams, legend) = area.split_horizontally(LEGEND.0);
    for (part, panel) in diagrams.split_evenly((panels.len().max(1), 1)).iter().zip(panels) {
        paint_panel(part, panel, series)?;
    }
    paint_legend(&legend, series)
}

fn title(report: &Report) -> String {
    let options = &report.options;
    format!(
        "{}, {} {}, backend {}, {}",
        options.operation.name(),
        options.ranks,
        options.ranks_are.name(),
        options.backend,
        options.gpus.first().map_or(report.machine.cpu_name(), |gpu| &gpu.name)
    )
}

/// What the points are, and what measured them.
fn caption(report: &Report, series: &[Series]) -> String {
    let has_spread = series.iter().flat_map(|series| &series.times).any(|point| point.spread.is_some());
    let points = match has_spread {
        true => "medians of the iterations, from the fastest to the 95th percentile",
        false => "averages of a loop",
    };
    format!("{points}; phalanx {}, {}", report.version, report.date)
}

/// The lines: one for each kind of row and place, of this run and the saved one.
fn series_of(report: &Report, saved: Option<&Report>) -> Vec<Series> {
    let mut kinds: Vec<String> = Vec::new();
    for row in &report.rows {
        let kind = kind(row);
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    let places = [(Place::OutOfPlace, "out of place"), (Place::InPlace, "in place")];
    let lines = kinds.iter().flat_map(|kind| places.map(|place| (kind, place)));
    let count = kinds.len() * places.len();

    let mut all = Vec::new();
    for (number, (kind, (place, place_name))) in lines.enumerate() {
        let color = color(number, count);
        let name = format!("{kind}{place_name}");
        all.extend(line(report, kind, place, name.clone(), color.stroke_width(3), true));
        if let Some(saved) = saved {
            let paler = color.mix(0.45).stroke_width(2);
            all.extend(line(saved, kind, place, format!("{name}, saved run"), paler, false));
        }
    }
    all
}

/// The line of a run, if it has points.
fn line(
    run: &Report,
    of: &str,
    place: Place,
    name: String,
    style: ShapeStyle,
    filled: bool,
) -> Option<Series> {
    let points = |figure: fn(&Measurement) -> Option<f64>, at: fn(&Measurement, f64) -> f64| -> Vec<Point> {
        let rows = run.rows.iter().filter(|row| kind(row) == of);
        let point = |row: &Row| {
            let measured = row.measurement(place)?;
            let spread = [at(measured, measured.min), at(measured, measured.p95)];
            // The axes are logarithmic.
            let is_there = measured.loop_average.is_none() && measured.min > 0.0;
            Some(Point {
                bytes: row.size as f64,
                value: figure(measured)?,
                spread: is_there.then_some(spread),
            })
        };
        rows.filter_map(point).filter(|point| point.bytes > 0.0 && point.value > 0.0).collect()
    };
    let times = points(|m| Some(m.time), |_, time| time);
    let bandwidths = points(|m| m.busbw, |m, time| m.busbw.unwrap_or(0.0) * m.time / time);
    let points_style = if filled { style.filled() } else { style };
    (!times.is_empty()).then_some(Series { name, style, points_style, times, bandwidths })
}

fn color(number: usize, count: usize) -> RGBColor {
    if count <= COLORS.len() {
        return COLORS[number];
    }
    let (r, g, b) = HSLColor(number as f64 / count as f64, 0.8, 0.42).rgb();
    RGBColor(r, g, b)
}

/// The type, reduction and root of a row, for the legend.
fn kind(row: &Row) -> String {
    let mut words: Vec<String> = row.dtype.iter().cloned().collect();
    words.extend(row.redop.map(|redop| redop.name().to_owned()));
    words.extend(row.root.map(|root| format!("root {root}")));
    words.iter().map(|word| format!("{word} ")).collect()
}

fn paint_panel(area: &Area<'_>, &(name, points_of): &Panel, series: &[Series]) -> Result<(), DrawError> {
    let points = || series.iter().flat_map(points_of);
    let values = |point: &Point| point.spread.into_iter().flatten().chain([point.value]);
    let (low_x, high_x) = range(points().map(|point| point.bytes), 2.0);
    let (low_y, high_y) = range(points().flat_map(values), 10.0);
    let mut chart = ChartBuilder::on(area)
        .margin(15)
        // For the half of the last label that is beyond the axis.
        .margin_right(40)
        .x_label_area_size(50)
        .y_label_area_size(90)
        .build_cartesian_2d((low_x..high_x).log_scale().base(2.0), (low_y..high_y).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("size")
        .y_desc(name)
        .x_labels(14)
        .x_label_formatter(&|bytes| size::format(bytes.round() as u64))
        .y_label_formatter(&|value| format!("{value}"))
        .label_style((FONT, TEXT_SIZE))
        .light_line_style(BLACK.mix(0.06))
        .bold_line_style(BLACK.mix(0.15))
        .draw()?;
    for series in series {
        let points = points_of(series);
        let edge = |which: usize| {
            let spreads = points.iter().filter_map(move |point| Some((point.bytes, point.spread?[which])));
            spreads.collect::<Vec<_>>()
        };
        let band: Vec<_> = edge(0).into_iter().chain(edge(1).into_iter().rev()).collect();
        chart.draw_series([Polygon::new(band, series.style.color.mix(0.15))])?;
        let place = |point: &Point| (point.bytes, point.value);
        chart.draw_series(LineSeries::new(points.iter().map(place), series.style))?;
        let circle = |point| Circle::new(place(point), 4, series.points_style);
        chart.draw_series(points.iter().map(circle))?;
    }
    Ok(())
}

/// The names of the lines below each other, as far as there is room.
fn paint_legend(area: &Area<'_>, series: &[Series]) -> Result<(), DrawError> {
    let room = (area.dim_in_pixel().1 / LEGEND.1) as usize - 1;
    for (series, row) in series.iter().zip(1..=room) {
        let y = row as i32 * LEGEND.1 as i32;
        let mark = PathElement::new([(0, y), (24, y)], series.style);
        area.draw(&mark)?;
        let text = if row == room { "…" } else { &series.name };
        let above = y - TEXT_SIZE as i32 / 2;
        area.draw(&Text::new(text, (34, above), (FONT, TEXT_SIZE)))?;
    }
    Ok(())
}

/// The range that holds all values, up to the next powers of `base`.
fn range(values: impl Iterator<Item = f64>, base: f64) -> (f64, f64) {
    let (low, high) =
        values.fold((f64::INFINITY, 0.0_f64), |(low, high), value| (low.min(value), high.max(value)));
    let (low, high) = (base.powf(low.log(base).floor()), base.powf(high.log(base).ceil()));
    if low < high { (low, high) } else { (low, low * base) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::report::samples;

    fn drawn(name: &str, report: &Report, saved: Option<Report>) -> Vec<u8> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        let saved = saved.map(|report| Saved { report, path: "saved.json".to_owned() });
        Plot::new(&path, saved).finish(report).unwrap();
        std::fs::read(path).unwrap()
    }

    fn report() -> Report {
        samples::report((0..12).map(|i| samples::row(4 << (2 * i), 0.5 * f64::powi(2.0, i))).collect())
    }

    #[test]
    fn a_picture_is_drawn_in_both_formats() {
        let svg = String::from_utf8(drawn("run.svg", &report(), None)).unwrap();
        for text in ["<svg", "bus bandwidth (GB/s)", "time (µs)", "f32 sum in place", "64 KiB"] {
            assert!(svg.contains(text), "{text} is missing");
        }
        assert!(!svg.contains("saved run"));
        assert!(svg.contains("medians of the iterations, from the fastest to the 95th percentile; phalanx"));
        assert_eq!(svg.matches("<polygon").count(), 4, "a band for each line");
        assert!(drawn("run.png", &report(), None).starts_with(b"\x89PNG"));
    }

    #[test]
    fn a_run_without_end_leaves_no_empty_picture() {
        let folder = tempfile::tempdir().unwrap();
        let [old, new] = ["old.svg", "new.svg"].map(|name| folder.path().join(name));
        std::fs::write(&old, "old").unwrap();
        for path in [&old, &new] {
            let mut plot = Plot::new(path, None);
            plot.begin(&report()).unwrap();
            plot.row(&report()).unwrap();
        }
        assert_eq!(std::fs::read_to_string(old).unwrap(), "old");
        assert!(!new.exists());
        assert!(Plot::new(Path::new("/nowhere/run.svg"), None).begin(&report()).is_err());
    }

    #[test]
    fn the_saved_run_is_a_second_series() {
        let svg = String::from_utf8(drawn("run.svg", &report(), Some(report()))).unwrap();
        assert!(svg.contains("f32 sum out of place, saved run"));
    }

    #[test]
    fn one_point_and_no_bandwidth_can_be_drawn() {
        let mut report = samples::report(vec![samples::row(4096, 2.0)]);
        report.rows[0].in_place = None;
        report.rows[0].out_of_place.as_mut().unwrap().busbw = Some(0.0);
        let svg = String::from_utf8(drawn("run.svg", &report, None)).unwrap();
        assert!(!svg.contains("bus bandwidth"));
    }

    #[test]
    fn ranges_end_at_powers() {
        assert_eq!(range([3.0, 200.0].into_iter(), 10.0), (1.0, 1000.0));
        assert_eq!(range([4.0].into_iter(), 2.0), (4.0, 8.0));
    }
}
