//! [`GpuCompletion`]: the end of copies to another rank's GPU, as a future.

use crate::api::request::Outcome;
use crate::contract::RemoteGpuWindow;
use crate::types::error::{Error, Result};
use crate::watch::Recorder;
use crate::watch::deadline::Limited;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

/// The completion of copies, as a future: [`RemoteGpuWindow::completion`](super::remote::RemoteGpuWindow::completion).
///
/// It answers what [`sync`](super::remote::RemoteGpuWindow::sync) would, by the same deadline, in every executor. Its first poll starts a thread
/// that waits, unless the copies are complete. Until it has answered, the window stays open for its rank.
///
/// # Panics
/// If it is polled after it has answered.
#[must_use = "a future does nothing unless it is polled"]
pub struct GpuCompletion {
    state: State,
    recorder: Arc<Recorder>,
    deadline: Option<Duration>,
}

enum State {
    Unpolled(Arc<dyn RemoteGpuWindow>),
    /// A thread waits.
    Waiting(Arc<Outcome>),
    Over,
}

impl GpuCompletion {
    pub(super) fn new(
        window: Arc<dyn RemoteGpuWindow>,
        recorder: Arc<Recorder>,
        deadline: Option<Duration>,
    ) -> GpuCompletion {
        GpuCompletion { state: State::Unpolled(window), recorder, deadline }
    }
}

/// Starts a thread that waits for the window's copies.
fn start(window: Arc<dyn RemoteGpuWindow>, deadline: Option<Duration>) -> Result<Arc<Outcome>> {
    let outcome = Outcome::of(1);
    let answer = outcome.clone();
    let wait = move || {
        let _limited = Limited::to(deadline);
        let result = window.sync();
        // The window is closed here, if nobody else has it, before the task goes on.
        drop(window);
        answer.put(result);
    };
    let remedy = "a future of copies needs a thread: raise `ulimit -u`, or call sync";
    let started = std::thread::Builder::new().name("phalanx-gpu".into()).spawn(wait);
    started.map(|_| outcome).map_err(|error| Error::system("starting a thread", error, remedy))
}

impl Future for GpuCompletion {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let outcome = match std::mem::replace(&mut self.state, State::Over) {
            State::Unpolled(window) if self.recorder.noted(window.is_complete())? => {
                return Poll::Ready(Ok(()));
            }
            State::Unpolled(window) => start(window, self.deadline)?,
            State::Waiting(outcome) => outcome,
            State::Over => panic!("a completion was polled after it had answered"),
        };
        if outcome.is_there_or_wakes(context.waker()) {
            return Poll::Ready(self.recorder.noted(outcome.take()));
        }
        self.state = State::Waiting(outcome);
        Poll::Pending
    }
}

impl fmt::Debug for GpuCompletion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuCompletion").finish_non_exhaustive()
    }
}
