//! Collectives: one pattern for each ([`Flow`]), and the algorithms that carry it out. [`choose`](super::choose::choose) picks one.
//!
//! - **Slots** ([`slots`]): every writer puts its blocks into its slot, every reader takes them out. One transfer and no closing barrier: two
//!   slots alternate. Up to 104 bytes travel in the slot's opening.
//! - **Grid** ([`grid_rounds`]): a few hundred bytes of an all_reduce among many ranks. Each reads from the ranks of its row and of its column.
//! - **One-phase, two-phase** ([`two_phase`]): in steps of a chunk. A reader takes each writer's chunk from the writer's own buffer if that can
//!   be read (thread ranks; memory from `Comm::alloc`), else from the writer's ring, into which the writer copies it ahead of time. A writer
//!   whose buffer is read waits at the end until all have read it. Two phases are reduce-scatter and all-gather, chunk by chunk.
//! - **Push** ([`push`]): all_reduces of buffers that all can reach. Each rank stores its part of the result in every buffer.
//! - **Pairwise** ([`pairwise`]): long all_to_alls of private buffers. Each rank exchanges with one other at a time.
//! - **Kernel copy** ([`kernel_copy`]): the longest of those between processes. The kernel copies blocks to their place.
//!
//! But for push, no rank writes into another's buffers: a rank that is stopped half-way, and continues after its peers gave up, can spoil only
//! its own result. Reductions combine the contributions in rank order.

mod grid_rounds;
mod kernel_copy;
mod pairwise;
mod push;
mod slots;
pub(crate) mod trial;
mod two_phase;

use super::choose::{Algorithm, Bulk, Topology, choose};
use super::exchange::BlockCopies;
use super::grid::Grid;
use super::tunables::BLOCK_LINES_BETWEEN_HOSTS;
use crate::contract::{Call, Flow, Operation, OperationId, Who};
use crate::control::endpoint::Endpoint;
use crate::control::flags::{LINE_PAYLOAD, PAIR_PAYLOAD};
use crate::control::layout::{RINGS, SLOTS};
use crate::control::prefetch;
use crate::control::record::CallRecord;
use crate::control::tunables::MOST_CHUNKS;
use crate::control::world::{Location, Mapped};
use crate::reduce;
use crate::types::error::Result;
use crate::types::op::ReductionCode;
use pairwise::ChunkOwners;
use push::OPEN_TO_PUSHES;
use trial::AlgorithmTrial;

pub(crate) use pairwise::partner;

/// Payload of a slot's opening that is not taken by the fingerprint and the factor.
pub(super) const INLINE: usize = PAIR_PAYLOAD - 16;

/// The part of it that lies in the first of its two lines.
pub(super) const IN_ONE_LINE: usize = LINE_PAYLOAD - 16;

/// The most bytes of a block in stamped lines.
const LINES_BYTES: usize = BLOCK_LINES_BETWEEN_HOSTS * LINE_PAYLOAD;

/// Lines of a writer's slot for which a reader waits, and which it prefetches meanwhile.
#[derive(Clone, Copy)]
enum Awaited {
    /// The first line of its opening.
    FirstLine,
    /// All of its opening.
    BothLines,
    /// Its opening and, behind that, lines from the first to the last.
    LinesBehind { first: usize, last: usize },
}

/// What a rank remembers from one collective to the next.
pub(crate) struct CollectiveState {
    /// Number of the last operation, from 1.
    sequence: u64,
    /// Fingerprint of all operations so far.
    history: u64,
    /// Every peer is known to have completed this operation.
    heard: u64,
    /// Number of the next chunk of each ring.
    next_chunk: [u64; RINGS],
    /// Chunks of each ring that every peer is known to have read.
    drained: [u64; RINGS],
    /// Where the chunks of exchanges in pairs lie.
    places: [ChunkOwners; MOST_CHUNKS],
    /// Trial of kernel copy for long all_to_alls between processes.
    kernel_copies: AlgorithmTrial,
    /// Trial of stores past the caches, for pushes.
    pushes: AlgorithmTrial,
    /// This rank's place, if short all_reduces go in a grid.
    grid: Option<Grid>,
    /// Memory for what reductions by slots read from each rank's lines.
    scratch: Vec<u8>,
    sources: Vec<*const u8>,
    targets: Vec<*mut u8>,
    factors: Vec<u64>,
    /// Where `send` and `recv` of each peer lay, when they were last read there.
    mapped: Vec<[Mapped; 2]>,
    /// Messages of an all_to_all_v.
    pub message_ids: Vec<OperationId>,
    /// Copies of the blocks that an all_to_all_v sends in place.
    pub copies: BlockCopies,
    /// All histories have the same fingerprint.
    #[cfg(test)]
    pub equal_fingerprints: bool,
}

