//! Windows: MPI's, in one passive epoch (`MPI_Win_lock_all`) from their beginning to their end. If all ranks are on one host, they map each
//! other's parts, and load and store there.
//!
//! A rank's part begins with the signals that the other ranks have given it, a counter for each.
//!
//! Only all ranks together can free a window. Those that are dropped are freed when the process ends, in the order in which they were made.

use super::process::MpiProcess;
use super::watchdog::OperationWatch;
use super::{MpiComm, MpiFailure, check, datatype, moved_type};
use crate::contract::{AtomicOp, Blocks, Call, HostMemory, MappedParts, Operation, RemoteSlice, Window};
use crate::control::record::CallRecord;
use crate::os::RunInstant;
use crate::os::sync::lock;
use crate::types::dtype::DType;
use crate::types::error::{Error, MismatchError, MissingRank, Result, TimeoutError, UsageError};
use crate::types::op::ReductionCode;
use phalanx_sys::mpi::{Functions, Handle};
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

/// Polls for a signal before the core is yielded.
const SPINS: u32 = 100;

/// What parts and shared memory are aligned to.
const ALIGN: usize = 64;
const PAGE: usize = 4096;

struct MpiWindow<'a> {
    comm: &'a MpiComm,
    handle: Handle,
    number: u64,
    /// Where this rank's memory begins.
    start: *mut u8,
    /// Bytes of each rank's memory before its signals, which are aligned: MPI's memory need not be.
    before: Vec<usize>,
    /// Bytes of the signals.
    header: usize,
    /// The parts, if all ranks are on one host: this process then loads and stores there, and MPI moves nothing.
    parts: Option<MappedParts>,
    /// Signals of each rank that were waited for.
    heard: Vec<Cell<u64>>,
}

struct MpiHostMemory {
    process: &'static MpiProcess,
    watch: Arc<OperationWatch>,
    world_rank: usize,
    /// `None` once it is freed.
    handle: Option<Handle>,
    number: u64,
    /// The communicator of the host's ranks.
    host: Handle,
    start: *mut u8,
    place: (usize, usize),
}

// SAFETY: the address is that of plain memory, and MPI's handles may be used on any thread that may call MPI, which `free` checks.
unsafe impl Send for MpiHostMemory {}
// SAFETY: as above; a shared reference gives the address only.
unsafe impl Sync for MpiHostMemory {}

