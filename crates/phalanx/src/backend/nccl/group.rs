//! Groups: operations of one thread, over one or several communicators, that start together.
//!
//! Inside a group the library only queues. What has to wait for the group's end (host memory to bring back,
//! `ncclInProgress` to wait for) is kept in the thread's list.

use super::communicator::Communicator;
use super::operation::{Aftermath, Started};
use crate::error::Result;
use crate::sync::lock;
use std::cell::RefCell;
use std::sync::Arc;

thread_local! {
    static OPEN: RefCell<Group> = const { RefCell::new(Group { depth: 0, started: Vec::new() }) };
}

/// The group that this thread is in.
struct Group {
    depth: usize,
    started: Vec<Started>,
}

/// Whether this thread is in a group.
#[inline]
pub(super) fn is_open() -> bool {
    OPEN.with_borrow(|group| group.depth > 0)
}

/// Keeps what was queued until the group's end.
pub(super) fn defer(started: Started) {
    OPEN.with_borrow_mut(|group| group.started.push(started));
}

/// Enters a group, or a deeper level of it.
pub(super) fn start(communicator: &Communicator) {
    OPEN.with_borrow_mut(|group| group.depth += 1);
    if let Some(start) = communicator.library.ncclGroupStart {
        // SAFETY: `end` follows on this thread: groups exist only inside `phalanx::group`'s own end.
        unsafe { start() };
    }
}

/// Leaves a level; at the outermost, starts what was queued and sees to what comes after.
pub(super) fn end(communicator: &Arc<Communicator>) -> Result<()> {
    let library = communicator.library;
    let Some(end) = library.ncclGroupEnd else { return Ok(()) };
    let outermost = OPEN.with_borrow_mut(|group| {
        group.depth -= 1;
        (group.depth == 0).then(|| std::mem::take(&mut group.started))
    });
    let Some(started) = outermost else {
        // SAFETY: the level was entered on this thread.
        return communicator.progress(unsafe { end() }, "ncclGroupEnd").map(drop);
    };
    // One thread at a time inside each device, entered in one order.
    let mut turns: Vec<_> = started.iter().map(|s| s.communicator.device.turn).collect();
    turns.sort_by_key(|turn| std::ptr::from_ref(*turn).addr());
    turns.dedup_by(|a, b| std::ptr::eq(*a, *b));
    let held: Vec<_> = turns.into_iter().map(lock).collect();
    // SAFETY: the level was entered on this thread.
    let ended = communicator.progress(unsafe { end() }, "ncclGroupEnd");
    drop(held);
    match ended {
        Ok(_) => Aftermath::of_all(started),
        Err(error) => {
            // The library has dropped all that was queued.
            started.into_iter().for_each(Started::cancel);
            Err(error)
        }
    }
}
