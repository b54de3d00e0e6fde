//! What a stream does for the operations of a group: all of them start before the first one is waited for.

use super::communicator::reductions::Factor;
use super::operation::{Kind, Operation};
use super::transport::mailbox::Stopped;
use super::transport::message::{Tag, numbers, words};
use crate::arithmetic::{Contribution, combine};
use crate::base::settings::settings;
use crate::base::violation::violation;
use crate::cuda::memory::{GARBAGE, Range};
use crate::cuda::work::{Job, Work};
use std::sync::Arc;

/// Operations that run together.
pub struct Fused {
    operations: Vec<Operation>,
    /// Whether they are in a graph. Until it is destroyed, their communicators do not end.
    captured: bool,
}

impl Fused {
    pub fn new(operations: Vec<Operation>, captured: bool) -> Fused {
        if captured {
            operations.iter().for_each(|operation| operation.communicator.count_graph(true));
        }
        Fused { operations, captured }
    }
}

impl Drop for Fused {
    fn drop(&mut self) {
        if self.captured {
            self.operations.iter().for_each(|operation| operation.communicator.count_graph(false));
        }
    }
}

impl Work for Fused {
    fn bind(self: Arc<Self>) -> Job {
        let bound: Vec<Bound> = self.operations.iter().map(Bound::new).collect();
        Box::new(move || perform(bound))
    }

    fn keeps_order(&self) -> bool {
        true
    }
}

/// An operation with its number, by which it is matched with the operations of peers.
struct Bound {
    operation: Operation,
    number: u64,
    /// The asynchronous error that it raises (`EMULATED_ASYNC_ERROR`).
    error: Option<i32>,
}

/// An operation that has started.
struct Started {
    bound: Bound,
    sent: Vec<u8>,
    bias: Vec<u8>,
    /// This rank's contribution to its own result.
    own: Vec<u8>,
    factor: [u8; 8],
}

fn perform(bound: Vec<Bound>) {
    let mut communicators: Vec<Vec<Bound>> = Vec::new();
    for one in bound {
        let handle = one.operation.communicator.handle;
        match communicators.iter_mut().find(|others| others[0].operation.communicator.handle == handle) {
            Some(others) => others.push(one),
            None => communicators.push(vec![one]),
        }
    }
    // In a thread for each communicator: a stuck one does not hold up the operations of an aborted one.
    std::thread::scope(|scope| {
        let last = communicators.pop();
        for others in communicators {
            scope.spawn(|| perform_on_one(others));
        }
        last.into_iter().for_each(perform_on_one);
    });
}

fn perform_on_one(bound: Vec<Bound>) {
    let Some(communicator) = bound.first().map(|bound| Arc::clone(&bound.operation.communicator)) else {
        return;
    };
    communicator.perform(bound.len(), || {
        let mut started: Vec<Started> = bound.into_iter().map(Bound::start).collect();
        communicator.random.delay();
        // A send ends when the peer has received it. In a ring, the peer first waits for this rank's receive.
        started.sort_by_key(|started| matches!(started.bound.operation.kind, Kind::Send { .. }));
        // If the communicator is stopped, the buffers stay as they are.
        let _ = started.into_iter().try_for_each(Started::finish);
    });
}

impl Bound {
    fn new(operation: &Operation) -> Bound {
        operation.communicator.count_operation();
        let mut state = operation.communicator.state();
        state.operations += 1;
        let nth = state.operations;
        let counter = match &operation.kind {
            Kind::Send { peer } => state.sends.entry(*peer).or_default(),
            Kind::Recv { peer } => state.receives.entry(*peer).or_default(),
            _ => &mut state.collectives,
        };
        // One-sided operations are not matched.
        *counter += u64::from(operation.kind.code() < 10);
        let number = *counter;
        let rank = operation.communicator.rank as i32;
        let error = settings().async_error.as_ref();
        let error = error.filter(|error| error.nth == nth && error.rank.is_none_or(|only| only == rank));
        Bound { operation: operation.clone(), number, error: error.map(|error| error.code) }
    }