// SAFETY: the pointers in `sources` and `targets` are used only within the call that put them there.
unsafe impl Send for CollectiveState {}

/// The payload of a slot's first lines.
#[derive(Clone, Copy)]
#[repr(C)]
struct Opening {
    history: u64,
    /// Bits of this rank's factor in a pre-multiplied sum.
    factor: u64,
    data: [u64; INLINE / 8],
}

const _: () = assert!(size_of::<Opening>() == PAIR_PAYLOAD);

/// What an opening holds in a bulk operation: where a rank's buffers lie, and how long they are.
#[derive(Clone, Copy)]
#[repr(C)]
struct Buffers {
    locations: [Location; 2],
    /// Bytes of `send` and `recv`. A reader compares them with what it is about to read: fingerprints may be equal by chance.
    bytes: [u64; 2],
    /// What else the algorithm has to say.
    word: u64,
}

const _: () = assert!(size_of::<Buffers>() <= INLINE);

/// Bit of an opening's stamp: it holds [`Buffers`], and no data.
const OF_BUFFERS: u64 = 1 << 63;

impl CollectiveState {
    pub fn new(endpoint: &Endpoint) -> CollectiveState {
        let ranks = endpoint.ranks;
        CollectiveState {
            sequence: 0,
            history: 0,
            heard: 0,
            next_chunk: [0; RINGS],
            drained: [0; RINGS],
            places: [ChunkOwners::default(); MOST_CHUNKS],
            kernel_copies: kernel_copy::trial(),
            pushes: push::trial(),
            grid: Topology::of(endpoint).has_grid().then(|| Grid::new(endpoint.rank, ranks)),
            scratch: vec![0; ranks * LINES_BYTES],
            sources: Vec::with_capacity(ranks),
            targets: Vec::with_capacity(ranks),
            factors: Vec::with_capacity(ranks),
            mapped: vec![[Mapped::NONE; 2]; ranks],
            message_ids: Vec::with_capacity(2 * ranks),
            copies: BlockCopies::default(),
            #[cfg(test)]
            equal_fingerprints: false,
        }
    }

    /// Trial of kernel copy.
    #[cfg(all(test, target_os = "linux"))]
    pub(crate) fn kernel_copies(&mut self) -> &mut AlgorithmTrial {
        &mut self.kernel_copies
    }

    /// Trial of stores past the caches.
    #[cfg(all(test, target_os = "linux"))]
    pub(crate) fn pushes(&mut self) -> &mut AlgorithmTrial {
        &mut self.pushes
    }

    /// See [`HostChannel::set_history`](crate::control::host_channel::HostChannel::set_history).
    pub fn set_history(&mut self, history: u64) {
        self.history = history;
    }

    /// Number of the last collective.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }
}

/// One rank's work on one collective.
pub(crate) struct Collective<'a> {
    endpoint: &'a Endpoint,
    state: &'a mut CollectiveState,
    /// Called before the first wait or the first long copy.
    begun: &'a dyn Fn(),
}

impl<'a> Collective<'a> {
    /// # Safety
    /// As for [`Backend::recorded_collective`](crate::contract::Backend::recorded_collective).
    #[inline]
    pub unsafe fn run(
        endpoint: &'a Endpoint,
        state: &'a mut CollectiveState,
        call: &Call<'_>,
        begun: &'a dyn Fn(),
    ) -> Result<()> {
        endpoint.check()?;
        let mut this = Collective { endpoint, state, begun };
        this.begin(&CallRecord::of(call));
        let mut flow = call.flow();
        if call.operation == Operation::AllToAllV {
            // Its data goes as messages (`exchange.rs`).
            flow = flow.without_data();
        }
        // SAFETY: the caller's contract.
        unsafe {
            match choose(call, &flow, this.topology()) {
                Algorithm::Grid => this.grid(call)?,
                Algorithm::Slots(form) => this.slots(call, &flow, form)?,
                Algorithm::Bulk(bulk) => this.bulk(call, &flow, bulk)?,
                Algorithm::Refused => {
                    // Nothing was opened, and no peer waits for this rank's part of it.
                    this.complete();
                    return Err(endpoint.too_long());
                }
            }
        }
        this.complete();
        Ok(())
    }

