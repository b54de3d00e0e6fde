//! The timeline of the last operations as a picture: the verdict, and a row for each rank. A rank at fault has a row
//! even without a record.

use super::diagnosis::{self, Finding};
use super::fold;
use super::merge::Merged;
use super::record::{Operation, State};
use crate::picture::{self, Area, BLUE, DrawError, FONT, Format, GREEN, ORANGE, PURPLE, SKY_BLUE, VERMILION};
use anyhow::{Context, Result};
use plotters::prelude::*;
use plotters::style::IntoTextStyle;
use std::collections::{BTreeMap, BTreeSet};

/// Pixels of the picture's width, and of a row's height.
const WIDTH: u32 = 1400;
const ROW: u32 = 44;
const TEXT_SIZE: u32 = 14;
const COLORS: [RGBColor; 6] = [BLUE, GREEN, PURPLE, ORANGE, SKY_BLUE, RGBColor(120, 120, 120)];
/// Operations that failed or have not ended, and ranks at fault.
const FAILED: RGBColor = VERMILION;
/// Characters of the verdict in a line, and pixels of a line's height.
const LINE: (usize, u32) = (170, 20);
/// The most ranks at fault without a record that get a row.
const MAX_ABSENT: usize = 16;
/// Characters of a host's name.
const MAX_NAME: usize = 8;

/// A rank's operations. Of many ranks, a host's first rank stands for those of its host.
struct Row<'a> {
    rank: usize,
    name: String,
    operations: &'a [Operation],
    written_ns: u64,
    has_record: bool,
    is_at_fault: bool,
}

/// Draws a communicator's last operations, as SVG.
pub fn draw(merged: &Merged, last: usize) -> Result<Vec<u8>> {
    let findings = diagnosis::find(merged);
    let (rows, verdict) = (rows(merged, &findings, last), verdict(&findings));
    let height = 110 + LINE.1 * verdict.len() as u32 + ROW * rows.len().max(1) as u32;
    picture::draw(Format::Svg, (WIDTH, height), &|area| paint(area, merged, &verdict, &rows))
        .context("cannot draw")
}

fn rows<'a>(merged: &'a Merged, findings: &[Finding], last: usize) -> Vec<Row<'a>> {
    let at_fault: BTreeSet<usize> = findings.iter().flat_map(|finding| &finding.ranks).copied().collect();
    let absent = merged.absent().into_iter().filter(|rank| at_fault.contains(rank)).take(MAX_ABSENT);
    let absent = absent.map(|rank| Row {
        rank,
        name: format!("rank {rank}"),
        operations: &[],
        written_ns: 0,
        has_record: false,
        is_at_fault: true,
    });
    let shown = fold::shown(merged, findings);
    let recorded = fold::rows(merged, &shown, fold::MAX_HOSTS).into_iter().map(|fold::Row { rank, host }| {
        let record = &merged.ranks[&rank];
        let shown = record.records.len().saturating_sub(last);
        let name = match host {
            None => format!("rank {rank}"),
            Some((host, ranks)) => format!("{} ×{ranks}", host.chars().take(MAX_NAME).collect::<String>()),
        };
        Row {
            rank,
            name,
            operations: &record.records[shown..],
            written_ns: record.written_ns,
            has_record: true,
            is_at_fault: at_fault.contains(&rank),
        }
    });
    let mut rows: Vec<Row<'_>> = recorded.chain(absent).collect();
    rows.sort_unstable_by_key(|row| row.rank);
    rows
}

