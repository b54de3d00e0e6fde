//! The machine, its limits, and its kernel's features, each with what depends on it.

use super::section::Section;
use crate::machine::{self, Machine};
use crate::{pin, size};

pub fn machine() -> Section {
    let machine = Machine::this();
    let unknown = || "unknown".to_owned();
    let cores = match pin::usable_cores().as_slice() {
        [] => String::new(),
        cores => format!(" (numbers {})", ranges(cores)),
    };
    let memory = match (machine.memory, machine::memory("MemAvailable")) {
        (Some(total), Some(available)) => {
            format!("{}, {} available", size::format(total), size::format(available))
        }
        _ => unknown(),
    };
    let lines = vec![
        ("system".to_owned(), machine.os.clone().unwrap_or_else(unknown)),
        ("kernel".to_owned(), machine.kernel.clone().unwrap_or_else(unknown)),
        ("CPU".to_owned(), machine.cpu_name().to_owned()),
        ("usable cores".to_owned(), format!("{}{cores}", machine.usable_cores)),
        ("memory".to_owned(), memory),
    ];
    Section::new("Machine", lines)
}

#[cfg(unix)]
pub fn limits() -> Section {
    use rustix::process::Resource;

    let limit = |name: &str, resource, show: fn(u64) -> String, note: &str| {
        let text = match rustix::process::getrlimit(resource).current {
            Some(value) => format!("{} ({note})", show(value)),
            None => "unlimited".to_owned(),
        };
        (name.to_owned(), text)
    };
    let lines = vec![
        limit(
            "open files (ulimit -n)",
            Resource::Nofile,
            |files| files.to_string(),
            "process ranks need a few, and one for each other rank",
        ),
        limit(
            "address space (ulimit -v)",
            Resource::As,
            size::format,
            "the ranks' shared memory counts for each of them",
        ),
        limit(
            "file size (ulimit -f)",
            Resource::Fsize,
            size::format,
            "memory that processes share counts as a file",
        ),
    ];
    Section::new("Limits", lines)
}

#[cfg(not(unix))]
pub fn limits() -> Section {
    Section::new("Limits", vec![("of processes".to_owned(), "unknown here".to_owned())])
}

#[cfg(target_os = "linux")]
pub fn kernel() -> Section {
    use rustix::fs::MemfdFlags;
    use rustix::process::PidfdFlags;
    use rustix::thread::MembarrierCommand;

    let result = |error: Option<rustix::io::Errno>, without: &str| match error {
        None => "OK".to_owned(),
        Some(error) => format!("not available ({error}): {without}"),
    };
    let memfd = rustix::fs::memfd_create("phalanx-doctor", MemfdFlags::CLOEXEC).err();
    let pidfd = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).err();
    let has_barrier = rustix::thread::membarrier_query().contains_command(MembarrierCommand::GlobalExpedited);
    let lines = vec![
        ("memfd_create".to_owned(), result(memfd, "ranks cannot be processes")),
        ("pidfd_open".to_owned(), result(pidfd, "ranks cannot be processes")),
        (
            "membarrier".to_owned(),
            if has_barrier { "OK" } else { "not available: small messages take longer" }.to_owned(),
        ),
        ("process_vm_readv".to_owned(), process_reads().to_owned()),
    ];
    Section::new("Kernel", lines)
}

/// Whether Yama lets process ranks read each other's private memory.
#[cfg(target_os = "linux")]
fn process_reads() -> &'static str {
    const CAP_SYS_PTRACE: u64 = 1 << 19;
    let file = |path| std::fs::read_to_string(path).unwrap_or_default();
    let status = file("/proc/self/status");
    let capabilities = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let may_trace = capabilities
        .and_then(|capabilities| u64::from_str_radix(capabilities.trim(), 16).ok())
        .is_some_and(|capabilities| capabilities & CAP_SYS_PTRACE != 0);
    // The file is missing without Yama.
    describe_yama(file("/proc/sys/kernel/yama/ptrace_scope").trim(), may_trace)
}

#[cfg(target_os = "linux")]
fn describe_yama(scope: &str, may_trace: bool) -> &'static str {
    match scope {
        "" | "0" => "OK",
        "1" | "2" if may_trace => "OK",
        "1" => {
            "of other ranks not allowed (kernel.yama.ptrace_scope is 1, 0 would do): long all_to_alls between processes may \
             take longer"
        }
        _ => {
            "of other ranks not allowed (kernel.yama.ptrace_scope is 2 or 3): long all_to_alls between processes may take \
             longer"
        }
    }
}

#[cfg(not(target_os = "linux"))]
pub fn kernel() -> Section {
    let line = ("process ranks".to_owned(), "need Linux; ranks are threads here".to_owned());
    Section::new("Kernel", vec![line])
}

/// Ascending numbers written short: `0-3, 8`.
fn ranges(numbers: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &number in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let shown = runs.iter().map(|(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    });
    shown.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_become_ranges() {
        assert_eq!(ranges(&[0]), "0");
        assert_eq!(ranges(&[0, 1, 2, 3, 8]), "0-3, 8");
        assert_eq!(ranges(&[1, 3, 4]), "1, 3-4");
        assert_eq!(ranges(&[]), "");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn yama_keeps_ranks_from_reading_each_other() {
        assert_eq!(describe_yama("", false), "OK");
        assert_eq!(describe_yama("0", false), "OK");
        assert_eq!(describe_yama("1", true), "OK");
        assert!(describe_yama("1", false).contains("ptrace_scope is 1"));
        assert!(describe_yama("3", true).contains("2 or 3"));
    }
}
