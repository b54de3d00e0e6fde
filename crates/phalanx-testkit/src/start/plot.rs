//! The table as a picture: seconds to join and exchange over the number of ranks, both on logarithmic scales, and what N log N
//! would be.

use std::fmt::Write;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 400.0;
const MARGIN: f64 = 60.0;

/// An SVG of ranks and seconds.
pub fn draw(rows: &[(usize, f64)]) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"13\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
    );
    let Some((first, seconds)) = rows.first().copied() else {
        return svg + "</svg>\n";
    };
    let n_log_n = |ranks: usize| ranks as f64 * (ranks as f64).log2();
    let expected: Vec<(usize, f64)> =
        rows.iter().map(|(ranks, _)| (*ranks, seconds * n_log_n(*ranks) / n_log_n(first))).collect();
    let all = || rows.iter().chain(&expected);
    let x_axis = Axis::over(all().map(|(ranks, _)| *ranks as f64), MARGIN, WIDTH - 20.0);
    let y_axis = Axis::over(all().map(|(_, seconds)| *seconds), HEIGHT - MARGIN, 20.0);
    let place = |(ranks, seconds): &(usize, f64)| (x_axis.at(*ranks as f64), y_axis.at(*seconds));
    for (points, color, name, dashes) in
        [(rows, "#0072b2", "measured", ""), (&expected[..], "#888888", "N log N", "6 4")]
    {
        let line: Vec<String> =
            points.iter().map(|point| format!("{:.1},{:.1}", place(point).0, place(point).1)).collect();
        // Writing to a string does not fail.
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\" stroke-dasharray=\"{dashes}\"/>",
            line.join(" ")
        );
        if let Some((x, y)) = points.last().map(place) {
            let y = if name == "measured" { y + 16.0 } else { y - 6.0 };
            let _ = writeln!(
                svg,
                "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"end\" fill=\"{color}\">{name}</text>"
            );
        }
    }
    for point in rows {
        let (x, y) = place(point);
        let _ = writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"#0072b2\"/>");
        let _ = writeln!(
            svg,
            "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            HEIGHT - MARGIN + 20.0,
            point.0
        );
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{:.1}</text>",
            MARGIN - 8.0,
            y + 4.0,
            point.1
        );
    }
    let _ = writeln!(
        svg,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">ranks</text>",
        WIDTH / 2.0,
        HEIGHT - 15.0
    );
    let _ = writeln!(svg, "<text x=\"10\" y=\"16\">seconds to join and exchange</text>");
    svg + "</svg>\n"
}

/// A logarithmic axis.
struct Axis {
    logs: (f64, f64),
    pixels: (f64, f64),
}

impl Axis {
    fn over(values: impl Iterator<Item = f64>, begin: f64, end: f64) -> Axis {
        let logs = values.map(|value| value.max(1e-3).ln());
        let (low, high) = logs.fold((f64::MAX, f64::MIN), |(low, high), log| (low.min(log), high.max(log)));
        Axis { logs: (low, high.max(low + 1e-3)), pixels: (begin, end) }
    }

    fn at(&self, value: f64) -> f64 {
        let part = (value.max(1e-3).ln() - self.logs.0) / (self.logs.1 - self.logs.0);
        self.pixels.0 + part * (self.pixels.1 - self.pixels.0)
    }
}
