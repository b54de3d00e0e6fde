//! The backend of a dry run: one process is rank r of n, the other ranks do not exist, and every operation is listed.
//!
//! An operation gives what it would give if every other rank held the same data as this one. What only another rank has (a message, the
//! buffer of another root) is 0; in place, the buffer stays as it was. So every output is initialised, as after any operation.

use crate::contract::{
    Backend, BackendKind, Blocks, Call, Departure, Direction, DryCall, HostMemory, Operation, OperationId,
    RankGrid, Transfer, Window,
};
use crate::os::Mapping;
use crate::os::sync::lock;
use crate::reduce::{Reducer, Targets};
use crate::types::error::{Error, Result, UnsupportedError};
use crate::types::memory::Allocation;
use crate::types::op::ReductionCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// The operations so far, of all communicators of a dry run.
pub(crate) type DryLog = Arc<Mutex<Vec<DryCall>>>;

/// A rank whose peers do not exist.
pub(crate) struct DryComm {
    rank: usize,
    /// The ranks of this communicator, as numbers in the whole job.
    members: Arc<[usize]>,
    log: DryLog,
    timeout: AtomicU64,
    failed: OnceLock<Error>,
}

impl DryComm {
    pub fn new(rank: usize, members: Vec<usize>, log: DryLog, timeout: Duration) -> DryComm {
        let timeout = AtomicU64::new(nanos(timeout));
        DryComm { rank, members: members.into(), log, timeout, failed: OnceLock::new() }
    }

    fn list(&self, call: DryCall) {
        lock(&self.log).push(call);
    }

    /// Lists a collective with the bytes that this rank gives and gets.
    fn list_collective(&self, call: &Call<'_>) {
        let is_root = call.root == self.rank;
        let own = call.blocks.len(self.rank);
        let all = || all(&call.blocks, self.world_size());
        let (send, recv) = match call.operation {
            Operation::AllReduce | Operation::Scan | Operation::ExclusiveScan => (own, own),
            Operation::Broadcast => (if is_root { own } else { 0 }, own),
            Operation::Reduce => (own, if is_root { own } else { 0 }),
            Operation::AllGather | Operation::AllGatherV => (own, all()),
            Operation::Gather | Operation::GatherV => (own, if is_root { all() } else { 0 }),
            Operation::ReduceScatter | Operation::ReduceScatterV => (all(), own),
            Operation::Scatter | Operation::ScatterV => (if is_root { all() } else { 0 }, own),
            Operation::AllToAll | Operation::AllToAllV => {
                (all(), self::all(&call.recv_blocks, self.world_size()))
            }
            _ => (0, 0),
        };
        let size = call.dtype.size();
        self.list(DryCall {
            operation: call.operation.name(),
            dtype: (!call.operation.is_empty_handed()).then_some(call.dtype),
            send_bytes: send * size,
            recv_bytes: recv * size,
            members: self.members.clone(),
            peer: None,
        });
    }

    /// Carries out a collective among copies of this rank.
    ///
    /// # Safety
    /// As for [`Backend::collective`].
    unsafe fn among_copies(&self, call: &Call<'_>) {
        use Operation::*;
        let (size, is_root) = (call.dtype.size(), call.root == self.rank);
        let own = call.blocks.len(self.rank);
        // SAFETY: `call` was checked, so each block is where `Call`'s table says: the own block and the blocks of all ranks lie
        // inside the buffers. In place, source and target of a copy are the same place, or apart.
        unsafe {
            match call.operation {
                AllReduce => self.reduce(call, call.send, own),
                // As many ranks are before this one.
                Scan => self.reduce_copies(call, call.send, own, self.rank + 1),
                ExclusiveScan => self.reduce_copies(call, call.send, own, self.rank),
                Reduce if is_root => self.reduce(call, call.send, own),
                ReduceScatter | ReduceScatterV => {
                    self.reduce(call, call.send.add(call.blocks.offset(self.rank) * size), own);
                }
                Broadcast if is_root => copy_block(call.send, call.recv, own * size),
                Broadcast => self.unknown(call, 0, own * size),
                Scatter | ScatterV => {
                    let offset = call.blocks.offset(self.rank) * size;
                    if is_root {
                        copy_block(call.send.add(offset), call.recv, own * size);
                    } else {
                        self.unknown(call, offset, own * size);
                    }
                }
                AllGather | AllGatherV => {
                    self.fill_blocks(&call.blocks, call.send, own * size, call.recv, size)
                }
                Gather | GatherV if is_root => {
                    self.fill_blocks(&call.blocks, call.send, own * size, call.recv, size)
                }
                AllToAll | AllToAllV => {
                    // In place, the block is overwritten by an earlier one's copy.
                    let block = call.send.add(call.blocks.offset(self.rank) * size);
                    let block = if own == 0 {
                        Vec::new()
                    } else {
                        std::slice::from_raw_parts(block, own * size).to_vec()
                    };
                    self.fill_blocks(&call.recv_blocks, block.as_ptr(), block.len(), call.recv, size);
                }
                _ => {}
            }
        }
    }

