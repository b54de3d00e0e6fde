//! The functions that enqueue collectives and messages.

use super::communicator::{Need, enter};
use super::group::{self, Queued, note};
use super::operation::{Arguments, Kind, Operation, Reduction};
use super::reduction;
use super::result::{INVALID_USAGE, fail};
use crate::call::{Answer, Code};
use crate::cuda::queue::Stream;
use crate::cuda::{capture, context, stream};
use crate::handles::Handle;
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
fn operate_with(
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

fn plain(send: u64, receive: u64, count: usize, dtype: c_int) -> Arguments {
    Arguments { send, receive, count, dtype, reduction: None::<Reduction> }
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

/// Flags that the library reserves.
pub fn refuse_flags(function: &str, flags: u32) -> Answer {
    if flags == 0 { Ok(()) } else { Err(fail(INVALID_USAGE, format!("{function} : flags must be 0"))) }
}
