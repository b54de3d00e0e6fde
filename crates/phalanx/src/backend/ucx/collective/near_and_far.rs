//! Long blocks between ranks of which some share a host: each goes the direct way, over UCX to another host and through memory inside one.

use super::super::UcxComm;
use super::super::hosts::Hosts;
use super::CollectiveState;
use crate::contract::{Blocks, Call, Flow, Operation};
use crate::types::error::Result;

/// The blocks of ranks that follow each other.
pub(super) fn blocks_of<'a>(blocks: Blocks<'a>, ranks: &[usize]) -> Blocks<'a> {
    match blocks {
        Blocks::Equal(count) => Blocks::Equal(count),
        Blocks::Each(counts) => Blocks::Each(&counts[ranks[0]..][..ranks.len()]),
    }
}

impl UcxComm {
    /// A gather, scatter or all_to_all. The ranks of a host follow each other.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective).
    pub(super) unsafe fn near_and_far(
        &self,
        state: &mut CollectiveState,
        hosts: &Hosts,
        call: &Call<'_>,
        flow: &Flow<'_>,
    ) -> Result<()> {
        let (everybody, mates) = (self.everybody(), hosts.of_own());
        // SAFETY: the caller's contract; places of blocks from here and from elsewhere are apart.
        unsafe {
            let send = everybody.apart(state, call, flow);
            everybody.post_blocks(state, call, flow, send, |peer| !mates.contains(&peer));
            if hosts.channel.is_none() {
                everybody.copy_own(call, flow, send);
            } else if !call.operation.is_rooted() || mates.contains(&call.root) {
                let near = Call {
                    root: if call.operation.is_rooted() { hosts.place_of(call.root) } else { 0 },
                    send: send.wrapping_add(flow.source_offset(mates[0])),
                    recv: call.recv.wrapping_add(flow.target_offset(mates[0])),
                    blocks: blocks_of(call.blocks, mates),
                    recv_blocks: blocks_of(call.recv_blocks, mates),
                    ..*call
                };
                self.on_host(state, hosts, &near)?;
            }
        }
        everybody.finish_step(state, 0)
    }

    /// A long all_gather of hosts with as many ranks each: the ranks in one place exchange their blocks over UCX, those of a host what each
    /// has got. The ranks of a host follow each other.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective).
    pub(super) unsafe fn gather_by_place(
        &self,
        state: &mut CollectiveState,
        hosts: &Hosts,
        call: &Call<'_>,
        flow: &Flow<'_>,
    ) -> Result<()> {
        let (everybody, here) = (self.everybody(), hosts.of_own().len());
        let at = |rank: usize| call.recv.wrapping_add(flow.target_offset(rank));
        let of_host = |host: usize, send| {
            let recv = at(host * here);
            Call { operation: Operation::AllGather, send, recv, ..*call }
        };
        // SAFETY: the caller's contract; the blocks of all ranks are apart.
        unsafe {
            everybody.post_blocks(state, call, flow, call.send, |peer| hosts.across.contains(&peer));
            // What the host has itself is exchanged meanwhile.
            self.on_host(state, hosts, &of_host(hosts.own, call.send))?;
            everybody.finish_step(state, 0)?;
            for host in (0..hosts.across.len()).filter(|host| *host != hosts.own) {
                self.on_host(state, hosts, &of_host(host, at(hosts.across[host]).cast_const()))?;
            }
        }
        Ok(())
    }
}
