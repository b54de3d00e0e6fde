//! Messages between two ranks: posted transfers that are moved along by whoever waits.
//!
//! Each ordered pair of ranks has a mailbox. A message opens a slot of it; up to 104 bytes travel in the
//! opening itself, more in chunks of memory (`chunks.rs`), or not at all if the receiver can read the
//! sender's buffer: then the sender waits until it has.
//!
//! A receiver takes a mailbox's messages in order. One that no posted receive matches (by tag) is put
//! aside on the heap, so that a later receive finds it and the mailbox never blocks.

use super::chunks::Chunks;
use super::tunables::{
    MESSAGE_COPIED, MESSAGE_POLLS, MESSAGE_POLLS_CROWDED, MESSAGE_STEP, MESSAGE_STREAMING,
};
use crate::contract::{Direction, Operation, OperationId, Transfer};
use crate::control::endpoint::{Endpoint, PendingOperation};
use crate::control::failure::ChannelFailure;
use crate::control::flags::{LINE_PAYLOAD, PAIR_PAYLOAD};
use crate::control::layout::{Layout, Mailbox};
use crate::control::prefetch;
use crate::control::record::Record;
use crate::control::tunables::MAIL_SLOTS;
use crate::control::world::{Location, Mapped};
use crate::os::sync::lock;
use crate::types::dtype::DType;
use crate::types::error::{Error, Result, UsageError};
use crate::types::op::ReductionCode;
use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::sync::{Mutex, MutexGuard};

/// Payload of a message's opening that is not taken by its header.
const INLINE: usize = PAIR_PAYLOAD - 16;

/// The part of it that lies in the first of its two lines.
const IN_ONE_LINE: usize = LINE_PAYLOAD - 16;

/// Whose message it is: users' and the library's own (all_to_all_v) never match each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Plane {
    User = 0,
    Internal = 1,
}

/// How a message's bytes travel.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Way {
    Inline = 0,
    /// In one chunk, which was written before the opening.
    Chunk = 1,
    /// In chunks, which come one by one.
    Chunks = 2,
    Direct = 3,
}

impl Way {
    fn from_code(code: u8) -> Way {
        match code {
            0 => Way::Inline,
            1 => Way::Chunk,
            2 => Way::Chunks,
            _ => Way::Direct,
        }
    }
}

/// What a message is, says its opening.
#[derive(Clone, Copy)]
#[repr(C)]
struct Header {
    tag: u32,
    plane: u8,
    dtype: u8,
    way: u8,
    unused: u8,
    bytes: u64,
}

/// A message's opening: written and read where it lies, in a slot of the mailbox.
#[repr(C)]
struct Opening {
    header: Header,
    /// The message itself, or where it is.
    data: [u64; INLINE / 8],
}

const _: () = assert!(size_of::<Opening>() == PAIR_PAYLOAD);

/// A posted transfer.
struct Posted {
    transfer: Transfer,
    plane: Plane,
    /// Of the user's messages to or from that peer, from 1. A block of a collective has the collective's.
    number: u64,
    done: bool,
}

impl Posted {
    fn subject(&self) -> PendingOperation {
        (self.number, record(&self.transfer, self.plane))
    }
}

/// Of a message that nobody expected: written when it has arrived.
type Memory = Vec<MaybeUninit<u8>>;

/// Where an arriving message goes.
enum Destination {
    Posted(usize),
    Aside(Memory),
}

/// A message that is received in pieces.
struct Arriving {
    header: Header,
    /// Where its receiver reads it, if it does not come in chunks.
    location: Option<Location>,
    destination: Destination,
    moved: usize,
}

/// A message that came before its receive.
struct Unexpected {
    header: Header,
    bytes: Memory,
}

/// Both directions between this rank and one other.
struct Peer {
    /// Posted sends that are not written yet, in order; of the first, whether its opening is, and how many
    /// bytes.
    sends: VecDeque<usize>,
    opened: bool,
    written: usize,
    /// The chunk that is being filled, if it is not full.
    filled: u16,
    /// Sends whose buffer the receiver reads: the message's number and the transfer.
    unread: VecDeque<(u64, usize)>,
    receives: VecDeque<usize>,
    arriving: Option<Arriving>,
    unexpected: VecDeque<Unexpected>,
    /// The user's sends and receives that were posted so far.
    posted: [u64; 2],
    /// Messages sent and received so far.
    sent: u64,
    received: u64,
    /// Of the sent ones, those that are known to be taken.
    taken: u64,
    chunks: Chunks,
    /// Where the last message that was read in the peer's own memory lay.
    mapped: Mapped,
}

