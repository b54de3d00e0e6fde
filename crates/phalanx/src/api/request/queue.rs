//! The started operations of one communicator.

use super::MessagePair;
use super::mover::{Moving, move_requests};
use super::outcome::Outcome;
use super::worker::{Job, work};
use crate::api::lending::Lending;
use crate::buffer::stream::Stream;
use crate::contract::{Backend, Call, OperationId, StartCollectives};
use crate::os::ForkMark;
use crate::os::sync::lock;
use crate::types::error::{Error, Result};
use crate::watch::{RecordId, Recorder};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

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

    /// Waits for the collectives of one request that the backend carries out and that were not yet seen complete.
    pub(super) fn finish(&self, outcome: &Arc<Outcome>) {
        loop {
            let mut list = lock(&self.moving.started);
            let Some(index) = list.iter().position(|started| Arc::ptr_eq(&started.outcome, outcome)) else {
                return;
            };
            let started = list.remove(index);
            drop(list);
            self.moving.complete(&*self.backend, &started);
        }
    }

    /// Starts the collectives of a request. On an error, none is started.
    pub(super) fn start(
        &self,
        calls: &[Call<'static>],
        stream: &Stream,
        deadline: Option<Duration>,
    ) -> Result<Arc<Outcome>> {
        let outcome = Outcome::of(calls.len());
        match self.backend.start_collectives() {
            Some(collectives) => {
                self.start_mover()?;
                calls.iter().for_each(|call| self.start_there(collectives, call, deadline, &outcome));
            }
            None => {
                let mut worker = lock(&self.worker);
                let worker = self.worker(&mut worker)?;
                for call in calls {
                    self.moving.under_way.fetch_add(1, Ordering::AcqRel);
                    let record = self.moving.recorder.enqueue(call);
                    let (stream, outcome) = (stream.clone(), outcome.clone());
                    let job = Job { record, call: *call, stream, deadline, outcome };
                    worker.send(job).expect("the worker lives as long as its sender");
                }
            }
        }
        Ok(outcome)
    }

    fn start_there(
        &self,
        collectives: &dyn StartCollectives,
        call: &Call<'static>,
        deadline: Option<Duration>,
        outcome: &Arc<Outcome>,
    ) {
        let record = self.moving.recorder.begin(call);
        let lending = Lending::begin(&*self.backend);
        // SAFETY: the call was checked; its buffers are the request's, which keeps them until the outcome is there. One
        // thread has the communicator, and no plain collective is under way.
        let started = unsafe { collectives.start(call) };
        lending.end();
        match started {
            Ok(operation) => {
                self.moving.under_way.fetch_add(1, Ordering::AcqRel);
                let started = Started { operation, deadline, record, outcome: outcome.clone() };
                self.moving.request_started();
                lock(&self.moving.started).push(started);
            }
            // Reported by the request's wait, like any other error of a request.
            Err(error) => outcome.put(self.moving.recorder.end(record, Err(error))),
        }
    }

    /// The thread that carries out collectives, which it starts at the first.
    fn worker<'w>(&self, worker: &'w mut Option<(Sender<Job>, JoinHandle<()>)>) -> Result<&'w Sender<Job>> {
        if worker.is_none() {
            let (sender, receiver) = channel();
            let (backend, moving) = (self.backend.clone(), self.moving.clone());
            let name = format!("phalanx-{}", self.backend.rank());
            *worker = Some((sender, self.start_thread(name, move || work(&*backend, &moving, &receiver))?));
        }
        Ok(&worker.as_ref().expect("it was started").0)
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
