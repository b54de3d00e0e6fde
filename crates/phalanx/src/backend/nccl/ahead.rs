//! [`Ahead`]: how far the program is ahead of the GPU with what the library carries out.
//!
//! The driver takes about 1,000 pieces of work for a stream, and whoever enqueues more waits in the driver. Inside NCCL no thread should: if a peer
//! is lost meanwhile, ncclCommRevoke (2.28.9) frees what that thread's operation uses before it has run, and the GPU's context is lost to an illegal
//! access. It does wait for the operations before. Seen on two H200, with NCCL alone, too; the trial `killed_with_full_streams_of_nccl`
//! shows it without this. The program's own work fills a stream as well: this helps while there are at most six pieces of it for each operation.

use super::communicator::Communicator;
use super::device::GpuEvent;
use crate::os::sync::lock;
use crate::types::error::Result;
use crate::types::memory::RawStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// Operations between two marks.
const BATCH: u32 = 16;
/// At most so many batches are incomplete, with the one that is being enqueued.
const BATCHES: usize = 8;

#[derive(Default)]
pub(crate) struct Ahead {
    /// Operations so far, and graphs.
    count: AtomicU32,
    /// The batch for which there is room.
    roomy: AtomicU32,
    /// Events behind the batches before, in turn.
    marks: Mutex<[Option<Arc<GpuEvent>>; BATCHES]>,
}

impl Communicator {
    /// The library, or a graph, is about to enqueue something on a stream.
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

    /// Waits until few enough operations are incomplete for another. The library lock is not held.
    #[inline]
    pub(crate) fn make_room(&self) -> Result<()> {
        let batch = self.ahead.count.load(Ordering::Relaxed) / BATCH;
        if batch == self.ahead.roomy.load(Ordering::Relaxed) {
            return Ok(());
        }
        let oldest = lock(&self.ahead.marks)[(batch as usize + 1) % BATCHES].clone();
        if let Some(oldest) = oldest {
            // It may be an operation of any ranks.
            self.wait_until(&self.auxiliary_call(), || oldest.is_complete())?;
        }
        self.ahead.roomy.store(batch, Ordering::Relaxed);
        Ok(())
    }
}
