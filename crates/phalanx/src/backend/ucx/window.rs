//! Windows: a rank loads and stores in the parts of its own host, and sends its accesses to others as messages (`parts.rs`), which a
//! thread of their processes carries out (`serving.rs`).
//!
//! An access waits until UCX has let go of its data, or for its answer. So nothing of an access is left when it returns.

use super::UcxComm;
use super::hosts::Hosts;
use super::mail::{Kind, Matching};
use super::parts::{Access, AccessKind, Part, WindowId, encode};
use super::serving::Serving;
use super::tunables::{ACCESSED_AT_ONCE, POLLS, POLLS_CROWDED};
use super::wait::Awaited;
use super::worker::{Outcome, Worker};
use crate::contract::{
    AtomicOp, Backend, Blocks, Call, HostMemory, MappedParts, Operation, RemoteSlice, Window,
};
use crate::control::endpoint::{Peers, PendingOperation};
use crate::control::host_channel::HostChannel;
use crate::control::record::CallRecord;
use crate::os::Mapping;
use crate::reduce::access;
use crate::types::dtype::DType;
use crate::types::error::{Error, Result, UnsupportedError, UsageError};
use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// Where this rank's part is.
enum Memory<'a> {
    /// No other rank of the communicator is on this host.
    Own(Mapping),
    /// The window of the ranks of this host.
    Shared(Box<dyn Window + 'a>),
}

impl Memory<'_> {
    fn own(&self) -> *mut u8 {
        match self {
            Memory::Own(mapping) => mapping.as_ptr(),
            Memory::Shared(window) => window.own(),
        }
    }
}

/// What this rank knows of another one's part.
#[derive(Default)]
struct Remote {
    /// Where it is, on this host.
    start: Option<*mut u8>,
    /// Accesses that were sent there, and how many of them are complete.
    sent: Cell<u64>,
    complete: Cell<u64>,
    /// Signals of that rank that were waited for.
    heard: Cell<u64>,
}

pub(super) struct UcxWindow<'a> {
    comm: &'a UcxComm,
    id: WindowId,
    memory: Memory<'a>,
    /// By rank.
    remotes: Vec<Remote>,
    /// The parts, if all ranks are on this host.
    mapped: Option<MappedParts>,
    /// Tags of answers so far.
    tags: Cell<u64>,
    /// Elements with a stride, one behind the other.
    packed: RefCell<Vec<u8>>,
    /// Accesses that are sent together.
    flushes: RefCell<(Vec<Access>, Vec<Awaited>)>,
    serving: Arc<Serving>,
    is_open: Cell<bool>,
}

/// Memory of a host with one rank of the communicator.
struct OneRank(Mapping);

