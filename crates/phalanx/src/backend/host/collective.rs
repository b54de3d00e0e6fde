//! The collectives: one description of who gives what to whom ([`Flow`]), and six ways to carry it out.
//!
//! *Small* (up to 8 KiB of a writer): every writer puts its blocks into its slot, every reader takes them out. One
//! transfer and no closing barrier: two slots alternate. Up to 104 bytes travel in the slot's opening, up to 40 if many read the
//! same from each other.
//!
//! *Rounds* ([`rounds`]): a few hundred bytes of an all_reduce among many ranks. Nobody reads from everybody, but from the ranks
//! of its row and of its column.
//!
//! *Bulk*: in steps of a chunk. A reader takes each writer's chunk from where it is: from the writer's own
//! buffer if that can be read (thread ranks; memory from `Comm::alloc`), else from the writer's ring, into
//! which the writer copies it ahead of time. A writer whose buffer is read waits at the end until all have
//! read it. All_reduces go in two phases, reduce-scatter and all-gather, chunk by chunk.
//!
//! *Pushed* ([`pushed`]): all_reduces of buffers that all can reach, in one and a half phases. Each rank stores its part of the result
//! everywhere.
//!
//! *Pairs* ([`pairs`]): long all_to_alls of private buffers. Each rank exchanges with one other at a time.
//!
//! *Fetched* ([`fetched`]): the longest of those between processes. Each rank has the kernel copy the others' blocks to their place, where it
//! lets them and that is faster.
//!
//! But for pushed all_reduces no rank writes into another's buffers, so a rank that is stopped half-way and
//! continues after its peers gave up can spoil only its own result. Reductions combine the contributions in
//! rank order.

mod fetched;
mod pairs;
mod pushed;
mod rounds;
mod ways;

use super::endpoint::Endpoint;
use super::exchange::Copies;
use super::grid::Grid;
use super::layout::{
    CONTRIBUTIONS, FEW_LINES, FEWEST_CHUNKS, MOST_CHUNKS, MOST_LINES, ONE_WAY, RESULTS, RINGS, SLOT_BYTES,
    SLOT_LINES, SLOTS,
};
use super::prefetch;
use super::protocol::{LINE, LINE_PAYLOAD, PAIR_PAYLOAD};
use super::record::Record;
use super::reduce::{self, Reducer, Targets};
use super::world::{Location, Mapped};
use crate::backend::{Blocks, Call, Operation, Ticket};
use crate::error::Result;
use crate::op::ReductionCode;
use pairs::Place;
use pushed::OPEN_TO_PUSHES;
use ways::Ways;

pub(super) use pairs::partner;

/// Payload of a slot's opening that is not taken by the fingerprint and the factor.
const INLINE: usize = PAIR_PAYLOAD - 16;

/// The part of it that lies in the first of its two lines.
const IN_ONE_LINE: usize = LINE_PAYLOAD - 16;

/// So many ranks can poll both lines of each other's openings; among 8 bytes behind one line take half the time.
const FEW_READERS: usize = 5;

/// Chunks that are copied into the ring before the first is needed: enough for peers to find work. A ring has more, so that
/// what is written last needs only what was read an iteration before.
const LEAD: usize = 1;
const LEAD_CROWDED: usize = 3;
const _: () = assert!(LEAD_CROWDED < FEWEST_CHUNKS);

/// The most bytes that two ranks, whose chunks are long, move in a step of blocks that are for all: of long blocks, and of those that two
/// steps move.
const STEP_OF_TWO: usize = 32 << 10;
const LONG_STEP_OF_TWO: usize = 64 << 10;

/// Results from this size on are stored past the caches: the last-level cache would only pass them on. Where memory goes one way, only
/// longer ones: the loads of such copies leave their lines with the reader, and its writer has to get them back.
const STREAMING: usize = 8 << 20;
const STREAMING_ONE_WAY: usize = 16 << 20;

/// An all_reduce in which ranks read at most this many bytes from their peers is done in one phase, every
/// rank reducing everything; beyond [`SMALL_READS`] only if two phases spare them no more than so many, or they share cores.
const ONE_PHASE: usize = 64 << 10;
const SPARED: usize = 8 << 10;

/// The most bytes a rank with a core of its own reads from its peers in a small all_reduce.
const SMALL_READS: usize = 16 << 10;

/// The most bytes of a block in stamped lines.
const LINES_BYTES: usize = MOST_LINES * LINE_PAYLOAD;

/// How a small operation's data travels.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// In the slot's opening: what is for all, or every reader's block.
    Inline,
    /// In stamped lines behind it; so many for each block.
    Lines(usize),
    /// In the slot's plain bytes; blocks start so many bytes apart.
    Bytes(usize),
}

/// What a reader waits for, and has fetched meanwhile, of a writer's slot.
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
pub(super) struct State {
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
    places: [Place; MOST_CHUNKS],
    /// Which way was faster for long all_to_alls between processes.
    fetches: Ways,
    /// Which way was faster to store this rank's part of long all_reduces in peers' buffers.
    pushes: Ways,
    /// Where this rank stands if small all_reduces go in rounds.
    grid: Option<Grid>,
    /// Room for what small reductions read from each rank's lines.
    scratch: Vec<u8>,
    sources: Vec<*const u8>,
    targets: Vec<*mut u8>,
    factors: Vec<u64>,
    /// Where `send` and `recv` of each peer lay, when they were last read there.
    mapped: Vec<[Mapped; 2]>,
    /// Of the messages that an all_to_all_v goes as.
    pub tickets: Vec<Ticket>,
    /// Of what such a one sends in place.
    pub copies: Copies,
}

