//! Several hosts on one: processes with an IPC namespace of their own share no memory with others, and phalanx takes
//! them for those of another host. They have the same network, so that they can be reached.

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

    /// A host that is there as long as the file is open. Who opens the file can [`go_to`] it.
    pub fn make() -> Result<std::fs::File, String> {
        let _there = Elsewhere::enter()?;
        std::fs::File::open("/proc/thread-self/ns/ipc").map_err(|error| error.to_string())
    }
}

/// Goes to a host for good: this thread, and what it starts.
#[cfg(target_os = "linux")]
pub fn go_to(host: &std::fs::File) -> std::io::Result<()> {
    use rustix::fd::AsFd;
    let ipc = Some(rustix::thread::LinkNameSpaceType::InterProcessCommunication);
    Ok(rustix::thread::move_into_link_name_space(host.as_fd(), ipc)?)
}

#[cfg(target_os = "linux")]
impl Drop for Elsewhere {
    fn drop(&mut self) {
        go_to(&self.home).expect("the way back is open");
    }
}

#[cfg(not(target_os = "linux"))]
impl Elsewhere {
    /// There are no namespaces here.
    pub fn enter() -> Result<Elsewhere, String> {
        Err("there are no namespaces here".into())
    }

    /// There are no namespaces here.
    pub fn make() -> Result<std::fs::File, String> {
        Elsewhere::enter().map(|_| unreachable!("the error above"))
    }
}

/// There are no namespaces here.
#[cfg(not(target_os = "linux"))]
pub fn go_to(_host: &std::fs::File) -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}
