//! New files in folders that others may write to.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;

/// How often a file that appears in between is removed.
const TRIES: usize = 8;

/// Creates a file that only its owner can read and write. What has its name is removed, not opened: a link that somebody else put there
/// is not followed, and a FIFO is not waited for.
pub fn fresh_file(path: &Path) -> io::Result<File> {
    check_folder(path.parent().unwrap_or(Path::new("")))?;
    let mut tries = 0;
    loop {
        tries += 1;
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        match options.open(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && tries < TRIES => {
                match std::fs::remove_file(path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
            }
            opened => return opened,
        }
    }
}

/// Refuses a folder that is a link of another user: it leads wherever that user wants.
#[cfg(target_os = "linux")]
fn check_folder(folder: &Path) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    let Ok(link) = std::fs::symlink_metadata(folder) else { return Ok(()) };
    if link.is_symlink() && link.uid() != super::user_id() && link.uid() != 0 {
        let text = format!("{} is a link of another user", folder.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn check_folder(_folder: &Path) -> io::Result<()> {
    Ok(())
}
