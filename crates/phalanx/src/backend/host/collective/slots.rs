//! Slots: every writer puts its blocks into its slot, and every reader takes them out.

use super::two_phase::copy_own;
use super::{Awaited, Collective, CollectiveState, IN_ONE_LINE, LINES_BYTES};
use crate::backend::host::choose::Form;
use crate::contract::{Blocks, Call, Flow};
use crate::control::flags::LINE_PAYLOAD;
use crate::reduce;
use crate::reduce::{Reducer, Targets};
use crate::types::error::Result;

impl Collective<'_> {
    /// # Safety
    /// As for `run`; the blocks fit in slots, in this form.
    #[inline]
    pub(crate) unsafe fn slots(&mut self, call: &Call<'_>, flow: &Flow<'_>, form: Form) -> Result<()> {
        let rank = self.endpoint.rank;
        if flow.writers.includes(rank) {
            self.wait_slot_free()?;
            // SAFETY: the caller's contract; the slot is free.
            unsafe { self.write_slot(call, flow, form) };
        }
        if flow.readers.includes(rank) {
            (self.begun)();
            // Work that needs no peer is done while openings arrive.
            let reducer = flow.reduced.then(|| {
                self.place_sources(call, flow, form);
                Reducer::of(call)
            });
            let awaited = match form {
                // Blocks of different lengths end in different lines.
                Form::Lines(per_block) if matches!(flow.blocks, Blocks::Equal(_)) && per_block > 0 => {
                    let first = if flow.scattered { rank * per_block } else { 0 };
                    Awaited::LinesBehind { first, last: first + per_block - 1 }
                }
                Form::Inline if flow.given(self.endpoint.ranks) > IN_ONE_LINE => Awaited::BothLines,
                _ => Awaited::FirstLine,
            };
            self.hear_all(flow.writers, awaited)?;
            // SAFETY: the caller's contract.
            unsafe {
                match reducer {
                    Some(reducer) => self.reduce_slots(call, flow, form, reducer),
                    None => self.copy_slots(call, flow, form),
                }
            }?;
        }
        Ok(())
    }

    /// # Safety
    /// The call's blocks are readable, and `wait_slot_free` was called.
    #[inline(always)]
    unsafe fn write_slot(&self, call: &Call<'_>, flow: &Flow<'_>, form: Form) {
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
                    let target = self.slot_bytes(flow, stride, rank, reader);
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
    pub(crate) unsafe fn write_lines(&self, first: usize, source: *const u8, len: usize) {
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
    pub(crate) unsafe fn read_lines(
        &self,
        writer: usize,
        first: usize,
        target: *mut u8,
        len: usize,
    ) -> Result<()> {
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
    fn slot_bytes(&self, flow: &Flow<'_>, stride: usize, writer: usize, reader: usize) -> *mut u8 {
        let (channel, sequence) = (&self.endpoint.channel, self.state.sequence);
        if flow.scattered {
            channel.slot_piece(writer, reader, sequence, stride)
        } else {
            channel.slot_bytes(writer, sequence)
        }
    }

    /// Notes where each rank's contribution will lie.
    #[inline(always)]
    fn place_sources(&mut self, call: &Call<'_>, flow: &Flow<'_>, form: Form) {
        let rank = self.endpoint.rank;
        self.state.sources.clear();
        for writer in 0..self.endpoint.ranks {
            let source = match form {
                _ if writer == rank => call.send.wrapping_add(flow.source_offset(rank)),
                Form::Inline => self.inline_data(flow, writer),
                Form::Lines(_) => self.state.scratch.as_ptr().wrapping_add(writer * LINES_BYTES),
                Form::Bytes(stride) => self.slot_bytes(flow, stride, writer, rank),
            };
            self.state.sources.push(source);
        }
    }

    /// # Safety
    /// As for `slots`, on a reader that has placed its sources and then heard all.
    #[inline(always)]
    unsafe fn reduce_slots(
        &mut self,
        call: &Call<'_>,
        flow: &Flow<'_>,
        form: Form,
        reducer: Reducer,
    ) -> Result<()> {
        let rank = self.endpoint.rank;
        if let Form::Lines(per_block) = form {
            for writer in self.endpoint.peers() {
                let target = self.state.scratch.as_mut_ptr().wrapping_add(writer * LINES_BYTES);
                // SAFETY: the scratch has LINES_BYTES for each rank.
                unsafe { self.read_block(flow, per_block, writer, target) }?;
            }
        }
        self.gather_factors(call);
        let CollectiveState { sources, factors, .. } = &*self.state;
        let combined = &sources[flow.combined(rank, self.endpoint.ranks)];
        let count = flow.block_len(rank, rank) / flow.size;
        if !combined.is_empty() {
            // SAFETY: every source has a block, and `recv` room for one; it overlaps at most this rank's own
            // source, exactly.
            unsafe { reducer.run(Targets::new(&[call.recv], false), combined, factors, count) };
        }
        Ok(())
    }

    /// # Safety
    /// As for `slots`, on a reader that has heard all.
    unsafe fn copy_slots(&mut self, call: &Call<'_>, flow: &Flow<'_>, form: Form) -> Result<()> {
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
                        reduce::copy(target, self.slot_bytes(flow, stride, writer, rank), len, false);
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
}
