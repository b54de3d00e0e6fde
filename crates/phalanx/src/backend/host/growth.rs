//! Taking in new ranks: all meet in a new region of this host; ranks of several hosts, which are a control channel, in the job's store.

use super::HostComm;
use crate::contract::{Backend, BackendKind, Call, Operation};
use crate::control::endpoint::Endpoint;
use crate::control::host_channel::HostChannel;
use crate::control::join::Growth;
use crate::control::relay::growth::{Growing, Met};
use crate::types::MAX_HOST_RANKS;
use crate::types::error::{Error, Result, UsageError};
use crate::watch::deadline::after;
use std::time::{Duration, Instant};

impl HostComm {
    /// An error if these ranks cannot take in so many processes.
    pub(super) fn check_joiners(&self, joiners: usize) -> Result<()> {
        let (world, ranks) = (&self.endpoint.world, self.endpoint.ranks);
        if !world.is_processes() {
            return world.on_hosts()?.check_growth(ranks, joiners);
        }
        let world_size = ranks.saturating_add(joiners);
        match world_size > MAX_HOST_RANKS {
            true => Err(UsageError::WorldSize { world_size, limit: MAX_HOST_RANKS }.into()),
            false => Ok(()),
        }
    }

    /// A communicator of these ranks and of so many joiners, and its number.
    ///
    /// # Safety
    /// As for [`Backend::grow`].
    pub(super) unsafe fn grow_with(&self, joiners: usize, backend: BackendKind) -> Result<(HostComm, u64)> {
        self.endpoint.check()?;
        self.check_joiners(joiners)?;
        let (rank, members) = (self.endpoint.rank, self.endpoint.ranks);
        // SAFETY: the caller's contract.
        let number = unsafe { self.number_growth(joiners) }?;
        let timeout = crate::watch::deadline::of(self.timeout());
        let Some(job) = self.endpoint.world.job() else {
            let growing = Growing { number, backend, reproducible: false, rank, members, joiners };
            let deadline = after(Instant::now(), timeout);
            let met = self
                .endpoint
                .world
                .on_hosts()?
                .meet_joiners(&growing, timeout, &|| self.endpoint.check_peers_live())?;
            let grown = HostComm::grown(met, deadline.saturating_duration_since(Instant::now()))?;
            grown.set_timeout(self.timeout());
            return Ok((grown, number));
        };
        let growth = Growth { job: job.to_owned(), backend, number, rank, members, joiners };
        let grown = growth.meet(timeout).map(|met| {
            let ranks = (0..members + joiners).collect();
            (Endpoint::attach(met.world, met.channel, rank, ranks, self.timeout()), met.number)
        });
        let mut all = vec![0u64; members];
        let call = Call { root: joiners, ..Call::empty(Operation::Grow) };
        // A joiner may have died when some members had met it already: all go on in the new world, or none.
        // SAFETY: the caller's contract.
        unsafe { self.all_gather_words_in(call, &[u64::from(grown.is_ok())], &mut all) }?;
        let (grown, number) = grown?;
        if let Some(other) = all.iter().position(|met| *met == 0) {
            return Err(Error::bootstrap(
                format!("rank {other} has not met the joiners"),
                "see its error; this communicator works on, and can grow again",
            ));
        }
        Ok((HostComm::new(grown), number))
    }

    /// The control channel of ranks on several hosts that have met: all get it, or all an error after which they may meet again.
    pub fn grown(met: Met, timeout: Duration) -> Result<HostComm> {
        let deadline = after(Instant::now(), timeout);
        let grown = HostComm::new(Endpoint::over(met.store, met.rank, met.topology, timeout)?);
        grown.endpoint.world.on_hosts()?.settle_growth(deadline.saturating_duration_since(Instant::now()))?;
        Ok(grown)
    }
}
