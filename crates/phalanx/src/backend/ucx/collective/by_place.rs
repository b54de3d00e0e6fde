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
            let mut counts = std::mem::take(&mut state.counts);
            // SAFETY: the caller's contract; the parts of a chunk lie in `send` and `recv`.
            let done = unsafe { self.on_host(state, hosts, &parts.on_host(call, part, &mut counts)) };
            state.counts = counts;
            done
        };
        // SAFETY: the part is there, and no step that uses it is under way.
        let divide = |part: &Chunk| unsafe { self.divide(call, part.recv, part.len) };
        if count <= most
            && let Some(only) = part(0)
        {
            on_host(state, &combines, &only)?;
            let (send, recv, blocks) = (only.send, only.recv, Blocks::Equal(only.len));
            let between = Call { send, recv, blocks, recv_blocks: blocks, ..*parts.call };
            // SAFETY: the caller's contract.
            unsafe { across.carry_out(state, &between) }?;
            divide(&only);
            return on_host(state, &gathers, &only);
        }
        let shares = across.shares(state, most.min(count).div_ceil(here), size);
        // SAFETY: the caller's contract; chunks are apart, and a part is the network's from `begin_chunk` to `finish_chunk`.
        let begin = |state: &mut CollectiveState, part: &Chunk| unsafe {
            across.begin_chunk(state, flow, &shares, part);
        };
        let (mut next, mut before) = (part(0), None);
        if let Some(first) = &next {
            on_host(state, &combines, first)?;
            begin(state, first);
        }
        while let Some(current) = next.take() {
            next = part(current.number + 1);
            if let Some(next) = &next {
                on_host(state, &combines, next)?;
            }
            across.await_chunk(state, &current)?;
            if let Some(next) = &next {
                begin(state, next);
            }
            if let Some(before) = &before {
                across.finish_chunk(state, before)?;
            }
            // SAFETY: as above; the contributions have come.
            unsafe { across.combine_chunk(state, (parts.call, flow), &shares, &current) };
            if let Some(before) = before.replace(current) {
                divide(&before);
                on_host(state, &gathers, &before)?;
            }
        }
        let Some(last) = before else { return Ok(()) };
        across.finish_chunk(state, &last)?;
        divide(&last);
        on_host(state, &gathers, &last)
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

    /// A call of the ranks of this host about the chunk of a part.
    fn on_host<'c>(&self, call: &Call<'c>, part: &Chunk, counts: &'c mut Vec<usize>) -> Call<'c> {
        let start = part.number * self.most * call.dtype.size();
        counts.clear();
        counts.extend((0..self.here).map(|place| self.share(part.number, place).len()));
        let blocks = Blocks::Each(counts);
        let (send, recv) = match call.operation {
            Operation::ReduceScatterV => (call.send.wrapping_add(start), part.recv),
            _ => (part.send, call.recv.wrapping_add(start)),
        };
        Call { send, recv, blocks, recv_blocks: blocks, ..*call }
    }
}
