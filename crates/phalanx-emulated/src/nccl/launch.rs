//! How operations get into streams: in the call, or late and in another thread.

use super::communicator::{Communicator, check_not_ended};
use super::exclusive::Exclusive;
use super::job::late_failure;
use super::operation::{Kind, Operation};
use super::perform::Fused;
use super::result::*;
use super::transport::mailbox::Stopped;
use crate::base::call::Answer;
use crate::base::handles::Handle;
use crate::base::random;
use crate::base::settings::settings;
use crate::base::violation::violation;
use crate::cuda::queue::Stream;
use crate::cuda::{context, stream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// An operation and its stream.
pub struct Queued {
    pub operation: Operation,
    pub stream: Arc<Stream>,
    /// The stream's handle as the caller passed it.
    pub handle: Handle,
    /// The capture that the stream took part in at the call.
    pub capture: Option<u64>,
}

/// Puts operations into their streams.
pub fn launch(function: &'static str, queued: Vec<Queued>) -> Answer {
    let mut communicators: Vec<Arc<Communicator>> = Vec::new();
    for Queued { operation, .. } in &queued {
        check_not_ended(function, &operation.communicator, "a group had operations on it");
        operation.check_buffers();
        if !communicators.iter().any(|other| other.handle == operation.communicator.handle) {
            communicators.push(Arc::clone(&operation.communicator));
        }
    }
    let _exclusive: Vec<Exclusive> =
        communicators.iter().map(|c| Exclusive::enter(function, c.device)).collect();
    let Some(first) = communicators.first() else { return Ok(()) };
    if first.config.blocking && hangs() {
        communicators.iter().for_each(|communicator| communicator.await_revocation());
        return Err(fail(INTERNAL_ERROR, "the communicator was revoked in the middle of a call"));
    }
    if first.config.blocking && connect(&queued).is_err() {
        return Err(fail(INTERNAL_ERROR, "the communicator was revoked in the middle of a call"));
    }
    if first.config.blocking || are_connected(&queued) && !random::shared().chance(settings().in_progress) {
        return context::runtime_on_device(first.device, || enqueue(function, queued))
            .map_err(|code| fail(UNHANDLED_CUDA_ERROR, format!("CUDA error {code}")));
    }
    communicators.iter().for_each(|communicator| communicator.begin_job());
    std::thread::spawn(move || {
        random::shared().delay();
        let aborted =
            connect(&queued).is_err() || communicators.iter().any(|communicator| communicator.is_stopped());
        let result = if aborted { Ok(()) } else { enqueue(function, queued) };
        let code = result.map_or(UNHANDLED_CUDA_ERROR, |()| SUCCESS);
        for communicator in communicators {
            communicator.end_job(late_failure(function, communicator.rank).unwrap_or(code));
        }
    });
    Err(IN_PROGRESS)
}

/// A message's communicator and peer, and whether it goes there.
fn message(queued: &Queued) -> Option<(&Arc<Communicator>, u32, bool)> {
    let communicator = &queued.operation.communicator;
    match queued.operation.kind {
        Kind::Send { peer } => Some((communicator, peer, true)),
        Kind::Recv { peer } => Some((communicator, peer, false)),
        _ => None,
    }
}

fn are_connected(queued: &[Queued]) -> bool {
    queued
        .iter()
        .filter_map(message)
        .all(|(communicator, peer, sends)| communicator.is_connected(peer, sends))
}

/// Connects the ends of messages, at the first in each direction of a pair. As in NCCL, each end waits inside the call until the other has
/// come.
fn connect(queued: &[Queued]) -> Result<(), Stopped> {
    let begin = |(communicator, peer, sends): &(&Arc<Communicator>, u32, bool)| {
        communicator.begin_connection(*peer, *sends)
    };
    let new: Vec<_> = queued.iter().filter_map(message).filter(begin).collect();
    new.into_iter().try_for_each(|(communicator, peer, sends)| communicator.end_connection(peer, sends))
}

/// Whether this launch hangs (`EMULATED_HANG_INSIDE`), as NCCL does while it connects to a rank that never
/// arrives.
fn hangs() -> bool {
    static LAUNCHES: AtomicU64 = AtomicU64::new(0);
    settings().hang_inside.is_some_and(|nth| LAUNCHES.fetch_add(1, Ordering::Relaxed) + 1 == nth)
}

/// Enqueues operations. As in NCCL, those of one stream are one piece of work.
pub fn enqueue(function: &'static str, queued: Vec<Queued>) -> Answer {
    let mut streams: Vec<(Arc<Stream>, Vec<Operation>)> = Vec::new();
    for Queued { operation, stream, handle, capture } in queued {
        if handle > 2 {
            // Ends the process if the stream was destroyed since.
            stream::find(function, handle)?;
        }
        if stream.capture().map(|capture| capture.id) != capture {
            violation(
                function,
                "a capture began or ended between the call of an operation and its enqueueing",
            );
        }
        match streams.iter_mut().find(|(other, _)| other.handle == stream.handle) {
            Some((_, operations)) => operations.push(operation),
            None => streams.push((stream, vec![operation])),
        }
    }
    for (_, operations) in &streams {
        operations.iter().try_for_each(|operation| operation.communicator.reach_peers())?;
    }
    for (stream, operations) in streams {
        let captured = stream.capture().is_some();
        stream.enqueue(Arc::new(Fused::new(operations, captured)))?;
    }
    Ok(())
}
