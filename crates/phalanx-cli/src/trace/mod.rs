//! `phalanx trace`: the ranks' flight records, merged; who is at fault and why; timelines.
//!
//! | file | what |
//! |---|---|
//! | `record.rs` | a file's bytes, checked |
//! | `merge.rs` | the ranks side by side, on one clock |
//! | `culprit.rs` | missing, different call, slower |
//! | `summary.rs`, `perfetto.rs`, `svg.rs` | what is shown |

mod culprit;
mod merge;
pub mod options;
mod perfetto;
mod record;
mod summary;
mod svg;

use anyhow::{Context, Result, bail};
use options::TraceArgs;
use record::FlightRecord;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Does what the arguments say.
pub fn run(args: &TraceArgs) -> Result<ExitCode> {
    let mut merged = merge::merge(read_all(&args.paths)?);
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
        // The whole; of its parts there can be a picture each.
        let picture = svg::draw(&merged[0], args.last)?;
        std::fs::write(path, picture).with_context(|| format!("cannot write {}", path.display()))?;
    }
    std::io::stdout().write_all(summary::write(&merged, args.last).as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// All records in files and folders. What is no record in a folder is left out, with a word; a file that was named
/// must be one.
fn read_all(paths: &[PathBuf]) -> Result<Vec<FlightRecord>> {
    let mut records = Vec::new();
    for path in paths {
        if !path.is_dir() {
            records.push(read(path)?);
            continue;
        }
        let entries = std::fs::read_dir(path).with_context(|| format!("cannot read {}", path.display()))?;
        let mut files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        files.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
        files.sort();
        for file in files {
            match read(&file) {
                Ok(record) => records.push(record),
                Err(error) => crate::log::say(format_args!("phalanx: {}", crate::explain(&error))),
            }
        }
    }
    if records.is_empty() {
        bail!(
            "there is no flight record; PHALANX_TRACE_DIR names the folder into which ranks write theirs when they fail"
        );
    }
    Ok(records)
}

fn read(path: &Path) -> Result<FlightRecord> {
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    // One byte too many shows that it is too long.
    file.take(record::MAX_BYTES as u64 + 1)
        .read_to_end(&mut bytes)
        .with_context(|| format!("cannot read {}", path.display()))?;
    record::decode(&bytes).map_err(|problem| anyhow::anyhow!("{}: {problem}", path.display()))
}
