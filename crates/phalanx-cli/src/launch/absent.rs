//! `phalanx launch` where the system is no Unix: ranks are threads there, and none are started as processes.

#[allow(dead_code, reason = "what they ask for is never done")]
#[path = "options.rs"]
pub mod options;

use anyhow::{Result, bail};
use std::process::{ExitCode, ExitStatus};

fn refuse<T>() -> Result<T> {
    bail!(
        "ranks as processes need Linux; here they are threads: phalanx perf -t N, or phalanx::run in a program"
    )
}

/// Starts nothing.
pub fn run(_: &options::LaunchArgs) -> Result<ExitCode> {
    refuse()
}

/// How a process ended.
pub fn describe_status(status: ExitStatus) -> String {
    status.to_string()
}

/// This program once more for each rank: not here.
pub mod again {
    use super::refuse;
    use anyhow::Result;
    use std::ffi::OsString;
    use std::process::ExitCode;
    use std::time::Duration;

    pub fn run(_ranks: usize, _arguments: Vec<OsString>) -> Result<ExitCode> {
        refuse()
    }

    pub fn run_silently(_ranks: usize, _arguments: Vec<OsString>, _patience: Duration) -> Result<()> {
        refuse()
    }
}
