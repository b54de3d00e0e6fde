//! Work that a stream performs, once or at each launch of a graph.

use std::sync::Arc;

/// Something that a stream performs. A graph performs it again at each launch.
pub trait Work: Send + Sync {
    /// Prepares one performance. Called where the work is enqueued, in the caller's order.
    fn bind(self: Arc<Self>) -> Job;

    /// Whether pieces of such work in a graph keep the order of capture, also without an edge between them.
    fn keeps_order(&self) -> bool {
        false
    }
}

/// One performance of work.
pub type Job = Box<dyn FnOnce() + Send>;

/// Work that calls a function at each performance.
pub struct Plain<F>(pub F);

impl<F: Fn() + Send + Sync + 'static> Work for Plain<F> {
    fn bind(self: Arc<Self>) -> Job {
        Box::new(move || (self.0)())
    }
}
