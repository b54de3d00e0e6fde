//! Follows a run: the row that is being measured, and the complete rows.

use super::report::Row;
use anyhow::Result;

/// Called by a run on one rank.
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
