//! Files with a rank's output: `rank-3.out` and `rank-3.err`, and after a restart `rank-3.restart-1.out`.

use super::start_error::{StartError, remedy};
use crate::log::say;
use phalanx::internal::fresh_file;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The log files of a rank.
pub struct LogFiles {
    pub out: LogFile,
    pub err: LogFile,
    pub err_path: PathBuf,
}

impl LogFiles {
    pub fn create(dir: &Path, rank: usize, restart: u32) -> Result<LogFiles, StartError> {
        let name = match restart {
            0 => format!("rank-{rank}"),
            restart => format!("rank-{rank}.restart-{restart}"),
        };
        let create = |extension: &str| {
            let path = dir.join(format!("{name}.{extension}"));
            let log = LogFile::create(&path).map_err(|e| {
                let (path, remedy) = (path.display(), remedy(&e));
                let text = format!("the log file {path} cannot be written: {e}{remedy}");
                StartError::Log(io::Error::new(e.kind(), text))
            })?;
            Ok((log, path))
        };
        let ((out, _), (err, err_path)) = (create("out")?, create("err")?);
        Ok(LogFiles { out, err, err_path })
    }
}

/// A log file. After a failed write nothing more is written to it, and the rank goes on.
pub struct LogFile(Option<File>);

impl LogFile {
    /// Creates the file anew: an earlier log, or a link that somebody else put there, is replaced.
    pub fn create(path: &Path) -> io::Result<LogFile> {
        fresh_file(path).map(|file| LogFile(Some(file)))
    }

    pub fn write(&mut self, bytes: &[u8]) {
        if let Some(file) = &mut self.0
            && let Err(e) = file.write_all(bytes)
        {
            say(format_args!("phalanx launch: a log file cannot be written any more: {e}"));
            self.0 = None;
        }
    }
}
