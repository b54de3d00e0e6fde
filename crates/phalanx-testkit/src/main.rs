//! The test kit's program: the fault suite at length, and the start of large jobs.

use clap::{Parser, Subcommand};
use phalanx_testkit::faults::program::{self, Options};
use phalanx_testkit::faults::{self, Backend};
use phalanx_testkit::{networked, processes, start};
use std::process::ExitCode;

#[derive(Parser)]
#[command(about = "Breaks ranks on purpose and looks at what comes of it")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Every case of the fault suite once, and then seeded runs.
    Faults {
        /// Seeded runs, each of one case.
        #[arg(long, default_value_t = 100)]
        runs: u64,
        /// The seed of the first run; the next run has the next.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// What carries the data.
        #[arg(long, default_value = "host", value_parser = backend)]
        backend: Backend,
        /// Only cases with this in their name.
        #[arg(long)]
        case: Option<String>,
        /// Only list the cases.
        #[arg(long)]
        list: bool,
    },
    /// Measures how ranks join the store and exchange a value each: stand-ins, which do nothing else.
    Start(start::Options),
    /// A process of such a measurement.
    #[command(hide = true)]
    StartPart(start::Part),
}

fn backend(name: &str) -> Result<Backend, String> {
    let names = Backend::ALL.map(Backend::name).join(", ");
    Backend::from_name(name).ok_or_else(|| format!("there are no cases for {name}; there are for: {names}"))
}

fn main() -> ExitCode {
    // A rank of a case.
    if let Some(code) = processes::serve(&faults::scenarios()) {
        return code;
    }
    match Cli::parse().command {
        Command::Faults { runs, seed, backend, case, list } => {
            break_ranks(Options { runs, seed, backend, case }, list)
        }
        Command::Start(options) => start::measure(&options),
        Command::StartPart(part) => start::part(&part),
    }
}

fn break_ranks(options: Options, list: bool) -> ExitCode {
    if list {
        for case in options.backend.cases() {
            println!("{}{}", case.name, if case.seeded { " (seeded)" } else { "" });
        }
        return ExitCode::SUCCESS;
    }
    let summary = program::run(&options);
    networked::end();
    print!("\n{summary}\n{} runs, {} failures\n", summary.runs(), summary.failures());
    if summary.failures() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