impl Peer {
    fn new(chunks: Chunks) -> Peer {
        Peer {
            sends: VecDeque::new(),
            opened: false,
            written: 0,
            filled: 0,
            unread: VecDeque::new(),
            receives: VecDeque::new(),
            arriving: None,
            unexpected: VecDeque::new(),
            posted: [0; 2],
            sent: 0,
            received: 0,
            taken: 0,
            chunks,
            mapped: Mapped::NONE,
        }
    }

    /// Whether the mailbox has room for an opening.
    fn has_slot(&mut self, mailbox: &Mailbox) -> bool {
        if self.sent - self.taken >= MAIL_SLOTS as u64 {
            self.taken = mailbox.taken_messages.get();
        }
        self.sent - self.taken < MAIL_SLOTS as u64
    }

    fn is_idle(&self) -> bool {
        self.sends.is_empty() && self.unread.is_empty() && self.receives.is_empty() && self.arriving.is_none()
    }
}

/// One rank's messages. A copy of its process, made by fork, leaves them alone: they are the parent's, and the lock may be
/// held by a thread that the copy has not.
pub(crate) struct Messages {
    inner: Mutex<Inner>,
}

struct Inner {
    posted: Vec<Option<Posted>>,
    free: Vec<usize>,
    peers: Vec<Peer>,
    /// Peers with something to do.
    active: Vec<usize>,
    /// The user's messages so far.
    announced: u64,
}

