//! Files that are there whole or not at all.

use super::bytes::{Bytes, size};
use super::manifest::CHUNK;
use crate::{Error, Result};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// What a file is called until it is complete.
pub(super) fn unfinished(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".part");
    path.with_file_name(name)
}

/// Writes a file under another name, makes it durable, and gives it its own name.
pub(super) fn write_whole(
    path: &Path,
    fill: impl FnOnce(&mut dyn Write) -> std::io::Result<()>,
) -> Result<()> {
    let part = unfinished(path);
    let write = || {
        let mut file = BufWriter::with_capacity(1 << 20, File::create(&part)?);
        fill(&mut file)?;
        file.flush()?;
        file.get_ref().sync_all()?;
        std::fs::rename(&part, path)?;
        sync_folder(path.parent().unwrap_or(Path::new(".")))
    };
    write().map_err(|error| {
        // It may hold the last blocks of a full disk.
        let _ = std::fs::remove_file(&part);
        Error::file(path, "cannot be written; check that its disk has space and may be written to", error)
    })
}

/// Makes names in a folder durable.
pub(super) fn sync_folder(folder: &Path) -> std::io::Result<()> {
    if cfg!(unix) {
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        File::open(folder)?.sync_all()?;
    }
    Ok(())
}

/// A tensor of a file: its name, type and shape.
pub(super) type Entry = (String, Dtype, Vec<usize>);

/// What is at the beginning of a safetensors file with these tensors, and where each of them begins.
pub(super) fn header(path: &Path, entries: &[Entry]) -> Result<(Vec<u8>, Vec<u64>)> {
    let mut end = 0;
    let mut starts = Vec::new();
    let infos = entries.iter().map(|(name, dtype, shape)| {
        let start = end;
        end += shape.iter().product::<usize>() * size(*dtype);
        starts.push(start as u64);
        (name.clone(), TensorInfo { dtype: *dtype, shape: shape.clone(), data_offsets: (start, end) })
    });
    let refused = |error: String| Error::Checkpoint { path: path.into(), what: error };
    let metadata = Metadata::new(None, infos.collect()).map_err(|error| refused(error.to_string()))?;
    let mut json = serde_json::to_vec(&metadata).map_err(|error| refused(error.to_string()))?;
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.extend(json);
    starts.iter_mut().for_each(|start| *start += header.len() as u64);
    Ok((header, starts))
}

/// Checksums of the chunks of a piece.
pub(super) fn checksums(piece: &dyn Bytes) -> Vec<u32> {
    piece.bytes().chunks(CHUNK).map(crc32fast::hash).collect()
}
