//! Operations that go on while the rank does something else: [`Request`].
//!
//! A request owns its buffers and gives them back from [`wait`](Request::wait), so that nothing can touch
//! them in between; one that is forgotten leaks them.
//!
//! Collectives are carried out in the order in which they were started, and before any collective that is called later: by
//! the backend, if it has such operations, else by a thread of the communicator. Messages are posted at once. What a backend
//! carries out is moved along by every wait, and by a thread.

use super::comm::Comm;
use crate::buffer::stream::Stream;
use crate::buffer::{Owned, Source, Target};
use crate::contract::{Backend, Call, Direction, Operation, OperationId, StartCollectives, Transfer};
use crate::os::ForkMark;
use crate::os::sync::lock;
use crate::types::dtype::Element;
use crate::types::error::{Error, Result};
use crate::types::op::Reduction;
use crate::watch::deadline::Limited;
use crate::watch::{Posted, RecordId, Recorder};
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// An operation under way, and the buffers it uses.
#[must_use = "a request that is dropped before it is complete leaks its buffers"]
pub struct Request<B> {
    buffers: ManuallyDrop<B>,
    /// Of a v-variant, for as long as the buffers.
    counts: ManuallyDrop<Counts>,
    work: Work,
    deadline: Option<Duration>,
    requests: Arc<Requests>,
}

/// Lists of counts that a started operation reads: of what is sent, and where that differs, of what is received.
type Counts = [Vec<usize>; 2];

enum Work {
    Collective(Arc<Outcome>),
    Messages(Messages),
    /// The result was taken.
    Over,
}

/// A message, or two that began together.
struct Messages {
    /// Those that have not ended, as far as anybody has asked.
    under_way: [Option<Posted>; 2],
    /// How the others fared.
    outcome: Result<()>,
}

impl<B> Request<B> {
    /// Waits until the operation is complete, and gives the buffers back. The wait has the deadline of the communicator, or
    /// view, that it was started with. On an error the buffers are dropped.
    pub fn wait(mut self) -> Result<B> {
        let result = match std::mem::replace(&mut self.work, Work::Over) {
            // Nobody carries it out in this process, and a lock may be held half-way.
            _ if self.requests.fork.is_copy() => Err(Error::forked()),
            Work::Collective(outcome) => {
                self.requests.finish(&outcome);
                outcome.take()
            }
            Work::Messages(messages) => {
                let _limited = Limited::to(self.deadline);
                self.requests.wait_for_messages(messages)
            }
            Work::Over => unreachable!("wait takes the request"),
        };
        // SAFETY: taken once; `work` is over, so that drop leaves the buffers alone. The operation is
        // complete, or has failed and touches them no more.
        let buffers = unsafe {
            ManuallyDrop::drop(&mut self.counts);
            ManuallyDrop::take(&mut self.buffers)
        };
        result.map(|()| buffers)
    }

    /// Whether [`wait`](Request::wait) would answer at once.
    pub fn is_done(&mut self) -> bool {
        match &mut self.work {
            _ if self.requests.fork.is_copy() => true,
            Work::Collective(outcome) => {
                self.requests.moving.settle(&*self.requests.backend);
                outcome.is_there()
            }
            Work::Messages(messages) => {
                for message in &mut messages.under_way {
                    let Some(posted) = *message else { continue };
                    match self.requests.backend.test(posted.ticket) {
                        Ok(false) => {}
                        result => {
                            *message = None;
                            let ended = self.requests.moving.request_ended(posted.record, result.map(drop));
                            if messages.outcome.is_ok() {
                                messages.outcome = ended;
                            }
                        }
                    }
                }
                messages.under_way.iter().all(Option::is_none)
            }
            Work::Over => true,
        }
    }
}

impl<B> Drop for Request<B> {
    fn drop(&mut self) {
        if matches!(self.work, Work::Over) {
            return;
        }
        if self.is_done() {
            // SAFETY: not taken, since `work` was not over; the operation touches them no more.
            unsafe {
                ManuallyDrop::drop(&mut self.counts);
                ManuallyDrop::drop(&mut self.buffers);
            }
        } else {
            tracing::warn!("a request was dropped before it was complete: its buffers are leaked");
            if let Work::Messages(Messages { under_way, .. }) = &self.work {
                lock(&self.requests.moving.dropped).extend(under_way.iter().flatten());
            }
        }
    }
}

