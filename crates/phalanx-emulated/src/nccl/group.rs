//! Groups, and how work gets into streams: at once, or late and by another thread.

use super::communicator::{Communicator, still_there};
use super::ending::TOGETHER;
use super::inside::Inside;
use super::operation::Operation;
use super::perform::Fused;
use super::result::*;
use crate::call::{Answer, Code};
use crate::cuda::queue::Stream;
use crate::cuda::stream;
use crate::cuda::{capture, context};
use crate::handles::Handle;
use crate::pointers::Out;
use crate::random;
use crate::settings::{When, failure, settings};
use crate::violation::violation;
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// An operation and the stream that it goes to.
pub struct Queued {
    pub operation: Operation,
    pub stream: Arc<Stream>,
    /// As the caller named the stream.
    pub handle: Handle,
    /// The capture that the stream took part in at the call.
    pub capture: Option<u64>,
}

/// Something about a communicator that takes long: how it begins, is split, ends.
pub struct Job {
    pub function: &'static str,
    pub communicator: Arc<Communicator>,
    pub body: Box<dyn FnOnce() -> Code + Send>,
}

impl Job {
    /// Whether it waits for other ranks beside what else is called on its device.
    fn is_beside_others(&self) -> bool {
        self.function == "ncclCommFinalize" && settings().nccl_version >= TOGETHER
    }
}

