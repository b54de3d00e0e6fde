//! What a job runs on this node.

use super::binding::Binding;
use super::output::Output;
use std::cell::Cell;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// Time for ranks to end after SIGTERM, unless `--grace` gives another.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(5);

/// A program, its number of ranks on this node, and how they are treated.
#[derive(Debug)]
pub struct Job {
    pub program: OsString,
    pub arguments: Vec<OsString>,
    pub ranks: usize,
    pub output: Output,
    /// The folder for files with each rank's output.
    pub log_dir: Option<PathBuf>,
    pub timeout: Option<Duration>,
    /// Time for ranks to end after SIGTERM before they are killed.
    pub grace: Duration,
    /// Whether the other ranks go on when one fails.
    pub keep_going: bool,
    /// With fewer ranks the job ends all the same.
    pub min_ranks: usize,
    pub restarts: Restarts,
    /// Whether the ranks count their operations for `--metrics`.
    pub serves_metrics: bool,
    pub binding: Binding,
    /// Whether it is said which cores each rank has.
    pub reports_bindings: bool,
}

/// How often failed ranks are started anew.
#[derive(Debug, Default)]
pub struct Restarts {
    pub most: u32,
    done: Cell<u32>,
}

impl Restarts {
    pub fn at_most(most: u32) -> Restarts {
        Restarts { most, done: Cell::new(0) }
    }

    pub fn done(&self) -> u32 {
        self.done.get()
    }

    /// Whether one more is allowed, as far as this node knows.
    pub fn is_left(&self) -> bool {
        self.done() < self.most
    }

    /// Notes that so many were done.
    pub fn note(&self, done: u32) {
        self.done.set(done.min(self.most));
    }
}
