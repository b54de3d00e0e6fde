//! Kernel copy: all_to_alls of long blocks between processes, which the kernel copies (`control/endpoint/kernel_copy.rs`).
//!
//! The kernel copies once where the region copies twice, but has more to do for each page. The machine decides which is faster: two cores of
//! a Xeon take a fifth less by kernel copy, two cores of an EPYC that share a small cache half as much again. Rank 0 times both on the first
//! long all_to_alls of a communicator, and keeps the faster one for all lengths. If that is the region, ranks no longer publish the
//! addresses of their blocks, which saves system calls. (An all_gather is written to the region once and read by all, which is as fast or
//! faster everywhere.)

use super::Collective;
use super::trial::{AlgorithmTrial, Candidate, TrialChoice};
use super::two_phase::copy_own;
use crate::backend::host::choose;
use crate::contract::{Call, Flow};
use crate::control::world::Location;
use crate::types::error::Result;
use std::time::Instant;

/// Rank 0's choice, in its opening: the region for this operation; kernel copy, if all ranks have published addresses; or the region from
/// now on.
const REGION_ONCE: u64 = 0;
const KERNEL_COPY: u64 = 2;
const REGION_FROM_NOW_ON: u64 = 3;

/// Trial of rank 0; the usual algorithm is the region.
pub(crate) fn trial() -> AlgorithmTrial {
    AlgorithmTrial::new(0.0)
}

/// Rank 0's choice as it stands in its opening.
pub(crate) fn word(choice: TrialChoice) -> u64 {
    match choice {
        TrialChoice::Try(Candidate::Other) | TrialChoice::Keep(Candidate::Other) => KERNEL_COPY,
        TrialChoice::Try(Candidate::Usual) => REGION_ONCE,
        TrialChoice::Keep(Candidate::Usual) => REGION_FROM_NOW_ON,
    }
}

impl Collective<'_> {
    /// Address from which the kernel can copy this rank's blocks to its peers; `NOWHERE` if it cannot, for any pair of ranks.
    pub(crate) fn kernel_copy_source(&self, send: *const u8, flow: &Flow<'_>) -> Location {
        let len = flow.send_len(self.endpoint.rank, self.endpoint.ranks);
        if self.endpoint.is_kernel_copyable(send, len) {
            Location::kernel_copied(send)
        } else {
            Location::NOWHERE
        }
    }

    /// # Safety
    /// As for `bulk`, after the openings, for an all_to_all.
    pub(crate) unsafe fn by_kernel_copy_or_region(
        &mut self,
        call: &Call<'_>,
        flow: &Flow<'_>,
        pairwise: bool,
        send: Location,
    ) -> Result<()> {
        // All ranks choose alike: they have heard the same openings.
        let choice = self.buffers(0).word;
        if choice == REGION_FROM_NOW_ON {
            self.state.kernel_copies.keep_usual();
            // SAFETY: the caller's contract.
            return unsafe { self.pass(call, flow, pairwise, send) };
        }
        // All peers are there, since they have opened. Before the first kernel copy, every rank must know that all ranks can.
        self.endpoint.probe_kernel_copy();
        let began = Instant::now();
        let by_kernel = choice == KERNEL_COPY
            && (0..self.endpoint.ranks).all(|rank| self.locations(rank)[0].is_kernel_copied());
        // SAFETY: the caller's contract.
        unsafe {
            if by_kernel {
                self.kernel_copy_blocks(call, flow)?;
            } else {
                self.pass(call, flow, pairwise, send)?;
            }
        }
        if send.is_kernel_copied() {
            let candidate = if by_kernel { Candidate::Other } else { Candidate::Usual };
            self.state.kernel_copies.took(flow.longest(), candidate, began.elapsed());
        }
        Ok(())
    }

    /// # Safety
    /// As for `bulk`, after the openings, in which all ranks have published addresses.
    unsafe fn kernel_copy_blocks(&mut self, call: &Call<'_>, flow: &Flow<'_>) -> Result<()> {
        let rank = self.endpoint.rank;
        for writer in self.endpoint.peers() {
            let source = self.locations(writer)[0].offset + flow.source_offset(rank) as u64;
            // SAFETY: the writer's block has its place in `recv`.
            unsafe {
                let target = call.recv.add(flow.target_offset(writer));
                self.endpoint.kernel_copy(writer, source, target, flow.block_len(writer, rank))?;
            }
        }
        // SAFETY: own blocks lie in `send` and `recv`, the same place or apart.
        unsafe { copy_own(call, flow, rank, 0, usize::MAX, choose::streams_beside_kernel_copy(flow)) };
        self.complete();
        self.wait_until_read(flow)
    }
}
