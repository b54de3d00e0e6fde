//! Collectives of ranks of which some share a host: the host backend works inside, UCX between the hosts. A host's contributions are
//! combined first; all_reduces and reduce_scatters that go so are those for which that is allowed ([`choose`](super::super::choose)).

use super::super::UcxComm;
use super::super::choose::piece;
use super::super::hosts::Hosts;
use super::super::tunables::PIECES_TOGETHER;
use super::near_and_far::blocks_of;
use super::{CollectiveState, Group, room};
use crate::contract::{Blocks, Call, Flow, Operation};
use crate::reduce;
use crate::types::error::Result;
use crate::types::op::{RawReduction, ReductionCode};

/// The sum whose quotient is the average.
pub(super) fn summed(reduction: RawReduction) -> RawReduction {
    match reduction.code {
        ReductionCode::Avg => RawReduction { code: ReductionCode::Sum, factor: 0 },
        _ => reduction,
    }
}

impl UcxComm {
    /// Carries out a call of the ranks of this host; nothing, if there is one.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective).
    pub(super) unsafe fn on_host(
        &self,
        state: &CollectiveState,
        hosts: &Hosts,
        call: &Call<'_>,
    ) -> Result<()> {
        let Some(channel) = &hosts.channel else { return Ok(()) };
        // SAFETY: the caller's contract.
        let done = unsafe {
            channel.set_history(state.history);
            channel.collective(call)
        };
        done.map_err(|error| self.failed_on_host(hosts, error, Some(state.sequence)))
    }

    /// By a leader of each host: the root on its own, the first on the others.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective).
    pub(super) unsafe fn by_host(
        &self,
        state: &mut CollectiveState,
        hosts: &Hosts,
        call: &Call<'_>,
        flow: &Flow<'_>,
    ) -> Result<()> {
        let mut leaders = std::mem::take(&mut state.leaders);
        let root = if call.operation.is_rooted() { Some(call.root) } else { None };
        let roots_host = hosts.leaders(root, &mut leaders);
        let group = Group { comm: self, members: &leaders, rank: hosts.own };
        let leader = leaders[hosts.own];
        // The leader's place on this host.
        let place = hosts.place_of(leader);
        let is_leader = leader == self.endpoint.rank;
        // SAFETY: the caller's contract; each step gets memory of the call, or of this rank.
        let done = unsafe {
            match call.operation {
                Operation::Broadcast => {
                    self.broadcast_by_host(state, hosts, &group, (place, is_leader, roots_host), call)
                }
                Operation::Reduce | Operation::AllReduce => {
                    self.reduce_by_host(state, hosts, &group, (place, is_leader, roots_host), call)
                }
                Operation::AllGather | Operation::AllGatherV => {
                    self.gather_by_host(state, hosts, &group, is_leader, call, flow)
                }
                Operation::Gather | Operation::GatherV => {
                    self.gather_at_root(state, hosts, &group, (place, is_leader, roots_host), call)
                }
                Operation::Scatter | Operation::ScatterV => {
                    self.scatter_from_root(state, hosts, &group, (place, is_leader, roots_host), call)
                }
                Operation::AllToAll => self.exchange_by_host(state, hosts, &group, is_leader, call),
                _ => (|| {
                    // A barrier.
                    let call = Call::empty(Operation::Barrier);
                    self.on_host(state, hosts, &call)?;
                    if is_leader {
                        group.carry_out(state, &call)?;
                    }
                    self.on_host(state, hosts, &call)
                })(),
            }
        };
        state.leaders = leaders;
        done
    }

