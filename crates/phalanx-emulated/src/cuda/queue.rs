//! A stream: a queue of jobs, and a thread that performs them late.

use super::capture::Member;
use super::work::Job;
use crate::base::call::check_fork;
use crate::base::handles::{self, Handle};
use crate::base::lock::lock;
use crate::base::random::Random;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, RwLock, Weak};

/// Work that a stream takes before whoever enqueues more has to wait, as of a driver (measured: 1,020 on an H200).
const FULL: usize = 1020;

/// Which other streams a stream is ordered with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The default stream: ordered with all blocking streams of its context.
    Legacy,
    /// Ordered with the default stream.
    Blocking,
    /// Ordered with no other stream.
    NonBlocking,
}

/// A stream.
pub struct Stream {
    /// The handle that callers have; of default streams they have none.
    pub handle: Handle,
    pub context: Handle,
    pub device: usize,
    pub kind: Kind,
    pub priority: i32,
    /// The stream's part in a capture, if it takes part in one.
    pub member: Mutex<Option<Member>>,
    siblings: Arc<Streams>,
    queue: Mutex<Queue>,
    changed: Condvar,
    random: Random,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    submitted: u64,
    completed: u64,
    closed: bool,
    /// Threads that wait for room.
    held_up: usize,
}

struct Task {
    after: Vec<Mark>,
    job: Job,
}

/// A point in a stream's work.
#[derive(Clone)]
pub struct Mark {
    stream: Arc<Stream>,
    position: u64,
}

impl Stream {
    /// Starts a stream and its thread.
    pub fn start(siblings: &Arc<Streams>, kind: Kind, priority: i32) -> Arc<Stream> {
        let handle = handles::fresh();
        let stream = Arc::new(Stream {
            handle,
            context: siblings.context,
            device: siblings.device,
            kind,
            priority,
            member: Mutex::default(),
            siblings: Arc::clone(siblings),
            queue: Mutex::default(),
            changed: Condvar::new(),
            random: Random::new(handle),
        });
        let worker = Arc::clone(&stream);
        std::thread::Builder::new()
            .name(format!("stream {handle:x}"))
            .spawn(move || worker.work())
            .expect("a thread for a stream");
        siblings.add(&stream);
        stream
    }

    /// Enqueues a job: after everything that is in this stream, and after `after`. Waits while the stream is full. As measured on an H200 with
    /// CUDA 13.0: if it is the default stream, no other stream of the context takes work meanwhile. Whoever asks whether it is idle waits
    /// ([`wait_for_room`](Self::wait_for_room)), and so do calls that allocate.
    pub fn submit(self: &Arc<Stream>, mut after: Vec<Mark>, job: Job) -> Mark {
        check_fork("a stream");
        let gate = &self.siblings.gate;
        let closed = match self.kind {
            Kind::Legacy => Some(gate.write().unwrap_or_else(PoisonError::into_inner)),
            Kind::Blocking | Kind::NonBlocking => {
                drop(gate.read().unwrap_or_else(PoisonError::into_inner));
                None
            }
        };
        match self.kind {
            Kind::Legacy => after.extend(self.siblings.blocking().map(|stream| stream.mark())),
            Kind::Blocking => after.push(self.siblings.legacy().mark()),
            Kind::NonBlocking => {}
        }
        let is_full = |queue: &mut Queue| queue.tasks.len() >= FULL;
        let mut queue = lock(&self.queue);
        queue.held_up += 1;
        queue = self.changed.wait_while(queue, is_full).unwrap_or_else(PoisonError::into_inner);
        queue.held_up -= 1;
        queue.tasks.push_back(Task { after, job });
        queue.submitted += 1;
        self.changed.notify_all();
        drop(closed);
        Mark { stream: Arc::clone(self), position: queue.submitted }
    }

    /// Waits while a thread waits for room in this stream.
    pub fn wait_for_room(&self) {
        drop(self.changed.wait_while(lock(&self.queue), |queue| queue.held_up > 0));
    }

    /// The point after everything that was enqueued so far.
    pub fn mark(self: &Arc<Stream>) -> Mark {
        Mark { stream: Arc::clone(self), position: lock(&self.queue).submitted }
    }

    /// As [`mark`](Self::mark); of the default stream also the points of the streams that it is ordered with.
    pub fn marks(self: &Arc<Stream>) -> Vec<Mark> {
        let mut marks = vec![self.mark()];
        if self.kind == Kind::Legacy {
            marks.extend(self.siblings.blocking().map(|stream| stream.mark()));
        }
        marks
    }

    /// The blocking streams of the same context.
    pub fn blocking_siblings(&self) -> impl Iterator<Item = Arc<Stream>> {
        self.siblings.blocking()
    }

    /// Lets the thread end once the queue is empty.
    pub fn close(&self) {
        lock(&self.queue).closed = true;
        self.changed.notify_all();
    }

    fn work(&self) {
        while let Some(task) = self.next() {
            task.after.iter().for_each(Mark::wait);
            self.random.delay();
            (task.job)();
            lock(&self.queue).completed += 1;
            self.changed.notify_all();
        }
    }

    fn next(&self) -> Option<Task> {
        let mut queue = lock(&self.queue);
        loop {
            if let Some(task) = queue.tasks.pop_front() {
                self.changed.notify_all();
                return Some(task);
            }
            if queue.closed {
                return None;
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Mark {
    /// Whether everything before the mark is done.
    pub fn reached(&self) -> bool {
        lock(&self.stream.queue).completed >= self.position
    }

    /// Waits until everything before the mark is done.
    pub fn wait(&self) {
        let mut queue = lock(&self.stream.queue);
        while queue.completed < self.position {
            queue = self.stream.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The streams of a context.
pub struct Streams {
    context: Handle,
    device: usize,
    legacy: OnceLock<Arc<Stream>>,
    /// Whoever enqueues to the default stream closes it.
    gate: RwLock<()>,
    /// Not kept alive: a stream that ended and that no caller holds is gone.
    all: Mutex<Vec<Weak<Stream>>>,
}

impl Streams {
    /// Starts the default stream of a context.
    pub fn start(context: Handle, device: usize) -> Arc<Streams> {
        let streams = Arc::new(Streams {
            context,
            device,
            legacy: OnceLock::new(),
            gate: RwLock::default(),
            all: Mutex::default(),
        });
        let legacy = Stream::start(&streams, Kind::Legacy, 0);
        // Set once: the streams were made here.
        let _ = streams.legacy.set(legacy);
        streams
    }

    /// The default stream.
    pub fn legacy(&self) -> &Arc<Stream> {
        self.legacy.get().expect("a context starts with its default stream")
    }

    /// All streams that a caller holds or that still work.
    pub fn all(&self) -> Vec<Arc<Stream>> {
        lock(&self.all).iter().filter_map(Weak::upgrade).collect()
    }

    fn blocking(&self) -> impl Iterator<Item = Arc<Stream>> + use<> {
        self.all().into_iter().filter(|stream| stream.kind == Kind::Blocking)
    }

    fn add(&self, stream: &Arc<Stream>) {
        let mut all = lock(&self.all);
        all.retain(|stream| stream.strong_count() > 0);
        all.push(Arc::downgrade(stream));
    }
}
