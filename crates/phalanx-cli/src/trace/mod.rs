//! `phalanx trace`: merges the ranks' flight records, names the rank at fault, and draws timelines.
//!
//! | file | content |
//! |---|---|
//! | `record.rs` | the bytes of a file as a checked record |
//! | `files.rs` | the records of the files and folders on the command line |
//! | `merge.rs` | the ranks of a communicator on one clock |
//! | `diagnosis.rs` | the ranks at fault: missing, different call, slower |
//! | `fold.rs` | a communicator of many ranks, by hosts |
//! | `waits.rs` | who waited for whom |
//! | `rows.rs` | the rows of a timeline |
//! | `summary.rs`, `perfetto.rs`, `svg.rs`, `page.rs` | text and timelines |

mod diagnosis;
mod files;
mod fold;
mod merge;
pub mod options;
mod page;
mod perfetto;
mod record;
mod rows;
mod summary;
mod svg;
mod text;
mod waits;

use crate::{exit, file, log};
use anyhow::{Result, anyhow, bail};
use options::TraceArgs;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

/// Prints the summary of all communicators, and writes the timelines that the options ask for.
pub fn run(args: &TraceArgs) -> Result<ExitCode> {
    let files: Vec<&Path> = args.files().collect();
    if let Some(twice) = files.iter().enumerate().find(|(i, file)| files[..*i].contains(file)) {
        let file = twice.1.display();
        bail!(exit::usage(anyhow!("{file} is named twice: each timeline needs a file of its own")));
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
    if let Some(path) = &args.html {
        file::write(path, page::write(&merged, &summary)?.as_bytes())?;
    }
    if args.files().any(file::is_stdout) {
        log::say(summary.trim_end());
    } else {
        std::io::stdout().write_all(summary.as_bytes())?;
    }
    Ok(ExitCode::SUCCESS)
}
