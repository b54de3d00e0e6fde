//! A folder on which there is no room: a full file system of this process's own, mounted at [`FOLDER`].

/// Where it is.
pub const FOLDER: &str = "/dev/shm";

#[cfg(target_os = "linux")]
pub use linux::{cannot_mount, mount_here};

/// There are no mounts of one process here.
#[cfg(not(target_os = "linux"))]
pub fn cannot_mount() -> Option<&'static str> {
    Some("for Linux")
}

/// There are no mounts of one process here.
#[cfg(not(target_os = "linux"))]
pub fn mount_here() -> Result<(), String> {
    Err("for Linux".into())
}

#[cfg(target_os = "linux")]
mod linux {
    use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
    use rustix::thread::{UnshareFlags, unshare_unsafe};
    use std::sync::LazyLock;

    /// Why a process cannot have mounts of its own here, if so.
    pub fn cannot_mount() -> Option<&'static str> {
        static CANNOT: LazyLock<bool> = LazyLock::new(|| {
            let tried = std::thread::spawn(|| {
                // SAFETY: what is unshared is this thread's, which ends at once.
                unsafe { unshare_unsafe(own_mounts()) }.is_ok()
            });
            !tried.join().unwrap_or(false)
        });
        CANNOT.then_some("mounting needs privileges")
    }

    fn own_mounts() -> UnshareFlags {
        UnshareFlags::NEWNS | UnshareFlags::FS
    }

    /// Mounts and fills it, for this process and what it starts.
    pub fn mount_here() -> Result<(), String> {
        let refused = |what: &'static str| move |error: rustix::io::Errno| format!("{what}: {error}");
        // SAFETY: this process has one thread.
        unsafe { unshare_unsafe(own_mounts()) }.map_err(refused("unshare"))?;
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
            .map_err(refused("private"))?;
        mount("none", super::FOLDER, "tmpfs", MountFlags::empty(), c"size=8k").map_err(refused("mount"))?;
        if std::fs::write(format!("{}/all", super::FOLDER), vec![1u8; 1 << 20]).is_ok() {
            return Err(format!("{} is not full", super::FOLDER));
        }
        Ok(())
    }
}
