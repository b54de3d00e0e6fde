//! [`GpuWindows`]: GPU memory that other ranks of a communicator access.

use crate::buffer::stream::GpuStream;
use crate::types::dtype::DType;
use crate::types::error::Result;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A block of a list of copies: `len` elements from `local` on in the caller's buffer, and from `remote` on in the other rank's window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GpuBlock {
    /// The first element in the caller's buffer.
    pub local: usize,
    /// The first element in the window.
    pub remote: usize,
    /// How many.
    pub len: usize,
}

/// Elements in GPU memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GpuRegion {
    pub address: u64,
    pub dtype: DType,
    pub len: usize,
}

/// How other ranks find a window: the shared memory that describes it, and the number of the registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GpuWindowKey {
    pub segment: u64,
    pub nonce: [u64; 2],
}

/// Which way a copy goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyDirection {
    /// From the caller's buffer to the window.
    Put,
    /// From the window to the caller's buffer.
    Get,
}

/// GPU memory that other ranks access. Any thread may call it.
pub(crate) trait GpuWindows {
    /// Memory that [`register`](Self::register) takes, zeroed: so many bytes, for `cuMemFree`.
    fn allocate(&self, bytes: usize) -> Result<u64>;

    /// Opens memory of this rank to the others. This waits for the work on `stream`, by which it is filled.
    ///
    /// # Safety
    /// Memory of this rank's GPU, which stays until the window has closed.
    unsafe fn register(&self, region: GpuRegion, stream: &GpuStream) -> Result<Box<dyn GpuWindow>>;

    /// Opens a window of `rank`, which has so many elements of this type, for copies on `stream`. An error unless it is there, exactly so.
    fn open(
        &self,
        key: GpuWindowKey,
        rank: usize,
        elements: (DType, usize),
        stream: &GpuStream,
    ) -> Result<Box<dyn RemoteGpuWindow>>;
}

/// A window of this rank.
pub(crate) trait GpuWindow: Send + Sync {
    fn key(&self) -> GpuWindowKey;

    /// Waits for so many signals of a rank, more than were waited for before.
    fn wait_signals(&self, rank: usize, count: u64) -> Result<()>;

    /// Closes it: nobody opens it or begins a copy any more. Then waits with the deadline until no rank has it open.
    fn close(&self) -> Result<()>;

    /// Closes it, and waits so long. Whether no rank has it open any more.
    fn close_within(&self, limit: Duration) -> bool;
}

/// A window of another rank, open. Dropping it waits for its copies, and closes it.
pub(crate) trait RemoteGpuWindow: Send + Sync {
    /// Enqueues copies of these blocks, of elements of so many bytes.
    ///
    /// # Safety
    /// The blocks lie in the window, and at `local` in memory of this rank's GPU, which is lent to the stream.
    unsafe fn copy(
        &self,
        direction: CopyDirection,
        local: *mut u8,
        element: usize,
        blocks: &[GpuBlock],
    ) -> Result<()>;

    /// Tells the window's rank when the stream's work so far is complete.
    fn signal(&self) -> Result<()>;

    /// Whether the copies are complete.
    fn is_complete(&self) -> Result<bool>;

    /// Waits for the copies.
    fn sync(&self) -> Result<()>;
}
