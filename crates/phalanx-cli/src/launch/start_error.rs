//! Why a rank could not be started, with the remedy where there is one.

use rustix::io::Errno;
use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::{fmt, io};

/// Why a rank could not be started.
#[derive(Debug)]
pub enum StartError {
    /// The program cannot be run.
    Program { program: OsString, source: io::Error },
    /// A log file cannot be created; the error names it.
    Log(io::Error),
}

impl StartError {
    /// The exit status that a shell gives a program that is missing or cannot be run.
    pub fn exit_code(&self) -> u8 {
        match self {
            StartError::Program { source, .. } if source.kind() == io::ErrorKind::NotFound => 127,
            StartError::Program { .. } => 126,
            StartError::Log(_) => 1,
        }
    }
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StartError::Program { program, source } => f.write_str(&describe(program, source)),
            StartError::Log(error) => error.fmt(f),
        }
    }
}

impl Error for StartError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        let (StartError::Program { source, .. } | StartError::Log(source)) = self;
        Some(source)
    }
}

fn describe(program: &OsStr, error: &io::Error) -> String {
    let program = program.to_string_lossy();
    match error.kind() {
        io::ErrorKind::NotFound if program.contains('/') => {
            format!("cannot start {program}: there is no such file, or its interpreter is missing")
        }
        io::ErrorKind::NotFound => format!(
            "cannot start {program}: it is in no directory of PATH; for one in this directory write ./{program}"
        ),
        io::ErrorKind::PermissionDenied => {
            format!("cannot start {program}: it is not executable (chmod +x?)")
        }
        _ => format!("cannot start {program}: {error}{}", remedy(error)),
    }
}

/// What to do about an error that the user can fix; empty for others.
pub fn remedy(error: &io::Error) -> &'static str {
    match Errno::from_io_error(error) {
        Some(Errno::MFILE) => "; raise `ulimit -n`",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_explained() {
        let missing = io::Error::from(io::ErrorKind::NotFound);
        assert!(describe(OsStr::new("tool"), &missing).contains("./tool"));
        assert!(describe(OsStr::new("./tool"), &missing).contains("no such file"));
    }

    #[test]
    fn too_few_descriptors_have_a_remedy() {
        let too_few = io::Error::from(Errno::MFILE);
        assert!(describe(OsStr::new("tool"), &too_few).ends_with("; raise `ulimit -n`"));
    }
}
