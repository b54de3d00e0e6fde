//! The machine: its CPU, memory and operating system. What cannot be found out is `None`.

use serde::{Deserialize, Serialize};
use std::fs;

/// The machine that a result was measured on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The CPU's model name.
    pub cpu: Option<String>,
    /// Cores that this process may use.
    pub usable_cores: usize,
    /// Name and version of the distribution or system.
    pub os: Option<String>,
    /// Name and release of the kernel, and the architecture.
    pub kernel: Option<String>,
    /// Bytes of main memory.
    pub memory: Option<u64>,
}

impl Machine {
    /// This machine.
    pub fn this() -> Machine {
        Machine {
            cpu: cpu_model(),
            usable_cores: usable_cores(),
            os: os_name(),
            kernel: kernel(),
            memory: memory("MemTotal"),
        }
    }

    /// The CPU's name, or `unknown`.
    pub fn cpu_name(&self) -> &str {
        self.cpu.as_deref().unwrap_or("unknown")
    }
}

/// This host's name.
#[cfg(unix)]
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(not(unix))]
pub fn host_name() -> String {
    "this host".to_owned()
}

/// The number of cores that this process may use, by its affinity and its container's quota.
pub fn usable_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// One of the kernel's memory figures (`MemTotal`, `MemAvailable`), in bytes.
pub fn memory(figure: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = field(&text, figure, ':')?;
    line.strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

fn cpu_model() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    ["model name", "Model", "cpu"].into_iter().find_map(|name| field(&text, name, ':')).map(str::to_owned)
}

fn os_name() -> Option<String> {
    let text = fs::read_to_string("/etc/os-release").ok()?;
    field(&text, "PRETTY_NAME", '=').map(|name| name.trim_matches('"').to_owned())
}

#[cfg(unix)]
fn kernel() -> Option<String> {
    let name = rustix::system::uname();
    let word = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
    Some(format!("{} {} {}", word(name.sysname()), word(name.release()), word(name.machine())))
}

#[cfg(not(unix))]
fn kernel() -> Option<String> {
    Some(format!("{} {}", std::env::consts::OS, std::env::consts::ARCH))
}

/// The value of the first line `name <separator> value`.
fn field<'a>(text: &'a str, name: &str, separator: char) -> Option<&'a str> {
    text.lines()
        .filter_map(|line| line.split_once(separator))
        .find_map(|(key, value)| (key.trim() == name && !value.trim().is_empty()).then(|| value.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found() {
        let text = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags :\n";
        assert_eq!(field(text, "model name", ':'), Some("Some CPU @ 2 GHz"));
        assert_eq!(field(text, "flags", ':'), None);
        assert_eq!(field(text, "model", ':'), None);
    }

    #[test]
    fn there_is_at_least_one_core() {
        assert!(Machine::this().usable_cores >= 1);
    }
}
