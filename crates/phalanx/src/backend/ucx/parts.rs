//! Parts of windows in this process, and the messages by which ranks of other hosts access them. Nothing here calls UCX.
//!
//! An access is carried out by the process that has the part, with the processor's loads, stores and atomic operations: those by which
//! the ranks of this host access the part. A rank's accesses to a part happen in the order in which it made them.
//!
//! UCX's own one-sided operations are not used. Over TCP it would write to any address for whoever finds its port. It adds no floats. And
//! atomic operations of a network adapter are not atomic beside the processor's.

use super::inbox::Inbox;
use crate::contract::AtomicOp;
use crate::control::segment::SegmentId;
use crate::reduce::access;
use crate::types::dtype::DType;
use crate::types::op::ReductionCode;
use std::collections::HashMap;
use std::ffi::c_void;

/// A window: the channel of its communicator, and its number there.
pub(super) type WindowId = (SegmentId, u64);

/// What a rank asks of another one's part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum AccessKind {
    Put = 0,
    Get = 1,
    Accumulate = 2,
    FetchAndOp = 3,
    CompareAndSwap = 4,
    /// Counts one up.
    Signal = 5,
    /// Answers when all accesses before are complete.
    Flush = 6,
}

impl AccessKind {
    const ALL: [AccessKind; 7] = [
        AccessKind::Put,
        AccessKind::Get,
        AccessKind::Accumulate,
        AccessKind::FetchAndOp,
        AccessKind::CompareAndSwap,
        AccessKind::Signal,
        AccessKind::Flush,
    ];
}

/// What travels in front of an access's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub(super) struct Access {
    /// Secret of the world: a message without it is a stranger's.
    pub key: [u64; 2],
    pub channel: SegmentId,
    pub window: u64,
    /// Number of this access among those of its source to this part, from 1.
    pub order: u64,
    /// Tag of the answer.
    pub tag: u64,
    /// Rank in the channel.
    pub source: u32,
    pub kind: u8,
    pub op: u8,
    pub unused: u16,
    /// The first element, their number, and elements from one to the next.
    pub at: u64,
    pub count: u64,
    pub stride: u64,
    /// Bits of an operand, and of what is compared.
    pub value: u64,
    pub expected: u64,
}

/// Codes of operations that are no reductions.
const REPLACE: u8 = 254;
const LOAD: u8 = 255;

/// An operation as one byte.
pub(super) fn encode(op: AtomicOp) -> u8 {
    match op {
        AtomicOp::Combine(code) => code as u8,
        AtomicOp::Replace => REPLACE,
        AtomicOp::Load => LOAD,
    }
}

fn decode(op: u8) -> Option<AtomicOp> {
    use ReductionCode::*;
    match op {
        REPLACE => Some(AtomicOp::Replace),
        LOAD => Some(AtomicOp::Load),
        code => match ReductionCode::from_code(code)? {
            code @ (Sum | Prod | Min | Max | BitAnd | BitOr | BitXor) => Some(AtomicOp::Combine(code)),
            _ => None,
        },
    }
}

/// An answer to an access.
pub(super) struct Reply {
    pub window: WindowId,
    /// This rank in the channel.
    pub from: usize,
    /// World rank.
    pub peer: usize,
    pub tag: u64,
    /// What an element was.
    pub word: u64,
    pub data: ReplyData,
}

/// The data of an answer.
pub(super) enum ReplyData {
    Nothing,
    /// Bytes of the part.
    OfPart(*const u8, usize),
    Gathered(Vec<u8>),
}

/// Data of a put that its sender still has: it is to be fetched to its place.
pub(super) struct Fetch {
    pub window: WindowId,
    /// Rank in the channel, and in the world.
    pub source: usize,
    pub peer: usize,
    pub descriptor: *mut c_void,
    pub target: *mut u8,
    pub len: usize,
}

enum Body {
    Bytes(Vec<u8>),
    /// UCX's descriptor of data that its sender still has, and how long that is.
    Rendezvous(*mut c_void, usize),
}

/// What one rank does with the part.
#[derive(Default)]
struct Source {
    /// Accesses that are complete: all up to this number.
    done: u64,
    is_fetching: bool,
    signals: u64,
    /// Accesses that have come before others that were made first.
    early: Vec<(Access, Body)>,
}

