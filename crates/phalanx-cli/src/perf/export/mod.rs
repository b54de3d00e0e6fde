//! What is made of the results: a table for people, files for programs, a picture.
//!
//! A format is one file and one [`Exporter`]; it learns of every row as it comes.

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

/// A format that results are written in.
pub trait Exporter: Send {
    /// The run starts: everything is known but the rows.
    fn begin(&mut self, report: &Report) -> Result<()>;
    /// The last row of the report is new.
    fn row(&mut self, report: &Report) -> Result<()>;
    /// All rows are there.
    fn finish(&mut self, report: &Report) -> Result<()>;
}

/// Sees whether a file can be written, and leaves what is there as it is.
fn check_writable(path: &Path) -> io::Result<()> {
    let is_new = path.symlink_metadata().is_err();
    File::options().append(true).create(true).open(path)?;
    if is_new { fs::remove_file(path) } else { Ok(()) }
}

/// The exporters that the options ask for. Files that cannot be written are an error now, not after
/// the run.
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
    // Last: what a person reads first is then already in the files.
    exporters.push(Box::new(text::Text::new(std::io::stdout(), saved)));
    Ok(exporters)
}
