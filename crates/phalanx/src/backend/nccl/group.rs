//! Groups: operations of one thread, over one or several communicators, that start together.
//!
//! Inside a group the library only queues. Work for the group's end is kept in the thread's list: arrivals of
//! ranks, copies back to host memory, waits for `ncclInProgress`.

use super::arrival::wait_for_arrivals;
use super::communicator::{Communicator, LibraryCall};
use super::library_lock::{LibraryGuard, LibraryLock};
use super::messages::{Carrying, PostedMessages};
use super::operation::{Aftermath, EnqueuedOperation};
use crate::types::error::{Error, Result};
use phalanx_sys::nccl::{ncclDataType_t, ncclResult_t};
use std::cell::RefCell;
use std::sync::Arc;

thread_local! {
    static OPEN: RefCell<NcclGroup> = const { RefCell::new(NcclGroup {
        depth: 0, members: Vec::new(), started: Vec::new(), failed: None
    }) };
}

/// The group that this thread is in.
#[derive(Default)]
struct NcclGroup {
    depth: usize,
    members: Vec<Member>,
    started: Vec<EnqueuedOperation>,
    /// The failure of a communicator while operations were queued: none of them is started.
    failed: Option<Error>,
}

/// A communicator of a group.
struct Member {
    communicator: Arc<Communicator>,
    /// Until the group's end no other thread carries messages of the communicator out, or takes those in it for complete.
    carrying: Option<Carrying>,
}

/// Whether this thread is in a group.
#[inline]
pub(crate) fn is_open() -> bool {
    OPEN.with_borrow(|group| group.depth > 0)
}

/// Keeps what was queued until the group's end.
pub(crate) fn defer(started: EnqueuedOperation) {
    OPEN.with_borrow_mut(|group| group.started.push(started));
}

/// Enters a group, or a deeper level of it. Until the outermost has ended, a member that fails is not aborted.
pub(crate) fn start(communicator: &Arc<Communicator>, messages: &Arc<PostedMessages>) {
    let carrying = messages.carry();
    communicator.set_queued(true);
    OPEN.with_borrow_mut(|group| {
        group.depth += 1;
        group.members.push(Member { communicator: communicator.clone(), carrying });
    });
    if let Some(start) = communicator.library.ncclGroupStart {
        // SAFETY: `end` follows on this thread: groups exist only inside `phalanx::group`'s own end.
        unsafe { start() };
    }
}

/// Leaves a level. The outermost starts the queued operations and finishes them, unless a communicator failed while they were `queued`.
pub(crate) fn end(communicator: &Arc<Communicator>, queued: &Result<()>) -> Result<()> {
    let end = communicator.library.ncclGroupEnd;
    end_with(communicator, "ncclGroupEnd", queued, || {
        // SAFETY: the level was entered on this thread.
        end.map_or(ncclResult_t::Success, |end| unsafe { end() })
    })
}

/// [`end`] by a function of the library that ends groups.
pub(crate) fn end_with(
    communicator: &Arc<Communicator>,
    function: &'static str,
    queued: &Result<()>,
    end: impl FnOnce() -> ncclResult_t,
) -> Result<()> {
    let outermost = OPEN.with_borrow_mut(|group| {
        group.depth -= 1;
        let failure = queued.as_ref().err().filter(|error| error.is_fatal());
        group.failed = group.failed.take().or_else(|| failure.cloned());
        (group.depth == 0).then(|| std::mem::take(group))
    });
    let Some(NcclGroup { members, started, failed, .. }) = outermost else {
        return communicator.progress(end(), function).map(drop);
    };
    let outcome = start_all(communicator, &members, started, failed, function, end);
    members
        .into_iter()
        .filter_map(|member| member.carrying)
        .for_each(|messages| messages.end_group(&outcome));
    outcome
}