/// A window's part in this process.
pub(super) struct Part {
    start: *mut u8,
    dtype: DType,
    /// Elements.
    len: usize,
    /// This rank, and the world ranks of all.
    rank: usize,
    members: Vec<usize>,
    sources: Vec<Source>,
}

// SAFETY: an address; the memory behind it is accessed as several threads may.
unsafe impl Send for Part {}

impl Part {
    /// `len` elements from `start` on, which is aligned to 64 bytes, of a rank in a channel with these members.
    ///
    /// # Safety
    /// The memory is there until the part was closed and [`Worker::users`](super::worker::Worker::users) answers nobody.
    pub unsafe fn new(start: *mut u8, dtype: DType, len: usize, rank: usize, members: Vec<usize>) -> Part {
        let sources = members.iter().map(|_| Source::default()).collect();
        Part { start, dtype, len, rank, members, sources }
    }

    /// Where an access with so many bytes of data begins. `None` if it does not fit: nobody writes outside of a part.
    fn place(&self, kind: AccessKind, access: &Access, bytes: usize) -> Option<*mut u8> {
        use AccessKind::*;
        let (at, count) = (usize::try_from(access.at).ok()?, usize::try_from(access.count).ok()?);
        let span = match count {
            0 => 0,
            count => (count - 1).checked_mul(usize::try_from(access.stride).ok()?)?.checked_add(1)?,
        };
        let size = self.dtype.size();
        let has_data = matches!(kind, Put | Accumulate);
        let is_atomic = matches!(kind, Accumulate | FetchAndOp | CompareAndSwap);
        let fits = at <= self.len && span <= self.len - at;
        let is_right = bytes == if has_data { count.checked_mul(size)? } else { 0 };
        let can = !is_atomic || size >= 4 && self.dtype.is_number();
        let is_one = !matches!(kind, FetchAndOp | CompareAndSwap) || count == 1;
        (fits && is_right && can && is_one).then(|| self.start.wrapping_add(at * size))
    }

    /// Carries out an access of a source; its answer, if it gets one. `None` if it is none to this part.
    ///
    /// # Safety
    /// So many bytes can be read at `data`.
    unsafe fn perform(
        &mut self,
        access: &Access,
        data: *const u8,
        bytes: usize,
    ) -> Option<Option<(u64, ReplyData)>> {
        let kind = *AccessKind::ALL.get(usize::from(access.kind))?;
        let place = self.place(kind, access, bytes)?;
        let size = self.dtype.size();
        let (count, stride) = (access.count as usize, access.stride as usize);
        // SAFETY: the elements are in the part, just looked at, and at `data`, says the caller.
        let answer = unsafe {
            match kind {
                AccessKind::Put => {
                    access::with_strides(count, (place, stride), (data, 1), size, access::write);
                    None
                }
                AccessKind::Get if stride == 1 || count <= 1 => {
                    Some((0, ReplyData::OfPart(place, count * size)))
                }
                AccessKind::Get => {
                    let mut gathered = vec![0u8; count * size];
                    let target = (gathered.as_mut_ptr(), 1);
                    access::with_strides(count, target, (place, stride), size, access::read);
                    Some((0, ReplyData::Gathered(gathered)))
                }
                AccessKind::Accumulate => {
                    access::accumulate_of(self.dtype, place, data, count, decode(access.op)?);
                    None
                }
                AccessKind::FetchAndOp => {
                    let op = decode(access.op)?;
                    let old = access::fetch_and_op_of(self.dtype, place, access.value, op);
                    Some((old, ReplyData::Nothing))
                }
                AccessKind::CompareAndSwap => {
                    let (expected, value) = (access.expected, access.value);
                    let old = access::compare_and_swap_of(self.dtype, place, expected, value);
                    Some((old, ReplyData::Nothing))
                }
                AccessKind::Signal => {
                    self.sources[access.source as usize].signals += 1;
                    None
                }
                AccessKind::Flush => Some((0, ReplyData::Nothing)),
            }
        };
        Some(answer)
    }
}

