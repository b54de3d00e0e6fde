//! The program `phalanx`: measures, starts, diagnoses and traces the ranks of a collective communication.
//!
//! Here only: arguments in, exit status out. Each subcommand has a folder of its own.

mod cli;
mod doctor;
mod environment;
mod gpu;
#[cfg(unix)]
mod launch;
#[cfg(not(unix))]
#[path = "launch/absent.rs"]
mod launch;
mod log;
mod machine;
mod perf;
mod pin;
mod size;
mod trace;

use clap::Parser;
use cli::{Cli, Command};
use std::io;
use std::process::ExitCode;

fn main() -> ExitCode {
    let command = Cli::parse().command;
    let result = log::install().and_then(|()| match command {
        Command::Perf(args) => perf::run(&args),
        Command::Launch(args) => launch::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        #[cfg(unix)]
        Command::Guard => Ok(launch::guard::run()),
        Command::Trace(args) => trace::run(&args),
    });
    result.unwrap_or_else(|error| {
        // `phalanx perf … | head` is no failure worth a message.
        if !is_broken_pipe(&error) {
            log::say(format_args!("phalanx: {}", explain(&error)));
        }
        ExitCode::FAILURE
    })
}

/// An error and its causes in one line, without those that it names already.
fn explain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text += &format!(": {cause}");
        }
    }
    text
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn a_cause_is_said_once() {
        let error =
            anyhow!("no space").context("cannot write x").context("cannot write x: no space; delete y");
        assert_eq!(explain(&error), "cannot write x: no space; delete y");
        assert_eq!(explain(&anyhow!("no space").context("cannot write x")), "cannot write x: no space");
    }
}
