//! A channel that is the part on this host of a communicator over several hosts: its waits end as that communicator says.
//!
//! The part moves the data inside the host. Who is missing, dead or stopped, and what all ranks are told, is found once, on the outer channel.

use super::diagnosis::is_message;
use super::endpoint::{Endpoint, PendingOperation};
use super::failure::ChannelFailure;
use super::liveness::Liveness;
use super::record::CallRecord;
use crate::os::RunInstant;
use crate::types::error::Result;
use std::sync::Arc;

/// How long a rank has waited in the part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// It yields its core, and will soon be back.
    Short,
    /// It sleeps between looks. Peers that send to it should not have to wait for it.
    Long,
}

/// The channel over several hosts.
pub(crate) struct Outer {
    pub endpoint: Arc<Endpoint>,
    /// For each rank of the part, its rank in the outer channel.
    pub ranks: Vec<usize>,
    /// Lets the outer channel's data move on while a rank waits in the part.
    pub advance: Box<dyn Fn(Wait) + Send + Sync>,
}

impl Outer {
    /// These ranks of the part, as the outer channel numbers them.
    pub fn ranks(&self, of_part: &[usize]) -> Vec<usize> {
        of_part.iter().map(|rank| self.ranks[*rank]).collect()
    }

    /// What a rank waits in, as the outer channel knows it.
    pub fn pending(&self, (number, record): PendingOperation) -> PendingOperation {
        match is_message(&record) {
            true => (number, self.renamed(record)),
            false => {
                self.endpoint.own().last_announced().expect("a part works for an operation of its whole")
            }
        }
    }

    /// A message's record, with the peer's rank in the outer channel.
    pub fn renamed(&self, record: CallRecord) -> CallRecord {
        // A receive from any rank names none.
        let root = self.ranks.get(record.root as usize).map_or(record.root, |rank| *rank as u32);
        CallRecord { root, ..record }
    }

    /// A reason to give up a wait in the part.
    pub fn find_reason(
        &self,
        awaited: &[usize],
        pending: &dyn Fn() -> PendingOperation,
        since: RunInstant,
        liveness: &mut Liveness,
    ) -> Option<ChannelFailure> {
        self.endpoint.find_reason(&self.ranks(awaited), &|| self.pending(pending()), since, liveness)
    }

    /// An error if the outer channel has failed.
    pub fn look(&self) -> Result<()> {
        (self.advance)(Wait::Long);
        self.endpoint.check()
    }
}
