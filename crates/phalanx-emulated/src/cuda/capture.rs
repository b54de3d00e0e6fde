//! How a stream's work becomes a graph instead of being done.

use super::context::Context;
use super::error::*;
use super::event::Event;
use super::graph::{self, Graph};
use super::queue::{Kind, Mark, Stream, Work};
use super::stream;
use crate::call::{Answer, Code};
use crate::handles::{self, Handle};
use crate::lock;
use crate::pointers::{In, Out};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

/// A capture that goes on.
pub struct Capture {
    pub id: u64,
    pub graph: Arc<Graph>,
    origin: Handle,
    context: Handle,
    mode: c_int,
    thread: ThreadId,
    invalid: AtomicBool,
}

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: c_int = 2;
/// `CU_STREAM_CAPTURE_MODE_GLOBAL`.
const GLOBAL: c_int = 0;

/// A stream's part in a capture: what the next node comes after.
#[derive(Default)]
pub struct Membership(Option<Member>);

#[derive(Clone)]
struct Member {
    capture: Arc<Capture>,
    frontier: Vec<usize>,
}

/// A point in captured work, which an event remembers.
#[derive(Clone)]
pub struct Point {
    capture: Arc<Capture>,
    after: Vec<usize>,
}

/// The captures that go on in this process.
static CAPTURES: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());

impl Capture {
    fn invalidate(&self, code: Code) -> Code {
        self.invalid.store(true, Ordering::Release);
        code
    }

    fn check(&self) -> Answer {
        if self.invalid.load(Ordering::Acquire) { Err(STREAM_CAPTURE_INVALIDATED) } else { Ok(()) }
    }
}

/// Enqueues work into a stream, or captures it.
pub fn enqueue(stream: &Arc<Stream>, work: Arc<dyn Work>) -> Answer {
    enqueue_after(stream, Vec::new(), work)
}

/// As [`enqueue`], after what was done elsewhere; a capture has no such order.
pub fn enqueue_after(stream: &Arc<Stream>, after: Vec<Mark>, work: Arc<dyn Work>) -> Answer {
    refuse_default(stream)?;
    let mut membership = lock(&stream.capture);
    let Some(member) = &mut membership.0 else {
        stream.submit(after, work.bind());
        return Ok(());
    };
    member.capture.check()?;
    member.frontier = vec![member.capture.graph.add(work, std::mem::take(&mut member.frontier))];
    Ok(())
}

/// The capture that a stream takes part in.
pub fn of(stream: &Stream) -> Option<Arc<Capture>> {
    lock(&stream.capture).0.as_ref().map(|member| Arc::clone(&member.capture))
}

/// Whether anything is being captured on a device.
pub fn any(context: &Context) -> bool {
    lock(&CAPTURES).iter().any(|capture| capture.context == context.handle)
}

/// A call that waits for a stream, or asks how far it is, must not meet a capture.
pub fn refuse(stream: &Stream) -> Answer {
    match of(stream) {
        Some(capture) => Err(capture.invalidate(STREAM_CAPTURE_UNSUPPORTED)),
        None => Ok(()),
    }
}

/// As [`refuse`], for a call that concerns all streams of a context.
pub fn refuse_in(context: &Context) -> Answer {
    let captures = lock(&CAPTURES);
    let meets = |capture: &&Arc<Capture>| capture.context == context.handle;
    captures.iter().find(meets).map_or(Ok(()), |capture| Err(capture.invalidate(STREAM_CAPTURE_UNSUPPORTED)))
}

/// Calls that might wait for other work (allocations, frees) are not for threads that capture, and for no thread
/// while there is a capture in global mode.
pub fn refuse_unsafe_call() -> Answer {
    let me = std::thread::current().id();
    let captures = lock(&CAPTURES);
    let meets =
        |capture: &&Arc<Capture>| capture.mode != RELAXED && (capture.thread == me || capture.mode == GLOBAL);
    captures.iter().find(meets).map_or(Ok(()), |capture| Err(capture.invalidate(STREAM_CAPTURE_UNSUPPORTED)))
}

/// The default stream must not be used while a blocking stream of its context captures.
fn refuse_default(stream: &Stream) -> Answer {
    if stream.kind != Kind::Legacy {
        return Ok(());
    }
    for other in stream.context.streams().iter().filter(|other| other.kind == Kind::Blocking) {
        if let Some(capture) = of(other) {
            return Err(capture.invalidate(STREAM_CAPTURE_IMPLICIT));
        }
    }
    Ok(())
}

/// Where the captured work of a stream is, for an event.
pub fn point(stream: &Stream) -> Result<Option<Point>, Code> {
    let membership = lock(&stream.capture);
    let Some(member) = &membership.0 else { return Ok(None) };
    member.capture.check()?;
    Ok(Some(Point { capture: Arc::clone(&member.capture), after: member.frontier.clone() }))
}

/// Lets a stream wait for captured work: it takes part in the capture from here on.
pub fn join(stream: &Stream, point: &Point) -> Answer {
    point.capture.check()?;
    let mut membership = lock(&stream.capture);
    match &mut membership.0 {
        None if stream.kind == Kind::Legacy => Err(point.capture.invalidate(STREAM_CAPTURE_IMPLICIT)),
        None => {
            membership.0 =
                Some(Member { capture: Arc::clone(&point.capture), frontier: point.after.clone() });
            Ok(())
        }
        Some(member) if member.capture.id == point.capture.id => {
            member.frontier.extend(&point.after);
            Ok(())
        }
        Some(member) => {
            member.capture.invalidate(STREAM_CAPTURE_MERGE);
            Err(point.capture.invalidate(STREAM_CAPTURE_MERGE))
        }
    }
}