impl UcxComm {
    /// # Safety
    /// As for [`Backend::symmetric`].
    pub(super) unsafe fn window(&self, call: &Call<'_>) -> Result<UcxWindow<'_>> {
        // The ranks compare what they ask for.
        // SAFETY: the caller's contract; no data moves.
        unsafe { self.collective(call) }?;
        let number = self.windows.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract.
        let made = unsafe { self.own_part(call) }.and_then(|memory| self.window_over(call, number, memory));
        // SAFETY: as above.
        unsafe { self.made_by_all(call, made) }
    }

    /// Memory of which each host has one copy.
    ///
    /// # Safety
    /// As for [`Backend::shared_by_host`].
    pub(super) unsafe fn host_memory(&self, call: &Call<'_>) -> Result<Box<dyn HostMemory>> {
        let topology = self.host_topology();
        if self.hosts.is_none() && topology.num_hosts() != topology.world_size() {
            return Err(Error::from(UnsupportedError {
                what: "shared_by_host".into(),
                why: "over UCX the ranks of a job that has one host share no memory".into(),
                remedy: "use the backend host (PHALANX_BACKEND=host)".into(),
            }));
        }
        // SAFETY: as in `window`.
        unsafe { self.collective(call) }?;
        let made = match self.part_here() {
            None => Mapping::anonymous(bytes_of(call)).map(|memory| Box::new(OneRank(memory)) as Box<_>),
            // SAFETY: the caller's contract.
            Some((hosts, part)) => unsafe { part.shared_by_host(call) }
                .map_err(|error| self.failed_on_host(hosts, error, self.last_number())),
        };
        // SAFETY: as above.
        unsafe { self.made_by_all(call, made) }
    }

    fn part_here(&self) -> Option<(&Hosts, &dyn HostChannel)> {
        let hosts = self.hosts.as_ref()?;
        Some((hosts, &**hosts.channel.as_ref()?))
    }

    fn last_number(&self) -> Option<u64> {
        self.endpoint.own().last_announced().map(|(number, _)| number)
    }

    /// # Safety
    /// As for `window`.
    unsafe fn own_part(&self, call: &Call<'_>) -> Result<Memory<'_>> {
        let Some((hosts, part)) = self.part_here() else {
            return Mapping::anonymous(bytes_of(call)).map(Memory::Own);
        };
        // SAFETY: the caller's contract.
        let window = unsafe { part.symmetric(call) };
        window.map(Memory::Shared).map_err(|error| self.failed_on_host(hosts, error, self.last_number()))
    }

    fn window_over<'a>(&'a self, call: &Call<'_>, number: u64, memory: Memory<'a>) -> Result<UcxWindow<'a>> {
        let serving = self.link.world.serving()?;
        let mut remotes: Vec<Remote> = (0..self.endpoint.ranks).map(|_| Remote::default()).collect();
        remotes[self.endpoint.rank].start = Some(memory.own());
        let mut mapped = None;
        if let (Memory::Shared(window), Some(hosts)) = (&memory, &self.hosts) {
            let parts = window.mapped().expect("the ranks of a host reach each other's parts");
            for (place, rank) in hosts.of_own().iter().enumerate() {
                remotes[*rank].start = Some(parts.of(place));
            }
            mapped = (hosts.of_own().len() == self.endpoint.ranks).then_some(parts);
        }
        let id = (self.link.channel, number);
        let members = self.endpoint.members().to_vec();
        // SAFETY: the memory is the window's, which closes the part and waits for its users before it gives that back.
        let part =
            unsafe { Part::new(memory.own(), call.dtype, count_of(call), self.endpoint.rank, members) };
        self.link.world.worker().parts().open(id, part);
        Ok(UcxWindow {
            comm: self,
            id,
            memory,
            remotes,
            mapped,
            tags: Cell::new(0),
            packed: RefCell::default(),
            flushes: RefCell::default(),
            serving,
            is_open: Cell::new(false),
        })
    }

    /// What this rank has made, if all ranks have.
    ///
    /// # Safety
    /// As for `window`.
    unsafe fn made_by_all<T>(&self, call: &Call<'_>, made: Result<T>) -> Result<T> {
        let mut all = vec![0u64; self.endpoint.ranks];
        let step = Call { dtype: DType::U64, ..Call::empty(Operation::AllGather) };
        // SAFETY: the caller's contract.
        unsafe { self.all_gather_words_in(step, &[u64::from(made.is_ok())], &mut all) }?;
        let Some(rank) = all.iter().position(|is_made| *is_made == 0) else { return made };
        made.and_then(|_| {
            Err(Error::from(UnsupportedError {
                what: call.operation.name().into(),
                why: format!("rank {rank} could not allocate its memory"),
                remedy: "see that rank's error".into(),
            }))
        })
    }
}

fn count_of(call: &Call<'_>) -> usize {
    let Blocks::Equal(count) = call.blocks else { unreachable!("parts have one length") };
    count
}

fn bytes_of(call: &Call<'_>) -> usize {
    (count_of(call) * call.dtype.size()).max(1)
}

