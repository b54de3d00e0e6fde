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