impl Messages {
    pub fn new(rank: usize, layout: &Layout) -> Messages {
        let peer = |peer| Peer::new(Chunks::new(rank, peer, layout.mail_chunks));
        let peers = (0..layout.ranks).map(peer).collect();
        let inner = Inner { posted: Vec::new(), free: Vec::new(), peers, active: Vec::new(), announced: 0 };
        Messages { inner: Mutex::new(inner) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    /// # Safety
    /// As for [`Backend::post`](crate::contract::Backend::post).
    pub unsafe fn post(&self, endpoint: &Endpoint, transfer: Transfer, plane: Plane) -> Result<OperationId> {
        endpoint.check()?;
        self.lock().post(endpoint, transfer, plane)
    }

    /// A user's transfer from its start to its end: under one lock, if it does not take long.
    ///
    /// # Safety
    /// As for [`Backend::recorded_transfer`](crate::contract::Backend::recorded_transfer).
    pub unsafe fn transfer(&self, endpoint: &Endpoint, transfer: Transfer, begun: &dyn Fn()) -> Result<()> {
        endpoint.check()?;
        if transfer.count * transfer.dtype.size() > MESSAGE_COPIED {
            begun();
        }
        let mut inner = self.lock();
        let ticket = inner.post(endpoint, transfer, Plane::User)?;
        if transfer.peer == endpoint.rank && inner.never_comes(endpoint, ticket) {
            let (operation, rank) = (transfer.operation().name(), endpoint.rank);
            return inner.settle(ticket, Err(UsageError::SelfExchange { operation, rank }.into())).map(drop);
        }
        self.wait_from(inner, endpoint, ticket, begun)
    }

    /// Moves all transfers along; whether any is still under way.
    pub fn progress(&self, endpoint: &Endpoint) -> Result<bool> {
        endpoint.check_owner()?;
        let mut inner = self.lock();
        inner.progress(endpoint)?;
        Ok(!inner.active.is_empty())
    }

    /// How much has been sent and received so far, in messages and pieces. The caller has moved them: this is no copy.
    pub fn moved(&self) -> u64 {
        let moved = |peer: &Peer| peer.sent + peer.received + peer.chunks.moved();
        self.lock().peers.iter().map(moved).sum()
    }

    /// Whether the transfer is done; then its ticket is spent.
    pub fn test(&self, endpoint: &Endpoint, ticket: OperationId) -> Result<bool> {
        endpoint.check_owner()?;
        let mut inner = self.lock();
        let outcome = endpoint.check().and_then(|()| inner.progress(endpoint));
        inner.settle(ticket, outcome)
    }

    /// Waits until all of this rank's transfers are done. Their tickets are not spent.
    pub fn finish(&self, endpoint: &Endpoint) -> Result<()> {
        endpoint.check_owner()?;
        let Some(first) = self.lock().under_way() else { return Ok(()) };
        endpoint.wait_long(
            &mut || {
                let mut inner = self.lock();
                inner.progress(endpoint)?;
                Ok(inner.under_way().is_none())
            },
            &|| self.lock().active.clone(),
            &|| self.lock().active.clone(),
            &|| self.lock().under_way().unwrap_or(first),
        )
    }

    pub fn wait(&self, endpoint: &Endpoint, ticket: OperationId, meanwhile: &dyn Fn()) -> Result<()> {
        endpoint.check_owner()?;
        self.wait_from(self.lock(), endpoint, ticket, meanwhile)
    }

    fn wait_from(
        &self,
        mut inner: MutexGuard<'_, Inner>,
        endpoint: &Endpoint,
        ticket: OperationId,
        meanwhile: &dyn Fn(),
    ) -> Result<()> {
        let polls = if endpoint.crowded { MESSAGE_POLLS_CROWDED } else { MESSAGE_POLLS };
        let line = inner.awaited_line(endpoint, ticket);
        for _ in 0..polls {
            let outcome = inner.progress(endpoint);
            if inner.settle(ticket, outcome)? {
                return Ok(());
            }
            meanwhile();
            if let Some(line) = line {
                crate::os::prefetch(line);
            }
            // Who looks too often takes the lines away from the sender, who is still writing them.
            std::hint::spin_loop();
        }
        let waited_for = inner.posted(ticket.0);
        let (peer, subject) = (waited_for.transfer.peer, waited_for.subject());
        drop(inner);
        let waited = endpoint.wait_long(
            &mut || {
                meanwhile();
                let mut inner = self.lock();
                inner.progress(endpoint)?;
                Ok(inner.is_done(ticket))
            },
            // Any message that moves may be what this one's peer waits for; this one needs its peer alone.
            &|| self.lock().active.clone(),
            &|| vec![peer],
            &|| subject,
        );
        self.lock().settle(ticket, waited).map(drop)
    }
}

fn matches(header: &Header, plane: Plane, tag: u32) -> bool {
    header.plane == plane as u8 && header.tag == tag
}

impl Inner {
    fn post(&mut self, endpoint: &Endpoint, transfer: Transfer, plane: Plane) -> Result<OperationId> {
        let number = match plane {
            Plane::User => {
                self.announced += 1;
                endpoint.own().announce_message(self.announced, &record(&transfer, plane));
                let posted = &mut self.peers[transfer.peer].posted;
                let posted = &mut posted[usize::from(matches!(transfer.direction, Direction::Recv(_)))];
                *posted += 1;
                *posted
            }
            // The library's own messages have the number of their collective as tag.
            Plane::Internal => transfer.tag.into(),
        };
        let ticket = self.insert(Posted { transfer, plane, number, done: false });
        let peer = &mut self.peers[transfer.peer];
        match transfer.direction {
            Direction::Send(_) => peer.sends.push_back(ticket),
            Direction::Recv(_) => {
                let found = peer
                    .unexpected
                    .iter()
                    .position(|message| matches(&message.header, plane, transfer.tag))
                    .and_then(|index| peer.unexpected.remove(index));
                match found {
                    Some(message) => {
                        if let Err(error) = self.deliver_unexpected(endpoint, ticket, &message) {
                            let _ = self.settle(OperationId(ticket), Err(error.clone()));
                            return Err(error);
                        }
                    }
                    None => peer.receives.push_back(ticket),
                }
            }
        }
        if !self.active.contains(&transfer.peer) {
            self.active.push(transfer.peer);
        }
        Ok(OperationId(ticket))
    }

    fn insert(&mut self, posted: Posted) -> usize {
        match self.free.pop() {
            Some(index) => {
                self.posted[index] = Some(posted);
                index
            }
            None => {
                self.posted.push(Some(posted));
                self.posted.len() - 1
            }
        }
    }

    fn posted(&self, index: usize) -> &Posted {
        self.posted[index].as_ref().expect("queues hold posted transfers")
    }

    fn is_done(&self, ticket: OperationId) -> bool {
        self.posted(ticket.0).done
    }

    fn finish(&mut self, index: usize) {
        self.posted[index].as_mut().expect("queues hold posted transfers").done = true;
    }

    /// Whether the transfer is done. It is forgotten then, and also on an error: nobody touches its buffer
    /// any more once this has returned.
    fn settle(&mut self, ticket: OperationId, outcome: Result<()>) -> Result<bool> {
        let done = self.is_done(ticket);
        if done || outcome.is_err() {
            let posted = self.posted[ticket.0].take().expect("a ticket is waited for once");
            self.free.push(ticket.0);
            if !done {
                let peer = &mut self.peers[posted.transfer.peer];
                peer.sends.retain(|index| *index != ticket.0);
                peer.receives.retain(|index| *index != ticket.0);
                peer.unread.retain(|(_, index)| *index != ticket.0);
                if peer
                    .arriving
                    .as_ref()
                    .is_some_and(|a| matches!(a.destination, Destination::Posted(index) if index == ticket.0))
                {
                    peer.arriving = None;
                }
            }
        }
        if done { Ok(true) } else { outcome.map(|()| false) }
    }

    /// Whether this rank has sent itself nothing that a receive can get: the thread that could send it waits for the receive.
    fn never_comes(&mut self, endpoint: &Endpoint, ticket: OperationId) -> bool {
        while self.progress(endpoint).is_ok() && !self.is_done(ticket) && !endpoint.has_failed() {
            let own = &self.peers[endpoint.rank];
            if own.sends.is_empty() && own.arriving.is_none() {
                return true;
            }
        }
        false
    }

    /// What is under way, if anything is.
    fn under_way(&self) -> Option<PendingOperation> {
        self.posted.iter().flatten().find(|posted| !posted.done).map(Posted::subject)
    }

    fn progress(&mut self, endpoint: &Endpoint) -> Result<()> {
        let mut i = 0;
        while i < self.active.len() {
            let peer = self.active[i];
            self.write(endpoint, peer);
            self.read(endpoint, peer)?;
            if self.peers[peer].is_idle() {
                self.active.swap_remove(i);
            } else {
                i += 1;
            }
        }
        Ok(())
    }

    /// The second line of the opening that a receive waits for, if its message is expected to reach into it.
    fn awaited_line(&self, endpoint: &Endpoint, ticket: OperationId) -> Option<*const u8> {
        let Transfer { direction: Direction::Recv(_), peer, dtype, count, .. } =
            self.posted(ticket.0).transfer
        else {
            return None;
        };
        let bytes = count * dtype.size();
        (IN_ONE_LINE + 1..=INLINE).contains(&bytes).then(|| {
            let opening = endpoint.channel.mailbox(peer, endpoint.rank).slot(self.peers[peer].received);
            prefetch::second_line(opening)
        })
    }

    // --- sending --------------------------------------------------------------------------------------

    /// Writes as much to a peer as its mailbox takes.
    fn write(&mut self, endpoint: &Endpoint, peer: usize) {
        let mailbox = endpoint.channel.mailbox(endpoint.rank, peer);
        while let Some((number, index)) = self.peers[peer].unread.front().copied() {
            if mailbox.taken_messages.get() < number {
                break;
            }
            self.peers[peer].unread.pop_front();
            self.finish(index);
        }
        while let Some(index) = self.peers[peer].sends.front().copied() {
            // A send that was given up may have stopped half-way: nothing comes behind it.
            if endpoint.has_failed() || !self.write_message(endpoint, peer, index) {
                break;
            }
            self.peers[peer].sends.pop_front();
        }
    }

    /// Writes a message, or what there is room for; whether it is all written.
    fn write_message(&mut self, endpoint: &Endpoint, peer: usize, index: usize) -> bool {
        let mailbox = endpoint.channel.mailbox(endpoint.rank, peer);
        let posted = self.posted(index);
        let (plane, Transfer { direction, tag, dtype, count, .. }) = (posted.plane, posted.transfer);
        let Direction::Send(source) = direction else { unreachable!("the queue holds sends") };
        let bytes = count * dtype.size();
        let state = &mut self.peers[peer];

        if state.opened {
            return self.write_chunks(endpoint, peer, index, source, bytes);
        }
        if !state.has_slot(mailbox) {
            return false;
        }
        let (way, data) = if bytes <= INLINE {
            (Way::Inline, [0; 2])
        } else {
            let location =
                if bytes > MESSAGE_COPIED { endpoint.world.locate(source, bytes) } else { Location::NOWHERE };
            if location.is_readable() {
                (Way::Direct, [location.segment, location.offset])
            } else if bytes <= endpoint.channel.layout.mail_piece {
                let Some(chunk) = state.chunks.take(&endpoint.channel) else { return false };
                let target = endpoint.channel.mail_chunk(endpoint.rank, peer, chunk);
                // SAFETY: the chunk is this rank's; the posted buffer has `bytes` bytes.
                unsafe { crate::reduce::copy(target, source, bytes, false) };
                (Way::Chunk, [chunk.into(), 0])
            } else {
                (Way::Chunks, [0; 2])
            }
        };
        let header = Header {
            tag,
            plane: plane as u8,
            dtype: dtype as u8,
            way: way as u8,
            unused: 0,
            bytes: bytes as u64,
        };
        let slot = mailbox.slot(state.sent);
        state.sent += 1;
        // SAFETY: the slot is free, since the receiver has taken its last message; an opening is what its lines have room for, and so is
        // an inline message.
        unsafe {
            slot.fill(state.sent, |line| {
                let opening = line.cast::<Opening>();
                (&raw mut (*opening).header).write(header);
                let room = (&raw mut (*opening).data).cast::<u64>();
                if way == Way::Inline {
                    crate::reduce::copy_small(room.cast(), source, bytes);
                } else {
                    room.cast::<[u64; 2]>().write(data);
                }
            });
        }
        match way {
            Way::Inline | Way::Chunk => {}
            Way::Direct => {
                let number = state.sent;
                state.unread.push_back((number, index));
                endpoint.announce_progress();
                return true;
            }
            Way::Chunks => {
                state.opened = true;
                return self.write_chunks(endpoint, peer, index, source, bytes);
            }
        }
        endpoint.announce_progress();
        self.finish(index);
        true
    }

    /// Writes what there are chunks for; whether the message is all written.
    fn write_chunks(
        &mut self,
        endpoint: &Endpoint,
        peer: usize,
        index: usize,
        source: *const u8,
        bytes: usize,
    ) -> bool {
        let state = &mut self.peers[peer];
        let layout = &endpoint.channel.layout;
        while state.written < bytes {
            let at = state.written % layout.mail_chunk;
            if at == 0 {
                let Some(chunk) = state.chunks.take(&endpoint.channel) else {
                    endpoint.announce_progress();
                    return false;
                };
                state.filled = chunk;
            }
            let target = endpoint.channel.mail_chunk(endpoint.rank, peer, state.filled);
            let len = piece_len(layout, bytes, state.written);
            // SAFETY: the chunk is this rank's, behind `at`; the posted buffer has `bytes` bytes.
            unsafe { crate::reduce::copy(target.add(at), source.add(state.written), len, false) };
            state.written += len;
            state.chunks.give(&endpoint.channel, state.filled);
        }
        endpoint.announce_progress();
        state.opened = false;
        state.written = 0;
        self.finish(index);
        true
    }

    // --- receiving ------------------------------------------------------------------------------------

    /// Takes what a peer has written, as long as a receive is posted.
    fn read(&mut self, endpoint: &Endpoint, peer: usize) -> Result<()> {
        let mailbox = endpoint.channel.mailbox(peer, endpoint.rank);
        loop {
            if self.peers[peer].arriving.is_some() {
                if !self.read_arriving(endpoint, peer)? {
                    return Ok(());
                }
                continue;
            }
            let state = &mut self.peers[peer];
            if state.receives.is_empty() {
                return Ok(());
            }
            let slot = mailbox.slot(state.received);
            // After a failure it may be the message of a receive that was given up, and never of the next one.
            if !slot.is(state.received + 1) || endpoint.has_failed() {
                return Ok(());
            }
            let opening = slot.payload().cast::<Opening>();
            // SAFETY: stamped with this message, and the sender's again only when it is taken; any value is valid.
            let header = unsafe { (*opening).header };
            // SAFETY: as above.
            let data = unsafe { &(*opening).data };
            if header.way == Way::Chunk as u8 {
                // Its bytes come while their receive is looked for.
                let chunk = endpoint.channel.mail_chunk(peer, endpoint.rank, data[0] as u16);
                crate::os::first_lines(chunk, header.bytes as usize);
            }
            let mut destination = self.destination(endpoint, peer, &header)?;
            let (target, bytes) = (target(&self.posted, &mut destination), header.bytes as usize);
            match Way::from_code(header.way) {
                Way::Inline => {
                    // SAFETY: the target has as many bytes, checked or allocated so; they fit the opening.
                    unsafe { crate::reduce::copy_small(target, data.as_ptr().cast(), bytes) }
                }
                Way::Chunk => {
                    let chunk = data[0] as u16;
                    let source = endpoint.channel.mail_chunk(peer, endpoint.rank, chunk);
                    let len = bytes.min(endpoint.channel.layout.mail_piece);
                    // SAFETY: written before the opening, and this rank's since; the target has as many bytes.
                    unsafe { crate::reduce::copy(target, source, len, false) };
                    self.peers[peer].chunks.keep(&endpoint.channel, chunk);
                }
                way @ (Way::Chunks | Way::Direct) => {
                    let location =
                        (way == Way::Direct).then(|| Location { segment: data[0], offset: data[1] });
                    self.peers[peer].arriving = Some(Arriving { header, location, destination, moved: 0 });
                    continue;
                }
            }
            self.arrived(endpoint, peer, header, destination)?;
        }
    }

    /// The receive that a message is for, or memory to put it aside.
    fn destination(&mut self, endpoint: &Endpoint, peer: usize, header: &Header) -> Result<Destination> {
        match self.take_receive(peer, header) {
            Some(index) => {
                self.check_match(endpoint, peer, index, header)?;
                Ok(Destination::Posted(index))
            }
            None => Ok(Destination::Aside(memory_for(endpoint, peer, header.bytes as usize)?)),
        }
    }

    /// The first of the posted receives that a message matches.
    fn take_receive(&mut self, peer: usize, header: &Header) -> Option<usize> {
        let position = self.peers[peer].receives.iter().position(|index| {
            let posted = self.posted(*index);
            matches(header, posted.plane, posted.transfer.tag)
        });
        self.peers[peer].receives.remove(position?)
    }

    /// The receive must expect what was sent.
    fn check_match(&self, endpoint: &Endpoint, peer: usize, index: usize, header: &Header) -> Result<()> {
        let Posted { transfer, plane, number, .. } = self.posted(index);
        let same_type = header.dtype == transfer.dtype as u8;
        if same_type && header.bytes == (transfer.count * transfer.dtype.size()) as u64 {
            return Ok(());
        }
        let dtype = DType::from_code(header.dtype).unwrap_or(DType::U8);
        let sent = Transfer {
            direction: Direction::Send(std::ptr::null()),
            peer: endpoint.rank,
            dtype,
            count: header.bytes as usize / dtype.size(),
            ..*transfer
        };
        let (ours, theirs) = ((endpoint.rank, record(transfer, *plane)), (peer, record(&sent, *plane)));
        let (lower, higher) = if ours.0 < theirs.0 { (ours, theirs) } else { (theirs, ours) };
        Err(endpoint.fail(&ChannelFailure::Mismatch { sequence: *number, lower, higher }))
    }

    /// Takes what there is of the arriving message; whether that was all.
    fn read_arriving(&mut self, endpoint: &Endpoint, peer: usize) -> Result<bool> {
        let state = &mut self.peers[peer];
        let Some(arriving) = &mut state.arriving else { unreachable!("asked by the caller") };
        let target = target(&self.posted, &mut arriving.destination);
        let bytes = arriving.header.bytes as usize;
        let streaming = bytes >= MESSAGE_STREAMING;
        match arriving.location {
            None => {
                let layout = &endpoint.channel.layout;
                while arriving.moved < bytes {
                    let Some(chunk) = state.chunks.full(&endpoint.channel) else { return Ok(false) };
                    let source = endpoint.channel.mail_chunk(peer, endpoint.rank, chunk);
                    let at = arriving.moved % layout.mail_chunk;
                    let len = piece_len(layout, bytes, arriving.moved);
                    // SAFETY: the sender has written this piece of the chunk, which is this rank's since; in bounds of the target.
                    unsafe {
                        crate::reduce::copy(target.add(arriving.moved), source.add(at), len, streaming)
                    };
                    arriving.moved += len;
                    if at + len == layout.mail_chunk || arriving.moved == bytes {
                        state.chunks.keep(&endpoint.channel, chunk);
                    }
                    endpoint.announce_progress();
                }
            }
            Some(location) => {
                let source = endpoint.world.resolve(location, &mut state.mapped);
                let source = source.map_err(|error| endpoint.fail_refused(&error))?;
                while arriving.moved < bytes {
                    let len = (bytes - arriving.moved).min(MESSAGE_STEP);
                    // SAFETY: the sender keeps its buffer until the message is taken, or until it has
                    // failed and this rank has left the gate; in bounds of the target.
                    endpoint.inside(1, || unsafe {
                        let source = source.add(arriving.moved);
                        crate::reduce::copy(target.add(arriving.moved), source, len, streaming);
                    })?;
                    arriving.moved += len;
                }
            }
        }
        let arrived = state.arriving.take().expect("asked by the caller");
        self.arrived(endpoint, peer, arrived.header, arrived.destination)?;
        Ok(true)
    }

    /// A message is all there: its receive is done, or it waits for one.
    #[inline]
    fn arrived(
        &mut self,
        endpoint: &Endpoint,
        peer: usize,
        header: Header,
        destination: Destination,
    ) -> Result<()> {
        let state = &mut self.peers[peer];
        state.received += 1;
        endpoint.channel.mailbox(peer, endpoint.rank).taken_messages.set(state.received);
        endpoint.announce_progress();
        match destination {
            Destination::Posted(index) => self.finish(index),
            Destination::Aside(bytes) => {
                let message = Unexpected { header, bytes };
                // Its receive may have been posted while it came.
                match self.take_receive(peer, &header) {
                    Some(index) => self.deliver_unexpected(endpoint, index, &message)?,
                    None => self.peers[peer].unexpected.push_back(message),
                }
            }
        }
        Ok(())
    }

    /// Gives a message that was put aside to its receive.
    fn deliver_unexpected(&mut self, endpoint: &Endpoint, ticket: usize, message: &Unexpected) -> Result<()> {
        let transfer = self.posted(ticket).transfer;
        self.check_match(endpoint, transfer.peer, ticket, &message.header)?;
        let Direction::Recv(target) = transfer.direction else { unreachable!("a receive") };
        // SAFETY: the target has as many bytes as were sent, just checked; the message has arrived.
        unsafe { crate::reduce::copy(target, message.bytes.as_ptr().cast(), message.bytes.len(), false) };
        self.finish(ticket);
        Ok(())
    }
}

/// Bytes of the next piece of a message in chunks, of which `moved` are moved: a sixteenth of the message, as a power of two, since each piece
/// costs as much as copying some KiB between cores that share no cache.
fn piece_len(layout: &Layout, bytes: usize, moved: usize) -> usize {
    let piece = (bytes / 16).next_power_of_two().clamp(layout.mail_piece, layout.mail_chunk);
    piece.min(bytes - moved)
}

/// Where a message is written.
fn target(posted: &[Option<Posted>], destination: &mut Destination) -> *mut u8 {
    match destination {
        Destination::Aside(bytes) => bytes.as_mut_ptr().cast(),
        Destination::Posted(index) => {
            match posted[*index].as_ref().expect("queues hold posted transfers").transfer.direction {
                Direction::Recv(target) => target,
                Direction::Send(_) => unreachable!("the queue holds receives"),
            }
        }
    }
}

/// Namespace for a message that nobody expects.
fn memory_for(endpoint: &Endpoint, peer: usize, bytes: usize) -> Result<Memory> {
    let mut memory = Memory::new();
    memory.try_reserve_exact(bytes).map_err(|_| {
        let why = format!(
            "a message of {bytes} bytes from rank {peer} has come before its receive: post the receive first, send less at \
             once, or free memory"
        );
        endpoint.fail_refused(&Error::system("memory for a message", std::io::ErrorKind::OutOfMemory.into(), why))
    })?;
    // SAFETY: there is room, and bytes that may be anything need not be written.
    unsafe { memory.set_len(bytes) };
    Ok(memory)
}

/// A transfer as errors show it: a message, or a block of the collective that it carries out.
fn record(transfer: &Transfer, plane: Plane) -> Record {
    let message = transfer.operation();
    let (operation, counts) = match plane {
        Plane::User => (message, u64::from(transfer.tag)),
        Plane::Internal => (Operation::AllToAllV, message as u64),
    };
    Record {
        operation,
        dtype: transfer.dtype,
        reduction: ReductionCode::Sum,
        config: 0,
        root: transfer.peer as u32,
        count: transfer.count as u64,
        counts,
    }
}
