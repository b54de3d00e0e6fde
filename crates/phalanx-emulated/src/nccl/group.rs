//! Groups: operations and jobs between `ncclGroupStart` and `ncclGroupEnd` begin at the end.

use super::job::{self, Job};
use super::launch::{self, Queued};
use super::result::*;
use crate::base::call::{self, Answer, Code};
use crate::base::pointers::Out;
use crate::base::violation::violation;
use std::cell::RefCell;

#[derive(Default)]
struct Group {
    depth: usize,
    /// The first error of a call in the group. With an error, the group does nothing.
    error: Code,
    queued: Vec<Queued>,
    jobs: Vec<Job>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// Runs the body of an exported function. A failure that the settings inject also fails the group.
pub fn answer(function: &'static str, body: impl FnOnce() -> Answer) -> Code {
    let on_failure = |code| {
        if function == "ncclGroupEnd" {
            // As in NCCL, the group ends and its operations are dropped.
            drop(leave());
        } else {
            // The caller returns the code; here it fails the group.
            let _ = record::<()>(Err(code));
        }
    };
    call::answer_or(function, on_failure, body)
}

/// As `exported!`, for functions whose failures fail the group.
macro_rules! nccl {
    ($($functions:tt)*) => {
        $crate::base::call::answered_by! { $crate::nccl::group::answer; $($functions)* }
    };
}
pub(super) use nccl;

/// Returns the result of a call. An error in a group fails the group.
pub fn record<T>(result: Result<T, Code>) -> Result<T, Code> {
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
        return launch::launch(function, vec![queued]);
    }
    if at_once {
        return launch::enqueue(function, vec![queued]);
    }
    GROUP.with_borrow_mut(|group| group.queued.push(queued));
    Ok(())
}

/// Runs a job: now, or at the end of the group.
pub fn run(job: Job) -> Answer {
    if is_open() {
        GROUP.with_borrow_mut(|group| group.jobs.push(job));
        return Ok(());
    }
    job::run(vec![job])
}

fn is_open() -> bool {
    GROUP.with_borrow(|group| group.depth > 0)
}

fn start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// Leaves a level of the group. Leaving the outermost returns the group.
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
        violation(function, "the group has operations and also creates, splits or destroys communicators");
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
    if group.jobs.is_empty() { launch::launch(function, group.queued) } else { job::run(group.jobs) }
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

nccl! {
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
            // As in NCCL, whose background thread ends such a group like any other.
            return finish(FUNCTION);
        }
        let Some(group) = leave()? else { return Ok(()) };
        if group.error != SUCCESS {
            return Err(group.error);
        }
        if group.queued.iter().any(|queued| !queued.operation.kind.is_collective()) {
            violation(FUNCTION, "the group has sends or receives: the library would keep them after the simulation");
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