    /// The leaders pass on what each gets. Between two hosts a long broadcast goes in pieces: the next one is under way meanwhile.
    ///
    /// # Safety
    /// As for `by_host`.
    unsafe fn broadcast_by_host(
        &self,
        state: &mut CollectiveState,
        hosts: &Hosts,
        group: &Group<'_>,
        (place, is_leader, root): (usize, bool, usize),
        call: &Call<'_>,
    ) -> Result<()> {
        let (count, size, is_root) =
            (call.blocks.longest(), call.dtype.size(), self.endpoint.rank == call.root);
        let send = if is_root { call.send } else { call.recv };
        let most = if group.ranks() == 2 { PIECES_TOGETHER * piece(size) } else { count };
        if count <= most {
            // SAFETY: the caller's contract.
            return unsafe {
                if is_leader {
                    group.carry_out(state, &Call { root, ..*call })?;
                }
                self.on_host(state, hosts, &Call { root: place, send, ..*call })
            };
        }
        let bytes = |number: usize| most.min(count - number * most) * size;
        let at = |number: usize| number * most * size;
        let pieces = count.div_ceil(most);
        // SAFETY: the caller's contract; the pieces are apart.
        let post = |state: &mut CollectiveState, number: usize| unsafe {
            if !is_leader || number >= pieces {
                return;
            }
            let (step, other) = (number as u64, 1 - group.rank);
            state.begin_step(step);
            match is_root {
                true => group.send_part(state, step, other, (send.add(at(number)), bytes(number))),
                false => group.receive_part(state, step, other, (call.recv.add(at(number)), bytes(number))),
            }
        };
        let await_piece = |state: &mut CollectiveState, number: usize| match is_leader {
            true => group.finish_step(state, number as u64),
            false => Ok(()),
        };
        post(state, 0);
        for number in 0..pieces {
            post(state, number + 1);
            if !is_root {
                await_piece(state, number)?;
            }
            let blocks = Blocks::Equal(bytes(number) / size);
            let (send, recv) = (send.wrapping_add(at(number)), call.recv.wrapping_add(at(number)));
            let part = Call { root: place, send, recv, blocks, recv_blocks: blocks, ..*call };
            // SAFETY: as above; this rank's own piece, which is sent, is only read.
            unsafe {
                self.on_host(state, hosts, &part)?;
                if is_root && hosts.channel.is_none() && send != recv.cast_const() {
                    reduce::copy(recv, send, bytes(number), false);
                }
            }
            if is_root {
                await_piece(state, number)?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// As for `by_host`.
    unsafe fn reduce_by_host(
        &self,
        state: &mut CollectiveState,
        hosts: &Hosts,
        group: &Group<'_>,
        (place, is_leader, root): (usize, bool, usize),
        call: &Call<'_>,
    ) -> Result<()> {
        let bytes = call.blocks.longest() * call.dtype.size();
        let is_reader = call.operation == Operation::AllReduce || call.root == self.endpoint.rank;
        let sum = match is_reader || !is_leader {
            true => call.recv,
            false => room(&mut state.of_host, bytes),
        };
        let reduction = summed(call.reduction);
        let on_host = Call { operation: Operation::Reduce, root: place, recv: sum, reduction, ..*call };
        // SAFETY: the caller's contract; the sum has room for a block on the leader, where alone it is written.
        unsafe {
            self.on_host(state, hosts, &on_host)?;
            if is_leader {
                let send = if hosts.channel.is_some() { sum.cast_const() } else { call.send };
                group.carry_out(state, &Call { root, send, reduction, ..*call })?;
                if is_reader {
                    self.divide(call, call.recv, call.blocks.longest());
                }
            }
            if call.operation == Operation::Reduce {
                return Ok(());
            }
            let result =
                Call { operation: Operation::Broadcast, root: place, send: call.recv, reduction, ..*call };
            self.on_host(state, hosts, &result)
        }
    }

    /// Each host's ranks gather their blocks, the leaders exchange them, and the others get what their leader got.
    ///
    /// # Safety
    /// As for `by_host`.
    unsafe fn gather_by_host(
        &self,
        state: &mut CollectiveState,
        hosts: &Hosts,
        group: &Group<'_>,
        is_leader: bool,
        call: &Call<'_>,
        flow: &Flow<'_>,
    ) -> Result<()> {
        let mates = hosts.of_own();
        let (first, behind) = (mates[0], mates[0] + mates.len());
        let at = |rank: usize| call.recv.wrapping_add(flow.target_offset(rank));
        // SAFETY: the caller's contract; the blocks of a host lie side by side.
        unsafe {
            if hosts.channel.is_none() {
                group.comm.everybody().copy_own(call, flow, call.send);
            }
            let blocks = blocks_of(call.blocks, mates);
            self.on_host(state, hosts, &Call { recv: at(first), blocks, recv_blocks: blocks, ..*call })?;
            if is_leader {
                let counts = self.counts_by_host(state, hosts, call.blocks);
                let blocks = Blocks::Each(&counts);
                let operation = Operation::AllGatherV;
                let exchange = Call { operation, send: at(first), blocks, recv_blocks: blocks, ..*call };
                let done = group.carry_out(state, &exchange);
                state.counts = counts;
                done?;
            }
            for (from, to) in [(0, first), (behind, self.endpoint.ranks)] {
                if from < to {
                    let blocks = Blocks::Equal(call.blocks.offset(to) - call.blocks.offset(from));
                    let (send, recv) = (at(from).cast_const(), at(from));
                    let operation = Operation::Broadcast;
                    let rest = Call { operation, root: 0, send, recv, blocks, recv_blocks: blocks, ..*call };
                    self.on_host(state, hosts, &rest)?;
                }
            }
        }
        Ok(())
    }

    /// Makes averages of sums.
    ///
    /// # Safety
    /// So many elements are there, and nothing else uses them.
    pub(super) unsafe fn divide(&self, call: &Call<'_>, sums: *mut u8, count: usize) {
        if call.reduction.code == ReductionCode::Avg {
            // SAFETY: the caller's contract.
            unsafe { reduce::divide(call.dtype, sums, count, self.endpoint.ranks) };
        }
    }
}
