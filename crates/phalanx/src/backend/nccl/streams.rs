//! Events between the communicator's stream and the application's, by handle.

use super::NcclComm;
use super::device::GpuEvent;
use crate::buffer::stream::GpuStream;
use crate::contract::{Backend, StreamSyncOps};
use crate::os::sync::lock;
use crate::types::error::{Result, UsageError};
use crate::types::memory::RawStream;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

/// The events that were made and not destroyed.
#[derive(Default)]
pub(crate) struct Events(Mutex<Alive>);

#[derive(Default)]
struct Alive {
    last: u64,
    events: HashMap<u64, Arc<GpuEvent>>,
}

impl NcclComm {
    fn event(&self, event: u64) -> Result<Arc<GpuEvent>> {
        lock(&self.events.0).events.get(&event).cloned().ok_or_else(|| UsageError::Event { event }.into())
    }

    /// A stream by its C handle, among those that the communicator knows: a number alone proves nothing.
    fn stream_of(&self, handle: u64) -> Result<GpuStream> {
        self.communicator
            .stream_of(RawStream(handle as *mut c_void))
            .ok_or_else(|| UsageError::Stream { stream: handle }.into())
    }
}

impl StreamSyncOps for NcclComm {
    fn create_event(&self) -> Result<u64> {
        let event = GpuEvent::new(&self.communicator.device)?;
        let mut alive = lock(&self.events.0);
        alive.last += 1;
        let number = alive.last;
        alive.events.insert(number, Arc::new(event));
        Ok(number)
    }

    fn destroy_event(&self, event: u64) -> Result<()> {
        let removed = lock(&self.events.0).events.remove(&event);
        removed.map(drop).ok_or_else(|| UsageError::Event { event }.into())
    }

    fn record_on_comm_stream(&self, event: u64) -> Result<()> {
        self.flush()?;
        self.event(event)?.record(&self.portable_stream())
    }

    fn record_on_stream(&self, event: u64, stream: u64) -> Result<()> {
        self.event(event)?.record(&self.stream_of(stream)?)
    }

    fn comm_stream_wait_event(&self, event: u64) -> Result<()> {
        self.flush()?;
        self.event(event)?.hold(&self.portable_stream())
    }

    fn stream_wait_event(&self, stream: u64, event: u64) -> Result<()> {
        // After a failure the event may never have been recorded, and the stream would go on at once.
        self.communicator.check()?;
        self.event(event)?.hold(&self.stream_of(stream)?)
    }

    fn sync_comm_stream(&self) -> Result<()> {
        self.sync()
    }
}
