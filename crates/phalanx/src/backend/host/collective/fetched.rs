//! All_to_alls of long blocks between processes, which the kernel copies from one to the other (`fetch.rs`).
//!
//! That copies once where the region copies twice, but has more to do for each page. What is faster depends on the machine: two cores of a
//! Xeon take a fifth less by the kernel, two that share a small cache on an EPYC half as much again. So rank 0 tries both ways a few times
//! for each length, and then keeps to the faster one; if that is the region, nobody offers such blocks any more, for which the kernel has
//! to be asked. (What everybody gets from everybody is staged once and read by all, which is as fast or faster everywhere.)

use super::{Collective, Flow, TO_FETCH, TO_PASS, copy_own};
use crate::backend::Call;
use crate::backend::host::world::Location;
use crate::error::Result;
use std::time::{Duration, Instant};

/// Blocks from this size on may be fetched: shorter ones nowhere gained by it.
const FETCHED: usize = 256 << 10;

/// Own blocks from this size on are stored past the caches.
const STREAMING_OWN: usize = 4 << 20;

/// How often a way is tried at a stretch: the region, the kernel, and the region again, since all of them get faster in the first
/// milliseconds of a buffer, and each finds in the caches what the one before has left there.
const STRETCH: u32 = 10;
const TRIALS: u32 = 3 * STRETCH;

/// Lengths between two powers of two are one class, and all from a GiB on.
const CLASSES: usize = 13;

/// How long long all_to_alls took, as this rank saw them.
#[derive(Default)]
pub(super) struct Ways([Trials; CLASSES]);

/// Those of a class.
#[derive(Default)]
struct Trials {
    tried: u32,
    /// The shortest time through the region, and by the kernel.
    best: [Option<Duration>; 2],
    /// Rank 0 has tried both and stays with the region.
    left: bool,
}

impl Ways {
    fn class(block: usize) -> usize {
        ((block / FETCHED).max(1).ilog2() as usize).min(CLASSES - 1)
    }

    /// What rank 0 says of the next one of this length.
    pub fn next(&self, block: usize) -> u64 {
        match self.0[Ways::class(block)] {
            Trials { tried, .. } if tried < TRIALS => [0, TO_FETCH][usize::from(tried / STRETCH == 1)],
            Trials { best: [passed, fetched], .. } => [TO_PASS, TO_FETCH][usize::from(fetched < passed)],
        }
    }

    /// Whether blocks of this length go through the region for good.
    pub fn is_left(&self, block: usize) -> bool {
        self.0[Ways::class(block)].left
    }

    fn leave(&mut self, block: usize) {
        self.0[Ways::class(block)].left = true;
    }

    #[cfg(all(test, target_os = "linux"))]
    pub fn has_fetched(&self, block: usize) -> bool {
        self.0[Ways::class(block)].best[1].is_some()
    }

    fn took(&mut self, block: usize, fetched: bool, time: Duration) {
        let Trials { tried, best, .. } = &mut self.0[Ways::class(block)];
        if *tried < TRIALS {
            let best = &mut best[usize::from(fetched)];
            *best = Some(best.map_or(time, |best| best.min(time)));
            *tried += 1;
        }
    }
}

impl Collective<'_> {
    /// Whether it is an all_to_all whose blocks are long enough.
    pub(super) fn may_be_fetched(&self, flow: &Flow<'_>) -> bool {
        flow.scattered && flow.gathered && flow.longest() >= FETCHED
    }

    /// Where peers can fetch this rank's blocks, if all can fetch.
    pub(super) fn offer(&self, send: *const u8, flow: &Flow<'_>) -> Location {
        let len = flow.send_len(self.endpoint.rank, self.endpoint.ranks);
        if self.endpoint.can_offer(send, len) { Location::to_fetch(send) } else { Location::NOWHERE }
    }

    /// # Safety
    /// As for `bulk`, after the openings, for an all_to_all.
    pub(super) unsafe fn fetch_or_pass(
        &mut self,
        call: &Call<'_>,
        flow: &Flow<'_>,
        send: Location,
    ) -> Result<()> {
        // All ranks choose alike: they have heard the same openings.
        // SAFETY: as `opening` says.
        let choice = unsafe { (*self.opening(0)).data[4] };
        if choice == TO_PASS {
            self.state.ways.leave(flow.longest());
            // SAFETY: the caller's contract.
            return unsafe { self.pass(call, flow, send) };
        }
        // Told before the first is fetched; all are there to be looked into.
        self.endpoint.try_fetching();
        let began = Instant::now();
        let fetched =
            choice == TO_FETCH && (0..self.endpoint.ranks).all(|rank| self.locations(rank)[0].is_to_fetch());
        // SAFETY: the caller's contract.
        unsafe {
            if fetched {
                self.fetch_blocks(call, flow)?;
            } else {
                self.pass(call, flow, send)?;
            }
        }
        if send.is_to_fetch() {
            self.state.ways.took(flow.longest(), fetched, began.elapsed());
        }
        Ok(())
    }

    /// # Safety
    /// As for `bulk`, after the openings, which say that the blocks are to be fetched.
    unsafe fn fetch_blocks(&mut self, call: &Call<'_>, flow: &Flow<'_>) -> Result<()> {
        let rank = self.endpoint.rank;
        for writer in self.endpoint.peers() {
            let source = self.locations(writer)[0].offset + flow.source_offset(rank) as u64;
            // SAFETY: the writer's block has its place in `recv`.
            unsafe {
                let target = call.recv.add(flow.target_offset(writer));
                self.endpoint.fetch(writer, source, target, flow.block_len(writer, rank))?;
            }
        }
        // SAFETY: own blocks lie in `send` and `recv`, the same place or apart.
        unsafe { copy_own(call, flow, rank, 0, usize::MAX, flow.longest() >= STREAMING_OWN) };
        self.complete();
        self.wait_until_read(flow)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_faster_way_is_kept_for_each_length() {
        let mut ways = Ways::default();
        let mut run = |block: usize, times: [u64; 2]| {
            let choice = ways.next(block);
            let fetched = usize::from(choice == TO_FETCH);
            ways.took(block, fetched == 1, Duration::from_micros(times[fetched]));
            choice
        };
        let mut seen = |block, times| (0..TRIALS + 2).map(|_| run(block, times)).collect::<Vec<_>>();
        let tries = [0, TO_FETCH, 0].map(|choice| [choice; STRETCH as usize]).concat();
        assert_eq!(seen(FETCHED, [90, 50]), [&tries[..], &[TO_FETCH; 2]].concat());
        assert_eq!(seen(2 * FETCHED, [50, 90]), [&tries[..], &[TO_PASS; 2]].concat());
        assert_eq!(
            seen(2 * FETCHED - 1, [90, 50]),
            [TO_FETCH; TRIALS as usize + 2],
            "of a class that was tried"
        );
        assert_eq!(seen(usize::MAX, [9, 5]), [&tries[..], &[TO_FETCH; 2]].concat());
    }
}
