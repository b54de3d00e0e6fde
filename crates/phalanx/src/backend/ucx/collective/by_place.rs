//! Long reductions of hosts with as many ranks each: all ranks of a host have a part of the work between hosts. While the network carries one
//! chunk, the host works at the next.

use super::super::UcxComm;
use super::super::choose::piece;
use super::super::hosts::Hosts;
use super::by_host::summed;
use super::two_phase::Chunk;
use super::{CollectiveState, Group, room};
use crate::contract::{Blocks, Call, Flow, Operation};
use crate::types::error::Result;
use std::ops::Range;

impl UcxComm {
    /// By all ranks of each host: those in the same place combine a part over UCX.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective).
    pub(super) unsafe fn by_place(
        &self,
        state: &mut CollectiveState,
        hosts: &Hosts,
        call: &Call<'_>,
        flow: &Flow<'_>,
    ) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe {
            match call.operation {
                Operation::AllGather => self.gather_by_place(state, hosts, call, flow),
                Operation::ReduceScatter => self.reduce_scatter_by_place(state, hosts, call, flow),
                _ => self.all_reduce_by_place(state, hosts, call, flow),
            }
        }
    }

    /// # Safety
    /// As for `by_place`.
    unsafe fn reduce_scatter_by_place(
        &self,
        state: &mut CollectiveState,
        hosts: &Hosts,
        call: &Call<'_>,
        flow: &Flow<'_>,
    ) -> Result<()> {
        let (across, here) = (self.across(hosts), hosts.of_own().len());
        let (count, reduction) = (call.blocks.longest(), summed(call.reduction));
        let own = room(&mut state.of_host, across.ranks() * count * flow.size);
        // SAFETY: the caller's contract; there is room for a block of each host.
        unsafe {
            for host in 0..across.ranks() {
                let send = call.send.wrapping_add(host * here * count * flow.size);
                let recv = own.wrapping_add(host * count * flow.size);
                self.on_host(state, hosts, &Call { send, recv, reduction, ..*call })?;
            }
            across.carry_out(state, &Call { send: own, reduction, ..*call })?;
            self.divide(call, call.recv, count);
        }
        Ok(())
    }

    /// The ranks in this rank's place of each host.
    fn across<'a>(&'a self, hosts: &'a Hosts) -> Group<'a> {
        Group { comm: self, members: &hosts.across, rank: hosts.own }
    }

    /// # Safety
    /// As for `by_place`.
    unsafe fn all_reduce_by_place(
        &self,
        state: &mut CollectiveState,
        hosts: &Hosts,
        call: &Call<'_>,
        flow: &Flow<'_>,
    ) -> Result<()> {
        let (across, here, size) = (self.across(hosts), hosts.of_own().len(), flow.size);
        let count = call.blocks.longest();
        let most = piece(size) * across.ranks() * here;
        let parts = Parts { call: &Call { reduction: summed(call.reduction), ..*call }, here, most, count };
        let part = |number| parts.of(hosts.place, number);
        let combines = Call { operation: Operation::ReduceScatterV, ..*parts.call };
        let gathers = Call { operation: Operation::AllGatherV, ..*parts.call };
        let on_host = |state: &mut CollectiveState, call: &Call<'_>, part: &Chunk| {
            state.with_counts(parts.lens(part.number), |state, counts| {
                // SAFETY: the caller's contract; the parts of a chunk lie in `send` and `recv`.
                unsafe { self.on_host(state, hosts, &parts.on_host(call, part, counts)) }
            })
        };
        let prepare = |state: &mut CollectiveState, part: &Chunk| on_host(state, &combines, part);
        let conclude = |state: &mut CollectiveState, part: &Chunk| {
            // SAFETY: the part is there, and no step that uses it is under way.
            unsafe { self.divide(call, part.recv, part.len) };
            on_host(state, &gathers, part)
        };
        if count <= most
            && let Some(only) = part(0)
        {
            prepare(state, &only)?;
            let (send, recv, blocks) = (only.send, only.recv, Blocks::Equal(only.len));
            let between = Call { send, recv, blocks, recv_blocks: blocks, ..*parts.call };
            // SAFETY: the caller's contract.
            unsafe { across.carry_out(state, &between) }?;
            return conclude(state, &only);
        }
        let longest = most.min(count).div_ceil(here);
        // SAFETY: the caller's contract; the host's part of a chunk is not the network's before it is prepared and after it has come.
        unsafe { across.in_chunks(state, (parts.call, flow), longest, part, prepare, conclude) }
    }
}

/// The parts of an all_reduce, chunk by chunk: each place of a host has one of each.
struct Parts<'a> {
    call: &'a Call<'a>,
    here: usize,
    /// Elements of a chunk.
    most: usize,
    count: usize,
}

impl Parts<'_> {
    fn len(&self, number: usize) -> usize {
        self.most.min(self.count - number * self.most)
    }

    /// The part of a place, if there is such a chunk.
    fn of(&self, place: usize, number: usize) -> Option<Chunk> {
        let start = number * self.most;
        if start >= self.count {
            return None;
        }
        let own = self.share(number, place);
        let recv = self.call.recv.wrapping_add((start + own.start) * self.call.dtype.size());
        Some(Chunk { number, send: recv, recv, len: own.len() })
    }

    fn share(&self, number: usize, place: usize) -> Range<usize> {
        let len = self.len(number);
        len * place / self.here..len * (place + 1) / self.here
    }

    /// The elements of each place's part.
    fn lens(&self, number: usize) -> impl Iterator<Item = usize> {
        (0..self.here).map(move |place| self.share(number, place).len())
    }

    /// A call of the ranks of this host about the chunk of a part, whose parts have so many elements.
    fn on_host<'c>(&self, call: &Call<'c>, part: &Chunk, counts: &'c [usize]) -> Call<'c> {
        let start = part.number * self.most * call.dtype.size();
        let blocks = Blocks::Each(counts);
        let (send, recv) = match call.operation {
            Operation::ReduceScatterV => (call.send.wrapping_add(start), part.recv),
            _ => (part.send, call.recv.wrapping_add(start)),
        };
        Call { send, recv, blocks, recv_blocks: blocks, ..*call }
    }
}