/// The findings as lines that fit the picture.
fn verdict(findings: &[Finding]) -> Vec<String> {
    let mut lines = Vec::new();
    for finding in findings {
        let mut line = String::new();
        for word in format!("{} — {}", finding.verdict(), finding.why).split(' ') {
            if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > LINE.0 {
                lines.push(std::mem::take(&mut line));
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line += word;
        }
        lines.push(line);
    }
    lines
}

fn paint(area: &Area<'_>, merged: &Merged, verdict: &[String], rows: &[Row<'_>]) -> Result<(), DrawError> {
    let mut colors: BTreeMap<&str, RGBColor> = BTreeMap::new();
    for operation in rows.iter().flat_map(|row| row.operations) {
        let next = COLORS[colors.len() % COLORS.len()];
        colors.entry(&operation.operation).or_insert(next);
    }
    let title = format!("{}: {} ranks, backend {}", merged.name, merged.world_size, merged.backend);
    let title = match fold::is_folded(merged) {
        true => format!("{title}; a row for each of the first {} hosts, of its first rank", fold::MAX_HOSTS),
        false => title,
    };
    let area = area.titled(&title, (FONT, TEXT_SIZE + 4))?;
    let (text, area) = area.split_vertically(LINE.1 * verdict.len() as u32);
    for (number, line) in verdict.iter().enumerate() {
        let at = (8, (LINE.1 * number as u32) as i32 + 3);
        text.draw(&Text::new(line.clone(), at, (FONT, TEXT_SIZE).into_text_style(&text).color(&FAILED)))?;
    }
    let (legend, diagram) = area.split_vertically(22);
    paint_legend(&legend, &colors)?;
    paint_rows(&diagram, rows, &colors)
}

fn paint_legend(legend: &Area<'_>, colors: &BTreeMap<&str, RGBColor>) -> Result<(), DrawError> {
    let entries = colors.iter().map(|(name, color)| (*name, *color)).chain([("not over, or failed", FAILED)]);
    for (i, (name, color)) in entries.enumerate() {
        let x = 80 + 170 * i as i32;
        legend.draw(&Rectangle::new([(x, 4), (x + 14, 16)], color.filled()))?;
        legend.draw(&Text::new(name.to_owned(), (x + 20, 3), (FONT, TEXT_SIZE)))?;
    }
    Ok(())
}

fn paint_rows(
    diagram: &Area<'_>,
    rows: &[Row<'_>],
    colors: &BTreeMap<&str, RGBColor>,
) -> Result<(), DrawError> {
    let (begin, end) = window(rows);
    // In milliseconds since the first shown operation.
    let at = |time: u64| time.saturating_sub(begin) as f64 / 1e6;
    let mut chart = ChartBuilder::on(diagram)
        .margin_right(20)
        .x_label_area_size(40)
        .y_label_area_size(80)
        .build_cartesian_2d(0.0..at(end).max(1e-6), 0.0..rows.len().max(1) as f64)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .disable_y_axis()
        .x_desc("ms")
        .label_style((FONT, TEXT_SIZE))
        .draw()?;
    for (index, row) in rows.iter().enumerate() {
        let (low, high) = ((rows.len() - index - 1) as f64 + 0.15, (rows.len() - index) as f64 - 0.15);
        let bars = row.operations.iter().map(|operation| {
            let start = if operation.started_ns == 0 { operation.enqueued_ns } else { operation.started_ns };
            let over = if operation.ended_ns == 0 { row.written_ns } else { operation.ended_ns };
            let color = if operation.state == State::Completed {
                colors[operation.operation.as_str()]
            } else {
                FAILED
            };
            // Messages overlap with each other and with later operations.
            let low = if operation.is_message() { (low + high) / 2.0 } else { low };
            Rectangle::new([(at(start), low), (at(over.max(start)), high)], color.mix(0.8).filled())
        });
        chart.draw_series(bars)?;
        // The chart's places are the picture's, the diagram's begin at its own corner.
        let (left, y) = chart.backend_coord(&(0.0, (low + high) / 2.0));
        let y = y - diagram.get_pixel_range().1.start - TEXT_SIZE as i32 / 2;
        let style = (FONT, TEXT_SIZE).into_text_style(diagram);
        let style = if row.is_at_fault { style.color(&FAILED) } else { style };
        diagram.draw(&Text::new(row.name.clone(), (8, y), style.clone()))?;
        if !row.has_record {
            diagram.draw(&Text::new("no record", (left + 8, y), style))?;
        }
    }
    Ok(())
}

/// From the first shown operation to the last record.
fn window(rows: &[Row<'_>]) -> (u64, u64) {
    let begin = rows.iter().filter_map(|row| row.operations.first()).map(|o| o.enqueued_ns).min();
    let ends = rows.iter().flat_map(|row| {
        let open = row.operations.iter().any(|operation| operation.ended_ns == 0);
        row.operations.iter().map(|operation| operation.ended_ns).chain(open.then_some(row.written_ns))
    });
    let begin = begin.unwrap_or(0);
    (begin, ends.max().unwrap_or(begin).max(begin + 1))
}
