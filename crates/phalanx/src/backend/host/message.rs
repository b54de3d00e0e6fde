//! Messages between two ranks: posted transfers, which every wait moves along.
//!
//! Each ordered pair of ranks has a mailbox. A message opens a slot of it (`message/send.rs`). Up to 104 bytes travel in the opening, more in
//! chunks of memory (`chunks.rs`). If the receiver can read the sender's buffer nothing is copied before, and the sender waits until it is
//! read.
//!
//! A receiver takes the messages of a mailbox in order (`message/receive.rs`). One that no posted receive matches (by tag) is put aside on the
//! heap, so that a later receive finds it and the mailbox never blocks.

mod receive;
mod send;

use super::chunks::Chunks;
use super::tunables::{MESSAGE_COPIED, MESSAGE_POLLS, MESSAGE_POLLS_CROWDED};
use crate::contract::{Direction, Envelope, Operation, OperationId, Transfer, Wanted};
use crate::control::endpoint::{Endpoint, Peers, PendingOperation};
use crate::control::flags::{LINE_PAYLOAD, PAIR_PAYLOAD};
use crate::control::layout::{Layout, Mailbox};
use crate::control::prefetch;
use crate::control::record::CallRecord;
use crate::control::tunables::MAIL_SLOTS;
use crate::control::world::{Location, Mapped};
use crate::os::RunInstant;
use crate::os::sync::lock;
use crate::types::dtype::unmarked;
use crate::types::error::{Result, UsageError};
use crate::types::op::ReductionCode;
use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::sync::{Mutex, MutexGuard};

/// Payload of a message's opening that is not taken by its header.
const INLINE: usize = PAIR_PAYLOAD - 16;

/// The part of it that lies in the first of its two lines.
const IN_ONE_LINE: usize = LINE_PAYLOAD - 16;

/// Origin of a message. Messages of the user and of the library (all_to_all_v) never match each other.
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

/// Description of a message, in its opening.
#[derive(Clone, Copy)]
#[repr(C)]
struct Header {
    tag: u32,
    plane: u8,
    dtype: u8,
    way: u8,
    unused: u8,
    /// Bytes, marked with the type: see [`DType::mark`].
    marked: u64,
}

impl Header {
    fn bytes(&self) -> usize {
        unmarked(self.dtype, self.marked) as usize
    }
}

/// Opening of a message, written and read in a slot of the mailbox.
#[repr(C)]
struct MessageOpening {
    header: Header,
    /// The message itself, or where it is.
    data: [u64; INLINE / 8],
}

const _: () = assert!(size_of::<MessageOpening>() == PAIR_PAYLOAD);

/// A posted transfer.
struct PostedTransfer {
    transfer: Transfer,
    plane: Plane,
    /// Of the user's messages to or from that peer, from 1. A block of a collective has the collective's.
    number: u64,
    done: bool,
}

impl PostedTransfer {
    fn subject(&self) -> PendingOperation {
        (self.number, record(&self.transfer, self.plane))
    }
}

/// Bytes of a message without a receive, written once it has arrived.
type MessageBytes = Vec<MaybeUninit<u8>>;

/// Place of an arriving message.
enum Destination {
    Posted(usize),
    Aside(MessageBytes),
}

/// A message that is received in pieces.
struct Arriving {
    header: Header,
    /// The sender's buffer, unless the message comes in chunks.
    location: Option<Location>,
    destination: Destination,
    moved: usize,
}

/// A message that came before its receive.
struct Unexpected {
    header: Header,
    bytes: MessageBytes,
}

