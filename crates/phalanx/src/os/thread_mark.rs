//! A thread that other processes of its host can look at: whether it waits for a core.

use serde::{Deserialize, Serialize};

/// A thread, by its id and by what makes the id unique: the host and the PID namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadMark {
    boot: String,
    namespace: u64,
    id: u32,
}

impl ThreadMark {
    /// The calling thread; `None` if it cannot be looked at.
    #[cfg(target_os = "linux")]
    pub fn own() -> Option<ThreadMark> {
        let id = u32::try_from(rustix::thread::gettid().as_raw_pid()).ok()?;
        Some(ThreadMark { boot: super::boot_id(), namespace: namespace()?, id })
    }

    /// Whether the thread has something to do, and a core or none: then it is not dead, whatever it has not done. `false` if it sleeps,
    /// is stopped or gone, and if it is out of sight.
    #[cfg(target_os = "linux")]
    pub fn is_ready(&self) -> bool {
        if self.boot != super::boot_id() || Some(self.namespace) != namespace() {
            return false;
        }
        super::stat_of(self.id).is_some_and(|stat| stat.starts_with('R'))
    }

    #[cfg(not(target_os = "linux"))]
    pub fn own() -> Option<ThreadMark> {
        None
    }

    #[cfg(not(target_os = "linux"))]
    pub fn is_ready(&self) -> bool {
        false
    }
}

#[cfg(target_os = "linux")]
fn namespace() -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    Some(std::fs::metadata("/proc/self/ns/pid").ok()?.ino())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_thread_is_ready_while_it_has_something_to_do() {
        let own = ThreadMark::own().unwrap();
        assert!(own.is_ready());
        assert!(!ThreadMark { boot: "another host".into(), ..own.clone() }.is_ready());
        assert!(!ThreadMark { namespace: 1, ..own }.is_ready());
        let (say, said) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        let sleeper = std::thread::spawn(move || {
            say.send(ThreadMark::own().unwrap()).unwrap();
            let _ = ended.recv();
        });
        let mark = said.recv().unwrap();
        while mark.is_ready() {
            std::thread::yield_now();
        }
        drop(end);
        sleeper.join().unwrap();
        assert!(!mark.is_ready(), "it has ended");
    }
}
