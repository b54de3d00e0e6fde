//! Reading, by any number of ranks: each reads the bytes that it needs.

use super::bytes::{bytes_mut, dtype, size};
use super::exchange::agree;
use super::file::{Entry, header, write_whole};
use super::folder::{list, missing};
use super::manifest::{CHUNK, FORMAT, MANIFEST, Manifest, Piece, Tensor};
use crate::device::{Device, Number};
use crate::{Error, Result};
use phalanx::{Comm, Source};
use serde_json::Value;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// A complete checkpoint, to be read.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    manifest: Manifest,
    /// Files that have the right length and header.
    checked: Vec<AtomicBool>,
}

/// Elements that are together in the file and in what is read.
struct Part {
    piece: usize,
    /// The first element, counted from the beginning of the piece.
    from: usize,
    /// The first element of what is read.
    to: usize,
    len: usize,
}

impl Checkpoint {
    /// The checkpoint in this folder (`…/step-000000100`). Not collective.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if it is incomplete: it says what is missing. [`Error::File`].
    pub fn open(folder: impl Into<PathBuf>) -> Result<Checkpoint> {
        let folder = folder.into();
        let missing = missing(&folder)?;
        if !missing.is_empty() {
            let what = format!(
                "it is incomplete, {} missing: the ranks were ended while they wrote it; take an earlier one",
                missing.join(", ") + if missing.len() == 1 { " is" } else { " are" }
            );
            return Err(Error::Checkpoint { path: folder, what });
        }
        let path = folder.join(MANIFEST);
        let text = std::fs::read(&path).map_err(|error| Error::file(&path, "cannot be read", error))?;
        Checkpoint::from_manifest(folder, &text)
    }

    fn from_manifest(folder: PathBuf, text: &[u8]) -> Result<Checkpoint> {
        let damaged = |what: String| Error::Checkpoint { path: folder.join(MANIFEST), what };
        let manifest: Manifest = serde_json::from_slice(text)
            .map_err(|error| damaged(format!("is not a manifest ({error}): take an earlier checkpoint")))?;
        if manifest.format != FORMAT {
            return Err(damaged(format!(
                "has format {}, and this version reads {FORMAT}: read it with the version that wrote it",
                manifest.format
            )));
        }
        let checked = manifest.files.iter().map(|_| AtomicBool::new(false)).collect();
        Ok(Checkpoint { folder, manifest, checked })
    }

    /// The newest complete checkpoint of a folder, if there is one. Not collective: between two calls, another one may be written.
    ///
    /// # Errors
    /// As [`open`](Checkpoint::open).
    pub fn latest(folder: impl AsRef<Path>) -> Result<Option<Checkpoint>> {
        let newest = list(folder)?.into_iter().rev().find(|found| found.is_complete());
        newest.map(|found| Checkpoint::open(found.folder)).transpose()
    }

    /// The same checkpoint on all ranks: the newest complete one that rank 0 finds. Collective.
    ///
    /// # Errors
    /// As [`open`](Checkpoint::open) on rank 0, [`Error::Rank`] on the others; errors of `comm`.
    pub fn latest_of_all(comm: &Comm, folder: impl AsRef<Path>) -> Result<Option<Checkpoint>> {
        let found = match comm.rank() {
            0 => {
                Checkpoint::latest(folder).map(|latest| latest.map(|latest| (latest.folder, latest.manifest)))
            }
            _ => Ok(None),
        };
        let first = agree(comm, found)?.into_iter().next().flatten();
        Ok(first.map(|(folder, manifest)| {
            let checked = manifest.files.iter().map(|_| AtomicBool::new(false)).collect();
            Checkpoint { folder, manifest, checked }
        }))
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The step that was saved.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// Ranks that saved it.
    pub fn ranks(&self) -> usize {
        self.manifest.files.len()
    }

    /// Names and shapes of all tensors, by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.manifest.tensors.iter().map(|(name, tensor)| (&**name, &*tensor.shape))
    }

    /// A value as a rank saved it. If all ranks saved the same, any rank gets it, also one that there was not then.
    pub fn value(&self, name: &str, rank: usize) -> Option<&Value> {
        let values = self.manifest.values.get(name)?;
        if values.len() == 1 { values.first() } else { values.get(rank) }
    }

    /// These elements of a tensor, in row-major order, one range after the other. Not collective.
    ///
    /// Besides them, up to 4 MiB at both ends of what is read are looked at, for the checksums.
    ///
    /// # Errors
    /// [`Error::Usage`] if there is no such tensor or range, or its numbers have another type. [`Error::Checkpoint`] names the file that is
    /// not as it was written. [`Error::File`].
    pub fn read<T: Number>(&self, name: &str, ranges: &[Range<usize>]) -> Result<Vec<T>> {
        let tensor = self.tensor(name)?;
        if tensor.dtype != dtype::<T>() {
            return Err(Error::usage(format!(
                "tensor {name:?} has numbers of type {:?}, and {:?} were asked for: read what it has, and convert",
                tensor.dtype,
                dtype::<T>()
            )));
        }
        let mut numbers = vec![T::default(); ranges.iter().map(|range| range.len()).sum()];
        self.read_bytes(name, tensor, ranges, bytes_mut(&mut numbers))?;
        Ok(numbers)
    }

