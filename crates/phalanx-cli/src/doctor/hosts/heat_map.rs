//! The bandwidth between all hosts as a picture: a square for each pair, the darker the slower.

use super::Network;
use crate::picture::{self, Area, DrawError, FONT, Format};
use anyhow::{Context, Result};
use plotters::prelude::*;
use plotters::style::IntoTextStyle;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Pixels of the margin and of the whole map's side, at most and at least for a host.
const MARGIN: u32 = 130;
const MAP: u32 = 900;
const LEAST: u32 = 4;
const MOST: u32 = 60;
const TEXT_SIZE: u32 = 14;

pub fn draw(network: &Network, format: Format) -> Result<Vec<u8>> {
    let hosts = network.hosts.len() as u32;
    let side = (MAP / hosts).clamp(LEAST, MOST);
    let size = (MARGIN + hosts * side + 20, MARGIN + hosts * side + 20);
    picture::draw(format, size, &|area| paint(area, network, side)).context("cannot draw the picture")
}

fn paint(area: &Area<'_>, network: &Network, side: u32) -> Result<(), DrawError> {
    let fastest =
        network.links.iter().flat_map(|link| [link.bandwidth.0, link.bandwidth.1]).fold(0.0, f64::max);
    let style = (FONT, TEXT_SIZE).into_text_style(area);
    let title = format!("GB/s from row to column; white is {:.2}, black is 0", fastest * 1e-9);
    area.draw(&Text::new(title, (10, 8), style.clone()))?;
    let at = |number: usize| (MARGIN + number as u32 * side) as i32;
    let square = |row: usize, column: usize, bandwidth: f64| {
        let share = if fastest > 0.0 { (bandwidth / fastest).clamp(0.0, 1.0) } else { 0.0 };
        // From black over red and yellow to white.
        let part = |from: f64| (255.0 * ((share - from) * 3.0).clamp(0.0, 1.0)) as u8;
        let color = RGBColor(part(0.0), part(1.0 / 3.0), part(2.0 / 3.0));
        let (x, y) = (at(column), at(row));
        area.draw(&Rectangle::new([(x, y), (x + side as i32 - 1, y + side as i32 - 1)], color.filled()))
    };
    for link in &network.links {
        let (a, b) = link.hosts;
        square(a, b, link.bandwidth.0)?;
        square(b, a, link.bandwidth.1)?;
    }
    // Names where there is room for them.
    let every = (TEXT_SIZE + 2).div_ceil(side) as usize;
    for (number, host) in network.hosts.iter().enumerate().step_by(every) {
        let middle = at(number) + side as i32 / 2;
        let row = style.pos(Pos::new(HPos::Right, VPos::Center));
        area.draw(&Text::new(host.name.clone(), (MARGIN as i32 - 6, middle), row))?;
        let column = style.pos(Pos::new(HPos::Center, VPos::Bottom));
        area.draw(&Text::new(number.to_string(), (middle, MARGIN as i32 - 6), column))?;
    }
    Ok(())
}
