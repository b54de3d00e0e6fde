//! Which limit refuses another process or thread.

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::io;
use std::path::{Path, PathBuf};

/// The limit behind a refusal to start a process or thread, with its remedy; empty if the error is another one.
pub fn behind(error: &io::Error) -> String {
    if Errno::from_io_error(error) != Some(Errno::AGAIN) {
        return String::new();
    }
    match (full_cgroup(), getrlimit(Resource::Nproc).current) {
        (Some((cgroup, most)), _) => format!(
            "; the container or cgroup {} allows {most} processes and threads: raise its pids.max",
            cgroup.display()
        ),
        (None, Some(most)) => {
            format!("; this user may have {most} processes and threads: raise `ulimit -u`")
        }
        (None, None) => {
            "; the system has reached its number of threads (kernel.threads-max, pid_max)".to_owned()
        }
    }
}

/// The cgroup of this process, or one above it, that is full.
fn full_cgroup() -> Option<(PathBuf, u64)> {
    let number = |file: PathBuf| std::fs::read_to_string(file).ok()?.trim().parse::<u64>().ok();
    let is_full = |folder: &Path| {
        let most = number(folder.join("pids.max"))?;
        (number(folder.join("pids.current"))? >= most).then_some((folder.to_owned(), most))
    };
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    groups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let root = match controllers {
            "" => Path::new("/sys/fs/cgroup"),
            "pids" => Path::new("/sys/fs/cgroup/pids"),
            _ => return None,
        };
        let folder = root.join(path.trim_start_matches('/'));
        folder.ancestors().take_while(|folder| folder.starts_with(root)).find_map(is_full)
    })
}