    /// Output that only another rank knows: zeros, unless it is at `offset` of the input, in place.
    ///
    /// # Safety
    /// `call.recv` has so many bytes.
    unsafe fn unknown(&self, call: &Call<'_>, offset: usize, bytes: usize) {
        // Without a root's data, `send` may be no more than an address.
        if bytes > 0 && call.recv.cast_const() != call.send.wrapping_add(offset) {
            // SAFETY: the caller's contract; zero bytes are a number of every element type.
            unsafe { call.recv.write_bytes(0, bytes) };
        }
    }

    /// Reduces as many copies of `count` elements as there are ranks.
    ///
    /// # Safety
    /// `source` and `call.recv` have `count` elements; they are the same place, or apart.
    unsafe fn reduce(&self, call: &Call<'_>, source: *const u8, count: usize) {
        // SAFETY: the caller's contract.
        unsafe { self.reduce_copies(call, source, count, self.world_size()) }
    }

    /// Reduces so many copies of `count` elements; none leave `call.recv` as it is.
    ///
    /// # Safety
    /// As for `reduce`.
    unsafe fn reduce_copies(&self, call: &Call<'_>, source: *const u8, count: usize, copies: usize) {
        use ReductionCode::*;
        // The mean, minimum and maximum of copies is one of them, and so are the bits that all or any have.
        let copies = match call.reduction.code {
            Avg | Min | Max | BitAnd | BitOr | LogicalAnd | LogicalOr | LocateMin | LocateMax => {
                copies.min(1)
            }
            Sum | Prod | PreMulSum | BitXor | LogicalXor | Custom => copies,
        };
        if copies == 0 {
            return;
        }
        let reducer = Reducer::of(call);
        let (sources, factors) = (vec![source; copies], vec![call.reduction.factor; copies]);
        // SAFETY: the caller's contract; the target is a source, or apart from all of them.
        unsafe { reducer.run(Targets::new(&[call.recv], false), &sources, &factors, count) };
    }

    /// Puts a block of so many bytes in the place of each rank's block, as far as it goes, and zeros behind it.
    ///
    /// # Safety
    /// `block` has so many bytes, and `to` has all blocks, of elements of `size` bytes. `block` is apart from `to`, or at this rank's place.
    unsafe fn fill_blocks(
        &self,
        blocks: &Blocks<'_>,
        block: *const u8,
        bytes: usize,
        to: *mut u8,
        size: usize,
    ) {
        let mut start = 0;
        for rank in 0..self.world_size() {
            let len = blocks.len(rank) * size;
            // SAFETY: blocks follow one another in `to`, and no more than this one's bytes are written.
            unsafe {
                copy_block(block, to.add(start), len.min(bytes));
                to.add(start + len.min(bytes)).write_bytes(0, len.saturating_sub(bytes));
            }
            start += len;
        }
    }
}

/// Copies between places that may be the same.
///
/// # Safety
/// Both have so many bytes.
unsafe fn copy_block(from: *const u8, to: *mut u8, bytes: usize) {
    if bytes > 0 {
        // SAFETY: the caller's contract; `copy` allows overlap.
        unsafe { std::ptr::copy(from, to, bytes) };
    }
}

fn all(blocks: &Blocks<'_>, ranks: usize) -> usize {
    (0..ranks).map(|rank| blocks.len(rank)).sum()
}

fn nanos(timeout: Duration) -> u64 {
    timeout.as_nanos().try_into().unwrap_or(u64::MAX)
}

