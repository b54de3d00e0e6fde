//! The options of `phalanx trace`.

use crate::parse;
use std::path::{Path, PathBuf};

/// Find the rank that held the others up, from the ranks' flight records.
///
/// A rank writes its record when its communicator fails, if PHALANX_TRACE_DIR names a folder; when it gets
/// the signal that PHALANX_TRACE_SIGNAL names (USR1 or USR2); and when the program calls
/// Comm::write_flight_record.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  PHALANX_TRACE_DIR=trace phalanx launch -n 4 -- ./train\n  phalanx trace trace --html trace.html"
)]
pub struct TraceArgs {
    /// Flight records, or folders of them.
    #[arg(required = true, value_name = "FILE|FOLDER")]
    pub paths: Vec<PathBuf>,

    /// Show this communicator only.
    #[arg(short, long, value_name = "NAME")]
    pub communicator: Option<String>,

    /// Write a timeline for https://ui.perfetto.dev and chrome://tracing to this file. - is standard output; the
    /// summary then goes to standard error.
    #[arg(long, value_name = "FILE")]
    pub perfetto: Option<PathBuf>,

    /// Draw the timeline of the last operations to this file, as SVG; - as with --perfetto.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    /// Write a page for a browser to this file: a timeline that zooms, the verdict, and who waited for whom; - as with --perfetto.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,

    /// Number of each rank's last operations in the picture and the list.
    #[arg(long, value_name = "N", value_parser = parse::count, default_value = "12", allow_negative_numbers = true)]
    pub last: usize,
}

impl TraceArgs {
    /// The files that are written.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        [&self.perfetto, &self.svg, &self.html].into_iter().flatten().map(PathBuf::as_path)
    }
}