    fn start(self) -> Started {
        let operation = &self.operation;
        let sent = operation.send.map_or(Vec::new(), |range| range.read());
        let bias = operation.bias.map_or(Vec::new(), |range| range.read());
        let factor = operation.reduction.map_or([0; 8], |reduction| reduction.factor.read());
        let own = operation.part_for(&sent, operation.communicator.rank);
        // Garbage exposes programs that read the output before the operation has ended.
        if let Some(range) = operation.receive.filter(|_| !operation.is_in_place()) {
            range.write(&vec![GARBAGE; range.len]);
        }
        if self.error.is_none() {
            self.send(&sent, factor);
        }
        Started { sent, bias, own, factor, bound: self }
    }

    fn send(&self, sent: &[u8], factor: [u8; 8]) {
        let Operation { communicator, kind, count, dtype, .. } = &self.operation;
        match kind {
            Kind::Send { peer } => {
                let mut body = numbers(&[*count as u64, dtype.code()]);
                body.extend(sent);
                communicator.send(*peer, Tag::Send(self.number), body);
            }
            Kind::PutSignal { peer, window, offset, signal, context } => {
                let tag = Tag::Put { window: *window, offset: *offset, signal: *signal, context: *context };
                communicator.send(*peer, tag, sent.to_vec());
            }
            Kind::Signal { peer, signal, context } => {
                communicator.send(*peer, Tag::Signal { signal: *signal, context: *context }, Vec::new());
            }
            Kind::Recv { .. } | Kind::WaitSignal(_) => {}
            _ => {
                for rank in communicator.all_ranks().filter(|rank| *rank != communicator.rank) {
                    let mut body = numbers(&self.operation.fingerprint());
                    body.extend(factor);
                    body.extend(self.operation.part_for(sent, rank));
                    communicator.send(rank, Tag::Collective(self.number), body);
                }
            }
        }
    }
}

impl Factor {
    fn read(&self) -> [u8; 8] {
        match self {
            Factor::None => [0; 8],
            Factor::Value(bytes) => *bytes,
            Factor::Device(range) => {
                let mut bytes = [0; 8];
                bytes[..range.len].copy_from_slice(&range.read());
                bytes
            }
        }
    }
}

/// Words of a fingerprint.
const FINGERPRINT: usize = 5;
/// Bytes before a contribution: the fingerprint and the factor.
const HEADER: usize = FINGERPRINT * 8 + 8;

impl Operation {
    /// The arguments that must be the same on all ranks.
    fn fingerprint(&self) -> [u64; FINGERPRINT] {
        let combine = self.reduction.map_or(u64::MAX, |reduction| reduction.combine as u64);
        let root = self.kind.root().map_or(u64::MAX, u64::from);
        [self.kind.code(), root, self.count as u64, self.dtype.code(), combine]
    }

    /// The part of the sent bytes that a rank receives.
    fn part_for(&self, sent: &[u8], rank: u32) -> Vec<u8> {
        let block = || {
            let start = rank as usize * self.block();
            sent.get(start..start + self.block()).unwrap_or_default().to_vec()
        };
        match &self.kind {
            Kind::ReduceScatter | Kind::AllToAll | Kind::Scatter { .. } => block(),
            Kind::Reduce { root } | Kind::Gather { root } if *root != rank => Vec::new(),
            _ => sent.to_vec(),
        }
    }

    /// This rank's result, from the contributions of all ranks.
    fn result(&self, contributions: &[Contribution<'_>]) -> Vec<u8> {
        match (&self.kind, self.reduction) {
            (Kind::Broadcast { root } | Kind::Scatter { root }, _) => {
                contributions[*root as usize].bytes.to_vec()
            }
            (_, Some(reduction)) => combine(self.dtype, reduction.combine, contributions),
            _ => contributions.iter().flat_map(|contribution| contribution.bytes).copied().collect(),
        }
    }
}

impl Started {
    fn finish(self) -> Result<(), Stopped> {
        let Operation { communicator, kind, .. } = &self.bound.operation;
        if let Some(code) = self.bound.error {
            communicator.fail(code);
            return Err(communicator.mailbox.wait_for_ever(|| communicator.is_stopped()));
        }
        match kind {
            Kind::Send { peer } => {
                communicator.take(*peer, Tag::Received(self.bound.number))?;
                self.check_sent();
                Ok(())
            }
            Kind::Recv { peer } => self.receive(*peer),
            Kind::PutSignal { .. } | Kind::Signal { .. } => Ok(()),
            Kind::WaitSignal(awaited) => awaited.iter().try_for_each(|one| {
                let of = (one.peer as u32, one.signal, one.context);
                communicator.mailbox.take_signals(of, one.number as u64, || communicator.is_stopped())
            }),
            _ => self.collect(),
        }
    }

