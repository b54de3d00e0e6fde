//! Finds and reads the files of flight records.

use super::record::{self, FlightRecord};
use crate::error::explain;
use crate::log::say;
use anyhow::{Context, Result, bail};
use std::io::Read;
use std::path::{Path, PathBuf};

/// Operations that are kept of all records together: some 200 MB. Of thousands of ranks the last operations matter.
const MAX_KEPT: usize = 1 << 20;
/// Operations that are kept of each record at least.
const MIN_KEPT: usize = 64;

/// All records in these files and folders. A file that is no record is an error; in a folder it is left out,
/// with a message.
pub fn read_all(paths: &[PathBuf]) -> Result<Vec<FlightRecord>> {
    let mut records = Vec::new();
    for path in paths {
        if !path.is_dir() {
            records.push(read(path)?);
            continue;
        }
        let entries = std::fs::read_dir(path).with_context(|| format!("cannot read {}", path.display()))?;
        let mut files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        files.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
        files.sort_unstable();
        let kept = (MAX_KEPT / files.len().max(1)).max(MIN_KEPT);
        for file in files {
            match read(&file) {
                Ok(mut record) => {
                    record.forget_all_but(kept);
                    records.push(record);
                }
                Err(error) => say(format_args!("phalanx: {}", explain(&error))),
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
    // With one byte more than allowed, a file that is too long is noticed.
    file.take(record::MAX_BYTES as u64 + 1)
        .read_to_end(&mut bytes)
        .with_context(|| format!("cannot read {}", path.display()))?;
    record::decode(&bytes).map_err(|problem| anyhow::anyhow!("{}: {problem}", path.display()))
}
