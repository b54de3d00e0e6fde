//! The messages of a communicator: what was posted, in which order, and how far each is.

use crate::contract::{Blocks, Call, Direction, OperationId, Transfer};
use crate::control::record::CallRecord;
use crate::types::error::Result;
use phalanx_sys::mpi::Handle;

/// Messages that are under way, or complete and not taken.
#[derive(Default)]
pub(crate) struct MpiMessages {
    /// Indexed by operation id.
    pub posted: Vec<Option<MpiTransfer>>,
    free: Vec<usize>,
    pub peers: Vec<PeerMessages>,
}

/// Messages between this rank and another.
#[derive(Default, Clone)]
pub(crate) struct PeerMessages {
    sent: u64,
    received: u64,
    /// Receives whose message has not fully arrived, in order of posting.
    pub expected: Vec<usize>,
}

pub(crate) struct MpiTransfer {
    pub transfer: Transfer,
    /// Its number among the messages to or from that peer.
    pub sequence: u64,
    pub progress: TransferProgress,
    pub outcome: Result<()>,
}

/// The progress of a message. A long one has several pieces.
pub(crate) enum TransferProgress {
    /// Requests of pieces that MPI is still sending.
    Send {
        first: Option<Handle>,
        rest: Vec<Handle>,
    },
    Recv(PartialReceive),
}

#[derive(Default)]
pub(crate) struct PartialReceive {
    /// Bytes that have arrived.
    pub received: usize,
    /// The piece being received: request and length in bytes.
    pub piece: Option<(Handle, usize)>,
    /// Whether the last piece was matched.
    pub complete: bool,
    /// Memory for a piece that cannot go to the buffer: one of a wrong length, received so that its sender
    /// completes, or one for CUDA memory that MPI does not write to.
    pub aside: Vec<u8>,
}

impl MpiTransfer {
    pub fn is_done(&self) -> bool {
        match &self.progress {
            TransferProgress::Send { first, rest } => first.is_none() && rest.is_empty(),
            TransferProgress::Recv(receive) => receive.complete && receive.piece.is_none(),
        }
    }

    /// Whether MPI uses its buffer.
    pub fn is_held(&self) -> bool {
        match &self.progress {
            TransferProgress::Send { .. } => !self.is_done(),
            TransferProgress::Recv(receive) => receive.piece.is_some(),
        }
    }

    pub fn record(&self) -> CallRecord {
        let operation = self.transfer.operation();
        let Transfer { peer: root, dtype, count, .. } = self.transfer;
        CallRecord::of(&Call { root, dtype, blocks: Blocks::Equal(count), ..Call::empty(operation) })
    }
}

impl MpiMessages {
    pub fn add(&mut self, posted: MpiTransfer) -> OperationId {
        let index = self.free.pop().unwrap_or_else(|| {
            self.posted.push(None);
            self.posted.len() - 1
        });
        if let TransferProgress::Recv(_) = posted.progress {
            self.peers[posted.transfer.peer].expected.push(index);
        }
        self.posted[index] = Some(posted);
        OperationId(index)
    }

    pub fn get(&mut self, index: usize) -> &mut MpiTransfer {
        self.posted[index].as_mut().expect("an operation is asked for until it is done, and not again")
    }

    pub fn take(&mut self, id: OperationId) -> MpiTransfer {
        self.free.push(id.0);
        let posted = self.posted[id.0].take();
        let posted = posted.expect("an operation is asked for until it is done, and not again");
        self.peers[posted.transfer.peer].expected.retain(|expected| *expected != id.0);
        posted
    }

    pub fn next_sequence(&mut self, transfer: &Transfer, ranks: usize) -> u64 {
        self.peers.resize(ranks, PeerMessages::default());
        let peer = &mut self.peers[transfer.peer];
        let count = match transfer.direction {
            Direction::Send(_) => &mut peer.sent,
            Direction::Recv(_) => &mut peer.received,
        };
        *count += 1;
        *count
    }

    /// Whether a receive waits for a message of this peer and tag.
    pub fn expects(&self, peer: usize, tag: u32) -> bool {
        let expected = self.peers.get(peer).into_iter().flat_map(|peer| &peer.expected);
        let mut posted = expected.filter_map(|index| self.posted[*index].as_ref());
        posted.any(|posted| posted.transfer.tag == tag)
    }

    /// Whether a receive is the first of its tag: the next message is for it.
    pub fn is_next(&self, index: usize, transfer: &Transfer) -> bool {
        let expected = &self.peers[transfer.peer].expected;
        let same_tag = |other: &&usize| {
            self.posted[**other].as_ref().is_some_and(|posted| posted.transfer.tag == transfer.tag)
        };
        expected.iter().find(same_tag) == Some(&index)
    }
}
