//! `phalanx trace`: merges the ranks' flight records, names the rank at fault, and draws timelines.
//!
//! | file | content |
//! |---|---|
//! | `record.rs` | the bytes of a file as a checked record |
//! | `files.rs` | the records of the files and folders on the command line |
//! | `merge.rs` | the ranks of a communicator on one clock |
//! | `diagnosis.rs` | the ranks at fault: missing, different call, slower |
//! | `fold.rs` | a communicator of many ranks, by hosts |
//! | `summary.rs`, `perfetto.rs`, `svg.rs` | text and timelines |

mod diagnosis;
mod files;
mod fold;
mod merge;
pub mod options;
mod perfetto;
mod record;
mod summary;
mod svg;
mod text;

use crate::{exit, file, log};
use anyhow::{Result, anyhow, bail};
use options::TraceArgs;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

/// Prints the summary of all communicators, and writes the timelines that the options ask for.
pub fn run(args: &TraceArgs) -> Result<ExitCode> {
    let files: Vec<&Path> = args.files().collect();
    if let [first, second] = &*files
        && first == second
    {
        bail!(exit::usage(anyhow!(
            "{} is named twice: each timeline needs a file of its own",
            first.display()
        )));
    }
    let mut merged = merge::merge(files::read_all(&args.paths)?);
    if let Some(name) = &args.communicator {
        let names: Vec<String> = merged.iter().map(|merged| merged.name.clone()).collect();
        merged.retain(|merged| merged.name == *name);
        if merged.is_empty() {
            bail!("there is no record of the communicator {name}; there are of: {}", names.join(", "));
        }
    }
    if let Some(path) = &args.perfetto {
        file::write(path, &perfetto::export(&merged))?;
    }
    if let Some(path) = &args.svg {
        // The largest communicator; --communicator selects another.
        file::write(path, &svg::draw(&merged[0], args.last)?)?;
    }
    let summary = summary::write(&merged, args.last);
    if args.files().any(file::is_stdout) {
        log::say(summary.trim_end());
    } else {
        std::io::stdout().write_all(summary.as_bytes())?;
    }
    Ok(ExitCode::SUCCESS)
}
