//! No further threads or processes, as a limit of pids or `ulimit -u` leaves a rank.

#[cfg(target_os = "linux")]
pub use linux::{cannot_refuse, refuse};

/// There is no such limit here.
#[cfg(not(target_os = "linux"))]
pub fn cannot_refuse() -> Option<&'static str> {
    Some("for Linux")
}

/// There is no such limit here.
#[cfg(not(target_os = "linux"))]
pub fn refuse() -> Result<(), String> {
    Err("for Linux".into())
}

#[cfg(target_os = "linux")]
mod linux {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities, set_thread_res_uid};
    use std::sync::LazyLock;
    use std::thread;

    /// A user without processes.
    const NOBODY: u32 = 65534;

    /// Why this machine cannot refuse a process its threads, if so.
    pub fn cannot_refuse() -> Option<&'static str> {
        static CANNOT: LazyLock<bool> = LazyLock::new(|| {
            let before = getrlimit(Resource::Nproc);
            // What is changed is this thread's, but for the limit, which is put back.
            let tried =
                thread::spawn(|| bind().and_then(|()| lower(Some(0), getrlimit(Resource::Nproc).maximum)));
            let refused = tried.join().unwrap_or_else(|_| Err("a panic".into()));
            setrlimit(Resource::Nproc, before).expect("a limit below the highest");
            refused.is_err()
        });
        CANNOT.then_some("RLIMIT_NPROC does not bind this user")
    }

    /// From here on, this thread can start neither threads nor processes.
    pub fn refuse() -> Result<(), String> {
        bind()?;
        lower(Some(0), Some(0))
    }

    /// RLIMIT_NPROC counts the processes of the real user, and binds neither root nor a thread with these capabilities. The effective
    /// user, whose rights to files and peers count, stays.
    fn bind() -> Result<(), String> {
        let text = |error: rustix::io::Errno| error.to_string();
        if rustix::process::getuid().is_root() {
            let (root, nobody) = (rustix::process::Uid::ROOT, rustix::process::Uid::from_raw(NOBODY));
            set_thread_res_uid(nobody, root, root).map_err(text)?;
        }
        let mut sets = capabilities(None).map_err(text)?;
        sets.effective.remove(CapabilitySet::SYS_RESOURCE | CapabilitySet::SYS_ADMIN);
        set_capabilities(None, sets).map_err(text)
    }

    fn lower(current: Option<u64>, maximum: Option<u64>) -> Result<(), String> {
        setrlimit(Resource::Nproc, Rlimit { current, maximum }).map_err(|error| error.to_string())?;
        match thread::Builder::new().spawn(|| {}) {
            Err(_) => Ok(()),
            Ok(thread) => {
                let _ = thread.join();
                Err("a thread could be started".into())
            }
        }
    }
}
