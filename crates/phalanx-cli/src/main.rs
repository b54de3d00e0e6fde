//! The program `phalanx`: measures, starts and diagnoses the ranks of a collective communication.
//!
//! Here only: arguments in, exit status out. Each subcommand has a folder of its own.

mod cli;
mod doctor;
mod environment;
mod launch;
mod machine;
mod perf;
mod pin;
mod size;

use clap::Parser;
use cli::{Cli, Command};
use std::io;
use std::process::ExitCode;

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Perf(args) => perf::run(&args),
        Command::Launch(args) => launch::run(&args),
        Command::Doctor(args) => doctor::run(&args),
    };
    result.unwrap_or_else(|error| {
        // `phalanx perf … | head` is no failure worth a message.
        if !is_broken_pipe(&error) {
            eprintln!("phalanx: {error:#}");
        }
        ExitCode::FAILURE
    })
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}
