//! How a stream works: a queue and a thread that is late.

use super::context::Context;
use crate::call::check_fork;
use crate::handles::{self, Handle};
use crate::lock;
use crate::random::Random;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};

/// Something that a stream does; a graph does it again at each launch.
pub trait Work: Send + Sync {
    /// Called where it is enqueued, in the order of the caller: one performance of it.
    fn bind(self: Arc<Self>) -> Job;

    /// Whether its order among other such work of a graph matters even where the graph has no edge.
    fn keeps_order(&self) -> bool {
        false
    }
}

/// One performance of work.
pub type Job = Box<dyn FnOnce() + Send>;

/// Work that is the same every time.
pub struct Plain<F>(pub F);

impl<F: Fn() + Send + Sync + 'static> Work for Plain<F> {
    fn bind(self: Arc<Self>) -> Job {
        Box::new(move || (self.0)())
    }
}

/// Which streams wait for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The default stream: waits for all blocking streams of its context, and they for it.
    Legacy,
    /// Ordered with the default stream.
    Blocking,
    /// Ordered with nothing.
    NonBlocking,
}

/// A stream.
pub struct Stream {
    /// What callers know it by; unknown to them for default streams.
    pub handle: Handle,
    pub context: Arc<Context>,
    pub kind: Kind,
    pub priority: i32,
    pub capture: Mutex<super::capture::Membership>,
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
    /// Starts a stream's thread; the context knows the stream from here on.
    pub fn start(context: &Arc<Context>, kind: Kind, priority: i32) -> Arc<Stream> {
        let handle = handles::fresh();
        let stream = Arc::new(Stream {
            handle,
            context: Arc::clone(context),
            kind,
            priority,
            capture: Mutex::default(),
            queue: Mutex::default(),
            changed: Condvar::new(),
            random: Random::new(handle),
        });
        let worker = Arc::clone(&stream);
        std::thread::Builder::new()
            .name(format!("stream {handle:x}"))
            .spawn(move || worker.work())
            .expect("a thread for a stream");
        context.add(&stream);
        stream
    }

    /// Enqueues one performance of something, after everything before it in this stream and after `after`.
    pub fn submit(self: &Arc<Stream>, mut after: Vec<Mark>, job: Job) -> Mark {
        check_fork("a stream");
        match self.kind {
            Kind::Legacy => after
                .extend(self.context.streams().iter().filter(|s| s.kind == Kind::Blocking).map(Stream::mark)),
            Kind::Blocking => after.push(self.context.legacy().mark()),
            Kind::NonBlocking => {}
        }
        let mut queue = lock(&self.queue);
        queue.tasks.push_back(Task { after, job });
        queue.submitted += 1;
        self.changed.notify_all();
        Mark { stream: Arc::clone(self), position: queue.submitted }
    }

    /// Everything that was enqueued so far.
    pub fn mark(self: &Arc<Stream>) -> Mark {
        Mark { stream: Arc::clone(self), position: lock(&self.queue).submitted }
    }

    /// As [`mark`](Self::mark), for the default stream including what it waits for.
    pub fn marks(self: &Arc<Stream>) -> Vec<Mark> {
        let mut marks = vec![self.mark()];
        if self.kind == Kind::Legacy {
            marks
                .extend(self.context.streams().iter().filter(|s| s.kind == Kind::Blocking).map(Stream::mark));
        }
        marks
    }

    /// Lets the thread end when it has done everything.
    pub fn close(&self) {
        lock(&self.queue).closed = true;
        self.changed.notify_all();
    }

    fn work(&self) {
        while let Some(task) = self.next() {
            task.after.iter().for_each(Mark::wait);
            self.random.dawdle();
            (task.job)();
            lock(&self.queue).completed += 1;
            self.changed.notify_all();
        }
    }

    fn next(&self) -> Option<Task> {
        let mut queue = lock(&self.queue);
        loop {
            if let Some(task) = queue.tasks.pop_front() {
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
    /// Whether everything up to it is done.
    pub fn reached(&self) -> bool {
        lock(&self.stream.queue).completed >= self.position
    }

    /// Waits until everything up to it is done.
    pub fn wait(&self) {
        let mut queue = lock(&self.stream.queue);
        while queue.completed < self.position {
            queue = self.stream.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A list of streams that does not keep them.
#[derive(Default)]
pub struct Streams(Mutex<Vec<Weak<Stream>>>);

impl Streams {
    pub fn add(&self, stream: &Arc<Stream>) {
        let mut streams = lock(&self.0);
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(Arc::downgrade(stream));
    }

    pub fn all(&self) -> Vec<Arc<Stream>> {
        lock(&self.0).iter().filter_map(Weak::upgrade).collect()
    }
}
