//! A collective in pieces: what each rank puts into its stage, and what it gets from the others' stages.
//!
//! One step:
//! - every rank copies a piece of its data to its stage;
//! - the ranks line up;
//! - each gets its pieces from the others' stages and copies them to its buffer;
//! - they line up again, after which the stages can be overwritten.

use super::process::Half;
use super::{NvshmemComm, device};
use crate::contract::{Backend, Call};
use crate::reduce::{Reducer, Targets};
use crate::types::error::Result;
use crate::types::memory::{RawStream, Space};

/// Places in the stage are multiples of this many bytes.
pub(crate) const ALIGNMENT: usize = 64;

/// A block that this rank puts into its stage.
#[derive(Debug, Clone, Copy)]
struct StagedPiece {
    place: usize,
    start: *const u8,
    bytes: usize,
}

/// A block that this rank gets from a rank's stage.
#[derive(Debug, Clone, Copy)]
struct FetchedPiece {
    rank: usize,
    place: usize,
    start: *mut u8,
    bytes: usize,
}

/// One rank's blocks in a collective of pieces.
#[derive(Debug, Default)]
pub(crate) struct StagingPlan {
    shown: Vec<StagedPiece>,
    fetched: Vec<FetchedPiece>,
}

impl StagingPlan {
    /// The blocks of a call. In reductions all blocks to combine have the same target.
    pub fn of(call: &Call<'_>, rank: usize, ranks: usize) -> StagingPlan {
        let flow = call.flow();
        // A writer puts each block in the place of its reader; a block for all readers goes in the first place.
        let place_of = |reader| if flow.scattered { reader } else { 0 };
        let shown_to = |reader| {
            let source = flow.source(rank, reader);
            let start = call.send.wrapping_add(source.start);
            StagedPiece { place: place_of(reader), start, bytes: source.len() }
        };
        let fetched_from = |writer| {
            let target = flow.target(rank, writer);
            let start = call.recv.wrapping_add(target.start);
            FetchedPiece { rank: writer, place: place_of(rank), start, bytes: target.len() }
        };
        let (mut shown, mut fetched) = (Vec::new(), Vec::new());
        if flow.writers.includes(rank) {
            let places = if flow.scattered { ranks } else { 1 };
            shown.extend((0..places).map(shown_to));
        }
        if flow.readers.includes(rank) {
            fetched.extend(flow.writers.among(ranks).map(fetched_from));
        }
        StagingPlan { shown, fetched }
    }
}

/// How fetched blocks are combined into one.
pub(crate) struct Combination {
    pub reducer: Reducer<'static>,
    /// Each rank's factor.
    pub factors: Vec<u64>,
    /// Bytes of an element.
    pub size: usize,
}

impl NvshmemComm {
    /// Bytes of a place, if the stage has one for each rank.
    pub(crate) fn place_bytes(&self) -> usize {
        self.process.stage / self.pes.len() / ALIGNMENT * ALIGNMENT
    }

    /// Carries a plan out. `longest` is the length in bytes of the longest block of any rank.
    ///
    /// # Safety
    /// The contract of `Backend::collective`, for the call that the flow is of; `operating` is held.
    pub(crate) unsafe fn flow(
        &self,
        call: &Call<'_>,
        flow: &StagingPlan,
        longest: usize,
        combination: Option<&Combination>,
    ) -> Result<()> {
        let piece = self.place_bytes();
        for begin in (0..longest).step_by(piece) {
            for shown in flow.shown.iter().filter(|shown| shown.bytes > begin) {
                let bytes = (shown.bytes - begin).min(piece);
                // SAFETY: the caller's contract; the place is this rank's own, and nobody gets from it now.
                unsafe {
                    let source = shown.start.wrapping_add(begin);
                    self.bring(shown.place * piece, source, call.spaces[0], bytes, call.stream)
                }?;
            }
            self.wait_for_stream(call.stream, &self.current_call())?;
            self.host_barrier()?;
            // SAFETY: as above.
            unsafe { self.fetch(call, flow, begin, combination) }?;
            self.host_barrier()?;
        }
        Ok(())
    }

