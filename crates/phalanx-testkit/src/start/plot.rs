//! The table as a picture: seconds to join and exchange over the number of ranks, on logarithmic scales.

use plotters::prelude::*;
use std::error::Error;

const SIZE: (u32, u32) = (720, 420);
const FONT: (&str, u32) = ("sans-serif", 14);
/// Colours that colour-blind people can tell apart, too (Okabe and Ito).
const COLORS: [RGBColor; 2] = [RGBColor(0, 114, 178), RGBColor(213, 94, 0)];

/// Ranks and seconds of a store.
pub struct Line {
    pub name: &'static str,
    pub points: Vec<(usize, f64)>,
}

/// An SVG of the lines, and of what N log N would be from the first point of the first.
pub fn draw(lines: &[Line]) -> Result<String, Box<dyn Error>> {
    plotters::style::register_font(FONT.0, FontStyle::Normal, dejavu::sans::regular())
        .map_err(|_| "the font of the picture is damaged")?;
    let measured =
        lines.iter().flat_map(|line| line.points.iter().map(|(ranks, seconds)| (*ranks as f64, *seconds)));
    let measured: Vec<(f64, f64)> = measured.collect();
    let (first, seconds) = *measured.first().ok_or("there is nothing to draw")?;
    let n_log_n = |ranks: f64| (ranks, seconds * ranks * ranks.log2() / (first * first.log2()));
    let ideal: Vec<(f64, f64)> = lines[0].points.iter().map(|(ranks, _)| n_log_n(*ranks as f64)).collect();
    let all = || measured.iter().chain(&ideal).copied();
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        let (x, y) = (around(all().map(|point| point.0)), around(all().map(|point| point.1)));
        let mut chart = ChartBuilder::on(&area)
            .margin(15)
            .x_label_area_size(45)
            .y_label_area_size(70)
            .build_cartesian_2d((x.0..x.1).log_scale(), (y.0..y.1).log_scale())?;
        chart
            .configure_mesh()
            .x_desc("ranks")
            .y_desc("seconds to join and exchange")
            .x_label_formatter(&|ranks| format!("{ranks}"))
            .y_label_formatter(&|seconds| format!("{seconds}"))
            .label_style(FONT)
            .light_line_style(BLACK.mix(0.06))
            .draw()?;
        for (line, color) in lines.iter().zip(COLORS.iter().cycle()) {
            let points = line.points.iter().map(|(ranks, seconds)| (*ranks as f64, *seconds));
            let drawn = chart.draw_series(LineSeries::new(points, color.stroke_width(2)).point_size(4))?;
            drawn
                .label(line.name)
                .legend(|(x, y)| PathElement::new([(x, y), (x + 20, y)], color.stroke_width(2)));
        }
        let grey = RGBColor(120, 120, 120);
        let drawn = chart.draw_series(DashedLineSeries::new(ideal, 6, 4, grey.stroke_width(1)))?;
        drawn
            .label("N log N")
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], grey.stroke_width(1)));
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .border_style(BLACK.mix(0.3))
            .label_font(FONT)
            .draw()?;
        area.present()?;
    }
    Ok(svg)
}

/// A range that holds all values, with some room.
fn around(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) =
        values.fold((f64::MAX, f64::MIN_POSITIVE), |(low, high), value| (low.min(value), high.max(value)));
    (low / 1.5, high * 1.5)
}