impl MpiComm {
    /// Memory of which every rank has a part.
    ///
    /// # Safety
    /// As for [`Backend::symmetric`].
    pub(super) unsafe fn window(&self, call: &Call<'_>) -> Result<Box<dyn Window + '_>> {
        // SAFETY: the caller's contract.
        unsafe { self.begin_allocation(call) }?;
        let header = (self.ranks * size_of::<u64>()).next_multiple_of(2 * ALIGN);
        // MPICH 4.0 takes other places for the parts than it says, if they are no whole pages.
        let len = (ALIGN + header + bytes_of(call)).next_multiple_of(PAGE);
        let (record, sequence) = (CallRecord::of(call), self.watch.last());
        let _watched = self.watch.enter(&record);
        let made = || {
            let maps = self.process.maps_windows && self.is_on_one_host()?;
            let (f, constants) = (&self.process.mpi.functions, &self.process.mpi.constants);
            let (info, size) = (constants.info_null, len as isize);
            let (mut handle, mut start) = (Handle::ZERO, std::ptr::null_mut::<u8>());
            let base = (&raw mut start).cast();
            // SAFETY: the communicator is alive; the variables take the window and where its memory begins: this rank's, or the first
            // rank's, behind which is that of the others. Nobody accesses it before all ranks have met.
            unsafe {
                if maps {
                    let allocated = (f.win_allocate_shared)(size, 1, info, self.comm, base, &raw mut handle);
                    check("MPI_Win_allocate_shared", allocated)?;
                    start = first_part(f, handle)?.wrapping_add(self.rank * len);
                } else {
                    let allocated = (f.win_allocate)(size, 1, info, self.comm, base, &raw mut handle);
                    check("MPI_Win_allocate", allocated)?;
                }
                start.write_bytes(0, len);
                lock_all(self.process, handle)?;
            }
            let before = self.all_gather_words([start.align_offset(ALIGN) as i64])?;
            let before: Vec<usize> = before.into_iter().map(|[before]| before as usize).collect();
            let first = start.wrapping_sub(self.rank * len).wrapping_add(before[0] + header);
            Ok((handle, start, before, maps.then_some(MappedParts { start: first, stride: len })))
        };
        let (handle, start, before, parts) =
            made().map_err(|failure| self.failure(failure, &record, sequence))?;
        let (number, heard) = (self.process.next_window(), vec![Cell::new(0); self.ranks]);
        Ok(Box::new(MpiWindow { comm: self, handle, number, start, before, header, parts, heard }))
    }

    /// Whether all ranks share memory. Collective.
    fn is_on_one_host(&self) -> std::result::Result<bool, MpiFailure> {
        let mut host = self.of_host()?;
        let (_, ranks) = self.process.place_in(host)?;
        // SAFETY: it was made for this question.
        check("MPI_Comm_free", unsafe { (self.process.mpi.functions.comm_free)(&raw mut host) })?;
        Ok(ranks == self.ranks)
    }

    /// A communicator of the ranks that share memory with this one. Collective.
    fn of_host(&self) -> std::result::Result<Handle, MpiFailure> {
        let (f, constants) = (&self.process.mpi.functions, &self.process.mpi.constants);
        let (kind, info, key) = (constants.comm_type_shared, constants.info_null, self.rank as c_int);
        let mut host = Handle::ZERO;
        // SAFETY: the communicator is alive; the variable takes the new one.
        let split = unsafe { (f.comm_split_type)(self.comm, kind, key, info, &raw mut host) };
        check("MPI_Comm_split_type", split)?;
        Ok(host)
    }

    /// Memory of which each host has one copy.
    ///
    /// # Safety
    /// As for [`Backend::shared_by_host`].
    pub(super) unsafe fn host_memory(&self, call: &Call<'_>) -> Result<Box<dyn HostMemory>> {
        // SAFETY: the caller's contract.
        unsafe { self.begin_allocation(call) }?;
        let len = (bytes_of(call) + ALIGN).next_multiple_of(PAGE);
        let (record, sequence) = (CallRecord::of(call), self.watch.last());
        let _watched = self.watch.enter(&record);
        let made = || {
            let (f, constants) = (&self.process.mpi.functions, &self.process.mpi.constants);
            let host = self.of_host()?;
            let place = self.process.place_in(host)?;
            let own = if place.0 == 0 { len as isize } else { 0 };
            let (mut handle, mut start) = (Handle::ZERO, std::ptr::null_mut::<u8>());
            let base = (&raw mut start).cast();
            // SAFETY: the communicator is alive; the variables take the answers. The first rank's memory is zeroed before any rank has it.
            unsafe {
                let allocated =
                    (f.win_allocate_shared)(own, 1, constants.info_null, host, base, &raw mut handle);
                check("MPI_Win_allocate_shared", allocated)?;
                let start = first_part(f, handle)?;
                if place.0 == 0 {
                    start.write_bytes(0, len);
                }
                lock_all(self.process, handle)?;
                check("MPI_Win_sync", (f.win_sync)(handle))?;
                check("MPI_Barrier", (f.barrier)(host))?;
                check("MPI_Win_sync", (f.win_sync)(handle))?;
                Ok((host, handle, start.wrapping_add(start.align_offset(ALIGN)), place))
            }
        };
        let (host, handle, start, place) =
            made().map_err(|failure| self.failure(failure, &record, sequence))?;
        let (process, watch, world_rank) = (self.process, self.watch.clone(), self.rank);
        let (number, handle) = (process.next_window(), Some(handle));
        Ok(Box::new(MpiHostMemory { process, watch, world_rank, handle, number, host, start, place }))
    }

    /// Begins a collective allocation: the ranks compare what they ask for.
    ///
    /// # Safety
    /// As for [`Backend::symmetric`].
    unsafe fn begin_allocation(&self, call: &Call<'_>) -> Result<()> {
        self.ready()?;
        if self.is_polled() {
            // After the started collectives.
            // SAFETY: the caller's contract; the call has no memory.
            unsafe { self.carry_out_polled(&Call::empty(Operation::Split)) }?;
        } else {
            self.watch.next();
        }
        let record = CallRecord::of(call);
        let inside = self.watch.enter(&record);
        let sequence = inside.sequence();
        let all = self.all_gather_words(record.words().map(|word| word as i64));
        let all = all.map_err(|failure| self.failure(failure, &record, sequence))?;
        let Some(other) = all.iter().position(|words| *words != all[0]) else { return Ok(()) };
        let named = |rank: usize| {
            let words = all[rank].map(|word| word as u64);
            CallRecord::from_words(words).map_or_else(|| "another call".into(), |record| record.to_string())
        };
        let (theirs, ours) = (named(other), named(0));
        Err(self.fail(MismatchError { rank: other, theirs, other_rank: 0, ours, sequence }.into()))
    }
}

fn bytes_of(call: &Call<'_>) -> usize {
    let Blocks::Equal(count) = call.blocks else { unreachable!("parts have one length") };
    count * call.dtype.size()
}

/// Where the first rank's part of a shared window is in this process.
///
/// # Safety
/// The window is one of `MPI_Win_allocate_shared`.
unsafe fn first_part(f: &Functions, handle: Handle) -> std::result::Result<*mut u8, MpiFailure> {
    let (mut start, mut bytes, mut unit) = (std::ptr::null_mut::<u8>(), 0isize, 0);
    // SAFETY: the caller's contract; the variables take the answers.
    check("MPI_Win_shared_query", unsafe {
        (f.win_shared_query)(handle, 0, &raw mut bytes, &raw mut unit, (&raw mut start).cast())
    })?;
    Ok(start)
}

/// Begins the one epoch of a window, with errors as answers.
///
/// # Safety
/// The window is new.
unsafe fn lock_all(process: &MpiProcess, handle: Handle) -> std::result::Result<(), MpiFailure> {
    let (f, constants) = (&process.mpi.functions, &process.mpi.constants);
    // SAFETY: the caller's contract. Nobody locks it exclusively.
    unsafe {
        check("MPI_Win_set_errhandler", (f.win_set_errhandler)(handle, constants.errors_return))?;
        check("MPI_Win_lock_all", (f.win_lock_all)(constants.mode_nocheck, handle))
    }
}

/// # Safety
/// Nobody uses the window after this, and all its ranks do it.
unsafe fn free_window(f: &Functions, mut handle: Handle) -> std::result::Result<(), MpiFailure> {
    // SAFETY: the caller's contract.
    unsafe {
        check("MPI_Win_unlock_all", (f.win_unlock_all)(handle))?;
        check("MPI_Win_free", (f.win_free)(&raw mut handle))
    }
}

impl MpiWindow<'_> {
    /// Calls MPI, within the deadline. `rank` is whose part it concerns, for the error.
    #[inline]
    fn call(
        &self,
        rank: Option<usize>,
        calls: impl FnOnce(&Functions) -> std::result::Result<(), MpiFailure>,
    ) -> Result<()> {
        self.comm.ready()?;
        let record = match rank {
            Some(rank) => CallRecord::of_rank(Operation::OneSided, rank),
            None => CallRecord::of(&Call::empty(Operation::OneSided)),
        };
        let inside = self.comm.watch.enter(&record);
        let done = calls(&self.comm.process.mpi.functions);
        done.map_err(|failure| self.comm.failure(failure, &record, inside.sequence()))
    }

