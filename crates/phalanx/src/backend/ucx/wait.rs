//! Waits for operations of UCX, and what ends them: the peers, the deadline, a broken connection. And giving up.

use super::UcxComm;
use super::mail::Header;
use super::tunables::*;
use super::worker::{Outcome, Worker};
use crate::control::endpoint::{Peers, PendingOperation};
use crate::control::failure::{ChannelFailure, FailureContext};
use crate::control::layout::RECORDS;
use crate::os::RunInstant;
use crate::types::error::{Error, PeerEvent, Result};
use std::cell::Cell;

/// An operation of UCX that this rank waits for, and its peer in the communicator.
#[derive(Debug, Clone, Copy)]
pub(super) struct Awaited {
    pub operation: usize,
    pub peer: usize,
}

impl UcxComm {
    /// Waits until all operations are over, of which none is broken; calls `meanwhile` repeatedly. They are not forgotten.
    pub(super) fn await_all(
        &self,
        awaited: &[Awaited],
        pending: &dyn Fn() -> PendingOperation,
        meanwhile: &dyn Fn(),
    ) -> Result<()> {
        let done = Cell::new(0);
        let are_over = |worker: &mut Worker| {
            while let Some(next) = awaited.get(done.get()) {
                match worker.outcome(next.operation) {
                    Some((Outcome::Complete | Outcome::WrongLength, _)) => done.set(done.get() + 1),
                    Some((Outcome::Broken, _)) | None => return false,
                }
            }
            true
        };
        let polls = if self.is_crowded() { POLLS_CROWDED } else { POLLS };
        for _ in 0..polls {
            let mut worker = self.link.world.worker();
            worker.progress_once();
            if are_over(&mut worker) {
                return Ok(());
            }
            drop(worker);
            self.advance_on_host()?;
            meanwhile();
            std::hint::spin_loop();
        }
        let broken_since = Cell::new(None);
        let ready = &mut || {
            let mut worker = self.link.world.worker();
            worker.progress();
            if are_over(&mut worker) {
                return Ok(true);
            }
            worker.fetch_aside();
            let broken = awaited[done.get()..].iter().find(|next| self.is_broken(&worker, next.peer));
            let text = broken.map(|broken| worker.last_failure(self.endpoint.members()[broken.peer]));
            drop(worker);
            self.advance_on_host()?;
            meanwhile();
            let Some(broken) = broken else { return Ok(false) };
            let since = broken_since.get().unwrap_or_else(RunInstant::now);
            broken_since.set(Some(since));
            match since.elapsed() > BROKEN {
                true => Err(self.fail_broken(broken.peer, pending(), since, &text.unwrap_or_default())),
                false => Ok(false),
            }
        };
        let peers = || Peers::Many(awaited[done.get()..].iter().map(|next| next.peer).collect());
        self.endpoint.poll(ready, &peers, pending)
    }

    /// Whether the connection to a rank has broken since the communicator began.
    fn is_broken(&self, worker: &Worker, peer: usize) -> bool {
        worker.failures(self.endpoint.members()[peer]) != self.link.failures[peer]
    }

    #[cold]
    fn fail_broken(&self, peer: usize, pending: PendingOperation, since: RunInstant, text: &str) -> Error {
        crate::os::log::error!(
            rank = self.endpoint.rank,
            "UCX has lost the connection to rank {peer}: {text}"
        );
        let (sequence, record) = pending;
        let context =
            FailureContext { reporter: self.endpoint.rank, sequence, record, waited: since.elapsed() };
        self.endpoint.fail(&ChannelFailure::Peer { rank: peer, event: PeerEvent::Unreachable, context })
    }

    /// Whether ranks of this host share cores.
    pub(super) fn is_crowded(&self) -> bool {
        self.link.world.is_crowded
    }

    /// Fails the communicator since a peer has called something else, once that is known of it.
    #[cold]
    pub(super) fn fail_mismatch(&self, peer: usize, sequence: u64) -> Error {
        let endpoint = &self.endpoint;
        let since = RunInstant::now();
        let first = sequence.saturating_sub(RECORDS as u64 - 1).max(1);
        let is_known = || (first..=sequence).any(|number| endpoint.compare_records(peer, number).is_some());
        endpoint.publish();
        while !endpoint.has_failed() && !is_known() && since.elapsed() < RECORDS_COME {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        endpoint.fail_mismatch(peer, sequence)
    }

    /// Forgets operations that are over, and answers their headers and how they ended.
    pub(super) fn take(&self, operation: usize) -> (Outcome, Header) {
        let mut worker = self.link.world.worker();
        let over = worker.outcome(operation).expect("waited for");
        let _ = worker.forget(operation);
        over
    }

    /// Gives up operations of a communicator that has failed. When this returns, UCX uses none of their buffers.
    #[cold]
    pub(super) fn give_up(&self, awaited: &mut Vec<Awaited>) {
        self.let_go(|worker| {
            awaited.retain(|next| worker.forget(next.operation).is_err());
            awaited.iter().map(|next| next.peer).collect()
        });
    }

    /// Closes the channel, and waits until UCX has let go: see [`until_let_go`](Self::until_let_go).
    #[cold]
    pub(super) fn let_go(&self, holders: impl FnMut(&mut Worker) -> Vec<usize>) {
        // What peers send for this channel is dropped from now on.
        self.link.world.worker().close_channel(self.link.channel);
        self.until_let_go(holders);
    }

    /// Waits until no peer is left of those that `holders` answers: UCX uses buffers for messages with them.
    pub(super) fn until_let_go(&self, mut holders: impl FnMut(&mut Worker) -> Vec<usize>) {
        let since = RunInstant::now();
        let mut has_disconnected = false;
        loop {
            let mut worker = self.link.world.worker();
            worker.progress();
            let peers = holders(&mut worker);
            if peers.is_empty() {
                return;
            }
            if !has_disconnected && since.elapsed() > GIVING_UP {
                has_disconnected = true;
                peers.iter().for_each(|peer| worker.disconnect(self.endpoint.members()[*peer]));
            }
            drop(worker);
            if since.elapsed() > LETTING_GO {
                crate::os::log::error!(
                    rank = self.endpoint.rank,
                    "UCX does not let go of a buffer that its owner may now free: this process ends"
                );
                std::process::abort();
            }
            std::thread::yield_now();
        }
    }

    /// Hands what was sent to the network, with a bounded wait.
    pub(super) fn flush(&self) {
        let Some(request) = self.link.world.worker().flush() else { return };
        let since = RunInstant::now();
        loop {
            let mut worker = self.link.world.worker();
            worker.progress();
            // A request that is not over stays with UCX.
            if worker.is_over(request) || since.elapsed() > GIVING_UP {
                return;
            }
            drop(worker);
            std::thread::yield_now();
        }
    }
}
