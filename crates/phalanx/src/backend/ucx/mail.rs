//! Matching of messages and receives. UCX hands over each message with its header; nothing here calls UCX.
//!
//! A message is for a receive of its channel, source, kind, number and tag. Messages of the user have tags only, and one peer's are
//! matched in the order in which they were sent: UCX may hand over a short message before a long one that was sent first.

use super::inbox::Inbox;
use crate::contract::{Envelope, Wanted};
use crate::control::segment::SegmentId;
use crate::types::dtype::unmarked;
use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::c_void;

/// Who has sent a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    User = 0,
    /// A part of a collective.
    Collective = 1,
    /// Set-up of a communicator by its members alone.
    Internal = 2,
    /// The answer to an access to a window.
    Reply = 3,
}

/// What a receive asks of a message, beside its source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Matching {
    pub kind: Kind,
    /// Of the collective, or of the window, else 0.
    pub number: u64,
    pub tag: u64,
}

/// What travels in front of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub(super) struct Header {
    /// Secret of the world: a message without it is a stranger's.
    pub key: [u64; 2],
    pub channel: SegmentId,
    /// Rank in the channel.
    pub source: u32,
    pub kind: u8,
    pub dtype: u8,
    pub unused: u16,
    pub number: u64,
    pub tag: u64,
    /// Number of this message among the user's from this source to this reader, from 1.
    pub order: u64,
    /// Bytes, marked with the type: see [`DType::mark`](crate::types::dtype::DType::mark).
    pub marked: u64,
    /// Fingerprint of the collectives of the sender up to this one.
    pub history: u64,
    /// Bits of the sender's factor in a pre-multiplied sum, or of what an element was before an access.
    pub factor: u64,
}

impl Header {
    pub fn bytes(&self) -> usize {
        unmarked(self.dtype, self.marked) as usize
    }

    fn matches(&self, matching: &Matching) -> bool {
        (self.kind, self.number, self.tag) == (matching.kind as u8, matching.number, matching.tag)
    }

    fn is_of_user(&self) -> bool {
        self.kind == Kind::User as u8
    }
}

/// The data of a message without a receive.
pub(super) enum Body {
    Bytes(Vec<u8>),
    /// UCX's descriptor of data that its sender still has.
    Rendezvous(*mut c_void),
    /// The number of memory aside into which the data is being fetched.
    Aside(usize),
}

/// A message whose sender still has the data, since no receive is for it.
pub(super) struct Unfetched {
    pub channel: SegmentId,
    pub source: usize,
    pub order: u64,
    pub descriptor: *mut c_void,
    pub len: usize,
}

struct Arrival {
    header: Header,
    body: Body,
}

/// A posted receive: where its message goes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Posted {
    pub operation: usize,
    pub matching: Matching,
    pub target: *mut u8,
    pub len: usize,
}

/// What becomes of a receive when its message has come.
#[derive(Debug)]
pub(super) enum Delivery {
    /// The data is in its place.
    Complete,
    /// The data is to be fetched into its place.
    Fetch(*mut c_void),
    /// The data is in memory aside, or on the way there.
    FromAside(usize),
    /// The message has another length. Its data was dropped.
    WrongLength,
}

#[derive(Default)]
struct Source {
    receives: VecDeque<Posted>,
    arrivals: VecDeque<Arrival>,
    /// Messages of the user of which all before have come, too.
    in_order: u64,
}

struct Channel {
    sources: Vec<Source>,
    /// The source that a probe looks at first.
    first_probed: usize,
}

/// All messages that have come and all receives that wait.
pub(super) struct Mail {
    key: [u64; 2],
    channels: HashMap<SegmentId, Channel>,
    /// Messages of channels that this rank has not opened yet.
    early: HashMap<SegmentId, Vec<Arrival>>,
    closed: HashSet<SegmentId>,
    /// Receives whose message has come.
    pub deliveries: Vec<(usize, Header, Delivery)>,
    /// Descriptors of data that nobody receives.
    pub unwanted: Vec<*mut c_void>,
    /// Memory aside that nobody needs any more.
    pub dropped: Vec<usize>,
    pub strangers: u64,
}

impl Mail {
    pub fn new(key: [u64; 2]) -> Mail {
        Mail {
            key,
            channels: HashMap::new(),
            early: HashMap::new(),
            closed: HashSet::new(),
            deliveries: Vec::new(),
            unwanted: Vec::new(),
            dropped: Vec::new(),
            strangers: 0,
        }
    }

