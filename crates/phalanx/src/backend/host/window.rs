//! Windows: one segment with the parts of all ranks, which every rank maps.
//!
//! A segment's place is never given out again. So a rank that is stopped in the middle of an access, and goes on when its peers have given up
//! and dropped the memory, writes to nobody.

use super::HostComm;
use crate::contract::{Backend, Blocks, Call, HostMemory, MappedParts, Operation, Window};
use crate::control::endpoint::{Endpoint, Peers};
use crate::control::flags::Signals;
use crate::control::host_channel::HostChannel;
use crate::control::record::CallRecord;
use crate::control::segment::Segment;
use crate::control::world::World;
use crate::types::error::{Error, Result, UnsupportedError, UsageError};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

/// Each part has pages of its own, which its rank allocates.
const ALIGN: usize = 4096;

/// A part begins so far into its first page. Long vectors begin near the beginning of one, and a copy between such places takes twice as
/// long: the processor takes a load for one of what was stored at the same place of another page.
const LEAD: usize = ALIGN / 2;

/// A segment that all ranks have mapped. At its beginning is the number of ranks that have closed it.
struct SharedSegment {
    world: Arc<World>,
    segment: Segment,
    ranks: usize,
}

pub(super) struct HostWindow<'a> {
    endpoint: &'a Endpoint,
    segment: SharedSegment,
    parts: MappedParts,
    /// Signals of each rank that were waited for.
    heard: Vec<Cell<u64>>,
}

pub(super) struct OneCopy {
    segment: SharedSegment,
    rank: usize,
}

impl HostComm {
    /// # Safety
    /// As for [`Backend::symmetric`].
    pub(super) unsafe fn window(&self, call: &Call<'_>) -> Result<HostWindow<'_>> {
        let (rank, ranks) = (self.endpoint.rank, self.endpoint.ranks);
        let header = (SIGNALS + ranks * ranks * size_of::<Signals>()).next_multiple_of(ALIGN);
        let stride = (LEAD + bytes_of(call)).next_multiple_of(ALIGN);
        let own = header + rank * stride..header + (rank + 1) * stride;
        // SAFETY: the caller's contract.
        let segment = unsafe { self.shared_segment(call, header, header + ranks * stride, own) }?;
        let parts = MappedParts { start: segment.at(header + LEAD), stride };
        Ok(HostWindow { endpoint: &self.endpoint, segment, parts, heard: vec![Cell::new(0); ranks] })
    }

    /// # Safety
    /// As for [`Backend::shared_by_host`].
    pub(super) unsafe fn host_memory(&self, call: &Call<'_>) -> Result<OneCopy> {
        let bytes = bytes_of(call).next_multiple_of(ALIGN);
        let pages = bytes / ALIGN;
        let page = |rank: usize| ALIGN + rank * pages / self.endpoint.ranks * ALIGN;
        let own = page(self.endpoint.rank)..page(self.endpoint.rank + 1);
        // SAFETY: the caller's contract.
        let segment = unsafe { self.shared_segment(call, ALIGN, ALIGN + bytes, own) }?;
        Ok(OneCopy { segment, rank: self.endpoint.rank })
    }

    /// A segment of `len` bytes, which rank 0 makes. Rank 0 allocates its `header`, and each rank its own range.
    ///
    /// # Safety
    /// As for [`Backend::symmetric`].
    unsafe fn shared_segment(
        &self,
        call: &Call<'_>,
        header: usize,
        len: usize,
        own: std::ops::Range<usize>,
    ) -> Result<SharedSegment> {
        // The ranks agree on what they ask for.
        // SAFETY: the caller's contract; no data moves.
        unsafe { self.collective(call) }?;
        let (world, rank, ranks) = (&self.endpoint.world, self.endpoint.rank, self.endpoint.ranks);
        let made = (rank == 0).then(|| world.create_segment(len));
        let id = made.as_ref().and_then(|made| made.as_ref().ok()).map_or(0, |segment| segment.id);
        let mut all = vec![0u64; ranks];
        let step = Call { dtype: crate::types::dtype::DType::U64, ..Call::empty(Operation::AllGather) };
        // SAFETY: the caller's contract.
        unsafe { self.all_gather_words_in(step, &[id], &mut all) }?;
        let failed = |rank: usize| {
            Error::from(UnsupportedError {
                what: call.operation.name().into(),
                why: format!("rank {rank} could not allocate its memory"),
                remedy: "see that rank's error".into(),
            })
        };
        let opened = match made {
            Some(made) => made,
            None if all[0] == 0 => Err(failed(0)),
            None => world.open_segment(all[0]),
        };
        let shared = opened.map(|segment| SharedSegment { world: world.clone(), segment, ranks });
        let committed = shared.and_then(|shared| {
            let header = if rank == 0 { header } else { 0 };
            for (start, len) in [(0, header), (own.start, own.len())].into_iter().filter(|(_, len)| *len > 0)
            {
                world.commit(&shared.segment, start, len)?;
            }
            Ok(shared)
        });
        let mut all = vec![0u64; ranks];
        // SAFETY: as above.
        unsafe { self.all_gather_words_in(step, &[u64::from(committed.is_ok())], &mut all) }?;
        match all.iter().position(|ok| *ok == 0) {
            Some(other) => committed.and(Err(failed(other))),
            None => committed,
        }
    }
}

fn bytes_of(call: &Call<'_>) -> usize {
    let Blocks::Equal(count) = call.blocks else { unreachable!("parts have one length") };
    count * call.dtype.size()
}

/// Where the signals begin: behind the number of ranks that have closed the segment, on lines of their own.
const SIGNALS: usize = 128;

impl SharedSegment {
    fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.segment.memory.len());
        self.segment.memory.as_ptr().wrapping_add(offset)
    }
}