    /// Gets the pieces of this step and copies them to the buffer; complete when it returns.
    ///
    /// # Safety
    /// As for [`flow`](NvshmemComm::flow); the peers' stages hold the step's pieces.
    unsafe fn fetch(
        &self,
        call: &Call<'_>,
        flow: &StagingPlan,
        begin: usize,
        combination: Option<&Combination>,
    ) -> Result<()> {
        let (piece, stream, process) = (self.place_bytes(), call.stream, &self.process);
        // In place, a rank's own block is there already.
        let is_there = |fetched: &FetchedPiece| {
            let own = |shown: &&StagedPiece| shown.place == fetched.place;
            combination.is_none()
                && fetched.rank == self.rank()
                && flow.shown.iter().find(own).is_some_and(|shown| shown.start == fetched.start.cast_const())
        };
        let pieces: Vec<(usize, FetchedPiece)> = flow.fetched.iter().copied().enumerate().collect();
        let pieces = pieces.iter().filter(|(_, fetched)| fetched.bytes > begin && !is_there(fetched));
        let pieces: Vec<_> =
            pieces.map(|(n, fetched)| (*n, *fetched, (fetched.bytes - begin).min(piece))).collect();
        let Some((_, first, bytes)) = pieces.first() else { return Ok(()) };
        {
            let _turn = process.enter()?;
            let get = process
                .library
                .need(process.library.nvshmemx_getmem_on_stream, "nvshmemx_getmem_on_stream")?;
            for (n, fetched, bytes) in &pieces {
                let target = process.at(Half::Out, n * piece);
                let source = process.at(Half::In, fetched.place * piece);
                let pe = self.pes[fetched.rank] as i32;
                // SAFETY: initialised; symmetric memory of so many bytes at both ends, a PE that exists.
                unsafe { get(target.cast(), source.cast_const().cast(), *bytes, pe, stream.0) };
            }
        }
        if let Some(combination) = combination {
            let count = bytes / combination.size;
            // SAFETY: the caller's contract: one buffer for all, and what was fetched.
            return unsafe {
                self.combine(call, first.start.wrapping_add(begin), count, pieces.len(), combination)
            };
        }
        let mut returning = Vec::new();
        for (n, fetched, bytes) in &pieces {
            let source = process.at(Half::Out, n * piece);
            let target = fetched.start.wrapping_add(begin);
            // SAFETY: the caller's contract.
            unsafe {
                if call.spaces[1] == Space::Device {
                    device::copy(target, source, *bytes, stream)?;
                } else {
                    let pinned = process.on_host(Half::Out, n * piece)?;
                    device::copy(pinned, source, *bytes, stream)?;
                    returning.push((pinned, target, *bytes));
                }
            }
        }
        self.wait_for_stream(stream, &self.current_call())?;
        for (pinned, target, bytes) in returning {
            // SAFETY: the caller's buffer has so many bytes, and so has the stage; the copies are complete.
            unsafe { std::ptr::copy_nonoverlapping(pinned, target, bytes) };
        }
        Ok(())
    }

    /// Copies to the stage, behind the stream's work. Host memory goes through pinned memory, so that a
    /// caller that gives up can free its buffer.
    ///
    /// # Safety
    /// `source` is readable for so many bytes; the place is not in use.
    pub(crate) unsafe fn bring(
        &self,
        place: usize,
        source: *const u8,
        space: Space,
        bytes: usize,
        stream: RawStream,
    ) -> Result<()> {
        let process = &self.process;
        process.device.enter()?;
        let target = process.at(Half::In, place);
        // SAFETY: the caller's contract; pinned memory mirrors the stage.
        unsafe {
            if space == Space::Device {
                return device::copy(target, source, bytes, stream);
            }
            let pinned = process.on_host(Half::In, place)?;
            std::ptr::copy_nonoverlapping(source, pinned, bytes);
            device::copy(target, pinned, bytes, stream)
        }
    }

    /// Combines the fetched blocks on the host, in rank order.
    ///
    /// # Safety
    /// `target` takes `count` elements; so many were fetched from each of so many ranks.
    unsafe fn combine(
        &self,
        call: &Call<'_>,
        target: *mut u8,
        count: usize,
        ranks: usize,
        combination: &Combination,
    ) -> Result<()> {
        let (piece, bytes, process) = (self.place_bytes(), count * combination.size, &self.process);
        let mut sources = Vec::with_capacity(ranks);
        for rank in 0..ranks {
            let pinned = process.on_host(Half::Out, rank * piece)?;
            // SAFETY: the stage and its mirror; the stream has fetched before.
            unsafe { device::copy(pinned, process.at(Half::Out, rank * piece), bytes, call.stream) }?;
            sources.push(pinned.cast_const());
        }
        self.wait_for_stream(call.stream, &self.current_call())?;
        let is_host = call.spaces[1] == Space::Host;
        let result = if is_host { target } else { sources[0].cast_mut() };
        // SAFETY: every source has so many elements; the target is the caller's, or exactly the first source.
        unsafe {
            combination.reducer.run(Targets::new(&[result], false), &sources, &combination.factors, count)
        };
        if is_host {
            return Ok(());
        }
        // SAFETY: the caller's contract; waited for below.
        unsafe { device::copy(target, result, bytes, call.stream) }?;
        self.wait_for_stream(call.stream, &self.current_call())
    }
}
