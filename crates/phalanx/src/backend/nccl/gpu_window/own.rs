//! [`OwnWindow`]: memory of this rank, which others have open.

use crate::backend::nccl::communicator::{Communicator, ENDING};
use crate::contract::{GpuWindow, GpuWindowKey, Operation};
use crate::gpu::backoff::Backoff;
use crate::types::error::{Error, Result, TimeoutError, UsageError};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What other ranks of a registration see and do: in shared memory, or as messages.
pub(super) trait Record: Send + Sync {
    /// What other ranks find it by.
    fn id(&self) -> u64;

    /// Signals of a rank so far.
    fn given(&self, rank: usize) -> u64;

    /// Lets nobody open it or begin a copy any more.
    fn release(&self);

    /// Whether a rank may still copy. A process that has exited begins nothing.
    fn is_held_by(&self, rank: usize, has_exited: bool) -> bool;

    /// Forgets it, once no rank may copy. Whether nothing touches its memory any more.
    fn close(&self) -> bool;
}

pub(super) struct OwnWindow<R> {
    communicator: Arc<Communicator>,
    record: R,
    nonce: [u64; 2],
    /// Signals of each rank that were waited for.
    heard: Box<[AtomicU64]>,
}

impl<R: Record> OwnWindow<R> {
    pub fn new(communicator: Arc<Communicator>, record: R, nonce: [u64; 2]) -> OwnWindow<R> {
        let heard = (0..communicator.ranks).map(|_| AtomicU64::new(0)).collect();
        OwnWindow { communicator, record, nonce, heard }
    }

    fn is_open_at(&self, rank: usize) -> bool {
        self.record.is_held_by(rank, self.communicator.control_channel.has_exited(rank))
    }
}

impl<R: Record> GpuWindow for OwnWindow<R> {
    fn key(&self) -> GpuWindowKey {
        GpuWindowKey { segment: self.record.id(), nonce: self.nonce }
    }

    fn wait_signals(&self, rank: usize, count: u64) -> Result<()> {
        let heard = &self.heard[rank];
        // Each of several threads waits for signals of its own.
        let wanted = heard.fetch_add(count, Ordering::Relaxed).saturating_add(count);
        let is_given = || Ok(self.record.given(rank) >= wanted);
        self.communicator.wait_for_rank(Operation::WaitSignals, rank, is_given).inspect_err(|_| {
            heard.fetch_sub(count, Ordering::Relaxed);
        })
    }

    fn close(&self) -> Result<()> {
        let own = self.communicator.rank;
        self.communicator.check_owner()?;
        if let Err(failure) = self.communicator.check() {
            // The others know, too, and close it.
            return if self.close_within(ENDING) { Ok(()) } else { Err(failure) };
        }
        self.record.release();
        if self.record.is_held_by(own, false) {
            return Err(UsageError::Setting {
                name: "GpuWindow::release".into(),
                value: format!("memory that rank {own} has open itself"),
                expected: "the RemoteGpuWindow to be dropped before".into(),
            }
            .into());
        }
        let mut others = (0..self.communicator.ranks).filter(|rank| *rank != own);
        let closed = others.try_for_each(|rank| {
            let is_closed = || Ok(!self.is_open_at(rank));
            self.communicator.wait_for_rank(Operation::OneSided, rank, is_closed)
        });
        let Err(error) = closed else {
            let (operation, sequence) = ("GpuWindow::release".into(), self.communicator.collectives());
            let late =
                TimeoutError { operation, sequence, reporter: own, waited: ENDING, missing: Vec::new() };
            return if self.record.close() { Ok(()) } else { Err(late.into()) };
        };
        // The communicator has failed meanwhile: as above.
        let is_late = matches!(error, Error::Timeout(_));
        if !is_late && self.close_within(ENDING) { Ok(()) } else { Err(error) }
    }

    fn close_within(&self, limit: Duration) -> bool {
        if self.communicator.check_owner().is_err() {
            return false;
        }
        self.record.release();
        let mut backoff = Backoff::new();
        while (0..self.communicator.ranks).any(|rank| self.is_open_at(rank)) {
            if backoff.since.elapsed() >= limit {
                return false;
            }
            backoff.pause();
        }
        self.record.close()
    }
}
