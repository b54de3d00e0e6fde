//! [`Portable`]: a [`Comm`] as a [`RawCommunicator`].

use super::stream_sync::Events;
use super::{RawCommunicator, check_len, check_root};
use crate::api::comm::Comm;
use crate::contract::{Backend, Blocks, Call, Direction, Flow, Operation, StreamSyncOps, Transfer};
use crate::os::sync::lock;
use crate::types::dtype::DType;
use crate::types::error::{Error, Result, UsageError};
use crate::types::memory::Space;
use crate::types::op::ReduceOp;
use crate::watch::Posted;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// A [`Comm`] behind the portable trait. One thread at a time uses it; a thread that waits for messages or a stream lets
/// others in.
pub(crate) struct Portable {
    rank: usize,
    world_size: usize,
    backend: Arc<dyn Backend>,
    pub(super) inner: Mutex<Inner>,
    /// Signalled when a thread has finished waiting for messages.
    waited: Condvar,
    pub(super) events: Mutex<Events>,
    /// The backend, if it has streams of its own.
    streams: Option<Arc<dyn Backend>>,
}

pub(super) struct Inner {
    comm: Comm,
    /// Messages that no thread waits for yet.
    pending: Vec<Posted>,
    /// Numbers of messages posted, and waited for, so far.
    pub(super) posted: usize,
    settled: usize,
    /// Whether a thread waits for the messages before the pending ones.
    is_waiting: bool,
    /// Whether the mover advances them: peers may need them before this rank calls `sync`.
    moved: bool,
}

impl Portable {
    pub fn new(mut comm: Comm) -> Portable {
        comm.make_portable();
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let backend = comm.backend.clone();
        let streams = backend.stream_sync().is_some().then(|| backend.clone());
        let (pending, posted, settled) = (Vec::new(), 0, 0);
        let inner = Mutex::new(Inner { comm, pending, posted, settled, is_waiting: false, moved: false });
        Portable {
            rank,
            world_size,
            backend,
            inner,
            waited: Condvar::new(),
            events: Mutex::default(),
            streams,
        }
    }

    /// Checks what can be checked of raw buffers, and carries the call out.
    ///
    /// # Safety
    /// As for the trait: the buffers of the call are valid.
    unsafe fn collective(&self, call: Call<'_>) -> Result<()> {
        let (operation, flow) = (call.operation.name(), call.flow());
        let Blocks::Equal(count) = call.blocks else { unreachable!("the trait has equal blocks") };
        let blocks = if flow.scattered || flow.gathered { self.world_size } else { 1 };
        let call = call.of_type(call.dtype)?;
        check_len(operation, count, blocks, call.dtype)?;
        if call.operation.is_rooted() {
            check_root(operation, call.root, self.world_size)?;
        }
        let buffers = [("send", call.send, flow.writers), ("recv", call.recv.cast_const(), flow.readers)];
        for (buffer, pointer, users) in buffers {
            if users.includes(self.rank) && pointer.is_null() && count > 0 {
                return Err(UsageError::NullPointer { operation, buffer, count }.into());
            }
        }
        self.check_overlap(&call, &flow)?;
        let inner = lock(&self.inner);
        let space = inner.space();
        let call = Call { spaces: [space; 2], stream: inner.comm.stream.raw(), ..call };
        let outcome = inner.comm.run_call(&call);
        drop(inner);
        self.give_up_after(outcome)
    }

    /// An error for a send and a recv buffer that overlap in another way than in place.
    fn check_overlap(&self, call: &Call<'_>, flow: &Flow<'_>) -> Result<()> {
        let (rank, ranks) = (self.rank, self.world_size);
        if !flow.writers.includes(rank) || !flow.readers.includes(rank) {
            return Ok(());
        }
        let (send, recv) = (call.send as u64, call.recv as u64);
        let rule = match (flow.scattered, flow.gathered) {
            (true, true) => "in place, both are the same",
            _ => "in place, the rank's own block is at its place in the larger buffer",
        };
        let (send_bytes, recv_bytes) = (flow.send_len(rank, ranks), flow.recv_len(rank, ranks));
        let apart =
            send.saturating_add(send_bytes as u64) <= recv || recv.saturating_add(recv_bytes as u64) <= send;
        if apart || flow.is_in_place(call.send, call.recv, rank) {
            return Ok(());
        }
        let operation = call.operation.name();
        Err(UsageError::Overlap { operation, send, send_bytes, recv, recv_bytes, rule }.into())
    }

