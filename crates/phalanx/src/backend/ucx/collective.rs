//! Collectives: one pattern for each ([`Flow`]), and the algorithms that carry it out. [`choose`](super::choose::choose) picks one.
//!
//! An algorithm is a list of *steps*: messages that are posted together and waited for together. All messages of a step have its number as
//! tag, and that of the collective. Reductions combine the contributions in rank order.

mod broadcast;
mod by_host;
mod by_place;
mod direct;
mod exchange_by_host;
mod near_and_far;
mod rounds;
mod tree;
mod two_phase;

use super::UcxComm;
use super::choose::{Algorithm, Shape, choose};
use super::mail::{Header, Kind, Matching};
use super::wait::Awaited;
use super::worker::Outcome;
use crate::contract::{Call, Flow, Operation, Who};
use crate::control::endpoint::PendingOperation;
use crate::control::failure::ChannelFailure;
use crate::control::record::CallRecord;
use crate::reduce;
use crate::types::dtype::DType;
use crate::types::error::{Error, Result};

/// What a rank remembers from one collective to the next.
pub(super) struct CollectiveState {
    /// Number of the last operation, from 1.
    sequence: u64,
    /// Fingerprint of all operations so far.
    history: u64,
    record: CallRecord,
    /// This rank's factor in a pre-multiplied sum.
    factor: u64,
    /// The factors of all ranks.
    factors: Vec<u64>,
    /// Contributions of other ranks.
    scratch: Vec<u128>,
    /// What the ranks of this host have combined.
    of_host: Vec<u128>,
    /// One rank of each host.
    leaders: Vec<usize>,
    /// Lengths of parts of a call.
    counts: Vec<usize>,
    /// Steps that may be under way, at most two.
    steps: [Step; 2],
}

/// Messages that are waited for together.
#[derive(Default)]
struct Step {
    number: u64,
    awaited: Vec<Awaited>,
}

impl CollectiveState {
    pub fn new(ranks: usize) -> CollectiveState {
        CollectiveState {
            sequence: 0,
            history: 0,
            record: CallRecord::of(&Call::empty(Operation::Barrier)),
            factor: 0,
            factors: vec![0; ranks],
            scratch: Vec::new(),
            of_host: Vec::new(),
            leaders: Vec::new(),
            counts: Vec::new(),
            steps: Default::default(),
        }
    }

    /// See [`HostChannel::set_history`](crate::control::host_channel::HostChannel::set_history).
    pub fn set_history(&mut self, history: u64) {
        self.history = history;
    }

    fn pending(&self) -> PendingOperation {
        (self.sequence, self.record)
    }

    /// Memory of at least so many bytes, which stays where it is until more is asked for.
    fn scratch(&mut self, bytes: usize) -> *mut u8 {
        room(&mut self.scratch, bytes)
    }

    /// Does something with counts, which lie where those of the last call did.
    fn with_counts<R>(
        &mut self,
        counts: impl Iterator<Item = usize>,
        act: impl FnOnce(&mut CollectiveState, &[usize]) -> R,
    ) -> R {
        let mut kept = std::mem::take(&mut self.counts);
        kept.clear();
        kept.extend(counts);
        let done = act(self, &kept);
        self.counts = kept;
        done
    }

    /// Begins a step. The one before the last is over.
    fn begin_step(&mut self, number: u64) {
        self.steps[number as usize % 2].number = number;
    }
}

fn room(memory: &mut Vec<u128>, bytes: usize) -> *mut u8 {
    let words = bytes.div_ceil(size_of::<u128>());
    if memory.len() < words {
        *memory = vec![0; words];
    }
    memory.as_mut_ptr().cast()
}

/// Gives up the messages of a collective that an error or a panic has left: they use buffers of the caller's.
struct Unfinished<'a> {
    comm: &'a UcxComm,
    state: &'a mut CollectiveState,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if self.state.steps.iter().all(|step| step.awaited.is_empty()) {
            return;
        }
        if std::thread::panicking() {
            self.comm.endpoint.fail_panicked();
        }
        for step in &mut self.state.steps {
            self.comm.give_up(&mut step.awaited);
        }
    }
}

impl UcxComm {
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective).
    pub(super) unsafe fn carry_out(&self, state: &mut CollectiveState, call: &Call<'_>) -> Result<()> {
        let record = CallRecord::of(call);
        state.sequence += 1;
        state.history = record.chain(state.history);
        (state.record, state.factor) = (record, call.reduction.factor);
        state.factors[self.endpoint.rank] = state.factor;
        self.endpoint.own().announce(state.sequence, &record);
        let flow = call.flow();
        let unfinished = Unfinished { comm: self, state };
        let state = &mut *unfinished.state;
        // SAFETY: the caller's contract.
        let done = unsafe {
            match (choose(call, &flow, &self.shape), &self.hosts) {
                (Algorithm::OnHost, Some(hosts)) => self.on_host(state, hosts, call),
                (Algorithm::ByHost, Some(hosts)) => self.by_host(state, hosts, call, &flow),
                (Algorithm::ByPlace, Some(hosts)) => self.by_place(state, hosts, call, &flow),
                (Algorithm::NearAndFar, Some(hosts)) => self.near_and_far(state, hosts, call, &flow),
                (algorithm, _) => self.everybody().perform(state, call, &flow, algorithm),
            }
        };
        done?;
        self.endpoint.own().done_operation.set(state.sequence);
        Ok(())
    }

    /// All ranks.
    fn everybody(&self) -> Group<'_> {
        Group { comm: self, members: &self.everybody, rank: self.endpoint.rank }
    }

    /// The error for a message that is not what this rank expects.
    #[cold]
    fn differ(&self, state: &CollectiveState, peer: usize, header: &Header) -> Error {
        if header.history != state.history {
            return self.fail_mismatch(peer, state.sequence);
        }
        // The same call: only blocks of an all_to_all_v have lengths that both ends know alone.
        let size = state.record.dtype.size();
        let block = |root: usize, count, message: Operation| CallRecord {
            root: root as u32,
            count,
            counts: message as u64,
            ..state.record
        };
        let own = self.endpoint.rank;
        let ours = (own, block(peer, 0, Operation::Recv));
        let theirs = (peer, block(own, (header.bytes() / size) as u64, Operation::Send));
        let (lower, higher) = if own < peer { (ours, theirs) } else { (theirs, ours) };
        self.endpoint.fail(&ChannelFailure::Mismatch { sequence: state.sequence, lower, higher })
    }
}