    fn receive(&self, peer: u32) -> Result<(), Stopped> {
        let operation = &self.bound.operation;
        let body = operation.communicator.take(peer, Tag::Send(self.bound.number))?;
        let [count, dtype] = words(&body);
        if (count, dtype) != (operation.count as u64, operation.dtype.code()) {
            let theirs = format!("rank {peer} sends {count} elements of type {dtype}");
            return Err(self.mismatch(&theirs));
        }
        if let Some(range) = operation.receive {
            check_output(&range);
            range.write(&body[16..]);
        }
        operation.communicator.send(peer, Tag::Received(self.bound.number), Vec::new());
        Ok(())
    }

    fn collect(&self) -> Result<(), Stopped> {
        let operation = &self.bound.operation;
        let communicator = &operation.communicator;
        let mut bodies = Vec::new();
        for rank in communicator.all_ranks() {
            if rank == communicator.rank {
                bodies.push(Vec::new());
                continue;
            }
            let body = communicator.take(rank, Tag::Collective(self.bound.number))?;
            let theirs = words::<FINGERPRINT>(&body);
            if theirs != operation.fingerprint() {
                return Err(self.mismatch(&format!("rank {rank} calls {theirs:?}")));
            }
            bodies.push(body);
        }
        let mut contributions: Vec<Contribution<'_>> = bodies
            .iter()
            .map(|body| match body.as_slice() {
                [] => Contribution { bytes: &self.own, factor: self.factor },
                body => Contribution {
                    bytes: &body[HEADER..],
                    factor: body[HEADER - 8..HEADER].try_into().expect("8 bytes"),
                },
            })
            .collect();
        if !self.bias.is_empty() {
            contributions.push(Contribution { bytes: &self.bias, factor: [0; 8] });
        }
        self.check_sent();
        if let Some(range) = operation.receive {
            if !operation.is_in_place() {
                check_output(&range);
            }
            let mut result = operation.result(&contributions);
            if settings().wrong_type == Some(operation.dtype.code()) {
                result.iter_mut().take(1).for_each(|byte| *byte ^= 1);
            }
            range.write(&result);
        }
        Ok(())
    }

    /// Ends the process if the send buffer changed while the operation ran.
    fn check_sent(&self) {
        let Operation { function, send, bias, .. } = &self.bound.operation;
        if bias.is_some_and(|range| range.read() != self.bias) {
            violation(function, "the bias was written to while the operation ran");
        }
        if send.is_some_and(|range| range.read() != self.sent) {
            violation(function, "the send buffer was written to while the operation ran");
        }
    }

    /// Ends the process, or hangs (`EMULATED_MISMATCH`), since the ranks call different operations.
    fn mismatch(&self, theirs: &str) -> Stopped {
        let operation = &self.bound.operation;
        if settings().mismatch_hangs {
            return operation.communicator.mailbox.wait_for_ever(|| operation.communicator.is_stopped());
        }
        let ours = operation.fingerprint();
        let rank = operation.communicator.rank;
        let words = "operation, root, count, type, reduction";
        violation(operation.function, format!("{theirs}, but rank {rank} calls {ours:?} ({words})"))
    }
}

/// Ends the process if the output was written to while the operation ran.
fn check_output(range: &Range) {
    if range.read().iter().any(|byte| *byte != GARBAGE) {
        violation(range.function, "the receive buffer was written to while the operation ran");
    }
}
