//! Reading a file that is for its owner alone.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::path::Path;

/// Why a file was not read.
#[derive(Debug)]
#[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "owners are not asked for there"))]
pub(crate) enum PrivateError {
    Unreadable(io::Error),
    /// A folder, FIFO, socket or device.
    Irregular,
    /// It belongs to another user.
    Foreign {
        owner: u32,
        own: u32,
    },
    /// Others may read or write it.
    Open {
        mode: u32,
    },
    /// It has more bytes than expected.
    Long,
}

/// Reads at most `most` bytes of a regular file of this user that nobody else can read or write. What is checked is the opened
/// file, so that no other can take its place in between. Opening does not wait for the other end of a FIFO.
pub(crate) fn read_private(path: &Path, most: usize) -> Result<Vec<u8>, PrivateError> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(target_os = "linux")]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK | libc::O_NOCTTY);
    let file = options.open(path).map_err(PrivateError::Unreadable)?;
    let metadata = file.metadata().map_err(PrivateError::Unreadable)?;
    if !metadata.is_file() {
        return Err(PrivateError::Irregular);
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        #[cfg(target_os = "linux")]
        {
            let (owner, own) = (std::os::unix::fs::MetadataExt::uid(&metadata), super::user_id());
            if owner != own {
                return Err(PrivateError::Foreign { owner, own });
            }
        }
        let mode = metadata.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(PrivateError::Open { mode });
        }
    }
    let mut bytes = Vec::new();
    file.take(most as u64 + 1).read_to_end(&mut bytes).map_err(PrivateError::Unreadable)?;
    if bytes.len() > most { Err(PrivateError::Long) } else { Ok(bytes) }
}
