//! Gathers, scatters and short all_to_alls with one message between each pair of hosts. The ranks of a host follow each other, so that its
//! blocks lie side by side; a leader of each host has them all.

use super::super::UcxComm;
use super::super::hosts::Hosts;
use super::near_and_far::blocks_of;
use super::{CollectiveState, Group, room};
use crate::contract::{Blocks, Call, Operation};
use crate::reduce;
use crate::types::error::Result;

impl UcxComm {
    /// The elements of each host's blocks, in `state.counts`: the caller gives it back.
    pub(super) fn counts_by_host(
        &self,
        state: &mut CollectiveState,
        hosts: &Hosts,
        blocks: Blocks<'_>,
    ) -> Vec<usize> {
        let mut counts = std::mem::take(&mut state.counts);
        counts.clear();
        counts.extend(hosts.ranges().map(|ranks| blocks.offset(ranks.end) - blocks.offset(ranks.start)));
        counts
    }

    /// A gather: the ranks of each host at its leader, and the leaders at the root, which is one of them.
    ///
    /// # Safety
    /// As for `by_host`.
    pub(super) unsafe fn gather_at_root(
        &self,
        state: &mut CollectiveState,
        hosts: &Hosts,
        group: &Group<'_>,
        (place, is_leader, root): (usize, bool, usize),
        call: &Call<'_>,
    ) -> Result<()> {
        let (mates, size) = (hosts.of_own(), call.dtype.size());
        let counts = self.counts_by_host(state, hosts, call.blocks);
        let recv = match (self.endpoint.rank == call.root, is_leader) {
            (true, _) => call.recv.wrapping_add(call.blocks.offset(mates[0]) * size),
            (false, true) => room(&mut state.of_host, counts[hosts.own] * size),
            (false, false) => call.recv,
        };
        let blocks = blocks_of(call.blocks, mates);
        let on_host = Call { root: place, recv, blocks, recv_blocks: blocks, ..*call };
        let send = if hosts.channel.is_some() { recv.cast_const() } else { call.send };
        let blocks = Blocks::Each(&counts);
        let between =
            Call { operation: Operation::GatherV, root, send, blocks, recv_blocks: blocks, ..*call };
        // SAFETY: the caller's contract; a leader has room for the blocks of its host, the root in their place.
        let done = (|| unsafe {
            self.on_host(state, hosts, &on_host)?;
            if is_leader { group.carry_out(state, &between) } else { Ok(()) }
        })();
        state.counts = counts;
        done
    }

    /// A scatter: the root to the leaders, and each to the ranks of its host.
    ///
    /// # Safety
    /// As for `by_host`.
    pub(super) unsafe fn scatter_from_root(
        &self,
        state: &mut CollectiveState,
        hosts: &Hosts,
        group: &Group<'_>,
        (place, is_leader, root): (usize, bool, usize),
        call: &Call<'_>,
    ) -> Result<()> {
        let (mates, size) = (hosts.of_own(), call.dtype.size());
        let counts = self.counts_by_host(state, hosts, call.blocks);
        let is_alone = hosts.channel.is_none();
        let of_host = match (self.endpoint.rank == call.root, is_leader) {
            _ if is_alone => call.recv,
            // Its own block is in its place.
            (true, _) => call.send.wrapping_add(call.blocks.offset(mates[0]) * size).cast_mut(),
            (false, true) => room(&mut state.of_host, counts[hosts.own] * size),
            (false, false) => std::ptr::null_mut(),
        };
        let blocks = Blocks::Each(&counts);
        let between = Call {
            operation: Operation::ScatterV,
            root,
            recv: of_host,
            blocks,
            recv_blocks: blocks,
            ..*call
        };
        let blocks = blocks_of(call.blocks, mates);
        let on_host = Call { root: place, send: of_host, blocks, recv_blocks: blocks, ..*call };
        // SAFETY: the caller's contract; a leader has room for the blocks of its host, the root has them.
        let done = (|| unsafe {
            if is_leader {
                group.carry_out(state, &between)?;
            }
            self.on_host(state, hosts, &on_host)
        })();
        state.counts = counts;
        done
    }

    /// A short all_to_all: the leaders gather what their ranks give, exchange it, and scatter it.
    ///
    /// # Safety
    /// As for `by_host`.
    pub(super) unsafe fn exchange_by_host(
        &self,
        state: &mut CollectiveState,
        hosts: &Hosts,
        group: &Group<'_>,
        is_leader: bool,
        call: &Call<'_>,
    ) -> Result<()> {
        let (here, ranks) = (hosts.of_own().len(), self.endpoint.ranks);
        let (block, all) = (call.blocks.longest(), ranks * call.blocks.longest());
        let bytes = here * all * call.dtype.size();
        // In turn by sender, and by host.
        let (by_rank, by_host) = match is_leader {
            true => {
                let both = room(&mut state.of_host, 2 * bytes);
                (both, both.wrapping_add(bytes))
            }
            false => (std::ptr::null_mut(), std::ptr::null_mut()),
        };
        let mut counts = std::mem::take(&mut state.counts);
        counts.clear();
        counts.extend(hosts.ranges().map(|there| here * there.len() * block));
        let size = call.dtype.size();
        let own = Call { blocks: Blocks::Equal(all), recv_blocks: Blocks::Equal(all), root: 0, ..*call };
        let blocks = Blocks::Each(&counts);
        let between = Call { operation: Operation::AllToAllV, blocks, recv_blocks: blocks, ..*call };
        // SAFETY: the caller's contract; a leader has room for all blocks of its host twice.
        let done = (|| unsafe {
            if hosts.channel.is_none() {
                // The blocks are in the order of the hosts already.
                return group.carry_out(state, &between);
            }
            self.on_host(state, hosts, &Call { operation: Operation::Gather, recv: by_rank, ..own })?;
            if is_leader {
                // Each rank's blocks for a host go behind those of the ranks before it.
                let mut to = by_host;
                for there in hosts.ranges() {
                    for rank in 0..here {
                        let from = by_rank.add((rank * all + there.start * block) * size);
                        reduce::copy(to, from, there.len() * block * size, false);
                        to = to.add(there.len() * block * size);
                    }
                }
                group.carry_out(state, &Call { send: by_host, recv: by_rank, ..between })?;
                // And back: what each rank of a host sends to the ranks here.
                let mut from = by_rank.cast_const();
                for sender in 0..ranks {
                    for rank in 0..here {
                        let to = by_host.add((rank * all + sender * block) * size);
                        reduce::copy(to, from, block * size, false);
                        from = from.add(block * size);
                    }
                }
            }
            let operation = Operation::Scatter;
            self.on_host(state, hosts, &Call { operation, send: by_host, ..own })
        })();
        state.counts = counts;
        done
    }
}