impl<B> std::fmt::Debug for Request<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Request").finish_non_exhaustive()
    }
}

/// The result of a job, when it is there.
#[derive(Default)]
struct Outcome {
    result: Mutex<Option<Result<()>>>,
    there: Condvar,
}

impl Outcome {
    fn put(&self, result: Result<()>) {
        *lock(&self.result) = Some(result);
        self.there.notify_all();
    }

    fn take(&self) -> Result<()> {
        let mut result = lock(&self.result);
        loop {
            match result.take() {
                Some(result) => return result,
                None => result = self.there.wait(result).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    fn is_there(&self) -> bool {
        lock(&self.result).is_some()
    }
}

/// A started collective, for a thread.
struct Job {
    call: Call<'static>,
    lane: Stream,
    deadline: Option<Duration>,
    record: RecordId,
    outcome: Arc<Outcome>,
}

// SAFETY: the buffers and counts that the call points to are owned by the request, which gives them back (or frees
// them) only when the outcome is there.
unsafe impl Send for Job {}

/// A started collective that the backend carries out.
struct Started {
    ticket: OperationId,
    deadline: Option<Duration>,
    record: RecordId,
    outcome: Arc<Outcome>,
}

/// The requests of one communicator.
pub(crate) struct Requests {
    backend: Arc<dyn Backend>,
    worker: Mutex<Option<(Sender<Job>, JoinHandle<()>)>>,
    moving: Arc<Moving>,
    mover: Mutex<Option<JoinHandle<()>>>,
    fork: ForkMark,
}

/// What the communicator's threads look at, too.
struct Moving {
    state: Mutex<MovingState>,
    changed: Condvar,
    /// In the order of their start. A collective whose request was dropped is settled as all others are.
    started: Mutex<Vec<Started>>,
    /// Messages whose request was dropped: they move on, and nobody else asks for their end.
    dropped: Mutex<Vec<Posted>>,
    recorder: Arc<Recorder>,
    /// Collectives started and not complete.
    under_way: AtomicUsize,
}

#[derive(Default)]
struct MovingState {
    /// Messages and collectives.
    requests: usize,
    stop: bool,
}

impl Moving {
    fn request_started(&self) {
        lock(&self.state).requests += 1;
        self.changed.notify_all();
    }

    fn request_ended(&self, record: RecordId, result: Result<()>) -> Result<()> {
        self.forget();
        self.recorder.end(record, result)
    }

    fn forget(&self) {
        lock(&self.state).requests -= 1;
    }

    fn collective_ended(&self, started: &Started, result: Result<()>) {
        started.outcome.put(self.request_ended(started.record, result));
        self.under_way.fetch_sub(1, Ordering::AcqRel);
    }

    /// Sees which collectives of the backend are complete.
    fn settle(&self, backend: &dyn Backend) {
        let Some(collectives) = backend.start_collectives() else { return };
        lock(&self.started).retain(|started| match collectives.test(started.ticket) {
            Ok(false) => true,
            result => {
                self.collective_ended(started, result.map(drop));
                false
            }
        });
    }

    /// Sees which messages without a request are complete.
    fn settle_dropped(&self, backend: &dyn Backend) {
        lock(&self.dropped).retain(|posted| match backend.test(posted.ticket) {
            Ok(false) => true,
            result => {
                // Nobody asks for it.
                let _ = self.request_ended(posted.record, result.map(drop));
                false
            }
        });
    }

    /// Waits for a collective of the backend that was taken out of the list.
    fn complete(&self, backend: &dyn Backend, started: &Started) {
        let collectives = backend.start_collectives().expect("it was started there");
        let _limited = Limited::to(started.deadline);
        self.collective_ended(started, collectives.wait(started.ticket));
    }
}

impl Requests {
    pub fn new(backend: Arc<dyn Backend>, recorder: Arc<Recorder>) -> Requests {
        let moving = Moving {
            state: Mutex::default(),
            changed: Condvar::new(),
            started: Mutex::default(),
            dropped: Mutex::default(),
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

    /// Comes before a message: where operations are carried out in the order of the calls, what was started comes first, and its
    /// thread would take the message with it.
    #[inline]
    pub fn make_way_for_message(&self) {
        if self.moving.under_way.load(Ordering::Acquire) != 0 && self.backend.is_stream_ordered() {
            self.finish_all();
        }
    }

    #[cold]
    fn finish_all(&self) {
        if self.fork.is_copy() {
            // Nobody carries them out in this process; the backend refuses what comes next.
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
        // The others have a thread, or somebody waits for them.
        while self.moving.under_way.load(Ordering::Acquire) != 0 {
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    /// Waits for one collective, if the backend carries it out and nobody has seen it complete.
    fn finish(&self, outcome: &Arc<Outcome>) {
        let mut list = lock(&self.moving.started);
        if let Some(index) = list.iter().position(|started| Arc::ptr_eq(&started.outcome, outcome)) {
            let started = list.remove(index);
            drop(list);
            self.moving.complete(&*self.backend, &started);
        }
    }

    fn start(&self, call: Call<'static>, lane: &Stream, deadline: Option<Duration>) -> Result<Arc<Outcome>> {
        match self.backend.start_collectives() {
            Some(collectives) => self.start_there(collectives, &call, deadline),
            None => self.give_to_thread(call, lane.clone(), deadline),
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
            Ok(ticket) => {
                self.moving.under_way.fetch_add(1, Ordering::AcqRel);
                let started = Started { ticket, deadline, record, outcome: outcome.clone() };
                self.moving.request_started();
                lock(&self.moving.started).push(started);
            }
            // As any other error of a request, its wait's to tell.
            Err(error) => outcome.put(self.moving.recorder.end(record, Err(error))),
        }
        Ok(outcome)
    }

    fn give_to_thread(
        &self,
        call: Call<'static>,
        lane: Stream,
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
                let handle = start_thread(name, move || work(&*backend, &moving, &receiver))?;
                &worker.insert((sender, handle)).0
            }
        };
        self.moving.under_way.fetch_add(1, Ordering::AcqRel);
        let record = self.moving.recorder.enqueue(&call);
        let job = Job { record, call, lane, deadline, outcome: outcome.clone() };
        sender.send(job).expect("the worker lives as long as its sender");
        Ok(outcome)
    }

    /// Has what was posted without a request moved along, too, until [`end_moving`](Self::end_moving).
    pub fn begin_moving(&self) {
        self.moving.request_started();
    }

    pub fn end_moving(&self) {
        self.moving.forget();
    }

    /// Makes sure that there is a thread that moves requests along.
    pub fn start_mover(&self) -> Result<()> {
        let mut mover = lock(&self.mover);
        if mover.is_none() {
            let (backend, moving) = (self.backend.clone(), self.moving.clone());
            let name = format!("phalanx-m{}", self.backend.rank());
            *mover = Some(start_thread(name, move || move_requests(&*backend, &moving))?);
        }
        Ok(())
    }

    /// All of them, also if some fail; answers the first error.
    fn wait_for_messages(&self, Messages { under_way, outcome }: Messages) -> Result<()> {
        under_way.into_iter().flatten().fold(outcome, |outcome, posted| {
            let waited = self.backend.wait(posted.ticket, &|| ());
            outcome.and(self.moving.request_ended(posted.record, waited))
        })
    }

    /// Whether this process is a copy, made by fork, of the one that has the communicator.
    pub fn is_copy(&self) -> bool {
        self.fork.is_copy()
    }

    /// Ends the threads, after the collectives that were started.
    pub fn stop(&self) {
        if self.fork.is_copy() {
            // They are the other process's.
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
    }
}

/// Leaves what a thread that does not exist in this process may hold half-way.
fn forget<T>(threads: &Mutex<Option<T>>) {
    if let Ok(mut threads) = threads.try_lock() {
        std::mem::forget(threads.take());
    }
}

fn start_thread(name: String, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name).spawn(body).map_err(|e| {
        let remedy = "a request needs a thread: raise `ulimit -u`, or use the operation without `start_`";
        Error::system("starting a thread", e, remedy)
    })
}

fn work(backend: &dyn Backend, moving: &Moving, jobs: &Receiver<Job>) {
    while let Ok(job) = jobs.recv() {
        moving.recorder.start(job.record);
        let limited = Limited::to(job.deadline);
        // SAFETY: the call was checked when it was started; its buffers are the request's; the communicator
        // makes no collective call while jobs are under way, and this thread makes one at a time.
        let result =
            catch_unwind(AssertUnwindSafe(|| unsafe { backend.collective(&job.call.configured(&job.lane)) }));
        let result = result.unwrap_or_else(|_| {
            // Nobody can tell how far it has come. The panic's text has been written.
            backend.abort();
            Err(Error::Aborted { rank: backend.rank() })
        });
        drop(limited);
        job.outcome.put(moving.recorder.end(job.record, result));
        moving.under_way.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Pauses of the thread that moves requests along.
const SHORTEST_PAUSE: Duration = Duration::from_micros(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// Moves requests along while their rank does something else: often while they move, else ever more rarely, so that it
/// does not take a core from the rank.
fn move_requests(backend: &dyn Backend, moving: &Moving) {
    let mut pause = SHORTEST_PAUSE;
    let mut last = (0, None);
    let mut state = lock(&moving.state);
    loop {
        if state.stop {
            return;
        }
        if state.requests == 0 {
            state = moving.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        }
        let requests = state.requests;
        drop(state);
        pause = match backend.progress() {
            Ok(true) => {
                let seen = (requests, backend.moved());
                let is_still = seen == last && seen.1.is_some();
                last = seen;
                if is_still { (2 * pause).min(LONGEST_PAUSE) } else { SHORTEST_PAUSE }
            }
            // Nothing under way, or failed: the requests' waits will tell.
            Ok(false) | Err(_) => LONGEST_PAUSE,
        };
        moving.settle(backend);
        moving.settle_dropped(backend);
        std::thread::sleep(pause);
        state = lock(&moving.state);
    }
}

/// # Requests
///
/// Operations that go on while the rank does something else. They take their buffers and give them back
/// from [`Request::wait`]. Lists of counts they take, too, and keep (`MPI_Iallgatherv` and its like read them until the operation is over): a
/// `Vec` as it is, of a slice or an array a copy.
///
/// Started and plain collectives are one sequence: the order of the calls is what the ranks match, and it
/// does not matter which form a rank uses. (On MPI it matters for the first one that is started on a communicator: it is
/// started on all ranks.) Messages are matched in the order of posting.
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// # use phalanx::ReduceOp;
/// phalanx::run(2, |comm| -> phalanx::Result<()> {
///     let gradients = vec![1.0f32; 1000];
///     let request = comm.start_all_reduce(gradients, ReduceOp::Sum)?;
///     // … compute something else meanwhile …
///     let gradients = request.wait()?;
///     assert!(gradients.iter().all(|g| *g == 2.0));
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
impl Comm {
    fn request<B>(&self, buffers: B, counts: Counts, call: Call<'static>) -> Result<Request<B>> {
        let (deadline, requests) = (self.deadline, self.requests.clone());
        let work = Work::Collective(requests.start(call, &self.lane, deadline)?);
        let (buffers, counts) = (ManuallyDrop::new(buffers), ManuallyDrop::new(counts));
        Ok(Request { buffers, counts, work, deadline, requests })
    }

    fn request_in_place<B: Owned>(&self, mut buf: B, call: Call<'static>) -> Result<Request<B>> {
        let call = call.inside::<B::Elem>(&buf.lend_mut(&self.lane)?, &self.lane, self.rank());
        self.request(buf, Counts::default(), call)
    }

    fn request_out_of_place<S, R>(&self, send: S, mut recv: R, call: Call<'static>) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        let call = call.between::<S::Elem>(&send.lend(&self.lane)?, &recv.lend_mut(&self.lane)?, &self.lane);
        self.request((send, recv), Counts::default(), call)
    }

    /// Of a v-variant: `check` has the lengths of both buffers and the counts.
    fn request_of_blocks<S, R>(
        &self,
        send: S,
        mut recv: R,
        counts: Counts,
        check: impl for<'a> FnOnce([usize; 2], &'a Counts) -> Result<Call<'a>>,
    ) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        let call = check([send.len(), recv.len()], &counts)?;
        let call = call.between::<S::Elem>(&send.lend(&self.lane)?, &recv.lend_mut(&self.lane)?, &self.lane);
        // SAFETY: the request owns the counts as it does the buffers: until the operation is over, and for ever if it is forgotten.
        // They are on the heap, and stay at their address when it is moved.
        let call = unsafe { std::mem::transmute::<Call<'_>, Call<'static>>(call) };
        self.request((send, recv), counts, call)
    }

    /// Starts an [`all_reduce_in_place`](Comm::all_reduce_in_place).
    pub fn start_all_reduce<B: Owned>(
        &self,
        buf: B,
        op: impl Into<Reduction<B::Elem>>,
    ) -> Result<Request<B>> {
        let call = self.shape().whole(Operation::AllReduce, buf.len()).reducing(op);
        self.request_in_place(buf, call)
    }

    /// Starts a [`broadcast_in_place`](Comm::broadcast_in_place).
    pub fn start_broadcast<B: Owned>(&self, buf: B, root: usize) -> Result<Request<B>> {
        let call = self.shape().whole_in_place(Operation::Broadcast, buf.len(), root)?;
        self.request_in_place(buf, call)
    }

    /// Starts a [`reduce_in_place`](Comm::reduce_in_place).
    pub fn start_reduce<B: Owned>(
        &self,
        buf: B,
        op: impl Into<Reduction<B::Elem>>,
        root: usize,
    ) -> Result<Request<B>> {
        let call = self.shape().whole_in_place(Operation::Reduce, buf.len(), root)?;
        self.request_in_place(buf, call.reducing(op))
    }

    /// Starts an [`all_gather`](Comm::all_gather).
    pub fn start_all_gather<S, R>(&self, send: S, recv: R) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        let call = self.shape().all_gather(send.len(), recv.len())?;
        self.request_out_of_place(send, recv, call)
    }

    /// Starts an [`all_gather_v`](Comm::all_gather_v).
    pub fn start_all_gather_v<S, R>(
        &self,
        send: S,
        recv: R,
        counts: impl Into<Vec<usize>>,
    ) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        let (shape, counts) = (self.shape(), [counts.into(), Vec::new()]);
        self.request_of_blocks(send, recv, counts, |[send, recv], [counts, _]| {
            shape.all_gather_v(send, recv, counts)
        })
    }

    /// Starts a [`reduce_scatter`](Comm::reduce_scatter).
    pub fn start_reduce_scatter<S, R>(
        &self,
        send: S,
        recv: R,
        op: impl Into<Reduction<S::Elem>>,
    ) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        let call = self.shape().reduce_scatter(send.len(), recv.len())?;
        self.request_out_of_place(send, recv, call.reducing(op))
    }

    /// Starts a [`reduce_scatter_v`](Comm::reduce_scatter_v).
    pub fn start_reduce_scatter_v<S, R>(
        &self,
        send: S,
        recv: R,
        counts: impl Into<Vec<usize>>,
        op: impl Into<Reduction<S::Elem>>,
    ) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        let (shape, counts) = (self.shape(), [counts.into(), Vec::new()]);
        self.request_of_blocks(send, recv, counts, |[send, recv], [counts, _]| {
            Ok(shape.reduce_scatter_v(send, recv, counts)?.reducing(op))
        })
    }

    /// Starts an [`all_to_all`](Comm::all_to_all).
    pub fn start_all_to_all<S, R>(&self, send: S, recv: R) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        let call = self.shape().all_to_all(send.len(), recv.len())?;
        self.request_out_of_place(send, recv, call)
    }

    /// Starts an [`all_to_all_v`](Comm::all_to_all_v).
    pub fn start_all_to_all_v<S, R>(
        &self,
        send: S,
        send_counts: impl Into<Vec<usize>>,
        recv: R,
        recv_counts: impl Into<Vec<usize>>,
    ) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        let (shape, counts) = (self.shape(), [send_counts.into(), recv_counts.into()]);
        self.request_of_blocks(send, recv, counts, |[send, recv], [sent, received]| {
            shape.all_to_all_v(send, sent, recv, received)
        })
    }

    /// Starts a [`gather`](Comm::gather).
    pub fn start_gather<S, R>(&self, send: S, recv: R, root: usize) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        let call = self.shape().gather(send.len(), recv.len(), root)?;
        self.request_out_of_place(send, recv, call)
    }