    /// Where an element is in a rank's window.
    fn offset(&self, slice: &RemoteSlice, index: usize) -> isize {
        (self.before[slice.rank] + self.header + (slice.at + index) * slice.dtype.size()) as isize
    }

    /// The pieces of so many elements that one call of MPI moves: the first element and their number.
    fn pieces(&self, slice: &RemoteSlice, at_once: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (count, step) = (slice.count, at_once.max(1));
        (0..count).step_by(step).map(move |first| (first, step.min(count - first)))
    }

    /// Elements that one call of MPI moves at most.
    fn at_once(&self, slice: &RemoteSlice, own_stride: usize) -> usize {
        let contiguous = slice.stride == 1 && own_stride == 1;
        if contiguous { self.comm.process.max_bytes / slice.dtype.size() } else { 1 }
    }

    /// The type and operation of an atomic access.
    fn atomic(&self, dtype: DType, op: AtomicOp) -> (Handle, Handle) {
        let constants = &self.comm.process.mpi.constants;
        let op = match op {
            AtomicOp::Load => constants.no_op,
            AtomicOp::Replace => constants.replace,
            AtomicOp::Combine(code) => match code {
                ReductionCode::Sum => constants.sum,
                ReductionCode::Prod => constants.prod,
                ReductionCode::Min => constants.min,
                ReductionCode::Max => constants.max,
                ReductionCode::BitAnd => constants.band,
                ReductionCode::BitOr => constants.bor,
                ReductionCode::BitXor => constants.bxor,
                code => unreachable!("{} is refused by the front", code.name()),
            },
        };
        (datatype(constants, dtype), op)
    }

