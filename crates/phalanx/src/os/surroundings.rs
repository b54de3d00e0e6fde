//! The kernel, namespaces and user of a process: what processes need in common to share memory.

use serde::{Deserialize, Serialize};

/// Kernel and namespaces of a process. Processes with equal values can share memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Surroundings {
    /// The kernel's boot id, which changes at each start.
    pub boot: String,
    /// Inodes of the network and IPC namespaces. Processes of several PID namespaces can share memory: they hand each other its file and
    /// handles to themselves.
    pub namespaces: [u64; 2],
    /// The device of `/dev/shm`, which stands for the mounts.
    pub shared_memory: u64,
    pub user: u32,
}

impl Surroundings {
    /// Reads this process's surroundings; `None` if the kernel does not report them.
    #[cfg(target_os = "linux")]
    pub fn own() -> Option<Surroundings> {
        use std::os::unix::fs::MetadataExt;
        let inode = |name: &str| Some(std::fs::metadata(format!("/proc/self/ns/{name}")).ok()?.ino());
        Some(Surroundings {
            boot: Some(super::boot_id()).filter(|boot| !boot.is_empty())?,
            namespaces: [inode("net")?, inode("ipc")?],
            // Without one, nothing in it is shared or not shared.
            shared_memory: std::fs::metadata("/dev/shm").map_or(0, |shm| shm.dev()),
            user: super::user_id(),
        })
    }

    /// What these lack in common to share memory, with the remedy for containers; empty if they can, and if they have not even the
    /// kernel in common.
    pub fn differences(&self, other: &Surroundings) -> Vec<&'static str> {
        let all = [
            (
                self.namespaces[0] == other.namespaces[0],
                "the network namespace (containers: --network=host for both, or container:NAME)",
            ),
            (
                self.namespaces[1] == other.namespaces[1],
                "the IPC namespace (containers: --ipc=host for both, or container:NAME)",
            ),
            (
                self.shared_memory == other.shared_memory,
                "the mount of /dev/shm (containers: the same volume there, or --ipc as for IPC)",
            ),
            (self.user == other.user, "the user"),
        ];
        let differences = all.into_iter().filter(|(same, _)| self.boot == other.boot && !same);
        differences.map(|(_, what)| what).collect()
    }

    /// This process's: unknown here.
    #[cfg(not(target_os = "linux"))]
    pub fn own() -> Option<Surroundings> {
        None
    }
}

/// The name that this host gives itself.
pub(crate) fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "this host".to_owned(),
        name => name.to_owned(),
    }
}
