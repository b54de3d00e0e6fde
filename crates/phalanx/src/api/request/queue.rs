//! The started operations of one communicator.

use super::MessagePair;
use super::mover::{Moving, move_requests};
use super::worker::{Job, work};
use crate::buffer::stream::Stream;
use crate::contract::{Backend, Call, OperationId, StartCollectives};
use crate::os::sync::lock;
use crate::os::{ForkMark, RunInstant};
use crate::types::error::{Error, Result};
use crate::watch::{RecordId, Recorder};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::Duration;

/// The result of an operation that a thread completes, set once.
#[derive(Default)]
pub(super) struct Outcome {
    state: Mutex<OutcomeState>,
    there: Condvar,
}

#[derive(Default)]
struct OutcomeState {
    result: Option<Result<()>>,
    /// Of the task that polls the request, and since when it does.
    waker: Option<Waker>,
    polled_since: Option<RunInstant>,
}

impl Outcome {
    pub fn put(&self, result: Result<()>) {
        lock(&self.state).result = Some(result);
        self.there.notify_all();
        self.wake();
    }

    /// Wakes the task that polls, without the lock: it may poll at once.
    pub fn wake(&self) {
        let waker = lock(&self.state).waker.take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub fn take(&self) -> Result<()> {
        let mut state = lock(&self.state);
        loop {
            match state.result.take() {
                Some(result) => return result,
                None => state = self.there.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    pub fn is_there(&self) -> bool {
        lock(&self.state).result.is_some()
    }

    /// Whether it is there; if not, `waker` is woken when it is.
    pub fn is_there_or_wakes(&self, waker: &Waker) -> bool {
        let mut state = lock(&self.state);
        if state.result.is_some() {
            return true;
        }
        state.polled_since.get_or_insert_with(RunInstant::now);
        state.waker = Some(waker.clone());
        false
    }

    /// Whether a task has polled for longer than this.
    fn is_polled_longer_than(&self, deadline: Duration) -> bool {
        lock(&self.state).polled_since.is_some_and(|since| since.elapsed() >= deadline)
    }
}

/// A started collective that the backend carries out.
pub(super) struct Started {
    pub operation: OperationId,
    pub deadline: Option<Duration>,
    pub record: RecordId,
    pub outcome: Arc<Outcome>,
}

impl Started {
    /// Whether a task has polled it for longer than its deadline: nobody waits, and so nobody else would notice.
    pub fn is_overdue(&self, timeout: Duration) -> bool {
        self.outcome.is_polled_longer_than(self.deadline.unwrap_or(timeout))
    }
}

/// The requests of one communicator.
pub(crate) struct Requests {
    pub(super) backend: Arc<dyn Backend>,
    worker: Mutex<Option<(Sender<Job>, JoinHandle<()>)>>,
    pub(super) moving: Arc<Moving>,
    mover: Mutex<Option<JoinHandle<()>>>,
    fork: ForkMark,
}

impl Requests {
    pub fn new(backend: Arc<dyn Backend>, recorder: Arc<Recorder>) -> Requests {
        let moving = Moving {
            state: Mutex::default(),
            changed: Condvar::new(),
            started: Mutex::default(),
            dropped: Mutex::default(),
            polled: Mutex::default(),
            recorder,
            under_way: AtomicUsize::new(0),
        };
        let (moving, worker, mover) = (Arc::new(moving), Mutex::default(), Mutex::default());
        Requests { backend, worker, moving, mover, fork: ForkMark::of_this_process() }
    }

    /// Waits until no started collective is under way.
    #[inline]
    pub fn wait_for_collectives(&self) {
        if self.moving.under_way.load(Ordering::Acquire) != 0 {
            self.finish_all();
        }
    }

    /// Call before posting a message. Where operations run in the order of the calls, started collectives come first; their
    /// thread would otherwise enqueue the message with them.
    #[inline]
    pub fn make_way_for_message(&self) {
        if self.moving.under_way.load(Ordering::Acquire) != 0 && self.backend.is_stream_ordered() {
            self.finish_all();
        }
    }

    #[cold]
    fn finish_all(&self) {
        if self.fork.is_copy() {
            // After fork no thread carries them out in this process; the backend refuses later calls.
            return;
        }
        loop {
            let mut list = lock(&self.moving.started);
            if list.is_empty() {
                break;
            }
            let started = list.remove(0);
            drop(list);
            self.moving.complete(&*self.backend, &started);
        }
        // The remaining ones are completed by the worker or by another thread's wait.
        while self.moving.under_way.load(Ordering::Acquire) != 0 {
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    /// Waits for one collective, if the backend carries it out and it was not yet seen complete.
    pub(super) fn finish(&self, outcome: &Arc<Outcome>) {
        let mut list = lock(&self.moving.started);
        if let Some(index) = list.iter().position(|started| Arc::ptr_eq(&started.outcome, outcome)) {
            let started = list.remove(index);
            drop(list);
            self.moving.complete(&*self.backend, &started);
        }
    }

    pub(super) fn start(
        &self,
        call: Call<'static>,
        stream: &Stream,
        deadline: Option<Duration>,
    ) -> Result<Arc<Outcome>> {
        match self.backend.start_collectives() {
            Some(collectives) => self.start_there(collectives, &call, deadline),
            None => self.give_to_thread(call, stream.clone(), deadline),
        }
    }

    fn start_there(
        &self,
        collectives: &dyn StartCollectives,
        call: &Call<'static>,
        deadline: Option<Duration>,
    ) -> Result<Arc<Outcome>> {
        self.start_mover()?;
        let outcome = Arc::new(Outcome::default());
        let record = self.moving.recorder.begin(call);
        // SAFETY: the call was checked; its buffers are the request's, which keeps them until the outcome is there. One
        // thread has the communicator, and no plain collective is under way.
        match unsafe { collectives.start(call) } {
            Ok(operation) => {
                self.moving.under_way.fetch_add(1, Ordering::AcqRel);
                let started = Started { operation, deadline, record, outcome: outcome.clone() };
                self.moving.request_started();
                lock(&self.moving.started).push(started);
            }
            // Reported by the request's wait, like any other error of a request.
            Err(error) => outcome.put(self.moving.recorder.end(record, Err(error))),
        }
        Ok(outcome)
    }

    fn give_to_thread(
        &self,
        call: Call<'static>,
        stream: Stream,
        deadline: Option<Duration>,
    ) -> Result<Arc<Outcome>> {
        let outcome = Arc::new(Outcome::default());
        let mut worker = lock(&self.worker);
        let sender = match &*worker {
            Some((sender, _)) => sender,
            None => {
                let (sender, receiver) = channel();
                let (backend, moving) = (self.backend.clone(), self.moving.clone());
                let name = format!("phalanx-{}", self.backend.rank());
                let handle = self.start_thread(name, move || work(&*backend, &moving, &receiver))?;
                &worker.insert((sender, handle)).0
            }
        };
        self.moving.under_way.fetch_add(1, Ordering::AcqRel);
        let record = self.moving.recorder.enqueue(&call);
        let job = Job { record, call, stream, deadline, outcome: outcome.clone() };
        sender.send(job).expect("the worker lives as long as its sender");
        Ok(outcome)
    }

    /// Advances messages posted without a request, too, until [`end_moving`](Self::end_moving).
    pub fn begin_moving(&self) {
        self.moving.request_started();
    }

    pub fn end_moving(&self) {
        self.moving.forget();
    }

    /// Starts the thread that advances requests, unless it runs.
    pub fn start_mover(&self) -> Result<()> {
        let mut mover = lock(&self.mover);
        if mover.is_none() {
            let (backend, moving) = (self.backend.clone(), self.moving.clone());
            let name = format!("phalanx-m{}", self.backend.rank());
            *mover = Some(self.start_thread(name, move || move_requests(&*backend, &moving))?);
        }
        Ok(())
    }

    /// Waits for all messages, even if some fail; answers the first error.
    pub(super) fn wait_for_messages(&self, MessagePair { under_way, outcome }: MessagePair) -> Result<()> {
        under_way.into_iter().flatten().fold(outcome, |outcome, posted| {
            let waited = self.backend.wait(posted.id, &|| ());
            outcome.and(self.moving.request_ended(posted.record, waited))
        })
    }

    fn start_thread(&self, name: String, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
        std::thread::Builder::new().name(name).spawn(body).map_err(|e| {
            let remedy = "a request needs a thread: raise `ulimit -u`, or use the operation without `start_`";
            // A communicator that has failed answers its failure, whatever is called.
            self.backend.check().err().unwrap_or_else(|| Error::system("starting a thread", e, remedy))
        })
    }

    /// Whether this process is a copy, made by fork, of the one that has the communicator.
    pub fn is_copy(&self) -> bool {
        self.fork.is_copy()
    }

    /// Ends the threads, after the collectives that were started.
    pub fn stop(&self) {
        if self.fork.is_copy() {
            // The threads belong to the parent process.
            forget(&self.worker);
            forget(&self.mover);
            return;
        }
        self.wait_for_collectives();
        if let Some((sender, handle)) = lock(&self.worker).take() {
            drop(sender);
            let _ = handle.join();
        }
        lock(&self.moving.state).stop = true;
        self.moving.changed.notify_all();
        if let Some(handle) = lock(&self.mover).take() {
            let _ = handle.join();
        }
        self.moving.wake_polled();
    }
}

/// Leaks a thread's handle: after fork the thread does not exist, and may have held the lock.
fn forget<T>(threads: &Mutex<Option<T>>) {
    if let Ok(mut threads) = threads.try_lock() {
        std::mem::forget(threads.take());
    }
}