/// The parts of all windows of this process.
pub(super) struct Parts {
    pub key: [u64; 2],
    open: HashMap<WindowId, Part>,
    /// What the worker is to fetch, to answer, and to release.
    pub fetches: Vec<Fetch>,
    pub replies: Vec<Reply>,
    pub unwanted: Vec<*mut c_void>,
    /// Accesses so far.
    pub performed: u64,
    pub strangers: u64,
}

impl Parts {
    pub fn new(key: [u64; 2]) -> Parts {
        Parts {
            key,
            open: HashMap::new(),
            fetches: Vec::new(),
            replies: Vec::new(),
            unwanted: Vec::new(),
            performed: 0,
            strangers: 0,
        }
    }

    pub fn open(&mut self, id: WindowId, part: Part) {
        self.open.insert(id, part);
    }

    /// Drops what still comes for a window. What the worker has begun goes on.
    pub fn close(&mut self, id: WindowId) {
        let part = self.open.remove(&id);
        for (_, body) in part.into_iter().flat_map(|part| part.sources).flat_map(|source| source.early) {
            if let Body::Rendezvous(descriptor, _) = body {
                self.unwanted.push(descriptor);
            }
        }
        let (closed, left) = std::mem::take(&mut self.fetches).into_iter().partition(|it| it.window == id);
        self.fetches = left;
        self.unwanted.extend(Vec::into_iter(closed).map(|fetch: Fetch| fetch.descriptor));
        self.replies.retain(|reply| reply.window != id);
    }

    /// Closes the windows of a communicator.
    pub fn close_channel(&mut self, channel: SegmentId) {
        let of_channel: Vec<_> = self.open.keys().filter(|(of, _)| *of == channel).copied().collect();
        of_channel.into_iter().for_each(|id| self.close(id));
    }

    /// Whether the worker has something to do.
    pub fn is_busy(&self) -> bool {
        !self.fetches.is_empty() || !self.replies.is_empty() || !self.unwanted.is_empty()
    }

    /// Signals of a rank that have come; none once the window is closed.
    pub fn signals(&self, id: WindowId, source: usize) -> u64 {
        self.open.get(&id).map_or(0, |part| part.sources[source].signals)
    }

    /// A signal of this rank to itself.
    pub fn signal_itself(&mut self, id: WindowId) {
        if let Some(part) = self.open.get_mut(&id) {
            part.sources[part.rank].signals += 1;
        }
    }

    fn source(&mut self, access: &Access) -> Option<(WindowId, &mut Part)> {
        if access.key != self.key {
            self.strangers += 1;
            return None;
        }
        let id = (access.channel, access.window);
        let part = self.open.get_mut(&id)?;
        ((access.source as usize) < part.sources.len()).then_some((id, part))
    }

    /// The data of a source's put is in its place.
    pub fn fetched(&mut self, id: WindowId, source: usize) {
        let Some(part) = self.open.get_mut(&id) else { return };
        let of = &mut part.sources[source];
        of.is_fetching = false;
        of.done += 1;
        self.performed += 1;
        self.advance(id, source);
    }

    /// Carries out what is in order by now.
    fn advance(&mut self, id: WindowId, source: usize) {
        while let Some(part) = self.open.get_mut(&id) {
            let of = &mut part.sources[source];
            let next = of.early.iter().position(|(access, _)| access.order == of.done + 1);
            let Some(next) = next.filter(|_| !of.is_fetching) else { return };
            let (access, body) = of.early.swap_remove(next);
            match body {
                // SAFETY: the vector has so many bytes.
                Body::Bytes(bytes) => unsafe { self.perform(id, &access, bytes.as_ptr(), bytes.len()) },
                Body::Rendezvous(descriptor, len) => {
                    of.is_fetching = true;
                    let peer = part.members[source];
                    let target = part.place(AccessKind::Put, &access, len).expect("looked at when it came");
                    self.fetches.push(Fetch { window: id, source, peer, descriptor, target, len });
                }
            }
        }
    }

