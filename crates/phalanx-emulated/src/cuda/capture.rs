//! Captures: work of streams that becomes a graph and is not performed.

use super::error::{CAPTURED_EVENT, STREAM_CAPTURE_INVALIDATED, STREAM_CAPTURE_UNSUPPORTED};
use super::graph::Graph;
use crate::base::call::{Answer, Code};
use crate::base::handles::{self, Handle};
use crate::base::lock::lock;
use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

/// `CU_STREAM_CAPTURE_MODE_GLOBAL`.
pub const GLOBAL: c_int = 0;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`, the last mode.
pub const RELAXED: c_int = 2;

thread_local! {
    /// Which captures make this thread's unsafe calls fail.
    static MODE: Cell<c_int> = const { Cell::new(GLOBAL) };
}

/// A capture, from its begin to its end.
pub struct Capture {
    pub id: u64,
    pub graph: Arc<Graph>,
    /// The stream that began it.
    pub origin: Handle,
    context: Handle,
    mode: c_int,
    thread: ThreadId,
    invalid: AtomicBool,
}

/// A stream that takes part in a capture.
#[derive(Clone)]
pub struct Member {
    pub capture: Arc<Capture>,
    /// The nodes that the stream's next node comes after.
    pub frontier: Vec<usize>,
}

/// A point in captured work, which an event records.
#[derive(Clone)]
pub struct Point {
    pub capture: Arc<Capture>,
    pub after: Vec<usize>,
}

/// The captures of this process that have not ended.
static CAPTURES: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());

impl Capture {
    /// Begins a capture with an empty graph.
    pub fn begin(origin: Handle, context: Handle, mode: c_int) -> Arc<Capture> {
        let capture = Arc::new(Capture {
            id: handles::fresh(),
            graph: Graph::new(),
            origin,
            context,
            mode,
            thread: std::thread::current().id(),
            invalid: AtomicBool::new(false),
        });
        lock(&CAPTURES).push(Arc::clone(&capture));
        capture
    }

    /// Ends the capture.
    pub fn end(&self) {
        lock(&CAPTURES).retain(|other| other.id != self.id);
    }

    /// Makes the capture invalid and returns the code of the call that did.
    pub fn invalidate(&self, code: Code) -> Code {
        self.invalid.store(true, Ordering::Release);
        code
    }

    /// An error if the capture has become invalid.
    pub fn check(&self) -> Answer {
        if self.invalid.load(Ordering::Acquire) { Err(STREAM_CAPTURE_INVALIDATED) } else { Ok(()) }
    }

    /// Whether this thread may end the capture: in relaxed mode any thread may.
    pub fn may_end_here(&self) -> bool {
        self.mode == RELAXED || self.thread == std::thread::current().id()
    }
}

impl Point {
    /// Whether the capture has not ended.
    pub fn is_open(&self) -> bool {
        lock(&CAPTURES).iter().any(|capture| capture.id == self.capture.id)
    }

    /// The error of a call that asks for the state of a captured event.
    pub fn refuse(&self) -> Code {
        self.capture.invalidate(CAPTURED_EVENT)
    }
}

/// Whether a stream of the context is being captured.
pub fn any_in(context: Handle) -> bool {
    lock(&CAPTURES).iter().any(|capture| capture.context == context)
}

/// Refuses a call that concerns all streams of a context, if one of them is being captured.
pub fn refuse_in(context: Handle) -> Answer {
    refuse_if(|capture| capture.context == context)
}

/// Refuses a call that might wait for other work, such as an allocation or a free: in a thread that captures,
/// and in every thread during a capture in global mode. The thread's own mode can take the others' captures, or
/// all of them, out.
pub fn refuse_unsafe_call() -> Answer {
    let (me, mode) = (std::thread::current().id(), MODE.get());
    let others = mode == GLOBAL;
    refuse_if(|capture| {
        mode != RELAXED
            && capture.mode != RELAXED
            && (capture.thread == me || (others && capture.mode == GLOBAL))
    })
}

/// Sets this thread's mode and returns the one before; `None` if there is no such mode.
pub fn exchange_mode(mode: c_int) -> Option<c_int> {
    (GLOBAL..=RELAXED).contains(&mode).then(|| MODE.replace(mode))
}

fn refuse_if(meets: impl Fn(&Capture) -> bool) -> Answer {
    let captures = lock(&CAPTURES);
    let met = captures.iter().find(|capture| meets(capture));
    met.map_or(Ok(()), |capture| Err(capture.invalidate(STREAM_CAPTURE_UNSUPPORTED)))
}
