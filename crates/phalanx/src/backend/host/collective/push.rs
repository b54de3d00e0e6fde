//! Push: all_reduces in which each rank stores its part of the result in every rank's `recv`.
//!
//! Each rank reads its part of all contributions in place, reduces it and stores it everywhere. That saves the transfer of the all-gather, and a
//! wait. All ranks must reach all buffers: those of thread ranks, and memory from `Comm::alloc` that can be taken away from peers.

use super::trial::{AlgorithmTrial, Candidate, TrialChoice};
use super::{Collective, CollectiveState};
use crate::backend::host::choose::{self, Bulk, PushStores};
use crate::backend::host::tunables::{PUSH_STEP, PUSH_STREAMING_SAVING};
use crate::contract::{Call, Flow};
use crate::control::world::Location;
use crate::os::LINE;
use crate::reduce::{Reducer, Targets};
use crate::types::error::Result;
use std::time::Instant;

/// Flag in the opening: peers may write to `recv`.
pub(crate) const OPEN_TO_PUSHES: u64 = 1;

/// Trial of stores past the caches; the usual ones go through them.
pub(crate) fn trial() -> AlgorithmTrial {
    AlgorithmTrial::new(PUSH_STREAMING_SAVING)
}

impl Collective<'_> {
    /// Whether peers may write to this rank's `recv`, for an all_reduce that is long enough to be pushed.
    pub(crate) fn can_take_pushes(&self, call: &Call<'_>, flow: &Flow<'_>, recv: Location) -> bool {
        recv.is_readable() && self.endpoint.world.can_withdraw(call.recv, flow.longest())
    }

    /// Whether this rank's opening said that peers may write to its `recv`.
    pub(crate) fn takes_pushes(&self, bulk: Bulk) -> bool {
        matches!(bulk, Bulk::AllReduce { push: true, .. }) && self.is_open_to_pushes(self.endpoint.rank)
    }

    pub(crate) fn all_take_pushes(&self) -> bool {
        self.all_readable(0) && (0..self.endpoint.ranks).all(|rank| self.is_open_to_pushes(rank))
    }

    fn is_open_to_pushes(&self, rank: usize) -> bool {
        self.buffers(rank).word == OPEN_TO_PUSHES
    }

    /// Each rank reduces its part of all contributions and stores it in every rank's `recv`. A rank that
    /// gives up meanwhile waits until its peers are outside (threads), or takes its memory away from them
    /// (processes), before it returns.
    ///
    /// # Safety
    /// As for `bulk`, for an all_reduce whose buffers are all readable and open to pushes.
    pub(crate) unsafe fn push(&mut self, call: &Call<'_>, flow: &Flow<'_>) -> Result<()> {
        let (rank, ranks) = (self.endpoint.rank, self.endpoint.ranks);
        let bytes = flow.longest();
        let part = bytes.div_ceil(ranks).next_multiple_of(LINE);
        let start = (rank * part).min(bytes);
        let end = (start + part).min(bytes);
        let stores = choose::push_stores(bytes);
        let choice = (stores == PushStores::Tried).then(|| self.state.pushes.next());
        // Targets that are stored to through the caches: the own one first.
        let through = match (stores, choice.map(TrialChoice::candidate)) {
            (PushStores::Streaming, _) => 0,
            (_, Some(Candidate::Other)) => 1,
            _ => ranks,
        };
        self.state.sources.clear();
        self.state.targets.clear();
        for peer in 0..ranks {
            let (source, target) = if peer == rank {
                (call.send, call.recv)
            } else {
                (self.reach(peer, 0)?, self.reach(peer, 1)?.cast_mut())
            };
            let (source, target) = (source.wrapping_add(start), target.wrapping_add(start));
            self.state.sources.push(source);
            self.state.targets.push(target);
        }
        self.state.targets.swap(0, rank);
        let began = matches!(choice, Some(TrialChoice::Try(_))).then(Instant::now);
        let reducer = Reducer::of(call);
        for at in (start..end).step_by(PUSH_STEP) {
            let len = (end - at).min(PUSH_STEP);
            let CollectiveState { sources, targets, factors, .. } = &*self.state;
            let (through, past) = targets.split_at(through);
            self.guarded(true, || {
                let count = len / call.dtype.size();
                // SAFETY: the part lies in every buffer, and this rank alone writes it. A target is this
                // or another rank's `recv`: apart from all sources, or in place of the same rank's.
                unsafe { reducer.run(Targets { through, past, pusher: rank }, sources, factors, count) };
            })?;
            let CollectiveState { sources, targets, .. } = &mut *self.state;
            sources.iter_mut().for_each(|array| *array = array.wrapping_add(len));
            targets.iter_mut().for_each(|target| *target = target.wrapping_add(len));
        }
        if let (Some(choice), Some(began)) = (choice, began) {
            self.state.pushes.took(bytes, choice.candidate(), began.elapsed());
        }
        Ok(())
    }
}