    /// Where in a rank's window the counter of another one's signals is.
    fn counter(&self, of: usize, from: usize) -> isize {
        (self.before[of] + from * size_of::<u64>()) as isize
    }

    #[cold]
    fn no_signals(&self, rank: usize, waited: Duration) -> Error {
        let operation = self.comm.watch.named(CallRecord::of_rank(Operation::WaitSignals, rank));
        let missing = vec![MissingRank { rank, last_seen: "its signals have not come".into() }];
        let (sequence, reporter) = (self.comm.watch.last(), self.comm.rank);
        self.comm.fail(TimeoutError { operation, sequence, reporter, waited, missing }.into())
    }

    /// The counter of one rank's signals in another one's part.
    fn mapped_counter(&self, parts: MappedParts, of: usize, from: usize) -> &AtomicU64 {
        let counters = parts.of(of).wrapping_sub(self.header).cast::<AtomicU64>();
        // SAFETY: the counters of all ranks are before the part, as long as the window, and all ranks access them as atomics.
        unsafe { &*counters.add(from) }
    }

    /// Signals of a rank that have come.
    fn signals(&self, from: usize) -> Result<u64> {
        if let Some(parts) = self.parts {
            return Ok(self.mapped_counter(parts, self.comm.rank, from).load(Ordering::Acquire));
        }
        let (own, constants) = (self.comm.rank as c_int, &self.comm.process.mpi.constants);
        let (nothing, mut value) = (0u64, 0u64);
        self.call(Some(from), |f| {
            let (unused, result) = ((&raw const nothing).cast(), (&raw mut value).cast());
            let (uint64, at) = (constants.uint64, self.counter(self.comm.rank, from));
            // SAFETY: the counter is in this rank's window; the variables live until the flush.
            unsafe {
                let fetched = (f.fetch_and_op)(unused, result, uint64, own, at, constants.no_op, self.handle);
                check("MPI_Fetch_and_op", fetched)?;
                check("MPI_Win_flush", (f.win_flush)(own, self.handle))
            }
        })?;
        Ok(value)
    }
}