    pub fn open(&mut self, id: SegmentId, ranks: usize) {
        let sources = (0..ranks).map(|_| Source::default()).collect();
        self.channels.insert(id, Channel { sources, first_probed: 0 });
        for Arrival { header, body } in self.early.remove(&id).unwrap_or_default() {
            if (header.source as usize) < ranks {
                self.put(header, body);
            }
        }
    }

    /// Drops what has come for a channel, and what still comes. Its receives are cancelled.
    pub fn close(&mut self, id: SegmentId) {
        let channel = self.channels.remove(&id);
        let arrivals =
            channel.into_iter().flat_map(|channel| channel.sources).flat_map(|source| source.arrivals);
        let dropped = arrivals.chain(self.early.remove(&id).unwrap_or_default());
        for arrival in dropped {
            match arrival.body {
                Body::Rendezvous(descriptor) => self.unwanted.push(descriptor),
                Body::Aside(number) => self.dropped.push(number),
                Body::Bytes(_) => {}
            }
        }
        self.closed.insert(id);
    }

    /// Whether a message is one of this world's, for a channel that is not closed.
    pub fn takes(&mut self, header: &Header) -> bool {
        if header.key != self.key {
            self.strangers += 1;
            return false;
        }
        let ranks = self.channels.get(&header.channel).map(|channel| channel.sources.len());
        !self.closed.contains(&header.channel) && ranks.is_none_or(|ranks| (header.source as usize) < ranks)
    }

    /// Takes a message.
    pub fn put(&mut self, header: Header, body: Body) {
        let arrival = Arrival { header, body };
        let Some(channel) = self.channels.get_mut(&header.channel) else {
            return self.early.entry(header.channel).or_default().push(arrival);
        };
        let source = &mut channel.sources[header.source as usize];
        let place = match header.is_of_user() {
            // Behind those that were sent before.
            true => source
                .arrivals
                .partition_point(|other| !other.header.is_of_user() || other.header.order < header.order),
            false => source.arrivals.len(),
        };
        source.arrivals.insert(place, arrival);
        self.match_all(header.channel, header.source as usize);
    }

    /// The receive of a message that overtakes none, if one is posted: the usual case, without a copy aside.
    fn receive_of_next(&mut self, header: &Header) -> Option<Posted> {
        let source = self.channels.get_mut(&header.channel)?.sources.get_mut(header.source as usize)?;
        if header.is_of_user() && (header.order != source.in_order + 1 || !source.arrivals.is_empty()) {
            return None;
        }
        let place = source.receives.iter().position(|posted| header.matches(&posted.matching))?;
        if header.is_of_user() {
            source.in_order += 1;
        }
        source.receives.remove(place)
    }

    /// Posts a receive.
    pub fn post(&mut self, channel: SegmentId, source: usize, posted: Posted) {
        let Some(open) = self.channels.get_mut(&channel) else { return };
        open.sources[source].receives.push_back(posted);
        self.match_all(channel, source);
    }

    /// Withdraws a receive whose message has not come.
    pub fn withdraw(&mut self, channel: SegmentId, source: usize, operation: usize) {
        if let Some(channel) = self.channels.get_mut(&channel) {
            channel.sources[source].receives.retain(|posted| posted.operation != operation);
        }
    }

    fn match_all(&mut self, channel: SegmentId, source: usize) {
        let Some(open) = self.channels.get_mut(&channel) else { return };
        let source = &mut open.sources[source];
        // A copy of a message that was matched before is none in order.
        let next = |source: &Source| {
            let is_next = |arrival: &Arrival| {
                arrival.header.is_of_user() && arrival.header.order == source.in_order + 1
            };
            source.arrivals.iter().any(is_next)
        };
        while next(source) {
            source.in_order += 1;
        }
        let mut index = 0;
        while index < source.receives.len() {
            let (posted, in_order) = (source.receives[index], source.in_order);
            let is_its = |arrival: &Arrival| {
                arrival.header.matches(&posted.matching)
                    && (!arrival.header.is_of_user() || arrival.header.order <= in_order)
            };
            let Some(place) = source.arrivals.iter().position(is_its) else {
                index += 1;
                continue;
            };
            source.receives.remove(index);
            let Some(Arrival { header, body }) = source.arrivals.remove(place) else { continue };
            let delivery = match body {
                Body::Bytes(bytes) => deliver(&posted, &bytes),
                Body::Rendezvous(descriptor) if header.bytes() == posted.len => Delivery::Fetch(descriptor),
                Body::Aside(number) if header.bytes() == posted.len => Delivery::FromAside(number),
                Body::Aside(number) => {
                    self.dropped.push(number);
                    Delivery::WrongLength
                }
                Body::Rendezvous(descriptor) => {
                    self.unwanted.push(descriptor);
                    Delivery::WrongLength
                }
            };
            self.deliveries.push((posted.operation, header, delivery));
        }
    }

