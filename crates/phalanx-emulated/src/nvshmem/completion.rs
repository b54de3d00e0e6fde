//! Work on streams, and the operations that quiet completes.

use super::process::{Pe, exit};
use crate::base::handles::Handle;
use crate::base::lock::lock;
use crate::base::violation::violation;
use crate::cuda::queue::Stream;
use crate::cuda::stream;
use crate::cuda::work::Plain;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The stream of a call. A stream of another device is a violation.
pub fn queue(function: &'static str, pe: &Pe, handle: Handle) -> Arc<Stream> {
    let Ok(stream) = stream::find(function, handle) else { violation(function, "the stream does not exist") };
    if stream.context != pe.context.handle {
        violation(function, "the stream belongs to another device");
    }
    stream
}

/// Enqueues work on a stream.
pub fn enqueue(function: &'static str, pe: &Pe, handle: Handle, work: impl Fn() + Send + Sync + 'static) {
    let stream = queue(function, pe, handle);
    if stream.enqueue(Arc::new(Plain(work))).is_err() {
        exit(function, "the stream refuses work");
    }
}

/// The operations on streams that quiet waits for: whether each stream has reached its operation.
pub fn awaited(pe: &Pe) -> Vec<Arc<AtomicBool>> {
    let mut state = lock(&pe.state);
    state.awaited.retain(|reached| !reached.load(Ordering::Acquire));
    state.awaited.clone()
}

/// Performs all pending operations, after the streams of `awaited` have reached theirs. The library's
/// internal streams wait for those streams, and quiet waits for the internal streams.
pub fn complete(pe: &Pe, awaited: &[Arc<AtomicBool>]) {
    while awaited.iter().any(|reached| !reached.load(Ordering::Acquire)) {
        std::thread::sleep(Duration::from_micros(20));
    }
    let pending = std::mem::take(&mut lock(&pe.state).pending);
    pending.into_iter().for_each(|operation| operation());
}
