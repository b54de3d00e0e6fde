//! The timeline of the last operations as a picture: a row for each rank.

use super::merge::Merged;
use super::record::{Operation, State};
use anyhow::{Result, anyhow};
use plotters::prelude::*;
use std::collections::BTreeMap;

const WIDTH: u32 = 1400;
const ROW: u32 = 44;
const FONT: &str = "sans-serif";
const TEXT_SIZE: u32 = 14;
/// Colours that colour-blind people, too, can tell apart (Okabe and Ito).
const COLORS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(120, 120, 120),
];
/// What failed or is not over.
const RED: RGBColor = RGBColor(213, 94, 0);

/// The picture of a communicator's last operations.
pub fn draw(merged: &Merged, last: usize) -> Result<String> {
    plotters::style::register_font(FONT, FontStyle::Normal, dejavu::sans::regular())
        .map_err(|_| anyhow!("the program's own font is damaged"))?;
    let rows: Vec<(usize, &[Operation], u64)> = merged
        .ranks
        .iter()
        .map(|(rank, record)| {
            let shown = record.records.len().saturating_sub(last);
            (*rank, &record.records[shown..], record.written_ns)
        })
        .collect();
    let mut svg = String::new();
    let height = 110 + ROW * rows.len().max(1) as u32;
    paint(SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area(), merged, &rows)
        .map_err(|error| anyhow!("cannot draw: {error}"))?;
    Ok(svg)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn paint(
    area: Area<'_>,
    merged: &Merged,
    rows: &[(usize, &[Operation], u64)],
) -> Result<(), Box<dyn std::error::Error>> {
    let (begin, end) = window(rows);
    // In milliseconds since the first shown.
    let at = |time: u64| time.saturating_sub(begin) as f64 / 1e6;
    let mut names: BTreeMap<&str, RGBColor> = BTreeMap::new();
    for operation in rows.iter().flat_map(|(_, operations, _)| *operations) {
        let next = COLORS[names.len() % COLORS.len()];
        names.entry(&operation.operation).or_insert(next);
    }
    area.fill(&WHITE)?;
    let title = format!("{}: {} ranks, backend {}", merged.name, merged.world_size, merged.backend);
    let (legend, diagram) = area.titled(&title, (FONT, TEXT_SIZE + 4))?.split_vertically(22);
    for (i, (name, color)) in
        names.iter().map(|(name, color)| (*name, *color)).chain([("not over, or failed", RED)]).enumerate()
    {
        let x = 80 + 170 * i as i32;
        legend.draw(&Rectangle::new([(x, 4), (x + 14, 16)], color.filled()))?;
        legend.draw(&Text::new(name.to_owned(), (x + 20, 3), (FONT, TEXT_SIZE)))?;
    }
    let mut chart = ChartBuilder::on(&diagram)
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
    for (row, (rank, operations, written)) in rows.iter().enumerate() {
        let (low, high) = ((rows.len() - row - 1) as f64 + 0.15, (rows.len() - row) as f64 - 0.15);
        let bars = operations.iter().map(|operation| {
            let start = if operation.started_ns == 0 { operation.enqueued_ns } else { operation.started_ns };
            let over = if operation.ended_ns == 0 { *written } else { operation.ended_ns };
            let color =
                if operation.state == State::Completed { names[operation.operation.as_str()] } else { RED };
            // Messages overlap with each other and with what follows.
            let low = if operation.is_message() { (low + high) / 2.0 } else { low };
            Rectangle::new([(at(start), low), (at(over.max(start)), high)], color.mix(0.8).filled())
        });
        chart.draw_series(bars)?;
        let (_, y) = chart.backend_coord(&(0.0, (low + high) / 2.0));
        area.draw(&Text::new(format!("rank {rank}"), (8, y - TEXT_SIZE as i32 / 2), (FONT, TEXT_SIZE)))?;
    }
    area.present()?;
    Ok(())
}

/// From the first shown operation to the last record.
fn window(rows: &[(usize, &[Operation], u64)]) -> (u64, u64) {
    let begin = rows.iter().filter_map(|(_, operations, _)| operations.first()).map(|o| o.enqueued_ns).min();
    let ends = rows.iter().flat_map(|(_, operations, written)| {
        let open = operations.iter().any(|operation| operation.ended_ns == 0);
        operations.iter().map(|operation| operation.ended_ns).chain(open.then_some(*written))
    });
    let begin = begin.unwrap_or(0);
    (begin, ends.max().unwrap_or(begin).max(begin + 1))
}
