//! A new file that takes the place of an old one at once, written by all ranks.

use super::open::OpenFile;
use crate::api::comm::Comm;
use crate::contract::FileAccess;
use crate::types::error::{Error, Result};
use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

/// A file under its temporary name, open on every rank.
pub(super) struct NewFile<'a> {
    comm: &'a Comm,
    path: &'a Path,
    part: PathBuf,
    /// What is written to it.
    pub file: OpenFile<'a>,
}

impl<'a> NewFile<'a> {
    /// Makes a file of `len` bytes, in the folder of the one that it will replace. Collective.
    pub fn create(comm: &'a Comm, path: &'a Path, len: u64) -> Result<NewFile<'a>> {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(".part");
        let part = path.with_file_name(name);
        let make = || {
            let file = File::create(&part)?;
            file.set_len(len)?;
            Ok(file)
        };
        let made = agree(comm, path, if comm.rank() == 0 { make().map(Some) } else { Ok(None) });
        let opened = made.and_then(|made| {
            let opened = made.map_or_else(|| OpenOptions::new().write(true).open(&part), Ok);
            OpenFile::new(comm, path, (&part, FileAccess::Write), opened)
        });
        let file = opened.inspect_err(|_| remove(comm, &part))?;
        Ok(NewFile { comm, path, part, file })
    }

    /// Makes the file durable, and gives it its own name, unless a rank could not write. Collective.
    pub fn finish(self, written: io::Result<()>) -> Result<()> {
        let NewFile { comm, path, part, file } = self;
        let durable = file.close();
        let rename = || {
            std::fs::rename(&part, path)?;
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            // Makes the name durable; other systems cannot open folders.
            if cfg!(unix) { File::open(folder.unwrap_or(Path::new(".")))?.sync_all() } else { Ok(()) }
        };
        let replaced = agree(comm, path, written.and(durable))
            .and_then(|()| agree(comm, path, if comm.rank() == 0 { rename() } else { Ok(()) }));
        replaced.inspect_err(|_| remove(comm, &part))
    }
}

/// It may hold the last blocks of a full disk.
fn remove(comm: &Comm, part: &Path) {
    if comm.rank() == 0 {
        let _ = std::fs::remove_file(part);
    }
}

/// This rank's outcome, if all ranks have succeeded; else an error on all. Collective.
pub(super) fn agree<T>(comm: &Comm, path: &Path, own: io::Result<T>) -> Result<T> {
    let all = comm.all_gather_value(u8::from(own.is_ok()))?;
    let failed = |error| {
        let remedy =
            format!("it is {}; check the folder, the rights and the space of the disk", path.display());
        Error::system("a file of all ranks", error, remedy)
    };
    let own = own.map_err(failed)?;
    match all.iter().position(|succeeded| *succeeded == 0) {
        None => Ok(own),
        Some(rank) => Err(failed(io::Error::other(format!("rank {rank} could not use it, and says why")))),
    }
}
