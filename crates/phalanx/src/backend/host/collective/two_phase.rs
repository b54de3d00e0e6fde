//! One-phase and two-phase algorithms: blocks in steps of a chunk.

use super::{Collective, CollectiveState};
use crate::backend::host::choose;
use crate::backend::host::tunables::LEAD_CROWDED;
use crate::contract::{Call, Flow, Who};
use crate::control::layout::{CONTRIBUTIONS, ONE_WAY, RESULTS};
use crate::control::tunables::FEWEST_CHUNKS;
use crate::control::world::Location;
use crate::os::LINE;
use crate::reduce;
use crate::reduce::{Reducer, Targets};
use crate::types::error::Result;

const _: () = assert!(LEAD_CROWDED < FEWEST_CHUNKS);

impl Collective<'_> {
    /// # Safety
    /// As for `bulk`, after the openings.
    pub(crate) unsafe fn one_phase(
        &mut self,
        call: &Call<'_>,
        flow: &Flow<'_>,
        send: Location,
    ) -> Result<()> {
        let rank = self.endpoint.rank;
        let stages = flow.writers.includes(rank) && flow.readers != Who::Only(rank) && !send.is_readable();
        let reads = flow.readers.includes(rank);
        let both_ways = flow.writers == Who::All && flow.readers == Who::All;
        let ring = if both_ways { CONTRIBUTIONS } else { ONE_WAY };
        let mut chunk = self.topology().step(ring, flow.scattered, flow.longest());
        if flow.reduced {
            // Elements are combined whole; what a closure combines may be of any size.
            chunk -= chunk % flow.size;
        }
        let steps = flow.longest().div_ceil(chunk);
        let step = Steps { ring, first: self.state.next_chunk[ring], chunk };
        let lead = if reads { self.topology().lead() } else { 0 };
        let streaming = choose::streams(flow);
        let copies_own = reads && flow.writers.includes(rank) && !flow.reduced;
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
                        reduce::copy(self.chunk(rank, &step, i), call.send.add(offset), len, false);
                    }
                }
                self.publish(&step, i);
            }
            if reads && i >= lead {
                // SAFETY: the caller's contract.
                unsafe { self.read_step(call, flow, &step, i - lead, streaming) }?;
                if copies_own && !copies_first {
                    // SAFETY: own blocks lie in `send` and `recv`, the same place or apart.
                    unsafe { copy_own(call, flow, rank, (i - lead) * chunk, chunk, streaming) };
                }
            }
        }
        self.finish_steps(&step, steps);
        Ok(())
    }

    /// Reads the chunk of every other writer in a step.
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
        for writer in call.flow().combined(self.endpoint.rank, self.endpoint.ranks) {
            let source = if writer == self.endpoint.rank {
                call.send.wrapping_add(base)
            } else {
                direct |= self.locations(writer)[0].is_readable();
                self.source_of(writer, 0, step, i, base, scattered)?
            };
            self.state.sources.push(source);
        }
        let reducer = Reducer::of(call);
        let CollectiveState { sources, factors, .. } = &*self.state;
        if sources.is_empty() {
            return Ok(());
        }
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
            Ok(self.reach(writer, which)?.wrapping_add(base))
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
    pub(crate) fn guarded(&self, direct: bool, work: impl FnOnce()) -> Result<()> {
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
    pub(crate) unsafe fn two_phases(
        &mut self,
        call: &Call<'_>,
        flow: &Flow<'_>,
        send: Location,
    ) -> Result<()> {
        let (rank, ranks) = (self.endpoint.rank, self.endpoint.ranks);
        let bytes = flow.longest();
        let part = bytes.div_ceil(ranks).next_multiple_of(LINE);
        let part_len = |rank: usize| bytes.saturating_sub(rank * part).min(part);
        let recv = self.locations(rank)[1];
        let staged = !self.all_readable(0);
        let chunk = self.topology().step(CONTRIBUTIONS, staged, flow.longest());
        let steps = part.div_ceil(chunk);
        let gives = Steps { ring: CONTRIBUTIONS, first: self.state.next_chunk[CONTRIBUTIONS], chunk };
        let results = Steps { ring: RESULTS, first: self.state.next_chunk[RESULTS], chunk };
        let streaming = choose::streams(flow);
        let lead = self.topology().lead();
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

    /// Waits until what was given in the place of step `i`'s chunk is no longer needed, whoever gave it.
    pub(crate) fn wait_ring_free(&mut self, step: &Steps, i: usize, readers: Who) -> Result<()> {
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

    pub(crate) fn publish(&self, step: &Steps, i: usize) {
        self.endpoint.own().published[step.ring].set(step.number(i) + 1);
        self.endpoint.announce_progress();
    }

    /// Leaves the ring as the next operation expects it, also on ranks that had nothing to read.
    pub(crate) fn finish_steps(&mut self, step: &Steps, steps: usize) {
        let next = step.first + steps as u64;
        self.state.next_chunk[step.ring] = next;
        self.endpoint.own().done_chunk[step.ring].set(next);
    }
}

/// A run of chunks of one ring.
pub(crate) struct Steps {
    pub ring: usize,
    /// Number of the first chunk.
    pub first: u64,
    /// Bytes of a block per step.
    pub chunk: usize,
}

impl Steps {
    pub(crate) fn number(&self, i: usize) -> u64 {
        self.first + i as u64
    }

    /// Offset and length of step `i` in a block.
    pub(crate) fn range(&self, i: usize, block: usize) -> (usize, usize) {
        let offset = (i * self.chunk).min(block);
        (offset, (block - offset).min(self.chunk))
    }
}

/// Copies a range of this rank's block for itself, unless it is in its place already.
///
/// # Safety
/// The blocks lie in the call's buffers.
pub(crate) unsafe fn copy_own(
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
