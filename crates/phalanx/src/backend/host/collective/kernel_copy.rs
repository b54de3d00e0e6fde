//! Kernel copy: all_to_alls of long blocks between processes, which the kernel copies from one to the other (`fetch.rs`).
//!
//! The kernel copies once where the region copies twice, but has more to do for each page. The faster one depends on the machine: two cores
//! of a Xeon take a fifth less by the kernel, two that share a small cache on an EPYC half as much again. Rank 0 times both for each size
//! class and keeps the faster one. If that is the region, ranks no longer offer such blocks, which takes system calls. (An all_gather is
//! staged once and read by all, which is as fast or faster everywhere.)

use super::Collective;
use super::trial::{AlgorithmTrial, Candidate, Choice};
use super::two_phase::copy_own;
use crate::backend::host::choose;
use crate::backend::host::tunables::KERNEL_COPY;
use crate::contract::{Call, Flow};
use crate::control::world::Location;
use crate::types::error::Result;
use std::time::Instant;

/// Rank 0's choice, in its opening: kernel copy if all blocks are offered, or the region, this time or for good.
pub(crate) const TO_TRY_PASSING: u64 = 0;
pub(crate) const TO_FETCH: u64 = 2;
pub(crate) const TO_PASS: u64 = 3;

/// Trial of rank 0; the usual algorithm is the region.
pub(crate) fn trial() -> AlgorithmTrial {
    AlgorithmTrial::new(KERNEL_COPY, u32::MAX)
}

/// Rank 0's choice as it stands in its opening.
pub(crate) fn word(choice: Choice) -> u64 {
    match choice {
        Choice::Try(Candidate::Other) | Choice::Keep(Candidate::Other) => TO_FETCH,
        Choice::Try(Candidate::Usual) => TO_TRY_PASSING,
        Choice::Keep(Candidate::Usual) => TO_PASS,
    }
}

impl Collective<'_> {
    /// Address from which peers can have this rank's blocks copied, if all ranks can.
    pub(crate) fn offer(&self, send: *const u8, flow: &Flow<'_>) -> Location {
        let len = flow.send_len(self.endpoint.rank, self.endpoint.ranks);
        if self.endpoint.can_offer(send, len) { Location::to_fetch(send) } else { Location::NOWHERE }
    }

    /// # Safety
    /// As for `bulk`, after the openings, for an all_to_all.
    pub(crate) unsafe fn fetch_or_pass(
        &mut self,
        call: &Call<'_>,
        flow: &Flow<'_>,
        pairwise: bool,
        send: Location,
    ) -> Result<()> {
        // All ranks choose alike: they have heard the same openings.
        // SAFETY: as `opening` says.
        let choice = unsafe { (*self.opening(0)).data[4] };
        if choice == TO_PASS {
            self.state.fetches.settle(flow.longest());
            // SAFETY: the caller's contract.
            return unsafe { self.pass(call, flow, pairwise, send) };
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
                self.pass(call, flow, pairwise, send)?;
            }
        }
        if send.is_to_fetch() {
            let candidate = if fetched { Candidate::Other } else { Candidate::Usual };
            self.state.fetches.took(flow.longest(), candidate, began.elapsed());
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
        unsafe { copy_own(call, flow, rank, 0, usize::MAX, choose::streams_beside_kernel_copy(flow)) };
        self.complete();
        self.wait_until_read(flow)
    }
}
