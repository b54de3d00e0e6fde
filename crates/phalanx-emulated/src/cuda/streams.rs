//! The tables of streams: those with handles, and the default streams of threads.

use super::queue::{Kind, Stream, Streams};
use crate::base::handles::{Handle, Handles};
use crate::base::lock::lock;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::ThreadId;

/// The streams that callers created.
pub static STREAMS: Handles<Stream> = Handles::new("stream");

/// The default stream of each thread in each context.
type PerThread = HashMap<(ThreadId, Handle), Arc<Stream>>;

fn per_thread_streams() -> &'static Mutex<PerThread> {
    static STREAMS: OnceLock<Mutex<PerThread>> = OnceLock::new();
    STREAMS.get_or_init(Mutex::default)
}

/// The default stream of this thread in a context.
pub fn per_thread(context: Handle, siblings: &Arc<Streams>) -> Arc<Stream> {
    let key = (std::thread::current().id(), context);
    let mut streams = lock(per_thread_streams());
    Arc::clone(streams.entry(key).or_insert_with(|| Stream::start(siblings, Kind::Blocking, 0)))
}

/// Every stream that has a handle or belongs to a thread.
pub fn all() -> Vec<Arc<Stream>> {
    let mut all = STREAMS.live();
    all.extend(lock(per_thread_streams()).values().cloned());
    all
}

/// Ends a stream with its context.
pub fn forget(function: &str, stream: &Arc<Stream>) {
    if STREAMS.find(stream.handle).is_some() {
        STREAMS.end(function, stream.handle, "the end of its context");
    }
    lock(per_thread_streams()).retain(|_, other| other.handle != stream.handle);
    stream.close();
}