impl UcxWindow<'_> {
    fn rank(&self) -> usize {
        self.comm.endpoint.rank
    }

    /// Where the elements are, if that is on this host.
    fn here(&self, slice: &RemoteSlice) -> Option<*mut u8> {
        let start = self.remotes[slice.rank].start?;
        Some(start.wrapping_add(slice.at * slice.dtype.size()))
    }

    /// A message of the next access to a rank's part.
    fn access(&self, kind: AccessKind, rank: usize) -> Access {
        let sent = &self.remotes[rank].sent;
        sent.set(sent.get() + 1);
        Access {
            key: self.comm.link.world.key,
            channel: self.id.0,
            window: self.id.1,
            order: sent.get(),
            source: self.rank() as u32,
            kind: kind as u8,
            stride: 1,
            ..Access::default()
        }
    }

    /// The same, for elements from `at` on.
    fn access_to(&self, kind: AccessKind, slice: &RemoteSlice, at: usize, count: usize) -> Access {
        let stride = if count == 1 { 1 } else { slice.stride } as u64;
        let (at, count) = ((slice.at + at * slice.stride) as u64, count as u64);
        Access { at, count, stride, ..self.access(kind, slice.rank) }
    }

    /// The elements of a slice that one message moves: the first, and their number.
    fn pieces(&self, slice: &RemoteSlice) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (count, step) = (slice.count, (ACCESSED_AT_ONCE / slice.dtype.size()).max(1));
        (0..count).step_by(step).map(move |first| (first, step.min(count - first)))
    }

    fn pending(&self, operation: Operation, rank: usize) -> PendingOperation {
        let (number, _) = self.comm.endpoint.own().last_announced().expect("it has begun an epoch");
        (number, CallRecord::of_rank(operation, rank))
    }

    /// Waits until operations with a rank are over, which it forgets if they are not.
    fn finish(&self, rank: usize, awaited: &[Awaited]) -> Result<()> {
        let pending = || self.pending(Operation::OneSided, rank);
        self.comm.await_all(awaited, &pending, &|| ()).map_err(|error| {
            self.comm.give_up(&mut awaited.to_vec());
            self.comm.closing(error)
        })
    }

    /// Sends an access that gets no answer, and waits until its data can be changed.
    ///
    /// # Safety
    /// `len` bytes are at `data`.
    unsafe fn send(&self, rank: usize, access: &Access, data: *const u8, len: usize) -> Result<()> {
        let mut worker = self.comm.link.world.worker();
        let peer = self.comm.endpoint.members()[rank];
        // SAFETY: the access and its data are there until the operation is over: it is waited for, or given up.
        let operation = unsafe { worker.send_access(peer, access, data, len) };
        if !matches!(worker.outcome(operation), Some((Outcome::Complete, _))) {
            drop(worker);
            self.finish(rank, &[Awaited { operation, peer: rank }])?;
            worker = self.comm.link.world.worker();
        }
        let _ = worker.forget(operation);
        Ok(())
    }

    /// Starts to send an access that is answered with `len` bytes.
    ///
    /// # Safety
    /// The access stays as it is, and `target` has room for so many bytes, until both operations are over.
    unsafe fn ask(
        &self,
        worker: &mut Worker,
        rank: usize,
        access: &mut Access,
        target: *mut u8,
        len: usize,
    ) -> [Awaited; 2] {
        self.tags.set(self.tags.get() + 1);
        access.tag = self.tags.get();
        let peer = self.comm.endpoint.members()[rank];
        let matching = Matching { kind: Kind::Reply, number: self.id.1, tag: access.tag };
        // SAFETY: the caller's contract.
        unsafe {
            let answer = worker.receive(self.id.0, (rank, peer), matching, target, len);
            let question = worker.send_access(peer, access, std::ptr::null(), 0);
            [question, answer].map(|operation| Awaited { operation, peer: rank })
        }
    }

    /// Sends an access and waits for its answer: `len` bytes, and what an element was.
    ///
    /// # Safety
    /// `target` has room for so many bytes.
    unsafe fn answer(&self, rank: usize, mut access: Access, target: *mut u8, len: usize) -> Result<u64> {
        // SAFETY: the caller's contract; both operations are waited for, or given up.
        let both = unsafe { self.ask(&mut self.comm.link.world.worker(), rank, &mut access, target, len) };
        self.finish(rank, &both)?;
        let [_, (_, header)] = both.map(|one| self.comm.take(one.operation));
        // A rank's accesses are carried out in their order.
        self.remotes[rank].complete.set(access.order);
        Ok(header.factor)
    }

    /// Polls until `ready`, within the deadline.
    fn poll_for_signals(&self, rank: usize, mut ready: impl FnMut() -> bool) -> Result<()> {
        let comm = self.comm;
        let polls = if comm.is_crowded() { POLLS_CROWDED } else { POLLS };
        for _ in 0..polls {
            if ready() {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let ready = &mut || {
            comm.advance_on_host()?;
            Ok(ready())
        };
        let pending = || self.pending(Operation::WaitSignals, rank);
        comm.endpoint.poll(ready, &|| Peers::One([rank]), &pending)
    }
}

impl Window for UcxWindow<'_> {
    fn own(&self) -> *mut u8 {
        self.memory.own()
    }

    fn mapped(&self) -> Option<MappedParts> {
        self.mapped
    }

    fn set_open(&self, is_open: bool) {
        if self.is_open.replace(is_open) != is_open {
            self.serving.set_open(is_open);
        }
    }

    fn flush(&self, rank: Option<usize>) -> Result<()> {
        // What was stored in parts of this host.
        fence(Ordering::SeqCst);
        let is_wanted = |of: &usize| {
            let Remote { sent, complete, .. } = &self.remotes[*of];
            rank.is_none_or(|rank| rank == *of) && sent.get() > complete.get()
        };
        let wanted = || (0..self.remotes.len()).filter(is_wanted);
        let Some(first) = wanted().next() else { return Ok(()) };
        let (accesses, awaited) = &mut *self.flushes.borrow_mut();
        accesses.clear();
        accesses.extend(wanted().map(|rank| self.access(AccessKind::Flush, rank)));
        let mut worker = self.comm.link.world.worker();
        for (rank, access) in wanted().zip(&mut *accesses) {
            // SAFETY: the accesses are there, and where they are, until all operations are over or given up; no bytes come.
            awaited.extend(unsafe { self.ask(&mut worker, rank, access, std::ptr::null_mut(), 0) });
        }
        drop(worker);
        let done = self.finish(first, awaited);
        if done.is_ok() {
            for one in awaited.iter() {
                self.comm.take(one.operation);
            }
            wanted().zip(&*accesses).for_each(|(rank, access)| self.remotes[rank].complete.set(access.order));
        }
        awaited.clear();
        done
    }

    fn signal(&self, rank: usize) -> Result<()> {
        // What was stored in a part of this host is there before the signal is.
        fence(Ordering::SeqCst);
        if rank == self.rank() {
            self.comm.link.world.worker().parts().signal_itself(self.id);
            return Ok(());
        }
        // SAFETY: it has no data.
        unsafe { self.send(rank, &self.access(AccessKind::Signal, rank), std::ptr::null(), 0) }
    }

    fn wait_signals(&self, rank: usize, count: u64) -> Result<()> {
        let heard = &self.remotes[rank].heard;
        let wanted = heard.get().saturating_add(count);
        let come = || {
            let mut worker = self.comm.link.world.worker();
            worker.progress();
            worker.parts().signals(self.id, rank)
        };
        if rank == self.rank() {
            let given = come().saturating_sub(heard.get());
            if given < count {
                return Err(UsageError::own_signals(count, given).into());
            }
        }
        let waited = self.poll_for_signals(rank, || come() >= wanted);
        waited.map_err(|error| self.comm.closing(error))?;
        heard.set(wanted);
        Ok(())
    }

    unsafe fn put(&self, to: RemoteSlice, source: *const u8, source_stride: usize) -> Result<()> {
        let size = to.dtype.size();
        if let Some(place) = self.here(&to) {
            // SAFETY: the elements are at the source and in the rank's part, says the caller.
            unsafe {
                access::with_strides(
                    to.count,
                    (place, to.stride),
                    (source, source_stride),
                    size,
                    access::write,
                )
            };
            return Ok(());
        }
        if to.count == 0 {
            return Ok(());
        }
        if to.stride == 1 && source_stride == 1 {
            let access = self.access_to(AccessKind::Put, &to, 0, to.count);
            // SAFETY: as above.
            return unsafe { self.send(to.rank, &access, source, to.count * size) };
        }
        let packed = &mut *self.packed.borrow_mut();
        self.pieces(&to).try_for_each(|(first, count)| {
            packed.resize(count * size, 0);
            let from = source.wrapping_add(first * source_stride * size);
            let access = self.access_to(AccessKind::Put, &to, first, count);
            // SAFETY: as above; the vector has room for the elements of a piece.
            unsafe {
                access::with_strides(count, (packed.as_mut_ptr(), 1), (from, source_stride), size, copy_own);
                self.send(to.rank, &access, packed.as_ptr(), count * size)
            }
        })
    }

    unsafe fn get(&self, from: RemoteSlice, target: *mut u8, target_stride: usize) -> Result<()> {
        let size = from.dtype.size();
        if let Some(place) = self.here(&from) {
            // SAFETY: the elements are in the rank's part, and the target has room for them, says the caller.
            unsafe {
                access::with_strides(
                    from.count,
                    (target, target_stride),
                    (place, from.stride),
                    size,
                    access::read,
                )
            };
            return Ok(());
        }
        if from.count == 0 {
            return Ok(());
        }
        if from.stride == 1 && target_stride == 1 {
            let access = self.access_to(AccessKind::Get, &from, 0, from.count);
            // SAFETY: as above.
            return unsafe { self.answer(from.rank, access, target, from.count * size) }.map(drop);
        }
        let packed = &mut *self.packed.borrow_mut();
        self.pieces(&from).try_for_each(|(first, count)| {
            packed.resize(count * size, 0);
            let to = target.wrapping_add(first * target_stride * size);
            let access = self.access_to(AccessKind::Get, &from, first, count);
            // SAFETY: as above; the vector has room for the elements of a piece.
            unsafe {
                self.answer(from.rank, access, packed.as_mut_ptr(), count * size)?;
                access::with_strides(count, (to, target_stride), (packed.as_ptr(), 1), size, copy_own);
            }
            Ok(())
        })
    }

    unsafe fn accumulate(&self, to: RemoteSlice, source: *const u8, op: AtomicOp) -> Result<()> {
        if let Some(place) = self.here(&to) {
            // SAFETY: the elements are at the source and in the rank's part, says the caller.
            unsafe { access::accumulate_of(to.dtype, place, source, to.count, op) };
            return Ok(());
        }
        let size = to.dtype.size();
        self.pieces(&to).try_for_each(|(first, count)| {
            let access = self.access_to(AccessKind::Accumulate, &to, first, count);
            let access = Access { op: encode(op), ..access };
            // SAFETY: as above.
            unsafe { self.send(to.rank, &access, source.wrapping_add(first * size), count * size) }
        })
    }

    unsafe fn fetch_and_op(&self, at: RemoteSlice, value: u64, op: AtomicOp) -> Result<u64> {
        if let Some(place) = self.here(&at) {
            // SAFETY: the element is in the rank's part, says the caller.
            return Ok(unsafe { access::fetch_and_op_of(at.dtype, place, value, op) });
        }
        let access = self.access_to(AccessKind::FetchAndOp, &at, 0, 1);
        // SAFETY: no bytes come.
        unsafe { self.answer(at.rank, Access { value, op: encode(op), ..access }, std::ptr::null_mut(), 0) }
    }

    unsafe fn compare_and_swap(&self, at: RemoteSlice, expected: u64, value: u64) -> Result<u64> {
        if let Some(place) = self.here(&at) {
            // SAFETY: the element is in the rank's part, says the caller.
            return Ok(unsafe { access::compare_and_swap_of(at.dtype, place, expected, value) });
        }
        let access = self.access_to(AccessKind::CompareAndSwap, &at, 0, 1);
        // SAFETY: no bytes come.
        unsafe { self.answer(at.rank, Access { value, expected, ..access }, std::ptr::null_mut(), 0) }
    }
}

impl Drop for UcxWindow<'_> {
    fn drop(&mut self) {
        if self.comm.endpoint.is_copy() {
            return;
        }
        self.set_open(false);
        self.comm.link.world.worker().parts().close(self.id);
        self.comm.until_let_go(|worker| {
            let users = worker.users(self.id);
            let of_world =
                |user: usize| self.comm.endpoint.members().iter().position(|member| *member == user);
            users.into_iter().filter_map(of_world).collect()
        });
    }
}

/// Copies elements of this rank's own.
///
/// # Safety
/// So many elements of `size` bytes are at `source`, and `target`, apart from it, has room for them.
unsafe fn copy_own(target: *mut u8, source: *const u8, count: usize, size: usize) {
    // SAFETY: the caller's contract.
    unsafe { std::ptr::copy_nonoverlapping(source, target, count * size) };
}

impl HostMemory for OneRank {
    fn start(&self) -> *mut u8 {
        self.0.as_ptr()
    }

    fn place(&self) -> (usize, usize) {
        (0, 1)
    }
}
