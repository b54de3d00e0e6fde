//! Why the operating system does not run a program: it is looked for where `execve` found it or did not.

use rustix::fs::{Access, StatVfsMountFlags, access, statvfs};
use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The reason, as a clause of a sentence; `None` if the error says all there is to say.
pub fn why_not(program: &OsStr, error: &io::Error) -> Option<String> {
    let found = find(program);
    match (error.kind(), found) {
        (io::ErrorKind::NotFound, Some(file)) => Some(match interpreter(&file) {
            Some(interpreter) => format!("its interpreter {interpreter} is not there"),
            None => "its interpreter or dynamic loader is not there (see `file` and `ldd`)".to_owned(),
        }),
        (io::ErrorKind::NotFound, None) if program.is_empty() => Some("its name is empty".to_owned()),
        (io::ErrorKind::NotFound, None) if has_folder(program) => Some("there is no such file".to_owned()),
        (io::ErrorKind::NotFound, None) => Some(format!(
            "it is in no directory of PATH; for one in this directory write ./{}",
            program.to_string_lossy()
        )),
        (io::ErrorKind::PermissionDenied, Some(file)) => Some(denied(&file)),
        (io::ErrorKind::PermissionDenied, None) => Some("a folder above it may not be searched".to_owned()),
        _ if rustix::io::Errno::from_io_error(error) == Some(rustix::io::Errno::NOEXEC) => Some(
            "it is no program for this machine, and a script needs a first line like #!/bin/sh".to_owned(),
        ),
        _ => None,
    }
}

fn denied(file: &Path) -> String {
    let is_noexec = || statvfs(file).is_ok_and(|mount| mount.f_flag.contains(StatVfsMountFlags::NOEXEC));
    let is_executable = file.metadata().is_ok_and(|file| file.permissions().mode() & 0o111 != 0);
    if file.is_dir() {
        "it is a folder".to_owned()
    } else if is_executable && is_noexec() {
        format!("no program may be run from the file system that holds {} (mounted noexec)", file.display())
    } else if access(file, Access::EXEC_OK).is_err() {
        "it is not executable (chmod +x?)".to_owned()
    } else {
        match interpreter(file) {
            Some(interpreter) => format!("its interpreter {interpreter} may not be run"),
            None => "running it is forbidden".to_owned(),
        }
    }
}

fn has_folder(program: &OsStr) -> bool {
    program.as_bytes().contains(&b'/')
}

/// The file that a shell would run. Like the shell, it prefers an executable one.
fn find(program: &OsStr) -> Option<PathBuf> {
    if has_folder(program) {
        return Some(PathBuf::from(program)).filter(|file| file.exists());
    }
    let path = std::env::var_os("PATH").filter(|_| !program.is_empty())?;
    let mut found: Vec<PathBuf> = std::env::split_paths(&path).map(|folder| folder.join(program)).collect();
    found.retain(|file| file.exists());
    let executable = found.iter().position(|file| file.is_file() && access(file, Access::EXEC_OK).is_ok());
    (!found.is_empty()).then(|| found.swap_remove(executable.unwrap_or(0)))
}

/// The interpreter of a script, from its first line.
fn interpreter(file: &Path) -> Option<String> {
    // The kernel reads as much of the line.
    const LONGEST: u64 = 256;
    let mut line = Vec::new();
    let script = file.is_file().then(|| std::fs::File::open(file).ok())??;
    BufReader::new(script.take(LONGEST)).read_until(b'\n', &mut line).ok()?;
    let line = String::from_utf8_lossy(&line);
    line.strip_prefix("#!")?.split_whitespace().next().map(str::to_owned)
}