    /// # Safety
    /// So many bytes can be read at `data`.
    unsafe fn perform(&mut self, id: WindowId, access: &Access, data: *const u8, bytes: usize) {
        let part = self.open.get_mut(&id).expect("looked at by the caller");
        let source = access.source as usize;
        // SAFETY: the caller's contract.
        let Some(answer) = (unsafe { part.perform(access, data, bytes) }) else { return };
        part.sources[source].done += 1;
        self.performed += 1;
        if let Some((word, data)) = answer {
            let (from, peer) = (part.rank, part.members[source]);
            self.replies.push(Reply { window: id, from, peer, tag: access.tag, word, data });
        }
    }
}

impl Inbox for Parts {
    type Header = Access;

    fn count_stranger(&mut self) {
        self.strangers += 1;
    }

    /// An access that is in order is carried out at once.
    unsafe fn take_eager(&mut self, access: Access, data: *const u8, bytes: usize) {
        let Some((id, part)) = self.source(&access) else { return };
        let source = &mut part.sources[access.source as usize];
        if source.is_fetching || access.order != source.done + 1 {
            // SAFETY: the caller's contract; no bytes may be anywhere.
            let data = if bytes == 0 { &[] } else { unsafe { std::slice::from_raw_parts(data, bytes) } };
            return source.early.push((access, Body::Bytes(data.to_vec())));
        }
        // SAFETY: the caller's contract.
        unsafe { self.perform(id, &access, data, bytes) };
        self.advance(id, access.source as usize);
    }