impl Window for MpiWindow<'_> {
    fn own(&self) -> *mut u8 {
        self.start.wrapping_add(self.before[self.comm.rank] + self.header)
    }

    fn mapped(&self) -> Option<MappedParts> {
        self.parts
    }

    fn synchronize(&self) -> Result<()> {
        // SAFETY: the window is alive, in its epoch.
        self.call(None, |f| check("MPI_Win_sync", unsafe { (f.win_sync)(self.handle) }))
    }

    fn flush(&self, rank: Option<usize>) -> Result<()> {
        if self.parts.is_some() {
            fence(Ordering::SeqCst);
            return Ok(());
        }
        // SAFETY: as above, and the rank is one of the window's.
        self.call(rank, |f| unsafe {
            match rank {
                Some(rank) => check("MPI_Win_flush", (f.win_flush)(rank as c_int, self.handle)),
                None => check("MPI_Win_flush_all", (f.win_flush_all)(self.handle)),
            }
        })
    }

    fn signal(&self, rank: usize) -> Result<()> {
        if let Some(parts) = self.parts {
            self.mapped_counter(parts, rank, self.comm.rank).fetch_add(1, Ordering::AcqRel);
            return Ok(());
        }
        let (one, uint64, sum) =
            (1u64, self.comm.process.mpi.constants.uint64, self.comm.process.mpi.constants.sum);
        let (value, at) = ((&raw const one).cast(), self.counter(rank, self.comm.rank));
        let target = rank as c_int;
        // SAFETY: the counter is in the rank's window; the variable lives until the second flush.
        self.call(Some(rank), |f| unsafe {
            check("MPI_Win_flush", (f.win_flush)(target, self.handle))?;
            let added = (f.accumulate)(value, 1, uint64, target, at, 1, uint64, sum, self.handle);
            check("MPI_Accumulate", added)?;
            check("MPI_Win_flush", (f.win_flush)(target, self.handle))
        })
    }

    fn wait_signals(&self, rank: usize, count: u64) -> Result<()> {
        let wanted = self.heard[rank].get().saturating_add(count);
        if rank == self.comm.rank {
            let given = self.signals(rank)? - self.heard[rank].get();
            if given < count {
                return Err(UsageError::own_signals(count, given).into());
            }
        }
        let (since, mut polls) = (RunInstant::now(), 0u32);
        while self.signals(rank)? < wanted {
            polls = polls.wrapping_add(1);
            if polls > SPINS {
                std::thread::yield_now();
            }
            if polls.is_multiple_of(64) && since.elapsed() >= self.comm.watch.deadline() {
                return Err(self.no_signals(rank, since.elapsed()));
            }
        }
        self.heard[rank].set(wanted);
        self.synchronize()
    }

    unsafe fn put(&self, to: RemoteSlice, source: *const u8, source_stride: usize) -> Result<()> {
        let (ty, per) = moved_type(&self.comm.process.mpi.constants, to.dtype);
        let target = to.rank as c_int;
        self.call(Some(to.rank), |f| {
            for (first, count) in self.pieces(&to, self.at_once(&to, source_stride)) {
                let from = source.wrapping_add(first * source_stride * to.dtype.size()).cast();
                let (count, at) = ((count * per) as c_int, self.offset(&to, first * to.stride));
                // SAFETY: the elements are at the source and in the rank's window, says the caller.
                check("MPI_Put", unsafe { (f.put)(from, count, ty, target, at, count, ty, self.handle) })?;
            }
            // SAFETY: the window is alive, in its epoch.
            check("MPI_Win_flush_local", unsafe { (f.win_flush_local)(target, self.handle) })
        })
    }

    unsafe fn get(&self, from: RemoteSlice, target: *mut u8, target_stride: usize) -> Result<()> {
        let (ty, per) = moved_type(&self.comm.process.mpi.constants, from.dtype);
        let rank = from.rank as c_int;
        self.call(Some(from.rank), |f| {
            for (first, count) in self.pieces(&from, self.at_once(&from, target_stride)) {
                let to = target.wrapping_add(first * target_stride * from.dtype.size()).cast();
                let (count, at) = ((count * per) as c_int, self.offset(&from, first * from.stride));
                // SAFETY: the elements are in the rank's window, and the target has room for them, says the caller, until the flush.
                check("MPI_Get", unsafe { (f.get)(to, count, ty, rank, at, count, ty, self.handle) })?;
            }
            // SAFETY: the window is alive, in its epoch.
            check("MPI_Win_flush", unsafe { (f.win_flush)(rank, self.handle) })
        })
    }

    unsafe fn accumulate(&self, to: RemoteSlice, source: *const u8, op: AtomicOp) -> Result<()> {
        let ((ty, op), target) = (self.atomic(to.dtype, op), to.rank as c_int);
        self.call(Some(to.rank), |f| {
            for (first, count) in self.pieces(&to, self.at_once(&to, 1)) {
                let from = source.wrapping_add(first * to.dtype.size()).cast();
                let (count, at) = (count as c_int, self.offset(&to, first));
                // SAFETY: the elements are at the source and in the rank's window, says the caller.
                let added =
                    unsafe { (f.accumulate)(from, count, ty, target, at, count, ty, op, self.handle) };
                check("MPI_Accumulate", added)?;
            }
            // SAFETY: the window is alive, in its epoch.
            check("MPI_Win_flush_local", unsafe { (f.win_flush_local)(target, self.handle) })
        })
    }

    unsafe fn fetch_and_op(&self, at: RemoteSlice, value: u64, op: AtomicOp) -> Result<u64> {
        let ((ty, op), rank) = (self.atomic(at.dtype, op), at.rank as c_int);
        let mut old = 0u64;
        self.call(Some(at.rank), |f| {
            let (value, old): (*const c_void, *mut c_void) =
                ((&raw const value).cast(), (&raw mut old).cast());
            // SAFETY: the element is in the rank's window, says the caller; the variables hold one (little-endian) until the flush.
            unsafe {
                let (offset, window) = (self.offset(&at, 0), self.handle);
                // Open MPI 4.1 over UCX adds floats in MPI_Fetch_and_op as if they were integers.
                if matches!(at.dtype, DType::F32 | DType::F64) {
                    let fetched =
                        (f.get_accumulate)(value, 1, ty, old, 1, ty, rank, offset, 1, ty, op, window);
                    check("MPI_Get_accumulate", fetched)?;
                } else {
                    let fetched = (f.fetch_and_op)(value, old, ty, rank, offset, op, window);
                    check("MPI_Fetch_and_op", fetched)?;
                }
                check("MPI_Win_flush", (f.win_flush)(rank, self.handle))
            }
        })?;
        Ok(old)
    }

    unsafe fn compare_and_swap(&self, at: RemoteSlice, expected: u64, value: u64) -> Result<u64> {
        let (ty, rank) = (datatype(&self.comm.process.mpi.constants, at.dtype), at.rank as c_int);
        let mut old = 0u64;
        self.call(Some(at.rank), |f| {
            let value = (&raw const value).cast();
            let (expected, old) = ((&raw const expected).cast(), (&raw mut old).cast());
            // SAFETY: as in `fetch_and_op`.
            unsafe {
                let offset = self.offset(&at, 0);
                let swapped = (f.compare_and_swap)(value, expected, old, ty, rank, offset, self.handle);
                check("MPI_Compare_and_swap", swapped)?;
                check("MPI_Win_flush", (f.win_flush)(rank, self.handle))
            }
        })?;
        Ok(old)
    }

    fn free(self: Box<Self>) -> Result<()> {
        // SAFETY: this is the end of the window, on all ranks.
        let freed = self.call(None, |f| unsafe { free_window(f, self.handle) });
        // Dropping would keep it.
        std::mem::forget(*self);
        freed
    }
}

