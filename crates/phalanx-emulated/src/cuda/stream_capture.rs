//! The functions that begin and end the capture of a stream.

use super::capture::{self, Capture, GLOBAL, Member, RELAXED};
use super::error::*;
use super::graph::{self, Graph};
use super::queue::{Kind, Stream};
use super::{stream, streams};
use crate::base::call::{Answer, Code, exported};
use crate::base::handles::Handle;
use crate::base::lock::lock;
use crate::base::pointers::{In, Out};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

fn begin(stream: &Arc<Stream>, mode: c_int) -> Answer {
    if !(GLOBAL..=RELAXED).contains(&mode) {
        return Err(INVALID_VALUE);
    }
    if stream.kind == Kind::Legacy {
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    let mut member = lock(&stream.member);
    if let Some(member) = &*member {
        return Err(member.capture.invalidate(INVALID_VALUE));
    }
    let capture = Capture::begin(stream.handle, stream.context, mode);
    *member = Some(Member { capture, frontier: Vec::new() });
    Ok(())
}

fn end(stream: &Arc<Stream>) -> Result<Arc<Graph>, Code> {
    let member = lock(&stream.member).clone().ok_or(INVALID_VALUE)?;
    let capture = member.capture;
    if capture.origin != stream.handle {
        return Err(capture.invalidate(STREAM_CAPTURE_UNMATCHED));
    }
    if !capture.may_end_here() {
        return Err(capture.invalidate(STREAM_CAPTURE_WRONG_THREAD));
    }
    capture.end();
    let mut unjoined = false;
    for other in streams::all() {
        let mut theirs = lock(&other.member);
        if let Some(theirs) = theirs.take_if(|theirs| theirs.capture.id == capture.id) {
            unjoined |= !capture.graph.follows(&member.frontier, &theirs.frontier);
        }
    }
    let result = capture.check().and(if unjoined { Err(STREAM_CAPTURE_UNJOINED) } else { Ok(()) });
    if result.is_err() {
        graph::discard(&capture.graph);
    }
    result.map(|()| Arc::clone(&capture.graph))
}

/// The `CUstreamCaptureStatus`: 0 for no capture, 1 for a capture, 2 for an invalid one.
fn status(stream: &Stream) -> c_int {
    stream.capture().map_or(0, |capture| if capture.check().is_ok() { 1 } else { 2 })
}

fn info(stream: &Stream, state: Out<c_int>, id: Out<u64>, graph: Out<Handle>) {
    state.set(status(stream));
    if let Some(capture) = stream.capture() {
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
        stream.refuse_implicit_capture()?;
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
        let wanted = mode.as_in().get().ok_or(INVALID_VALUE)?;
        mode.set(capture::exchange_mode(wanted).ok_or(INVALID_VALUE)?);
        Ok(())
    }
}
