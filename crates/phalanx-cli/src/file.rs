//! Files that a command writes. `-` is standard output.

use anyhow::{Context, Result};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// Whether the name stands for standard output.
pub fn is_stdout(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Writes a whole file.
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let written = if is_stdout(path) {
        let mut out = io::stdout().lock();
        out.write_all(bytes).and_then(|()| out.flush())
    } else {
        fs::write(path, bytes)
    };
    written.with_context(|| refused(path))
}

/// Checks that a file can be written, without changing it.
pub fn check_writable(path: &Path) -> Result<()> {
    try_writing(path).with_context(|| refused(path))
}

/// The message about a file that cannot be written.
pub fn refused(path: &Path) -> String {
    format!("cannot write {}", path.display())
}

fn try_writing(path: &Path) -> io::Result<()> {
    let file = match path.metadata() {
        _ if is_stdout(path) => return Ok(()),
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            File::options().append(true).create(true).open(path)?;
            // The name may be a link, which stays.
            return fs::remove_file(path.canonicalize()?);
        }
        Err(error) => return Err(error),
    };
    if file.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if file.is_file() {
        return File::options().append(true).open(path).map(drop);
    }
    // A pipe is not opened: without a reader that would wait.
    may_write(path)
}

#[cfg(unix)]
fn may_write(path: &Path) -> io::Result<()> {
    Ok(rustix::fs::access(path, rustix::fs::Access::WRITE_OK)?)
}

#[cfg(not(unix))]
fn may_write(_path: &Path) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (old, new) = (folder.path().join("old"), folder.path().join("new"));
        fs::write(&old, "the results of before").unwrap();
        check_writable(&old).unwrap();
        check_writable(&new).unwrap();
        assert_eq!(fs::read_to_string(&old).unwrap(), "the results of before");
        assert!(!new.exists());
    }

    #[test]
    fn what_cannot_be_written_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        for path in [folder.path(), Path::new("/nowhere/run.json"), &folder.path().join("none/run.json")] {
            let error = format!("{:#}", check_writable(path).unwrap_err());
            assert!(error.contains(path.to_str().unwrap()), "{error}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_pipe_without_a_reader_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        check_writable(&path).unwrap();
        assert!(path.exists());
    }

    #[cfg(unix)]
    #[test]
    fn a_link_to_nothing_stays() {
        let folder = tempfile::tempdir().unwrap();
        let (link, file) = (folder.path().join("link"), folder.path().join("file"));
        std::os::unix::fs::symlink(&file, &link).unwrap();
        check_writable(&link).unwrap();
        assert!(link.is_symlink() && !file.exists());
    }
}