    fn post(&self, operation: &'static str, transfer: Transfer) -> Result<()> {
        let Transfer { direction, peer: rank, count, dtype, .. } = transfer;
        if rank >= self.world_size {
            let world_size = self.world_size;
            return Err(UsageError::Rank { operation, role: "peer", rank, world_size }.into());
        }
        check_len(operation, count, 1, dtype)?;
        let (buffer, null) = match direction {
            Direction::Send(pointer) => ("send", pointer.is_null()),
            Direction::Recv(pointer) => ("recv", pointer.is_null()),
        };
        if null && count > 0 {
            return Err(UsageError::NullPointer { operation, buffer, count }.into());
        }
        let posted = lock(&self.inner).post(transfer);
        self.give_up_after(posted)
    }

    /// Settles everything after a fatal error: callers may then reuse their buffers.
    pub(super) fn give_up_after(&self, outcome: Result<()>) -> Result<()> {
        if outcome.as_ref().is_err_and(Error::is_fatal) {
            // The caller gets the first error.
            let _ = self.settle();
        }
        outcome
    }

    /// Waits for all posted messages.
    fn settle(&self) -> Result<()> {
        let posted = lock(&self.inner).posted;
        self.settle_first(posted)
    }

    /// Waits for the first `posted` messages. A peer may depend on calls of this rank's other threads, so the lock is released
    /// meanwhile.
    pub(super) fn settle_first(&self, posted: usize) -> Result<()> {
        let (mut inner, mut outcome) = (lock(&self.inner), Ok(()));
        while inner.settled < posted {
            if inner.is_waiting {
                inner = self.waited.wait(inner).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let count = posted - inner.settled;
            let taken: Vec<Posted> = inner.pending.drain(..count).collect();
            inner.is_waiting = true;
            drop(inner);
            let waited: Vec<_> = taken.iter().map(|posted| self.backend.wait(posted.id, &|| ())).collect();
            inner = lock(&self.inner);
            inner.is_waiting = false;
            inner.settled += count;
            for (posted, waited) in taken.iter().zip(waited) {
                outcome = outcome.and(inner.comm.recorder.end(posted.record, waited));
            }
            self.waited.notify_all();
        }
        inner.stop_moving();
        // Another thread may have waited for these messages and received the error.
        outcome.and_then(|()| self.backend.check())
    }
}

impl Inner {
    /// The memory that the caller's addresses are in: the backend's own.
    fn space(&self) -> Space {
        if self.comm.stream.is_host() { Space::Host } else { Space::Device }
    }

    fn post(&mut self, transfer: Transfer) -> Result<()> {
        let requests = &self.comm.requests;
        if !self.comm.backend.is_stream_ordered() {
            // Before the post: a failure to start the thread must leave nothing posted.
            requests.start_mover()?;
        }
        let transfer = Transfer { space: self.space(), stream: self.comm.stream.raw(), ..transfer };
        // SAFETY: the caller of `send` or `recv` keeps the buffer until `sync`, which settles the transfer.
        let posted = unsafe { self.comm.post(transfer) };
        let started = posted.and_then(|posted| {
            self.pending.push(posted);
            self.posted += 1;
            // Completes small messages at once.
            self.comm.backend.progress()
        });
        if let Ok(true) = started
            && !self.moved
        {
            self.moved = true;
            requests.begin_moving();
        }
        started.map(drop)
    }

    /// Stops the mover when no message is under way.
    fn stop_moving(&mut self) {
        if self.settled == self.posted && std::mem::take(&mut self.moved) {
            self.comm.requests.end_moving();
        }
    }
}

impl Drop for Portable {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // Dropping the communicator tells the peers at once.
            return;
        }
        let inner = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner);
        if inner.comm.requests.is_copy() {
            // The pending messages belong to the parent process.
            return;
        }
        if let Err(error) = self.sync() {
            crate::os::log::error!("a communicator was dropped with work pending, which failed: {error}");
        }
    }
}

fn simple(operation: Operation, ptr: u64, count: usize, dtype: DType) -> Call<'static> {
    let (send, recv) = (ptr as *const u8, ptr as *mut u8);
    let blocks = Blocks::Equal(count);
    Call { dtype, send, recv, blocks, recv_blocks: blocks, ..Call::empty(operation) }
}

impl RawCommunicator for Portable {
    fn world_size(&self) -> usize {
        self.world_size
    }

    fn rank(&self) -> usize {
        self.rank
    }

