//! How much memory this process can still get. Linux gives pages away that it does not have, and ends whoever uses them.

use std::fs;
use std::path::{Path, PathBuf};

/// Bytes that can be had: what the host has available, or what the control groups of this process leave it, if that is less; and what
/// can be swapped. Unknown where the kernel does not say.
pub(super) fn available() -> Option<u64> {
    let host = fs::read_to_string("/proc/meminfo").ok()?;
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let of_groups = groups.lines().filter_map(group_of).flat_map(|group| group.lefts());
    let without_swapping = of_groups.fold(figure(&host, "MemAvailable")?, u64::min);
    Some(without_swapping + figure(&host, "SwapFree").unwrap_or(0))
}

/// A figure of `/proc/meminfo`, in bytes.
fn figure(meminfo: &str, name: &str) -> Option<u64> {
    let value = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// A control group of memory, and how its files are called.
struct Group {
    root: PathBuf,
    /// Below the root, as the kernel knows it; in a container the root may already be the group itself.
    path: PathBuf,
    limit: &'static str,
    usage: &'static str,
    /// Of the usage, what the kernel gives back when it is needed.
    idle: &'static str,
}

/// The group of a line of `/proc/self/cgroup`, `number:controllers:path`, if it is one of memory.
fn group_of(line: &str) -> Option<Group> {
    let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
    let path = path.trim_start_matches('/').into();
    let root = Path::new("/sys/fs/cgroup");
    if controllers.is_empty() {
        let (limit, usage, idle) = ("memory.max", "memory.current", "inactive_file");
        return Some(Group { root: root.into(), path, limit, usage, idle });
    }
    controllers.split(',').any(|name| name == "memory").then(|| Group {
        root: root.join("memory"),
        path,
        limit: "memory.limit_in_bytes",
        usage: "memory.usage_in_bytes",
        idle: "total_inactive_file",
    })
}

impl Group {
    /// What it leaves, and what those that it is in leave. No limit is no number, or an enormous one.
    fn lefts(&self) -> Vec<u64> {
        let folders = self.path.ancestors().map(|path| self.root.join(path));
        folders.filter_map(|folder| self.left_of(&folder)).collect()
    }

    fn left_of(&self, folder: &Path) -> Option<u64> {
        let text = |name: &str| fs::read_to_string(folder.join(name)).ok();
        let number = |name: &str| text(name)?.trim().parse::<u64>().ok();
        let (limit, usage) = (number(self.limit)?, number(self.usage)?);
        let idle = text("memory.stat").and_then(|stat| {
            let value = stat.lines().find_map(|line| line.strip_prefix(self.idle)?.strip_prefix(' '));
            value?.trim().parse::<u64>().ok()
        });
        Some(limit.saturating_sub(usage.saturating_sub(idle.unwrap_or(0))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_says_what_is_available() {
        let meminfo = "MemTotal:  9 kB\nMemAvailable:    1234 kB\nHugePages_Free:  7\n";
        assert_eq!(figure(meminfo, "MemAvailable"), Some(1234 * 1024));
        assert_eq!(figure(meminfo, "Mem"), None);
        assert_eq!(figure(meminfo, "HugePages_Free"), None);
        assert!(available().is_some_and(|bytes| bytes > 0));
    }

    #[test]
    fn groups_leave_what_they_do_not_use() {
        let root = std::env::temp_dir().join(format!("phalanx-groups-{}", std::process::id()));
        let write = |path: &str, files: &[(&str, &str)]| {
            fs::create_dir_all(root.join(path)).unwrap();
            files.iter().for_each(|(name, text)| fs::write(root.join(path).join(name), text).unwrap());
        };
        write("a", &[("memory.max", "1000\n"), ("memory.current", "900\n")]);
        write("a/b", &[("memory.max", "max\n"), ("memory.current", "500\n")]);
        let stat = "anon 1\ninactive_file 100\nactive_file 7\n";
        write("a/b/c", &[("memory.max", "700"), ("memory.current", "500"), ("memory.stat", stat)]);
        let group = |line| Group { root: root.clone(), ..group_of(line).unwrap() };
        assert_eq!(group("0::/a/b/c").lefts(), [300, 100]);
        // As a container sees it that has the group for its root.
        assert_eq!(group("0::/elsewhere").lefts(), [0; 0]);
        fs::remove_dir_all(&root).unwrap();
        assert!(group_of("4:memory:/x").is_some() && group_of("5:devices:/x").is_none());
        assert!(group_of("no group").is_none());
    }
}
