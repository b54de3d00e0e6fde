//! The functions that enqueue collectives and messages.

use super::operate::{To, buffers, operate, operate_with};
use crate::base::call::{Answer, answered};
use crate::base::handles::Handle;
use crate::base::pointers::In;
use crate::nccl::communicator::{Need, enter};
use crate::nccl::group::{self, nccl};
use crate::nccl::operation::{Arguments, Kind};
use crate::nccl::types::data_type;
use std::ffi::c_int;

nccl! {
    fn ncclAllReduce(send: u64, receive: u64, count: usize, dtype: c_int, op: c_int, comm: Handle, stream: Handle) {
        operate_with(FUNCTION, To { comm, stream }, Kind::AllReduce, buffers(send, receive, count, dtype), Some(op))
    }

    fn ncclReduce(
        send: u64, receive: u64, count: usize, dtype: c_int, op: c_int, root: c_int, comm: Handle, stream: Handle,
    ) {
        let kind = Kind::Reduce { root: root as u32 };
        operate_with(FUNCTION, To { comm, stream }, kind, buffers(send, receive, count, dtype), Some(op))
    }

    fn ncclReduceScatter(send: u64, receive: u64, count: usize, dtype: c_int, op: c_int, comm: Handle, stream: Handle) {
        operate_with(FUNCTION, To { comm, stream }, Kind::ReduceScatter, buffers(send, receive, count, dtype), Some(op))
    }

    fn ncclBroadcast(send: u64, receive: u64, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle) {
        let kind = Kind::Broadcast { root: root as u32 };
        operate(FUNCTION, To { comm, stream }, kind, buffers(send, receive, count, dtype))
    }

    fn ncclBcast(buffer: u64, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle) {
        let kind = Kind::Broadcast { root: root as u32 };
        operate(FUNCTION, To { comm, stream }, kind, buffers(buffer, buffer, count, dtype))
    }

    fn ncclAllGather(send: u64, receive: u64, count: usize, dtype: c_int, comm: Handle, stream: Handle) {
        operate(FUNCTION, To { comm, stream }, Kind::AllGather, buffers(send, receive, count, dtype))
    }

    fn ncclAlltoAll(send: u64, receive: u64, count: usize, dtype: c_int, comm: Handle, stream: Handle) {
        operate(FUNCTION, To { comm, stream }, Kind::AllToAll, buffers(send, receive, count, dtype))
    }

    // RCCL's older spelling.
    fn ncclAllToAll(send: u64, receive: u64, count: usize, dtype: c_int, comm: Handle, stream: Handle) {
        operate(FUNCTION, To { comm, stream }, Kind::AllToAll, buffers(send, receive, count, dtype))
    }

    fn ncclAlltoAllv(
        send: u64, send_counts: In<usize>, send_offsets: In<usize>,
        receive: u64, receive_counts: In<usize>, receive_offsets: In<usize>,
        dtype: c_int, comm: Handle, stream: Handle,
    ) {
        let sides = [(send, send_counts, send_offsets), (receive, receive_counts, receive_offsets)];
        all_to_all_v(FUNCTION, To { comm, stream }, sides, dtype)
    }

    // RCCL's older spelling.
    fn ncclAllToAllv(
        send: u64, send_counts: In<usize>, send_offsets: In<usize>,
        receive: u64, receive_counts: In<usize>, receive_offsets: In<usize>,
        dtype: c_int, comm: Handle, stream: Handle,
    ) {
        let sides = [(send, send_counts, send_offsets), (receive, receive_counts, receive_offsets)];
        all_to_all_v(FUNCTION, To { comm, stream }, sides, dtype)
    }

    fn ncclAllReduceWithBias(
        send: u64, receive: u64, count: usize, dtype: c_int, op: c_int, comm: Handle, stream: Handle, bias: u64,
    ) {
        let arguments = Arguments { bias, ..buffers(send, receive, count, dtype) };
        operate_with(FUNCTION, To { comm, stream }, Kind::AllReduce, arguments, Some(op))
    }

    fn ncclGather(send: u64, receive: u64, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle) {
        let kind = Kind::Gather { root: root as u32 };
        operate(FUNCTION, To { comm, stream }, kind, buffers(send, receive, count, dtype))
    }

    fn ncclScatter(send: u64, receive: u64, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle) {
        let kind = Kind::Scatter { root: root as u32 };
        operate(FUNCTION, To { comm, stream }, kind, buffers(send, receive, count, dtype))
    }

    fn ncclSend(send: u64, count: usize, dtype: c_int, peer: c_int, comm: Handle, stream: Handle) {
        operate(FUNCTION, To { comm, stream }, Kind::Send { peer: peer as u32 }, buffers(send, 0, count, dtype))
    }

    fn ncclRecv(receive: u64, count: usize, dtype: c_int, peer: c_int, comm: Handle, stream: Handle) {
        operate(FUNCTION, To { comm, stream }, Kind::Recv { peer: peer as u32 }, buffers(0, receive, count, dtype))
    }
}

/// One side of an all-to-all: the buffer, and for each rank a count and an offset, in elements.
type Blocks = (u64, In<usize>, In<usize>);

/// Enqueues RCCL's all-to-all with counts: messages in a group.
fn all_to_all_v(function: &'static str, to: To, sides: [Blocks; 2], dtype: c_int) -> Answer {
    let call = enter(function, to.comm, Need::Ready)?;
    let (ranks, size) = (call.ranks as usize, data_type(dtype)?.size());
    drop(call);
    let part = |(start, counts, offsets): Blocks, rank: usize| {
        let at = start + (offsets.slice(ranks)[rank] * size) as u64;
        (at, counts.slice(ranks)[rank])
    };
    let [send, receive] = sides;
    answered(group::ncclGroupStart())?;
    let queued = (0..ranks).try_for_each(|rank| {
        let peer = rank as u32;
        let ((from, sent), (at, received)) = (part(send, rank), part(receive, rank));
        operate(function, to, Kind::Send { peer }, buffers(from, 0, sent, dtype))?;
        operate(function, to, Kind::Recv { peer }, buffers(0, at, received, dtype))
    });
    queued.and(answered(group::ncclGroupEnd()))
}
