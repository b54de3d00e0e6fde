//! The checkpoints in a folder.

use super::manifest::{MANIFEST, shard_name};
use crate::{Error, Result};
use std::path::{Path, PathBuf};

/// A checkpoint in a folder, complete or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The step that was saved.
    pub step: u64,
    /// Its folder.
    pub folder: PathBuf,
    /// Files that are missing. None if it is complete.
    pub missing: Vec<String>,
}

impl Found {
    /// Whether it can be read.
    pub fn is_complete(&self) -> bool {
        self.missing.is_empty()
    }
}

/// Where a step is saved.
pub(super) fn step_folder(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("step-{step:09}"))
}

/// All checkpoints in a folder, the oldest step first. Nothing if the folder does not exist.
///
/// # Errors
/// [`Error::File`].
pub fn list(folder: impl AsRef<Path>) -> Result<Vec<Found>> {
    let folder = folder.as_ref();
    let read = |error| Error::file(folder, "cannot be read", error);
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(read)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(read)?;
        let name = entry.file_name();
        let step =
            name.to_str().and_then(|name| name.strip_prefix("step-")).and_then(|step| step.parse().ok());
        if let Some(step) = step.filter(|_| entry.path().is_dir()) {
            found.push(Found { step, missing: missing(&entry.path())?, folder: entry.path() });
        }
    }
    found.sort_by_key(|found| found.step);
    Ok(found)
}

/// Files that a checkpoint lacks. Files of ranks are known from those of the others, whose names say how many there are.
pub(super) fn missing(folder: &Path) -> Result<Vec<String>> {
    if folder.join(MANIFEST).is_file() {
        return Ok(Vec::new());
    }
    let entries = std::fs::read_dir(folder).map_err(|error| Error::file(folder, "cannot be read", error))?;
    let names: Vec<String> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    let ranks = names.iter().find_map(|name| {
        let (_, ranks) = name.split_once("-of-")?;
        ranks.split('.').next()?.parse::<usize>().ok()
    });
    let shards = (0..ranks.unwrap_or(0)).map(|rank| shard_name(rank, ranks.unwrap_or(0)));
    let shards = shards.filter(|name| !names.contains(name));
    let all = ranks.is_none().then(|| "the files of all ranks".to_owned());
    Ok(all.into_iter().chain(shards).chain([MANIFEST.to_owned()]).collect())
}
