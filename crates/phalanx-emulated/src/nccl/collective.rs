//! The functions that enqueue collectives and messages.

use super::communicator::{Need, enter};
use super::group::{self, Queued, note};
use super::operation::{Arguments, Kind, Operation, Reduction};
use super::reduction;
use super::result::{INVALID_USAGE, fail};
use super::types::DataType;
use crate::call::{Answer, Code};
use crate::cuda::queue::Stream;
use crate::cuda::{capture, context, stream};
use crate::handles::Handle;
use crate::pointers::In;
use crate::violation::violation;
use std::ffi::c_int;
use std::sync::Arc;

/// Where an operation goes, as the caller said.
#[derive(Clone, Copy)]
pub struct To {
    pub comm: Handle,
    pub stream: Handle,
}

/// The stream of a call; the default ones are those of the communicator's device.
fn stream_of(function: &'static str, handle: Handle, device: usize) -> Result<Arc<Stream>, Code> {
    if handle <= 1 {
        return Ok(Arc::clone(context::runtime_context(device).legacy()));
    }
    let stream = stream::find(function, handle)?;
    if stream.context.device != device {
        let theirs = stream.context.device;
        violation(function, format!("the stream is of device {theirs}, the communicator of device {device}"));
    }
    Ok(stream)
}

/// Enqueues an operation.
pub fn operate(function: &'static str, to: To, kind: Kind, arguments: Arguments) -> Answer {
    operate_with(function, to, kind, arguments, None)
}

/// Enqueues an operation that reduces with an operator.
pub fn operate_with(
    function: &'static str,
    to: To,
    kind: Kind,
    mut arguments: Arguments,
    operator: Option<c_int>,
) -> Answer {
    note((|| {
        let call = enter(function, to.comm, Need::Ready)?;
        let stream = stream_of(function, to.stream, call.device)?;
        if let Some(operator) = operator {
            arguments.reduction = Some(reduction::find(function, &call, operator, arguments.dtype)?);
        }
        let Some(operation) = Operation::new(function, &call, kind, arguments)? else { return Ok(()) };
        let capture = capture::of(&stream).map(|capture| capture.id);
        group::operate(function, Queued { operation, stream, handle: to.stream, capture })
    })())
}

pub fn plain(send: u64, receive: u64, count: usize, dtype: c_int) -> Arguments {
    Arguments { send, receive, count, dtype, reduction: None::<Reduction>, bias: 0 }
}

exported! {
    fn ncclAllReduce(send: u64, receive: u64, count: usize, dtype: c_int, op: c_int, comm: Handle, stream: Handle) {
        operate_with(FUNCTION, To { comm, stream }, Kind::AllReduce, plain(send, receive, count, dtype), Some(op))
    }

    fn ncclReduce(
        send: u64, receive: u64, count: usize, dtype: c_int, op: c_int, root: c_int, comm: Handle, stream: Handle,
    ) {
        let kind = Kind::Reduce { root: root as u32 };
        operate_with(FUNCTION, To { comm, stream }, kind, plain(send, receive, count, dtype), Some(op))
    }

    fn ncclReduceScatter(send: u64, receive: u64, count: usize, dtype: c_int, op: c_int, comm: Handle, stream: Handle) {
        operate_with(FUNCTION, To { comm, stream }, Kind::ReduceScatter, plain(send, receive, count, dtype), Some(op))
    }

    fn ncclBroadcast(send: u64, receive: u64, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle) {
        let kind = Kind::Broadcast { root: root as u32 };
        operate(FUNCTION, To { comm, stream }, kind, plain(send, receive, count, dtype))
    }

    fn ncclBcast(buffer: u64, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle) {
        let kind = Kind::Broadcast { root: root as u32 };
        operate(FUNCTION, To { comm, stream }, kind, plain(buffer, buffer, count, dtype))
    }

    fn ncclAllGather(send: u64, receive: u64, count: usize, dtype: c_int, comm: Handle, stream: Handle) {
        operate(FUNCTION, To { comm, stream }, Kind::AllGather, plain(send, receive, count, dtype))
    }

    fn ncclAlltoAll(send: u64, receive: u64, count: usize, dtype: c_int, comm: Handle, stream: Handle) {
        operate(FUNCTION, To { comm, stream }, Kind::AllToAll, plain(send, receive, count, dtype))
    }

    // RCCL, in its older spelling.
    fn ncclAllToAll(send: u64, receive: u64, count: usize, dtype: c_int, comm: Handle, stream: Handle) {
        operate(FUNCTION, To { comm, stream }, Kind::AllToAll, plain(send, receive, count, dtype))
    }

    fn ncclAlltoAllv(
        send: u64, send_counts: In<usize>, send_offsets: In<usize>,
        receive: u64, receive_counts: In<usize>, receive_offsets: In<usize>,
        dtype: c_int, comm: Handle, stream: Handle,
    ) {
        let sides = [(send, send_counts, send_offsets), (receive, receive_counts, receive_offsets)];
        all_to_all_v(FUNCTION, To { comm, stream }, sides, dtype)
    }

    // RCCL, in its older spelling.
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
        let arguments = Arguments { bias, ..plain(send, receive, count, dtype) };
        operate_with(FUNCTION, To { comm, stream }, Kind::AllReduce, arguments, Some(op))
    }

    fn ncclGather(send: u64, receive: u64, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle) {
        let kind = Kind::Gather { root: root as u32 };
        operate(FUNCTION, To { comm, stream }, kind, plain(send, receive, count, dtype))
    }

    fn ncclScatter(send: u64, receive: u64, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle) {
        let kind = Kind::Scatter { root: root as u32 };
        operate(FUNCTION, To { comm, stream }, kind, plain(send, receive, count, dtype))
    }

    fn ncclSend(send: u64, count: usize, dtype: c_int, peer: c_int, comm: Handle, stream: Handle) {
        operate(FUNCTION, To { comm, stream }, Kind::Send { peer: peer as u32 }, plain(send, 0, count, dtype))
    }

    fn ncclRecv(receive: u64, count: usize, dtype: c_int, peer: c_int, comm: Handle, stream: Handle) {
        operate(FUNCTION, To { comm, stream }, Kind::Recv { peer: peer as u32 }, plain(0, receive, count, dtype))
    }
}

/// Where the blocks of one side of an all-to-all are: the buffer, and for each rank a count and an offset in elements.
type Blocks = (u64, In<usize>, In<usize>);

/// RCCL's own, made of messages in a group.
fn all_to_all_v(function: &'static str, to: To, sides: [Blocks; 2], dtype: c_int) -> Answer {
    let call = enter(function, to.comm, Need::Ready)?;
    let (ranks, size) = (call.ranks as usize, DataType::from_code(dtype)?.size());
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
        operate(function, to, Kind::Send { peer }, plain(from, 0, sent, dtype))?;
        operate(function, to, Kind::Recv { peer }, plain(0, at, received, dtype))
    });
    queued.and(answered(group::ncclGroupEnd()))
}

fn answered(code: Code) -> Answer {
    if code == 0 { Ok(()) } else { Err(code) }
}

/// Flags that the library reserves.
pub fn refuse_flags(function: &str, flags: u32) -> Answer {
    if flags == 0 { Ok(()) } else { Err(fail(INVALID_USAGE, format!("{function} : flags must be 0"))) }
}