    unsafe fn all_reduce(&self, ptr: u64, count: usize, dtype: DType, op: ReduceOp) -> Result<()> {
        let call = Call { reduction: op.into(), ..simple(Operation::AllReduce, ptr, count, dtype) };
        // SAFETY: the caller's contract.
        unsafe { self.collective(call) }
    }

    unsafe fn broadcast(&self, ptr: u64, count: usize, dtype: DType, root: usize) -> Result<()> {
        let call = Call { root, ..simple(Operation::Broadcast, ptr, count, dtype) };
        // SAFETY: the caller's contract.
        unsafe { self.collective(call) }
    }

    unsafe fn all_gather(&self, send_ptr: u64, recv_ptr: u64, count: usize, dtype: DType) -> Result<()> {
        let recv = recv_ptr as *mut u8;
        let call = Call { recv, ..simple(Operation::AllGather, send_ptr, count, dtype) };
        // SAFETY: the caller's contract.
        unsafe { self.collective(call) }
    }

    unsafe fn reduce_scatter(
        &self,
        send_ptr: u64,
        recv_ptr: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        let (recv, reduction) = (recv_ptr as *mut u8, op.into());
        let call = Call { recv, reduction, ..simple(Operation::ReduceScatter, send_ptr, count, dtype) };
        // SAFETY: the caller's contract.
        unsafe { self.collective(call) }
    }

    unsafe fn send(&self, ptr: u64, count: usize, dtype: DType, dest: usize, tag: u32) -> Result<()> {
        let direction = Direction::Send(ptr as *const u8);
        self.post("send", Transfer::host(direction, dest, tag, dtype, count))
    }

    unsafe fn recv(&self, ptr: u64, count: usize, dtype: DType, src: usize, tag: u32) -> Result<()> {
        let direction = Direction::Recv(ptr as *mut u8);
        self.post("recv", Transfer::host(direction, src, tag, dtype, count))
    }

    fn sync(&self) -> Result<()> {
        self.settle()?;
        // Other operations on the host are complete when they return.
        let is_on_host = lock(&self.inner).comm.stream.is_host();
        if is_on_host { Ok(()) } else { self.backend.sync() }
    }

    fn barrier(&self) -> Result<()> {
        self.sync()?;
        lock(&self.inner).comm.barrier()
    }

    fn split(&self, color: u32, key: u32) -> Result<Option<Box<dyn RawCommunicator>>> {
        let part = lock(&self.inner).comm.split(Some(color), key.into())?;
        Ok(part.map(|comm| Box::new(Portable::new(comm)) as Box<dyn RawCommunicator>))
    }

    fn as_stream_sync(&self) -> Option<&dyn StreamSyncOps> {
        Some(self.streams.as_deref().map_or(self as &dyn StreamSyncOps, |backend| {
            backend.stream_sync().expect("kept because it has")
        }))
    }

    unsafe fn reduce(&self, ptr: u64, count: usize, dtype: DType, op: ReduceOp, root: usize) -> Result<()> {
        let reduction = op.into();
        let call = Call { reduction, root, ..simple(Operation::Reduce, ptr, count, dtype) };
        // SAFETY: the caller's contract.
        unsafe { self.collective(call) }
    }

    unsafe fn all_to_all(&self, send_ptr: u64, recv_ptr: u64, count: usize, dtype: DType) -> Result<()> {
        let recv = recv_ptr as *mut u8;
        let call = Call { recv, ..simple(Operation::AllToAll, send_ptr, count, dtype) };
        // SAFETY: the caller's contract.
        unsafe { self.collective(call) }
    }

    unsafe fn gather(
        &self,
        send_ptr: u64,
        recv_ptr: u64,
        count: usize,
        dtype: DType,
        root: usize,
    ) -> Result<()> {
        let recv = recv_ptr as *mut u8;
        let call = Call { recv, root, ..simple(Operation::Gather, send_ptr, count, dtype) };
        // SAFETY: the caller's contract.
        unsafe { self.collective(call) }
    }

    unsafe fn scatter(
        &self,
        send_ptr: u64,
        recv_ptr: u64,
        count: usize,
        dtype: DType,
        root: usize,
    ) -> Result<()> {
        let recv = recv_ptr as *mut u8;
        let call = Call { recv, root, ..simple(Operation::Scatter, send_ptr, count, dtype) };
        // SAFETY: the caller's contract.
        unsafe { self.collective(call) }
    }
}
