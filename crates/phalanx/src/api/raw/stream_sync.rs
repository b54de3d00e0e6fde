//! Events of a [`Portable`] whose backend has no streams: each is a position in the sequence of posted messages.

use super::{Portable, RawCommunicator};
use crate::contract::StreamSyncOps;
use crate::os::sync::lock;
use crate::types::error::{Result, UsageError};
use std::collections::HashMap;

#[derive(Default)]
pub(super) struct Events {
    next: u64,
    /// For each event, the number of messages posted when it was recorded.
    alive: HashMap<u64, usize>,
}

impl Portable {
    fn check_event(&self, event: u64) -> Result<()> {
        self.messages_before(event).map(drop)
    }

    /// The number of messages posted when the event was recorded.
    fn messages_before(&self, event: u64) -> Result<usize> {
        let posted = lock(&self.events).alive.get(&event).copied();
        posted.ok_or_else(|| UsageError::Event { event }.into())
    }

    fn record(&self, event: u64, posted: usize) -> Result<()> {
        let mut events = lock(&self.events);
        let recorded = events.alive.get_mut(&event).ok_or(UsageError::Event { event })?;
        *recorded = posted;
        Ok(())
    }

    fn wait_for_event(&self, event: u64) -> Result<()> {
        let posted = self.messages_before(event)?;
        let outcome = self.settle_first(posted);
        self.give_up_after(outcome)
    }
}

impl StreamSyncOps for Portable {
    fn create_event(&self) -> Result<u64> {
        let mut events = lock(&self.events);
        events.next += 1;
        let event = events.next;
        events.alive.insert(event, 0);
        Ok(event)
    }

    fn destroy_event(&self, event: u64) -> Result<()> {
        self.check_event(event)?;
        lock(&self.events).alive.remove(&event);
        Ok(())
    }

    fn record_on_comm_stream(&self, event: u64) -> Result<()> {
        let posted = lock(&self.inner).posted;
        self.record(event, posted)
    }

    fn record_on_stream(&self, event: u64, _stream: u64) -> Result<()> {
        self.record(event, 0)
    }

    fn comm_stream_wait_event(&self, event: u64) -> Result<()> {
        self.wait_for_event(event)
    }

    fn stream_wait_event(&self, _stream: u64, event: u64) -> Result<()> {
        self.wait_for_event(event)
    }

    fn sync_comm_stream(&self) -> Result<()> {
        self.sync()
    }
}
