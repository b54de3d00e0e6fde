//! What a process holds: to say that nothing is left behind.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::Path;

/// Open files, shared mappings and threads of this process, and the names of shared memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holdings {
    files: Vec<String>,
    mappings: Vec<String>,
    /// Files in `/dev/shm`, whoever made them.
    names: BTreeSet<OsString>,
    threads: usize,
    connections: bool,
    /// Of emulated GPUs, whose memory communicators give back a while after their end.
    gpu_memory: usize,
}

/// The files behind memory of emulated GPUs.
const GPU_MEMORY: &str = "/memfd:emulated-device-memory";

impl Holdings {
    /// At this moment.
    pub fn now() -> Result<Holdings, String> {
        let text = |error: std::io::Error| error.to_string();
        let open = std::fs::read_dir("/proc/self/fd").map_err(text)?;
        let targets = open.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
        // The listing itself is open while it is read.
        let mut files: Vec<String> = targets
            .map(|target| target.to_string_lossy().into_owned())
            .filter(|target| !target.starts_with("/proc/"))
            .collect();
        files.sort();
        let all = files.len();
        files.retain(|file| !file.starts_with(GPU_MEMORY));
        let maps = std::fs::read_to_string("/proc/self/maps").map_err(text)?;
        let shared = maps.lines().filter(|line| line.contains("memfd:") || line.contains("/dev/shm/"));
        let mappings: Vec<String> = shared.map(str::to_owned).collect();
        let (of_gpus, mappings): (Vec<_>, _) =
            mappings.into_iter().partition(|mapping| mapping.contains(GPU_MEMORY));
        let gpu_memory = all - files.len() + of_gpus.len();
        let threads = std::fs::read_dir("/proc/self/task").map_err(text)?.count();
        // A folder there is no shared memory.
        let names = std::fs::read_dir("/dev/shm").into_iter().flatten().filter_map(Result::ok);
        let names = names.filter(|entry| entry.file_type().is_ok_and(|kind| !kind.is_dir()));
        let names = names.map(|entry| entry.file_name()).collect();
        Ok(Holdings { files, mappings, names, threads, connections: true, gpu_memory })
    }

    /// Without sockets and threads: the emulated NCCL keeps its connections to other processes, as libraries
    /// do.
    pub fn without_connections(mut self) -> Holdings {
        self.connections = false;
        self.files.retain(|file| !file.starts_with("socket:"));
        self.threads = 0;
        self
    }

    /// An error if there is more of anything now; addresses may change. Where threads are ranks, all of them look at the same time, and none
    /// begins or ends anything meanwhile.
    fn compare_counts(&self) -> Result<(), String> {
        let counts = |held: &Holdings| [held.files.len(), held.mappings.len(), held.threads];
        let is_no_more =
            |now: &Holdings| counts(now).iter().zip(counts(self)).all(|(now, before)| *now <= before);
        let now = settled(Holdings::now, is_no_more)?;
        if is_no_more(&now) { Ok(()) } else { Err(format!("{self:?} at first, {now:?} now")) }
    }

    /// An error that says what is held that was not held before.
    pub fn compare(&self) -> Result<(), String> {
        let look = || {
            let now = Holdings::now();
            if self.connections { now } else { now.map(Holdings::without_connections) }
        };
        let now = settled(look, |now| {
            let is_less = now.threads <= self.threads
                && now.names.is_subset(&self.names)
                && now.gpu_memory <= self.gpu_memory;
            is_less && now.files == self.files && now.mappings == self.mappings
        })?;
        if now.files != self.files {
            return Err(format!("open files before: {:?}, after: {:?}", self.files, now.files));
        }
        if now.mappings != self.mappings {
            return Err(format!("shared mappings are left: {:?}", now.mappings));
        }
        if now.gpu_memory > self.gpu_memory {
            return Err(format!(
                "GPU memory: {} files and mappings, before {}",
                now.gpu_memory, self.gpu_memory
            ));
        }
        // What a living process uses is not left: an MPI job beside this test has names, too.
        let left: Vec<_> = now.names.difference(&self.names).filter(|name| !is_mapped(name)).collect();
        if !left.is_empty() {
            return Err(format!("names are left in /dev/shm: {left:?}"));
        }
        if now.threads > self.threads {
            return Err(format!("{} threads before, {} after", self.threads, now.threads));
        }
        Ok(())
    }
}

/// Looks until it is as it should be, for a second. A thread that was joined is still listed for a moment, and a thread that ends something
/// holds it so long.
fn settled(
    look: impl Fn() -> Result<Holdings, String>,
    is_right: impl Fn(&Holdings) -> bool,
) -> Result<Holdings, String> {
    let mut now = look()?;
    for _ in 0..500 {
        if is_right(&now) {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(2));
        now = look()?;
    }
    Ok(now)
}

/// What a process holds, and the memory that it uses, before many rounds of something.
pub struct Baseline {
    held: Holdings,
    memory: u64,
}

impl Baseline {
    /// At this moment.
    pub fn now() -> Result<Baseline, String> {
        Ok(Baseline { held: Holdings::now()?, memory: memory()? })
    }

    /// An error if there is more of anything now, or more memory than what varies from round to round.
    pub fn compare(&self) -> Result<(), String> {
        const GROWTH: u64 = 6 << 20;
        let grown = memory()?.saturating_sub(self.memory);
        if grown > GROWTH {
            return Err(format!("{grown} bytes more"));
        }
        self.held.compare_counts()
    }
}

fn memory() -> Result<u64, String> {
    Ok(resident()? + region()?)
}

/// Whether a process maps this file of `/dev/shm`.
fn is_mapped(name: &OsStr) -> bool {
    let path = Path::new("/dev/shm").join(name);
    let processes = std::fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    let mut maps = processes.filter_map(|process| std::fs::read_to_string(process.path().join("maps")).ok());
    maps.any(|maps| path.to_str().is_some_and(|path| maps.lines().any(|line| line.ends_with(path))))
}

/// Bytes of memory that this process uses.
pub fn resident() -> Result<u64, String> {
    let status = std::fs::read_to_string("/proc/self/status").map_err(|error| error.to_string())?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib: Option<u64> = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| "no VmRSS".to_owned())
}

/// Bytes of the shared region that are backed by memory, whoever maps them.
#[cfg(target_os = "linux")]
pub fn region() -> Result<u64, String> {
    use std::os::unix::fs::MetadataExt;
    let open = std::fs::read_dir("/proc/self/fd").map_err(|error| error.to_string())?;
    let paths = open.filter_map(|entry| Some(entry.ok()?.path()));
    let regions = paths.filter(|path| {
        std::fs::read_link(path).is_ok_and(|target| target.to_string_lossy().starts_with("/memfd:phalanx"))
    });
    Ok(regions.filter_map(|path| std::fs::metadata(path).ok()).map(|file| file.blocks() * 512).sum())
}

/// There are no shared regions here.
#[cfg(not(target_os = "linux"))]
pub fn region() -> Result<u64, String> {
    Err("there are no shared regions here".to_owned())
}