/// Ranks that carry out a collective over UCX: all, or one of each host. An algorithm knows them by their places here.
struct Group<'a> {
    comm: &'a UcxComm,
    members: &'a [usize],
    /// This rank's place.
    rank: usize,
}

impl Group<'_> {
    fn ranks(&self) -> usize {
        self.members.len()
    }

    /// The other places, from the next one on.
    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        (self.rank + 1..self.ranks()).chain(0..self.rank)
    }

    /// Carries out a call of these ranks alone.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective).
    unsafe fn carry_out(&self, state: &mut CollectiveState, call: &Call<'_>) -> Result<()> {
        let flow = call.flow();
        let algorithm = choose(call, &flow, &Shape::flat(self.ranks()));
        // SAFETY: the caller's contract.
        unsafe { self.perform(state, call, &flow, algorithm) }
    }

    /// # Safety
    /// As for `carry_out`.
    unsafe fn perform(
        &self,
        state: &mut CollectiveState,
        call: &Call<'_>,
        flow: &Flow<'_>,
        algorithm: Algorithm,
    ) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe {
            match algorithm {
                Algorithm::Direct if flow.reduced => self.reduce_direct(state, call, flow),
                Algorithm::Direct => self.pass_direct(state, call, flow),
                Algorithm::TwoPhase => self.two_phase(state, call, flow),
                Algorithm::BroadcastInParts => self.broadcast_in_parts(state, call, flow),
                Algorithm::Tree if call.operation == Operation::Broadcast => {
                    self.broadcast_along_tree(state, call, flow)
                }
                Algorithm::Tree if flow.scattered => self.scatter_along_tree(state, call, flow),
                Algorithm::Tree => self.gather_along_tree(state, call, flow),
                Algorithm::Dissemination => self.disseminate(state, call, flow),
                Algorithm::OnHost | Algorithm::ByHost | Algorithm::ByPlace | Algorithm::NearAndFar => {
                    unreachable!("chosen for all ranks, where some share a host")
                }
            }
        }
    }

    /// Sends bytes to a rank, as a part of a step.
    ///
    /// # Safety
    /// So many bytes can be read until the step is over.
    unsafe fn send_part(
        &self,
        state: &mut CollectiveState,
        number: u64,
        peer: usize,
        (data, len): (*const u8, usize),
    ) {
        let matching = Matching { kind: Kind::Collective, number: state.sequence, tag: number };
        let header = Header {
            history: state.history,
            factor: state.factor,
            ..self.comm.header(matching, DType::U8, len)
        };
        let peer = self.members[peer];
        // SAFETY: the caller's contract.
        let operation = unsafe { self.comm.send(peer, header, data) };
        state.steps[number as usize % 2].awaited.push(Awaited { operation, peer });
    }

    /// Receives bytes from a rank, as a part of a step.
    ///
    /// # Safety
    /// So many bytes can be written, and nothing else touches them, until the step is over.
    unsafe fn receive_part(
        &self,
        state: &mut CollectiveState,
        number: u64,
        peer: usize,
        (target, len): (*mut u8, usize),
    ) {
        let matching = Matching { kind: Kind::Collective, number: state.sequence, tag: number };
        let peer = self.members[peer];
        // SAFETY: the caller's contract.
        let operation = unsafe { self.comm.receive(peer, matching, target, len) };
        state.steps[number as usize % 2].awaited.push(Awaited { operation, peer });
    }

    /// Waits until a step is over, and compares the histories of those from which something came.
    fn finish_step(&self, state: &mut CollectiveState, number: u64) -> Result<()> {
        let pending = state.pending();
        let step = &mut state.steps[number as usize % 2];
        debug_assert_eq!(step.number, number);
        self.comm.await_all(&step.awaited, &|| pending, &|| ())?;
        let mut differs = None;
        for Awaited { operation, peer } in step.awaited.drain(..) {
            let (outcome, header) = self.comm.take(operation);
            if header.source as usize != peer {
                // Sent by this rank.
                continue;
            }
            state.factors[peer] = header.factor;
            if outcome == Outcome::WrongLength || header.history != state.history {
                differs = differs.or(Some((peer, header)));
            }
        }
        differs.map_or(Ok(()), |(peer, header)| Err(self.comm.differ(state, peer, &header)))
    }

    /// Copies a rank's own block to its place, unless it is there.
    ///
    /// # Safety
    /// The call's memory is valid as its table says, and nothing else uses it.
    unsafe fn copy_own(&self, call: &Call<'_>, flow: &Flow<'_>, send: *const u8) {
        let rank = self.rank;
        let takes_part = |who: Who| who.includes(rank);
        if !takes_part(flow.writers)
            || !takes_part(flow.readers)
            || flow.is_in_place(call.send, call.recv, rank)
        {
            return;
        }
        let (source, target) = (flow.source(rank, rank), flow.target(rank, rank));
        // SAFETY: both lie in the buffers, which are apart, and have the same length (checked).
        unsafe { reduce::copy(call.recv.add(target.start), send.add(source.start), source.len(), false) };
    }
}
