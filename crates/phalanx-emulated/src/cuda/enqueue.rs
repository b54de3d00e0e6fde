//! How work gets into a stream: into its queue, or into the graph of the capture that the stream takes part
//! in.

use super::capture::{Capture, Member, Point};
use super::error::{
    STREAM_CAPTURE_IMPLICIT, STREAM_CAPTURE_ISOLATION, STREAM_CAPTURE_MERGE, STREAM_CAPTURE_UNSUPPORTED,
};
use super::queue::{Kind, Mark, Stream};
use super::work::Work;
use crate::base::call::{Answer, Code};
use crate::base::lock::lock;
use std::sync::Arc;

impl Stream {
    /// Enqueues or captures work.
    pub fn enqueue(self: &Arc<Stream>, work: Arc<dyn Work>) -> Answer {
        self.enqueue_after(Vec::new(), work)
    }

    /// As [`enqueue`](Stream::enqueue), after points in other streams. A capture ignores them.
    pub fn enqueue_after(self: &Arc<Stream>, after: Vec<Mark>, work: Arc<dyn Work>) -> Answer {
        self.refuse_implicit_capture()?;
        let mut guard = lock(&self.member);
        let Some(member) = &mut *guard else {
            // A thread that waits for room keeps no other from asking for captures.
            drop(guard);
            self.submit(after, work.bind());
            return Ok(());
        };
        member.capture.check()?;
        member.frontier = vec![member.capture.graph.add(work, std::mem::take(&mut member.frontier))];
        Ok(())
    }

    /// The capture that the stream takes part in.
    pub fn capture(&self) -> Option<Arc<Capture>> {
        lock(&self.member).as_ref().map(|member| Arc::clone(&member.capture))
    }

    /// Refuses a call that waits for the stream or asks for its progress, if the stream is being captured.
    pub fn refuse_capture(&self) -> Answer {
        self.refuse_with(STREAM_CAPTURE_UNSUPPORTED)
    }

    /// Refuses to let a captured stream wait for work that was not captured.
    pub fn refuse_uncaptured(&self) -> Answer {
        self.refuse_with(STREAM_CAPTURE_ISOLATION)
    }

    fn refuse_with(&self, code: Code) -> Answer {
        match self.capture() {
            Some(capture) => Err(capture.invalidate(code)),
            None => Ok(()),
        }
    }

    /// Refuses a use of the default stream while a blocking stream of its context is being captured.
    pub fn refuse_implicit_capture(&self) -> Answer {
        if self.kind != Kind::Legacy {
            return Ok(());
        }
        for other in self.blocking_siblings() {
            other.refuse_with(STREAM_CAPTURE_IMPLICIT)?;
        }
        Ok(())
    }

    /// The point that captured work of the stream has reached; `None` without a capture.
    pub fn capture_point(&self) -> Result<Option<Point>, Code> {
        let member = lock(&self.member);
        let Some(member) = &*member else { return Ok(None) };
        member.capture.check()?;
        Ok(Some(Point { capture: Arc::clone(&member.capture), after: member.frontier.clone() }))
    }

    /// Lets the stream wait for captured work: it takes part in that capture from here on.
    pub fn join_capture(&self, point: &Point) -> Answer {
        point.capture.check()?;
        let mut member = lock(&self.member);
        match &mut *member {
            None if self.kind == Kind::Legacy => Err(point.capture.invalidate(STREAM_CAPTURE_IMPLICIT)),
            None => {
                *member = Some(Member { capture: Arc::clone(&point.capture), frontier: point.after.clone() });
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
}