// SAFETY: the pointers in `sources` and `targets` are used only within the call that put them there.
unsafe impl Send for State {}

/// The payload of a slot's first lines.
#[derive(Clone, Copy)]
#[repr(C)]
struct Opening {
    history: u64,
    /// Bits of this rank's factor in a pre-multiplied sum.
    factor: u64,
    data: [u64; INLINE / 8],
}

impl Opening {
    fn locations(&self) -> [Location; 2] {
        let [a, b, c, d, ..] = self.data;
        [Location { segment: a, offset: b }, Location { segment: c, offset: d }]
    }
}

const _: () = assert!(size_of::<Opening>() == PAIR_PAYLOAD);

impl State {
    pub fn new(endpoint: &Endpoint) -> State {
        let ranks = endpoint.ranks;
        State {
            sequence: 0,
            history: 0,
            heard: 0,
            next_chunk: [0; RINGS],
            drained: [0; RINGS],
            places: [Place::default(); MOST_CHUNKS],
            fetches: fetched::ways(),
            pushes: pushed::ways(),
            grid: rounds::grid(endpoint.rank, ranks, endpoint.crowded),
            scratch: vec![0; ranks * LINES_BYTES],
            sources: Vec::with_capacity(ranks),
            targets: Vec::with_capacity(ranks),
            factors: Vec::with_capacity(ranks),
            mapped: vec![[Mapped::NONE; 2]; ranks],
            tickets: Vec::with_capacity(2 * ranks),
            copies: Copies::default(),
        }
    }

    /// Whether blocks of about this length were fetched already.
    #[cfg(all(test, target_os = "linux"))]
    pub fn has_fetched(&self, block: usize) -> bool {
        self.fetches.has_tried_other(block)
    }

    /// Whether all_reduces of about this length were stored past the caches.
    #[cfg(all(test, target_os = "linux"))]
    pub fn has_pushed_past(&self, bytes: usize) -> bool {
        self.pushes.has_tried_other(bytes)
    }

    /// Whether this rank, if it is rank 0, has chosen the region for blocks of this length, and whether it offers none any more.
    #[cfg(all(test, target_os = "linux"))]
    pub(super) fn way_of(&self, block: usize) -> (bool, bool) {
        (fetched::word(self.fetches.next(block)) == fetched::TO_PASS, self.fetches.is_settled(block))
    }

    /// Number of the last collective.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }
}

/// Who takes part in one role.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Who {
    All,
    Only(usize),
}

impl Who {
    fn includes(self, rank: usize) -> bool {
        self == Who::All || self == Who::Only(rank)
    }
}

/// Who gives what to whom.
#[derive(Clone, Copy)]
struct Flow<'a> {
    writers: Who,
    readers: Who,
    /// Each reader gets a block of its own (else all get the same).
    scattered: bool,
    /// Each writer's block has a place of its own in `recv` (else there is one).
    gathered: bool,
    /// Blocks are combined (else copied).
    reduced: bool,
    blocks: Blocks<'a>,
    size: usize,
}

impl<'a> Flow<'a> {
    fn of(call: &Call<'a>) -> Flow<'a> {
        use Operation::*;
        let root = Who::Only(call.root);
        let (writers, readers, scattered, gathered, reduced) = match call.operation {
            AllReduce => (Who::All, Who::All, false, false, true),
            Reduce => (Who::All, root, false, false, true),
            Broadcast => (root, Who::All, false, false, false),
            AllGather | AllGatherV | Split | Grow => (Who::All, Who::All, false, true, false),
            Gather | GatherV => (Who::All, root, false, true, false),
            ReduceScatter | ReduceScatterV => (Who::All, Who::All, true, false, true),
            AllToAll => (Who::All, Who::All, true, true, false),
            Scatter | ScatterV => (root, Who::All, true, false, false),
            // Nothing to give, but everybody opens and hears everybody.
            Barrier | Finalize | Alloc | Suspend | Resume | DeviceComm | AllToAllV => {
                (Who::All, Who::All, false, false, false)
            }
            Send | Recv | Init | Shrink | WaitSignals => unreachable!("not collectives"),
        };
        let size = call.dtype.size();
        // The data of an all_to_all_v goes as messages, and an alloc has none; here the ranks only agree.
        let blocks = if matches!(call.operation, AllToAllV | Alloc) { Blocks::Equal(0) } else { call.blocks };
        Flow { writers, readers, scattered, gathered, reduced, blocks, size }
    }

    /// Bytes that `writer` gives to `reader`.
    #[inline(always)]
    fn block_len(&self, writer: usize, reader: usize) -> usize {
        let block = if self.scattered {
            reader
        } else if self.gathered {
            writer
        } else {
            0
        };
        self.blocks.len(block) * self.size
    }

    /// Where in `send` the block for `reader` starts.
    #[inline(always)]
    fn source_offset(&self, reader: usize) -> usize {
        if self.scattered { self.blocks.offset(reader) * self.size } else { 0 }
    }

    /// Where in `recv` the block of `writer` goes.
    #[inline(always)]
    fn target_offset(&self, writer: usize) -> usize {
        if self.gathered { self.blocks.offset(writer) * self.size } else { 0 }
    }

    #[inline(always)]
    fn longest(&self) -> usize {
        self.blocks.longest() * self.size
    }

    /// Bytes of `send` on a writer.
    fn send_len(&self, rank: usize, ranks: usize) -> usize {
        if self.scattered {
            (self.blocks.offset(ranks - 1) + self.blocks.len(ranks - 1)) * self.size
        } else {
            self.block_len(rank, rank)
        }
    }
}

/// One rank's work on one collective.
pub(super) struct Collective<'a> {
    endpoint: &'a Endpoint,
    state: &'a mut State,
    /// Told as soon as a wait or much work comes next.
    begun: &'a dyn Fn(),
}

