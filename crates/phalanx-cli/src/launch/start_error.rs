//! Why a rank could not be started, with the remedy where there is one.

use super::limits;
use super::program::why_not;
use rustix::io::Errno;
use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::{fmt, io};

/// Why a rank could not be started.
#[derive(Debug)]
pub enum StartError {
    /// The program cannot be run.
    Program { program: OsString, why: String, source: io::Error },
    /// A log file cannot be created; the error names it.
    Log(io::Error),
    /// The launcher cannot start a thread.
    Thread { purpose: &'static str, why: String, source: io::Error },
    /// The system refuses a rank's cores.
    Binding { rank: usize, source: io::Error },
}

impl StartError {
    /// The error for a program that the system does not run. The reason is found at once: a limit may not be reached any more when the
    /// other ranks have ended.
    pub fn program(program: &OsStr, source: io::Error) -> StartError {
        let why = why_not(program, &source).unwrap_or_else(|| format!("{source}{}", remedy(&source)));
        StartError::Program { program: program.to_owned(), why, source }
    }

    /// The error for a thread that the system refuses.
    pub fn thread(purpose: &'static str, source: io::Error) -> StartError {
        StartError::Thread { purpose, why: format!("{source}{}", remedy(&source)), source }
    }

    /// The exit status that a shell gives a program that is missing or cannot be run.
    pub fn exit_code(&self) -> u8 {
        match self {
            StartError::Program { source, .. } => match source.kind() {
                io::ErrorKind::NotFound => 127,
                io::ErrorKind::WouldBlock => 1,
                _ => 126,
            },
            StartError::Log(_) | StartError::Thread { .. } | StartError::Binding { .. } => 1,
        }
    }
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StartError::Program { program, why, .. } => {
                write!(f, "cannot start {}: {why}", program.to_string_lossy())
            }
            StartError::Log(error) => error.fmt(f),
            StartError::Thread { purpose, why, .. } => {
                write!(f, "cannot start the thread that {purpose}: {why}")
            }
            StartError::Binding { rank, source } => {
                write!(f, "cannot bind rank {rank} to its cores: {source}; use --bind-to none")
            }
        }
    }
}

impl Error for StartError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        let (StartError::Program { source, .. }
        | StartError::Log(source)
        | StartError::Binding { source, .. }
        | StartError::Thread { source, .. }) = self;
        Some(source)
    }
}

/// What to do about an error that the user can fix; empty for others.
pub fn remedy(error: &io::Error) -> String {
    match Errno::from_io_error(error) {
        Some(Errno::MFILE) => "; raise `ulimit -n`".to_owned(),
        _ => limits::behind(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(program: &str, error: Errno) -> String {
        StartError::program(OsStr::new(program), error.into()).to_string()
    }

    #[test]
    fn too_few_descriptors_have_a_remedy() {
        assert!(message("tool", Errno::MFILE).ends_with("; raise `ulimit -n`"));
    }

    #[test]
    fn too_many_processes_have_a_limit() {
        let said = message("tool", Errno::AGAIN);
        assert!(["ulimit -u", "pids.max", "threads-max"].iter().any(|limit| said.contains(limit)), "{said}");
    }
}