    fn take_rendezvous(&mut self, access: Access, descriptor: *mut c_void, bytes: usize) -> bool {
        let Some((id, part)) = self.source(&access) else { return false };
        let is_in_one_place = access.stride == 1 || access.count <= 1;
        if access.kind != AccessKind::Put as u8
            || !is_in_one_place
            || part.place(AccessKind::Put, &access, bytes).is_none()
        {
            return false;
        }
        part.sources[access.source as usize].early.push((access, Body::Rendezvous(descriptor, bytes)));
        self.advance(id, access.source as usize);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: [u64; 2] = [1, 2];
    const ID: WindowId = (7, 3);

    /// A part of ten `u64`, among two ranks.
    #[repr(C, align(64))]
    struct Memory([u64; 10]);

    fn window() -> (Box<Memory>, Parts) {
        let mut memory = Box::new(Memory([0; 10]));
        let mut parts = Parts::new(KEY);
        // SAFETY: the tests keep the memory as long as the parts.
        let part = unsafe { Part::new(memory.0.as_mut_ptr().cast(), DType::U64, 10, 0, vec![4, 5]) };
        parts.open(ID, part);
        (memory, parts)
    }

    fn access(kind: AccessKind, order: u64, at: u64, count: u64) -> Access {
        Access {
            key: KEY,
            channel: ID.0,
            window: ID.1,
            order,
            tag: 100 + order,
            source: 1,
            kind: kind as u8,
            at,
            count,
            stride: 1,
            ..Access::default()
        }
    }

    fn take(parts: &mut Parts, access: Access, data: &[u64]) {
        // SAFETY: so many bytes.
        unsafe { parts.take_eager(access, data.as_ptr().cast(), size_of_val(data)) };
    }

    /// The elements, as other ranks leave them.
    fn elements(memory: &Memory) -> [u64; 10] {
        // SAFETY: an array of this test's own, which was written through an address.
        unsafe { (&raw const memory.0).read_volatile() }
    }

    #[test]
    fn accesses_of_a_rank_are_carried_out_in_its_order() {
        let (memory, mut parts) = window();
        take(&mut parts, access(AccessKind::Signal, 4, 0, 0), &[]);
        take(
            &mut parts,
            Access { op: encode(AtomicOp::Load), ..access(AccessKind::FetchAndOp, 3, 2, 1) },
            &[],
        );
        take(&mut parts, access(AccessKind::Put, 2, 2, 1), &[9]);
        assert_eq!((elements(&memory)[2], parts.signals(ID, 1), parts.replies.len()), (0, 0, 0));
        take(&mut parts, access(AccessKind::Put, 1, 2, 2), &[5, 6]);
        assert_eq!((elements(&memory)[2..4].to_vec(), parts.signals(ID, 1)), (vec![9, 6], 1));
        let reply = parts.replies.pop().unwrap();
        assert_eq!((reply.word, reply.tag, reply.peer, reply.from), (9, 103, 5, 0));
    }

    #[test]
    fn accesses_behind_a_put_that_is_fetched_wait_for_it() {
        let (_memory, mut parts) = window();
        let descriptor = 64 as *mut c_void;
        assert!(parts.take_rendezvous(access(AccessKind::Put, 1, 0, 10), descriptor, 80));
        take(&mut parts, access(AccessKind::Flush, 2, 0, 0), &[]);
        assert_eq!((parts.fetches.len(), parts.replies.len()), (1, 0));
        parts.fetched(ID, 1);
        assert_eq!((parts.fetches.pop().unwrap().len, parts.replies.pop().unwrap().tag), (80, 102));
        // Those of a window that is closed are given back.
        assert!(parts.take_rendezvous(access(AccessKind::Put, 3, 0, 10), descriptor, 80));
        assert!(parts.take_rendezvous(access(AccessKind::Put, 4, 0, 10), descriptor, 80));
        parts.close(ID);
        assert_eq!((parts.fetches.len(), parts.unwanted.len()), (0, 2));
        assert!(!parts.take_rendezvous(access(AccessKind::Put, 5, 0, 10), descriptor, 80));
    }

    #[test]
    fn strides_and_operations_in_one_step() {
        let (memory, mut parts) = window();
        take(&mut parts, Access { stride: 3, ..access(AccessKind::Put, 1, 0, 4) }, &[1, 2, 3, 4]);
        assert_eq!(elements(&memory), [1, 0, 0, 2, 0, 0, 3, 0, 0, 4]);
        take(&mut parts, Access { stride: 3, ..access(AccessKind::Get, 2, 3, 3) }, &[]);
        let Some(Reply { data: ReplyData::Gathered(bytes), .. }) = parts.replies.pop() else { panic!() };
        let words: Vec<u64> = bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect();
        assert_eq!(words, [2, 3, 4]);
        let sum = encode(AtomicOp::Combine(ReductionCode::Sum));
        take(&mut parts, Access { op: sum, ..access(AccessKind::Accumulate, 3, 0, 2) }, &[10, 20]);
        let swap = access(AccessKind::CompareAndSwap, 4, 0, 1);
        take(&mut parts, Access { expected: 11, value: 12, ..swap }, &[]);
        take(&mut parts, Access { order: 5, expected: 11, value: 13, ..swap }, &[]);
        assert_eq!(parts.replies.drain(..).map(|reply| reply.word).collect::<Vec<_>>(), [11, 12]);
        assert_eq!(elements(&memory)[..2], [12, 20]);
    }

    /// Whatever a message says, it moves nothing that is not in the part, and is not answered.
    #[test]
    fn what_is_not_in_the_part_is_dropped() {
        let wrong = [
            access(AccessKind::Put, 1, 9, 2),
            access(AccessKind::Put, 1, 0, 3),
            Access { stride: u64::MAX, ..access(AccessKind::Put, 1, 1, 2) },
            Access { stride: 9, ..access(AccessKind::Put, 1, 1, 2) },
            access(AccessKind::Put, 1, u64::MAX, 2),
            Access { key: [1, 3], ..access(AccessKind::Put, 1, 0, 2) },
            Access { window: 4, ..access(AccessKind::Put, 1, 0, 2) },
            Access { source: 2, ..access(AccessKind::Put, 1, 0, 2) },
            Access { kind: 7, ..access(AccessKind::Put, 1, 0, 2) },
            Access {
                op: encode(AtomicOp::Combine(ReductionCode::Avg)),
                ..access(AccessKind::Accumulate, 1, 0, 2)
            },
        ];
        for access in wrong {
            let (memory, mut parts) = window();
            take(&mut parts, access, &[1, 2]);
            assert_eq!((elements(&memory), parts.replies.len()), ([0; 10], 0), "{access:?}");
            assert_eq!(parts.strangers, u64::from(access.key != KEY));
        }
        let (_memory, mut parts) = window();
        take(&mut parts, access(AccessKind::Get, 1, 5, 6), &[]);
        assert!(parts.replies.is_empty());
    }
}
