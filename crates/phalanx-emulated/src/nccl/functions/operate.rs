//! The common part of the functions that enqueue operations.

use crate::base::call::{Answer, Code};
use crate::base::handles::Handle;
use crate::base::violation::violation;
use crate::cuda::queue::Stream;
use crate::cuda::{context, stream};
use crate::nccl::communicator::{Need, enter};
use crate::nccl::group::{self, record};
use crate::nccl::launch::Queued;
use crate::nccl::operation::{Arguments, Kind, Operation};
use crate::nccl::result::{INVALID_USAGE, fail};
use std::ffi::c_int;
use std::sync::Arc;

/// The communicator and the stream of a call.
#[derive(Clone, Copy)]
pub struct To {
    pub comm: Handle,
    pub stream: Handle,
}

/// The stream of a call. The default stream is that of the communicator's device.
fn stream_of(function: &'static str, handle: Handle, device: usize) -> Result<Arc<Stream>, Code> {
    if handle <= 1 {
        return Ok(Arc::clone(context::runtime_context(device).legacy()));
    }
    let stream = stream::find(function, handle)?;
    if stream.device != device {
        let theirs = stream.device;
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
    record((|| {
        let call = enter(function, to.comm, Need::Ready)?;
        let stream = stream_of(function, to.stream, call.device)?;
        if let Some(operator) = operator {
            let reduction = call.state().reductions.find(function, operator, arguments.dtype)?;
            arguments.reduction = Some(reduction);
        }
        let Some(operation) = Operation::new(function, &call, kind, arguments)? else { return Ok(()) };
        let capture = stream.capture().map(|capture| capture.id);
        group::operate(function, Queued { operation, stream, handle: to.stream, capture })
    })())
}

/// The arguments of an operation on two buffers.
pub fn buffers(send: u64, receive: u64, count: usize, dtype: c_int) -> Arguments {
    Arguments { send, receive, count, dtype, reduction: None, bias: 0 }
}

/// Refuses flags, of which NCCL defines none yet.
pub fn refuse_flags(function: &str, flags: u32) -> Answer {
    if flags == 0 { Ok(()) } else { Err(fail(INVALID_USAGE, format!("{function} : flags must be 0"))) }
}
