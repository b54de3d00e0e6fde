//! `phalanx trace`: merges the ranks' flight records, names the rank at fault, and draws timelines.
//!
//! | file | content |
//! |---|---|
//! | `record.rs` | the bytes of a file as a checked record |
//! | `files.rs` | the records of the files and folders on the command line |
//! | `merge.rs` | the ranks of a communicator on one clock |
//! | `diagnosis.rs` | the ranks at fault: missing, different call, slower |
//! | `summary.rs`, `perfetto.rs`, `svg.rs` | text and timelines |

mod diagnosis;
mod files;
mod merge;
pub mod options;
mod perfetto;
mod record;
mod summary;
mod svg;
mod text;

use anyhow::{Context, Result, bail};
use options::TraceArgs;
use std::io::Write;
use std::process::ExitCode;

/// Prints the summary of all communicators, and writes the timelines that the options ask for.
pub fn run(args: &TraceArgs) -> Result<ExitCode> {
    let mut merged = merge::merge(files::read_all(&args.paths)?);
    if let Some(name) = &args.communicator {
        let names: Vec<String> = merged.iter().map(|merged| merged.name.clone()).collect();
        merged.retain(|merged| merged.name == *name);
        if merged.is_empty() {
            bail!("there is no record of the communicator {name}; there are of: {}", names.join(", "));
        }
    }
    if let Some(path) = &args.perfetto {
        let timeline = serde_json::to_vec(&perfetto::export(&merged))?;
        std::fs::write(path, timeline).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if let Some(path) = &args.svg {
        // The largest communicator; --communicator selects another.
        let picture = svg::draw(&merged[0], args.last)?;
        std::fs::write(path, picture).with_context(|| format!("cannot write {}", path.display()))?;
    }
    std::io::stdout().write_all(summary::write(&merged, args.last).as_bytes())?;
    Ok(ExitCode::SUCCESS)
}
