//! The program `phalanx`: benchmarks, launches, checks and traces the ranks of a collective communication.
//!
//! This file turns arguments into an exit status. Each subcommand has its own folder; `perf` and `doctor`
//! start their process ranks with `launch`.
//!
//! It is a library, so that cargo compiles it beside phalanx. No other program is meant to use it.

mod cli;
mod doctor;
mod error;
mod exit;
mod file;
mod gpu;
#[cfg(unix)]
mod launch;
#[cfg(not(unix))]
#[path = "launch/absent.rs"]
mod launch;
mod log;
mod machine;
mod manual;
mod parse;
mod perf;
mod picture;
mod pin;
mod plan;
mod size;
mod trace;

use clap::Parser;
use cli::{Cli, Command};
use std::process::ExitCode;

/// Carries out the command line of this process.
pub fn main() -> ExitCode {
    #[cfg(unix)]
    launch::reset_inherited_signals();
    let command = match Cli::try_parse() {
        Ok(cli) => cli.command,
        Err(error) => {
            if error.use_stderr() {
                exit::leave_to_rank_0();
            }
            error.exit()
        }
    };
    let result = log::install().map_err(exit::usage).and_then(|()| match command {
        Command::Perf(args) => perf::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Launch(args) => launch::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        #[cfg(unix)]
        Command::Guard => Ok(launch::guard::run()),
        Command::Trace(args) => trace::run(&args),
        Command::Completions(args) => manual::complete(&args),
        Command::Manual(args) => manual::write(&args),
    });
    result.unwrap_or_else(|error| {
        if exit::is_usage(&error) {
            exit::leave_to_rank_0();
        }
        if !error::is_broken_pipe(&error) {
            log::say(format_args!("phalanx: {}", error::explain(&error)));
        }
        exit::of(&error)
    })
}
