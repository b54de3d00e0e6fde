//! Collectives of ranks of which some share a host: the host backend works inside, UCX between the hosts. A host's contributions are
//! combined first; all_reduces and reduce_scatters that go so are those for which that is allowed ([`choose`](super::super::choose)).

use super::super::UcxComm;
use super::super::hosts::Hosts;
use super::{CollectiveState, Group, room};
use crate::contract::{Blocks, Call, Flow, Operation};
use crate::reduce;
use crate::types::error::Result;
use crate::types::op::{RawReduction, ReductionCode};

/// The sum whose quotient is the average.
fn summed(reduction: RawReduction) -> RawReduction {
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
                Operation::Broadcast => (|| {
                    if is_leader {
                        group.carry_out(state, &Call { root: roots_host, ..*call })?;
                    }
                    let send = if self.endpoint.rank == call.root { call.send } else { call.recv };
                    self.on_host(state, hosts, &Call { root: place, send, ..*call })
                })(),
                Operation::Reduce | Operation::AllReduce => {
                    self.reduce_by_host(state, hosts, &group, (place, is_leader, roots_host), call)
                }
                Operation::AllGather => self.gather_by_host(state, hosts, &group, is_leader, call, flow),
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
        let count = call.blocks.longest();
        let ranks = hosts.of_own();
        let (first, behind) = (ranks[0], ranks[0] + ranks.len());
        let at = |rank: usize| call.recv.wrapping_add(flow.target_offset(rank));
        // SAFETY: the caller's contract; the blocks of a host lie side by side.
        unsafe {
            if hosts.channel.is_none() {
                group.comm.everybody().copy_own(call, flow, call.send);
            }
            self.on_host(state, hosts, &Call { recv: at(first), ..*call })?;
            if is_leader {
                let mut counts = std::mem::take(&mut state.counts);
                counts.clear();
                counts.extend(hosts.sizes().map(|ranks| ranks * count));
                let blocks = Blocks::Each(&counts);
                let operation = Operation::AllGatherV;
                let exchange = Call { operation, send: at(first), blocks, recv_blocks: blocks, ..*call };
                let done = group.carry_out(state, &exchange);
                state.counts = counts;
                done?;
            }
            for (from, to) in [(0, first), (behind, self.endpoint.ranks)] {
                if from < to {
                    let blocks = Blocks::Equal((to - from) * count);
                    let (send, recv) = (at(from).cast_const(), at(from));
                    let operation = Operation::Broadcast;
                    let rest = Call { operation, root: 0, send, recv, blocks, recv_blocks: blocks, ..*call };
                    self.on_host(state, hosts, &rest)?;
                }
            }
        }
        Ok(())
    }

    /// By all ranks of each host, which have as many: those in the same place combine a part over UCX.
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
        let (across, here) =
            (Group { comm: self, members: &hosts.across, rank: hosts.own }, hosts.of_own().len());
        let (count, place, reduction) = (call.blocks.longest(), hosts.place, summed(call.reduction));
        if call.operation == Operation::ReduceScatter {
            let own = room(&mut state.of_host, hosts.across.len() * count * flow.size);
            // SAFETY: the caller's contract; there is room for a block of each host.
            unsafe {
                for host in 0..hosts.across.len() {
                    let send = call.send.wrapping_add(host * here * count * flow.size);
                    let recv = own.wrapping_add(host * count * flow.size);
                    self.on_host(state, hosts, &Call { send, recv, reduction, ..*call })?;
                }
                across.carry_out(state, &Call { send: own, reduction, ..*call })?;
                self.divide(call, call.recv, count);
            }
            return Ok(());
        }
        let mut counts = std::mem::take(&mut state.counts);
        counts.clear();
        counts.extend((0..here).map(|part| count * (part + 1) / here - count * part / here));
        let (blocks, len) = (Blocks::Each(&counts), counts[place]);
        let part = call.recv.wrapping_add(blocks.offset(place) * flow.size);
        let call = Call { blocks, recv_blocks: blocks, ..*call };
        // SAFETY: the caller's contract; the parts lie in `send` and `recv`, and are apart.
        let done = (|| unsafe {
            let scatter = Call { operation: Operation::ReduceScatterV, recv: part, reduction, ..call };
            self.on_host(state, hosts, &scatter)?;
            let (send, blocks) = (part.cast_const(), Blocks::Equal(len));
            across.carry_out(
                state,
                &Call { send, recv: part, reduction, blocks, recv_blocks: blocks, ..call },
            )?;
            self.divide(&call, part, len);
            self.on_host(state, hosts, &Call { operation: Operation::AllGatherV, send, ..call })
        })();
        state.counts = counts;
        done
    }

    /// Makes averages of sums.
    ///
    /// # Safety
    /// So many elements are there, and nothing else uses them.
    unsafe fn divide(&self, call: &Call<'_>, sums: *mut u8, count: usize) {
        if call.reduction.code == ReductionCode::Avg {
            // SAFETY: the caller's contract.
            unsafe { reduce::divide(call.dtype, sums, count, self.endpoint.ranks) };
        }
    }
}
