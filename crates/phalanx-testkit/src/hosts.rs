//! Several hosts on one: processes with an IPC namespace of their own share no memory with others, and
//! phalanx takes them for those of another host. They have the same network, so that they can be reached.

/// While it lives, this thread starts processes on a host of their own.
#[derive(Debug)]
pub struct Elsewhere {
    #[cfg(target_os = "linux")]
    home: std::fs::File,
}

#[cfg(target_os = "linux")]
impl Elsewhere {
    /// Leaves this host. It needs the right to make namespaces (CAP_SYS_ADMIN).
    pub fn enter() -> Result<Elsewhere, String> {
        let home = std::fs::File::open("/proc/thread-self/ns/ipc").map_err(|error| error.to_string())?;
        // SAFETY: no thread of this process relies on sharing System V or POSIX queues with another.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWIPC) }
            .map_err(|error| format!("an IPC namespace of its own: {error}"))?;
        Ok(Elsewhere { home })
    }
}

#[cfg(target_os = "linux")]
impl Drop for Elsewhere {
    fn drop(&mut self) {
        use rustix::fd::AsFd;
        let ipc = Some(rustix::thread::LinkNameSpaceType::InterProcessCommunication);
        rustix::thread::move_into_link_name_space(self.home.as_fd(), ipc).expect("the way back is open");
    }
}

#[cfg(not(target_os = "linux"))]
impl Elsewhere {
    /// There are no namespaces here.
    pub fn enter() -> Result<Elsewhere, String> {
        Err("there are no namespaces here".into())
    }
}

/// Another host for ranks that a launcher starts, and that go there by themselves ([`go_to`]): there as long
/// as this lives.
///
/// It has memory of its own under `/dev/shm`. (With an IPC namespace of its own UCX, and with it MPICH, has
/// but TCP left.)
#[cfg(target_os = "linux")]
#[derive(Debug)]
pub struct Host(std::fs::File);

#[cfg(target_os = "linux")]
impl Host {
    /// Makes one.
    pub fn make() -> Result<Host, String> {
        use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
        let make = || -> std::io::Result<std::fs::File> {
            // SAFETY: this thread alone, which ends, leaves the mounts and the working directory that it
            // shared.
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }?;
            mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
            mount("phalanx", "/dev/shm", "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, None)?;
            std::fs::File::open("/proc/thread-self/ns/mnt")
        };
        let made = std::thread::spawn(make).join().map_err(|_| "its thread has panicked".to_owned())?;
        made.map(Host).map_err(|error| format!("a mount namespace of its own: {error}"))
    }

    /// The file by which other processes find it.
    pub fn path(&self) -> String {
        use std::os::fd::AsRawFd;
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }
}

/// Goes to the host of this path for good. For a process of one thread.
#[cfg(target_os = "linux")]
pub fn go_to(path: &str) -> std::io::Result<()> {
    use rustix::fd::AsFd;
    let host = std::fs::File::open(path)?;
    let folder = std::env::current_dir()?;
    let mounts = Some(rustix::thread::LinkNameSpaceType::Mount);
    rustix::thread::move_into_link_name_space(host.as_fd(), mounts)?;
    std::env::set_current_dir(folder)
}

/// Becomes another program. Comes back only with an error.
#[cfg(target_os = "linux")]
pub fn become_program(command: &mut std::process::Command) -> std::io::Error {
    std::os::unix::process::CommandExt::exec(command)
}

/// Another host: there are none here, so no value of this type exists.
#[cfg(not(target_os = "linux"))]
#[derive(Debug)]
pub enum Host {}

#[cfg(not(target_os = "linux"))]
impl Host {
    /// There are no namespaces here.
    pub fn make() -> Result<Host, String> {
        Err("there are no namespaces here".into())
    }

    /// The file by which other processes find it.
    pub fn path(&self) -> String {
        match *self {}
    }
}

/// There are no namespaces here.
#[cfg(not(target_os = "linux"))]
pub fn go_to(_path: &str) -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}

/// For ranks that have gone to another host, and there is none.
#[cfg(not(target_os = "linux"))]
pub fn become_program(_command: &mut std::process::Command) -> std::io::Error {
    std::io::ErrorKind::Unsupported.into()
}
