//! The observer of a run, which is told of its sizes and rows.

use super::report::Row;
use anyhow::Result;

/// Follows a run on one rank.
pub trait Observer {
    /// The measurement of this row begins; `size` is in bytes.
    fn row_begins(&mut self, row: usize, size: usize);
    /// A row is complete.
    fn row_complete(&mut self, row: Row) -> Result<()>;
}

/// The observer on every rank but 0, which alone reports.
pub struct Silent;

impl Observer for Silent {
    fn row_begins(&mut self, _row: usize, _size: usize) {}

    fn row_complete(&mut self, _row: Row) -> Result<()> {
        Ok(())
    }
}
