//! Two phases: each rank combines a share of each chunk, and passes the result on to those that get it. The contributions to the next
//! chunk are under way meanwhile.

use super::super::choose::piece;
use super::{CollectiveState, Group};
use crate::contract::{Call, Flow};
use crate::reduce::{Reducer, Targets};
use crate::types::error::Result;
use std::ops::Range;

/// Elements that are combined together. Two chunks are under way at most.
pub(super) struct Chunk {
    /// From 0.
    pub number: usize,
    pub send: *const u8,
    pub recv: *mut u8,
    pub len: usize,
}

impl Chunk {
    /// The elements that a rank combines.
    fn share(&self, owner: usize, ranks: usize) -> Range<usize> {
        self.len * owner / ranks..self.len * (owner + 1) / ranks
    }

    fn contributions(&self) -> u64 {
        2 * self.number as u64
    }

    fn results(&self) -> u64 {
        2 * self.number as u64 + 1
    }
}

/// Room for the contributions of all to this rank's shares of two chunks, and behind each for its result, if this rank gets none.
struct Shares {
    start: *mut u8,
    /// Bytes of a share.
    room: usize,
    ranks: usize,
}

impl Shares {
    fn aside(&self, chunk: &Chunk, place: usize) -> *mut u8 {
        self.start.wrapping_add(self.room * ((chunk.number % 2) * (self.ranks + 1) + place))
    }
}

impl Group<'_> {
    /// Room for chunks of so many elements, until the scratch is used again.
    fn shares(&self, state: &mut CollectiveState, len: usize, size: usize) -> Shares {
        let ranks = self.ranks();
        let room = len.div_ceil(ranks) * size;
        Shares { start: state.scratch(2 * room * (ranks + 1)), room, ranks }
    }

    /// Posts the contributions to a chunk.
    ///
    /// # Safety
    /// `send` and `recv` have the chunk's elements, which nothing else uses until it is finished.
    unsafe fn begin_chunk(
        &self,
        state: &mut CollectiveState,
        flow: &Flow<'_>,
        shares: &Shares,
        chunk: &Chunk,
    ) {
        let (ranks, size, step) = (self.ranks(), flow.size, chunk.contributions());
        let own = chunk.share(self.rank, ranks);
        state.begin_step(step);
        for peer in self.peers() {
            // SAFETY: each rank has its place in the scratch.
            unsafe { self.receive_part(state, step, peer, (shares.aside(chunk, peer), own.len() * size)) };
        }
        for peer in self.peers() {
            let share = chunk.share(peer, ranks);
            let data = chunk.send.wrapping_add(share.start * size);
            // SAFETY: the share lies in `send`, and is not written before it is sent.
            unsafe { self.send_part(state, step, peer, (data, share.len() * size)) };
        }
    }

    /// Combines this rank's share of a chunk, and posts the results. Those of the chunk before have come.
    ///
    /// # Safety
    /// As for `begin_chunk`; the contributions have come.
    unsafe fn combine_chunk(
        &self,
        state: &mut CollectiveState,
        (call, flow): (&Call<'_>, &Flow<'_>),
        shares: &Shares,
        chunk: &Chunk,
    ) {
        let (rank, ranks, size, step) = (self.rank, self.ranks(), flow.size, chunk.results());
        let own = chunk.share(rank, ranks);
        let is_reader = flow.readers.includes(rank);
        let target = match is_reader {
            true => chunk.recv.wrapping_add(own.start * size),
            false => shares.aside(chunk, ranks),
        };
        let source = |writer: usize| match writer == rank {
            true => chunk.send.wrapping_add(own.start * size),
            false => shares.aside(chunk, writer).cast_const(),
        };
        let sources: Vec<*const u8> = (0..ranks).map(source).collect();
        let factors = &state.factors[..ranks];
        // SAFETY: each source has a share, which is sent; the target is apart from them, or this rank's own.
        unsafe { Reducer::of(call).run(Targets::new(&[target], false), &sources, factors, own.len()) };
        state.begin_step(step);
        for peer in self.peers().filter(|_| is_reader) {
            let share = chunk.share(peer, ranks);
            let place = chunk.recv.wrapping_add(share.start * size);
            // SAFETY: the share lies in `recv`; in place, its contribution is sent.
            unsafe { self.receive_part(state, step, peer, (place, share.len() * size)) };
        }
        for peer in self.peers().filter(|peer| flow.readers.includes(*peer)) {
            // SAFETY: the result stays until the step is over.
            unsafe { self.send_part(state, step, peer, (target, own.len() * size)) };
        }
    }

    /// Reduces chunk by chunk, of at most `len` elements. `prepare` is called before a chunk's contributions are posted, and `conclude` when
    /// its results are there; the network carries another chunk meanwhile.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective); the chunks are apart. A chunk is the network's from one call to the
    /// other.
    pub(super) unsafe fn in_chunks(
        &self,
        state: &mut CollectiveState,
        (call, flow): (&Call<'_>, &Flow<'_>),
        len: usize,
        chunk: impl Fn(usize) -> Option<Chunk>,
        prepare: impl Fn(&mut CollectiveState, &Chunk) -> Result<()>,
        conclude: impl Fn(&mut CollectiveState, &Chunk) -> Result<()>,
    ) -> Result<()> {
        let shares = self.shares(state, len, flow.size);
        let (mut next, mut before) = (chunk(0), None::<Chunk>);
        if let Some(first) = &next {
            prepare(state, first)?;
            // SAFETY: the caller's contract.
            unsafe { self.begin_chunk(state, flow, &shares, first) };
        }
        while let Some(current) = next.take() {
            next = chunk(current.number + 1);
            if let Some(next) = &next {
                prepare(state, next)?;
            }
            self.finish_step(state, current.contributions())?;
            if let Some(next) = &next {
                // SAFETY: as above; the contributions to the chunk before that lay in the same place are combined.
                unsafe { self.begin_chunk(state, flow, &shares, next) };
            }
            if let Some(before) = &before {
                self.finish_step(state, before.results())?;
            }
            // SAFETY: as above; the contributions have come.
            unsafe { self.combine_chunk(state, (call, flow), &shares, &current) };
            if let Some(before) = before.replace(current) {
                conclude(state, &before)?;
            }
        }
        let Some(last) = before else { return Ok(()) };
        self.finish_step(state, last.results())?;
        conclude(state, &last)
    }

    /// Carries out a long all_reduce or reduce.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective).
    pub(super) unsafe fn two_phase(
        &self,
        state: &mut CollectiveState,
        call: &Call<'_>,
        flow: &Flow<'_>,
    ) -> Result<()> {
        let (size, count) = (flow.size, call.blocks.longest());
        let most = piece(size) * self.ranks();
        let chunk = |number: usize| {
            let at = number * most;
            let (send, recv) = (call.send.wrapping_add(at * size), call.recv.wrapping_add(at * size));
            (at < count).then(|| Chunk { number, send, recv, len: most.min(count - at) })
        };
        let nothing = |_: &mut CollectiveState, _: &Chunk| Ok(());
        // SAFETY: the caller's contract; the chunks lie in `send` and `recv`.
        unsafe { self.in_chunks(state, (call, flow), most.min(count), chunk, nothing, nothing) }
    }
}
