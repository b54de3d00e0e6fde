//! Writes the report: as a table, as JSON and CSV files, as a picture.
//!
//! Each format is a file here with an [`Exporter`], which gets every row when it is complete.

mod csv;
mod json;
mod plot;
pub mod text;

use super::compare::Saved;
use super::options::PerfArgs;
use super::report::Report;
use crate::file;
use anyhow::Result;
use std::io::{self, Write};

/// Writes the report in one format.
pub trait Exporter: Send {
    /// Begins the report, which has everything but rows.
    fn begin(&mut self, report: &Report) -> Result<()>;
    /// Writes the last row of the report, which is new.
    fn row(&mut self, report: &Report) -> Result<()>;
    /// Ends the report, which has all rows.
    fn finish(&mut self, report: &Report) -> Result<()>;
}

/// Checks that the files of the options can be written and read, before there are ranks.
pub fn check(args: &PerfArgs) -> Result<()> {
    args.files().try_for_each(file::check_writable)?;
    args.compare.iter().try_for_each(|path| Saved::load(path, args.operation).map(drop))
}

/// The exporters that the options ask for.
pub fn exporters(args: &PerfArgs, saved: Option<Saved>) -> Vec<Box<dyn Exporter>> {
    let mut exporters: Vec<Box<dyn Exporter>> = Vec::new();
    if let Some(path) = &args.json {
        exporters.push(Box::new(json::Json::new(path)));
    }
    if let Some(path) = &args.csv {
        exporters.push(Box::new(csv::Csv::new(path)));
    }
    if let Some(path) = &args.plot {
        exporters.push(Box::new(plot::Plot::new(path, saved.clone())));
    }
    // A file on standard output leaves no room for the table there.
    let gives_way = args.files().any(file::is_stdout);
    let out: Box<dyn Write + Send> = if gives_way { Box::new(io::stderr()) } else { Box::new(io::stdout()) };
    // Last: a row on the screen is then already in the files.
    exporters.push(Box::new(text::Text::new(out, saved)));
    exporters
}
