//! Gathers, scatters and short all_to_alls with one message between each pair of hosts. The ranks of a host follow each other, so that its
//! blocks lie side by side; a leader of each host has them all.

use super::by_host::Leaders;
use super::near_and_far::blocks_of;
use super::{CollectiveState, room};
use crate::contract::{Blocks, Call, Operation};
use crate::reduce;
use crate::types::error::Result;

impl Leaders<'_> {
    /// A gather: the ranks of each host at its leader, and the leaders at the root, which is one of them.
    ///
    /// # Safety
    /// As for `UcxComm::by_host`.
    pub unsafe fn gather(&self, state: &mut CollectiveState, call: &Call<'_>) -> Result<()> {
        let (mates, size) = (self.hosts.of_own(), call.dtype.size());
        state.with_counts(self.hosts.counts(call.blocks), |state, counts| {
            let recv = match (self.is_root(call), self.is_one) {
                (true, _) => call.recv.wrapping_add(call.blocks.offset(mates[0]) * size),
                (false, true) => room(&mut state.of_host, counts[self.hosts.own] * size),
                (false, false) => call.recv,
            };
            let blocks = blocks_of(call.blocks, mates);
            let on_host = Call { root: self.place, recv, blocks, recv_blocks: blocks, ..*call };
            let send = if self.hosts.channel.is_some() { recv.cast_const() } else { call.send };
            let (operation, root, blocks) = (Operation::GatherV, self.root, Blocks::Each(counts));
            let between = Call { operation, root, send, blocks, recv_blocks: blocks, ..*call };
            // SAFETY: the caller's contract; a leader has room for the blocks of its host, the root in their place.
            unsafe {
                self.on_host(state, &on_host)?;
                if self.is_one { self.group.carry_out(state, &between) } else { Ok(()) }
            }
        })
    }

    /// A scatter: the root to the leaders, and each to the ranks of its host.
    ///
    /// # Safety
    /// As for `UcxComm::by_host`.
    pub unsafe fn scatter(&self, state: &mut CollectiveState, call: &Call<'_>) -> Result<()> {
        let (mates, size) = (self.hosts.of_own(), call.dtype.size());
        let is_alone = self.hosts.channel.is_none();
        state.with_counts(self.hosts.counts(call.blocks), |state, counts| {
            let of_host = match (self.is_root(call), self.is_one) {
                _ if is_alone => call.recv,
                // Its own block is in its place.
                (true, _) => call.send.wrapping_add(call.blocks.offset(mates[0]) * size).cast_mut(),
                (false, true) => room(&mut state.of_host, counts[self.hosts.own] * size),
                (false, false) => std::ptr::null_mut(),
            };
            let (operation, root, blocks) = (Operation::ScatterV, self.root, Blocks::Each(counts));
            let between = Call { operation, root, recv: of_host, blocks, recv_blocks: blocks, ..*call };
            let blocks = blocks_of(call.blocks, mates);
            let on_host = Call { root: self.place, send: of_host, blocks, recv_blocks: blocks, ..*call };
            // SAFETY: the caller's contract; a leader has room for the blocks of its host, the root has them.
            unsafe {
                if self.is_one {
                    self.group.carry_out(state, &between)?;
                }
                self.on_host(state, &on_host)
            }
        })
    }

    /// A short all_to_all: the leaders gather what their ranks give, exchange it, and scatter it.
    ///
    /// # Safety
    /// As for `UcxComm::by_host`.
    pub unsafe fn exchange(&self, state: &mut CollectiveState, call: &Call<'_>) -> Result<()> {
        let (hosts, here, ranks) = (self.hosts, self.hosts.of_own().len(), self.group.comm.endpoint.ranks);
        let (block, all, size) = (call.blocks.longest(), ranks * call.blocks.longest(), call.dtype.size());
        let bytes = here * all * size;
        // In turn by sender, and by host.
        let (by_rank, by_host) = match self.is_one {
            true => {
                let both = room(&mut state.of_host, 2 * bytes);
                (both, both.wrapping_add(bytes))
            }
            false => (std::ptr::null_mut(), std::ptr::null_mut()),
        };
        let own = Call { blocks: Blocks::Equal(all), recv_blocks: Blocks::Equal(all), root: 0, ..*call };
        let counts = hosts.ranges().map(|there| here * there.len() * block);
        state.with_counts(counts, |state, counts| {
            let (operation, blocks) = (Operation::AllToAllV, Blocks::Each(counts));
            let between = Call { operation, blocks, recv_blocks: blocks, ..*call };
            // SAFETY: the caller's contract; a leader has room for all blocks of its host twice.
            unsafe {
                if hosts.channel.is_none() {
                    // The blocks are in the order of the hosts already.
                    return self.group.carry_out(state, &between);
                }
                self.on_host(state, &Call { operation: Operation::Gather, recv: by_rank, ..own })?;
                if self.is_one {
                    // Each rank's blocks for a host go behind those of the ranks before it.
                    let mut to = by_host;
                    for there in hosts.ranges() {
                        for rank in 0..here {
                            let from = by_rank.add((rank * all + there.start * block) * size);
                            reduce::copy(to, from, there.len() * block * size, false);
                            to = to.add(there.len() * block * size);
                        }
                    }
                    self.group.carry_out(state, &Call { send: by_host, recv: by_rank, ..between })?;
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
                self.on_host(state, &Call { operation: Operation::Scatter, send: by_host, ..own })
            }
        })
    }
}
