//! A progress bar on standard error, if that is a terminal.
//!
//! The bar is erased while a row is printed, because the table may go to the same terminal.

use crate::size;
use std::io::{self, IsTerminal, Write};
use std::time::Instant;

/// Columns of the bar itself.
const WIDTH: usize = 30;

/// The progress of a run.
pub struct Progress {
    rows: usize,
    started: Instant,
    is_shown: bool,
    /// The bar as it is drawn.
    line: String,
}

impl Progress {
    /// Progress over this number of rows.
    pub fn new(rows: usize) -> Progress {
        Progress { rows, started: Instant::now(), is_shown: io::stderr().is_terminal(), line: String::new() }
    }

    /// Draws the bar for the row that is measured now, of a size in bytes.
    pub fn draw(&mut self, row: usize, size: usize) {
        // A run without end has no number of rows.
        self.rows = self.rows.max(row + 1);
        let filled = WIDTH * row / self.rows;
        self.line = format!(
            "{}{} {row}/{} {}s measuring {}",
            "█".repeat(filled),
            "░".repeat(WIDTH - filled),
            self.rows,
            self.started.elapsed().as_secs(),
            size::format(size as u64)
        );
        self.redraw();
    }

    /// Erases the bar while `show` runs.
    pub fn hidden<R>(&self, show: impl FnOnce() -> R) -> R {
        self.erase();
        let result = show();
        self.redraw();
        result
    }

    pub fn erase(&self) {
        self.write("");
    }

    fn redraw(&self) {
        self.write(&self.line);
    }

    fn write(&self, line: &str) {
        if self.is_shown {
            // To the first column, erase to the end of the line.
            let _ = write!(io::stderr(), "\r\x1b[K{line}");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.erase();
    }
}
