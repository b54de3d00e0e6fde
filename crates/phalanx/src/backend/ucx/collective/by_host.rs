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
        let mut members = std::mem::take(&mut state.leaders);
        let root = if call.operation.is_rooted() { Some(call.root) } else { None };
        let root = hosts.leaders(root, &mut members);
        let own = members[hosts.own];
        let (place, is_one) = (hosts.place_of(own), own == self.endpoint.rank);
        let group = Group { comm: self, members: &members, rank: hosts.own };
        let leaders = Leaders { hosts, group, place, is_one, root };
        // SAFETY: the caller's contract.
        let done = unsafe {
            match call.operation {
                Operation::Broadcast => leaders.broadcast(state, call),
                Operation::Reduce | Operation::AllReduce => leaders.reduce(state, call),
                Operation::AllGather | Operation::AllGatherV => leaders.gather_everywhere(state, call, flow),
                Operation::Gather | Operation::GatherV => leaders.gather(state, call),
                Operation::Scatter | Operation::ScatterV => leaders.scatter(state, call),
                Operation::AllToAll => leaders.exchange(state, call),
                _ => leaders.barrier(state),
            }
        };
        state.leaders = members;
        done
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

/// The leaders of the hosts in a call, as a rank sees them. Each step gets memory of the call, or of this rank.
pub(super) struct Leaders<'a> {
    pub hosts: &'a Hosts,
    /// All of them, over UCX.
    pub group: Group<'a>,
    /// The place of this host's leader on it.
    pub place: usize,
    /// Whether this rank is one.
    pub is_one: bool,
    /// The root's place among them.
    pub root: usize,
}

impl Leaders<'_> {
    pub fn is_root(&self, call: &Call<'_>) -> bool {
        self.group.comm.endpoint.rank == call.root
    }

    /// # Safety
    /// As for [`UcxComm::on_host`].
    pub unsafe fn on_host(&self, state: &CollectiveState, call: &Call<'_>) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.group.comm.on_host(state, self.hosts, call) }
    }

    /// # Safety
    /// As for [`UcxComm::by_host`].
    unsafe fn barrier(&self, state: &mut CollectiveState) -> Result<()> {
        let call = Call::empty(Operation::Barrier);
        // SAFETY: no memory.
        unsafe {
            self.on_host(state, &call)?;
            if self.is_one {
                self.group.carry_out(state, &call)?;
            }
            self.on_host(state, &call)
        }
    }

    /// The leaders pass on what each gets. Between two hosts a long broadcast goes in pieces: the next one is under way meanwhile.
    ///
    /// # Safety
    /// As for [`UcxComm::by_host`].
    unsafe fn broadcast(&self, state: &mut CollectiveState, call: &Call<'_>) -> Result<()> {
        let (count, size, is_root) = (call.blocks.longest(), call.dtype.size(), self.is_root(call));
        let send = if is_root { call.send } else { call.recv };
        let most = if self.group.ranks() == 2 { PIECES_TOGETHER * piece(size) } else { count };
        if count <= most {
            // SAFETY: the caller's contract.
            return unsafe {
                if self.is_one {
                    self.group.carry_out(state, &Call { root: self.root, ..*call })?;
                }
                self.on_host(state, &Call { root: self.place, send, ..*call })
            };
        }
        let bytes = |number: usize| most.min(count - number * most) * size;
        let at = |number: usize| number * most * size;
        let pieces = count.div_ceil(most);
        // SAFETY: the caller's contract; the pieces are apart.
        let post = |state: &mut CollectiveState, number: usize| unsafe {
            if !self.is_one || number >= pieces {
                return;
            }
            let (step, other) = (number as u64, 1 - self.group.rank);
            state.begin_step(step);
            match is_root {
                true => self.group.send_part(state, step, other, (send.add(at(number)), bytes(number))),
                false => {
                    self.group.receive_part(state, step, other, (call.recv.add(at(number)), bytes(number)))
                }
            }
        };
        let await_piece = |state: &mut CollectiveState, number: usize| match self.is_one {
            true => self.group.finish_step(state, number as u64),
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
            let part = Call { root: self.place, send, recv, blocks, recv_blocks: blocks, ..*call };
            // SAFETY: as above; this rank's own piece, which is sent, is only read.
            unsafe {
                self.on_host(state, &part)?;
                if is_root && self.hosts.channel.is_none() && send != recv.cast_const() {
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
    /// As for [`UcxComm::by_host`].
    unsafe fn reduce(&self, state: &mut CollectiveState, call: &Call<'_>) -> Result<()> {
        let bytes = call.blocks.longest() * call.dtype.size();
        let is_reader = call.operation == Operation::AllReduce || self.is_root(call);
        let sum = match is_reader || !self.is_one {
            true => call.recv,
            false => room(&mut state.of_host, bytes),
        };
        let reduction = summed(call.reduction);
        let on_host = Call { operation: Operation::Reduce, root: self.place, recv: sum, reduction, ..*call };
        // SAFETY: the caller's contract; the sum has room for a block on the leader, where alone it is written.
        unsafe {
            self.on_host(state, &on_host)?;
            if self.is_one {
                let send = if self.hosts.channel.is_some() { sum.cast_const() } else { call.send };
                self.group.carry_out(state, &Call { root: self.root, send, reduction, ..*call })?;
                if is_reader {
                    self.group.comm.divide(call, call.recv, call.blocks.longest());
                }
            }
            if call.operation == Operation::Reduce {
                return Ok(());
            }
            let result = Call {
                operation: Operation::Broadcast,
                root: self.place,
                send: call.recv,
                reduction,
                ..*call
            };
            self.on_host(state, &result)
        }
    }

    /// Each host's ranks gather their blocks, the leaders exchange them, and the others get what their leader got.
    ///
    /// # Safety
    /// As for [`UcxComm::by_host`].
    unsafe fn gather_everywhere(
        &self,
        state: &mut CollectiveState,
        call: &Call<'_>,
        flow: &Flow<'_>,
    ) -> Result<()> {
        let mates = self.hosts.of_own();
        let (first, behind) = (mates[0], mates[0] + mates.len());
        let at = |rank: usize| call.recv.wrapping_add(flow.target_offset(rank));
        // SAFETY: the caller's contract; the blocks of a host lie side by side.
        unsafe {
            if self.hosts.channel.is_none() {
                self.group.comm.everybody().copy_own(call, flow, call.send);
            }
            let blocks = blocks_of(call.blocks, mates);
            self.on_host(state, &Call { recv: at(first), blocks, recv_blocks: blocks, ..*call })?;
            if self.is_one {
                state.with_counts(self.hosts.counts(call.blocks), |state, counts| {
                    let (operation, blocks) = (Operation::AllGatherV, Blocks::Each(counts));
                    let exchange = Call { operation, send: at(first), blocks, recv_blocks: blocks, ..*call };
                    self.group.carry_out(state, &exchange)
                })?;
            }
            for (from, to) in [(0, first), (behind, self.group.comm.endpoint.ranks)] {
                if from < to {
                    let blocks = Blocks::Equal(call.blocks.offset(to) - call.blocks.offset(from));
                    let (send, recv) = (at(from).cast_const(), at(from));
                    let operation = Operation::Broadcast;
                    let rest = Call { operation, root: 0, send, recv, blocks, recv_blocks: blocks, ..*call };
                    self.on_host(state, &rest)?;
                }
            }
        }
        Ok(())
    }
}
