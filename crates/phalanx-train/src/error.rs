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
    /// A GPU's driver refuses what was asked.
    #[cfg(feature = "cuda")]
    #[error("the GPU's driver: {0}")]
    Gpu(#[from] cudarc::driver::DriverError),
    /// cuBLAS is not there, or refuses a product.
    #[cfg(feature = "cuda")]
    #[error("{0}")]
    Blas(String),
    /// Another rank could not do its part. That rank has the error itself.
    #[error("rank {rank}: {what}")]
    Rank {
        /// The rank.
        rank: usize,
        /// Its error.
        what: String,
    },
    /// A checkpoint is incomplete, or a file of it is not as it was written. The text says what to do.
    #[error("{}: {what}", path.display())]
    Checkpoint {
        /// The file, or the folder of the checkpoint.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
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

    pub(crate) fn file(path: impl Into<PathBuf>, what: &str, source: std::io::Error) -> Error {
        Error::File { path: path.into(), what: what.into(), source }
    }

    /// The text with its causes, for other ranks.
    pub(crate) fn with_causes(&self) -> String {
        let causes = std::iter::successors(std::error::Error::source(self), |cause| cause.source());
        causes.fold(self.to_string(), |text, cause| format!("{text}: {cause}"))
    }
}
