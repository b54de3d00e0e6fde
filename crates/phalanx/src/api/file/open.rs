//! A file that all ranks have open: with the operating system's calls, or with the backend's own (MPI-IO).

use super::aggregate::{self, Pieces};
use super::replace::agree;
use super::rounds::{Piece, in_order, rounds};
use crate::api::comm::Comm;
use crate::contract::{FileAccess, SharedFile};
use crate::types::error::Result;
use crate::types::op::ReduceOp;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;

/// Pieces of this many bytes on average are written by the ranks that have them; shorter ones are gathered first.
const LONG_PIECE: usize = 64 << 10;

/// Bytes that are read at once to pick short pieces out of them.
const READ: u64 = 4 << 20;

/// A file that all ranks have open. What is done with it is collective, also after an error of the file.
pub(super) struct OpenFile<'a> {
    comm: &'a Comm,
    access: FileAccess,
    file: File,
    /// The same file, if the backend reads and writes it.
    shared: Option<Box<dyn SharedFile + 'a>>,
}

impl<'a> OpenFile<'a> {
    /// Opens a file that this rank could open or could not; errors name `shown`.
    pub fn new(
        comm: &'a Comm,
        shown: &Path,
        (path, access): (&Path, FileAccess),
        opened: io::Result<File>,
    ) -> Result<OpenFile<'a>> {
        let file = agree(comm, shown, opened)?;
        let shared = match comm.backend.files() {
            // MPI takes what is before a colon for the name of a file system.
            Some(files) if !any(comm, has_colon(path))? => {
                Some(agree(comm, shown, files.open(path, access)?)?)
            }
            _ => None,
        };
        Ok(OpenFile { comm, access, file, shared })
    }

    /// Writes this rank's bytes to these places of a part of the file, which is `whole`.
    pub fn write(
        &mut self,
        places: impl Iterator<Item = Range<u64>> + Clone,
        whole: Range<u64>,
        bytes: &[u8],
    ) -> Result<io::Result<()>> {
        match &self.shared {
            None => write(self.comm, &mut self.file, places, whole, bytes),
            Some(file) => in_rounds(self.comm, places, |round| {
                let own = |(place, at): &Piece| &bytes[*at..][..(place.end - place.start) as usize];
                file.write(&places_of(round), &round.iter().map(own).collect::<Vec<_>>().concat())
            }),
        }
    }

    /// Fills this rank's bytes from these places.
    pub fn read(
        &mut self,
        places: impl Iterator<Item = Range<u64>> + Clone,
        bytes: &mut [u8],
    ) -> Result<io::Result<()>> {
        match &self.shared {
            None => Ok(read(&mut self.file, places, bytes)),
            Some(file) => in_rounds(self.comm, places, |round| {
                let len: u64 = round.iter().map(|(place, _)| place.end - place.start).sum();
                let mut packed = vec![0u8; len as usize];
                file.read(&places_of(round), &mut packed)?;
                let mut rest = &packed[..];
                for (place, at) in round {
                    let (own, others) = rest.split_at((place.end - place.start) as usize);
                    bytes[*at..][..own.len()].copy_from_slice(own);
                    rest = others;
                }
                Ok(())
            }),
        }
    }

    /// Closes it. What was written is durable then.
    pub fn close(self) -> io::Result<()> {
        let closed = self.shared.map_or(Ok(()), |shared| shared.close());
        // Without MPI's deadline for a call: a disk may take long.
        let durable = if self.access == FileAccess::Write { self.file.sync_all() } else { Ok(()) };
        closed.and(durable)
    }
}

fn has_colon(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().contains(&b':')
}

/// Whether it holds on any rank. Collective.
fn any(comm: &Comm, own: bool) -> Result<bool> {
    Ok(comm.all_reduce_value(u8::from(own), ReduceOp::Max)? != 0)
}

/// Moves this rank's pieces in as many calls of the backend as the rank with most of them needs.
fn in_rounds(
    comm: &Comm,
    places: impl Iterator<Item = Range<u64>>,
    mut round: impl FnMut(&[Piece]) -> io::Result<()>,
) -> Result<io::Result<()>> {
    let own = rounds(in_order(places));
    let most = comm.all_reduce_value(own.len() as u64, ReduceOp::Max)?;
    let mut outcome = Ok(());
    for number in 0..most as usize {
        let done = round(own.get(number).map_or(&[], Vec::as_slice));
        outcome = outcome.and(done);
    }
    Ok(outcome)
}

fn places_of(round: &[Piece]) -> Vec<Range<u64>> {
    round.iter().map(|(place, _)| place.clone()).collect()
}

/// Writes long pieces by themselves, and has short ones gathered.
fn write(
    comm: &Comm,
    file: &mut File,
    mut places: impl Iterator<Item = Range<u64>> + Clone,
    whole: Range<u64>,
    bytes: &[u8],
) -> Result<io::Result<()>> {
    // All ranks choose alike.
    let mut pieces_and_bytes = [places.clone().count() as u64, bytes.len() as u64];
    comm.all_reduce_in_place(&mut pieces_and_bytes, ReduceOp::Sum)?;
    if pieces_and_bytes[1] < pieces_and_bytes[0].saturating_mul(LONG_PIECE as u64) {
        return aggregate::write(comm, file, &Pieces::new(places, bytes), whole);
    }
    let mut rest = bytes;
    Ok(places.try_for_each(|place| {
        let (own, others) = rest.split_at((place.end - place.start) as usize);
        rest = others;
        write_at(file, place.start, own)
    }))
}

/// Writes bytes at an offset. Of this rank alone.
pub(super) fn write_at(file: &mut File, offset: u64, bytes: &[u8]) -> io::Result<()> {
    file.seek(SeekFrom::Start(offset))?;
    file.write_all(bytes)
}

/// Reads long pieces by themselves, short ones with what is between them.
fn read(
    file: &mut File,
    places: impl Iterator<Item = Range<u64>> + Clone,
    bytes: &mut [u8],
) -> io::Result<()> {
    let mut rest = bytes;
    let (mut buffer, mut held) = (Vec::new(), 0..0u64);
    let end = places.clone().map(|range| range.end).max().unwrap_or(0);
    for range in places {
        let (own, others) = rest.split_at_mut((range.end - range.start) as usize);
        rest = others;
        if own.len() >= LONG_PIECE {
            file.seek(SeekFrom::Start(range.start))?;
            file.read_exact(own)?;
            continue;
        }
        if range.start < held.start || range.end > held.end {
            held = range.start..end.min(range.start + READ);
            buffer.resize((held.end - held.start) as usize, 0);
            file.seek(SeekFrom::Start(held.start))?;
            file.read_exact(&mut buffer)?;
        }
        let at = (range.start - held.start) as usize;
        own.copy_from_slice(&buffer[at..at + own.len()]);
    }
    Ok(())
}
