//! Long broadcasts among several ranks: in parts that each rank passes on.

use super::{CollectiveState, Group};
use crate::contract::{Call, Flow};
use crate::types::error::Result;
use std::ops::Range;

impl Group<'_> {
    /// A long broadcast: the root sends each other rank a part, which it passes on to the others.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective).
    pub(super) unsafe fn broadcast_in_parts(
        &self,
        state: &mut CollectiveState,
        call: &Call<'_>,
        flow: &Flow<'_>,
    ) -> Result<()> {
        let (rank, ranks, root, len) = (self.rank, self.ranks(), call.root, flow.longest());
        // Parts of the others, in the order from the root.
        let part = |owner: usize| -> Range<usize> {
            let place = (owner + ranks - root) % ranks - 1;
            len * place / (ranks - 1)..len * (place + 1) / (ranks - 1)
        };
        let others = || self.peers().filter(|peer| *peer != root);
        state.begin_step(0);
        if rank == root {
            for peer in others() {
                let part = part(peer);
                // SAFETY: the part lies in `send`.
                unsafe { self.send_part(state, 0, peer, (call.send.wrapping_add(part.start), part.len())) };
            }
            // SAFETY: the caller's contract.
            unsafe { self.copy_own(call, flow, call.send) };
            return self.finish_step(state, 0);
        }
        let place = |part: &Range<usize>| (call.recv.wrapping_add(part.start), part.len());
        // SAFETY: the parts lie in `recv`, and are apart.
        unsafe { self.receive_part(state, 0, root, place(&part(rank))) };
        state.begin_step(1);
        for peer in others() {
            // SAFETY: as above.
            unsafe { self.receive_part(state, 1, peer, place(&part(peer))) };
        }
        self.finish_step(state, 0)?;
        for peer in others() {
            let (data, len) = place(&part(rank));
            // SAFETY: the part has come, and stays.
            unsafe { self.send_part(state, 1, peer, (data, len)) };
        }
        self.finish_step(state, 1)
    }
}
