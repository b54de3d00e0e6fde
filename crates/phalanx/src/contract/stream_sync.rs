//! [`StreamSyncOps`]: events between streams.

use crate::types::error::Result;

/// Events between the communicator's stream and the application's, to overlap computing and communicating.
///
/// Events and streams are handles of the backend, as `u64`: on NCCL a stream is its `CUstream`, which the
/// communicator must know (`Comm::on` registers it; 0, the default stream, is always known). On solo, host and MPI there are no streams:
/// collectives are complete when they return, and waiting for an event waits, within the call, for the messages that
/// were posted before it was recorded on the communicator's stream.
pub trait StreamSyncOps {
    /// Creates an event.
    fn create_event(&self) -> Result<u64>;
    /// Destroys an event.
    fn destroy_event(&self, event: u64) -> Result<()>;
    /// Records the event behind the communicator's work so far.
    fn record_on_comm_stream(&self, event: u64) -> Result<()>;
    /// Records the event behind the work of the application's stream so far.
    fn record_on_stream(&self, event: u64, stream: u64) -> Result<()>;
    /// The communicator's stream goes on only after the event.
    fn comm_stream_wait_event(&self, event: u64) -> Result<()>;
    /// The application's stream goes on only after the event.
    fn stream_wait_event(&self, stream: u64, event: u64) -> Result<()>;
    /// Waits until the communicator's work is complete.
    fn sync_comm_stream(&self) -> Result<()>;
}
