//! Available memory of this process. Linux overcommits: it hands out pages that it does not have, and kills
//! the process that uses them.

use std::fs;
use std::path::{Path, PathBuf};

/// Returns the available bytes: the least of the host's available memory and what the control groups of this
/// process leave it, plus the same of swap. `None` if the kernel does not report it.
pub(crate) fn available() -> Option<u64> {
    let host = fs::read_to_string("/proc/meminfo").ok()?;
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let groups: Vec<MemoryCgroup> = groups.lines().filter_map(group_of).collect();
    left_by(&groups, &host)
}

fn left_by(groups: &[MemoryCgroup], meminfo: &str) -> Option<u64> {
    let memory = groups.iter().flat_map(|group| group.lefts(MemoryCgroup::memory_left));
    let swap = groups.iter().flat_map(|group| group.lefts(MemoryCgroup::swap_left));
    let memory = memory.fold(figure(meminfo, "MemAvailable")?, u64::min);
    Some(memory + swap.fold(figure(meminfo, "SwapFree").unwrap_or(0), u64::min))
}

/// A figure of `/proc/meminfo`, in bytes.
fn figure(meminfo: &str, name: &str) -> Option<u64> {
    let value = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// A memory control group, and the names of its files.
struct MemoryCgroup {
    root: PathBuf,
    /// Below the root, as the kernel knows it; in a container the root may already be the group itself.
    path: PathBuf,
    limit: &'static str,
    usage: &'static str,
    /// Figures of the usage that the kernel can reclaim: page cache and reclaimable slabs.
    idle: &'static [&'static str],
    /// Files with limit and usage of swap, if separate from those of memory.
    swap: Option<[&'static str; 2]>,
}

/// The group of a line of `/proc/self/cgroup`, `number:controllers:path`, if it is one of memory.
fn group_of(line: &str) -> Option<MemoryCgroup> {
    let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
    let path = path.trim_start_matches('/').into();
    let root = Path::new("/sys/fs/cgroup");
    if controllers.is_empty() {
        return Some(MemoryCgroup {
            root: root.into(),
            path,
            limit: "memory.max",
            usage: "memory.current",
            idle: &["inactive_file", "active_file", "slab_reclaimable"],
            swap: Some(["memory.swap.max", "memory.swap.current"]),
        });
    }
    controllers.split(',').any(|name| name == "memory").then(|| MemoryCgroup {
        root: root.join("memory"),
        path,
        limit: "memory.limit_in_bytes",
        usage: "memory.usage_in_bytes",
        idle: &["total_inactive_file", "total_active_file"],
        swap: None,
    })
}

impl MemoryCgroup {
    /// The bytes left in this group and in its ancestors. An unlimited group has no number, or a huge one.
    fn lefts(&self, left: fn(&MemoryCgroup, &Path) -> Option<u64>) -> Vec<u64> {
        let folders = self.path.ancestors().map(|path| self.root.join(path));
        folders.filter_map(|folder| left(self, &folder)).collect()
    }

    fn memory_left(&self, folder: &Path) -> Option<u64> {
        let (limit, usage) = (number(&folder.join(self.limit))?, number(&folder.join(self.usage))?);
        let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
        Some(limit.saturating_sub(usage.saturating_sub(sum_of(&stat, self.idle))))
    }

    fn swap_left(&self, folder: &Path) -> Option<u64> {
        let [limit, usage] = self.swap?;
        Some(number(&folder.join(limit))?.saturating_sub(number(&folder.join(usage))?))
    }
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The sum of those figures of a `memory.stat` that have these names.
fn sum_of(stat: &str, names: &[&str]) -> u64 {
    let figures = stat.lines().filter_map(|line| line.split_once(' '));
    figures
        .filter(|(name, _)| names.contains(name))
        .filter_map(|(_, value)| value.trim().parse::<u64>().ok())
        .sum()
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
        write("a", &[("memory.max", "9000\n"), ("memory.current", "8900\n"), ("memory.swap.max", "max\n")]);
        let swap = [("memory.swap.max", "70\n"), ("memory.swap.current", "30\n")];
        write("a/b", &[&[("memory.max", "max\n"), ("memory.current", "500\n")], &swap[..]].concat());
        let stat = "anon 1\ninactive_file 100\nactive_file 20\nslab_reclaimable 3\nslab 5\n";
        write("a/b/c", &[("memory.max", "700"), ("memory.current", "650"), ("memory.stat", stat)]);
        let group = |line| MemoryCgroup { root: root.clone(), ..group_of(line).unwrap() };
        let nested = group("0::/a/b/c");
        assert_eq!(nested.lefts(MemoryCgroup::memory_left), [173, 100]);
        assert_eq!(nested.lefts(MemoryCgroup::swap_left), [40]);
        // As a container sees it that has the group for its root.
        assert_eq!(group("0::/elsewhere").lefts(MemoryCgroup::memory_left), [0; 0]);
        // The least of all, each for itself.
        let host = |swap| format!("MemAvailable: 1 kB\nSwapFree: {swap} kB\n");
        assert_eq!(left_by(&[nested], &host(1)), Some(100 + 40));
        assert_eq!(left_by(&[group("0::/a/b/c")], &host(0)), Some(100));
        assert_eq!(left_by(&[], &host(1)), Some(2048));
        let stat = "inactive_file 1\ntotal_inactive_file 10\ntotal_active_file 5\n";
        let files = [("memory.limit_in_bytes", "50"), ("memory.usage_in_bytes", "45"), ("memory.stat", stat)];
        write("memory/old", &files);
        let old = MemoryCgroup { root: root.join("memory"), ..group_of("4:memory:/old").unwrap() };
        assert_eq!(left_by(&[old], &host(1)), Some(20 + 1024));
        fs::remove_dir_all(&root).unwrap();
        assert!(group_of("4:memory:/x").is_some() && group_of("5:devices:/x").is_none());
        assert!(group_of("no group").is_none());
    }
}