/// Whether the capture that an event was recorded in still goes on.
pub fn goes_on(point: &Point) -> bool {
    lock(&CAPTURES).iter().any(|capture| capture.id == point.capture.id)
}

/// A captured event must not be asked.
pub fn refuse_point(point: &Point) -> Code {
    point.capture.invalidate(CAPTURED_EVENT)
}

/// A stream that captures must not wait for what was not captured.
pub fn refuse_uncaptured(stream: &Stream, event: &Event) -> Answer {
    match of(stream) {
        Some(capture) if event.was_recorded() => Err(capture.invalidate(STREAM_CAPTURE_ISOLATION)),
        _ => Ok(()),
    }
}

fn begin(stream: &Arc<Stream>, mode: c_int) -> Answer {
    if !(0..=RELAXED).contains(&mode) {
        return Err(INVALID_VALUE);
    }
    if stream.kind == Kind::Legacy {
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    let mut membership = lock(&stream.capture);
    if let Some(member) = &membership.0 {
        return Err(member.capture.invalidate(INVALID_VALUE));
    }
    let capture = Arc::new(Capture {
        id: handles::fresh(),
        graph: Graph::new(),
        origin: stream.handle,
        context: stream.context.handle,
        mode,
        thread: std::thread::current().id(),
        invalid: AtomicBool::new(false),
    });
    lock(&CAPTURES).push(Arc::clone(&capture));
    membership.0 = Some(Member { capture, frontier: Vec::new() });
    Ok(())
}

fn end(stream: &Arc<Stream>) -> Result<Arc<Graph>, Code> {
    let member = lock(&stream.capture).0.clone().ok_or(INVALID_VALUE)?;
    let capture = member.capture;
    if capture.origin != stream.handle {
        return Err(capture.invalidate(STREAM_CAPTURE_UNMATCHED));
    }
    if capture.mode != RELAXED && capture.thread != std::thread::current().id() {
        return Err(capture.invalidate(STREAM_CAPTURE_WRONG_THREAD));
    }
    lock(&CAPTURES).retain(|other| other.id != capture.id);
    let mut unjoined = false;
    for other in stream::all() {
        let mut membership = lock(&other.capture);
        if let Some(theirs) = membership.0.take_if(|theirs| theirs.capture.id == capture.id) {
            unjoined |= !capture.graph.follows(&member.frontier, &theirs.frontier);
        }
    }
    let valid = capture.check();
    let verdict = valid.and(if unjoined { Err(STREAM_CAPTURE_UNJOINED) } else { Ok(()) });
    if verdict.is_err() {
        graph::discard(&capture.graph);
    }
    verdict.map(|()| Arc::clone(&capture.graph))
}

/// 0: no, 1: yes, 2: it has become invalid.
fn status(stream: &Stream) -> c_int {
    of(stream).map_or(0, |capture| if capture.check().is_ok() { 1 } else { 2 })
}

fn info(stream: &Stream, state: Out<c_int>, id: Out<u64>, graph: Out<Handle>) {
    state.set(status(stream));
    if let Some(capture) = of(stream) {
        id.set(capture.id);
        graph.set(capture.graph.handle);
    }
}

exported! {
    fn cuStreamBeginCapture_v2(stream: Handle, mode: c_int) {
        begin(&stream::find(FUNCTION, stream)?, mode)
    }

    fn cuStreamEndCapture(stream: Handle, graph: Out<Handle>) {
        graph.set(0);
        graph.set(end(&stream::find(FUNCTION, stream)?)?.handle);
        Ok(())
    }

    fn cuStreamIsCapturing(stream: Handle, state: Out<c_int>) {
        let stream = stream::find(FUNCTION, stream)?;
        refuse_default(&stream)?;
        state.set(status(&stream));
        Ok(())
    }

    fn cuStreamGetCaptureInfo_v2(
        stream: Handle, state: Out<c_int>, id: Out<u64>, graph: Out<Handle>, dependencies: Out<In<c_void>>,
        number: Out<usize>,
    ) {
        info(&*stream::find(FUNCTION, stream)?, state, id, graph);
        if !dependencies.is_null() || !number.is_null() {
            return Err(NOT_SUPPORTED);
        }
        Ok(())
    }

    fn cuStreamGetCaptureInfo_v3(
        stream: Handle, state: Out<c_int>, id: Out<u64>, graph: Out<Handle>, dependencies: Out<In<c_void>>,
        edges: Out<In<c_void>>, number: Out<usize>,
    ) {
        info(&*stream::find(FUNCTION, stream)?, state, id, graph);
        if !dependencies.is_null() || !edges.is_null() || !number.is_null() {
            return Err(NOT_SUPPORTED);
        }
        Ok(())
    }

    fn cuThreadExchangeStreamCaptureMode(mode: Out<c_int>) {
        // Every thread is in the mode that it was born with.
        mode.set(GLOBAL);
        Ok(())
    }
}
