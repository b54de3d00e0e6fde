//! Writes the report: as a table, as JSON and CSV files, as a picture.
//!
//! Each format is a file here with an [`Exporter`], which gets every row when it is complete.

mod csv;
mod json;
mod plot;
mod text;

use super::compare::Saved;
use super::options::PerfArgs;
use super::report::Report;
use anyhow::Result;
use std::fs::{self, File};
use std::io;
use std::path::Path;

/// Writes the report in one format.
pub trait Exporter: Send {
    /// Begins the report, which has everything but rows.
    fn begin(&mut self, report: &Report) -> Result<()>;
    /// Writes the last row of the report, which is new.
    fn row(&mut self, report: &Report) -> Result<()>;
    /// Ends the report, which has all rows.
    fn finish(&mut self, report: &Report) -> Result<()>;
}

/// Checks that a file can be written, without changing it.
fn check_writable(path: &Path) -> io::Result<()> {
    let is_new = path.symlink_metadata().is_err();
    File::options().append(true).create(true).open(path)?;
    if is_new { fs::remove_file(path) } else { Ok(()) }
}

/// The exporters that the options ask for. A file that cannot be written is an error before the run.
pub fn exporters(args: &PerfArgs, saved: Option<Saved>) -> Result<Vec<Box<dyn Exporter>>> {
    let mut exporters: Vec<Box<dyn Exporter>> = Vec::new();
    if let Some(path) = &args.json {
        exporters.push(Box::new(json::Json::new(path)));
    }
    if let Some(path) = &args.csv {
        exporters.push(Box::new(csv::Csv::new(path)));
    }
    if let Some(path) = &args.plot {
        exporters.push(Box::new(plot::Plot::create(path, saved.clone())?));
    }
    // Last: a row on the screen is then already in the files.
    exporters.push(Box::new(text::Text::new(std::io::stdout(), saved)));
    Ok(exporters)
}