    /// Reads elements of a tensor into a device's memory. Not collective.
    ///
    /// # Errors
    /// As [`read`](Checkpoint::read); [`Error::Usage`] if `view` has another length than the ranges; errors of the device.
    pub fn load<D: Device, T: Number>(
        &self,
        name: &str,
        ranges: &[Range<usize>],
        device: &D,
        view: &mut D::ViewMut<'_, T>,
    ) -> Result<()> {
        let (len, wanted) = (D::reborrow(view).len(), ranges.iter().map(|range| range.len()).sum::<usize>());
        if len != wanted {
            return Err(Error::usage(format!(
                "tensor {name:?}: a view of {len} elements for ranges of {wanted}: give one of their length"
            )));
        }
        let numbers = device.upload::<T>(&self.read(name, ranges)?)?;
        device.convert::<T, T>(&device.view(&numbers, 0..len), view)
    }

    /// Reads every byte, and compares checksums. Not collective.
    ///
    /// # Errors
    /// As [`read`](Checkpoint::read).
    pub fn verify(&self) -> Result<()> {
        (0..self.manifest.files.len()).try_for_each(|file| self.open_file(file).map(drop))?;
        self.each_stretch(&mut |_| Ok(()))
    }

    /// Writes all tensors into one safetensors file, in their shapes, as other programs read them. Not collective: one rank, or a program of
    /// its own, calls it. It needs memory for some MiB.
    ///
    /// # Errors
    /// As [`read`](Checkpoint::read).
    pub fn consolidate(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let entry = |name: &str| {
            let tensor = &self.manifest.tensors[name];
            (name.to_owned(), tensor.dtype, tensor.shape.clone())
        };
        let entries: Vec<Entry> = self.order().into_iter().map(entry).collect();
        let (header, _) = header(path, &entries)?;
        let mut failed = None;
        let written = write_whole(path, |file| {
            file.write_all(&header)?;
            let written = self.each_stretch(&mut |bytes| {
                file.write_all(bytes).map_err(|error| Error::file(path, "cannot be written", error))
            });
            written.map_err(|error| {
                failed = Some(error);
                std::io::Error::other("a checkpoint cannot be read")
            })
        });
        match failed {
            Some(error) => Err(error),
            None => written,
        }
    }

    /// Names, those of larger elements first, so that each tensor begins at a multiple of its element's size.
    fn order(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.manifest.tensors.keys().map(|name| &**name).collect();
        names.sort_by_key(|name| std::cmp::Reverse(self.manifest.tensors[*name].dtype));
        names
    }

    /// All tensors' bytes, in stretches.
    fn each_stretch(&self, f: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        for name in self.order() {
            let tensor = &self.manifest.tensors[name];
            let (len, most) = (tensor.shape.iter().product::<usize>(), CHUNK / size(tensor.dtype));
            for start in (0..len).step_by(most) {
                let range = start..len.min(start + most);
                let mut bytes = vec![0; range.len() * size(tensor.dtype)];
                self.read_bytes(name, tensor, &[range], &mut bytes)?;
                f(&bytes)?;
            }
        }
        Ok(())
    }

    fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.manifest.tensors.get(name).ok_or_else(|| {
            let names: Vec<&str> = self.manifest.tensors.keys().take(10).map(|name| &**name).collect();
            let more = if self.manifest.tensors.len() > names.len() { ", …" } else { "" };
            let folder = self.folder.display();
            Error::usage(format!("no tensor {name:?} in {folder}, which has {}{more}", names.join(", ")))
        })
    }

    fn read_bytes(&self, name: &str, tensor: &Tensor, ranges: &[Range<usize>], to: &mut [u8]) -> Result<()> {
        let element = size(tensor.dtype);
        let mut parts = self.parts(name, tensor, ranges)?;
        parts.sort_unstable_by_key(|part| (part.piece, part.from));
        for of_piece in parts.chunk_by(|one, other| one.piece == other.piece) {
            let piece = &tensor.pieces[of_piece[0].piece];
            let mut chunks =
                Chunks { checkpoint: self, name, piece, element, file: None, now: (usize::MAX, vec![]) };
            for part in of_piece {
                let from = part.from * element..(part.from + part.len) * element;
                chunks.copy(from, &mut to[part.to * element..(part.to + part.len) * element])?;
            }
        }
        Ok(())
    }

    /// Where the elements of these ranges are.
    fn parts(&self, name: &str, tensor: &Tensor, ranges: &[Range<usize>]) -> Result<Vec<Part>> {
        let len: usize = tensor.shape.iter().product();
        let mut stretches = Vec::new();
        for (piece, Piece { block, .. }) in tensor.pieces.iter().enumerate() {
            let mut from = 0;
            for range in block.ranges() {
                from += range.len();
                stretches.push((range.start, range.end, piece, from - range.len()));
            }
        }
        stretches.sort_unstable();
        let (mut parts, mut to) = (Vec::new(), 0);
        for range in ranges {
            if range.end > len || range.start > range.end {
                return Err(Error::usage(format!(
                    "elements {range:?} of tensor {name:?}, which has {len} ({:?}): ask for some of these",
                    tensor.shape
                )));
            }
            let mut at = range.start;
            let first = stretches.partition_point(|(_, end, ..)| *end <= at);
            let mut stretch = stretches[first..].iter();
            while at < range.end {
                let Some((start, end, piece, from)) = stretch.next().filter(|(start, ..)| *start <= at)
                else {
                    let what =
                        format!("says nowhere where element {at} of tensor {name:?} is: take an earlier one");
                    return Err(Error::Checkpoint { path: self.folder.join(MANIFEST), what });
                };
                let len = range.end.min(*end) - at;
                parts.push(Part { piece: *piece, from: from + at - start, to, len });
                (at, to) = (at + len, to + len);
            }
        }
        Ok(parts)
    }

    /// A file, once it is known to have its length and header.
    fn open_file(&self, file: usize) -> Result<(PathBuf, File)> {
        let Some(shard) = self.manifest.files.get(file) else {
            let what = format!("names file {file} of {}: take an earlier one", self.manifest.files.len());
            return Err(Error::Checkpoint { path: self.folder.join(MANIFEST), what });
        };
        let path = self.folder.join(&shard.name);
        let refused =
            |error| Error::file(&path, "cannot be read; restore it, or take an earlier checkpoint", error);
        let mut opened = File::open(&path).map_err(refused)?;
        if !self.checked[file].load(Ordering::Relaxed) {
            let bytes = opened.metadata().map_err(refused)?.len();
            if bytes != shard.bytes {
                let what = format!(
                    "has {bytes} bytes, and {} were written: restore it, or take an earlier checkpoint",
                    shard.bytes
                );
                return Err(Error::Checkpoint { path, what });
            }
            let mut header = vec![0; shard.header as usize];
            opened.read_exact(&mut header).map_err(refused)?;
            if crc32fast::hash(&header) != shard.header_checksum {
                return Err(altered(path, "its header"));
            }
            self.checked[file].store(true, Ordering::Relaxed);
        }
        Ok((path, opened))
    }
}

fn altered(path: PathBuf, what: &str) -> Error {
    let what =
        format!("was altered after it was written ({what}): restore it, or take an earlier checkpoint");
    Error::Checkpoint { path, what }
}

/// Reads a piece by chunks, whose checksums it compares.
struct Chunks<'a> {
    checkpoint: &'a Checkpoint,
    name: &'a str,
    piece: &'a Piece,
    element: usize,
    file: Option<(PathBuf, File)>,
    /// The chunk that was read last.
    now: (usize, Vec<u8>),
}

impl Chunks<'_> {
    /// Copies these bytes of the piece.
    fn copy(&mut self, from: Range<usize>, to: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < to.len() {
            let at = from.start + done;
            let chunk = self.chunk(at / CHUNK)?;
            let rest = &chunk[at % CHUNK..];
            let len = rest.len().min(to.len() - done);
            to[done..done + len].copy_from_slice(&rest[..len]);
            done += len;
        }
        Ok(())
    }

    fn chunk(&mut self, index: usize) -> Result<&[u8]> {
        if self.now.0 != index {
            let (path, file) = match &mut self.file {
                Some(file) => file,
                none => none.insert(self.checkpoint.open_file(self.piece.file)?),
            };
            let bytes = self.piece.block.len() * self.element;
            let mut chunk = vec![0; CHUNK.min(bytes - index * CHUNK)];
            let read = file
                .seek(SeekFrom::Start(self.piece.offset + (index * CHUNK) as u64))
                .and_then(|_| file.read_exact(&mut chunk));
            read.map_err(|error| Error::file(&*path, "cannot be read; take an earlier checkpoint", error))?;
            if self.piece.checksums.get(index) != Some(&crc32fast::hash(&chunk)) {
                return Err(altered(path.clone(), &format!("tensor {:?}", self.name)));
            }
            self.now = (index, chunk);
        }
        Ok(&self.now.1)
    }
}
