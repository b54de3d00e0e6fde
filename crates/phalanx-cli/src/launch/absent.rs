//! `phalanx launch` on systems other than Unix, where ranks are threads only: every function returns an
//! error.

#[allow(dead_code, reason = "nothing is launched")]
#[path = "options.rs"]
pub mod options;

use anyhow::{Result, bail};
use std::process::{ExitCode, ExitStatus};

fn refuse<T>() -> Result<T> {
    bail!(
        "ranks as processes need Linux; here they are threads: phalanx perf -t N, or phalanx::run in a program"
    )
}

pub fn run(_: &options::LaunchArgs) -> Result<ExitCode> {
    refuse()
}

/// The error for a thread or process that the system refuses.
pub fn refused(error: std::io::Error) -> anyhow::Error {
    error.into()
}

/// How a process ended.
pub fn describe_status(status: ExitStatus) -> String {
    status.to_string()
}

/// This program as its own ranks.
pub mod own_program {
    use super::refuse;
    use anyhow::Result;
    use std::ffi::OsString;
    use std::process::ExitCode;
    use std::time::Duration;

    pub fn run(_ranks: usize, _arguments: Vec<OsString>) -> Result<ExitCode> {
        refuse()
    }

    pub fn run_silently(_ranks: usize, _arguments: Vec<OsString>, _timeout: Duration) -> Result<()> {
        refuse()
    }
}