impl<'a> Collective<'a> {
    /// # Safety
    /// As for [`Backend::recorded_collective`](crate::backend::Backend::recorded_collective).
    #[inline]
    pub unsafe fn run(
        endpoint: &'a Endpoint,
        state: &'a mut State,
        call: &Call<'_>,
        begun: &'a dyn Fn(),
    ) -> Result<()> {
        endpoint.check()?;
        let mut this = Collective { endpoint, state, begun };
        this.begin(&Record::of(call));
        let flow = Flow::of(call);
        // SAFETY: the caller's contract.
        unsafe {
            match this.small_form(&flow) {
                _ if this.goes_in_rounds(call, &flow) => this.rounds(call)?,
                Some(Form::Bytes(_)) | None if !endpoint.shares_memory() => {
                    // Nothing was opened, and nobody waits for this rank's part of it.
                    this.complete();
                    return Err(endpoint.too_long());
                }
                Some(form) => this.small(call, &flow, form)?,
                None => this.bulk(call, &flow)?,
            }
        }
        this.complete();
        Ok(())
    }

    /// Says that this rank is done with the operation.
    #[inline(always)]
    fn complete(&self) {
        self.endpoint.own().done_operation.set(self.state.sequence);
        self.endpoint.announce_progress();
    }

    fn begin(&mut self, record: &Record) {
        self.state.sequence += 1;
        self.state.history = record.chain(self.state.history);
        self.endpoint.own().announce(self.state.sequence, record);
    }

    /// How the data travels if it is small: the same on every rank.
    #[inline(always)]
    fn small_form(&self, flow: &Flow<'_>) -> Option<Form> {
        let longest = flow.longest();
        let blocks = if flow.scattered { self.endpoint.ranks } else { 1 };
        if self.given(flow) <= self.most_inline(flow) {
            return Some(Form::Inline);
        }
        let shares_memory = self.endpoint.shares_memory();
        // Many ranks that reduce everything for themselves read more than if each reduced a part.
        let most = if self.endpoint.crowded { ONE_PHASE } else { SMALL_READS };
        let all_read_all = flow.reduced && flow.readers == Who::All && !flow.scattered;
        if shares_memory && all_read_all && (self.endpoint.ranks - 1) * longest > most {
            return None;
        }
        let lines = longest.div_ceil(LINE_PAYLOAD);
        let few = if shares_memory { FEW_LINES } else { MOST_LINES };
        if lines <= few && blocks * lines <= SLOT_LINES {
            return Some(Form::Lines(lines));
        }
        let stride = longest.next_multiple_of(LINE);
        (stride <= SLOT_BYTES / blocks).then_some(Form::Bytes(stride))
    }