/// Both directions between this rank and one other.
struct PeerMessages {
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

impl PeerMessages {
    fn new(chunks: Chunks) -> PeerMessages {
        PeerMessages {
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
    inner: Mutex<MessageState>,
}

struct MessageState {
    posted: Vec<Option<PostedTransfer>>,
    free: Vec<usize>,
    peers: Vec<PeerMessages>,
    /// Peers with something to do.
    active: Vec<usize>,
    /// The peer whose messages a probe looks at first.
    first_probed: usize,
    /// The user's messages so far.
    announced: u64,
    /// Whether this rank has given up: buffers of what was posted are not touched any more.
    closed: bool,
}

impl Messages {
    pub fn new(rank: usize, layout: &Layout) -> Messages {
        let peer = |peer| PeerMessages::new(Chunks::new(rank, peer, layout.mail_chunks));
        let peers = (0..layout.ranks).map(peer).collect();
        let inner = MessageState {
            posted: Vec::new(),
            free: Vec::new(),
            peers,
            active: Vec::new(),
            first_probed: 0,
            announced: 0,
            closed: false,
        };
        Messages { inner: Mutex::new(inner) }
    }

    fn lock(&self) -> MutexGuard<'_, MessageState> {
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
        let id = inner.post(endpoint, transfer, Plane::User)?;
        if transfer.peer == endpoint.rank && inner.never_comes(endpoint, id) {
            let (operation, rank) = (transfer.operation().name(), endpoint.rank);
            return inner.settle(id, Err(UsageError::SelfExchange { operation, rank }.into())).map(drop);
        }
        self.wait_from(inner, endpoint, id, begun)
    }

    /// A message that has come without a receive. Each time it begins with another peer, so that all get their turn.
    pub fn try_probe(&self, endpoint: &Endpoint, wanted: Wanted) -> Result<Option<Envelope>> {
        endpoint.check_owner()?;
        endpoint.check()?;
        self.lock().probe(endpoint, wanted)
    }

    /// Waits for such a message. A peer that has left can no longer send one; the others are waited for.
    pub fn probe(&self, endpoint: &Endpoint, wanted: Wanted) -> Result<Envelope> {
        endpoint.check_owner()?;
        let (mut found, ranks) = (None, endpoint.ranks);
        let record = CallRecord::of_probe(wanted);
        let number = {
            let inner = self.lock();
            wanted.source.map_or(0, |source| inner.peers[source].posted[1]) + 1
        };
        endpoint.wait_long(
            &mut || {
                endpoint.check()?;
                found = self.lock().probe(endpoint, wanted)?;
                Ok(found.is_some())
            },
            &|| Peers::Many((0..ranks).filter(|peer| *peer != endpoint.rank).collect()),
            &|| endpoint.possible_senders(wanted.source),
            &|| (number, record),
        )?;
        Ok(found.expect("waited for"))
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
        let moved = |peer: &PeerMessages| peer.sent + peer.received + peer.chunks.moved();
        self.lock().peers.iter().map(moved).sum()
    }

    /// Stops all transfers, on every thread. The channel has failed.
    pub fn close(&self) {
        self.lock().closed = true;
    }

    /// Whether the transfer is done. If so, its id must not be used again.
    pub fn test(&self, endpoint: &Endpoint, id: OperationId) -> Result<bool> {
        endpoint.check_owner()?;
        let mut inner = self.lock();
        let outcome = endpoint.check().and_then(|()| inner.progress(endpoint));
        inner.settle(id, outcome)
    }

    /// [`test`](Self::test), which looks at the peer and the deadline as a wait does.
    pub fn test_waited(&self, endpoint: &Endpoint, id: OperationId, since: RunInstant) -> Result<bool> {
        if self.test(endpoint, id)? {
            return Ok(true);
        }
        let (peer, subject) = {
            let inner = self.lock();
            let waited_for = inner.posted(id.0);
            (waited_for.transfer.peer, waited_for.subject())
        };
        let Some(reason) = endpoint.reason_to_give_up(peer, &|| subject, since) else { return Ok(false) };
        // As in a wait: a peer that has left may have done its part.
        if self.test(endpoint, id)? {
            return Ok(true);
        }
        let failed = endpoint.give_up(&reason);
        self.lock().settle(id, Err(failed))
    }

    /// Waits until all of this rank's transfers are done. Their ids stay valid.
    pub fn finish(&self, endpoint: &Endpoint) -> Result<()> {
        endpoint.check_owner()?;
        let Some(first) = self.lock().under_way() else { return Ok(()) };
        endpoint.wait_long(
            &mut || {
                let mut inner = self.lock();
                inner.progress(endpoint)?;
                Ok(inner.under_way().is_none())
            },
            &|| Peers::Many(self.lock().active.clone()),
            &|| Peers::Many(self.lock().active.clone()),
            &|| self.lock().under_way().unwrap_or(first),
        )
    }

    pub fn wait(&self, endpoint: &Endpoint, id: OperationId, meanwhile: &dyn Fn()) -> Result<()> {
        endpoint.check_owner()?;
        self.wait_from(self.lock(), endpoint, id, meanwhile)
    }

    fn wait_from(
        &self,
        mut inner: MutexGuard<'_, MessageState>,
        endpoint: &Endpoint,
        id: OperationId,
        meanwhile: &dyn Fn(),
    ) -> Result<()> {
        let polls = if endpoint.crowded { MESSAGE_POLLS_CROWDED } else { MESSAGE_POLLS };
        let line = inner.awaited_line(endpoint, id);
        for _ in 0..polls {
            let outcome = inner.progress(endpoint);
            if inner.settle(id, outcome)? {
                return Ok(());
            }
            meanwhile();
            if let Some(line) = line {
                crate::os::prefetch(line);
            }
            // Polling more often would take the lines away from a sender that is still writing them.
            std::hint::spin_loop();
        }
        let waited_for = inner.posted(id.0);
        let (peer, subject) = (waited_for.transfer.peer, waited_for.subject());
        drop(inner);
        let waited = endpoint.wait_long(
            &mut || {
                meanwhile();
                let mut inner = self.lock();
                inner.progress(endpoint)?;
                Ok(inner.is_done(id))
            },
            // Any message that moves may be what this one's peer waits for; this one needs its peer alone.
            &|| Peers::Many(self.lock().active.clone()),
            &|| Peers::One([peer]),
            &|| subject,
        );
        self.lock().settle(id, waited).map(drop)
    }
}

fn matches(header: &Header, plane: Plane, tag: u32) -> bool {
    header.plane == plane as u8 && header.tag == tag
}

impl MessageState {
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
        let id = self.insert(PostedTransfer { transfer, plane, number, done: false });
        let peer = &mut self.peers[transfer.peer];
        match transfer.direction {
            Direction::Send(_) => peer.sends.push_back(id),
            Direction::Recv(_) => {
                let found = peer
                    .unexpected
                    .iter()
                    .position(|message| matches(&message.header, plane, transfer.tag))
                    .and_then(|index| peer.unexpected.remove(index));
                match found {
                    Some(message) => {
                        if let Err(error) = self.deliver_unexpected(endpoint, id, &message) {
                            let _ = self.settle(OperationId(id), Err(error.clone()));
                            return Err(error);
                        }
                    }
                    None => peer.receives.push_back(id),
                }
            }
        }
        if !self.active.contains(&transfer.peer) {
            self.active.push(transfer.peer);
        }
        Ok(OperationId(id))
    }