    /// The messages of the user whose senders wait for a receive.
    pub fn unfetched(&self) -> Vec<Unfetched> {
        let mut found = Vec::new();
        for (channel, open) in &self.channels {
            for (source, of) in open.sources.iter().enumerate() {
                for Arrival { header, body } in
                    of.arrivals.iter().filter(|arrival| arrival.header.is_of_user())
                {
                    if let Body::Rendezvous(descriptor) = *body {
                        let (order, len) = (header.order, header.bytes());
                        found.push(Unfetched { channel: *channel, source, order, descriptor, len });
                    }
                }
            }
        }
        found
    }

    /// The data of a message goes to memory aside.
    pub fn fetch_aside(&mut self, message: &Unfetched, number: usize) {
        let source =
            self.channels.get_mut(&message.channel).map(|channel| &mut channel.sources[message.source]);
        let of_user = source.into_iter().flat_map(|source| &mut source.arrivals);
        let is_it =
            |arrival: &&mut Arrival| arrival.header.is_of_user() && arrival.header.order == message.order;
        if let Some(arrival) = of_user.into_iter().find(is_it) {
            arrival.body = Body::Aside(number);
        }
    }

    /// A message of the user that no receive is for. Each time it begins with another source, so that all get their turn.
    pub fn probe(&mut self, channel: SegmentId, wanted: Wanted) -> Option<Envelope> {
        let open = self.channels.get_mut(&channel)?;
        let (ranks, first) = (open.sources.len(), open.first_probed);
        for source in (0..ranks).map(|step| (first + step) % ranks) {
            let of = &open.sources[source];
            let is_wanted = |arrival: &&Arrival| {
                let header = &arrival.header;
                header.is_of_user()
                    && header.order <= of.in_order
                    && wanted.includes(source, header.tag as u32)
            };
            if let Some(Arrival { header, .. }) = of.arrivals.iter().find(is_wanted) {
                let found = Envelope { source, tag: header.tag as u32, bytes: header.bytes() };
                open.first_probed = source + 1;
                return Some(found);
            }
        }
        None
    }
}

/// Puts a message to the place of its receive.
fn deliver(posted: &Posted, data: &[u8]) -> Delivery {
    if data.len() != posted.len {
        return Delivery::WrongLength;
    }
    if !data.is_empty() {
        // SAFETY: the place has room for so many bytes until the receive is complete, says whoever posted it.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), posted.target, data.len()) };
    }
    Delivery::Complete
}

/// # Safety
/// So many bytes can be read there.
unsafe fn slice<'a>(data: *const u8, len: usize) -> &'a [u8] {
    // SAFETY: the caller's contract; no bytes may be anywhere.
    if len == 0 { &[] } else { unsafe { std::slice::from_raw_parts(data, len) } }
}

impl Inbox for Mail {
    type Header = Header;

    fn count_stranger(&mut self) {
        self.strangers += 1;
    }

    /// It goes to its place at once, if there is a receive.
    unsafe fn take_eager(&mut self, header: Header, data: *const u8, len: usize) {
        if !self.takes(&header) || header.bytes() != len {
            return;
        }
        // SAFETY: the caller's contract.
        let data = unsafe { slice(data, len) };
        if let Some(posted) = self.receive_of_next(&header) {
            let delivery = deliver(&posted, data);
            return self.deliveries.push((posted.operation, header, delivery));
        }
        self.put(header, Body::Bytes(data.to_vec()));
    }

