//! Checked mode (`PHALANX_CHECK`): both ends of a message exchange their announcements before either enqueues the message.

use super::{AnnouncedCall, Connection, ControlChannel};
use crate::contract::{Direction, Operation, OperationId, Transfer};
use crate::types::dtype::DType;
use crate::types::error::Result;

/// An announcement as it is sent.
type Words = [u64; AnnouncedCall::WORDS];

/// An exchange of announcements with the other end of a message, under way.
pub(crate) struct TransferCheck {
    peer: usize,
    /// Our announcement and theirs, in a box. The transfers own it until both are complete; if they fail, it is leaked.
    words: *mut [Words; 2],
    /// The send and the receive, while they are under way.
    operations: [Option<OperationId>; 2],
}

impl ControlChannel {
    /// Starts the exchange of announcements for a message; does not wait. Both ends start their messages in the same order.
    ///
    /// `None` for a message to oneself, and for ranks that share no memory: they can only publish a few words to all.
    pub fn start_transfer_check(
        &self,
        own: &AnnouncedCall,
        way: Connection,
    ) -> Result<Option<TransferCheck>> {
        let (endpoint, peer) = (self.host_channel.endpoint(), own.record.root as usize);
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
        let operations = unsafe {
            [
                Some(self.host_channel.post(half(Direction::Send(ours.cast_const()), way))?),
                Some(self.host_channel.post(half(Direction::Recv(theirs), way.reverse()))?),
            ]
        };
        Ok(Some(TransferCheck { peer, words, operations }))
    }

    /// Whether the other end's announcement has arrived; the failure if its type or count differs. Makes progress on all exchanges of
    /// this communicator. Must not be called again for one that has completed.
    pub fn test_transfer_check(&self, check: &mut TransferCheck) -> Result<bool> {
        for operation in &mut check.operations {
            if let Some(id) = *operation {
                if !self.host_channel.test(id)? {
                    return Ok(false);
                }
                *operation = None;
            }
        }
        // SAFETY: `start_transfer_check` made the box, and both transfers are done with it; nobody asks again.
        let announced_calls = unsafe { Box::from_raw(check.words) }.map(AnnouncedCall::from_words);
        let [Some(ours), Some(theirs)] = announced_calls else { return Ok(true) };
        let arguments = |announced: &AnnouncedCall| (announced.record.dtype, announced.record.count);
        if arguments(&ours) == arguments(&theirs) {
            return Ok(true);
        }
        let (ours, theirs) = ((self.endpoint.rank, ours), (check.peer, theirs));
        let (lower, higher) = if ours.0 < theirs.0 { (ours, theirs) } else { (theirs, ours) };
        Err(self.reject(lower, higher))
    }
}
