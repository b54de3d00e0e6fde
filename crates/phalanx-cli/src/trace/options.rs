//! The options of `phalanx trace`.

use std::path::PathBuf;

/// Merge the ranks' flight records, and say which rank holds the others up and why.
///
/// A rank writes its record when its communicator fails, if PHALANX_TRACE_DIR names a folder; when it gets
/// the signal that PHALANX_TRACE_SIGNAL names (USR1 or USR2); and when the program asks for it
/// (Comm::write_flight_record).
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  PHALANX_TRACE_DIR=trace phalanx launch -n 4 -- ./train\n  phalanx trace trace --svg trace.svg"
)]
pub struct TraceArgs {
    /// Files, or folders of files.
    #[arg(required = true, value_name = "FILE|FOLDER")]
    pub paths: Vec<PathBuf>,

    /// Only this communicator.
    #[arg(short, long, value_name = "NAME")]
    pub communicator: Option<String>,

    /// Write a timeline for https://ui.perfetto.dev and chrome://tracing.
    #[arg(long, value_name = "FILE")]
    pub perfetto: Option<PathBuf>,

    /// Draw the timeline of the last operations.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    /// How many of each rank's last operations the picture and the list show.
    #[arg(long, value_name = "N", default_value = "12")]
    pub last: usize,
}