impl Drop for MpiWindow<'_> {
    fn drop(&mut self) {
        self.comm.process.keep_window(self.number, self.handle);
    }
}

impl MpiProcess {
    /// The number of a new window.
    fn next_window(&self) -> u64 {
        self.windows.fetch_add(1, Ordering::Relaxed)
    }

    fn keep_window(&self, number: u64, handle: Handle) {
        lock(&self.dropped_windows).insert(number, handle);
    }

    /// Frees the windows that were dropped. All ranks do this together, when they end.
    pub(super) fn free_dropped_windows(&self) {
        for handle in std::mem::take(&mut *lock(&self.dropped_windows)).into_values() {
            // SAFETY: nobody uses the window any more.
            if let Err(failure) = unsafe { free_window(&self.mpi.functions, handle) } {
                let rank = self.rank.load(Ordering::Relaxed);
                crate::os::log::error!("{}", self.error(failure, rank, "the end of the process", 0));
            }
        }
    }
}

impl HostMemory for MpiHostMemory {
    fn start(&self) -> *mut u8 {
        self.start
    }

    fn place(&self) -> (usize, usize) {
        self.place
    }

    fn synchronize(&self) -> Result<()> {
        let Some(handle) = self.handle else { return Ok(()) };
        // SAFETY: the window is alive, in its epoch.
        let done = check("MPI_Win_sync", unsafe { (self.process.mpi.functions.win_sync)(handle) });
        done.map_err(|failure| self.error(failure))
    }

    fn free(mut self: Box<Self>) -> Result<()> {
        self.process.check_thread()?;
        let Some(handle) = self.handle.take() else { return Ok(()) };
        let record = CallRecord::of(&Call::empty(Operation::Free));
        let _watched = self.watch.enter(&record);
        let f = &self.process.mpi.functions;
        // SAFETY: this is the end of the window and of its communicator, on all their ranks.
        let freed = unsafe {
            free_window(f, handle).and_then(|()| check("MPI_Comm_free", (f.comm_free)(&raw mut self.host)))
        };
        freed.map_err(|failure| self.error(failure))
    }
}

impl Drop for MpiHostMemory {
    fn drop(&mut self) {
        if let Some(handle) = self.handle {
            self.process.keep_window(self.number, handle);
        }
    }
}

impl MpiHostMemory {
    fn error(&self, failure: MpiFailure) -> Error {
        self.process.error(failure, self.world_rank, "shared_by_host", self.watch.last())
    }
}