    fn probe(&mut self, endpoint: &Endpoint, wanted: Wanted) -> Result<Option<Envelope>> {
        self.progress(endpoint)?;
        let (ranks, first) = (endpoint.ranks, self.first_probed);
        for peer in (0..ranks).map(|step| (first + step) % ranks) {
            if wanted.source.is_some_and(|source| source != peer) {
                continue;
            }
            if let Some(found) = self.look(endpoint, peer, wanted)? {
                self.first_probed = peer + 1;
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    fn insert(&mut self, posted: PostedTransfer) -> usize {
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

    fn posted(&self, index: usize) -> &PostedTransfer {
        self.posted[index].as_ref().expect("queues hold posted transfers")
    }

    fn is_done(&self, id: OperationId) -> bool {
        self.posted(id.0).done
    }

    fn finish(&mut self, index: usize) {
        self.posted[index].as_mut().expect("queues hold posted transfers").done = true;
    }

    /// Whether the transfer is done. It is forgotten then, and also on an error: nobody touches its buffer
    /// any more once this has returned.
    fn settle(&mut self, id: OperationId, outcome: Result<()>) -> Result<bool> {
        let done = self.is_done(id);
        if done || outcome.is_err() {
            let posted = self.posted[id.0].take().expect("a message is waited for once");
            self.free.push(id.0);
            if !done {
                let peer = &mut self.peers[posted.transfer.peer];
                peer.sends.retain(|index| *index != id.0);
                peer.receives.retain(|index| *index != id.0);
                peer.unread.retain(|(_, index)| *index != id.0);
                if peer
                    .arriving
                    .as_ref()
                    .is_some_and(|a| matches!(a.destination, Destination::Posted(index) if index == id.0))
                {
                    peer.arriving = None;
                }
            }
        }
        if done { Ok(true) } else { outcome.map(|()| false) }
    }

    /// Whether a receive from this rank itself can never complete: no send is posted, and the thread that could post one waits here.
    fn never_comes(&mut self, endpoint: &Endpoint, id: OperationId) -> bool {
        while self.progress(endpoint).is_ok() && !self.is_done(id) && !endpoint.has_failed() {
            let own = &self.peers[endpoint.rank];
            if own.sends.is_empty() && own.arriving.is_none() {
                return true;
            }
        }
        false
    }

    /// A transfer that is under way, if there is one.
    fn under_way(&self) -> Option<PendingOperation> {
        self.posted.iter().flatten().find(|posted| !posted.done).map(PostedTransfer::subject)
    }

    fn progress(&mut self, endpoint: &Endpoint) -> Result<()> {
        if self.closed {
            return endpoint.check();
        }
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
    fn awaited_line(&self, endpoint: &Endpoint, id: OperationId) -> Option<*const u8> {
        let Transfer { direction: Direction::Recv(_), peer, dtype, count, .. } = self.posted(id.0).transfer
        else {
            return None;
        };
        let bytes = count * dtype.size();
        (IN_ONE_LINE + 1..=INLINE).contains(&bytes).then(|| {
            let opening = endpoint.channel.mailbox(peer, endpoint.rank).slot(self.peers[peer].received);
            prefetch::second_line(opening)
        })
    }
}

/// Bytes of the next piece of a message in chunks, of which `moved` are moved: a sixteenth of the message, as a power of two, since each piece
/// costs as much as copying some KiB between cores that share no cache.
fn piece_len(layout: &Layout, bytes: usize, moved: usize) -> usize {
    let piece = (bytes / 16).next_power_of_two().clamp(layout.mail_piece, layout.mail_chunk);
    piece.min(bytes - moved)
}

/// A transfer as errors show it: a message, or a block of the collective that it carries out.
fn record(transfer: &Transfer, plane: Plane) -> CallRecord {
    let message = transfer.operation();
    let (operation, counts) = match plane {
        Plane::User => (message, u64::from(transfer.tag)),
        Plane::Internal => (Operation::AllToAllV, message as u64),
    };
    CallRecord {
        operation,
        dtype: transfer.dtype,
        reduction: ReductionCode::Sum,
        config: 0,
        root: transfer.peer as u32,
        count: transfer.count as u64,
        counts,
    }
}
