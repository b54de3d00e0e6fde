//! What can go wrong, beside what the communicator reports.

use std::path::PathBuf;

/// Result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// Why something could not be done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument makes no sense. Nothing was sent. The text names the value, the limit and what to do.
    #[error("{0}")]
    Usage(String),
    /// Ranks do not have what they should have in common. All of them get this error.
    #[error("{0}")]
    Mismatch(String),
    /// A communicator has failed, or refuses what was asked.
    #[error(transparent)]
    Comm(#[from] phalanx::Error),
    /// A file could not be read or written.
    #[error("{}: {what}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What was tried.
        what: String,
        /// What the operating system says.
        source: std::io::Error,
    },
}

impl Error {
    pub(crate) fn usage(text: impl Into<String>) -> Error {
        Error::Usage(text.into())
    }
}
