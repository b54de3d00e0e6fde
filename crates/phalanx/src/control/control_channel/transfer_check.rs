//! Checked mode: both ends of a message tell each other what they call, before either of them enqueues it.

use super::{AnnouncedCall, Connection, ControlChannel};
use crate::contract::{Direction, Operation, OperationId, Transfer};
use crate::types::dtype::DType;
use crate::types::error::Result;

/// What goes each way.
type Words = [u64; AnnouncedCall::WORDS];

/// One end of a message, which has told the other what it calls, and is told the same by it.
pub(crate) struct TransferCheck {
    peer: usize,
    /// Ours and theirs, in a box: the transfers have it until both are done, and keep it if they fail.
    words: *mut [Words; 2],
    /// Of the halves that are under way.
    tickets: [Option<OperationId>; 2],
}

impl ControlChannel {
    /// Tells a peer of a message with it, and lets it tell; does not wait. Both offer their messages with each other in one order.
    ///
    /// `None` for a message to oneself, and between hosts, where ranks tell each other a few words, and tell them to all.
    pub fn offer(&self, own: &AnnouncedCall, way: Connection) -> Result<Option<TransferCheck>> {
        let (endpoint, peer) = (self.meetings.endpoint(), own.record.root as usize);
        if peer == endpoint.rank || !endpoint.shares_memory() {
            return Ok(None);
        }
        // Only the two ends of one message have these tags.
        let of_block = if own.record.operation == Operation::AllToAllV { 2 } else { 0 };
        let tag = |end: Connection| of_block + u32::from(end == Connection::In);
        let words = Box::into_raw(Box::new([own.words(), Words::default()]));
        let [ours, theirs] = [0, 1].map(|half| words.cast::<Words>().wrapping_add(half).cast::<u8>());
        let half =
            |direction, end| Transfer::host(direction, peer, tag(end), DType::U64, AnnouncedCall::WORDS);
        // SAFETY: nobody else has the box until both are done.
        let tickets = unsafe {
            [
                Some(self.meetings.post(half(Direction::Send(ours.cast_const()), way))?),
                Some(self.meetings.post(half(Direction::Recv(theirs), way.reverse()))?),
            ]
        };
        Ok(Some(TransferCheck { peer, words, tickets }))
    }

    /// Whether the other end has said what it calls: the verdict if that is another type or count. Moves all offers of this
    /// communicator along; it is not asked about the same one again after it has.
    pub fn settle(&self, offer: &mut TransferCheck) -> Result<bool> {
        for ticket in &mut offer.tickets {
            if let Some(under_way) = *ticket {
                if !self.meetings.test(under_way)? {
                    return Ok(false);
                }
                *ticket = None;
            }
        }
        // SAFETY: `offer` made the box, and both transfers are done with it; nobody asks again.
        let subjects = unsafe { Box::from_raw(offer.words) }.map(AnnouncedCall::from_words);
        let [Some(ours), Some(theirs)] = subjects else { return Ok(true) };
        let arguments = |subject: &AnnouncedCall| (subject.record.dtype, subject.record.count);
        if arguments(&ours) == arguments(&theirs) {
            return Ok(true);
        }
        let (ours, theirs) = ((self.endpoint.rank, ours), (offer.peer, theirs));
        let (lower, higher) = if ours.0 < theirs.0 { (ours, theirs) } else { (theirs, ours) };
        Err(self.reject(lower, higher))
    }
}
