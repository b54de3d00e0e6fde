//! A progress bar on standard error, for people: shown only where that is a terminal.
//!
//! It steps aside while a row is printed, because the table may go to the same terminal.

use crate::size;
use indicatif::{ProgressBar, ProgressStyle};

/// How far the run is.
pub struct Progress(ProgressBar);

impl Progress {
    /// A bar for so many rows. indicatif itself hides it where standard error is no terminal.
    pub fn new(rows: usize) -> Progress {
        let bar = ProgressBar::new(rows as u64);
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} measuring {msg}");
        bar.set_style(style.expect("the template is well-formed"));
        Progress(bar)
    }

    pub fn starts(&self, row: usize, size: usize) {
        // Cycles without end have no length.
        self.0.set_length(self.0.length().unwrap_or(0).max(row as u64 + 1));
        self.0.set_position(row as u64);
        self.0.set_message(size::format(size as u64));
    }

    /// Does something with the bar out of the way.
    pub fn hidden<R>(&self, show: impl FnOnce() -> R) -> R {
        self.0.suspend(show)
    }

    pub fn finish(&self) {
        self.0.finish_and_clear();
    }
}
