//! The command line: the subcommands, and the first help a new user reads.
//!
//! The options of each subcommand are in its own folder.

use clap::{Parser, Subcommand};

/// Benchmark, launch and diagnose ranks that communicate with each other.
#[derive(Debug, Parser)]
#[command(name = "phalanx", version, max_term_width = 100, after_help = format!("{EXAMPLES}\n\n{}", crate::exit::TABLE))]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

// The help of a subcommand is that of its arguments: a comment here would hide it.
#[derive(Debug, Subcommand)]
pub enum Command {
    Perf(Box<crate::perf::options::PerfArgs>),
    Plan(crate::plan::options::PlanArgs),
    Launch(crate::launch::options::LaunchArgs),
    Doctor(crate::doctor::options::DoctorArgs),
    #[cfg(unix)]
    #[command(name = crate::launch::guard::SUBCOMMAND, hide = true)]
    Guard,
    Trace(crate::trace::options::TraceArgs),
    Completions(crate::manual::CompletionsArgs),
    Manual(crate::manual::ManualArgs),
}

const EXAMPLES: &str = "\
Examples:
  phalanx perf all_reduce              thread ranks, one per GPU or core, 4 B to 64 MiB
  phalanx perf all_gather -p 4 -d f16  four process ranks, half precision
  phalanx plan RUN.json... --ranks 64  what operations would take among 64 ranks, from saved runs of perf
  phalanx launch -n 4 -- ./train       four ranks of your own program
  phalanx doctor                       what works here, and what does not
  phalanx trace FOLDER                 which rank held the others up, after a failure
  PHALANX_LOG=info phalanx doctor      the same, with the log of what the library finds and chooses

A rank is one participant of a communication, a thread or a process; ranks are numbered from 0.";

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