#[derive(Default)]
struct Group {
    depth: usize,
    /// The first error of a call inside: the group will do nothing.
    error: Code,
    queued: Vec<Queued>,
    jobs: Vec<Job>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

fn is_open() -> bool {
    GROUP.with_borrow(|group| group.depth > 0)
}

/// A call was told to fail: that is an error of the group that it is in, or the end of it.
pub fn failed(function: &str, code: Code) {
    if function == "ncclGroupEnd" {
        // As in NCCL, the group is over, and what was queued is dropped.
        drop(leave());
    } else if function.starts_with("nccl") {
        // It is the caller's to answer; here it is only taken down.
        let _ = note::<()>(Err(code));
    }
}

/// Passes the result of a call on; inside a group an error makes the group fail.
pub fn note<T>(result: Result<T, Code>) -> Result<T, Code> {
    if let Err(code) = &result
        && *code != IN_PROGRESS
        && is_open()
    {
        GROUP.with_borrow_mut(|group| group.error = if group.error == SUCCESS { *code } else { group.error });
    }
    result
}

/// Enqueues an operation: now, or at the end of the group.
pub fn operate(function: &'static str, queued: Queued) -> Answer {
    // A collective of one rank does not wait for the end of a group.
    let at_once = queued.operation.communicator.ranks == 1 && queued.operation.kind.is_collective();
    if !is_open() {
        return launch(function, vec![queued]);
    }
    if at_once {
        return enqueue(function, vec![queued]);
    }
    GROUP.with_borrow_mut(|group| group.queued.push(queued));
    Ok(())
}

/// Does a job: now, or at the end of the group.
pub fn work(job: Job) -> Answer {
    if is_open() {
        GROUP.with_borrow_mut(|group| group.jobs.push(job));
        return Ok(());
    }
    run(vec![job])
}

fn start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// Leaves a level of the group; the outermost gives what was queued.
fn leave() -> Result<Option<Group>, Code> {
    GROUP.with_borrow_mut(|group| match group.depth {
        0 => Err(fail(INVALID_USAGE, "ncclGroupEnd: not in a group call.")),
        1 => Ok(Some(std::mem::take(group))),
        _ => {
            group.depth -= 1;
            Ok(None)
        }
    })
}

fn finish(function: &'static str) -> Answer {
    let Some(group) = leave()? else { return Ok(()) };
    if group.error != SUCCESS {
        return Err(group.error);
    }
    if !group.jobs.is_empty() && !group.queued.is_empty() {
        violation(function, "a group has operations and begins, derives or ends communicators");
    }
    let communicators = || {
        group
            .queued
            .iter()
            .map(|queued| &queued.operation.communicator)
            .chain(group.jobs.iter().map(|job| &job.communicator))
    };
    if let Some(first) = communicators().next()
        && communicators().any(|other| other.config.blocking != first.config.blocking)
    {
        return Err(fail(
            INVALID_ARGUMENT,
            "Blocking and nonblocking communicators are not allowed in the same group.",
        ));
    }
    if group.jobs.is_empty() { launch(function, group.queued) } else { run(group.jobs) }
}

/// Puts operations into their streams.
fn launch(function: &'static str, queued: Vec<Queued>) -> Answer {
    let mut communicators: Vec<Arc<Communicator>> = Vec::new();
    for Queued { operation, .. } in &queued {
        still_there(function, &operation.communicator, "a group had operations on it");
        operation.check_buffers();
        if !communicators.iter().any(|other| other.handle == operation.communicator.handle) {
            communicators.push(Arc::clone(&operation.communicator));
        }
    }
    let _inside: Vec<Inside> = communicators.iter().map(|c| Inside::enter(function, c.device)).collect();
    let Some(first) = communicators.first() else { return Ok(()) };
    if first.config.blocking && hangs() {
        communicators.iter().for_each(|communicator| communicator.await_revocation());
        return Err(fail(INTERNAL_ERROR, "the communicator was revoked in the middle of a call"));
    }
    if first.config.blocking || !random::shared().chance(settings().in_progress) {
        return context::runtime_on_device(first.device, || enqueue(function, queued))
            .map_err(|code| fail(UNHANDLED_CUDA_ERROR, format!("CUDA error {code}")));
    }
    communicators.iter().for_each(|communicator| communicator.begin_job());
    std::thread::spawn(move || {
        random::shared().dawdle();
        let aborted = communicators.iter().any(|communicator| communicator.is_stopped());
        let result = if aborted { Ok(()) } else { enqueue(function, queued) };
        let code = result.map_or(UNHANDLED_CUDA_ERROR, |()| SUCCESS);
        for communicator in communicators {
            communicator.end_job(late_failure(function, communicator.rank).unwrap_or(code));
        }
    });
    Err(IN_PROGRESS)
}

/// Whether this launch was told to wait inside for ever, as NCCL does that connects to a rank that does not come.
fn hangs() -> bool {
    static LAUNCHES: AtomicU64 = AtomicU64::new(0);
    settings().hang_inside.is_some_and(|nth| LAUNCHES.fetch_add(1, Ordering::Relaxed) + 1 == nth)
}

/// What goes to one stream is one piece of work, as NCCL fuses it.
fn enqueue(function: &'static str, queued: Vec<Queued>) -> Answer {
    let mut streams: Vec<(Arc<Stream>, Vec<Operation>)> = Vec::new();
    for Queued { operation, stream, handle, capture } in queued {
        if handle > 2 {
            // Ends the process if the stream was destroyed since.
            stream::find(function, handle)?;
        }
        if capture::of(&stream).map(|capture| capture.id) != capture {
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
        let captured = capture::of(&stream).is_some();
        capture::enqueue(&stream, Arc::new(Fused::new(operations, captured)))?;
    }
    Ok(())
}

/// The code with which work in the background was told to end.
fn late_failure(function: &str, rank: u32) -> Option<Code> {
    let told =
        failure(When::Late, function, None).or_else(|| failure(When::Late, function, Some(rank as i32)));
    told.map(|code| fail(code, format!("{function} was told to fail late")))
}

/// Does jobs, all at the same time.
fn run(jobs: Vec<Job>) -> Answer {
    let blocking = jobs.first().is_none_or(|job| job.communicator.config.blocking);
    if !blocking {
        for job in jobs {
            job.communicator.begin_job();
            std::thread::spawn(move || {
                random::shared().dawdle();
                let told = late_failure(job.function, job.communicator.rank);
                let code = told.unwrap_or_else(job.body);
                job.communicator.end_job(code);
            });
        }
        return Err(IN_PROGRESS);
    }
    let _inside: Vec<Inside> = jobs
        .iter()
        .filter(|job| !job.is_beside_others())
        .map(|job| Inside::enter(job.function, job.communicator.device))
        .collect();
    let bodies: Vec<_> = jobs.into_iter().map(|job| job.body).collect();
    let codes: Vec<Code> = std::thread::scope(|scope| {
        let threads: Vec<_> = bodies.into_iter().map(|body| scope.spawn(body)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or(INTERNAL_ERROR)).collect()
    });
    codes.into_iter().find(|code| *code != SUCCESS).map_or(Ok(()), Err)
}

/// `ncclSimInfo_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SimInfo {
    size: usize,
    magic: u32,
    version: u32,
    estimated_time: f32,
}

exported! {
    fn ncclGroupStart() {
        start();
        Ok(())
    }

    fn ncclGroupEnd() {
        finish(FUNCTION)
    }

    fn ncclGroupSimulateEnd(info: Out<SimInfo>) {
        let blocks = |group: &Group| {
            group.queued.iter().all(|queued| queued.operation.communicator.config.blocking)
        };
        if !GROUP.with_borrow(blocks) {
            // As in NCCL, whose thread for what does not block ends the group as any other.
            return finish(FUNCTION);
        }
        let Some(group) = leave()? else { return Ok(()) };
        if group.error != SUCCESS {
            return Err(group.error);
        }
        if group.queued.iter().any(|queued| !queued.operation.kind.is_collective()) {
            violation(FUNCTION, "messages are simulated, which the library then keeps in mind");
        }
        let Some(mut known) = info.as_in().get() else { return Ok(()) };
        if known.magic != 0x7468_5283 {
            return Err(fail(INVALID_ARGUMENT, "ncclSimInfo_t argument not initialized via NCCL_SIM_INFO_INITIALIZER"));
        }
        known.estimated_time = if group.queued.is_empty() { -1.0 } else { group.queued.len() as f32 };
        info.set(known);
        Ok(())
    }
}
