//! Messages between ranks of one host: they go through the communicator's part there.

use super::UcxComm;
use super::hosts::Hosts;
use crate::contract::{Envelope, OperationId, Transfer, Wanted};
use crate::control::host_channel::HostChannel;
use crate::os::RunInstant;
use crate::types::error::Result;

impl UcxComm {
    /// The part on this host, if it has several ranks here.
    fn part(&self) -> Option<(&Hosts, &dyn HostChannel)> {
        let hosts = self.hosts.as_ref()?;
        Some((hosts, &**hosts.channel.as_ref()?))
    }

    /// Whether messages to and from a rank stay on this host. Those to this rank itself are UCX's.
    pub(super) fn is_here(&self, peer: usize) -> bool {
        peer != self.endpoint.rank && self.part().is_some_and(|(hosts, _)| hosts.of_own().contains(&peer))
    }

    fn expect_part(&self) -> (&Hosts, &dyn HostChannel) {
        self.part().expect("a message of this host goes through its part")
    }

    /// Posts a message; answers its number in the part.
    ///
    /// # Safety
    /// As for [`Backend::post`](crate::contract::Backend::post).
    pub(super) unsafe fn post_on_host(&self, transfer: Transfer) -> Result<OperationId> {
        let (hosts, part) = self.expect_part();
        let transfer = Transfer { peer: hosts.place_of(transfer.peer), ..transfer };
        // SAFETY: the caller's contract.
        let posted = unsafe { part.post(transfer) };
        posted.map_err(|error| self.failed_on_host(hosts, error, None))
    }

    pub(super) fn wait_on_host(&self, id: OperationId, meanwhile: &dyn Fn()) -> Result<()> {
        let (hosts, part) = self.expect_part();
        let done = part.wait(id, &|| {
            self.link.world.worker().progress();
            meanwhile();
        });
        done.map_err(|error| self.failed_on_host(hosts, error, None))
    }

    /// Whether a message is over; gives up as a wait does, if told since when is waited.
    pub(super) fn test_on_host(&self, id: OperationId, since: Option<RunInstant>) -> Result<bool> {
        let (hosts, part) = self.expect_part();
        self.link.world.worker().progress();
        let is_over = match since {
            None => part.test(id),
            Some(since) => part.test_waited(id, since),
        };
        is_over.map_err(|error| self.failed_on_host(hosts, error, None))
    }

    /// Advances messages on this host; answers whether any is under way.
    pub(super) fn advance_on_host(&self) -> Result<bool> {
        let Some((hosts, part)) = self.part() else { return Ok(false) };
        part.progress().map_err(|error| self.failed_on_host(hosts, error, None))
    }

    pub(super) fn finish_on_host(&self) -> Result<()> {
        let Some((hosts, part)) = self.part() else { return Ok(()) };
        part.sync().map_err(|error| self.failed_on_host(hosts, error, None))
    }

    /// Stops the messages on this host. The communicator has failed.
    #[cold]
    pub(super) fn close_on_host(&self) {
        if let Some((_, part)) = self.part() {
            part.endpoint().follow_outer();
            part.abort();
        }
    }

    /// A message of a rank of this host that no receive is for.
    pub(super) fn probe_host(&self, wanted: Wanted) -> Result<Option<Envelope>> {
        let Some((hosts, part)) = self.part() else { return Ok(None) };
        let ranks = hosts.of_own();
        let source = match wanted.source {
            Some(source) if !self.is_here(source) => return Ok(None),
            source => source.map(|source| hosts.place_of(source)),
        };
        let found = part.try_probe(Wanted { source, ..wanted });
        let found = found.map_err(|error| self.failed_on_host(hosts, error, None))?;
        Ok(found.map(|envelope| Envelope { source: ranks[envelope.source], ..envelope }))
    }
}
