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

/// A format that results are written in.
pub trait Exporter: Send {
    /// The run starts: everything is known but the rows.
    fn begin(&mut self, report: &Report) -> Result<()>;
    /// The last row of the report is new.
    fn row(&mut self, report: &Report) -> Result<()>;
    /// All rows are there.
    fn finish(&mut self, report: &Report) -> Result<()>;
}

/// The exporters that the options ask for. Files that cannot be written are an error now, not after
/// the run.
pub fn exporters(args: &PerfArgs, saved: Option<Saved>) -> Result<Vec<Box<dyn Exporter>>> {
    let mut exporters: Vec<Box<dyn Exporter>> = Vec::new();
    if let Some(path) = &args.json {
        exporters.push(Box::new(json::Json::new(path)));
    }
    if let Some(path) = &args.csv {
        exporters.push(Box::new(csv::Csv::create(path)?));
    }
    if let Some(path) = &args.plot {
        exporters.push(Box::new(plot::Plot::create(path, saved.clone())?));
    }
    // Last: what a person reads first is then already in the files.
    exporters.push(Box::new(text::Text::new(std::io::stdout(), saved)));
    Ok(exporters)
}
