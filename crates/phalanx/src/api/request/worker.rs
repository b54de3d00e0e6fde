//! The thread that carries out started collectives where the backend cannot.

use super::mover::Moving;
use super::outcome::Outcome;
use crate::buffer::stream::Stream;
use crate::contract::{Backend, Call};
use crate::types::error::Error;
use crate::watch::RecordId;
use crate::watch::deadline::Limited;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::time::Duration;

/// A started collective, for a thread.
pub(super) struct Job {
    pub call: Call<'static>,
    pub stream: Stream,
    pub deadline: Option<Duration>,
    pub record: RecordId,
    pub outcome: Arc<Outcome>,
}

// SAFETY: the buffers and counts that the call points to are owned by the request, which gives them back (or frees
// them) only when the outcome is there.
unsafe impl Send for Job {}

pub(super) fn work(backend: &dyn Backend, moving: &Moving, jobs: &Receiver<Job>) {
    while let Ok(job) = jobs.recv() {
        moving.recorder.start(job.record);
        let limited = Limited::to(job.deadline);
        // SAFETY: the call was checked when it was started; its buffers are the request's; the communicator
        // makes no collective call while jobs are under way, and this thread makes one at a time.
        let result = catch_unwind(AssertUnwindSafe(|| unsafe {
            backend.collective(&job.call.configured(&job.stream))
        }));
        let result = result.unwrap_or_else(|_| {
            // How far the operation came is unknown. The panic hook has printed the text.
            backend.abandon();
            Err(backend.check().err().unwrap_or(Error::Aborted { rank: backend.rank() }))
        });
        drop(limited);
        job.outcome.put(moving.recorder.end(job.record, result));
        moving.under_way.fetch_sub(1, Ordering::AcqRel);
    }
}