    fn take_rendezvous(&mut self, header: Header, descriptor: *mut c_void, len: usize) -> bool {
        let is_kept = self.takes(&header) && header.bytes() == len;
        if is_kept {
            self.put(header, Body::Rendezvous(descriptor));
        }
        is_kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::dtype::DType;

    const KEY: [u64; 2] = [1, 2];
    const CHANNEL: SegmentId = 7;

    fn message(kind: Kind, tag: u64, order: u64, bytes: usize) -> Header {
        Header {
            key: KEY,
            channel: CHANNEL,
            source: 1,
            kind: kind as u8,
            dtype: DType::U8.code(),
            unused: 0,
            number: 0,
            tag,
            order,
            marked: bytes as u64,
            history: 0,
            factor: 0,
        }
    }

    fn receive(operation: usize, tag: u64, target: &mut [u8]) -> Posted {
        let matching = Matching { kind: Kind::User, number: 0, tag };
        Posted { operation, matching, target: target.as_mut_ptr(), len: target.len() }
    }

    fn open() -> Mail {
        let mut mail = Mail::new(KEY);
        mail.open(CHANNEL, 2);
        mail
    }

    fn delivered(mail: &mut Mail) -> Vec<usize> {
        mail.deliveries.drain(..).map(|(operation, ..)| operation).collect()
    }

    #[test]
    fn a_short_message_does_not_overtake_a_long_one() {
        let mut mail = open();
        let (mut first, mut second) = ([0u8; 1], [0u8; 1]);
        mail.post(CHANNEL, 1, receive(0, 5, &mut first));
        mail.post(CHANNEL, 1, receive(1, 5, &mut second));
        mail.put(message(Kind::User, 5, 2, 1), Body::Bytes(vec![2]));
        assert!(delivered(&mut mail).is_empty());
        let data = [1u8];
        // SAFETY: one byte.
        unsafe { mail.take_eager(message(Kind::User, 5, 1, 1), data.as_ptr(), 1) };
        assert_eq!(delivered(&mut mail), [0, 1]);
        assert_eq!((first, second), ([1], [2]));
    }

    #[test]
    fn tags_are_matched_in_any_order_and_found_by_a_probe() {
        let mut mail = open();
        mail.put(message(Kind::User, 1, 1, 3), Body::Bytes(vec![1; 3]));
        mail.put(message(Kind::User, 2, 2, 1), Body::Bytes(vec![2]));
        mail.put(message(Kind::User, 9, 4, 1), Body::Bytes(vec![9]));
        let any = Wanted { source: None, tag: None };
        assert_eq!(mail.probe(CHANNEL, any), Some(Envelope { source: 1, tag: 1, bytes: 3 }));
        let tag = |tag| Wanted { source: None, tag: Some(tag) };
        assert!(mail.probe(CHANNEL, tag(2)).is_some());
        assert!(mail.probe(CHANNEL, tag(9)).is_none(), "the third has not come");
        let mut target = [0u8; 1];
        mail.post(CHANNEL, 1, receive(0, 2, &mut target));
        assert_eq!((delivered(&mut mail), target), (vec![0], [2]));
    }

    #[test]
    fn other_lengths_strangers_and_closed_channels_deliver_nothing() {
        let mut mail = open();
        let mut target = [0u8; 2];
        mail.post(CHANNEL, 1, receive(0, 0, &mut target));
        mail.put(message(Kind::User, 0, 1, 1), Body::Bytes(vec![7]));
        assert!(matches!(mail.deliveries[..], [(0, _, Delivery::WrongLength)]));
        assert_eq!(target, [0; 2]);
        let stranger = Header { key: [0; 2], ..message(Kind::User, 0, 2, 1) };
        assert!(!mail.takes(&stranger) && mail.strangers == 1);
        assert!(!mail.takes(&Header { source: 2, ..message(Kind::User, 0, 2, 1) }));
        mail.close(CHANNEL);
        assert!(!mail.takes(&message(Kind::User, 0, 2, 1)));
    }

    #[test]
    fn a_message_whose_sender_waits_is_fetched_aside_until_its_receive_is_posted() {
        let mut mail = open();
        let descriptor = 64 as *mut c_void;
        mail.put(message(Kind::User, 3, 1, 2), Body::Rendezvous(descriptor));
        let [unfetched] = &mail.unfetched()[..] else { panic!("one message") };
        assert_eq!((unfetched.descriptor, unfetched.len), (descriptor, 2));
        mail.fetch_aside(unfetched, 5);
        assert!(mail.unfetched().is_empty());
        let mut target = [0u8; 2];
        mail.post(CHANNEL, 1, receive(0, 3, &mut target));
        assert!(matches!(mail.deliveries[..], [(0, _, Delivery::FromAside(5))]));
    }

    #[test]
    fn messages_wait_for_their_channel_to_be_opened() {
        let mut mail = Mail::new(KEY);
        let header = message(Kind::User, 0, 1, 1);
        assert!(mail.takes(&header));
        mail.put(header, Body::Bytes(vec![7]));
        mail.open(CHANNEL, 2);
        let mut target = [0u8; 1];
        mail.post(CHANNEL, 1, receive(3, 0, &mut target));
        assert_eq!((delivered(&mut mail), target), (vec![3], [7]));
    }
}