impl Drop for SharedSegment {
    fn drop(&mut self) {
        // SAFETY: the segment is longer, and starts as zeroes; its first word is this number for all ranks.
        let closed = unsafe { &*self.at(0).cast::<AtomicU32>() };
        let last = closed.fetch_add(1, Ordering::AcqRel) as usize + 1 == self.ranks;
        self.world.close_segment(&self.segment, last);
    }
}

impl HostWindow<'_> {
    /// The signals of a rank to another one.
    fn signals(&self, to: usize, from: usize) -> &Signals {
        let index = to * self.endpoint.ranks + from;
        // SAFETY: the header has a counter for each pair of ranks, which is an atomic for all of them.
        unsafe { &*self.segment.at(SIGNALS).cast::<Signals>().add(index) }
    }
}

impl Window for HostWindow<'_> {
    fn own(&self) -> *mut u8 {
        self.parts.of(self.endpoint.rank)
    }

    fn mapped(&self) -> Option<MappedParts> {
        Some(self.parts)
    }

    fn flush(&self, _rank: Option<usize>) -> Result<()> {
        fence(Ordering::SeqCst);
        Ok(())
    }

    fn signal(&self, rank: usize) -> Result<()> {
        self.signals(rank, self.endpoint.rank).give();
        self.endpoint.announce_progress();
        Ok(())
    }

    fn wait_signals(&self, rank: usize, count: u64) -> Result<()> {
        let (endpoint, heard) = (self.endpoint, &self.heard[rank]);
        let (signals, wanted) = (self.signals(endpoint.rank, rank), heard.get().saturating_add(count));
        let come = || signals.given() >= wanted;
        if !come() {
            if rank == endpoint.rank {
                return Err(UsageError::own_signals(count, signals.given() - heard.get()).into());
            }
            let (number, _) = endpoint.own().last_announced().expect("it has begun an epoch");
            let record = CallRecord::of_rank(Operation::WaitSignals, rank);
            let peer = || Peers::One([rank]);
            endpoint.wait_long(&mut || Ok(come()), &peer, &peer, &|| (number, record))?;
        }
        heard.set(wanted);
        Ok(())
    }
}

impl HostMemory for OneCopy {
    fn start(&self) -> *mut u8 {
        self.segment.at(ALIGN)
    }

    fn place(&self) -> (usize, usize) {
        (self.rank, self.segment.ranks)
    }
}
