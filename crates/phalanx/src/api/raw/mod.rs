//! The portable contract: [`RawCommunicator`], for runtimes that hold pointers as `u64`.
//!
//! Its shape is that of numr's trait `Communicator`, so code written against that trait can use any backend through
//! `Arc<dyn RawCommunicator>`; reduce, all_to_all, gather and scatter are added. Typed code uses
//! [`Comm`](crate::Comm) instead; [`Comm::into_raw_communicator`](crate::Comm::into_raw_communicator) goes from one to
//! the other.

mod portable;
mod stream_sync;

pub(crate) use portable::Portable;

use crate::contract::StreamSyncOps;
use crate::types::dtype::DType;
use crate::types::error::{Result, UsageError};
use crate::types::op::ReduceOp;

/// Collective communication on raw memory.
///
/// Pointers are addresses in the memory of the backend (host memory on solo and host; device memory on
/// GPUs), counts are elements of `dtype`.
///
/// - **Completion** depends on the backend: call [`sync`](RawCommunicator::sync) before reading a result or reusing a send
///   buffer.
/// - **Threads**: several may call, and agree on the order of their calls themselves. While one is in a collective the others
///   wait, but not while it waits in `sync` or for an event.
/// - **Drop** with work pending waits for it, up to the deadline; it logs failures and never panics.
///
/// # Safety
/// The operations are unsafe because addresses cannot be checked: each buffer must be valid for its count,
/// stay so until `sync` or `barrier` has returned or any call has failed with an error that [is
/// fatal](crate::Error::is_fatal), and not be touched by others in the meantime. The send and the recv buffer of a call do not
/// overlap ([`UsageError::Overlap`] otherwise), but in place: in all_gather, reduce_scatter, and at the root of gather and scatter the
/// block of the rank is at its place in the larger buffer; in all_to_all both are the same.
#[expect(clippy::missing_safety_doc, reason = "one section for all methods, above")]
pub trait RawCommunicator: Send + Sync {
    /// The number of ranks.
    fn world_size(&self) -> usize;

    /// This rank's number, from 0.
    fn rank(&self) -> usize;

    /// Combines all ranks' `count` elements, in place; every rank gets the result.
    unsafe fn all_reduce(&self, ptr: u64, count: usize, dtype: DType, op: ReduceOp) -> Result<()>;

    /// Copies the root's `count` elements to every rank.
    unsafe fn broadcast(&self, ptr: u64, count: usize, dtype: DType, root: usize) -> Result<()>;

    /// Gathers `count` elements of each rank; `recv_ptr` has room for `count × world_size`.
    unsafe fn all_gather(&self, send_ptr: u64, recv_ptr: u64, count: usize, dtype: DType) -> Result<()>;

