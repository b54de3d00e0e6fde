//! The machine and its limits, each with what depends on it.

use super::section::Section;
use crate::machine::{self, Machine};
use crate::{pin, size};

/// The machine in one line.
pub fn summary() -> String {
    let machine = Machine::this();
    let known = [machine.os, machine.kernel, Some(format!("{} usable cores", machine.usable_cores))];
    let memory = machine.memory.map(|bytes| format!("{} of memory", size::format(bytes)));
    known.into_iter().chain([memory]).flatten().collect::<Vec<_>>().join(", ")
}

pub fn machine() -> Section {
    let machine = Machine::this();
    let unknown = || "unknown".to_owned();
    let cores = match pin::usable_cores().as_slice() {
        [] => String::new(),
        cores => format!(" (numbers {})", pin::list(cores)),
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
