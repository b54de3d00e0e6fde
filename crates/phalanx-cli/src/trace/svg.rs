//! The timeline of the last operations as a picture: a row for each rank.

use super::merge::Merged;
use super::record::{Operation, State};
use crate::picture::{self, Area, BLUE, DrawError, FONT, Format, GREEN, ORANGE, PURPLE, SKY_BLUE, VERMILION};
use anyhow::{Context, Result};
use plotters::prelude::*;
use std::collections::BTreeMap;

/// Pixels of the picture's width, and of a row's height.
const WIDTH: u32 = 1400;
const ROW: u32 = 44;
const TEXT_SIZE: u32 = 14;
const COLORS: [RGBColor; 6] = [BLUE, GREEN, PURPLE, ORANGE, SKY_BLUE, RGBColor(120, 120, 120)];
/// Operations that failed or have not ended.
const FAILED: RGBColor = VERMILION;

/// A rank's operations.
struct Row<'a> {
    rank: usize,
    operations: &'a [Operation],
    written_ns: u64,
}

/// Draws a communicator's last operations, as SVG.
pub fn draw(merged: &Merged, last: usize) -> Result<Vec<u8>> {
    let rows: Vec<Row<'_>> = merged
        .ranks
        .iter()
        .map(|(rank, record)| {
            let shown = record.records.len().saturating_sub(last);
            Row { rank: *rank, operations: &record.records[shown..], written_ns: record.written_ns }
        })
        .collect();
    let height = 110 + ROW * rows.len().max(1) as u32;
    picture::draw(Format::Svg, (WIDTH, height), &|area| paint(area, merged, &rows)).context("cannot draw")
}

fn paint(area: &Area<'_>, merged: &Merged, rows: &[Row<'_>]) -> Result<(), DrawError> {
    let mut colors: BTreeMap<&str, RGBColor> = BTreeMap::new();
    for operation in rows.iter().flat_map(|row| row.operations) {
        let next = COLORS[colors.len() % COLORS.len()];
        colors.entry(&operation.operation).or_insert(next);
    }
    let title = format!("{}: {} ranks, backend {}", merged.name, merged.world_size, merged.backend);
    let (legend, diagram) = area.titled(&title, (FONT, TEXT_SIZE + 4))?.split_vertically(22);
    paint_legend(&legend, &colors)?;
    paint_rows(area, &diagram, rows, &colors)
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
    area: &Area<'_>,
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
        let (_, y) = chart.backend_coord(&(0.0, (low + high) / 2.0));
        let name = format!("rank {}", row.rank);
        area.draw(&Text::new(name, (8, y - TEXT_SIZE as i32 / 2), (FONT, TEXT_SIZE)))?;
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
