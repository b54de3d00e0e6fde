//! [`Ahead`]: how far the program is ahead of the GPU with operations that the library carries out.
//!
//! The driver takes about 1,000 pieces of work for a stream, and whoever enqueues more waits in the driver. Inside NCCL no thread should: if a peer
//! is lost meanwhile, ncclCommRevoke and ncclCommAbort (2.28.9) free what the operation uses that is enqueued last, and the GPU's context is lost
//! to an illegal access. Measured on two H200, with NCCL alone; what is in the stream before they wait for.

use super::communicator::Communicator;
use super::device::GpuEvent;
use crate::control::control_channel::AnnouncedCall;
use crate::os::sync::lock;
use crate::types::error::Result;
use crate::types::memory::RawStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// Operations between two marks.
const BATCH: u32 = 64;
/// So many batches may be incomplete: a quarter of what a stream takes, since several communicators may share one.
const BATCHES: usize = 4;

#[derive(Default)]
pub(crate) struct Ahead {
    /// Operations so far.
    count: AtomicU32,
    /// The batch in which room was made last.
    roomy: AtomicU32,
    /// Events behind the batches before, in turn.
    marks: Mutex<[Option<Arc<GpuEvent>>; BATCHES]>,
}

impl Communicator {
    /// The library is about to enqueue an operation on a stream.
    pub(super) fn count_ahead(&self, stream: RawStream) {
        let count = self.ahead.count.load(Ordering::Relaxed).wrapping_add(1);
        self.ahead.count.store(count, Ordering::Relaxed);
        if count.is_multiple_of(BATCH)
            && let Err(error) = self.mark(count / BATCH, stream)
        {
            // The operation itself reports what is wrong with the stream.
            crate::os::log::debug!(rank = self.rank, "no mark behind operations: {error}");
        }
    }

    fn mark(&self, batch: u32, stream: RawStream) -> Result<()> {
        let Some(stream) = self.stream_of(stream).filter(|_| self.device.cuda().is_some()) else {
            return Ok(());
        };
        // In a capture it would be a part of the graph.
        if self.device.is_captured(stream.raw())? {
            return Ok(());
        }
        let mut marks = lock(&self.ahead.marks);
        let mark = &mut marks[batch as usize % BATCHES];
        if mark.is_none() {
            *mark = Some(Arc::new(GpuEvent::new(&self.device)?));
        }
        mark.as_ref().expect("just made").record(&stream)
    }

    /// Waits until few enough operations are incomplete for another, which has been announced. The library lock is not held.
    #[inline]
    pub(super) fn make_room(&self, announced: &AnnouncedCall) -> Result<()> {
        let batch = self.ahead.count.load(Ordering::Relaxed) / BATCH;
        if batch == self.ahead.roomy.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.ahead.roomy.store(batch, Ordering::Relaxed);
        let oldest = lock(&self.ahead.marks)[(batch as usize + 1) % BATCHES].clone();
        oldest.map_or(Ok(()), |oldest| self.wait_until(announced, || oldest.is_complete()))
    }
}
