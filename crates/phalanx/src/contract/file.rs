//! [`SharedFiles`]: files that all ranks of a communicator read and write together.

use crate::types::error::Result;
use std::io;
use std::ops::Range;
use std::path::Path;

/// What the ranks do with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileAccess {
    Read,
    Write,
}

/// A backend's own way to files.
pub(crate) trait SharedFiles {
    /// Opens a file that every rank could open by itself. Collective. The inner error is the file's: the communicator goes on.
    fn open(&self, path: &Path, access: FileAccess) -> Result<io::Result<Box<dyn SharedFile + '_>>>;
}

/// A file that is open on all ranks. Each function is collective, also after an error.
pub(crate) trait SharedFile {
    /// Writes bytes of this rank to these places, in the file's order; less than 2 GiB.
    fn write(&self, places: &[Range<u64>], bytes: &[u8]) -> io::Result<()>;

    /// Fills `bytes` from these places, which are in the file's order; less than 2 GiB.
    fn read(&self, places: &[Range<u64>], bytes: &mut [u8]) -> io::Result<()>;

    /// Closes the file. Then a plain file has what was written.
    fn close(self: Box<Self>) -> io::Result<()>;
}