/// Starts what was queued, with the library's end of the group.
fn start_all(
    communicator: &Communicator,
    members: &[Member],
    mut started: Vec<EnqueuedOperation>,
    failed: Option<Error>,
    function: &'static str,
    end: impl FnOnce() -> ncclResult_t,
) -> Result<()> {
    if let Some(failure) = &failed {
        // Before the library's locks, which a thread that aborts the failed one may hold.
        for one in &started {
            let own = one.communicator.control_channel.check().err();
            one.communicator.fail(own.unwrap_or_else(|| failure.clone()));
        }
    }
    let arrived = failed.map_or_else(|| wait_for_arrivals_of(&mut started), Err);
    let by_library = started.iter().any(EnqueuedOperation::has_library_part);
    // None of a communicator's kernels may overtake one before it, so all of them run beside.
    let arrived = arrived
        .and_then(|()| started.iter_mut().filter(|_| by_library).try_for_each(EnqueuedOperation::run_beside));
    let (arrived, ended) = {
        let inside = GroupLocks::all(&started);
        let arrived = arrived.and(inside.lost.clone().map_or(Ok(()), Err));
        let arrived =
            arrived.and_then(|()| started.iter().try_for_each(EnqueuedOperation::launch_own_kernels));
        if arrived.is_err() {
            spoil(communicator);
        }
        // Where a thread is lost inside a device, the library only forgets what was queued.
        (arrived, communicator.progress(end(), function))
    };
    // All fail before one is aborted.
    let started_all =
        arrived.and(ended).map_err(|error| started.iter().fold(error, |error, one| one.refused(error)));
    members.iter().for_each(|member| member.communicator.leave_group());
    if let Err(error) = started_all {
        // The library has dropped all that was queued.
        started.iter_mut().for_each(EnqueuedOperation::cancel);
        return Err(error);
    }
    Aftermath::of_all(started)
}

/// Waits for all ranks that the operations need.
fn wait_for_arrivals_of(started: &mut [EnqueuedOperation]) -> Result<()> {
    let (mut open, mut outcome) = (Vec::new(), Ok(()));
    for EnqueuedOperation { communicator, arrival, .. } in started {
        match arrival {
            Some(arrival) => open.push((&**communicator, arrival)),
            None => outcome = outcome.and(communicator.check()),
        }
    }
    outcome.and_then(|()| wait_for_arrivals(open))
}

/// This thread inside the library, with all communicators of a group.
struct GroupLocks<'a> {
    _calls: Vec<LibraryCall<'a>>,
    _guards: Vec<LibraryGuard>,
    /// Why a device could not be entered.
    lost: Option<Error>,
}

impl<'a> GroupLocks<'a> {
    /// One thread at a time inside each device, entered in one order.
    fn all(started: &'a [EnqueuedOperation]) -> GroupLocks<'a> {
        let mut communicators: Vec<_> = started.iter().map(|one| &one.communicator).collect();
        communicators
            .sort_by_key(|one| (std::ptr::from_ref(one.device.library_lock).addr(), Arc::as_ptr(one).addr()));
        communicators.dedup_by(|a, b| Arc::ptr_eq(a, b));
        let mut locks: Vec<_> = communicators.iter().map(|one| one.device.library_lock).collect();
        locks.dedup_by(|a, b| std::ptr::eq(*a, *b));
        let (entered, mut lost): (Vec<_>, Vec<_>) =
            locks.into_iter().map(LibraryLock::acquire).partition(Result::is_ok);
        GroupLocks {
            _calls: communicators.iter().map(|one| one.begin_library_call()).collect(),
            _guards: entered.into_iter().flatten().collect(),
            lost: lost.pop().and_then(Result::err),
        }
    }
}

/// Makes the library drop the queued operations, as it does after a rejected call. Starting them would block
/// inside the library for a missing rank.
fn spoil(communicator: &Communicator) {
    let Some(broadcast) = communicator.library.ncclBroadcast else { return };
    let (nothing, nowhere) = (std::ptr::null(), std::ptr::null_mut());
    let (comm, stream) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the communicator, which is null, is looked at first, and refused.
    unsafe { broadcast(nothing, nowhere, 0, ncclDataType_t::Uint8, 0, comm, stream) };
}
