//! Ranks as threads of this process, with a deadline.

use crate::scenario::{Body, Outcome, Scenario};
use phalanx::{BackendKind, Comm};
use std::sync::{Condvar, Mutex, PoisonError, mpsc};
use std::time::Duration;

/// The backend of worlds in host memory, which is what is tested also where there are GPUs.
pub(crate) fn host(ranks: usize) -> BackendKind {
    if ranks == 1 { BackendKind::Solo } else { BackendKind::Host }
}

/// Runs `f` on `ranks` thread ranks in host memory and collects what they report, in rank order.
///
/// A world that is still running after `deadline` is an error; its threads cannot be ended and are left
/// behind, so a test that gets this error should be the last thing a process relies on. The communicators
/// have half of that time as their own deadline, so that a hang of the library says who waits for whom.
pub fn run<F>(ranks: usize, deadline: Duration, f: F) -> Result<Vec<Outcome>, String>
where
    F: Fn(Comm) -> Outcome + Send + Sync + 'static,
{
    let (sender, receiver) = mpsc::channel();
    let world = std::thread::spawn(move || {
        // The receiver is gone only after the deadline, when nobody wants the result any more.
        let builder = Comm::builder().backend(host(ranks)).timeout(deadline / 2);
        let _ = sender.send(builder.run(ranks, f));
    });
    match receiver.recv_timeout(deadline) {
        Ok(results) => {
            world.join().map_err(|_| "the world's thread panicked after its result".to_owned())?;
            results.map_err(|error| format!("{ranks} thread ranks: {error}"))
        }
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            let panic = world.join().err().map(|panic| panic_text(&*panic)).unwrap_or_default();
            Err(format!("a rank panicked: {panic}"))
        }
        Err(mpsc::RecvTimeoutError::Timeout) => {
            Err(format!("{ranks} thread ranks still running after {deadline:?}"))
        }
    }
}

/// Runs a scenario on thread ranks.
pub fn run_scenario(
    scenario: &Scenario,
    ranks: usize,
    args: &[String],
    deadline: Duration,
) -> Result<Vec<Outcome>, String> {
    let Body::Rank(body) = scenario.body else {
        return Err(format!("{} is not a scenario for ranks", scenario.name));
    };
    let args = args.to_vec();
    run(ranks, deadline, move |comm| body(comm, &args))
}

/// The text of a panic.
pub fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("(no text)").to_owned()
}

/// Counts the threads that are still at something, so that another one can wait for their end.
#[derive(Debug)]
pub struct Busy {
    threads: Mutex<usize>,
    ended: Condvar,
}

impl Busy {
    /// So many threads are at it.
    pub fn new(threads: usize) -> Busy {
        Busy { threads: Mutex::new(threads), ended: Condvar::new() }
    }

    /// One of the threads is through when this is dropped.
    pub fn one(&self) -> impl Drop + '_ {
        struct One<'a>(&'a Busy);

        impl Drop for One<'_> {
            fn drop(&mut self) {
                *self.0.threads.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
                self.0.ended.notify_all();
            }
        }

        One(self)
    }

    /// Waits until all threads are through, or so long.
    pub fn wait(&self, timeout: Duration) {
        let threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.ended.wait_timeout_while(threads, timeout, |threads| *threads > 0));
    }
}
