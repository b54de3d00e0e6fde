//! [`OwnWindow`]: memory of this rank, which others have open.

use super::record::SharedRecord;
use crate::backend::nccl::communicator::{Communicator, ENDING};
use crate::contract::{GpuWindow, GpuWindowKey, Operation};
use crate::gpu::backoff::Backoff;
use crate::types::error::{Result, UsageError};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub(super) struct OwnWindow {
    communicator: Arc<Communicator>,
    record: SharedRecord,
    nonce: [u64; 2],
    /// Notifications of each rank that were waited for.
    heard: Box<[AtomicU64]>,
}

impl OwnWindow {
    pub fn new(communicator: Arc<Communicator>, record: SharedRecord, nonce: [u64; 2]) -> OwnWindow {
        let heard = (0..communicator.ranks).map(|_| AtomicU64::new(0)).collect();
        OwnWindow { communicator, record, nonce, heard }
    }

    /// Whether a rank may still copy. A process that has ended does not.
    fn is_open_at(&self, rank: usize) -> bool {
        self.record.is_held_by(rank) && !self.communicator.control_channel.has_died(rank)
    }
}

impl GpuWindow for OwnWindow {
    fn key(&self) -> GpuWindowKey {
        GpuWindowKey { segment: self.record.id(), nonce: self.nonce }
    }

    fn wait_notifications(&self, rank: usize, count: u64) -> Result<()> {
        let (given, heard) = (self.record.notifications(rank), &self.heard[rank]);
        let before = heard.load(Ordering::Relaxed);
        let wanted = before.saturating_add(count);
        self.communicator.wait_for_rank(Operation::WaitSignals, rank, || Ok(given.given() >= wanted))?;
        heard.store(wanted, Ordering::Relaxed);
        Ok(())
    }

    fn close(&self) -> Result<()> {
        let own = self.communicator.rank;
        self.communicator.check_owner()?;
        if let Err(failure) = self.communicator.check() {
            // The others know, too, and close it.
            return if self.close_within(ENDING) { Ok(()) } else { Err(failure) };
        }
        self.record.release();
        if self.record.is_held_by(own) {
            return Err(UsageError::Setting {
                name: "GpuWindow::release".into(),
                value: format!("memory that rank {own} has open itself"),
                expected: "the RemoteGpuWindow to be dropped before".into(),
            }
            .into());
        }
        for rank in (0..self.communicator.ranks).filter(|rank| *rank != own) {
            let is_closed = || Ok(!self.is_open_at(rank));
            self.communicator.wait_for_rank(Operation::OneSided, rank, is_closed)?;
        }
        self.record.close();
        Ok(())
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
        self.record.close();
        true
    }
}
