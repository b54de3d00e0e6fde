//! How communicators end.

use super::communicator::{Communicator, Need, Phase, end, enter, find, still_there};
use super::group::{self, Job, note};
use super::result::*;
use super::transport;
use super::transport::mailbox::Stopped;
use super::transport::message::Tag;
use crate::call::{Answer, Code};
use crate::handles::Handle;
use crate::lock;
use crate::settings::settings;
use crate::violation::violation;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Since this version finalizing is a barrier of all ranks of a host, which is all of them here.
pub const TOGETHER: c_int = 23100;

/// How many ranks of a communicator this process has that have not ended.
static LOCAL: Mutex<BTreeMap<u64, usize>> = Mutex::new(BTreeMap::new());

/// A rank has ended here. Answers whether it is the last one of this process.
fn leave(communicator: &Communicator) -> bool {
    if communicator.peers().is_empty() {
        // It was never ready.
        return true;
    }
    let here = |rank: &u32| {
        communicator.peers().get(*rank as usize).is_some_and(|peer| peer.address == *transport::address())
    };
    let all = communicator.everyone().filter(here).count();
    let mut local = lock(&LOCAL);
    let left = local.entry(communicator.number).or_insert(all);
    *left = left.saturating_sub(1);
    *left == 0
}

/// Waits until everything is quiet: this rank's work, and other ranks. Destroying without finalizing before, the last rank of a
/// process waits for the other processes; finalizing, every rank for all others, if they wait for each other there.
fn quiesce(communicator: &Communicator, finalizing: bool) -> Result<(), Stopped> {
    communicator.wait_for_operations()?;
    communicator.wait_for_graphs()?;
    let together = settings().nccl_version >= TOGETHER;
    let is_remote = |rank: &u32| communicator.peers()[*rank as usize].address != *transport::address();
    let others = communicator.everyone().filter(|rank| *rank != communicator.rank);
    let (remote, local): (Vec<u32>, Vec<u32>) = others.partition(is_remote);
    // One that aborts does not tell.
    for rank in remote.iter().chain(local.iter().filter(|_| together)) {
        communicator.send(*rank, Tag::Ended, Vec::new());
        transport::flush(&communicator.peers()[*rank as usize].address);
    }
    let is_last = leave(communicator);
    let awaited = match together && finalizing {
        true => [remote, local].concat(),
        false if is_last && !settings().finalize_is_local => remote,
        false => Vec::new(),
    };
    for rank in awaited {
        // It stays there: a peer that has said so may go.
        communicator.mailbox.await_message(rank, Tag::Ended, || communicator.is_stopped())?;
    }
    Ok(())
}

/// A communicator that this thread goes inside of to end it. What waits for all ranks goes on beside what else is called on the
/// device: two threads that end two communicators in different orders would wait for each other.
fn to_be_ended(function: &'static str, comm: Handle, need: Need) -> Result<Arc<Communicator>, Code> {
    if settings().nccl_version >= TOGETHER {
        return find(function, comm, need);
    }
    let call = enter(function, comm, need)?;
    Ok(Arc::clone(&call))
}

fn finalize(communicator: &Communicator) -> Code {
    match quiesce(communicator, true) {
        Ok(()) => {
            communicator.state().phase = Phase::Finalized;
            SUCCESS
        }
        // Only an abort stops it, and whoever aborts asks no more.
        Err(Stopped) => INTERNAL_ERROR,
    }
}

fn destroy(communicator: &Communicator) -> Result<(), Stopped> {
    let phase = communicator.state().phase;
    match phase {
        Phase::Finalized => {}
        // After a revocation there is nobody to wait for.
        Phase::Revoked => {
            leave(communicator);
        }
        Phase::Ready | Phase::Suspended => quiesce(communicator, false)?,
    }
    communicator.wait_for_graphs()
}

/// How many threads free a communicator.
static FREEING: AtomicUsize = AtomicUsize::new(0);

/// Whether a thread does so now.
pub fn is_freeing() -> bool {
    FREEING.load(Ordering::Acquire) > 0
}

fn abort(function: &'static str, communicator: &Communicator) {
    if settings().abort_hangs {
        loop {
            std::thread::sleep(Duration::from_secs(1));
        }
    }
    end(function, communicator);
    communicator.abort();
    communicator.wait_for_rest();
    if communicator.state().phase != Phase::Finalized {
        leave(communicator);
    }
    communicator.close();
}

exported! {
    fn ncclCommFinalize(comm: Handle) {
        note((|| {
            let communicator = to_be_ended(FUNCTION, comm, Need::Ready)?;
            let worker = Arc::clone(&communicator);
            let body = Box::new(move || finalize(&worker));
            group::work(Job { function: FUNCTION, communicator, body })
        })())
    }

    fn ncclCommDestroy(comm: Handle) {
        if comm == 0 {
            return Ok(());
        }
        // From here on the handle is gone, but this thread is still inside.
        let _inside = (settings().nccl_version < TOGETHER).then(|| enter(FUNCTION, comm, Need::End)).transpose()?;
        let communicator = to_be_ended(FUNCTION, comm, Need::End)?;
        if !communicator.state().windows.is_empty() {
            violation(FUNCTION, "the communicator has windows that were not deregistered");
        }
        if !communicator.state().device_comms.is_empty() {
            violation(FUNCTION, "the communicator has device communicators that were not destroyed");
        }
        FREEING.fetch_add(1, Ordering::AcqRel);
        end(FUNCTION, &communicator);
        if settings().destroy_is_slow {
            std::thread::sleep(Duration::from_millis(300));
        }
        let result = destroy(&communicator).map_err(|Stopped| INTERNAL_ERROR);
        communicator.close();
        FREEING.fetch_sub(1, Ordering::AcqRel);
        result
    }

    fn ncclCommAbort(comm: Handle) {
        if comm == 0 {
            return Ok(());
        }
        let call = enter(FUNCTION, comm, Need::Any)?;
        abort(FUNCTION, &call);
        Ok(())
    }

    fn ncclCommRevoke(comm: Handle, flags: c_int) {
        super::collective::refuse_flags(FUNCTION, flags as u32)?;
        revoke(find(FUNCTION, comm, Need::Idle)?)
    }
}

/// Other threads may be inside: it is there to make them come out.
fn revoke(communicator: Arc<Communicator>) -> Answer {
    communicator.state().phase = Phase::Revoked;
    if communicator.config.blocking {
        communicator.give_up_operations();
        // Those who were inside are out now, and this thread is still here.
        std::thread::sleep(Duration::from_millis(100));
        still_there("ncclCommRevoke", &communicator, "another thread was revoking it");
        return Ok(());
    }
    let worker = Arc::clone(&communicator);
    let body = Box::new(move || {
        worker.give_up_operations();
        SUCCESS
    });
    group::work(Job { function: "ncclCommRevoke", communicator, body })
}
