//! A thread that lets UCX work while an epoch is open: other hosts' ranks access the parts of this process, which may compute meanwhile.

use super::worker::Worker;
use crate::os::RunInstant;
use crate::os::sync::{lock, wait};
use crate::types::error::{Error, Result};
use std::sync::{Arc, Condvar, Mutex, Once, TryLockError};
use std::time::Duration;

/// Two looks for accesses are so far apart. An access to a rank that computes takes as long.
const NAP: Duration = Duration::from_micros(50);
/// After an access, the thread looks without a pause for so long: more follow each other.
const KEEN: Duration = Duration::from_micros(300);

#[derive(Default)]
struct State {
    /// Open epochs.
    epochs: usize,
    is_started: bool,
    is_over: bool,
}

/// The thread of a process, from its first window on.
#[derive(Default)]
pub(super) struct Serving {
    state: Mutex<State>,
    changed: Condvar,
}

impl Serving {
    /// Starts the thread, if it is not there.
    pub fn start(self: &Arc<Serving>, worker: &Arc<Mutex<Option<Worker>>>) -> Result<()> {
        let mut state = lock(&self.state);
        if state.is_started {
            return Ok(());
        }
        let (serving, worker) = (self.clone(), worker.clone());
        let thread = std::thread::Builder::new().name("phalanx-ucx".into());
        let started = thread.spawn(move || serving.serve(&worker));
        let refused = "memory that ranks of several hosts access needs one: raise `ulimit -u`";
        started.map_err(|error| Error::system("starting a thread", error, refused))?;
        state.is_started = true;
        Ok(())
    }

    /// An epoch begins or has ended.
    pub fn set_open(&self, is_open: bool) {
        let mut state = lock(&self.state);
        match is_open {
            true => state.epochs += 1,
            false => state.epochs -= 1,
        }
        self.changed.notify_one();
    }

    /// Ends the thread.
    pub fn end(&self) {
        lock(&self.state).is_over = true;
        self.changed.notify_one();
    }

    fn serve(&self, worker: &Mutex<Option<Worker>>) {
        static AT_EXIT: Once = Once::new();
        let (mut performed, mut last) = (0, RunInstant::now());
        while self.is_needed() {
            let is_there = crate::os::unless_exiting(&AT_EXIT, || {
                // Whoever has the lock lets UCX work.
                let mut locked = match worker.try_lock() {
                    Ok(locked) => locked,
                    Err(TryLockError::Poisoned(locked)) => locked.into_inner(),
                    Err(TryLockError::WouldBlock) => return true,
                };
                let Some(worker) = &mut *locked else { return false };
                worker.progress();
                let so_far = worker.parts().performed;
                if std::mem::replace(&mut performed, so_far) != so_far {
                    last = RunInstant::now();
                }
                true
            });
            if is_there != Some(true) {
                return;
            }
            match last.elapsed() < KEEN {
                true => std::thread::yield_now(),
                false => std::thread::sleep(NAP),
            }
        }
    }

    /// Waits for an epoch; `false` if none comes any more.
    fn is_needed(&self) -> bool {
        let mut state = lock(&self.state);
        while state.epochs == 0 && !state.is_over {
            state = wait(&self.changed, state);
        }
        !state.is_over
    }
}
