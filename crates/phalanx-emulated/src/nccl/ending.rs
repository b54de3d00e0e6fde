//! How communicators end.

use super::communicator::{Communicator, Need, Phase, end, enter, find};
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
use std::sync::{Arc, Mutex};
use std::time::Duration;

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

/// Waits until everything is quiet: this rank's work; and with the last rank of this process, the other processes.
fn quiesce(communicator: &Communicator) -> Result<(), Stopped> {
    communicator.wait_for_operations()?;
    communicator.wait_for_graphs()?;
    let remote = |rank: &u32| communicator.peers()[*rank as usize].address != *transport::address();
    let remote: Vec<u32> = communicator.everyone().filter(remote).collect();
    for rank in &remote {
        communicator.send(*rank, Tag::Ended, Vec::new());
        transport::flush(&communicator.peers()[*rank as usize].address);
    }
    if leave(communicator) && !settings().finalize_is_local {
        for rank in remote {
            // It stays there: a peer that has said so may go.
            communicator.mailbox.await_message(rank, Tag::Ended, || communicator.is_stopped())?;
        }
    }
    Ok(())
}

fn finalize(communicator: &Communicator) -> Code {
    match quiesce(communicator) {
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
        Phase::Ready | Phase::Suspended => quiesce(communicator)?,
    }
    communicator.wait_for_graphs()
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
            let call = enter(FUNCTION, comm, Need::Ready)?;
            let communicator = Arc::clone(&call);
            drop(call);
            let worker = Arc::clone(&communicator);
            let body = Box::new(move || finalize(&worker));
            group::work(Job { function: FUNCTION, communicator, body })
        })())
    }

    fn ncclCommDestroy(comm: Handle) {
        if comm == 0 {
            return Ok(());
        }
        let call = enter(FUNCTION, comm, Need::End)?;
        if !call.state().windows.is_empty() {
            violation(FUNCTION, "the communicator has windows that were not deregistered");
        }
        let communicator = Arc::clone(&call);
        // From here on the handle is gone, but this thread is still inside.
        end(FUNCTION, &communicator);
        let result = destroy(&communicator).map_err(|Stopped| INTERNAL_ERROR);
        communicator.close();
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
        return Ok(());
    }
    let worker = Arc::clone(&communicator);
    let body = Box::new(move || {
        worker.give_up_operations();
        SUCCESS
    });
    group::work(Job { function: "ncclCommRevoke", communicator, body })
}