    /// Combines `count × world_size` elements of each rank; each rank gets its block of `count`.
    unsafe fn reduce_scatter(
        &self,
        send_ptr: u64,
        recv_ptr: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()>;

    /// Starts sending to `dest`; the buffer must not change until `sync`. MPI and the host match on the tag,
    /// NCCL ignores it.
    unsafe fn send(&self, ptr: u64, count: usize, dtype: DType, dest: usize, tag: u32) -> Result<()>;

    /// Starts receiving from `src`; the data is there after `sync`.
    unsafe fn recv(&self, ptr: u64, count: usize, dtype: DType, src: usize, tag: u32) -> Result<()>;

    /// Waits until all of this rank's operations are complete.
    fn sync(&self) -> Result<()>;

    /// Waits until every rank has called it; implies `sync`.
    fn barrier(&self) -> Result<()>;

    /// The communicator of the ranks with the same colour, ordered by `key` and then by rank. `None` where
    /// the backend cannot split; every backend of this crate can.
    fn split(&self, _color: u32, _key: u32) -> Result<Option<Box<dyn RawCommunicator>>> {
        Ok(None)
    }

    /// Events that order this communicator's stream and the application's, where the backend has streams.
    fn as_stream_sync(&self) -> Option<&dyn StreamSyncOps> {
        None
    }

    /// Combines all ranks' `count` elements, in place; the root gets the result. What other ranks' buffers
    /// hold afterwards is unspecified.
    unsafe fn reduce(&self, ptr: u64, count: usize, dtype: DType, op: ReduceOp, root: usize) -> Result<()> {
        check_root("reduce", root, self.world_size())?;
        // SAFETY: the caller's contract.
        unsafe { self.all_reduce(ptr, count, dtype, op) }
    }

    /// Block `j` of rank `i` becomes block `i` of rank `j`; a block has `count` elements, each buffer
    /// `count × world_size`. (This default is not for one buffer in place.)
    unsafe fn all_to_all(&self, send_ptr: u64, recv_ptr: u64, count: usize, dtype: DType) -> Result<()> {
        const APART: &str = "where all_to_all is made of messages, the buffers are apart";
        let operation = "all_to_all";
        let bytes = check_len(operation, count, self.world_size(), dtype)?;
        if send_ptr == recv_ptr && bytes > 0 {
            let (send, recv, rule) = (send_ptr, recv_ptr, APART);
            let overlap =
                UsageError::Overlap { operation, send, send_bytes: bytes, recv, recv_bytes: bytes, rule };
            return Err(overlap.into());
        }
        let block = (count * dtype.size()) as u64;
        for rank in 0..self.world_size() {
            let offset = rank as u64 * block;
            // SAFETY: the blocks lie in the caller's buffers.
            unsafe {
                self.recv(recv_ptr + offset, count, dtype, rank, 0)?;
                self.send(send_ptr + offset, count, dtype, rank, 0)?;
            }
        }
        self.sync()
    }

    /// Gathers `count` elements of each rank at the root, where `recv_ptr` has room for
    /// `count × world_size`; elsewhere it is not used. (This default, and that of `scatter` and `all_to_all`, sends messages
    /// with tag 0.)
    unsafe fn gather(
        &self,
        send_ptr: u64,
        recv_ptr: u64,
        count: usize,
        dtype: DType,
        root: usize,
    ) -> Result<()> {
        check_root("gather", root, self.world_size())?;
        check_len("gather", count, self.world_size(), dtype)?;
        let block = (count * dtype.size()) as u64;
        let place = |rank: usize| recv_ptr.wrapping_add(rank as u64 * block);
        let is_in_place = self.rank() == root && send_ptr == place(root);
        // SAFETY: the blocks lie in the caller's buffers.
        unsafe {
            if !is_in_place {
                self.send(send_ptr, count, dtype, root, 0)?;
            }
            if self.rank() == root {
                for rank in (0..self.world_size()).filter(|rank| *rank != root || !is_in_place) {
                    self.recv(place(rank), count, dtype, rank, 0)?;
                }
            }
        }
        self.sync()
    }

    /// Gives each rank its block of `count` elements of the root's `count × world_size`; elsewhere
    /// `send_ptr` is not used.
    unsafe fn scatter(
        &self,
        send_ptr: u64,
        recv_ptr: u64,
        count: usize,
        dtype: DType,
        root: usize,
    ) -> Result<()> {
        check_root("scatter", root, self.world_size())?;
        check_len("scatter", count, self.world_size(), dtype)?;
        let block = (count * dtype.size()) as u64;
        let place = |rank: usize| send_ptr.wrapping_add(rank as u64 * block);
        let is_in_place = self.rank() == root && recv_ptr == place(root);
        // SAFETY: the blocks lie in the caller's buffers.
        unsafe {
            if !is_in_place {
                self.recv(recv_ptr, count, dtype, root, 0)?;
            }
            if self.rank() == root {
                for rank in (0..self.world_size()).filter(|rank| *rank != root || !is_in_place) {
                    self.send(place(rank), count, dtype, rank, 0)?;
                }
            }
        }
        self.sync()
    }
}

/// The length in bytes of `blocks` blocks of `count` elements, checked against overflow.
fn check_len(operation: &'static str, count: usize, blocks: usize, dtype: DType) -> Result<usize> {
    let bytes = count.checked_mul(blocks).and_then(|all| all.checked_mul(dtype.size()));
    bytes.filter(|bytes| *bytes <= isize::MAX as usize).ok_or_else(|| {
        let value = format!("{count} × {blocks} × {}", dtype.size());
        let limit = isize::MAX.to_string();
        UsageError::Overflow { operation, what: "the length in bytes", value, limit }.into()
    })
}

fn check_root(operation: &'static str, rank: usize, world_size: usize) -> Result<()> {
    if rank < world_size {
        Ok(())
    } else {
        Err(UsageError::Rank { operation, role: "root", rank, world_size }.into())
    }
}
