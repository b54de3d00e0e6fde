//! Taking in new ranks: members and joiners make a new world over a group of their own in the job's store (`control/relay/growth.rs`).
//! The old one works on.

use super::{MeetHere, UcxComm};
use crate::contract::{Backend, BackendKind};
use crate::control::host_channel::HostChannel;
use crate::control::relay::growth::{Growing, Met};
use crate::types::error::{Error, Result};
use crate::watch::deadline::after;
use std::time::{Duration, Instant};

impl UcxComm {
    /// A communicator of these ranks and of so many joiners, and its number.
    ///
    /// # Safety
    /// As for [`Backend::grow`](crate::contract::Backend::grow).
    pub(super) unsafe fn grow_with(&self, joiners: usize) -> Result<(UcxComm, u64)> {
        self.endpoint.check()?;
        let (rank, members) = (self.endpoint.rank, self.endpoint.ranks);
        // SAFETY: the caller's contract.
        let number = unsafe { self.number_growth(joiners) }?;
        let timeout = crate::watch::deadline::of(self.endpoint.timeout());
        let deadline = after(Instant::now(), timeout);
        let (backend, reproducible) = (BackendKind::Ucx, self.link.world.reproducible);
        let growing = Growing { number, backend, reproducible, rank, members, joiners };
        let met = self
            .endpoint
            .world
            .on_hosts()?
            .meet_joiners(&growing, timeout, &|| self.endpoint.check_peers_live())?;
        let left = deadline.saturating_duration_since(Instant::now());
        let grown = UcxComm::grown(met, self.link.world.meet_here.clone(), left)?;
        grown.set_timeout(self.endpoint.timeout());
        Ok((grown, number))
    }

    /// The communicator of ranks that have met: all get it, or all an error after which they may meet again.
    pub fn grown(met: Met, meet_here: MeetHere, timeout: Duration) -> Result<UcxComm> {
        let deadline = after(Instant::now(), timeout);
        let name = format!("grown {:016x}", met.number);
        let Met { store, topology, reproducible, .. } = met;
        let grown = UcxComm::over_store(store, topology, (meet_here, &name), reproducible, timeout);
        let grown = grown.map_err(|error| match error.is_fatal() {
            true => Error::bootstrap(
                format!("the ranks were meeting: {error}"),
                "see that rank's own output; the communicator that was to grow works on",
            ),
            false => error,
        })?;
        grown.endpoint.world.on_hosts()?.settle_growth(deadline.saturating_duration_since(Instant::now()))?;
        Ok(grown)
    }
}