fn unsupported(what: &str, why: &str, remedy: &str) -> Error {
    UnsupportedError { what: what.into(), why: why.into(), remedy: remedy.into() }.into()
}

fn no_other_parts(what: &str) -> Error {
    unsupported(
        what,
        "a dry run has no other ranks, whose memory it could be",
        "use a communicator of all ranks",
    )
}

impl Backend for DryComm {
    fn kind(&self) -> BackendKind {
        BackendKind::DryRun
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.members.len()
    }

    unsafe fn collective(&self, call: &Call<'_>) -> Result<()> {
        self.check()?;
        self.list_collective(call);
        // SAFETY: the caller's contract.
        unsafe { self.among_copies(call) };
        Ok(())
    }

    unsafe fn post(&self, transfer: Transfer) -> Result<OperationId> {
        self.check()?;
        let bytes = transfer.count * transfer.dtype.size();
        let (send_bytes, recv_bytes) = match transfer.direction {
            Direction::Send(_) => (bytes, 0),
            Direction::Recv(target) => {
                if bytes > 0 {
                    // SAFETY: the posted buffer has so many bytes; zero bytes are a number of every element type.
                    unsafe { target.write_bytes(0, bytes) };
                }
                (0, bytes)
            }
        };
        self.list(DryCall {
            operation: transfer.operation().name(),
            dtype: Some(transfer.dtype),
            send_bytes,
            recv_bytes,
            members: self.members.clone(),
            peer: Some(self.members[transfer.peer]),
        });
        // All transfers are complete at once.
        Ok(OperationId(0))
    }

    fn wait(&self, _operation: OperationId, _meanwhile: &dyn Fn()) -> Result<()> {
        self.check()
    }

    fn test(&self, _operation: OperationId) -> Result<bool> {
        self.check().map(|()| true)
    }

    fn progress(&self) -> Result<bool> {
        Ok(false)
    }

    fn check(&self) -> Result<()> {
        self.failed.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    fn shrink(&self) -> Result<(Box<dyn Backend>, Vec<u64>)> {
        Err(unsupported("shrink", "no rank is lost in a dry run", "leave the recovery out of the dry run"))
    }

    unsafe fn split(&self, color: Option<u32>, _key: i64) -> Result<Option<Box<dyn Backend>>> {
        self.check()?;
        if color.is_none() {
            return Ok(None);
        }
        Err(unsupported(
            "split in a dry run",
            "the colours of ranks that do not exist are not known",
            "use split_grid, which says which ranks come together",
        ))
    }

    unsafe fn split_grid(&self, grid: &RankGrid<'_>) -> Result<Vec<Box<dyn Backend>>> {
        self.check()?;
        self.list_collective(&grid.call());
        let part = |group: &&[usize]| {
            let ranks = grid.members(group, self.rank);
            let rank = ranks.iter().position(|rank| *rank == self.rank).expect("a rank is in its own group");
            let members = ranks.iter().map(|rank| self.members[*rank]).collect();
            Box::new(DryComm::new(rank, members, self.log.clone(), self.timeout())) as Box<dyn Backend>
        };
        Ok(grid.groups.iter().map(part).collect())
    }

    unsafe fn symmetric(&self, _call: &Call<'_>) -> Result<Box<dyn Window + '_>> {
        Err(no_other_parts("symmetric"))
    }

    unsafe fn shared_by_host(&self, _call: &Call<'_>) -> Result<Box<dyn HostMemory>> {
        Err(no_other_parts("shared_by_host"))
    }

    fn alloc(&self, bytes: usize) -> Result<Allocation> {
        let memory = Mapping::anonymous(bytes.max(1))?;
        Ok(Allocation { start: memory.as_ptr(), keep: Box::new(memory) })
    }

    fn timeout(&self) -> Duration {
        Duration::from_nanos(self.timeout.load(Ordering::Relaxed))
    }

    fn set_timeout(&self, timeout: Duration) {
        self.timeout.store(nanos(timeout), Ordering::Relaxed);
    }

    fn abort(&self) {
        self.failed.get_or_init(|| Error::Aborted { rank: self.rank });
    }

    fn depart(&self, _departure: Departure) {}
}

#[cfg(test)]
mod tests;
