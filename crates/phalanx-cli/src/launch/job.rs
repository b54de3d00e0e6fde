//! What a job runs on this node.

use super::output::Output;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// A program, its number of ranks on this node, and the handling of their output.
#[derive(Debug)]
pub struct Job {
    pub program: OsString,
    pub arguments: Vec<OsString>,
    pub ranks: usize,
    pub output: Output,
    /// The folder for files with each rank's output.
    pub log_dir: Option<PathBuf>,
    pub timeout: Option<Duration>,
}
