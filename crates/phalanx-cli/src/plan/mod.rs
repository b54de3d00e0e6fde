//! `phalanx plan`: predicts what operations take among other numbers of ranks and hosts, from saved runs of `phalanx perf`.
//!
//! The library counts the work of an operation along the algorithm that it would choose; here each kind of work gets a time.
//!
//! | file | content |
//! |---|---|
//! | `runs.rs` | the saved runs as points: an operation, a place, a time |
//! | `terms.rs` | the kinds of work of a point, as numbers that have one time each |
//! | `fit.rs` | the times of the kinds of work, from points |
//! | `held_out.rs` | the error on points that the fit has not seen |
//! | `start.rs` | the start of a job, simulated |
//! | `report.rs`, `text.rs` | the result, as JSON and as a table |

mod fit;
mod held_out;
pub mod options;
mod report;
mod runs;
mod start;
mod terms;
mod text;

use crate::{exit, file};
use anyhow::Result;
use options::PlanArgs;
use std::io::{self, Write};
use std::process::ExitCode;

/// Prints what the operation would take.
pub fn run(args: &PlanArgs) -> Result<ExitCode> {
    args.json.as_deref().map_or(Ok(()), file::check_writable)?;
    let runs = runs::Runs::load(&args.runs, args.one_machine)?;
    let report = report::Report::new(args, &runs)?;
    if let Some(path) = &args.json {
        file::write(path, &[serde_json::to_vec_pretty(&report)?, vec![b'\n']].concat())?;
    }
    let text = text::write(&report);
    if args.json.as_deref().is_some_and(file::is_stdout) {
        io::stderr().write_all(text.as_bytes())?;
    } else {
        io::stdout().write_all(text.as_bytes())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// An error of the command line.
fn usage(text: String) -> anyhow::Error {
    exit::usage(anyhow::Error::msg(text))
}

/// `4 ranks on 2 hosts`.
fn ranks_on(ranks: usize, hosts: usize) -> String {
    format!("{ranks} ranks on {hosts} host{}", if hosts == 1 { "" } else { "s" })
}