    /// Publishes that this rank is done with the operation.
    #[inline(always)]
    fn complete(&self) {
        self.endpoint.own().done_operation.set(self.state.sequence);
        self.endpoint.announce_progress();
    }

    #[inline(always)]
    fn topology(&self) -> Topology<'a> {
        Topology::of(self.endpoint)
    }

    fn begin(&mut self, record: &CallRecord) {
        self.state.sequence += 1;
        self.state.history = record.chain(self.state.history);
        #[cfg(test)]
        if self.state.equal_fingerprints {
            self.state.history = 0;
        }
        self.endpoint.own().announce(self.state.sequence, record);
    }

    // --- openings -------------------------------------------------------------------------------------

    /// Waits until every reader of this rank's slot, used `SLOTS` operations ago, is done with it.
    #[inline(always)]
    fn wait_slot_free(&mut self) -> Result<()> {
        let needed = self.state.sequence.saturating_sub(SLOTS as u64);
        if self.state.heard < needed {
            (self.begun)();
            for peer in self.endpoint.peers() {
                let done = &self.endpoint.channel.state(peer).done_operation;
                self.endpoint.wait(peer, || done.get() >= needed)?;
            }
            self.state.heard = needed;
        }
        Ok(())
    }

    /// Opens this rank's slot for all to see, with up to 104 bytes of data.
    ///
    /// # Safety
    /// `len` bytes are readable at `data`, and `wait_slot_free` was called.
    #[inline(always)]
    unsafe fn open(&self, factor: u64, data: *const u8, len: usize) {
        // SAFETY: the caller's contract.
        unsafe { self.open_as(self.state.sequence, factor, data, len) }
    }

    /// Opens this rank's slot with a stamp.
    ///
    /// # Safety
    /// As for `open`.
    #[inline(always)]
    unsafe fn open_as(&self, stamp: u64, factor: u64, data: *const u8, len: usize) {
        debug_assert!(len <= INLINE);
        let slot = self.endpoint.channel.slot(self.endpoint.rank, self.state.sequence);
        // SAFETY: the slot is free, says the caller; an opening is what its lines have room for. Its fields are written where they lie:
        // to put them together elsewhere first takes several times as long.
        unsafe {
            slot.opening.fill(stamp, |line| {
                let opening = line.cast::<Opening>();
                (&raw mut (*opening).history).write(self.state.history);
                (&raw mut (*opening).factor).write(factor);
                reduce::copy_small((&raw mut (*opening).data).cast(), data, len);
            });
        }
        self.endpoint.announce_progress();
    }

    /// Opening of a rank: one that was heard, or this rank's own. It stays until this rank has completed the operation.
    #[inline(always)]
    fn opening(&self, rank: usize) -> *const Opening {
        self.endpoint.channel.slot(rank, self.state.sequence).opening.payload().cast()
    }

    /// A rank's buffers, from its opening in a bulk operation.
    #[inline(always)]
    fn buffers(&self, rank: usize) -> &Buffers {
        // SAFETY: as `opening` says; any bytes are buffers, for which the data has room.
        unsafe { &*(&raw const (*self.opening(rank)).data).cast() }
    }

    #[inline(always)]
    fn locations(&self, rank: usize) -> [Location; 2] {
        self.buffers(rank).locations
    }

    /// Address in this process of a peer's readable buffer (0: `send`, 1: `recv`), which was heard.
    #[inline(always)]
    fn reach(&mut self, peer: usize, which: usize) -> Result<*const u8> {
        let Buffers { locations, bytes, .. } = *self.buffers(peer);
        let mapped = &mut self.state.mapped[peer][which];
        self.endpoint.world.resolve(locations[which], bytes[which] as usize, mapped)
    }

    /// Waits for a writer's opening and compares histories. The other awaited lines are loaded at the same time.
    #[inline(always)]
    fn hear(&mut self, writer: usize, awaited: Awaited) -> Result<()> {
        let sequence = self.state.sequence;
        let slot = self.endpoint.channel.slot(writer, sequence);
        match awaited {
            Awaited::FirstLine => self.endpoint.wait(writer, || slot.opening.is(sequence))?,
            Awaited::BothLines => self.endpoint.wait(writer, || {
                prefetch::second_of(&slot.opening);
                slot.opening.is(sequence)
            })?,
            Awaited::LinesBehind { first, last } => {
                let (first, last) = (&slot.lines[first], &slot.lines[last]);
                // No short cut: all loads are under way at once.
                self.endpoint
                    .wait(writer, || slot.opening.is(sequence) & first.is(sequence) & last.is(sequence))?;
            }
        }
        // SAFETY: stamped with this operation; the writer leaves it until this rank is done.
        let history = unsafe { (*self.opening(writer)).history };
        if history != self.state.history {
            return Err(self.endpoint.fail_mismatch(writer, sequence));
        }
        Ok(())
    }

    /// Hears all writers. If that were all peers, all are known to have completed the operation before.
    #[inline(always)]
    fn hear_all(&mut self, writers: Who, awaited: Awaited) -> Result<()> {
        match writers {
            Who::All => {
                for peer in self.endpoint.peers() {
                    self.hear(peer, awaited)?;
                }
                self.state.heard = self.state.sequence - 1;
            }
            Who::Only(writer) if writer != self.endpoint.rank => self.hear(writer, awaited)?,
            Who::Only(_) => {}
        }
        Ok(())
    }

    /// Hears all writers of a bulk operation. Their buffers are then as long as this rank takes them to be.
    fn hear_buffers(&mut self, call: &Call<'_>, flow: &Flow<'_>) -> Result<()> {
        let (sequence, ranks) = (self.state.sequence, self.endpoint.ranks);
        let stamp = OF_BUFFERS | sequence;
        let of_all = if flow.scattered { flow.send_len(0, ranks) } else { 0 };
        for writer in self.endpoint.peers().filter(|peer| flow.writers.includes(*peer)) {
            let opening = &self.endpoint.channel.slot(writer, sequence).opening;
            self.endpoint.wait(writer, || opening.is(stamp) | opening.is(sequence))?;
            // SAFETY: stamped with this operation; the writer leaves it until this rank is done.
            let same_history = unsafe { (*self.opening(writer)).history } == self.state.history;
            let sent = if flow.scattered { of_all } else { flow.block_len(writer, writer) };
            let bytes = [sent as u64, received_in_bulk(call, flow)];
            if !same_history || !opening.is(stamp) || self.buffers(writer).bytes != bytes {
                return Err(self.endpoint.fail_mismatch(writer, sequence));
            }
        }
        if flow.writers == Who::All {
            self.state.heard = sequence - 1;
        }
        Ok(())
    }

    /// The ranks' factors of a pre-multiplied sum, once all are heard; of other reductions, none.
    #[inline(always)]
    fn gather_factors(&mut self, call: &Call<'_>) {
        self.state.factors.clear();
        if call.reduction.code == ReductionCode::PreMulSum {
            for rank in 0..self.endpoint.ranks {
                // SAFETY: as `opening` says.
                self.state.factors.push(unsafe { (*self.opening(rank)).factor });
            }
        }
    }

    // --- bulk -----------------------------------------------------------------------------------------

    /// # Safety
    /// As for `run`.
    unsafe fn bulk(&mut self, call: &Call<'_>, flow: &Flow<'_>, bulk: Bulk) -> Result<()> {
        (self.begun)();
        let (rank, ranks) = (self.endpoint.rank, self.endpoint.ranks);
        let writes = flow.writers.includes(rank);
        let mut send = Location::NOWHERE;
        if writes {
            // What is overwritten while peers still need it must be copied first.
            let exchanges = flow.scattered && flow.gathered;
            let reduces_for_all =
                bulk == Bulk::Other && flow.reduced && !flow.scattered && flow.readers == Who::All;
            let in_place = call.send == call.recv && (exchanges || reduces_for_all);
            if !in_place {
                send = self.endpoint.world.locate(call.send, flow.send_len(rank, ranks));
                if !send.is_readable()
                    && matches!(bulk, Bulk::AllToAll { kernel_copy: true, .. })
                    && !self.state.kernel_copies.keeps_usual()
                {
                    send = self.kernel_copy_source(call.send, flow);
                }
            }
            let mut recv = Location::NOWHERE;
            let mut word = 0;
            match bulk {
                Bulk::AllReduce { push, .. } => {
                    recv = self.endpoint.world.locate(call.recv, flow.longest());
                    if push && self.can_take_pushes(call, flow, recv) {
                        word = OPEN_TO_PUSHES;
                    }
                }
                Bulk::AllToAll { kernel_copy: true, .. } => {
                    word = kernel_copy::word(self.state.kernel_copies.next());
                }
                Bulk::AllToAll { .. } | Bulk::Other => {}
            }
            let bytes = [flow.send_len(rank, ranks) as u64, received_in_bulk(call, flow)];
            let buffers = Buffers { locations: [send, recv], bytes, word };
            self.wait_slot_free()?;
            let (stamp, data) = (OF_BUFFERS | self.state.sequence, (&raw const buffers).cast());
            // SAFETY: as many bytes; the slot is free.
            unsafe { self.open_as(stamp, call.reduction.factor, data, size_of::<Buffers>()) };
        }
        // SAFETY: the caller's contract.
        let outcome = unsafe { self.move_bulk(call, flow, bulk, send) };
        if outcome.is_err() && self.takes_pushes(bulk) {
            // A peer that is stopped while it writes here, and goes on later, must not find this memory.
            self.endpoint.world.withdraw(call.recv, flow.longest());
        }
        outcome
    }

    /// # Safety
    /// As for `bulk`, after the openings.
    unsafe fn move_bulk(
        &mut self,
        call: &Call<'_>,
        flow: &Flow<'_>,
        bulk: Bulk,
        send: Location,
    ) -> Result<()> {
        let rank = self.endpoint.rank;
        if flow.readers.includes(rank) {
            self.hear_buffers(call, flow)?;
            self.gather_factors(call);
        }
        // All ranks choose alike: they have heard the same openings.
        // SAFETY: the caller's contract.
        unsafe {
            match bulk {
                Bulk::AllReduce { push: true, .. } if self.all_take_pushes() => self.push(call, flow)?,
                // In one phase every rank reads all contributions to the end, also where the result goes in place.
                Bulk::AllReduce { one_phase, .. } if !one_phase || self.any_readable(0) => {
                    self.two_phases(call, flow, send)?;
                }
                Bulk::AllToAll { kernel_copy: true, pairwise } => {
                    self.by_kernel_copy_or_region(call, flow, pairwise, send)?
                }
                Bulk::AllToAll { pairwise, .. } => self.pass(call, flow, pairwise, send)?,
                Bulk::AllReduce { .. } | Bulk::Other => self.one_phase(call, flow, send)?,
            }
        }
        if flow.writers.includes(rank) && self.locations(rank).into_iter().any(Location::is_readable) {
            self.complete();
            self.wait_until_read(flow)?;
        }
        Ok(())
    }

    /// Carries out an all_to_all through the region, or from memory that peers can reach.
    ///
    /// # Safety
    /// As for `bulk`, after the openings, for an all_to_all.
    unsafe fn pass(
        &mut self,
        call: &Call<'_>,
        flow: &Flow<'_>,
        pairwise: bool,
        send: Location,
    ) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe {
            if pairwise && !self.any_readable(0) {
                self.pairs(call, flow)
            } else {
                self.one_phase(call, flow, send)
            }
        }
    }

    /// Waits until peers have read this rank's memory.
    fn wait_until_read(&self, flow: &Flow<'_>) -> Result<()> {
        let sequence = self.state.sequence;
        for peer in self.endpoint.peers().filter(|peer| flow.readers.includes(*peer)) {
            let done = &self.endpoint.channel.state(peer).done_operation;
            self.endpoint.wait(peer, || done.get() >= sequence)?;
        }
        Ok(())
    }

    /// Whether any rank's buffer can be read by its peers.
    fn any_readable(&self, which: usize) -> bool {
        (0..self.endpoint.ranks).any(|rank| self.locations(rank)[which].is_readable())
    }

    /// Whether every rank's buffer (0: `send`, 1: `recv`) can be read by its peers.
    fn all_readable(&self, which: usize) -> bool {
        (0..self.endpoint.ranks).all(|rank| self.locations(rank)[which].is_readable())
    }
}

/// Bytes of `recv` that peers may touch in a bulk operation.
fn received_in_bulk(call: &Call<'_>, flow: &Flow<'_>) -> u64 {
    if call.operation == Operation::AllReduce { flow.longest() as u64 } else { 0 }
}
