//! How communicators end: finalising, destroying, aborting, revoking.

use super::operate::refuse_flags;
use crate::base::call::{Answer, Code};
use crate::base::handles::Handle;
use crate::base::lock::lock;
use crate::base::settings::settings;
use crate::base::violation::violation;
use crate::cuda::context;
use crate::nccl::communicator::{Communicator, Freeing, Need, Phase, check_not_ended, end, enter, find};
use crate::nccl::group::{self, nccl, record};
use crate::nccl::job::Job;
use crate::nccl::result::*;
use crate::nccl::transport::endpoint;
use crate::nccl::transport::mailbox::Stopped;
use crate::nccl::transport::message::Tag;
use crate::nccl::version::{FINALIZE_WAITS_FOR_ALL, is_since};
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How many ranks of each communicator this process has that have not ended.
static LOCAL: Mutex<BTreeMap<u64, usize>> = Mutex::new(BTreeMap::new());

/// Counts the end of a rank; true if it is the last one of this process.
fn leave(communicator: &Communicator) -> bool {
    if communicator.peers().is_empty() {
        // The communicator was never connected.
        return true;
    }
    let here = |rank: &u32| {
        communicator.peers().get(*rank as usize).is_some_and(|peer| peer.address == *endpoint::address())
    };
    let all = communicator.all_ranks().filter(here).count();
    let mut local = lock(&LOCAL);
    let remaining = local.entry(communicator.number).or_insert(all);
    *remaining = remaining.saturating_sub(1);
    *remaining == 0
}

/// Waits for this rank's work, and for other ranks.
/// - When finalising, and if the version's finalisation waits for all, every rank waits for all others.
/// - Otherwise the last rank of a process waits for the ranks of other processes.
fn quiesce(communicator: &Communicator, finalizing: bool) -> Result<(), Stopped> {
    communicator.wait_for_operations()?;
    communicator.wait_for_graphs()?;
    let waits_for_all = is_since(FINALIZE_WAITS_FOR_ALL);
    let is_remote = |rank: &u32| communicator.peers()[*rank as usize].address != *endpoint::address();
    let others = communicator.all_ranks().filter(|rank| *rank != communicator.rank);
    let (remote, local): (Vec<u32>, Vec<u32>) = others.partition(is_remote);
    // An aborted rank sends no such message.
    for rank in remote.iter().chain(local.iter().filter(|_| waits_for_all)) {
        communicator.send(*rank, Tag::Ended, Vec::new());
        endpoint::flush(&communicator.peers()[*rank as usize].address);
    }
    let is_last = leave(communicator);
    let awaited = match waits_for_all && finalizing {
        true => [remote, local].concat(),
        false if is_last && !settings().finalize_is_local => remote,
        false => Vec::new(),
    };
    for rank in awaited {
        // The message stays in the mailbox: from then on the peer's process may end.
        communicator.mailbox.await_message(rank, Tag::Ended, || communicator.is_stopped())?;
    }
    Ok(())
}

/// The communicator of a call that ends it. If the end waits for all ranks, other calls on the device are
/// allowed meanwhile: two threads that end two communicators in different orders would wait for each other.
fn find_to_end(function: &'static str, comm: Handle, need: Need) -> Result<Arc<Communicator>, Code> {
    if is_since(FINALIZE_WAITS_FOR_ALL) {
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
        // Only an abort stops the wait, and then the result is not read.
        Err(Stopped) => INTERNAL_ERROR,
    }
}

fn destroy(communicator: &Communicator) -> Result<(), Stopped> {
    let phase = communicator.state().phase;
    match phase {
        Phase::Finalized => {}
        // After a revocation no rank waits for others.
        Phase::Revoked => {
            leave(communicator);
        }
        Phase::Ready | Phase::Suspended => quiesce(communicator, false)?,
    }
    communicator.wait_for_graphs()
}

/// How long a communicator is freed where `EMULATED_DESTROY` asks for it.
const FREEING: Duration = Duration::from_millis(500);

fn abort(function: &'static str, communicator: &Communicator) {
    if settings().abort_hangs {
        loop {
            std::thread::sleep(Duration::from_secs(1));
        }
    }
    end(function, communicator);
    communicator.abort();
    communicator.wait_for_end_of_use();
    let is_last = communicator.state().phase != Phase::Finalized && leave(communicator);
    if is_last {
        free(communicator);
    }
    communicator.close();
}

/// The last rank of a process frees the memory of all of them, for which the driver waits.
fn free(communicator: &Communicator) {
    if settings().destroy_is_slow {
        std::thread::sleep(FREEING);
    }
    context::wait_to_free(communicator.device);
}

nccl! {
    fn ncclCommFinalize(comm: Handle) {
        record((|| {
            let communicator = find_to_end(FUNCTION, comm, Need::Ready)?;
            communicator.begin_end();
            let worker = Arc::clone(&communicator);
            let body = Box::new(move || finalize(&worker));
            group::run(Job { function: FUNCTION, communicator, body })
        })())
    }

    fn ncclCommDestroy(comm: Handle) {
        if comm == 0 {
            return Ok(());
        }
        // Other threads' calls on the device are violations until the return, also after the handle has
        // ended.
        let _call = (!is_since(FINALIZE_WAITS_FOR_ALL)).then(|| enter(FUNCTION, comm, Need::End)).transpose()?;
        let communicator = find_to_end(FUNCTION, comm, Need::End)?;
        if !communicator.state().windows.is_empty() {
            violation(FUNCTION, "the communicator has windows that were not deregistered");
        }
        if !communicator.state().device_comms.is_empty() {
            violation(FUNCTION, "the communicator has device communicators that were not destroyed");
        }
        let freeing = Freeing::begin();
        end(FUNCTION, &communicator);
        let result = destroy(&communicator).map_err(|Stopped| INTERNAL_ERROR);
        free(&communicator);
        communicator.close();
        drop(freeing);
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
        refuse_flags(FUNCTION, flags as u32)?;
        revoke(find(FUNCTION, comm, Need::Any)?)
    }
}

/// Revokes a communicator. Other threads may be in calls on it, which return with an error.
fn revoke(communicator: Arc<Communicator>) -> Answer {
    if communicator.is_ending() || communicator.state().phase == Phase::Revoked {
        return Err(INVALID_ARGUMENT);
    }
    communicator.state().phase = Phase::Revoked;
    if communicator.config.blocking {
        communicator.cancel_operations();
        // A pause in which another thread can wrongly end the communicator.
        std::thread::sleep(Duration::from_millis(20));
        check_not_ended("ncclCommRevoke", &communicator, "another thread was revoking it");
        return Ok(());
    }
    let worker = Arc::clone(&communicator);
    let body = Box::new(move || {
        worker.cancel_operations();
        SUCCESS
    });
    group::run(Job { function: "ncclCommRevoke", communicator, body })
}