    /// The most bytes that go in the opening. Where many read the same from each other, they had better poll one line of each.
    #[inline(always)]
    fn most_inline(&self, flow: &Flow<'_>) -> usize {
        let all_read_all = flow.writers == Who::All && flow.readers == Who::All && !flow.scattered;
        let many = all_read_all && self.endpoint.ranks > FEW_READERS;
        if many && self.endpoint.shares_memory() { IN_ONE_LINE } else { INLINE }
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

    /// Bytes that a writer shows in all, at most: the same on every rank.
    #[inline(always)]
    fn given(&self, flow: &Flow<'_>) -> usize {
        if flow.scattered { flow.send_len(0, self.endpoint.ranks) } else { flow.longest() }
    }

    /// Opens this rank's slot for all to see, with up to 104 bytes of data.
    ///
    /// # Safety
    /// `len` bytes are readable at `data`, and `wait_slot_free` was called.
    #[inline(always)]
    unsafe fn open(&self, factor: u64, data: *const u8, len: usize) {
        debug_assert!(len <= INLINE);
        let slot = self.endpoint.channel.slot(self.endpoint.rank, self.state.sequence);
        // SAFETY: the slot is free, says the caller; an opening is what its lines have room for. Its fields are written where they lie:
        // to put them together elsewhere first takes several times as long.
        unsafe {
            slot.opening.fill(self.state.sequence, |line| {
                let opening = line.cast::<Opening>();
                (&raw mut (*opening).history).write(self.state.history);
                (&raw mut (*opening).factor).write(factor);
                reduce::copy_small((&raw mut (*opening).data).cast(), data, len);
            });
        }
        self.endpoint.announce_progress();
    }

    /// What a rank's opening says. It was heard, or is this rank's own; it stays until this rank has completed the operation.
    #[inline(always)]
    fn opening(&self, rank: usize) -> *const Opening {
        self.endpoint.channel.slot(rank, self.state.sequence).opening.payload().cast()
    }

    /// Where a rank's buffers lie, says its opening.
    #[inline(always)]
    fn locations(&self, rank: usize) -> [Location; 2] {
        // SAFETY: as `opening` says; any bytes are an opening.
        unsafe { &*self.opening(rank) }.locations()
    }

    /// Waits for a writer's opening and compares histories. What else is needed is under way at the same time.
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

    // --- small ----------------------------------------------------------------------------------------

    /// # Safety
    /// As for `run`; the flow is small, of this form.
    #[inline]
    unsafe fn small(&mut self, call: &Call<'_>, flow: &Flow<'_>, form: Form) -> Result<()> {
        let rank = self.endpoint.rank;
        if flow.writers.includes(rank) {
            self.wait_slot_free()?;
            // SAFETY: the caller's contract; the slot is free.
            unsafe { self.write_small(call, flow, form) };
        }
        if flow.readers.includes(rank) {
            (self.begun)();
            let awaited = match form {
                // Blocks of different lengths end in different lines.
                Form::Lines(per_block) if matches!(flow.blocks, Blocks::Equal(_)) && per_block > 0 => {
                    let first = if flow.scattered { rank * per_block } else { 0 };
                    Awaited::LinesBehind { first, last: first + per_block - 1 }
                }
                Form::Inline if self.given(flow) > IN_ONE_LINE => Awaited::BothLines,
                _ => Awaited::FirstLine,
            };
            self.hear_all(flow.writers, awaited)?;
            if flow.reduced {
                // SAFETY: the caller's contract.
                unsafe { self.small_reduce(call, flow, form) }?;
            } else {
                // SAFETY: the caller's contract.
                unsafe { self.small_copy(call, flow, form) }?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// The call's blocks are readable, and `wait_slot_free` was called.
    #[inline(always)]
    unsafe fn write_small(&self, call: &Call<'_>, flow: &Flow<'_>, form: Form) {
        let rank = self.endpoint.rank;
        // SAFETY: the call's block is readable, and fits the opening if it goes with it; the slot is free.
        let open = |len| unsafe { self.open(call.reduction.factor, call.send, len) };
        match form {
            Form::Inline => open(flow.send_len(rank, self.endpoint.ranks)),
            Form::Lines(per_block) => {
                // The opening goes first: its readers find it while the lines are being written.
                open(0);
                self.each_block(call, flow, |index, source, len| {
                    // SAFETY: the block is readable; the slot is free.
                    unsafe { self.write_lines(index * per_block, source, len) };
                });
                self.endpoint.announce_progress();
            }
            Form::Bytes(stride) => {
                self.each_block(call, flow, |reader, source, len| {
                    let target = self.small_bytes(flow, stride, rank, reader);
                    // SAFETY: the form says that all blocks fit; the slot is free.
                    unsafe { reduce::copy(target, source, len, false) };
                });
                open(0);
            }
        }
    }

    /// Runs `write` for each block this rank gives: its index in the slot, its address and its length.
    #[inline(always)]
    fn each_block(&self, call: &Call<'_>, flow: &Flow<'_>, write: impl Fn(usize, *const u8, usize)) {
        let rank = self.endpoint.rank;
        if flow.scattered {
            for reader in self.endpoint.peers().filter(|reader| flow.readers.includes(*reader)) {
                let source = call.send.wrapping_add(flow.source_offset(reader));
                write(reader, source, flow.block_len(rank, reader));
            }
        } else {
            write(0, call.send, flow.block_len(rank, rank));
        }
    }

    /// Writes bytes into lines of this rank's slot, from `first` on.
    ///
    /// # Safety
    /// The bytes are readable, and `wait_slot_free` was called.
    #[inline(always)]
    unsafe fn write_lines(&self, first: usize, source: *const u8, len: usize) {
        let slot = self.endpoint.channel.slot(self.endpoint.rank, self.state.sequence);
        for (line, offset) in slot.lines[first..].iter().zip((0..len).step_by(LINE_PAYLOAD)) {
            // SAFETY: in bounds of the bytes; the line is this rank's and free.
            unsafe { line.write(self.state.sequence, source.add(offset), (len - offset).min(LINE_PAYLOAD)) };
        }
    }

    /// Takes a writer's block for this rank out of its lines.
    ///
    /// # Safety
    /// `target` is writable for the block's length, and the writer's opening was heard.
    #[inline]
    unsafe fn read_block(
        &self,
        flow: &Flow<'_>,
        per_block: usize,
        writer: usize,
        target: *mut u8,
    ) -> Result<()> {
        let first = if flow.scattered { self.endpoint.rank * per_block } else { 0 };
        // SAFETY: the caller's contract.
        unsafe { self.read_lines(writer, first, target, flow.block_len(writer, self.endpoint.rank)) }
    }

    /// Takes bytes out of a writer's lines, from `first` on.
    ///
    /// # Safety
    /// `target` is writable for `len` bytes, and the writer's opening was heard.
    #[inline(always)]
    unsafe fn read_lines(&self, writer: usize, first: usize, target: *mut u8, len: usize) -> Result<()> {
        let sequence = self.state.sequence;
        let slot = self.endpoint.channel.slot(writer, sequence);
        for (line, offset) in slot.lines[first..].iter().zip((0..len).step_by(LINE_PAYLOAD)) {
            self.endpoint.wait(writer, || line.is(sequence))?;
            // SAFETY: stamped with this operation; in bounds of the target.
            unsafe { line.read(target.add(offset), (len - offset).min(LINE_PAYLOAD)) };
        }
        Ok(())
    }

    /// Where a writer's block for a reader lies in plain bytes.
    #[inline(always)]
    fn small_bytes(&self, flow: &Flow<'_>, stride: usize, writer: usize, reader: usize) -> *mut u8 {
        let (channel, sequence) = (&self.endpoint.channel, self.state.sequence);
        if flow.scattered {
            channel.slot_piece(writer, reader, sequence, stride)
        } else {
            channel.slot_bytes(writer, sequence)
        }
    }

    /// # Safety
    /// As for `small`, on a reader that has heard all.
    unsafe fn small_reduce(&mut self, call: &Call<'_>, flow: &Flow<'_>, form: Form) -> Result<()> {
        let rank = self.endpoint.rank;
        if let Form::Lines(per_block) = form {
            for writer in self.endpoint.peers() {
                let target = self.state.scratch.as_mut_ptr().wrapping_add(writer * LINES_BYTES);
                // SAFETY: the scratch has LINES_BYTES for each rank.
                unsafe { self.read_block(flow, per_block, writer, target) }?;
            }
        }
        self.gather_factors(call);
        let reducer = Reducer::new(call.dtype, call.reduction.code);
        let block = flow.block_len(rank, rank);
        self.state.sources.clear();
        for writer in 0..self.endpoint.ranks {
            let source = match form {
                _ if writer == rank => call.send.wrapping_add(flow.source_offset(rank)),
                Form::Inline => self.inline_data(flow, writer),
                Form::Lines(_) => self.state.scratch.as_ptr().wrapping_add(writer * LINES_BYTES),
                Form::Bytes(stride) => self.small_bytes(flow, stride, writer, rank),
            };
            self.state.sources.push(source);
        }
        let State { sources, factors, .. } = &*self.state;
        // SAFETY: every source has a block, and `recv` room for one; it overlaps at most this rank's own
        // source, exactly.
        unsafe { reducer.run(Targets::new(&[call.recv], false), sources, factors, block / flow.size) };
        Ok(())
    }

    /// # Safety
    /// As for `small`, on a reader that has heard all.
    unsafe fn small_copy(&mut self, call: &Call<'_>, flow: &Flow<'_>, form: Form) -> Result<()> {
        let rank = self.endpoint.rank;
        for writer in self.endpoint.peers().filter(|writer| flow.writers.includes(*writer)) {
            let target = call.recv.wrapping_add(flow.target_offset(writer));
            let len = flow.block_len(writer, rank);
            // SAFETY: the block's place lies in `recv`; its data lies in the opening or in the slot.
            unsafe {
                match form {
                    Form::Inline => reduce::copy_small(target, self.inline_data(flow, writer), len),
                    Form::Lines(per_block) => self.read_block(flow, per_block, writer, target)?,
                    Form::Bytes(stride) => {
                        reduce::copy(target, self.small_bytes(flow, stride, writer, rank), len, false);
                    }
                }
            }
        }
        if flow.writers.includes(rank) {
            // SAFETY: own blocks lie in `send` and `recv`, the same place or apart.
            unsafe { copy_own(call, flow, rank, 0, usize::MAX, false) };
        }
        Ok(())
    }

    /// A writer's block for this rank, in the opening.
    #[inline(always)]
    fn inline_data(&self, flow: &Flow<'_>, writer: usize) -> *const u8 {
        // SAFETY: a slot holds an opening.
        let data: *const u8 = unsafe { (&raw const (*self.opening(writer)).data).cast() };
        data.wrapping_add(flow.source_offset(self.endpoint.rank))
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
    unsafe fn bulk(&mut self, call: &Call<'_>, flow: &Flow<'_>) -> Result<()> {
        (self.begun)();
        let (rank, ranks) = (self.endpoint.rank, self.endpoint.ranks);
        let writes = flow.writers.includes(rank);
        let mut send = Location::NOWHERE;
        if writes {
            // What is overwritten while peers still need it must be copied first.
            let in_place_exchange = flow.scattered && flow.gathered && call.send == call.recv;
            if !in_place_exchange {
                send = self.endpoint.world.locate(call.send, flow.send_len(rank, ranks));
                if !send.is_readable()
                    && self.may_be_fetched(flow)
                    && !self.state.fetches.is_settled(flow.longest())
                {
                    send = self.offer(call.send, flow);
                }
            }
            let mut recv = Location::NOWHERE;
            if call.operation == Operation::AllReduce {
                recv = self.endpoint.world.locate(call.recv, flow.longest());
            }
            let mut data = [send.segment, send.offset, recv.segment, recv.offset, 0];
            if self.can_take_pushes(call, flow, recv) {
                data[4] = OPEN_TO_PUSHES;
            }
            if self.may_be_fetched(flow) {
                data[4] = fetched::word(self.state.fetches.next(flow.longest()));
            }
            self.wait_slot_free()?;
            // SAFETY: as many bytes; the slot is free.
            unsafe { self.open(call.reduction.factor, data.as_ptr().cast(), size_of_val(&data)) };
        }
        // SAFETY: the caller's contract.
        let outcome = unsafe { self.move_bulk(call, flow, send) };
        if outcome.is_err() && self.takes_pushes(call, flow) {
            // A peer that is stopped while it writes here, and goes on later, must not find this memory.
            self.endpoint.world.withdraw(call.recv, flow.longest());
        }
        outcome
    }

    /// # Safety
    /// As for `bulk`, after the openings.
    unsafe fn move_bulk(&mut self, call: &Call<'_>, flow: &Flow<'_>, send: Location) -> Result<()> {
        let rank = self.endpoint.rank;
        if flow.readers.includes(rank) {
            self.hear_all(flow.writers, Awaited::FirstLine)?;
            self.gather_factors(call);
        }
        // All ranks choose alike: they have heard the same openings.
        // SAFETY: the caller's contract.
        unsafe {
            match call.operation {
                Operation::AllReduce if self.takes_pushes(call, flow) && self.all_take_pushes() => {
                    self.push(call, flow)?;
                }
                // In one phase everybody reads all of everybody's contribution, which may be in place.
                Operation::AllReduce if !self.one_phase_pays(flow.longest()) || self.any_readable(0) => {
                    self.two_phases(call, flow, send)?;
                }
                _ if self.may_be_fetched(flow) => self.fetch_or_pass(call, flow, send)?,
                _ => self.pass(call, flow, send)?,
            }
        }
        if flow.writers.includes(rank) && self.locations(rank).into_iter().any(Location::is_readable) {
            self.complete();
            self.wait_until_read(flow)?;
        }
        Ok(())
    }

    /// Moves blocks as they are, through the region or from memory that peers can reach.
    ///
    /// # Safety
    /// As for `bulk`, after the openings, for what reduces nothing or in one phase.
    unsafe fn pass(&mut self, call: &Call<'_>, flow: &Flow<'_>, send: Location) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe {
            match call.operation {
                Operation::AllToAll if self.goes_in_pairs(flow) => self.pairs(call, flow),
                _ => self.one_phase(call, flow, send),
            }
        }
    }

    /// Where peers read this rank's memory it must not return before they are done.
    fn wait_until_read(&self, flow: &Flow<'_>) -> Result<()> {
        let sequence = self.state.sequence;
        for peer in self.endpoint.peers().filter(|peer| flow.readers.includes(*peer)) {
            let done = &self.endpoint.channel.state(peer).done_operation;
            self.endpoint.wait(peer, || done.get() >= sequence)?;
        }
        Ok(())
    }

    /// Whether reading everything from everybody is less work than waiting for each other once more, for which a rank that shares its core
    /// needs another turn.
    fn one_phase_pays(&self, bytes: usize) -> bool {
        let ranks = self.endpoint.ranks;
        let (one, two) = ((ranks - 1) * bytes, 2 * (ranks - 1) * bytes / ranks);
        one <= ONE_PHASE && (self.endpoint.crowded || one - two <= SPARED)
    }

    /// Whether any rank's buffer can be read by its peers.
    fn any_readable(&self, which: usize) -> bool {
        (0..self.endpoint.ranks).any(|rank| self.locations(rank)[which].is_readable())
    }

    /// Whether every rank's buffer (0: `send`, 1: `recv`) can be read by its peers.
    fn all_readable(&self, which: usize) -> bool {
        (0..self.endpoint.ranks).all(|rank| self.locations(rank)[which].is_readable())
    }

    fn lead(&self) -> usize {
        if self.endpoint.crowded { LEAD_CROWDED } else { LEAD }
    }

    /// # Safety
    /// As for `bulk`, after the openings.
    unsafe fn one_phase(&mut self, call: &Call<'_>, flow: &Flow<'_>, send: Location) -> Result<()> {
        let rank = self.endpoint.rank;
        let stages = flow.writers.includes(rank) && flow.readers != Who::Only(rank) && !send.is_readable();
        let reads = flow.readers.includes(rank);
        let both_ways = flow.writers == Who::All && flow.readers == Who::All;
        let ring = if both_ways { CONTRIBUTIONS } else { ONE_WAY };
        let chunk = self.step_len(ring, flow.scattered, flow.longest());
        let steps = flow.longest().div_ceil(chunk);
        let step = Steps { ring, first: self.state.next_chunk[ring], chunk };
        let lead = if reads { self.lead() } else { 0 };
        let streaming = flow.longest() >= if both_ways { STREAMING } else { STREAMING_ONE_WAY };
        let copies_own = reads && flow.writers.includes(rank) && !flow.reduced;
        let own_target = call.recv.wrapping_add(flow.target_offset(rank));
        // A long block is read once for both: its way past the caches does not take the ring's place there.
        let copies_while_staging =
            copies_own && stages && !flow.scattered && streaming && call.send != own_target.cast_const();
        // Peers that read a block where it is take its lines away: it is copied to its own place before they have got far.
        let copies_first = copies_own && !stages;
        if copies_first {
            // SAFETY: own blocks lie in `send` and `recv`, the same place or apart.
            unsafe { copy_own(call, flow, rank, 0, usize::MAX, streaming) };
        }
        for i in 0..steps + lead {
            if stages && i < steps {
                let range = |reader| step.range(i, flow.block_len(rank, reader));
                self.wait_ring_free(&step, i, flow.readers)?;
                // SAFETY: the blocks lie in `send`, the pieces in the chunk, which is free.
                unsafe {
                    if flow.scattered {
                        for reader in self.endpoint.peers().filter(|r| flow.readers.includes(*r)) {
                            let (offset, len) = range(reader);
                            let source = call.send.add(flow.source_offset(reader) + offset);
                            reduce::copy(self.piece(rank, reader, &step, i), source, len, false);
                        }
                    } else {
                        let (offset, len) = range(rank);
                        let (chunk, source) = (self.chunk(rank, &step, i), call.send.add(offset));
                        if copies_while_staging {
                            reduce::copy_twice(chunk, own_target.add(offset), source, len);
                        } else {
                            reduce::copy(chunk, source, len, false);
                        }
                    }
                }
                self.publish(&step, i);
            }
            if reads && i >= lead {
                // SAFETY: the caller's contract.
                unsafe { self.read_step(call, flow, &step, i - lead, streaming) }?;
                if copies_own && !copies_first && !copies_while_staging {
                    // SAFETY: own blocks lie in `send` and `recv`, the same place or apart.
                    unsafe { copy_own(call, flow, rank, (i - lead) * chunk, chunk, streaming) };
                }
            }
        }
        self.finish_steps(&step, steps);
        Ok(())
    }

    /// Takes one step's chunk of every other writer.
    ///
    /// # Safety
    /// As for `one_phase`.
    unsafe fn read_step(
        &mut self,
        call: &Call<'_>,
        flow: &Flow<'_>,
        step: &Steps,
        i: usize,
        streaming: bool,
    ) -> Result<()> {
        let rank = self.endpoint.rank;
        if flow.reduced {
            let (offset, len) = step.range(i, flow.block_len(rank, rank));
            let base = flow.source_offset(rank) + offset;
            let scattered = flow.scattered;
            // SAFETY: own and peers' blocks contain `base..base + len`; `recv` has room for its block.
            unsafe {
                self.reduce_step(call, step, i, base, scattered, call.recv.add(offset), len, streaming)
            }?;
        } else {
            for writer in self.endpoint.peers().filter(|writer| flow.writers.includes(*writer)) {
                let (offset, len) = step.range(i, flow.block_len(writer, rank));
                let base = flow.source_offset(rank) + offset;
                let source = self.source_of(writer, 0, step, i, base, flow.scattered)?;
                let location = self.locations(writer)[0];
                // SAFETY: the writer's block contains the range, and `recv` has room for it.
                unsafe {
                    let target = call.recv.add(flow.target_offset(writer) + offset);
                    self.guarded(location.is_readable(), || reduce::copy(target, source, len, streaming))?;
                }
            }
        }
        self.endpoint.own().done_chunk[step.ring].set(step.number(i) + 1);
        self.endpoint.announce_progress();
        Ok(())
    }

    /// Reduces all ranks' contributions of one step, in rank order.
    ///
    /// `base` is where the step's elements start in a readable `send`; `scattered`, whether they have a piece of a chunk.
    ///
    /// # Safety
    /// `len` bytes are there in every contribution, and room for them at `target`.
    #[expect(clippy::too_many_arguments, reason = "two callers, which differ in just these")]
    unsafe fn reduce_step(
        &mut self,
        call: &Call<'_>,
        step: &Steps,
        i: usize,
        base: usize,
        scattered: bool,
        target: *mut u8,
        len: usize,
        streaming: bool,
    ) -> Result<()> {
        let mut direct = false;
        self.state.sources.clear();
        for writer in 0..self.endpoint.ranks {
            let source = if writer == self.endpoint.rank {
                call.send.wrapping_add(base)
            } else {
                direct |= self.locations(writer)[0].is_readable();
                self.source_of(writer, 0, step, i, base, scattered)?
            };
            self.state.sources.push(source);
        }
        let reducer = Reducer::new(call.dtype, call.reduction.code);
        let State { sources, factors, .. } = &*self.state;
        self.guarded(direct, || {
            // SAFETY: every source has `len` bytes; the target overlaps at most this rank's own source,
            // exactly.
            unsafe {
                reducer.run(Targets::new(&[target], streaming), sources, factors, len / call.dtype.size())
            };
        })
    }

    /// Where a writer's data of a step for this rank starts: at `base` in its buffer, or in its ring once it is written there, in a piece of
    /// its own if `scattered`. `which` buffer: 0 for `send`, 1 for `recv`.
    fn source_of(
        &mut self,
        writer: usize,
        which: usize,
        step: &Steps,
        i: usize,
        base: usize,
        scattered: bool,
    ) -> Result<*const u8> {
        let location = self.locations(writer)[which];
        // Results lie in `recv`, but are there only when published.
        if !location.is_readable() || step.ring == RESULTS {
            let number = step.number(i);
            let published = &self.endpoint.channel.state(writer).published[step.ring];
            self.endpoint.wait(writer, || published.get() > number)?;
        }
        if location.is_readable() {
            let mapped = &mut self.state.mapped[writer][which];
            Ok(self.endpoint.world.resolve(location, mapped)?.wrapping_add(base))
        } else if scattered {
            Ok(self.piece(writer, self.endpoint.rank, step, i))
        } else {
            Ok(self.chunk(writer, step, i))
        }
    }

    /// Where a writer's data of a step lies in its ring.
    #[inline(always)]
    fn chunk(&self, writer: usize, step: &Steps, i: usize) -> *mut u8 {
        self.endpoint.channel.ring_chunk(writer, step.ring, step.number(i))
    }

    /// Where its data for one reader lies.
    #[inline(always)]
    fn piece(&self, writer: usize, reader: usize, step: &Steps, i: usize) -> *mut u8 {
        self.endpoint.channel.ring_piece(writer, reader, step.ring, step.number(i), step.chunk)
    }

    /// Does `work`, inside the gate if it touches a peer's own memory.
    #[inline(always)]
    fn guarded(&self, direct: bool, work: impl FnOnce()) -> Result<()> {
        if direct {
            return self.endpoint.inside(0, work);
        }
        work();
        Ok(())
    }

    /// Reduce-scatter and all-gather, a step of one behind a step of the other, so that what is gathered is
    /// still in its writer's cache.
    ///
    /// # Safety
    /// As for `bulk`, for an all_reduce of which all have heard all openings.
    unsafe fn two_phases(&mut self, call: &Call<'_>, flow: &Flow<'_>, send: Location) -> Result<()> {
        let (rank, ranks) = (self.endpoint.rank, self.endpoint.ranks);
        let bytes = flow.longest();
        let part = bytes.div_ceil(ranks).next_multiple_of(LINE);
        let part_len = |rank: usize| bytes.saturating_sub(rank * part).min(part);
        let recv = self.locations(rank)[1];
        let staged = !self.all_readable(0);
        let chunk = self.step_len(CONTRIBUTIONS, staged, flow.longest());
        let steps = part.div_ceil(chunk);
        let gives = Steps { ring: CONTRIBUTIONS, first: self.state.next_chunk[CONTRIBUTIONS], chunk };
        let results = Steps { ring: RESULTS, first: self.state.next_chunk[RESULTS], chunk };
        let streaming = bytes >= STREAMING;
        let lead = self.lead();
        for i in 0..steps + 2 * lead {
            if i < steps && !send.is_readable() {
                self.wait_ring_free(&gives, i, Who::All)?;
                for reader in self.endpoint.peers() {
                    let (offset, len) = gives.range(i, part_len(reader));
                    // An empty part may begin behind the buffer.
                    let source = call.send.wrapping_add(reader * part + offset);
                    // SAFETY: the part lies in `send`, the piece in the chunk, which is free.
                    unsafe { reduce::copy(self.piece(rank, reader, &gives, i), source, len, false) };
                }
                self.publish(&gives, i);
            }
            if (lead..steps + lead).contains(&i) {
                let j = i - lead;
                let (offset, len) = gives.range(j, part_len(rank));
                let base = rank * part + offset;
                // SAFETY: the part lies in every contribution and in `recv`.
                let target = unsafe { call.recv.add(if len == 0 { 0 } else { base }) };
                if len > 0 {
                    // SAFETY: as above. The own part is kept in the cache for the peers.
                    unsafe { self.reduce_step(call, &gives, j, base, true, target, len, false) }?;
                }
                self.endpoint.own().done_chunk[CONTRIBUTIONS].set(gives.number(j) + 1);
                if !recv.is_readable() {
                    self.wait_ring_free(&results, j, Who::All)?;
                    // SAFETY: the result was just written; the chunk is free.
                    unsafe { reduce::copy(self.chunk(rank, &results, j), target, len, false) };
                }
                self.publish(&results, j);
            }
            if i >= 2 * lead {
                let j = i - 2 * lead;
                for writer in self.endpoint.peers() {
                    let (offset, len) = results.range(j, part_len(writer));
                    if len == 0 {
                        continue;
                    }
                    let base = writer * part + offset;
                    let source = self.source_of(writer, 1, &results, j, base, false)?;
                    let readable = self.locations(writer)[1].is_readable();
                    // SAFETY: the writer's part lies in its `recv` and in this rank's.
                    unsafe {
                        let target = call.recv.add(base);
                        self.guarded(readable, || reduce::copy(target, source, len, streaming))?;
                    }
                }
                self.endpoint.own().done_chunk[RESULTS].set(results.number(j) + 1);
                self.endpoint.announce_progress();
            }
        }
        self.finish_steps(&gives, steps);
        self.finish_steps(&results, steps);
        Ok(())
    }

    // --- steps ----------------------------------------------------------------------------------------

    /// Bytes of a block of so many that one step moves; a chunk of the ring holds a piece for each rank if scattered.
    fn step_len(&self, ring: usize, scattered: bool, block: usize) -> usize {
        let chunk = self.endpoint.channel.layout.chunk[ring];
        match self.endpoint.ranks {
            ranks if scattered => (chunk / ranks) & !63,
            2 if block <= 2 * LONG_STEP_OF_TWO => chunk.min(LONG_STEP_OF_TWO),
            2 => chunk.min(STEP_OF_TWO),
            _ => chunk,
        }
    }

    /// Waits until what was given in the place of step `i`'s chunk is no longer needed, whoever gave it.
    fn wait_ring_free(&mut self, step: &Steps, i: usize, readers: Who) -> Result<()> {
        let number = step.number(i);
        let needed = (number + 1).saturating_sub(self.endpoint.channel.layout.ring_chunks[step.ring] as u64);
        if self.state.drained[step.ring] < needed {
            let mut drained = u64::MAX;
            for peer in self.endpoint.peers() {
                let done = &self.endpoint.channel.state(peer).done_chunk[step.ring];
                // Who does not read in this operation only has to be done with the ones before.
                let reads = readers.includes(peer);
                let needed = if reads { needed } else { needed.min(step.first) };
                self.endpoint.wait(peer, || done.get() >= needed)?;
                let seen = done.get();
                if reads || seen < step.first {
                    drained = drained.min(seen);
                }
            }
            self.state.drained[step.ring] = drained.min(number);
        }
        Ok(())
    }

    fn publish(&self, step: &Steps, i: usize) {
        self.endpoint.own().published[step.ring].set(step.number(i) + 1);
        self.endpoint.announce_progress();
    }

    /// Leaves the ring as the next operation expects it, also on ranks that had nothing to read.
    fn finish_steps(&mut self, step: &Steps, steps: usize) {
        let next = step.first + steps as u64;
        self.state.next_chunk[step.ring] = next;
        self.endpoint.own().done_chunk[step.ring].set(next);
    }
}

/// A run of chunks of one ring.
struct Steps {
    ring: usize,
    /// Number of the first chunk.
    first: u64,
    /// Bytes of a block per step.
    chunk: usize,
}

impl Steps {
    fn number(&self, i: usize) -> u64 {
        self.first + i as u64
    }

    /// Offset and length of step `i` in a block.
    fn range(&self, i: usize, block: usize) -> (usize, usize) {
        let offset = (i * self.chunk).min(block);
        (offset, (block - offset).min(self.chunk))
    }
}

/// Copies a range of this rank's block for itself, unless it is in its place already.
///
/// # Safety
/// The blocks lie in the call's buffers.
unsafe fn copy_own(
    call: &Call<'_>,
    flow: &Flow<'_>,
    rank: usize,
    offset: usize,
    len: usize,
    streaming: bool,
) {
    let block = flow.block_len(rank, rank);
    let offset = offset.min(block);
    let len = len.min(block - offset);
    if len == 0 {
        return;
    }
    // SAFETY: in bounds of the blocks, which are the same place or apart.
    unsafe {
        let source = call.send.add(flow.source_offset(rank) + offset);
        let target = call.recv.add(flow.target_offset(rank) + offset);
        if source != target.cast_const() {
            reduce::copy(target, source, len, streaming);
        }
    }
}