    /// Starts a [`gather_v`](Comm::gather_v).
    pub fn start_gather_v<S, R>(
        &self,
        send: S,
        recv: R,
        counts: impl Into<Vec<usize>>,
        root: usize,
    ) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        let (shape, counts) = (self.shape(), [counts.into(), Vec::new()]);
        self.request_of_blocks(send, recv, counts, |[send, recv], [counts, _]| {
            shape.gather_v(send, recv, counts, root)
        })
    }

    /// Starts a [`scatter`](Comm::scatter).
    pub fn start_scatter<S, R>(&self, send: S, recv: R, root: usize) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        let call = self.shape().scatter(send.len(), recv.len(), root)?;
        self.request_out_of_place(send, recv, call)
    }

    /// Starts a [`scatter_v`](Comm::scatter_v).
    pub fn start_scatter_v<S, R>(
        &self,
        send: S,
        counts: impl Into<Vec<usize>>,
        recv: R,
        root: usize,
    ) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        let (shape, counts) = (self.shape(), [counts.into(), Vec::new()]);
        self.request_of_blocks(send, recv, counts, |[send, recv], [counts, _]| {
            shape.scatter_v(send, recv, counts, root)
        })
    }

    /// Starts a [`barrier`](Comm::barrier): its [`wait`](Request::wait) returns when every rank has started its own, or called one.
    pub fn start_barrier(&self) -> Result<Request<()>> {
        self.request((), Counts::default(), Call::empty(Operation::Barrier))
    }

    fn message<B: Source>(
        &self,
        operation: &'static str,
        buffer: B,
        direction: Direction,
        peer: usize,
        tag: u32,
    ) -> Result<Request<B>> {
        self.shape().check_rank(operation, "peer", peer)?;
        self.requests.start_mover()?;
        let (dtype, count) = (<B::Elem as Element>::DTYPE, buffer.len());
        // SAFETY: the request owns the buffer and keeps it until the ticket is settled.
        let posted = unsafe { self.post(Transfer::host(direction, peer, tag, dtype, count)) };
        self.request_for(buffer, [Some(posted), None])
    }

    /// For messages that were posted, or could not be. If one is under way, what became of the other is the wait's to tell.
    fn request_for<B>(&self, buffers: B, posted: [Option<Result<Posted>>; 2]) -> Result<Request<B>> {
        let mut outcome = Ok(());
        let under_way = posted.map(|posted| {
            let posted = posted?.inspect(|_| self.requests.moving.request_started());
            posted.map_err(|error| outcome = Err(error)).ok()
        });
        if under_way.iter().all(Option::is_none) {
            outcome.clone()?;
        }
        Ok(Request {
            buffers: ManuallyDrop::new(buffers),
            counts: ManuallyDrop::default(),
            work: Work::Messages(Messages { under_way, outcome }),
            deadline: self.deadline,
            requests: self.requests.clone(),
        })
    }

    /// Starts a [`send`](Comm::send).
    pub fn start_send<B: Owned>(&self, buf: B, peer: usize) -> Result<Request<B>> {
        self.start_send_tagged(buf, peer, 0)
    }

    /// Starts a [`recv`](Comm::recv).
    pub fn start_recv<B: Owned>(&self, buf: B, peer: usize) -> Result<Request<B>> {
        self.start_recv_tagged(buf, peer, 0)
    }

    /// Starts a [`send_tagged`](Comm::send_tagged).
    pub fn start_send_tagged<B: Owned>(&self, buf: B, peer: usize, tag: u32) -> Result<Request<B>> {
        let direction = Direction::Send(buf.lend(&self.lane)?.span().start);
        self.message("start_send", buf, direction, peer, tag)
    }

    /// Starts a [`recv_tagged`](Comm::recv_tagged).
    pub fn start_recv_tagged<B: Owned>(&self, mut buf: B, peer: usize, tag: u32) -> Result<Request<B>> {
        let direction = Direction::Recv(buf.lend_mut(&self.lane)?.span().start);
        self.message("start_recv", buf, direction, peer, tag)
    }

    /// Starts a [`send_recv`](Comm::send_recv): both messages at once, each as long as its own buffer.
    pub fn start_send_recv<S, R>(
        &self,
        send: S,
        dest: usize,
        recv: R,
        source: usize,
    ) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        self.start_send_recv_tagged(send, dest, recv, source, 0)
    }

    /// Starts a [`send_recv_tagged`](Comm::send_recv_tagged).
    pub fn start_send_recv_tagged<S, R>(
        &self,
        send: S,
        dest: usize,
        mut recv: R,
        source: usize,
        tag: u32,
    ) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        self.shape().check_rank("start_send_recv", "destination", dest)?;
        self.shape().check_rank("start_send_recv", "source", source)?;
        self.requests.start_mover()?;
        let (dtype, sent, expected) = (S::Elem::DTYPE, send.len(), recv.len());
        let from = Direction::Send(send.lend(&self.lane)?.span().start);
        let to = Direction::Recv(recv.lend_mut(&self.lane)?.span().start);
        let receive = Transfer::host(to, source, tag, dtype, expected);
        let send_it = Transfer::host(from, dest, tag, dtype, sent);
        // SAFETY: the request owns the buffers and keeps them until both tickets are settled.
        let posted = unsafe { self.post_both([receive, send_it]) };
        self.request_for((send, recv), posted.map(Some))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ReduceOp;
    use crate::backend::solo::SoloComm;
    use crate::contract::{BackendKind, Departure};
    use crate::types::memory::Allocation;

    /// Its collectives panic until it is aborted.
    struct Panicking(SoloComm);

    impl Backend for Panicking {
        fn kind(&self) -> BackendKind {
            self.0.kind()
        }
        fn rank(&self) -> usize {
            self.0.rank()
        }
        fn world_size(&self) -> usize {
            self.0.world_size()
        }
        unsafe fn collective(&self, call: &Call<'_>) -> Result<()> {
            // SAFETY: the caller's contract.
            unsafe { self.0.collective(call) }?;
            panic!("a collective was told to panic");
        }
        unsafe fn post(&self, transfer: Transfer) -> Result<OperationId> {
            // SAFETY: the caller's contract.
            unsafe { self.0.post(transfer) }
        }
        fn wait(&self, ticket: OperationId, meanwhile: &dyn Fn()) -> Result<()> {
            self.0.wait(ticket, meanwhile)
        }
        fn test(&self, ticket: OperationId) -> Result<bool> {
            self.0.test(ticket)
        }
        fn progress(&self) -> Result<bool> {
            self.0.progress()
        }
        unsafe fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Box<dyn Backend>>> {
            // SAFETY: the caller's contract.
            unsafe { self.0.split(color, key) }
        }
        fn alloc(&self, bytes: usize) -> Result<Allocation> {
            self.0.alloc(bytes)
        }
        fn timeout(&self) -> Duration {
            self.0.timeout()
        }
        fn set_timeout(&self, timeout: Duration) {
            self.0.set_timeout(timeout);
        }
        fn abort(&self) {
            self.0.abort();
        }
        fn depart(&self, departure: Departure) {
            self.0.depart(departure);
        }
    }

    #[test]
    fn a_request_that_was_dropped_ends() {
        let of_threads = Comm::builder().backend(BackendKind::Host).run(2, |comm| {
            if comm.rank() == 1 {
                comm.barrier()?;
                comm.send(&[7u8], 0)?;
                return comm.send_recv(&[7u8; 100_000], 0, &mut [0u8; 50_000], 0);
            }
            drop(comm.start_recv(vec![0u8], 1)?);
            drop(comm.start_send_recv(vec![7u8; 50_000], 1, vec![0u8; 100_000], 1)?);
            assert_eq!(lock(&comm.requests.moving.state).requests, 3);
            comm.barrier()?;
            let since = std::time::Instant::now();
            while lock(&comm.requests.moving.state).requests != 0 {
                assert!(since.elapsed() < Duration::from_secs(60), "it is moved along for ever");
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        });
        for outcome in of_threads.unwrap() {
            outcome.unwrap();
        }
    }

    #[test]
    fn a_panic_in_a_started_collective_is_an_error_of_all_that_were_started() {
        let (sender, receiver) = channel();
        std::thread::spawn(move || {
            let backend = Panicking(SoloComm::new(Duration::from_secs(1)));
            let comm = Comm::new(Arc::new(backend), "panicking".to_owned());
            let requests: Vec<_> =
                (0..3).map(|_| comm.start_all_reduce(vec![1u8], ReduceOp::Sum).unwrap()).collect();
            let results: Vec<_> = requests.into_iter().map(Request::wait).collect();
            comm.sync().unwrap();
            sender.send(results).unwrap();
        });
        let results = receiver.recv_timeout(Duration::from_secs(10)).expect("nobody waits for ever");
        for result in results {
            assert!(matches!(result, Err(Error::Aborted { rank: 0 })), "{result:?}");
        }
    }
}
