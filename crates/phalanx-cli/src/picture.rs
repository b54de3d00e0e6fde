//! Pictures as SVG or PNG, drawn with plotters.
//!
//! Text is set in a font that is part of the program: none has to be installed.

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters_backend::{BackendColor, BackendCoord, BackendStyle, BackendTextStyle, DrawingErrorKind};
use std::io;

pub const FONT: &str = "sans-serif";

/// Colours that colour-blind people can tell apart, too (Okabe and Ito).
pub const BLUE: RGBColor = RGBColor(0, 114, 178);
pub const VERMILION: RGBColor = RGBColor(213, 94, 0);
pub const GREEN: RGBColor = RGBColor(0, 158, 115);
pub const PURPLE: RGBColor = RGBColor(204, 121, 167);
pub const ORANGE: RGBColor = RGBColor(230, 159, 0);
pub const SKY_BLUE: RGBColor = RGBColor(86, 180, 233);

/// The form of a picture's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Svg,
    Png,
}

/// A part of a picture, to draw on.
pub type Area<'a> = DrawingArea<Canvas<'a>, Shift>;

/// Why something could not be drawn.
pub type DrawError = DrawingAreaErrorKind<io::Error>;

/// Paints a picture of this size in pixels. Returns the bytes of its file.
pub fn draw(
    format: Format,
    size: (u32, u32),
    paint: &dyn Fn(&Area<'_>) -> Result<(), DrawError>,
) -> Result<Vec<u8>> {
    plotters::style::register_font(FONT, FontStyle::Normal, dejavu::sans::regular())
        .map_err(|_| anyhow!("the program's own font is damaged"))?;
    let painted = |canvas: Canvas<'_>| {
        let area = canvas.into_drawing_area();
        area.fill(&WHITE).and_then(|()| paint(&area)).and_then(|()| area.present())
    };
    match format {
        Format::Svg => {
            let mut text = String::new();
            painted(Canvas::Svg(SVGBackend::with_string(&mut text, size)))?;
            Ok(text.into_bytes())
        }
        Format::Png => {
            let mut pixels = vec![0; 3 * size.0 as usize * size.1 as usize];
            painted(Canvas::Png(BitMapBackend::with_buffer(&mut pixels, size)))?;
            encode_png(size, &pixels)
        }
    }
}

fn encode_png((width, height): (u32, u32), pixels: &[u8]) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(pixels)?;
    writer.finish()?;
    Ok(bytes)
}

/// A picture of either format. Drawing code is generic over its backend: with one type for both formats it is
/// compiled once.
pub enum Canvas<'a> {
    Svg(SVGBackend<'a>),
    Png(BitMapBackend<'a>),
}

/// Calls a method of the backend.
macro_rules! delegate {
    ($canvas:ident, $backend:ident => $call:expr) => {
        match $canvas {
            Canvas::Svg($backend) => $call.map_err(as_io_error),
            Canvas::Png($backend) => $call.map_err(as_io_error),
        }
    };
}

fn as_io_error<E: std::error::Error + Send + Sync + 'static>(
    error: DrawingErrorKind<E>,
) -> DrawingErrorKind<io::Error> {
    match error {
        DrawingErrorKind::DrawingError(error) => DrawingErrorKind::DrawingError(io::Error::other(error)),
        DrawingErrorKind::FontError(error) => DrawingErrorKind::FontError(error),
    }
}

type Drawn = Result<(), DrawingErrorKind<io::Error>>;

impl DrawingBackend for Canvas<'_> {
    type ErrorType = io::Error;

    fn get_size(&self) -> (u32, u32) {
        match self {
            Canvas::Svg(backend) => backend.get_size(),
            Canvas::Png(backend) => backend.get_size(),
        }
    }

    fn ensure_prepared(&mut self) -> Drawn {
        delegate!(self, backend => backend.ensure_prepared())
    }

    fn present(&mut self) -> Drawn {
        delegate!(self, backend => backend.present())
    }

    fn draw_pixel(&mut self, point: BackendCoord, color: BackendColor) -> Drawn {
        delegate!(self, backend => backend.draw_pixel(point, color))
    }

    fn draw_line<S: BackendStyle>(&mut self, from: BackendCoord, to: BackendCoord, style: &S) -> Drawn {
        delegate!(self, backend => backend.draw_line(from, to, style))
    }

    fn draw_rect<S: BackendStyle>(
        &mut self,
        upper_left: BackendCoord,
        bottom_right: BackendCoord,
        style: &S,
        fill: bool,
    ) -> Drawn {
        delegate!(self, backend => backend.draw_rect(upper_left, bottom_right, style, fill))
    }

    fn draw_path<S: BackendStyle, I: IntoIterator<Item = BackendCoord>>(
        &mut self,
        path: I,
        style: &S,
    ) -> Drawn {
        delegate!(self, backend => backend.draw_path(path, style))
    }

    fn draw_circle<S: BackendStyle>(
        &mut self,
        center: BackendCoord,
        radius: u32,
        style: &S,
        fill: bool,
    ) -> Drawn {
        delegate!(self, backend => backend.draw_circle(center, radius, style, fill))
    }

    fn fill_polygon<S: BackendStyle, I: IntoIterator<Item = BackendCoord>>(
        &mut self,
        vertices: I,
        style: &S,
    ) -> Drawn {
        delegate!(self, backend => backend.fill_polygon(vertices, style))
    }

    fn draw_text<S: BackendTextStyle>(&mut self, text: &str, style: &S, at: BackendCoord) -> Drawn {
        delegate!(self, backend => backend.draw_text(text, style, at))
    }
}
